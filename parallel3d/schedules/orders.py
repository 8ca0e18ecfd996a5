"""Stage assignment (which rank holds which stage) and the compute orders of the named schedules."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain

from parallel3d.schedules.actions import Action, ComputeSchedule, Kind, actions_of

SHAPES = ("loop", "v")


@dataclass(frozen=True)
class StageAssignment:
    """Stage assignment: `chunks` stages on each of `ranks` ranks.

    "loop": stage s is chunk s // p of rank s mod p (Narayanan et al. 2021). "v": every other pass
    over the ranks runs backwards, so that with two chunks the first rank holds the first and the
    last stage (Qi et al. 2023, section 6).

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
        """(rank, chunk) by stage."""
        return tuple(self.place(stage) for stage in range(self.stages))

    def around(self, rank: int) -> list[tuple[int, _Place | None, _Place | None]]:
        """Returns, by chunk of `rank`, its stage and the (rank, chunk) before and after it."""
        return [
            (self.stage(rank, c), self.neighbour(rank, c, -1), self.neighbour(rank, c, 1))
            for c in range(self.chunks)
        ]

    def neighbour(self, rank: int, chunk: int, offset: int) -> tuple[int, int] | None:
        """Returns the (rank, chunk) `offset` (+1 or -1) stages further; None beyond the model."""
        stage = self.stage(rank, chunk) + offset
        return self.places[stage] if 0 <= stage < self.stages else None


_Place = tuple[int, int]


# Orders of the named schedules, without messages. GPipe: Huang et al. 2019 (arXiv:1811.06965). 1F1B
# and interleaved: Narayanan et al. 2021, section 2.2 (arXiv:2104.04473); 1F1B first as
# PipeDream-Flush (arXiv:2006.09503). ZB-H1, ZB-V: Qi et al. 2023, sections 2.2, 6
# (arXiv:2401.10241).


def gpipe(ranks: int, microbatches: int) -> ComputeSchedule:
    """Orders all forwards, then all backwards, both by micro-batch.

    Backwards in reverse order would free no more memory. In this order gradients are summed as
    under 1F1B and in a single process, so the sums are bit-identical. The last micro-batch's
    backward, in which gradient reduction starts, is the last one on every rank.
    """
    order = [*actions_of(Kind.F, 0, microbatches), *actions_of(Kind.B, 0, microbatches)]
    return [order.copy() for _ in range(ranks)]


def one_f_one_b(ranks: int, microbatches: int) -> ComputeSchedule:
    """Orders warm-up forwards, then one forward and one backward in turn, then the remaining
    backwards.

    A rank holds at most ranks - rank micro-batches, as many as keep it busy until its first
    gradient.
    """
    forwards, backwards = (actions_of(kind, 0, microbatches) for kind in (Kind.F, Kind.B))
    return [in_turn(forwards, backwards, warmup) for warmup in reversed(range(ranks))]


def interleaved(ranks: int, chunks: int, microbatches: int) -> ComputeSchedule:
    """1F1B over chunks: a group of micro-batches passes a chunk before any enters the next one.

    Groups have `ranks` micro-batches where that divides their number, else up to twice as many, as
    even as possible; fewer micro-batches than ranks are allowed. The warm-up lasts until the first
    group has reached the last stage and its gradient is back.
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
    """ZB-H1 over the chunks of `interleaved`, with a shorter warm-up and postponed weight
    gradients.

    Only the gradients of inputs have to travel back before a rank can continue, so the warm-up
    counts a rank's distance from the last rank once, not twice. Rank r postpones its first r weight
    gradients to the end, where they fill idle time; with groups of `ranks` micro-batches it holds
    no more than 1F1B's first rank. Groups of `group` instead of `ranks` micro-batches hold more
    activations and are faster where hops are slow.
    """
    groups = _groups(group or ranks, microbatches)
    forwards, inputs, weights = (
        _by_group(kind, groups, chunks) for kind in (Kind.F, Kind.I, Kind.W)
    )
    orders = []
    for rank in range(ranks):
        warmup = min((chunks - 1) * groups[0] + ranks - 1 - rank, len(forwards))
        # number of weight gradients that are postponed to the end
        late = min(rank, len(forwards) - warmup)
        order = in_turn(forwards[: warmup + late], inputs[:late], warmup)
        order += chain.from_iterable(
            zip(forwards[warmup + late :], inputs[late:], weights, strict=False)
        )
        # No forward is left. Input gradients follow; after the first `rank`, each with a weight
        # gradient.
        done = len(forwards) - warmup
        early = inputs[done:rank]
        order += early
        done += len(early)
        order += chain.from_iterable(zip(inputs[done:], weights[done - rank :], strict=False))
        orders.append(order + weights[max(0, len(inputs) - rank) :])
    return orders


def zero_bubble_v(ranks: int, microbatches: int) -> ComputeSchedule:
    """ZB-V: two chunks a rank, placed as a V; no idle time in the middle where F = I = W.

    Fewer micro-batches than 2 ranks - 1 take the order of 2 ranks - 1, without the missing ones.
    """
    return [
        [step for step in _zbv_rank(ranks, rank, microbatches) if step.microbatch < microbatches]
        for rank in range(ranks)
    ]


def _zbv_rank(ranks: int, rank: int, microbatches: int) -> list[Action]:
    """Returns the order of one rank: "F0" below is the next forward of chunk 0, and so on."""
    # number of rounds beyond the shortest step
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
    # The remaining weight gradients, the later chunk first.
    return order + list(coming["W1"]) + list(coming["W0"])


def _groups(ranks: int, microbatches: int) -> list[int]:
    """Returns the sizes of the groups that pass chunk by chunk: `ranks` each or a little more, the
    largest first; a single group if there are fewer micro-batches than ranks."""
    count = max(1, microbatches // ranks)
    size, more = divmod(microbatches, count)
    return [size + 1] * more + [size] * (count - more)


def _by_group(kind: Kind, groups: Sequence[int], chunks: int) -> list[Action]:
    """Orders one kind of action: a group passes all chunks, upwards in F and else downwards, before
    the next group does."""
    order: list[Action] = []
    first, count = 0, sum(groups)
    for size in groups:
        for chunk in range(chunks) if kind == Kind.F else reversed(range(chunks)):
            order += actions_of(kind, chunk, count)[first : first + size]
        first += size
    return order


def in_turn(forwards: Sequence[Action], backwards: Sequence[Action], warmup: int) -> list[Action]:
    """Orders `warmup` forwards, then a forward and a backward in turn, then the other backwards."""
    ahead, backs = min(warmup, len(forwards)), iter(backwards)
    order = list(forwards[:ahead])
    order += chain.from_iterable(zip(forwards[ahead:], backs, strict=False))
    return order + list(backs)
