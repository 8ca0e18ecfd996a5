"""How many messages of a directed pair of ranks can, and must, be under way at once."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from parallel3d.schedules.actions import Action, Kind, Step
from parallel3d.schedules.messages import peer_of
from parallel3d.schedules.placement import StageAssignment


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
_Deed = tuple[_Pair, int]


def _work(steps: Sequence[Step], rank: int, placement: StageAssignment) -> list[_Deed]:
    """What a rank does with messages, in its order."""
    deeds: list[_Deed] = []
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


def _ends(work: Sequence[Sequence[_Deed]], slots: int) -> bool:
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
