"""Which rank holds which stage of a pipeline: loops of chunks, or a V."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, lru_cache

SHAPES = ("loop", "v")


@dataclass(frozen=True)
class StageAssignment:
    """Stages over ranks: `chunks` stages on each of `ranks` ranks.

    "loop": stage s lies on rank s mod p as its chunk s // p (Narayanan et al. 2021): what leaves
    the last rank goes on at the first. "v": every other pass over the ranks runs backwards, so that
    with two chunks the first rank holds the first stage and the last, and what reaches the turn
    stays on its rank (Qi et al. 2023, section 6).

    Raises ValueError for sizes below one and for another shape.
    """

    ranks: int
    chunks: int = 1
    shape: str = "loop"

    def __post_init__(self) -> None:
        if self.ranks < 1 or self.chunks < 1:
            raise ValueError(f"a pipeline needs a rank and a chunk, not {self}")
        if self.shape not in SHAPES:
            raise ValueError(f"shape={self.shape!r} must be one of {', '.join(SHAPES)}")

    @property
    def stages(self) -> int:
        return self.ranks * self.chunks

    def place(self, stage: int) -> tuple[int, int]:
        """(rank, chunk) of `stage`."""
        chunk, rank = divmod(stage, self.ranks)
        return (self.ranks - 1 - rank if self._is_upwards(chunk) else rank), chunk

    def stage(self, rank: int, chunk: int) -> int:
        """The stage that `rank` holds as its `chunk`."""
        return chunk * self.ranks + (self.ranks - 1 - rank if self._is_upwards(chunk) else rank)

    def _is_upwards(self, chunk: int) -> bool:
        return self.shape == "v" and chunk % 2 == 1

    @cached_property
    def places(self) -> tuple[tuple[int, int], ...]:
        """(rank, chunk) by stage."""
        return tuple(self.place(stage) for stage in range(self.stages))

    def around(self, rank: int) -> tuple[_Around, ...]:
        """By chunk of `rank`: its stage, and the (rank, chunk) of the stages before and after."""
        return _around(self, rank)

    def neighbour(self, rank: int, chunk: int, offset: int) -> tuple[int, int] | None:
        """(rank, chunk) of the stage `offset` (+1 or -1) from this one; None beyond the model."""
        stage = self.stage(rank, chunk) + offset
        return self.places[stage] if 0 <= stage < self.stages else None


_Place = tuple[int, int]
_Around = tuple[int, _Place | None, _Place | None]


@lru_cache(maxsize=1 << 12)
def _around(placement: StageAssignment, rank: int) -> tuple[_Around, ...]:
    return tuple(
        (
            placement.stage(rank, chunk),
            placement.neighbour(rank, chunk, -1),
            placement.neighbour(rank, chunk, 1),
        )
        for chunk in range(placement.chunks)
    )
