"""Adds messages to compute orders, and counts the unread messages between two ranks."""

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

# These limits of the executor also enter the planner's estimate of memory.
# Number of sends in flight beyond which a rank waits for the oldest one, to bound their memory.
SENDS = 8
# Bytes of a slab for offloaded activations. They are a power of two, because PyTorch's allocator
# of pinned memory rounds sizes up to powers of two.
SLAB_BYTES = 16 << 20
# Smaller tensors (statistics, norm weights) are not offloaded, because they would free too little:
# a copy of 1 MiB already takes about 20 µs over PCIe 5.
OFFLOADED_BYTES = 1 << 20


def add_communication(
    compute: Sequence[Sequence[Action]],
    assignment: StageAssignment | None = None,
    count: int | None = None,
) -> PipelineProgram:
    """Turns compute orders into a program with at most one group of messages between two actions.

    The messages of a group must be in flight together. In 1F1B's steady state a stage sends an
    activation to the neighbour that sends it a gradient; two blocking sends would deadlock as soon
    as messages are larger than the transport's buffer. Chunks of one rank exchange no messages, and
    no group is empty. A send comes directly after its computation.

    Without an `assignment` each rank has one chunk, and a receive comes directly before the
    computation that reads it. This is correct for orders that read messages in the order in which
    they are sent. With an `assignment`, a receive is placed by the time at which its message is
    made if all ranks' layers take equal time: a message made at time t comes on both ranks before
    the first action that starts at t or later. Thus all actions and messages follow one global
    order. Ranks that follow it never wait in a circle, and both ends of a link have their messages
    in the same order, so every compute order that can run also runs with its messages.

    `count` is the number of micro-batches, by default the highest number in the orders + 1.

    Raises ScheduleError if an `assignment` is given and ranks wait in a circle. Without an
    assignment, the checker finds such a circle.
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
    # rank → sender → (time, receive) of the messages, in order of time
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
    """The messages of one rank; the keys are rows (`Action.row`) of the rank's computations.

    Attributes:
        sent: the sends of a computation's results, by micro-batch, each in a separate group.
        received: the receives of a computation's inputs, by micro-batch.
        targets: the rank that receives a computation's results, and that rank's receives by
            micro-batch.
    """

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
    """Returns the steps of one rank: its actions, its sends and the receives in `arrivals`.

    Simultaneous arrivals keep their given order.
    """
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
    """Returns (sender, receiver) → the largest number of receives that are posted but not yet read.

    This is also the number of slots per pair that a transport needs: a sound program then waits
    nowhere that it would not wait without buffers. There are two conditions. Reading a message
    frees its slot and the slots of all earlier messages, and a group has at most one send, which
    comes first.
    """
    peaks: dict[Pair, int] = {}
    for rank, steps in enumerate(program):
        asked, read = Counter[Pair](), Counter[Pair]()
        # receive → (sender, receiver), and its number among the receives of this pair
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
