"""Adds messages to compute orders, and counts unread messages between two ranks."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from itertools import chain
from operator import itemgetter
from typing import NamedTuple, TypeAlias

from parallel3d.schedules.actions import (
    Action,
    CommGroup,
    Kind,
    PipelineProgram,
    Step,
    action,
    actions_of,
    groups_of_one,
    row_of,
)
from parallel3d.schedules.orders import StageAssignment
from parallel3d.schedules.walk import Pair, highest, peer_of, walk

# Limits of the executor; the planner's memory needs them too.
# Sends that may be in flight before the rank waits for the oldest: it bounds their memory.
SENDS = 8
# Size of a slab for offloaded activations: a power of two, because PyTorch's allocator of pinned
# memory rounds up to one.
SLAB_BYTES = 16 << 20
# Smaller tensors (statistics, norm weights) are not offloaded: a copy of 1 MiB takes some 20 µs
# over PCIe 5.
OFFLOADED_BYTES = 1 << 20


def add_communication(
    compute: Sequence[Sequence[Action]],
    assignment: StageAssignment | None = None,
    count: int | None = None,
) -> PipelineProgram:
    """Lowers compute orders to a program: one group of messages between consecutive actions.

    Messages of a group must be in flight together: in 1F1B's steady state a stage sends an
    activation to the neighbour that sends it a gradient, and two blocking sends would deadlock once
    messages outgrow the transport's buffer. Chunks of one rank exchange no messages; no group is
    empty. A send stands right after its computation.

    Without an `assignment` (one chunk per rank) a receive stands right before its reader, which is
    correct for orders that read messages in the order of the sends. With an `assignment` a receive
    stands at its arrival when every action takes one unit of time, so that any order that can run
    at all also runs with messages: a message made at time t stands on both ranks before the first
    action that starts at t or later. So all actions and messages fit into one order of time: ranks
    that follow it never wait in a circle, and both ends have their messages in the same order.

    `count`: micro-batches; default: the highest number + 1.
    Raises ScheduleError if an `assignment` is given and ranks wait in a circle; without one, the
    checker finds the circle.
    """
    count = count or 1 + max(0, highest(compute))
    placed = assignment or StageAssignment(len(compute) or 1)
    links = [_links(rank, placed, count) for rank in range(placed.ranks)]
    if assignment is None:
        return [
            _merged(order, range(len(order)), _before_readers(order, mine.received), mine.sent)
            for order, mine in zip(compute, links, strict=False)
        ]
    timed = walk(compute, assignment, count=count).ended()
    # By rank and sender: (arrival, receive) in order of time.
    coming: list[dict[int, list[_Arrival]]] = [defaultdict(list) for _ in compute]
    for rank, (order, ended) in enumerate(zip(compute, timed.ends, strict=True)):
        targets = {
            row: (coming[peer][rank].append, comes)
            for row, (peer, comes) in links[rank].targets.items()
        }
        for step, end in zip(order, ended, strict=True):
            if step.row in targets:
                arrives, comes = targets[step.row]
                arrives((end, comes[step.microbatch]))
    return [
        _merged(order, begun, chain.from_iterable(came[peer] for peer in sorted(came)), mine.sent)
        for order, begun, came, mine in zip(compute, timed.starts, coming, links, strict=True)
    ]


_Arrival: TypeAlias = tuple[float, Action]


class _Links(NamedTuple):
    """Messages of one rank by the `row` of their computation; `targets`: receiver and receives."""

    sent: dict[int, tuple[CommGroup, ...]]
    received: dict[int, tuple[Action, ...]]
    targets: dict[int, tuple[int, tuple[Action, ...]]]


def _links(rank: int, assignment: StageAssignment, count: int) -> _Links:
    found = _Links({}, {}, {})
    for chunk, (_, before, after) in enumerate(assignment.around(rank)):
        for kinds, send, receive, maker, reader in (
            ((Kind.F,), Kind.SEND_F, Kind.RECV_F, before, after),
            ((Kind.B, Kind.I), Kind.SEND_B, Kind.RECV_B, after, before),
        ):
            for row in (row_of(kind, chunk) for kind in kinds):
                if reader is not None and reader[0] != rank:
                    found.sent[row] = groups_of_one(send, chunk, count)
                    found.targets[row] = reader[0], actions_of(receive, reader[1], count)
                if maker is not None and maker[0] != rank:
                    found.received[row] = actions_of(receive, chunk, count)
    return found


def _before_readers(
    order: Sequence[Action], received: dict[int, tuple[Action, ...]]
) -> list[_Arrival]:
    return [
        (place, received[step.row][step.microbatch])
        for place, step in enumerate(order)
        if step.row in received
    ]


def _merged(
    order: Sequence[Action],
    begun: Sequence[float],
    arrivals: Iterable[_Arrival],
    sent: dict[int, tuple[CommGroup, ...]],
) -> list[Step]:
    """Returns one rank's steps; simultaneous arrivals keep their order, in which lower peers come
    first."""
    in_time = sorted(arrivals, key=itemgetter(0))
    coming = iter([*in_time, _NEVER]).__next__
    time, message = coming()
    steps: list[Step] = []
    group: CommGroup = ()
    for step, start in zip(order, begun, strict=True):
        while time <= start:
            group += (message,)
            time, message = coming()
        if group:
            steps.append(group)
        steps.append(step)
        group = sent[step.row][step.microbatch] if step.row in sent else ()
    return [*steps, group] if group else steps


_NEVER: _Arrival = float("inf"), Action(Kind.F, 0)


def peak_unread(program: Sequence[Sequence[Step]], assignment: StageAssignment) -> dict[Pair, int]:
    """Returns (sender, receiver) → the most messages that the receiver has asked for and not yet
    read.

    This many slots per pair are enough for a transport in which the receiver frees all slots up to
    a message when a computation reads it: a sound program whose groups have at most one send, in
    first place, then never waits where it would not wait without buffers.
    """
    peaks: dict[Pair, int] = {}
    for rank, steps in enumerate(program):
        asked, read = Counter[Pair](), Counter[Pair]()
        # receive → its pair, and its position in the pair's list
        numbers: dict[Action, tuple[Pair, int]] = {}
        for step in steps:
            if isinstance(step, Action):
                kind = Kind.RECV_F if step.kind == Kind.F else Kind.RECV_B
                receive = action(kind, step.microbatch, step.chunk)
                if receive in numbers and step.kind != Kind.W:
                    pair, number = numbers.pop(receive)
                    read[pair] = max(read[pair], number)
                continue
            for message in step:
                if not message.kind.is_send:
                    pair = peer_of(message, rank, assignment), rank
                    asked[pair] += 1
                    numbers[message] = pair, asked[pair]
                    peaks[pair] = max(peaks.get(pair, 0), asked[pair] - read[pair])
    return peaks
