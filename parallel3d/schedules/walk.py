"""Walks through a pipeline program to time it, find deadlocks and count live activations."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, TypeAlias

from parallel3d.schedules.actions import Action, Kind, Step, row_of
from parallel3d.schedules.orders import StageAssignment

_ENDED = 1 << 60  # larger than any index that a rank's walk yields


@dataclass(frozen=True)
class Costs:
    """Seconds per micro-batch of each stage's forward and of the two halves of its backward.

    `hop` is the latency of a message to another rank. Messages overlap with computation and cost
    their sender no time, and chunks of one rank exchange no messages.
    """

    forward: tuple[float, ...]
    input: tuple[float, ...]
    weight: tuple[float, ...]
    hop: float = 0.0

    @classmethod
    def even(
        cls,
        assignment: StageAssignment,
        forward: float = 1.0,
        input: float = 1.0,
        weight: float = 1.0,
        hop: float = 0.0,
    ) -> Costs:
        """Spreads the costs of one rank's layers evenly over its chunks."""
        f, i, w = ((c / assignment.chunks,) * assignment.stages for c in (forward, input, weight))
        return cls(f, i, w, hop)


# For each stage: (its layers as a fraction of a rank's layers, extra time in its forward, extra
# time in its backward for recomputation). Both extra times are in units of a rank's forward.
Weights: TypeAlias = Sequence[tuple[float, float, float]]


@dataclass(frozen=True)
class RankWork:
    """Seconds that a rank computes per micro-batch for all of its layers.

    `weights` spreads the layers over the stages of an assignment, or returns None if it has no
    weights for that assignment. Without `weights` the layers are spread evenly over the chunks.
    """

    forward: float = 1.0
    input: float = 1.0
    weight: float = 1.0
    hop: float = 0.0
    weights: Callable[[StageAssignment], Weights | None] | None = None

    def fits(self, assignment: StageAssignment) -> bool:
        """Returns whether costs are known for this stage assignment."""
        return self.weights is None or self.weights(assignment) is not None

    def costs(self, assignment: StageAssignment) -> Costs:
        """Returns the seconds of each stage. Raises ValueError if `assignment` does not fit."""
        if self.weights is None:
            return Costs.even(assignment, self.forward, self.input, self.weight, self.hop)
        weights = self.weights(assignment)
        if weights is None:
            raise ValueError(f"no costs are known for {assignment}")
        return Costs(
            tuple((part + more) * self.forward for part, more, _ in weights),
            tuple(part * self.input + again * self.forward for part, _, again in weights),
            tuple(part * self.weight for part, _, _ in weights),
            self.hop,
        )


class ScheduleError(ValueError):
    """Raised for a program that would hang or not compute the model; its text names the place."""


@dataclass(frozen=True, slots=True)
class Span:
    """Start and end of one compute action, in seconds since the step began."""

    action: Action
    start: float
    end: float


@dataclass(frozen=True)
class Timeline:
    """The spans of each rank, in order of time."""

    spans: tuple[tuple[Span, ...], ...]

    @property
    def makespan(self) -> float:
        """Seconds from the start of the step to the end of its last action."""
        return max(spans[-1].end for spans in self.spans)

    @property
    def bubble(self) -> tuple[float, ...]:
        """Idle fraction (0 to 1) of the makespan on each rank."""
        busy = (sum(span.end - span.start for span in spans) for spans in self.spans)
        return tuple(1 - seconds / self.makespan for seconds in busy)

    @property
    def bubble_fraction(self) -> float:
        """Idle fraction (0 to 1) of the time of all ranks together."""
        return sum(self.bubble) / len(self.spans)


Pair: TypeAlias = tuple[int, int]  # (sender, receiver)


class Wait(NamedTuple):
    """The place at which a rank waits for ever, and the reason.

    Attributes:
        step: the step that the rank cannot finish.
        message: the message that it waits for if the step is a group, else None.
        peer: the rank that it waits for, or None if it lacks one of its own computations.
    """

    step: Step
    message: Action | None
    peer: int | None


@dataclass
class Walk:
    """The results of walking through a program.

    Attributes:
        starts, ends: for each rank, the start and end of each compute action in seconds. They are
            filled only for orders without messages.
        peaks: for each rank, the largest number of chunk-activations (one micro-batch in one chunk)
            that it holds at once, from the start of F to the end of B or W. Qi et al. 2023
            (table 1) count an activation as 34 units until I and as 32 units from then until W;
            a whole activation until W is a safe upper bound.
        sent, received: (sender, receiver) → the numbers of their messages in order. A message has
            the same number at both ends.
        waits: the ranks that wait for ever.
        complete: whether each micro-batch has all actions and messages of every rank.
    """

    starts: list[list[float]]
    ends: list[list[float]]
    peaks: list[int]
    sent: dict[Pair, list[int]]
    received: dict[Pair, list[int]]
    waits: dict[int, Wait] = field(default_factory=dict)
    complete: bool = False

    @property
    def seconds(self) -> float:
        """Seconds until the last rank has ended."""
        return max(ends[-1] for ends in self.ends)

    @property
    def messages(self) -> int:
        """Number of messages that all ranks together send."""
        return sum(map(len, self.sent.values()))

    def ended(self) -> Walk:
        """Returns this walk, or raises ScheduleError if ranks wait for ever."""
        if self.waits:
            raise ScheduleError(self.deadlock())
        return self

    def deadlock(self) -> str:
        """Describes a deadlock by following the waits from rank to rank.

        The path begins at the first waiting rank and ends when it reaches a rank a second time.
        """
        path: list[int] = []
        rank: int | None = min(self.waits)
        while rank in self.waits and rank not in path:
            path.append(rank)
            rank = self.waits[rank].peer
        if any(wait.message is not None for wait in self.waits.values()):
            circle = path[path.index(rank) :] if rank in path else path
            return "deadlock: " + ", while ".join(map(self._waiting, circle))
        beyond = [*path[1:], rank] if rank in path else path[1:]
        first = f"rank {path[0]} waits for ever for the input of {self.waits[path[0]].step}"
        return first + "".join(
            f", while rank {other} does not go beyond {self.waits[other].step}"
            for other in beyond
            if other is not None
        )

    def _waiting(self, rank: int) -> str:
        step, message, peer = self.waits[rank]
        if isinstance(step, Action):
            source = "" if peer is None else f" from rank {peer}"
            return f"rank {rank} waits for the input of {step}{source}"
        verb = "send {} to" if message is not None and message.kind.is_send else "get {} from"
        group = " ".join(map(str, step))
        return f"rank {rank} is in group ({group}) and waits to {verb.format(message)} rank {peer}"


def walk(
    program: Sequence[Sequence[Step]],
    assignment: StageAssignment,
    costs: Costs | None = None,
    blocks: bool = False,
    count: int | None = None,
) -> Walk:
    """Walks every rank through its steps, which run as early as their rank and inputs allow.

    Args:
        program: compute orders, which with `blocks` also contain the groups of messages.
        costs: seconds of the computations and messages. By default the layers of a rank take one
            second for each of F, I and W.
        blocks: whether a group blocks until all of its counterparts are posted, as with a transport
            without buffers, the worst case. Otherwise a message needs no group and arrives one hop
            after its computation.
        count: number of micro-batches, by default the highest number in the program + 1.

    Raises ScheduleError if a rank's order has no action, and IndexError for an action of another
    rank or a micro-batch beyond `count`. Ranks that wait for ever raise no exception here: see
    `Walk.waits` and `Walk.ended`.
    """
    if not blocks and not (program and all(program)):
        raise ScheduleError("the clock needs at least one stage and one action on every stage")
    if count is None:
        count = 1 + highest(program)
    costs = costs or Costs.even(assignment)
    walker = _Walker(program, assignment, costs, blocks, count)
    places = _advance([walker.rank(rank) for rank in range(assignment.ranks)])
    found = walker.found
    for rank, place in enumerate(places):
        if place != _ENDED:
            found.waits[rank] = walker.wait(rank, program[rank][place])
    done = walker.done.values()
    noted = sum(map(len, program)) - walker.groups + walker.whole
    noted += sum(map(len, (*found.sent.values(), *found.received.values())))
    found.complete = noted == len(done) * count and all(None not in times for times in done)
    return found


def time_orders(
    orders: Sequence[Sequence[Action]], assignment: StageAssignment, costs: Costs
) -> Timeline:
    """Returns the timeline in which every action runs as early as its order and its input allow.

    The input of a forward is the result of the previous stage, and that of a backward is the result
    of the next stage. It arrives one hop later if that stage is on another rank.

    Raises ScheduleError if ranks wait in a circle or a rank has no action.
    """
    found = walk(orders, assignment, costs).ended()
    return Timeline(
        tuple(
            tuple(map(Span, order, begun, ended))
            for order, begun, ended in zip(orders, found.starts, found.ends, strict=True)
        )
    )


def highest(program: Sequence[Sequence[Step]]) -> int:
    """Returns the highest micro-batch number in a program, or -1 if it has no action."""
    return max(
        (
            one.microbatch
            for steps in program
            for step in steps
            for one in ((step,) if isinstance(step, Action) else step)
        ),
        default=-1,
    )


def _advance(runs: Sequence[Iterator[int]]) -> list[int]:
    """Advances the ranks' walks in turn until none can advance; returns each walk's last index."""
    places, order = [-1] * len(runs), list(range(len(runs)))
    before = -1
    while True:
        for rank in order:
            places[rank] = next(runs[rank], _ENDED)
        after = sum(places)
        if after in (before, _ENDED * len(runs)):
            return places
        before = after
        order.reverse()  # few rounds suffice, as forwards pass down the ranks and backwards up


# For each micro-batch, the time at which an action was done or posted, or None before that time.
_Times: TypeAlias = list[float | None]


# A computation is described by the times of its input and the hop from there, the times of the
# computation on its own rank that it needs, the times of its results (B has two, I and W), its
# seconds, and its change of the number of live activations.
_Compute: TypeAlias = tuple[_Times | None, float, _Times | None, _Times, _Times | None, float, int]
# A message is described by the times of the computation that makes it (None for a receive), its own
# times, the times of its counterpart, the list of messages between the two ranks, and the number of
# the first message of its kind.
_Message: TypeAlias = tuple[_Times | None, _Times, _Times, list[int], int]
# These two stand for actions that a rank does not have: their lists are empty, so that a look-up
# raises IndexError.
_NO_COMPUTE: _Compute = (None, 0.0, None, [], None, 0.0, 0)
_NO_MESSAGE: _Message = ([], [], [], [], 0)


class _Walker:
    """The state of a walk.

    Attributes:
        done: (kind, stage) → the time of each micro-batch; a B is recorded as I and as W.
        whole: number of whole backwards (B), each of which makes two results.
        groups: number of groups of messages that have ended.
        found: the findings so far.
    """

    def __init__(
        self,
        program: Sequence[Sequence[Step]],
        assignment: StageAssignment,
        costs: Costs,
        blocks: bool,
        count: int,
    ) -> None:
        self.program = program
        self.assignment = assignment
        self.costs = costs
        self.blocks = blocks
        self.count = count
        self.done = defaultdict[tuple[Kind, int], _Times](lambda: [None] * count)
        self.whole = self.groups = 0
        ranks = assignment.ranks
        self.found = Walk(
            [[] for _ in range(ranks)], [[] for _ in range(ranks)], [0] * ranks, {}, {}
        )

    def rank(self, rank: int) -> Iterator[int]:
        """Walks one rank through its steps, and yields the index of a step that has to wait."""
        computes, messages = self.rules(rank)
        begin, end = self.found.starts[rank].append, self.found.ends[rank].append
        timed, now = not self.blocks, 0.0
        live = peak = 0
        for place, step in enumerate(self.program[rank]):
            if type(step) is Action:
                source, delay, own, made, more, cost, held = computes[step.row]
                m = step.microbatch
                if source is not None:
                    came = source[m]
                    while came is None:
                        yield place
                        came = source[m]
                    came += delay
                    if came > now:
                        now = came
                if own is not None:
                    while own[m] is None:
                        yield place
                if timed:
                    begin(now)
                    now += cost
                    end(now)
                made[m] = now
                if more is not None:
                    more[m] = now
                    self.whole += 1
                live += held
                if live > peak:
                    self.found.peaks[rank] = peak = live
                continue
            for message in step:
                own, times, _, flow, first = messages[message.row]
                m = message.microbatch
                if own is not None:
                    while own[m] is None:
                        yield place
                times[m] = now
                flow.append(first + m)
            for message in step:
                other, m = messages[message.row][2], message.microbatch
                while other[m] is None:
                    yield place
            self.groups += 1

    def rules(self, rank: int) -> tuple[list[_Compute], list[_Message]]:
        """Returns the inputs and results of a rank's computations and messages by `Action.row`."""
        costs = self.costs
        found = self.found
        times = self.done
        passes = not self.blocks
        rows = row_of(Kind.F, self.assignment.chunks)
        computes, messages = [_NO_COMPUTE] * rows, [_NO_MESSAGE] * rows
        for chunk, (stage, before, after) in enumerate(self.assignment.around(rank)):
            forward, input, weight = (times[kind, stage] for kind in (Kind.F, Kind.I, Kind.W))
            row = row_of(Kind.F, chunk)
            for made, send, receive, maker, reader, on in (
                (forward, Kind.SEND_F, Kind.RECV_F, before, after, 1),
                (input, Kind.SEND_B, Kind.RECV_B, after, before, -1),
            ):
                source, delay = None, 0.0
                if maker is not None and (passes or maker[0] == rank):
                    source = times[Kind.F if on > 0 else Kind.I, stage - on]
                    delay = 0.0 if maker[0] == rank else costs.hop
                elif maker is not None:
                    pair, name = (maker[0], rank), (2 * stage + (on < 0)) * self.count
                    source, other = times[receive, stage], times[send, stage - on]
                    flow = found.received.setdefault(pair, [])
                    messages[row_of(receive, chunk)] = None, source, other, flow, name
                if reader is not None and reader[0] != rank and not passes:
                    pair, to = (rank, reader[0]), (2 * (stage + on) + (on < 0)) * self.count
                    mine, other = times[send, stage], times[receive, stage + on]
                    flow = found.sent.setdefault(pair, [])
                    messages[row_of(send, chunk)] = made, mine, other, flow, to
                if on > 0:
                    cost = costs.forward[stage]
                    computes[row] = source, delay, None, made, None, cost, 1
                    continue
                first, last = costs.input[stage], costs.weight[stage]
                comes = source, delay, forward, made
                computes[row_of(Kind.B, chunk)] = *comes, weight, first + last, -1
                computes[row_of(Kind.I, chunk)] = *comes, None, first, 0
                computes[row_of(Kind.W, chunk)] = None, 0.0, made, weight, None, last, -1
        return computes, messages

    def wait(self, rank: int, step: Step) -> Wait:
        """Returns the reason why a rank cannot advance."""
        computes, messages = self.rules(rank)
        if isinstance(step, Action):
            source = computes[step.row][0]
            if source is None or source[step.microbatch] is not None or self.blocks:
                return Wait(step, None, None)
            place = self.assignment.neighbour(rank, step.chunk, -1 if step.kind == Kind.F else 1)
            return Wait(step, None, None if place is None or place[0] == rank else place[0])
        for message in step:
            own, times, other = messages[message.row][:3]
            m = message.microbatch
            if own is not None and own[m] is None:
                return Wait(step, message, None)
            if times[m] is None or other[m] is None:
                return Wait(step, message, peer_of(message, rank, self.assignment))
        raise AssertionError(f"rank {rank} has all that {step} needs")


def peer_of(message: Action, rank: int, assignment: StageAssignment) -> int:
    """Returns the rank at the other end of a message of `rank`.

    Raises ValueError if the model has no stage there.
    """
    offset = 1 if message.kind in (Kind.SEND_F, Kind.RECV_B) else -1
    place = assignment.neighbour(rank, message.chunk, offset)
    if place is None:
        raise ValueError(f"rank {rank} has no neighbour for {message}")
    return place[0]
