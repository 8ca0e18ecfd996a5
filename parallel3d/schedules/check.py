"""Why a pipeline plan cannot run: the rank, the action and the reason, found list by list.

What `check` says of a plan that it cannot prove sound.
"""

from __future__ import annotations

import functools
import operator
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from typing import TypeAlias

from parallel3d.schedules.actions import Action, Kind, Step, row_of
from parallel3d.schedules.orders import StageAssignment
from parallel3d.schedules.simulate import ScheduleError, run_all

# A message of a group: its action, the rank at its other end, whether it is the send, and its
# number among all that go from and to the same two ranks in this direction.
Member: TypeAlias = tuple[Action, int, bool, int]
Group: TypeAlias = list[Member]
# Of a message: is a backward's, stage that reads it, micro-batch.
_Name: TypeAlias = tuple[bool, int, int]


def diagnose(
    plan: Sequence[Sequence[Step]], microbatches: int | None, placement: StageAssignment
) -> None:
    """Raise ScheduleError for the first fault of `plan`, in the order of `check`'s promises."""
    ranks = [_Rank(rank, steps, placement) for rank, steps in enumerate(plan)]
    highest = max((rank.highest for rank in ranks), default=-1)
    expected = highest + 1 if microbatches is None else microbatches
    if not plan or not expected:
        raise ScheduleError("the plan is empty: it needs at least one stage and one micro-batch")
    for rank in ranks:
        rank.check_complete(expected)
        rank.check_order(expected)
    _check_pairs(ranks)
    _check_deadlock([rank.groups for rank in ranks])


class _Rank:
    """One rank's actions, sorted once so that each question is asked of whole lists.

    positions: for each kind (B counts as I, and as W too) and chunk, micro-batch → its place.
    sent, received: by peer, (is a backward's, stage that reads it, micro-batch), in order.
    groups: the members of each group of messages, for the search for deadlocks.
    """

    def __init__(self, rank: int, steps: Sequence[Step], placement: StageAssignment) -> None:
        self.rank, self.placement = rank, placement
        self.stages = [placement.stage(rank, chunk) for chunk in range(placement.chunks)]
        self.peers = _peers(rank, placement)
        kinds = [kind for kind in Kind if kind != Kind.B]
        self.positions: dict[tuple[Kind, int], dict[int, int]] = {
            one: {} for one in product(kinds, range(len(self.stages)))
        }
        self.sent: dict[int, list[_Name]] = {}
        self.received: dict[int, list[_Name]] = {}
        self.groups: list[list[Member]] = []
        self.whole: set[tuple[int, int]] = set()  # (chunk, micro-batch) of B
        self.highest, self.place = -1, 0
        for step in steps:
            if isinstance(step, Action):
                self._compute(step)
            else:
                self._messages(step)

    def _compute(self, step: Action) -> None:
        kind, chunk, m = step.kind, step.chunk, step.microbatch
        if not kind.is_compute:
            raise ScheduleError(f"{step} is a message and must stand in a group")
        found = self._taken(step, Kind.I if kind == Kind.B else kind)
        found[m] = self.place
        if kind == Kind.B:
            self._taken(step, Kind.W)[m] = self.place
            self.whole.add((chunk, m))
        self.place += 1

    def _taken(self, step: Action, kind: Kind) -> dict[int, int]:
        """The positions of this kind and chunk, where the micro-batch must not stand yet."""
        found = self.positions.get((kind, step.chunk))
        if found is None:
            many = f"{len(self.stages)} chunks" if len(self.stages) > 1 else "one chunk"
            raise ScheduleError(f"rank {self.rank} has {step}, but plans have {many} per rank")
        m = step.microbatch
        if m in found:
            is_whole = (step.chunk, m) in self.whole
            if kind in (Kind.I, Kind.W) and is_whole != (step.kind == Kind.B):
                raise ScheduleError(
                    f"rank {self.rank} has {step} beside another backward of the same micro-batch: "
                    "it takes either B, or I and W"
                )
            raise ScheduleError(f"rank {self.rank} has {step} twice")
        if m > self.highest:
            self.highest = m
        return found

    def _messages(self, group: Sequence[Action]) -> None:
        members: list[Member] = []
        for message in group:
            kind, chunk, m = message.kind, message.chunk, message.microbatch
            if kind.is_compute:
                raise ScheduleError(f"{message} computes and cannot stand in a group of messages")
            found = self._taken(message, kind)
            peer = self.peers[kind, chunk]
            if peer is None:
                raise ScheduleError(
                    f"rank {self.rank} of {self.placement.ranks} has {message}, but has no "
                    "neighbour on that side"
                )
            found[m] = self.place
            self.place += 1
            stage = self.stages[chunk]
            if kind in (Kind.SEND_F, Kind.SEND_B):
                reader = stage + 1 if kind == Kind.SEND_F else stage - 1
                flow = self.sent.setdefault(peer, [])
                name = (kind == Kind.SEND_B, reader, m)
                is_send = True
            else:
                flow = self.received.setdefault(peer, [])
                name = (kind == Kind.RECV_B, stage, m)
                is_send = False
            members.append((message, peer, is_send, len(flow)))
            flow.append(name)
        if members:
            self.groups.append(members)

    def check_complete(self, microbatches: int) -> None:
        """Each micro-batch has exactly the actions that this rank owes it, each of them once."""
        for (kind, chunk), found in self.positions.items():
            if kind.is_compute or self.peers[kind, chunk] is not None:
                if len(found) == microbatches and max(found) < microbatches and min(found) >= 0:
                    continue
                for m in found:
                    if not 0 <= m < microbatches:
                        said = self._said(kind, m, chunk)
                        numbers = f"micro-batches are 0 to {microbatches - 1}"
                        raise ScheduleError(f"rank {self.rank} has {said}, but {numbers}")
                absent = self._missing(kind, min(set(range(microbatches)) - found.keys()), chunk)
                raise ScheduleError(f"rank {self.rank} never does {absent}")

    def _said(self, kind: Kind, m: int, chunk: int) -> Action:
        is_whole = (chunk, m) in self.whole
        return Action(Kind.B if is_whole and kind in (Kind.I, Kind.W) else kind, m, chunk)

    def _missing(self, kind: Kind, m: int, chunk: int) -> Action:
        """The backward that is missing goes by the name that its chunk's others have."""
        splits = any((chunk, other) not in self.whole for other in self.positions[Kind.I, chunk])
        halves = (self.positions[Kind.I, chunk], self.positions[Kind.W, chunk])
        whole = kind in (Kind.I, Kind.W) and not splits and not any(m in half for half in halves)
        return Action(Kind.B if whole else kind, m, chunk)

    def check_order(self, microbatches: int) -> None:
        """Nothing happens on this (complete) rank before what it needs of it."""
        numbers = range(microbatches)
        for (kind, chunk), found in self.positions.items():
            if not found:
                continue
            places = list(map(found.__getitem__, numbers))
            for need, of in self._needs(kind, chunk):
                before = list(map(self.positions[need, of].__getitem__, numbers))
                if any(map(operator.gt, before, places)):
                    m = next(m for m in numbers if before[m] > places[m])
                    raise ScheduleError(
                        f"rank {self.rank} does {self._said(kind, m, chunk)} before "
                        f"{self._said(need, m, of)}, which it needs"
                    )

    def _needs(self, kind: Kind, chunk: int) -> list[tuple[Kind, int]]:
        """(kind, chunk) of what must be done on the same rank before this kind of this chunk."""
        if kind == Kind.W:
            return [(Kind.I, chunk)]
        if kind == Kind.SEND_F:
            return [(Kind.F, chunk)]
        if kind == Kind.SEND_B:
            return [(Kind.I, chunk)]
        if kind not in (Kind.F, Kind.I):
            return []
        forward = kind == Kind.F
        needs = [] if forward else [(Kind.F, chunk)]
        source = self.placement.neighbour(self.rank, chunk, -1 if forward else 1)
        if source is not None and source[0] == self.rank:
            needs.append((kind, source[1]))
        elif source is not None:
            needs.append((Kind.RECV_F if forward else Kind.RECV_B, chunk))
        return needs


_OFFSET = {Kind.SEND_F: 1, Kind.RECV_B: 1, Kind.SEND_B: -1, Kind.RECV_F: -1}


def _peers(rank: int, placement: StageAssignment) -> dict[tuple[Kind, int], int | None]:
    """The rank at the other end of each kind of message of each chunk; None where there is none."""
    peers: dict[tuple[Kind, int], int | None] = {}
    for chunk in range(placement.chunks):
        for kind, offset in _OFFSET.items():
            place = placement.neighbour(rank, chunk, offset)
            peers[kind, chunk] = None if place is None or place[0] == rank else place[0]
    return peers


def _check_pairs(ranks: Sequence[_Rank]) -> None:
    """Every two ranks agree on the order of their messages in each direction.

    They match by position, not by name: an executor that trusted a swapped receive would compute
    on another micro-batch's data, or another chunk's, and train wrongly without an error.
    """
    for sender in ranks:
        for peer, sent in sender.sent.items():
            received = ranks[peer].received.get(sender.rank, [])
            if sent == received:
                continue
            pairs = enumerate(zip(sent, received, strict=True))
            number, (ours, theirs) = next(pair for pair in pairs if pair[1][0] != pair[1][1])
            raise ScheduleError(
                f"message {number} from rank {sender.rank} to rank {peer} is sent as "
                f"{_message(ours, sender.placement, True)} but received as "
                f"{_message(theirs, sender.placement, False)}: receives are swapped"
            )


def _message(name: _Name, placement: StageAssignment, is_send: bool) -> Action:
    is_backward, reader, m = name
    maker = reader + 1 if is_backward else reader - 1
    chunk = placement.place(maker if is_send else reader)[1]
    if is_send:
        return Action(Kind.SEND_B if is_backward else Kind.SEND_F, m, chunk)
    return Action(Kind.RECV_B if is_backward else Kind.RECV_F, m, chunk)


def _check_deadlock(groups: Sequence[Sequence[Group]]) -> None:
    """Run the groups of every rank, each blocking until all of its counterparts are posted.

    The messages must be paired. Posting is monotone: a rank that can go on now could also go on
    later, so the order in which ranks are tried does not matter, and one pass from rank to woken
    rank decides. Raises ScheduleError with the circle of those who wait.
    """
    size = len(groups)
    # posted[is_send][a * size + b]: how many sends (or receives) from a to b have been posted.
    posted = ([0] * size * size, [0] * size * size)
    position = [0] * size
    entered = [-1] * size  # the last group that this rank has posted
    ready = deque(range(size))
    while ready:
        rank = ready.popleft()
        mine = groups[rank]
        index = position[rank]
        while index < len(mine):
            group = mine[index]
            if entered[rank] < index:
                entered[rank] = index
                for _, peer, is_send, number in group:
                    pair = rank * size + peer if is_send else peer * size + rank
                    posted[is_send][pair] = number + 1
                    ready.append(peer)
            if any(
                posted[not is_send][rank * size + peer if is_send else peer * size + rank] <= number
                for _, peer, is_send, number in group
            ):
                break
            index += 1
        position[rank] = index
    blocked = {
        rank: [
            member
            for member in groups[rank][position[rank]]
            if not _is_met(member, rank, size, posted)
        ]
        for rank in range(size)
        if position[rank] < len(groups[rank])
    }
    if blocked:
        raise ScheduleError(_describe(blocked, groups, position))


def _is_met(member: Member, rank: int, size: int, posted: tuple[list[int], list[int]]) -> bool:
    _, peer, is_send, number = member
    pair = rank * size + peer if is_send else peer * size + rank
    return posted[not is_send][pair] > number


def _describe(
    blocked: dict[int, Group], groups: Sequence[Sequence[Group]], position: Sequence[int]
) -> str:
    """Follow who waits for whom until a rank comes up again, and name that circle."""
    path: list[int] = []
    rank = min(blocked)
    # A finished rank has posted all its messages, so whoever blocks waits for a blocked rank.
    while rank not in path:
        path.append(rank)
        rank = blocked[rank][0][1]
    sentences = []
    for member in path[path.index(rank) :]:
        action, peer, is_send, _ = blocked[member][0]
        group = " ".join(str(message[0]) for message in groups[member][position[member]])
        verb = f"send {action} to" if is_send else f"get {action} from"
        sentences.append(f"rank {member} is in group ({group}) and waits to {verb} rank {peer}")
    return "deadlock: " + ", while ".join(sentences)


# Proves a pipeline plan complete, ordered, paired and free of deadlock, or says why not.
#
# It reads the plan alone, whatever made it, and needs no process: a plan that passes here cannot
# hang and cannot train on the wrong micro-batch, provided that the transport keeps the order of
# messages between two ranks (NCCL and gloo do).


__all__ = ["ScheduleError", "ScheduleReport", "check"]


@dataclass(frozen=True)
class ScheduleReport:
    """What a sound plan costs.

    `peak_live[rank]` is the most chunk-activations that this rank holds at once: those of one
    micro-batch in one of its chunks. They count in full from the start of F until nothing needs
    them any more, the end of B or of W. Qi et al. 2023 (table 1) count 34 parts of 34 until I
    and 32 of them from there to W, without what attention keeps; both as 34 is never too little.
    `messages` counts the messages sent by all ranks together.
    """

    placement: StageAssignment
    microbatches: int
    peak_live: tuple[int, ...]
    messages: int

    @property
    def stages(self) -> int:
        return self.placement.stages

    @property
    def peak_of_1f1b(self) -> float:
        """The largest peak as a fraction of what 1F1B's first rank holds: min(p, m) micro-batches
        of a whole rank's layers."""
        most = min(self.placement.ranks, self.microbatches) * self.placement.chunks
        return max(self.peak_live) / most


def check(
    plan: Sequence[Sequence[Step]],
    microbatches: int | None = None,
    placement: StageAssignment | None = None,
) -> ScheduleReport:
    """Prove `plan` (plan[rank] = steps of that rank) sound and return its costs.

    `microbatches` is how many there should be; without it, the highest number in the plan counts.
    `placement` is one chunk per rank if left out.

    Raises ScheduleError, naming rank and action, if an action is missing, doubled or alien to its
    rank (complete); a backward precedes its forward, W its I, compute its receive, or a send its
    compute (ordered); the n-th receive from a rank is not of what that rank sends n-th (paired); or
    ranks wait for each other when every group of messages blocks until all of its counterparts are
    posted (deadlock; so does a transport that buffers nothing, the worst that can be met: where
    sends end at once, ranks wait for a part of the same, and never for ever either).
    """
    placement = placement or StageAssignment(len(plan) or 1)
    if len(plan) not in (0, placement.ranks):
        raise ScheduleError(f"the plan has {len(plan)} ranks, and its placement {placement.ranks}")
    expected = _highest(plan) + 1 if microbatches is None else microbatches
    proof = _Proof(plan, placement, expected)
    if not proof.holds():
        diagnose(plan, microbatches, placement)
        raise AssertionError(f"no fault was found in a plan that could not be proven: {plan}")
    sends = sum(map(len, proof.sent.values()))
    return ScheduleReport(placement, expected, tuple(proof.peaks), sends)


def _highest(plan: Sequence[Sequence[Step]]) -> int:
    numbers = (
        one.microbatch
        for steps in plan
        for step in steps
        for one in ((step,) if isinstance(step, Action) else step)
    )
    return max(numbers, default=-1)


class _UnsoundError(Exception):
    """Something is not as it must be; `diagnose` knows what."""


# What a rank has done for a micro-batch in a chunk, as bits; B does what I and W do.
_BITS = {
    kind: 1 << bit
    for bit, kind in enumerate(
        (Kind.F, Kind.I, Kind.W, Kind.SEND_F, Kind.RECV_F, Kind.SEND_B, Kind.RECV_B)
    )
}
_WIDTH = len(_BITS)
_BITS[Kind.B] = _BITS[Kind.I] | _BITS[Kind.W]


@dataclass(frozen=True)
class _Template:
    """What a chunk's actions need and do, as bits over those of the chunk before, by `row`.

    computes: (row of chunk 0, bits needed, bits set, activations taken or given back).
    messages: (row of chunk 0, bits needed, bits set, is a send, goes to or comes from the next
    stage). all: the bits of a micro-batch that is through.
    """

    computes: list[tuple[int, int, int, int]]
    messages: list[tuple[int, int, int, bool, bool]]
    all: int


@functools.cache
def _template(before: bool | None, after: bool | None) -> _Template:
    """Given whether the stages before and after lie on the same rank; None: there is none."""
    own = {kind: bits << _WIDTH for kind, bits in _BITS.items()}
    forward = {None: 0, True: _BITS[Kind.F], False: own[Kind.RECV_F]}[before]
    backward = {None: 0, True: own[Kind.I] << _WIDTH, False: own[Kind.RECV_B]}[after]
    backward |= own[Kind.F]
    computes = (
        (Kind.F, forward, 1),
        (Kind.I, backward, 0),
        (Kind.B, backward, -1),
        (Kind.W, own[Kind.I], -1),
    )
    messages = [
        (row_of(kind, 0), own[maker] if maker else 0, own[kind], maker is not None, is_next)
        for kind, maker, is_next in (
            (Kind.SEND_F, Kind.F, True),
            (Kind.RECV_F, None, False),
            (Kind.SEND_B, Kind.I, False),
            (Kind.RECV_B, None, True),
        )
        if (after if is_next else before) is False
    ]
    return _Template(
        [(row_of(kind, 0), need, own[kind], held) for kind, need, held in computes],
        messages,
        functools.reduce(operator.or_, [own[kind] for kind, _, _ in computes])
        | sum(bits for _, _, bits, _, _ in messages),
    )


# Where deeds of a micro-batch are noted, the bits to look at, how these must be, those to set.
_Computes: TypeAlias = list[tuple[list[int], int, int, int, int]]
_NEVER = (0, 1, 0)
_Flow: TypeAlias = list[int]
_Messages: TypeAlias = list[tuple[list[int], int, int, int, _Flow, _Flow, int]]


class _Proof:
    """Runs a plan, every rank to its next group that blocks, and notes what has been done.

    An action may come once, when the bits of what it needs are set; a group ends when of each flow
    between its rank and others as much is posted at the other end. sent, received: (sender,
    receiver) → numbers of the messages in order, alike for both ends.
    """

    def __init__(
        self, plan: Sequence[Sequence[Step]], placement: StageAssignment, microbatches: int
    ) -> None:
        self.plan, self.placement, self.microbatches = plan, placement, microbatches
        self.sent: dict[tuple[int, int], _Flow] = {}
        self.received: dict[tuple[int, int], _Flow] = {}
        self.peaks = [0] * placement.ranks
        self.owed: list[tuple[list[int], int]] = []  # notes, and how each must be at the end

    def holds(self) -> bool:
        """Whether all ranks come to their ends with everything done, in one order of messages."""
        if not 1 <= self.microbatches <= min(map(len, self.plan), default=0):
            return False
        runs = [self._run(rank, *self._rules(rank)) for rank in range(self.placement.ranks)]
        try:
            if not run_all(runs):
                return False
        except (IndexError, _UnsoundError):  # a row or a micro-batch that is not this rank's
            return False
        return self.sent == self.received and all(
            notes.count(owed) == self.microbatches for notes, owed in self.owed
        )

    def _run(
        self,
        rank: int,
        computes: _Computes,
        messages: _Messages,
    ) -> Iterator[int]:
        live = peak = groups = 0
        for step in self.plan[rank]:
            if type(step) is Action:
                notes, care, need, bits, held = computes[step.row]
                m = step.microbatch
                done = notes[m]
                if done & care != need:
                    raise _UnsoundError
                notes[m] = done | bits
                live += held
                if live > peak:
                    peak = live
                continue
            waits: list[tuple[_Flow, _Flow]] | None = None
            for message in step:
                notes, care, need, bits, mine, other, first = messages[message.row]
                m = message.microbatch
                done = notes[m]
                if done & care != need:
                    raise _UnsoundError
                notes[m] = done | bits
                mine.append(first + m)
                if len(other) < len(mine):
                    if waits is None:
                        waits = []
                    waits.append((mine, other))
            groups += 1
            if waits is not None:
                for mine, other in waits:
                    while len(other) < len(mine):
                        yield groups
        self.peaks[rank] = peak

    def _rules(self, rank: int) -> tuple[_Computes, _Messages]:
        """By row: rules of computations, with the activations that they take; rules of messages,
        with both ends of their flow and their number for micro-batch 0."""
        placement, count = self.placement, self.microbatches
        notes: list[int] = []
        rows = row_of(Kind.F, placement.chunks)
        computes: _Computes = [([0] * count, *_NEVER, 0)] * rows
        messages: _Messages = [([0] * count, *_NEVER, [], [], 0)] * rows
        shift = all_done = 0
        for chunk, (stage, before, after) in enumerate(placement.around(rank)):
            turned = None if before is None else before[0] == rank
            turns = None if after is None else after[0] == rank
            if turned:
                shift += _WIDTH  # neighbours on one rank share their notes
            else:
                notes, shift, all_done = [0] * count, 0, 0
            template = _template(turned, turns)
            first_row = row_of(Kind.F, chunk)
            for row, need, bits, held in template.computes:
                need, bits = need << shift, bits << shift
                computes[first_row + row] = notes, need | bits, need, bits, held
            for row, need, bits, is_send, is_next in template.messages:
                need, bits = need << shift, bits << shift
                place = after if is_next else before
                assert place is not None  # or there was no message
                pair = (rank, place[0]) if is_send else (place[0], rank)
                mine, other = self.sent.setdefault(pair, []), self.received.setdefault(pair, [])
                if not is_send:
                    mine, other = other, mine
                # The numbers of a message begin with the boundary that it crosses, and its way.
                boundary = 2 * (stage + is_next) + (is_send == is_next)
                first = boundary * count
                messages[first_row + row] = notes, need | bits, need, bits, mine, other, first
            all_done |= template.all << shift
            if not turns:
                self.owed.append((notes, all_done))
        return computes, messages
