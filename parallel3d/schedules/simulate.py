"""The clock: when each rank of a pipeline computes what, and how long it idles."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import repeat

from parallel3d.schedules.actions import Action, Kind, Step, row_of
from parallel3d.schedules.orders import StageAssignment

_ENDED = 1 << 60  # more than any run yields


class ScheduleError(ValueError):
    """A plan that would hang, or compute something else than the model; says where and why."""


@dataclass(frozen=True)
class Costs:
    """Seconds per micro-batch: of each stage's forward and of the two halves of its backward.

    `hop` is the time that a message takes to another rank. Messages cost the sender no time (they
    overlap with compute), and between the chunks of one rank there is none.

    Raises ValueError for costs that are not positive and finite, or a hop that is negative.
    """

    forward: tuple[float, ...]
    input: tuple[float, ...]
    weight: tuple[float, ...]
    hop: float = 0.0

    def __post_init__(self) -> None:
        for name in ("forward", "input", "weight"):
            if not all(0 < cost < float("inf") for cost in getattr(self, name)):
                raise ValueError(f"{name}={getattr(self, name)} must be positive and finite")
        if not 0 <= self.hop < float("inf"):
            raise ValueError(f"hop={self.hop} must not be negative")

    @classmethod
    def even(
        cls,
        placement: StageAssignment,
        forward: float = 1.0,
        input: float = 1.0,
        weight: float = 1.0,
        hop: float = 0.0,
    ) -> Costs:
        """Costs of one rank's layers, spread evenly over its chunks."""
        n, stages = placement.chunks, placement.stages
        halves = (tuple(repeat(cost / n, stages)) for cost in (forward, input, weight))
        return cls(*halves, hop)

    def of(self, kind: Kind, stage: int) -> float:
        """Seconds of one compute action."""
        if kind == Kind.F:
            return self.forward[stage]
        both = self.input[stage] + self.weight[stage]
        return {Kind.I: self.input[stage], Kind.W: self.weight[stage]}.get(kind, both)


@dataclass(frozen=True, slots=True)
class Span:
    """One compute action in time: start and end in seconds since the step began."""

    action: Action
    start: float
    end: float


@dataclass(frozen=True)
class Timeline:
    """What every rank computes when: `spans[rank]` in order of time."""

    spans: tuple[tuple[Span, ...], ...]

    @property
    def makespan(self) -> float:
        """Seconds from the start of the step to the end of the last compute action of any rank."""
        return max(spans[-1].end for spans in self.spans)

    @property
    def bubble(self) -> tuple[float, ...]:
        """For each rank, the fraction of the makespan in which it computes nothing (0 to 1)."""
        return tuple(1 - _busy(spans) / self.makespan for spans in self.spans)

    @property
    def bubble_fraction(self) -> float:
        """The fraction of all ranks' time, together, in which they compute nothing (0 to 1)."""
        return sum(self.bubble) / len(self.spans)

    @property
    def overhead(self) -> float:
        """What the step takes beyond the compute of its busiest rank, as a fraction of that.

        The step ends when the last rank ends, as the global norm needs all gradients: that every
        rank but the first starts late is counted, and no update overlaps with it.
        """
        return self.makespan / max(map(_busy, self.spans)) - 1


def _busy(spans: Sequence[Span]) -> float:
    return sum(span.end - span.start for span in spans)


def simulate(
    plan: Sequence[Sequence[Step]],
    forward_s: float | Sequence[float],
    backward_s: float | Sequence[float],
    hop_s: float = 0.0,
) -> Timeline:
    """Time a plan of one chunk per rank, in seconds per micro-batch: one for all stages or each.

    `backward_s` is of whole backwards; split ones are halves of it. See `time_orders`, which
    times all others. Raises as it does, and ValueError for costs that do not fit the plan.
    """
    if hop_s < 0:
        raise ValueError(f"hop_s={hop_s} must not be negative")
    forward = _per_stage("forward_s", forward_s, len(plan))
    half = tuple(cost / 2 for cost in _per_stage("backward_s", backward_s, len(plan)))
    orders = [[step for step in steps if isinstance(step, Action)] for steps in plan]
    if not orders:
        raise ScheduleError("the clock needs at least one stage and one action on every stage")
    return time_orders(orders, StageAssignment(len(plan)), Costs(forward, half, half, hop_s))


def time_orders(
    orders: Sequence[Sequence[Action]], placement: StageAssignment, costs: Costs
) -> Timeline:
    """When each rank computes what, as early as the order of each rank and its inputs allow.

    An action starts when its rank is free and its input has come: the result of the stage before
    (of the one after, for a backward), plus a hop if that lies on another rank. Time is as early as
    dependencies allow, and a group of messages that blocks its rank could only add to it.

    Raises ScheduleError if ranks wait for each other or a rank has nothing to do.
    """
    starts, ends = clock(orders, placement, costs)
    return Timeline(
        tuple(
            tuple(map(Span, order, begun, ended))
            for order, begun, ended in zip(orders, starts, ends, strict=True)
        )
    )


def clock(
    orders: Sequence[Sequence[Action]], placement: StageAssignment, costs: Costs
) -> tuple[list[list[float]], list[list[float]]]:
    """(starts, ends) of every rank's actions, without the objects around them. See `time_orders`.

    It goes on with a rank until an input is missing, and comes back when others have gone on.
    """
    if not orders or not all(orders):
        raise ScheduleError("the clock needs at least one stage and one action on every stage")
    made: list[dict[int, float]] = [{} for _ in range(2 * placement.stages)]  # F's, then backwards'
    starts: list[list[float]] = [[] for _ in orders]
    ends: list[list[float]] = [[] for _ in orders]
    runs = [
        _run(orders[rank], _rows(rank, placement, costs, made), starts[rank], ends[rank])
        for rank in range(placement.ranks)
    ]
    if not run_all(runs):
        stuck = {
            rank: order[len(ends[rank])]
            for rank, order in enumerate(orders)
            if len(ends[rank]) < len(order)
        }
        raise ScheduleError(_describe_waiting(stuck, placement))
    return starts, ends


def run_all(runs: Iterable[Iterator[int]]) -> bool:
    """Go on with each rank in turn, down and up again, until all have ended; False: none can.

    A run yields, whenever it waits, a number that has grown if it has done anything since.
    """
    order = list(runs)
    before, everything = -1, _ENDED * len(order)
    while True:
        after = sum([next(run, _ENDED) for run in order])
        if after in (before, everything):
            return after == everything
        before = after
        order.reverse()  # forwards go down the ranks, backwards up


def _run(
    order: Sequence[Action], rows: dict[int, _Row], begun: list[float], ended: list[float]
) -> Iterator[int]:
    """One rank's time; waits for inputs that nobody has made yet, for ever if nobody does."""
    now = 0.0
    begin, end = begun.append, ended.append
    for step in order:
        source, delay, own, target, cost = rows[step.row]
        m = step.microbatch
        if source is not None:
            came = source.get(m)
            while came is None:
                yield len(ended)
                came = source.get(m)
            came += delay
            if came > now:
                now = came
        while own is not None and m not in own:
            yield len(ended)
        begin(now)
        now += cost
        end(now)
        if target is not None:
            target[m] = now


def _describe_waiting(stuck: dict[int, Action], placement: StageAssignment) -> str:
    """Who waits for what, from one rank to the one that should make it, as far as that waits."""
    rank = min(stuck)
    sentence = f"rank {rank} waits for ever for the input of {stuck[rank]}"
    seen = {rank}
    while True:
        step = stuck[rank]
        source = placement.neighbour(rank, step.chunk, -1 if step.kind == Kind.F else 1)
        if source is None or step.kind == Kind.W or source[0] not in stuck:
            return sentence
        rank = source[0]
        sentence += f", while rank {rank} does not go beyond {stuck[rank]}"
        if rank in seen:
            return sentence
        seen.add(rank)


_Times = dict[int, float]  # when a micro-batch's result was made
_Row = tuple[_Times | None, float, _Times | None, _Times | None, float]


def _rows(
    rank: int, placement: StageAssignment, costs: Costs, made: Sequence[_Times]
) -> dict[int, _Row]:
    """By kind and chunk: where the input is found and its delay, what of the rank itself must hold
    the micro-batch, where the result goes, and the cost."""
    rows: dict[int, _Row] = {}
    forwards, backwards = made[: placement.stages], made[placement.stages :]
    for chunk, (stage, before, after) in enumerate(placement.around(rank)):
        mine, back = forwards[stage], backwards[stage]
        input = None if before is None else forwards[stage - 1]
        delay = 0.0 if before is None or before[0] == rank else costs.hop
        rows[row_of(Kind.F, chunk)] = input, delay, None, mine, costs.forward[stage]
        input = None if after is None else backwards[stage + 1]
        delay = 0.0 if after is None or after[0] == rank else costs.hop
        for kind in (Kind.B, Kind.I):
            rows[row_of(kind, chunk)] = input, delay, mine, back, costs.of(kind, stage)
        rows[row_of(Kind.W, chunk)] = None, 0.0, back, None, costs.weight[stage]
    return rows


def _per_stage(name: str, cost: float | Sequence[float], stages: int) -> tuple[float, ...]:
    costs = [float(c) for c in cost] if isinstance(cost, Sequence) else [float(cost)] * stages
    if len(costs) != stages:
        raise ValueError(f"{name} has {len(costs)} entries for {stages} stages")
    if not all(0 < c < float("inf") for c in costs):
        raise ValueError(f"{name}={cost} must be positive and finite")
    return tuple(costs)
