"""The clock: when each stage of a pipeline plan computes what, and how long it idles."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from parallel3d.pipeline.check import ScheduleError
from parallel3d.pipeline.schedule import Action, Kind, Step


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


def _busy(spans: Sequence[Span]) -> float:
    return sum(span.end - span.start for span in spans)


def simulate(
    plan: Sequence[Sequence[Step]],
    forward_s: float | Sequence[float],
    backward_s: float | Sequence[float],
    hop_s: float = 0.0,
) -> Timeline:
    """Time `plan` with given costs, in seconds per micro-batch: one for all stages or one for each.

    An action starts when its rank is free and its input has come: the result of the neighbour's
    action plus `hop_s` for the way. Messages cost the sender no time (they overlap with compute),
    so only the compute actions are read and a bare `compute_order` can be timed as well. Time is
    as early as dependencies allow, and a group that blocks its rank could only add to it.
    Raises ScheduleError if ranks wait for each other or a rank has nothing to do, ValueError for
    costs that do not fit the plan.
    """
    stages = len(plan)
    forward = _per_stage("forward_s", forward_s, stages)
    backward = _per_stage("backward_s", backward_s, stages)
    if hop_s < 0:
        raise ValueError(f"hop_s={hop_s} must not be negative")
    orders = [[step for step in steps if isinstance(step, Action)] for steps in plan]
    if not orders or not all(orders):
        raise ScheduleError("the clock needs at least one stage and one action on every stage")
    spans: list[list[Span]] = [[] for _ in orders]
    ends: list[dict[tuple[Kind, int], float]] = [{} for _ in orders]
    ready = deque(range(stages))
    while ready:
        rank = ready.popleft()
        order, mine = orders[rank], spans[rank]
        while len(mine) < len(order):
            action = order[len(mine)]
            arrival = _arrival(action, rank, ends, hop_s)
            if arrival is None:
                break
            start = max(arrival, mine[-1].end) if mine else arrival
            cost = forward[rank] if action.kind == Kind.F else backward[rank]
            mine.append(Span(action, start, start + cost))
            ends[rank][action.kind, action.microbatch] = start + cost
            reader = rank + 1 if action.kind == Kind.F else rank - 1
            if 0 <= reader < stages:
                ready.append(reader)
    for rank, order in enumerate(orders):
        if len(spans[rank]) < len(order):
            raise ScheduleError(
                f"rank {rank} waits for ever for the input of {order[len(spans[rank])]}"
            )
    return Timeline(tuple(tuple(s) for s in spans))


def _arrival(
    action: Action, rank: int, ends: Sequence[dict[tuple[Kind, int], float]], hop_s: float
) -> float | None:
    """When all inputs of `action` have come to `rank`; None if one of them is not made yet."""
    source = rank - 1 if action.kind == Kind.F else rank + 1
    # A backward needs its own forward; the first forward and the last backward need no message.
    own = ends[rank].get((Kind.F, action.microbatch)) if action.kind == Kind.B else 0.0
    if not 0 <= source < len(ends):
        return own
    message = ends[source].get((action.kind, action.microbatch))
    # The rank's own forward lies before `action` in its order and needs no second look.
    return None if own is None or message is None else message + hop_s


def _per_stage(name: str, cost: float | Sequence[float], stages: int) -> list[float]:
    costs = [float(c) for c in cost] if isinstance(cost, Sequence) else [float(cost)] * stages
    if len(costs) != stages:
        raise ValueError(f"{name} has {len(costs)} entries for {stages} stages")
    if not all(0 < c < float("inf") for c in costs):
        raise ValueError(f"{name}={cost} must be positive and finite")
    return costs
