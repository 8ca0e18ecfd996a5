"""Puts the messages between the computations of an order: from orders to a plan."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from parallel3d.schedules.actions import (
    Action,
    CommGroup,
    Kind,
    PipelineProgram,
    Step,
    actions_of,
    groups_of_one,
    row_of,
)
from parallel3d.schedules.placement import StageAssignment
from parallel3d.schedules.simulate import Costs, clock

# The computations that make a message and read it, whether it goes forward, its names.
_FLOWS = (
    ((Kind.F,), True, Kind.SEND_F, Kind.RECV_F),
    ((Kind.B, Kind.I), False, Kind.SEND_B, Kind.RECV_B),
)


def add_communication(
    compute: Sequence[Sequence[Action]], placement: StageAssignment | None = None
) -> PipelineProgram:
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
    count = 1 + max((max([s.microbatch for s in order], default=0) for order in compute), default=0)
    if placement is None:
        placement = StageAssignment(len(compute) or 1)
        return [
            _before_readers(order, _links(rank, placement, count))
            for rank, order in enumerate(compute)
        ]
    return _as_sent(compute, placement, count)


def peer_of(message: Action, rank: int, placement: StageAssignment) -> int:
    """The rank at the other end of a message of `rank`; there must be one."""
    offset = 1 if message.kind in (Kind.SEND_F, Kind.RECV_B) else -1
    place = placement.neighbour(rank, message.chunk, offset)
    if place is None:
        raise ValueError(f"rank {rank} has no neighbour for {message}")
    return place[0]


class _Links(NamedTuple):
    """What one rank sends and receives around its computations, by their `row`, micro-batches in
    order; a row that stands nowhere has no message. `targets` are who receives, and as what."""

    sent: dict[int, tuple[CommGroup, ...]]
    received: dict[int, tuple[CommGroup, ...]]
    targets: dict[int, tuple[int, tuple[Action, ...]]]


def _links(rank: int, placement: StageAssignment, count: int) -> _Links:
    found = _Links({}, {}, {})
    for chunk, (_, before, after) in enumerate(placement.around(rank)):
        for kinds, is_forward, send, receive in _FLOWS:
            maker, reader = (before, after) if is_forward else (after, before)
            if reader is not None and reader[0] != rank:
                sends = groups_of_one(send, chunk, count)
                target = reader[0], actions_of(receive, reader[1], count)
                for kind in kinds:
                    found.sent[row_of(kind, chunk)] = sends
                    found.targets[row_of(kind, chunk)] = target
            if maker is not None and maker[0] != rank:
                comes = groups_of_one(receive, chunk, count)
                found.received.update((row_of(kind, chunk), comes) for kind in kinds)
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


def _as_sent(
    compute: Sequence[Sequence[Action]], placement: StageAssignment, count: int
) -> PipelineProgram:
    """All ranks' steps, each receive where its message comes.

    A message that is made at a time stands on both ranks before the first action that starts at
    this time or later. So all actions and messages of all ranks have a place in one order of time
    that no rank contradicts. Ranks that do one after the other in it never wait for ever, and more
    that is in flight at once, as in a group, can only help. The order also is the same for the
    two ends of every pair of ranks, so that messages match by position.
    """
    starts, ends = clock(compute, placement, Costs.even(placement))
    links = [_links(rank, placement, count) for rank in range(placement.ranks)]
    # By rank and sender: when its messages come, and as what; each in order of time.
    coming: list[dict[int, _Arrivals]] = [{} for _ in compute]
    for rank, (order, ended) in enumerate(zip(compute, ends, strict=True)):
        rows = {}
        for row, (peer, comes) in links[rank].targets.items():
            times, messages = coming[peer].setdefault(rank, ([], []))
            rows[row] = times.append, messages.append, comes
        for step, end in zip(order, ended, strict=True):
            if step.row in rows:
                at, arrives, comes = rows[step.row]
                at(end)
                arrives(comes[step.microbatch])
    return [
        _merged(order, begun, [came[peer] for peer in sorted(came)], links[rank].sent)
        for rank, (order, begun, came) in enumerate(zip(compute, starts, coming, strict=True))
    ]


_Arrivals = tuple[list[float], list[Action]]


def _merged(
    order: Sequence[Action],
    begun: Sequence[float],
    came: Sequence[_Arrivals],
    sent: dict[int, tuple[CommGroup, ...]],
) -> list[Step]:
    """One rank's steps. Of messages that come at once the lower rank's stands first; what comes
    after the rank's last action nobody would need."""
    never = float("inf")
    (low_times, low), (high_times, high) = [*came, ([], []), ([], [])][:2]
    next_low, next_high = iter(low).__next__, iter(high).__next__
    next_low_time = iter([*low_times, never]).__next__
    next_high_time = iter([*high_times, never]).__next__
    low_time, high_time = next_low_time(), next_high_time()
    steps: list[Step] = []
    add = steps.append
    group: CommGroup = ()
    for step, start in zip(order, begun, strict=True):
        while low_time <= start or high_time <= start:
            if low_time <= high_time:
                group += (next_low(),)
                low_time = next_low_time()
            else:
                group += (next_high(),)
                high_time = next_high_time()
        if group:
            add(group)
        add(step)
        group = sent[step.row][step.microbatch] if step.row in sent else ()
    if group:
        add(group)
    return steps
