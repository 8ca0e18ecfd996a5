"""The clock: when each rank of a pipeline computes what, and how long it idles."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import repeat

from parallel3d.schedules.actions import Action, Kind, Step
from parallel3d.schedules.placement import Placement


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
        placement: Placement,
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
    return time_orders(orders, Placement(len(plan)), Costs(forward, half, half, hop_s))


def time_orders(orders: Sequence[Sequence[Action]], placement: Placement, costs: Costs) -> Timeline:
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
    orders: Sequence[Sequence[Action]], placement: Placement, costs: Costs
) -> tuple[list[list[float]], list[list[float]]]:
    """(starts, ends) of every rank's actions, without the objects around them. See `time_orders`.

    It goes on with a rank until an input is missing, and comes back when it has been made: the
    work grows with the number of actions alone.
    """
    if not orders or not all(orders):
        raise ScheduleError("the clock needs at least one stage and one action on every stage")
    made: list[dict[int, float]] = [{} for _ in range(2 * placement.stages)]  # F's, then backwards'
    starts: list[list[float]] = [[] for _ in orders]
    ends: list[list[float]] = [[] for _ in orders]
    rows = [_rows(rank, placement, costs) for rank in range(placement.ranks)]
    sleeping: dict[tuple[int, int], int] = {}  # (stage's list, micro-batch) → who waits for it
    ready = deque(range(placement.ranks))
    while ready:
        rank = ready.popleft()
        order, begun, ended, row = orders[rank], starts[rank], ends[rank], rows[rank]
        now = ended[-1] if ended else 0.0
        for index in range(len(begun), len(order)):
            step = order[index]
            source, delay, own, target, cost = row[step.kind, step.chunk]
            m = step.microbatch
            if source is not None:
                came = made[source].get(m)
                if came is None:
                    sleeping[source, m] = rank
                    break
                if came + delay > now:
                    now = came + delay
            if own is not None and m not in made[own]:
                break  # it lies behind on the same rank, or nowhere: nothing can wake it
            begun.append(now)
            now += cost
            ended.append(now)
            if target is not None:
                made[target][m] = now
                waiting = sleeping.pop((target, m), None)
                if waiting is not None:
                    ready.append(waiting)
    stuck = {
        rank: order[len(ends[rank])]
        for rank, order in enumerate(orders)
        if len(ends[rank]) < len(order)
    }
    if stuck:
        raise ScheduleError(_describe_waiting(stuck, placement))
    return starts, ends


def _describe_waiting(stuck: dict[int, Action], placement: Placement) -> str:
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


_Row = tuple[int | None, float, int | None, int | None, float]


def _rows(rank: int, placement: Placement, costs: Costs) -> dict[tuple[Kind, int], _Row]:
    """By kind and chunk: the list that the input comes from and its delay, the list of the rank
    itself that must hold the micro-batch, the list that the result goes into, and the cost."""
    rows: dict[tuple[Kind, int], _Row] = {}
    stages = placement.stages
    for chunk in range(placement.chunks):
        stage = placement.stage(rank, chunk)
        before, after = placement.neighbour(rank, chunk, -1), placement.neighbour(rank, chunk, 1)

        def row(
            kind: Kind,
            neighbour: tuple[int, int] | None,
            source: int,
            own: int | None,
            target: int | None,
            stage: int = stage,
        ) -> _Row:
            delay = costs.hop if neighbour is not None and neighbour[0] != rank else 0.0
            found = source if neighbour is not None else None
            return found, delay, own, target, costs.of(kind, stage)

        rows[Kind.F, chunk] = row(Kind.F, before, stage - 1, None, stage)
        for kind in (Kind.B, Kind.I):
            rows[kind, chunk] = row(kind, after, stages + stage + 1, stage, stages + stage)
        rows[Kind.W, chunk] = row(Kind.W, None, 0, stages + stage, None)
    return rows


def _per_stage(name: str, cost: float | Sequence[float], stages: int) -> tuple[float, ...]:
    costs = [float(c) for c in cost] if isinstance(cost, Sequence) else [float(cost)] * stages
    if len(costs) != stages:
        raise ValueError(f"{name} has {len(costs)} entries for {stages} stages")
    if not all(0 < c < float("inf") for c in costs):
        raise ValueError(f"{name}={cost} must be positive and finite")
    return tuple(costs)
