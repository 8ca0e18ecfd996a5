"""Puts the messages between the computations of an order: from orders to a plan."""

from __future__ import annotations

from collections.abc import Sequence
from operator import itemgetter
from typing import NamedTuple

from parallel3d.schedules.actions import Action, CommGroup, Kind, Plan, Step, line, row_of
from parallel3d.schedules.placement import Placement
from parallel3d.schedules.simulate import Costs, clock

# The computations that make a message, the way to its reader, and its names at both ends.
_FLOWS = (
    ((Kind.F,), 1, Kind.SEND_F, Kind.RECV_F),
    ((Kind.B, Kind.I), -1, Kind.SEND_B, Kind.RECV_B),
)
_TIME = itemgetter(0)


def add_communication(
    compute: Sequence[Sequence[Action]], placement: Placement | None = None
) -> Plan:
    """Lower a compute order to a plan: one group of messages between two consecutive actions.

    A group's messages must be in flight together: in the steady state of 1F1B a stage sends an
    activation to the very neighbour that sends it a gradient, and if both sent first, both would
    wait for ever once messages outgrow the transport's buffer. The first stage receives no
    activation and sends no gradient; the last one sends no activation and receives no gradient;
    what goes from a chunk to another one of its own rank is no message. No group is empty.

    A send stands after what made it. Without a `placement` there is one chunk per rank, and a
    receive stands before what needs it: right for orders that need messages in the order in which
    they are made. Any others, chunks above all, could so block for ever. With a `placement` a
    receive stands where the message comes when every action takes a unit of time
    (`_as_sent`): whatever can run at all then runs with its messages too.

    Raises ScheduleError for orders that wait for each other, a `placement` given; without one the
    checker finds that.
    """
    count = 1 + max((step.microbatch for order in compute for step in order), default=0)
    if placement is None:
        placement = Placement(len(compute) or 1)
        return [
            _before_readers(order, _links(rank, placement, count))
            for rank, order in enumerate(compute)
        ]
    return _as_sent(compute, placement, count)


def peer_of(message: Action, rank: int, placement: Placement) -> int:
    """The rank at the other end of a message of `rank`; there must be one."""
    offset = 1 if message.kind in (Kind.SEND_F, Kind.RECV_B) else -1
    place = placement.neighbour(rank, message.chunk, offset)
    if place is None:
        raise ValueError(f"rank {rank} has no neighbour for {message}")
    return place[0]


class _Links(NamedTuple):
    """What one rank sends and receives around its computations, by their `row`, micro-batches in
    order; a row that stands nowhere has no message. `targets` are who receives, and as what."""

    sent: dict[int, list[CommGroup]]
    received: dict[int, list[CommGroup]]
    targets: dict[int, tuple[int, tuple[Action, ...]]]


def _links(rank: int, placement: Placement, count: int) -> _Links:
    found = _Links({}, {}, {})
    for chunk in range(placement.chunks):
        for kinds, offset, send, receive in _FLOWS:
            reader = placement.neighbour(rank, chunk, offset)
            if reader is not None and reader[0] != rank:
                sends, comes = line(send, chunk, count), line(receive, reader[1], count)
                for kind in kinds:
                    row = row_of(kind, chunk)
                    found.sent[row] = [(message,) for message in sends]
                    found.targets[row] = reader[0], comes
            maker = placement.neighbour(rank, chunk, -offset)
            if maker is not None and maker[0] != rank:
                for kind in kinds:
                    found.received[row_of(kind, chunk)] = [
                        (message,) for message in line(receive, chunk, count)
                    ]
    return found


def _before_readers(order: Sequence[Action], links: _Links) -> list[Step]:
    """One rank's steps, each receive just before what needs it."""
    steps: list[Step] = []
    group: CommGroup = ()
    for step in order:
        if step.row in links.received:
            group += links.received[step.row][step.microbatch]
        if group:
            steps.append(group)
        steps.append(step)
        group = links.sent[step.row][step.microbatch] if step.row in links.sent else ()
    return [*steps, group] if group else steps


def _as_sent(compute: Sequence[Sequence[Action]], placement: Placement, count: int) -> Plan:
    """All ranks' steps, each receive where its message comes.

    A message that is made at a time stands on both ranks before the first action that starts at
    this time or later. So all actions and messages of all ranks have a place in one order of time
    that no rank contradicts. Ranks that do one after the other in it never wait for ever, and more
    that is in flight at once, as in a group, can only help. The order also is the same for the
    two ends of every pair of ranks, so that messages match by position.
    """
    starts, ends = clock(compute, placement, Costs.even(placement))
    links = [_links(rank, placement, count) for rank in range(placement.ranks)]
    # By rank; the messages of each sender in order of time, so that sorting them merges few runs.
    coming: list[list[tuple[float, Action]]] = [[] for _ in compute]
    for order, ended, (_, _, targets) in zip(compute, ends, links, strict=True):
        rows = {row: (coming[peer].append, comes) for row, (peer, comes) in targets.items()}
        for step, end in zip(order, ended, strict=True):
            if step.row in rows:
                arrive, comes = rows[step.row]
                arrive((end, comes[step.microbatch]))
    plan: Plan = []
    for order, begun, came, (sent, _, _) in zip(compute, starts, coming, links, strict=True):
        came.sort(key=_TIME)  # of equals the lower rank's comes first
        plan.append(_merged(order, begun, came, sent))
    return plan


def _merged(
    order: Sequence[Action],
    begun: Sequence[float],
    came: Sequence[tuple[float, Action]],
    sent: dict[int, list[CommGroup]],
) -> list[Step]:
    """One rank's steps; what comes after its last action nobody would need."""
    times = [*[time for time, _ in came], float("inf")]
    messages = [message for _, message in came]
    steps: list[Step] = []
    add = steps.append
    first, arrival = 0, times[0]
    group: CommGroup = ()
    for step, start in zip(order, begun, strict=True):
        if arrival <= start:
            end = first + 1
            while times[end] <= start:
                end += 1
            add((*group, *messages[first:end]))
            first, arrival = end, times[end]
        elif group:
            add(group)
        add(step)
        group = sent[step.row][step.microbatch] if step.row in sent else ()
    if group:
        add(group)
    return steps
