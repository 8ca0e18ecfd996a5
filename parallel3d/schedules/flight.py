"""How many messages of each directed pair of ranks can be under way at once."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from parallel3d.schedules.actions import Action, Kind, Step
from parallel3d.schedules.placement import Placement


def peak_in_flight(
    plan: Sequence[Sequence[Step]], placement: Placement
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


class _Run:
    """The plan being run by a transport that buffers everything.

    knows[a][b]: the last step of b that a knows to be behind b.
    """

    def __init__(self, plan: Sequence[Sequence[Step]], placement: Placement) -> None:
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
                ([_peer(m, rank, placement) for m in group if m.kind.is_send],
                 [_peer(m, rank, placement) for m in group if not m.kind.is_send])
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


_Pair = tuple[int, int]


def _peer(message: Action, rank: int, placement: Placement) -> int:
    offset = 1 if message.kind in (Kind.SEND_F, Kind.RECV_B) else -1
    place = placement.neighbour(rank, message.chunk, offset)
    assert place is not None  # the checker has passed it
    return place[0]
