"""Puts the messages between the computations of an order: from orders to a plan."""

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


# How many messages of a directed pair of ranks can, and must, be under way at once.


def peak_in_flight(
    plan: Sequence[Sequence[Step]], placement: StageAssignment
) -> dict[tuple[int, int], int]:
    """(sender, receiver) → the most messages that can be sent and not yet received.

    So many buffers never make a sender wait, however late the receiver is. What bounds it is what
    the sender itself must have received before it sends: a message counts as arrived once the
    sender can know, by other messages, that the receiver has gone beyond its receive. The plan must
    have passed the checker.

    Every rank keeps how far it knows each other to be, and every message carries that on: the work
    is the number of messages times the number of ranks.
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
    """`slots` messages for each directed pair, or as much more as the plan cannot do without.

    For a transport with so many places on each way from rank to rank: a send waits until one is
    free, and a message leaves its place, behind those sent before it, when the computation that
    needs it begins. The plan must have passed the checker; then as many places as there are
    messages always suffice.
    """
    work = [_work(steps, rank, placement) for rank, steps in enumerate(plan)]
    while not _ends(work, slots):
        slots *= 2
    return slots


_Pair = tuple[int, int]
# A send (0), or that the messages up to a number must have come.
_Event = tuple[_Pair, int]


def _work(steps: Sequence[Step], rank: int, placement: StageAssignment) -> list[_Event]:
    """What a rank does with messages, in its order."""
    deeds: list[_Event] = []
    expected: dict[_Pair, int] = {}
    number: dict[Action, tuple[_Pair, int]] = {}  # of the computation that needs it
    for step in steps:
        if isinstance(step, Action):
            for kind in (step.kind, Kind.I) if step.kind == Kind.B else (step.kind,):
                found = number.pop(Action(kind, step.microbatch, step.chunk), None)
                if found is not None:
                    deeds.append(found)
            continue
        for message in step:
            peer = peer_of(message, rank, placement)
            if message.kind.is_send:
                deeds.append(((rank, peer), 0))
                continue
            pair = (peer, rank)
            expected[pair] = expected.get(pair, 0) + 1
            kind = Kind.F if message.kind == Kind.RECV_F else Kind.I
            reader = Action(kind, message.microbatch, message.chunk)
            number[reader] = (pair, expected[pair])
    return deeds


def _ends(work: Sequence[Sequence[_Event]], slots: int) -> bool:
    """Whether all ranks come to the end of their work. In which order they try does not matter."""
    position = [0] * len(work)
    sent: dict[_Pair, int] = {}
    taken: dict[_Pair, int] = {}
    ready = deque(range(len(work)))
    while ready:
        rank = ready.popleft()
        deeds = work[rank]
        while position[rank] < len(deeds):
            pair, number = deeds[position[rank]]
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
    return all(at == len(deeds) for at, deeds in zip(position, work, strict=True))


class _Run:
    """The plan being run by a transport that buffers everything.

    knows[a][b]: the last step of b that a knows to be behind b.
    """

    def __init__(self, plan: Sequence[Sequence[Step]], placement: StageAssignment) -> None:
        ranks = placement.ranks
        self.position, self.posted = [0] * ranks, [-1] * ranks
        self.knows = [[-1] * ranks for _ in range(ranks)]
        self.sent: dict[_Pair, int] = {}
        self.gone: dict[_Pair, int] = {}  # of those sent, known to have been received
        self.peaks: dict[_Pair, int] = {}
        self.carried: dict[_Pair, deque[list[int]]] = {}
        self.sends: list[list[list[int]]] = []  # by rank and step: to whom
        self.receives: list[list[list[int]]] = []  # by rank and step: from whom
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
        """The sends of the rank's step, once; returns the ranks that may go on with them."""
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
        """The receives of the rank's step, all or none; whether they have come."""
        sources = self.receives[rank][self.position[rank]]
        for source in set(sources):
            if len(self.carried.get((source, rank), ())) < sources.count(source):
                return False
        for source in sources:
            news = self.carried[source, rank].popleft()
            self.knows[rank] = list(map(max, self.knows[rank], news))
        return True
