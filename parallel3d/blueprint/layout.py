"""Computes the (pp, dp, cp, tp) coordinates of a rank, and the ranks of each group."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from typing import NamedTuple

from parallel3d.text import shortened

DIMENSIONS = ("tp", "cp", "dp", "pp")
EXPERT_DIMENSIONS = ("ep", "edp")  # groups of a stage's ranks that are not dimensions of the grid
DEFAULT_ORDER = "tp-cp-dp-pp"


class Coordinates(NamedTuple):
    """The coordinates of a rank, with the slowest dimension of the default order first."""

    pp: int
    dp: int
    cp: int
    tp: int


@dataclass(frozen=True)
class Layout:
    """The grid tp × cp × dp × pp and the order in which ranks fill it.

    A rank is Σ index(d) · stride(d), where the first name in `order` has stride 1. By default
    tensor-parallel ranks are adjacent, so that they share a node's NVLink (Narayanan et al. 2021,
    §3.1).

    Attributes:
        ep: expert-parallel size. The ranks of a pipeline stage, ascending, are cut into runs of ep
            ranks (groups "ep"). Ranks at the same position in their runs hold the same experts
            (groups "edp"). 0 means a model without experts, which has no such groups.
        order: names of the dimensions, the fastest first.
        loops: how often a pipeline's stages loop over its ranks (`Blueprint.looped_layout`); with
            more than one loop the last rank sends to the first.

    Raises ValueError for a size or number of loops below one, an ep that does not divide the ranks
    of a stage, or an `order` that does not name each dimension once.
    """

    tp: int = 1
    pp: int = 1
    dp: int = 1
    cp: int = 1
    ep: int = 0
    order: str = DEFAULT_ORDER
    loops: int = 1

    def __post_init__(self) -> None:
        for name in DIMENSIONS:
            if self.size(name) < 1:
                raise ValueError(f"{name}={self.size(name)} must be at least 1")
        if self.loops < 1:
            raise ValueError(f"loops={self.loops} must be at least 1")
        if self.ep < 0 or (self.ep and self.stage_ranks % self.ep):
            raise ValueError(f"ep={self.ep} must divide the {self.stage_ranks} ranks of a stage")
        if sorted(self.order.split("-")) != sorted(DIMENSIONS):
            raise ValueError(f"order={self.order!r} must name each of {', '.join(DIMENSIONS)} once")

    @property
    def world_size(self) -> int:
        return math.prod(self.size(name) for name in DIMENSIONS)

    @property
    def stage_ranks(self) -> int:
        """Number of ranks of a pipeline stage."""
        return self.tp * self.cp * self.dp

    @property
    def edp(self) -> int:
        """Number of ranks that hold the same experts."""
        return self.stage_ranks // max(self.ep, 1)

    @property
    def dp_cp(self) -> int:
        """Number of ranks with equal parameters, which share gradients and, under ZeRO, states."""
        return self.dp * self.cp

    @property
    def most_copies(self) -> int:
        """Largest number of ranks over which a parameter's gradient is summed."""
        return max(self.dp_cp, self.edp if self.ep else 1)

    @property
    def replica_dim(self) -> str:
        """The name of the group of ranks with equal parameters."""
        return "dp" if self.cp == 1 else "dp_cp"

    @property
    def wraps(self) -> bool:
        """Whether loops add a link from the last rank of a pipeline to the first.

        In a pipeline of two ranks the two are neighbours even without such a link.
        """
        return self.loops > 1 and self.pp > 2

    def size(self, dim: str) -> int:
        return getattr(self, dim)

    def stride(self, dim: str) -> int:
        """Returns the distance in ranks between neighbours along `dim`."""
        names = self.order.split("-")
        return math.prod(self.size(name) for name in names[: names.index(dim)])

    def coordinates(self, rank: int) -> Coordinates:
        if not 0 <= rank < self.world_size:
            raise ValueError(f"rank {rank} is outside of 0..{self.world_size - 1}")
        place = {d: rank // self.stride(d) % self.size(d) for d in DIMENSIONS}
        return Coordinates(**place)

    def named(self, rank: int) -> str:
        """Returns the coordinates of a rank as text: "pp 1, dp 0, tp 3", with cp if it is used."""
        place = self.coordinates(rank)._asdict()
        return ", ".join(f"{dim} {i}" for dim, i in place.items() if dim != "cp" or self.cp > 1)

    def named_groups(self, rank: int) -> list[str]:
        """Returns the groups of a rank as text, like "tp group 4 5", without groups of one rank."""
        dims = (*DIMENSIONS, *EXPERT_DIMENSIONS) if self.ep > 1 else DIMENSIONS
        groups = {dim: self.group_of(rank, dim) for dim in dims if self.size(dim) > 1}
        return [f"{dim} group {shortened(ranks)}" for dim, ranks in groups.items()]

    def group_of(self, rank: int, *dims: str) -> list[int]:
        """Returns the ranks that differ from `rank` only along `dims`, ascending."""
        if dims in (("ep",), ("edp",)):
            return next(ranks for ranks in self.groups(*dims) if rank in ranks)
        place = self.coordinates(rank)
        base = rank - sum(getattr(place, d) * self.stride(d) for d in dims)
        return self._spread(base, dims)

    def groups(self, *dims: str) -> list[list[int]]:
        """Returns every group along `dims`, ordered by first rank; "dp_cp" means dp and cp."""
        if dims in (("ep",), ("edp",)):
            stages = self.groups("tp", "cp", "dp")
            if dims == ("ep",):
                starts = range(0, self.stage_ranks, self.ep)
                return sorted(
                    ranks[i : i + self.ep] for ranks in map(sorted, stages) for i in starts
                )
            return sorted(
                ranks[i :: self.ep] for ranks in map(sorted, stages) for i in range(self.ep)
            )
        dims = tuple(d for dim in dims for d in dim.split("_"))
        others = tuple(d for d in DIMENSIONS if d not in dims)
        return [self._spread(base, dims) for base in self._spread(0, others)]

    def _spread(self, base: int, dims: tuple[str, ...]) -> list[int]:
        ordered = [d for d in reversed(self.order.split("-")) if d in dims]  # slowest first
        steps = [range(0, self.size(d) * self.stride(d), self.stride(d)) for d in ordered]
        return [base + sum(offsets) for offsets in itertools.product(*steps)]
