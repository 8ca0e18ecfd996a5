"""Assigns stages to ranks, and makes the compute orders of the named schedules."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain

from parallel3d.schedules.actions import Action, ComputeSchedule, Kind, actions_of

SHAPES = ("loop", "v")


@dataclass(frozen=True)
class StageAssignment:
    """An assignment of a model's stages to ranks: `chunks` stages on each of `ranks` ranks.

    In the shape "loop" stage s is chunk s // p of rank s mod p on p ranks (Narayanan et al. 2021).
    In the shape "v" every other pass over the ranks runs backwards, so that with two chunks the
    first rank holds the first and the last stage (Qi et al. 2023, section 6).

    Raises ValueError for sizes below one.
    """

    ranks: int
    chunks: int = 1
    shape: str = "loop"

    def __post_init__(self) -> None:
        if self.ranks < 1 or self.chunks < 1:
            raise ValueError(f"a pipeline needs a rank and a chunk, not {self}")

    @property
    def stages(self) -> int:
        return self.ranks * self.chunks

    def place(self, stage: int) -> tuple[int, int]:
        """Returns the (rank, chunk) of `stage`."""
        chunk, rank = divmod(stage, self.ranks)
        return (self.ranks - 1 - rank if self._is_upwards(chunk) else rank), chunk

    def stage(self, rank: int, chunk: int) -> int:
        """Returns the stage that is chunk `chunk` of `rank`."""
        return chunk * self.ranks + (self.ranks - 1 - rank if self._is_upwards(chunk) else rank)

    def _is_upwards(self, chunk: int) -> bool:
        return self.shape == "v" and chunk % 2 == 1

    @cached_property
    def places(self) -> tuple[tuple[int, int], ...]:
        """The (rank, chunk) of each stage."""
        return tuple(self.place(stage) for stage in range(self.stages))

    def around(self, rank: int) -> list[tuple[int, _Place | None, _Place | None]]:
        """Returns, for each chunk of `rank`, its stage and that stage's two neighbours.

        The previous neighbour comes first. A neighbour is (rank, chunk), or None beyond the model.
        """
        return [
            (self.stage(rank, c), self.neighbour(rank, c, -1), self.neighbour(rank, c, 1))
            for c in range(self.chunks)
        ]

    def neighbour(self, rank: int, chunk: int, offset: int) -> tuple[int, int] | None:
        """Returns the (rank, chunk) of the next stage (offset +1) or the previous one (-1).

        The result is None beyond the ends of the model.
        """
        stage = self.stage(rank, chunk) + offset
        return self.places[stage] if 0 <= stage < self.stages else None


_Place = tuple[int, int]


# Orders of the named schedules, without messages. Sources:
# GPipe: Huang et al. 2019 (arXiv:1811.06965).
# 1F1B: Narayanan et al. 2020 (arXiv:2006.09503), where it is called PipeDream-Flush.
# Interleaved: Narayanan et al. 2021, section 2.2 (arXiv:2104.04473).
# ZB-H1 and ZB-V: Qi et al. 2023, sections 2.2 and 6 (arXiv:2401.10241).


def gpipe(ranks: int, microbatches: int) -> ComputeSchedule:
    """Orders all forwards and then all backwards, both by micro-batch.

    Backwards in the reverse order would not free more memory. In this order the gradients of
    micro-batches are added in the same order as under 1F1B and in a single process, so the sums are
    bit-identical. On every rank the last backward is that of the last micro-batch, in which the
    reduction of gradients starts.
    """
    order = [*actions_of(Kind.F, 0, microbatches), *actions_of(Kind.B, 0, microbatches)]
    return [order.copy() for _ in range(ranks)]


def one_f_one_b(ranks: int, microbatches: int) -> ComputeSchedule:
    """Orders warm-up forwards, then forwards and backwards in turn, then the remaining backwards.

    A rank holds at most `ranks` - rank micro-batches, which keep it busy until its first gradient
    arrives.
    """
    forwards, backwards = (actions_of(kind, 0, microbatches) for kind in (Kind.F, Kind.B))
    return [in_turn(forwards, backwards, warmup) for warmup in reversed(range(ranks))]


def interleaved(ranks: int, chunks: int, microbatches: int) -> ComputeSchedule:
    """Returns the orders of 1F1B over several chunks per rank.

    A group of micro-batches passes through a chunk before any of them enters the rank's next chunk.
    The groups have `ranks` micro-batches each if `ranks` divides the number of micro-batches.
    Otherwise they are as even as possible, and up to twice as large. Fewer micro-batches than ranks
    form one group. The warm-up lasts until the first group has reached the last stage and its first
    gradient has come back.
    """
    groups = _groups(ranks, microbatches)
    forwards, backwards = (_by_group(kind, groups, chunks) for kind in (Kind.F, Kind.B))
    return [
        in_turn(forwards, backwards, (chunks - 1) * groups[0] + 2 * (ranks - 1 - rank))
        for rank in range(ranks)
    ]


def interleaved_zero_bubble(
    ranks: int, chunks: int, microbatches: int, group: int | None = None
) -> ComputeSchedule:
    """Returns the orders of ZB-H1, over any number of chunks per rank as in `interleaved`.

    Only the gradients of inputs have to travel back before a rank can continue, so the warm-up
    counts a rank's distance from the last rank once instead of twice. Rank r postpones weight
    gradients by r places, so that the last r of them fill idle time at the end. With groups of
    `ranks` micro-batches, no rank holds more activations than 1F1B's first rank. Larger groups,
    given by `group`, hold more and are faster where hops are slow; None means `ranks`.
    """
    groups = _groups(group or ranks, microbatches)
    forwards, inputs, weights = (
        _by_group(kind, groups, chunks) for kind in (Kind.F, Kind.I, Kind.W)
    )
    orders = []
    for rank in range(ranks):
        warmup = min((chunks - 1) * groups[0] + ranks - 1 - rank, len(forwards))
        # Number of weight gradients that lag behind the input gradients.
        late = min(rank, len(forwards) - warmup)
        order = in_turn(forwards[: warmup + late], inputs[:late], warmup)
        order += chain.from_iterable(
            zip(forwards[warmup + late :], inputs[late:], weights, strict=False)
        )
        # No forward is left. The first `rank` input gradients come without a weight gradient; each
        # later one is followed by one.
        done = len(forwards) - warmup
        early = inputs[done:rank]
        order += early
        done += len(early)
        order += chain.from_iterable(zip(inputs[done:], weights[done - rank :], strict=False))
        orders.append(order + weights[max(0, len(inputs) - rank) :])
    return orders


def zero_bubble_v(ranks: int, microbatches: int) -> ComputeSchedule:
    """Returns the orders of ZB-V, in which each rank has two chunks and the stages form a V.

    In the steady state no rank is idle if F, I and W take equal time. With fewer than
    2 · `ranks` - 1 micro-batches, the order is that of 2 · `ranks` - 1 without the missing ones.
    """
    return [
        [step for step in _zbv_rank(ranks, rank, microbatches) if step.microbatch < microbatches]
        for rank in range(ranks)
    ]


def _zbv_rank(ranks: int, rank: int, microbatches: int) -> list[Action]:
    """Returns the order of one rank.

    In `pattern`, "F0" stands for the next forward of chunk 0, and so on.
    """
    # Number of rounds beyond those of the shortest step, which has 2 · ranks - 1 micro-batches.
    steady = max(2 * ranks - 1, microbatches) - (2 * ranks - 1)
    below = ranks - rank
    pattern = (
        ["F0"] * (2 * below - 1)
        + ["F1", "F0"] * rank
        + ["F1", "I1", "W1"] * below
        + ["F0", "I0", "W0", "F1", "I1", "W1"] * (steady + rank)
        + ["I0", "W0", "F1", "I1", "W1"] * (below - 1)  # no forward of chunk 0 is left
        + ["I0", "I1"] * rank
        + ["I0", "W0"] * below
    )
    count = max(2 * ranks - 1, microbatches)
    lines = {
        f"{kind}{chunk}": actions_of(kind, chunk, count)
        for kind in (Kind.F, Kind.I, Kind.W)
        for chunk in (0, 1)
    }
    coming = {word: iter(of) for word, of in lines.items()}
    order = [next(coming[word]) for word in pattern]
    # The remaining weight gradients come at the end, beginning with those of the later chunk.
    return order + list(coming["W1"]) + list(coming["W0"])


def _groups(ranks: int, microbatches: int) -> list[int]:
    """Returns the sizes of the groups of micro-batches, the largest first.

    Groups have `ranks` micro-batches or up to twice as many. There is a single group if there are
    fewer micro-batches than ranks.
    """
    count = max(1, microbatches // ranks)
    size, more = divmod(microbatches, count)
    return [size + 1] * more + [size] * (count - more)


def _by_group(kind: Kind, groups: Sequence[int], chunks: int) -> list[Action]:
    """Orders the actions of one kind by group of micro-batches.

    A group passes through all chunks before the next group starts: forwards from the first chunk to
    the last, and the other kinds from the last to the first.
    """
    order: list[Action] = []
    first, count = 0, sum(groups)
    for size in groups:
        for chunk in range(chunks) if kind == Kind.F else reversed(range(chunks)):
            order += actions_of(kind, chunk, count)[first : first + size]
        first += size
    return order


def in_turn(forwards: Sequence[Action], backwards: Sequence[Action], warmup: int) -> list[Action]:
    """Orders `warmup` forwards, then forwards and backwards in turn, then the other backwards."""
    ahead, backs = min(warmup, len(forwards)), iter(backwards)
    order = list(forwards[:ahead])
    order += chain.from_iterable(zip(forwards[ahead:], backs, strict=False))
    return order + list(backs)
