"""Puts the messages between the computations of an order: from orders to a plan."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from itertools import pairwise

from parallel3d.schedules.actions import Action, CommGroup, Kind, Plan, Step, action
from parallel3d.schedules.placement import Placement
from parallel3d.schedules.simulate import Costs, Timeline, time_orders


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
    (`_receives_as_sent`): whatever can run at all then runs with its messages too.

    Raises ScheduleError for orders that wait for each other, a `placement` given; without one the
    checker finds that.
    """
    if placement is None:
        placement = Placement(len(compute))
        receives = [
            [_received(step, rank, placement) for step in (*steps, None)]
            for rank, steps in enumerate(compute)
        ]
    else:
        timeline = time_orders(compute, placement, Costs.even(placement))
        receives = _receives_as_sent(timeline, placement)
    plan: Plan = []
    for rank, actions in enumerate(compute):
        steps: list[Step] = []
        for (before, after), received in zip(
            pairwise([None, *actions, None]), receives[rank], strict=True
        ):
            group = (*_sent(before, rank, placement), *received)
            if group:
                steps.append(group)
            if after is not None:
                steps.append(after)
        plan.append(steps)
    return plan


def peer_of(message: Action, rank: int, placement: Placement) -> int:
    """The rank at the other end of a message of `rank`; there must be one."""
    offset = 1 if message.kind in (Kind.SEND_F, Kind.RECV_B) else -1
    place = placement.neighbour(rank, message.chunk, offset)
    if place is None:
        raise ValueError(f"rank {rank} has no neighbour for {message}")
    return place[0]


def _sent(done: Action | None, rank: int, placement: Placement) -> CommGroup:
    """The message that `rank` owes another rank after `done` (none, or a group of one)."""
    if done is None or done.kind == Kind.W:
        return ()
    is_forward = done.kind == Kind.F
    reader = placement.neighbour(rank, done.chunk, 1 if is_forward else -1)
    if reader is None or reader[0] == rank:
        return ()
    return (action(Kind.SEND_F if is_forward else Kind.SEND_B, done.microbatch, done.chunk),)


def _received(coming: Action | None, rank: int, placement: Placement) -> CommGroup:
    """The message that `rank` needs from another rank before `coming` (none, or one)."""
    if coming is None or coming.kind == Kind.W:
        return ()
    is_forward = coming.kind == Kind.F
    maker = placement.neighbour(rank, coming.chunk, -1 if is_forward else 1)
    if maker is None or maker[0] == rank:
        return ()
    return (action(Kind.RECV_F if is_forward else Kind.RECV_B, coming.microbatch, coming.chunk),)


def _receives_as_sent(timeline: Timeline, placement: Placement) -> list[list[CommGroup]]:
    """Receives where their messages come: receives[rank][i] stand before the rank's i-th action.

    A message that is made at a time stands on both ranks before the first action that starts at
    this time or later. So all actions and messages of all ranks have a place in one order of time
    that no rank contradicts. Ranks that do one after the other in it never wait for ever, and more
    that is in flight at once, as in a group, can only help. The order also is the same for the
    two ends of every pair of ranks, so that messages match by position.
    """
    made: list[list[tuple[float, int, Action]]] = [[] for _ in timeline.spans]
    for rank, spans in enumerate(timeline.spans):
        for span in spans:
            step = span.action
            if not _sent(step, rank, placement):
                continue
            is_forward = step.kind == Kind.F
            place = placement.neighbour(rank, step.chunk, 1 if is_forward else -1)
            assert place is not None  # or nothing was sent
            kind = Kind.RECV_F if is_forward else Kind.RECV_B
            message = action(kind, step.microbatch, place[1])
            heapq.heappush(made[place[0]], (span.end, rank, message))
    receives: list[list[CommGroup]] = []
    for coming, spans in zip(made, timeline.spans, strict=True):
        gaps: list[CommGroup] = []
        for span in spans:
            group = []
            while coming and coming[0][0] <= span.start:
                group.append(heapq.heappop(coming)[2])
            gaps.append(tuple(group))
        receives.append([*gaps, ()])  # what comes after the last action nobody would need
    return receives
