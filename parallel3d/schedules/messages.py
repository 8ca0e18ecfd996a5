"""Adds messages to compute orders, and counts the messages in flight between two ranks."""

from __future__ import annotations

from collections import deque
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
from parallel3d.schedules.orders import StageAssignment
from parallel3d.schedules.simulate import Costs, clock

# (kinds that make and read a message, whether it goes forward, its send and its receive).
_FLOWS = (
    ((Kind.F,), True, Kind.SEND_F, Kind.RECV_F),
    ((Kind.B, Kind.I), False, Kind.SEND_B, Kind.RECV_B),
)


def add_communication(
    compute: Sequence[Sequence[Action]], placement: StageAssignment | None = None
) -> PipelineProgram:
    """Lowers compute orders to a program: one group of messages between consecutive actions.

    Messages of a group must be in flight together: in 1F1B's steady state a stage sends an
    activation to the neighbour that sends it a gradient, and two blocking sends would deadlock once
    messages outgrow the transport's buffer. Chunks of one rank exchange no messages; no group is
    empty. A send stands right after its computation.

    Without a `placement` (one chunk per rank) a receive stands right before its reader, which is
    correct for orders that read messages in the order of the sends. With a `placement` a receive
    stands at its arrival when every action takes one unit of time (`_at_arrival`), so that any
    order that can run at all also runs with messages.

    Raises ScheduleError if ranks wait in a circle, `placement` given; else the checker finds it.
    """
    count = 1 + max((max([s.microbatch for s in order], default=0) for order in compute), default=0)
    if placement is None:
        placement = StageAssignment(len(compute) or 1)
        return [
            _before_readers(order, _links(rank, placement, count))
            for rank, order in enumerate(compute)
        ]
    return _at_arrival(compute, placement, count)


def peer_of(message: Action, rank: int, placement: StageAssignment) -> int:
    """Returns the rank at the other end of a message of `rank`; raises ValueError if none is."""
    offset = 1 if message.kind in (Kind.SEND_F, Kind.RECV_B) else -1
    place = placement.neighbour(rank, message.chunk, offset)
    if place is None:
        raise ValueError(f"rank {rank} has no neighbour for {message}")
    return place[0]


class _Links(NamedTuple):
    """Messages of one rank by the `row` of their computation; `targets`: receiver and receives."""

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
    """Returns one rank's steps, each receive right before its reader."""
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


def _at_arrival(
    compute: Sequence[Sequence[Action]], placement: StageAssignment, count: int
) -> PipelineProgram:
    """Returns all ranks' steps, each receive at the arrival of its message.

    A message made at time t stands on both ranks before the first action that starts at t or later.
    So all actions and messages of all ranks fit into one order of time: ranks that follow it never
    wait in a circle, and both ends of a pair of ranks have their messages in the same order.
    """
    starts, ends = clock(compute, placement, Costs.even(placement))
    links = [_links(rank, placement, count) for rank in range(placement.ranks)]
    # By rank and sender: arrival times and receives, in order of time.
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
    """Returns one rank's steps; of simultaneous messages the lower peer's goes first."""
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


def peak_in_flight(
    plan: Sequence[Sequence[Step]], placement: StageAssignment
) -> dict[tuple[int, int], int]:
    """Returns (sender, receiver) → the most messages in flight: sent and perhaps not yet received.

    So many buffers never make a sender wait, however late the receiver is. A message counts as
    received once the sender can know it from messages that it has itself received. Every message
    carries its sender's knowledge of all ranks on: O(messages × ranks). The plan must be sound.
    """
    run = _Run(plan, placement)
    ready = deque(range(placement.ranks))
    while ready:
        rank = ready.popleft()
        while run.position[rank] < len(plan[rank]):
            ready += run.send(rank)
            if not run.receive(rank):
                break
            run.position[rank] += 1
    return run.peaks


def enough_slots(plan: Sequence[Sequence[Step]], placement: StageAssignment, slots: int) -> int:
    """Returns the buffer slots per (sender, receiver): `slots`, doubled until the plan can run.

    A send waits for a free slot; a message leaves its slot, behind those sent before it, when the
    computation that needs it begins. The plan must be sound.
    """
    work = [_work(steps, rank, placement) for rank, steps in enumerate(plan)]
    while not _ends(work, slots):
        slots *= 2
    return slots


_Pair = tuple[int, int]
# A send (number 0), or a wait until `number` messages of the pair have come.
_Event = tuple[_Pair, int]


def _work(steps: Sequence[Step], rank: int, placement: StageAssignment) -> list[_Event]:
    """Returns one rank's sends and waits, in order."""
    events: list[_Event] = []
    expected: dict[_Pair, int] = {}
    number: dict[Action, tuple[_Pair, int]] = {}  # reader → the wait for its message
    for step in steps:
        if isinstance(step, Action):
            for kind in (step.kind, Kind.I) if step.kind == Kind.B else (step.kind,):
                found = number.pop(Action(kind, step.microbatch, step.chunk), None)
                if found is not None:
                    events.append(found)
            continue
        for message in step:
            peer = peer_of(message, rank, placement)
            if message.kind.is_send:
                events.append(((rank, peer), 0))
                continue
            pair = (peer, rank)
            expected[pair] = expected.get(pair, 0) + 1
            kind = Kind.F if message.kind == Kind.RECV_F else Kind.I
            reader = Action(kind, message.microbatch, message.chunk)
            number[reader] = (pair, expected[pair])
    return events


def _ends(work: Sequence[Sequence[_Event]], slots: int) -> bool:
    """Whether all ranks can complete their events; the order in which ranks are tried is free."""
    position = [0] * len(work)
    sent: dict[_Pair, int] = {}
    taken: dict[_Pair, int] = {}
    ready = deque(range(len(work)))
    while ready:
        rank = ready.popleft()
        events = work[rank]
        while position[rank] < len(events):
            pair, number = events[position[rank]]
            if number == 0:
                if sent.get(pair, 0) - taken.get(pair, 0) == slots:
                    break
                sent[pair] = sent.get(pair, 0) + 1
                ready.append(pair[1])
            else:
                if sent.get(pair, 0) < number:
                    break
                taken[pair] = max(taken.get(pair, 0), number)
                ready.append(pair[0])
            position[rank] += 1
    return all(at == len(events) for at, events in zip(position, work, strict=True))


class _Run:
    """Runs a plan on a transport with unlimited buffers.

    knows[a][b]: the last step that rank a knows rank b to have completed.
    """

    def __init__(self, plan: Sequence[Sequence[Step]], placement: StageAssignment) -> None:
        ranks = placement.ranks
        self.position, self.posted = [0] * ranks, [-1] * ranks
        self.knows = [[-1] * ranks for _ in range(ranks)]
        self.sent: dict[_Pair, int] = {}
        self.gone: dict[_Pair, int] = {}  # messages that the sender knows to be received
        self.peaks: dict[_Pair, int] = {}
        self.carried: dict[_Pair, deque[list[int]]] = {}
        self.sends: list[list[list[int]]] = []  # by rank and step: receivers
        self.receives: list[list[list[int]]] = []  # by rank and step: senders
        self.received_at: dict[_Pair, list[int]] = {}  # steps of the receiver
        for rank, steps in enumerate(plan):
            groups = [() if isinstance(step, Action) else step for step in steps]
            ends = [
                ([peer_of(m, rank, placement) for m in group if m.kind.is_send],
                 [peer_of(m, rank, placement) for m in group if not m.kind.is_send])
                for group in groups
            ]  # fmt: skip
            self.sends.append([to for to, _ in ends])
            self.receives.append([sources for _, sources in ends])
            for index, sources in enumerate(self.receives[rank]):
                for source in sources:
                    self.received_at.setdefault((source, rank), []).append(index)

    def send(self, rank: int) -> list[int]:
        """Posts the sends of the rank's step once; returns the receivers."""
        index = self.position[rank]
        if self.posted[rank] == index:
            return []
        self.posted[rank] = index
        for peer in self.sends[rank][index]:
            pair = (rank, peer)
            self.sent[pair] = self.sent.get(pair, 0) + 1
            arrivals, done = self.received_at[pair], self.gone.get(pair, 0)
            while done < len(arrivals) and arrivals[done] < self.knows[rank][peer]:
                done += 1
            self.gone[pair] = done
            self.peaks[pair] = max(self.peaks.get(pair, 0), self.sent[pair] - done)
            news = self.knows[rank].copy()
            news[rank] = index
            self.carried.setdefault(pair, deque()).append(news)
        return self.sends[rank][index]

    def receive(self, rank: int) -> bool:
        """Takes the messages of the rank's step if all have come, and returns whether they have."""
        sources = self.receives[rank][self.position[rank]]
        for source in set(sources):
            if len(self.carried.get((source, rank), ())) < sources.count(source):
                return False
        for source in sources:
            news = self.carried[source, rank].popleft()
            self.knows[rank] = list(map(max, self.knows[rank], news))
        return True
