"""Simulates a pipeline step: start and end of every action, and idle time."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from parallel3d.schedules.actions import Action, Kind, Step, row_of
from parallel3d.schedules.orders import StageAssignment

_ENDED = 1 << 60  # more than any count that a run yields


class ScheduleError(ValueError):
    """Raised for a plan that would hang or not compute the model; names the place."""


@dataclass(frozen=True)
class Costs:
    """Seconds per micro-batch: each stage's forward and the two halves of its backward.

    `hop`: latency of a message to another rank; messages overlap with compute and cost their sender
    nothing, and chunks of one rank exchange none.

    Raises ValueError for costs that are not positive and finite, or a negative hop.
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
        """Spreads the costs of one rank's layers evenly over its chunks."""
        f, i, w = ((c / placement.chunks,) * placement.stages for c in (forward, input, weight))
        return cls(f, i, w, hop)

    def of(self, kind: Kind, stage: int) -> float:
        """Returns the seconds of one compute action."""
        if kind == Kind.F:
            return self.forward[stage]
        both = self.input[stage] + self.weight[stage]
        return {Kind.I: self.input[stage], Kind.W: self.weight[stage]}.get(kind, both)


@dataclass(frozen=True, slots=True)
class Span:
    """Start and end of one compute action, in seconds since the step began."""

    action: Action
    start: float
    end: float


@dataclass(frozen=True)
class Timeline:
    """Spans of every rank, in order of time."""

    spans: tuple[tuple[Span, ...], ...]

    @property
    def makespan(self) -> float:
        """Seconds from the start of the step to the end of its last action."""
        return max(spans[-1].end for spans in self.spans)

    @property
    def bubble(self) -> tuple[float, ...]:
        """Idle fraction of the makespan by rank (0 to 1)."""
        return tuple(1 - _busy(spans) / self.makespan for spans in self.spans)

    @property
    def bubble_fraction(self) -> float:
        """Idle fraction of all ranks' time together (0 to 1)."""
        return sum(self.bubble) / len(self.spans)

    @property
    def overhead(self) -> float:
        """Time of the step beyond the compute of its busiest rank, as a fraction of that compute.

        The step ends with its last rank, as the global gradient norm needs all gradients.
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
    """Times a plan of one chunk per rank; costs in seconds per micro-batch, one or one per stage.

    `backward_s` is a whole backward's; I and W take half each. `time_orders` times other plans.
    Raises as `time_orders`, and ValueError for costs that do not fit the plan.
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
    """Times every action as early as its rank's order and its input allow.

    The input is the result of the stage before (after, for a backward), plus a hop if that is on
    another rank. Groups of messages that block their rank are not modelled.

    Raises ScheduleError if ranks wait in a circle or a rank has no action.
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
    """Returns (starts, ends) by rank and action; `time_orders` without its objects."""
    if not orders or not all(orders):
        raise ScheduleError("the clock needs at least one stage and one action on every stage")
    # Micro-batch → end, by stage of the forwards, then of the backwards.
    made: list[dict[int, float]] = [{} for _ in range(2 * placement.stages)]
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
    """Advances the runs in turn until all have ended; returns False if none can go on.

    A waiting run yields a number that has grown if it made progress since its last yield.
    """
    order = list(runs)
    before, everything = -1, _ENDED * len(order)
    while True:
        after = sum([next(run, _ENDED) for run in order])
        if after in (before, everything):
            return after == everything
        before = after
        order.reverse()  # forwards go down the ranks, backwards up: alternate to need few rounds


def _run(
    order: Sequence[Action], rows: dict[int, _Row], begun: list[float], ended: list[float]
) -> Iterator[int]:
    """Times one rank; yields while an input is missing."""
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
    """Describes who waits for whom, from the first stuck rank on."""
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


_Times = dict[int, float]  # micro-batch → end of its action
_Row = tuple[_Times | None, float, _Times | None, _Times | None, float]


def _rows(
    rank: int, placement: StageAssignment, costs: Costs, made: Sequence[_Times]
) -> dict[int, _Row]:
    """Returns, by row: inputs and their delay, this rank's results needed first, results, cost."""
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
