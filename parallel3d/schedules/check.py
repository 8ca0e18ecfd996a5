"""Proves a pipeline program complete, ordered, paired and free of deadlock, or diagnoses it.

The checker reads the program alone and needs no process. A program that passes cannot hang and
cannot train on the wrong micro-batch if the transport keeps the order of messages between two
ranks, as NCCL and gloo do.
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


@dataclass(frozen=True)
class ScheduleReport:
    """Costs of a sound program.

    `peak_live[rank]`: the most chunk-activations (one micro-batch in one chunk) held at once, from
    the start of F to the end of B or W. Qi et al. 2023 (table 1) count 34 units until I and 32 from
    there to W; counting 34 throughout is a safe upper bound.
    `messages`: messages sent by all ranks together.
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
        """The largest peak as a fraction of 1F1B's on its first rank: min(p, m) micro-batches."""
        most = min(self.placement.ranks, self.microbatches) * self.placement.chunks
        return max(self.peak_live) / most


def check(
    plan: Sequence[Sequence[Step]],
    microbatches: int | None = None,
    placement: StageAssignment | None = None,
) -> ScheduleReport:
    """Proves `plan` (plan[rank] = steps of that rank) sound and returns its costs.

    `microbatches` defaults to the highest number in the plan + 1, `placement` to one chunk a rank.

    Raises ScheduleError, naming rank and action, if the plan is not

    - complete: an action is missing, doubled or of another rank;
    - ordered: a backward precedes its forward, W its I, compute its receive, or a send its compute;
    - paired: the n-th receive from a rank is not the n-th send of that rank;
    - free of deadlock when every group of messages blocks until all of its counterparts are posted.
      That is a transport without buffers, the worst case: buffering only removes waits.
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
    """The plan is not sound; `diagnose` finds out why."""


# Progress of one micro-batch in one chunk as a bit mask, one bit per kind; B sets I's and W's.
# Neighbouring stages on one rank share one integer: each chunk's mask is shifted left by _WIDTH
# from the mask of the chunk before, so "F of the previous stage is done" is a bit of the same int.
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
    """Rules of a chunk by `row`, as bit masks.

    Masks are relative to the chunk before: its bits are the lowest _WIDTH, this chunk's the next
    _WIDTH, the following chunk's the third. `_Proof._rules` shifts them to the chunk's place.
    computes: (row of chunk 0, bits needed, bits set, change of live activations).
    messages: (row of chunk 0, bits needed, bits set, is a send, peer is the next stage).
    complete: the bits of a micro-batch that is done.
    """

    computes: list[tuple[int, int, int, int]]
    messages: list[tuple[int, int, int, bool, bool]]
    complete: int


@functools.cache
def _template(before: bool | None, after: bool | None) -> _Template:
    """Returns the rules; `before`, `after`: that stage is on the same rank, or None if none is."""
    # Bits without a shift are the previous chunk's, `own` this one's, `own << _WIDTH` the next's.
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


# By row: (progress by micro-batch, mask to look at, value it must have, bits to set, …). A mask of
# need | bits with value need requires the needed bits and refuses an action that was done already.
_Computes: TypeAlias = list[tuple[list[int], int, int, int, int]]
_NEVER = (0, 1, 0)  # done & 0 == 1 never holds: the rank has no such action
_Flow: TypeAlias = list[int]
_Messages: TypeAlias = list[tuple[list[int], int, int, int, _Flow, _Flow, int]]


class _Proof:
    """Runs a plan, each rank up to its next group that blocks, and notes its progress.

    An action may come once, when the bits that it needs are set. A group ends when each of its
    flows has as many messages posted at the other end. sent, received: (sender, receiver) → numbers
    of the messages in order, the same numbers at both ends.
    """

    def __init__(
        self, plan: Sequence[Sequence[Step]], placement: StageAssignment, microbatches: int
    ) -> None:
        self.plan, self.placement, self.microbatches = plan, placement, microbatches
        self.sent: dict[tuple[int, int], _Flow] = {}
        self.received: dict[tuple[int, int], _Flow] = {}
        self.peaks = [0] * placement.ranks
        self.owed: list[tuple[list[int], int]] = []  # (progress, its value at the end)

    def holds(self) -> bool:
        """Whether every rank ends with all actions done and messages in one order."""
        if not 1 <= self.microbatches <= min(map(len, self.plan), default=0):
            return False
        runs = [self._run(rank, *self._rules(rank)) for rank in range(self.placement.ranks)]
        try:
            if not run_all(runs):
                return False
        except (IndexError, _UnsoundError):  # IndexError: no such chunk or micro-batch
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
        """Returns the rules of computations and messages by row; messages with both ends of their
        flow and the number of micro-batch 0's message."""
        placement, count = self.placement, self.microbatches
        notes: list[int] = []
        rows = row_of(Kind.F, placement.chunks)
        computes: _Computes = [([0] * count, *_NEVER, 0)] * rows
        messages: _Messages = [([0] * count, *_NEVER, [], [], 0)] * rows
        shift = complete = 0
        for chunk, (stage, before, after) in enumerate(placement.around(rank)):
            before_is_local = None if before is None else before[0] == rank
            after_is_local = None if after is None else after[0] == rank
            if before_is_local:
                shift += _WIDTH  # the last stage is local too: share its masks
            else:
                notes, shift, complete = [0] * count, 0, 0
            template = _template(before_is_local, after_is_local)
            first_row = row_of(Kind.F, chunk)
            for row, need, bits, held in template.computes:
                need, bits = need << shift, bits << shift
                computes[first_row + row] = notes, need | bits, need, bits, held
            for row, need, bits, is_send, is_next in template.messages:
                need, bits = need << shift, bits << shift
                place = after if is_next else before
                assert place is not None  # else the template had no message
                pair = (rank, place[0]) if is_send else (place[0], rank)
                mine, other = self.sent.setdefault(pair, []), self.received.setdefault(pair, [])
                if not is_send:
                    mine, other = other, mine
                # Number = (boundary between two stages, direction, micro-batch) as one integer.
                boundary = 2 * (stage + is_next) + (is_send == is_next)
                first = boundary * count
                messages[first_row + row] = notes, need | bits, need, bits, mine, other, first
            complete |= template.complete << shift
            if not after_is_local:
                self.owed.append((notes, complete))
        return computes, messages


# Member of a group of messages: action, peer, whether it is the send, and its position among all
# messages between the two ranks in this direction.
Member: TypeAlias = tuple[Action, int, bool, int]
Group: TypeAlias = list[Member]
# Name of a message: (carries a gradient, stage that reads it, micro-batch).
_Name: TypeAlias = tuple[bool, int, int]


def diagnose(
    plan: Sequence[Sequence[Step]], microbatches: int | None, placement: StageAssignment
) -> None:
    """Raises ScheduleError for the first fault of `plan`; slower than `check`, but names it."""
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
    """One rank's actions, sorted by kind, chunk and peer.

    positions: (kind, chunk) → {micro-batch: position}; B counts as I and as W.
    sent, received: peer → names of the messages, in order.
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
        """Returns the positions of this kind and chunk; raises if the micro-batch has one."""
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
        """Raises ScheduleError unless each micro-batch has each action of this rank once."""
        for (kind, chunk), found in self.positions.items():
            if kind.is_compute or self.peers[kind, chunk] is not None:
                if len(found) == microbatches and max(found) < microbatches and min(found) >= 0:
                    continue
                for m in found:
                    if not 0 <= m < microbatches:
                        wrong = self._as_written(kind, m, chunk)
                        numbers = f"micro-batches are 0 to {microbatches - 1}"
                        raise ScheduleError(f"rank {self.rank} has {wrong}, but {numbers}")
                absent = self._missing(kind, min(set(range(microbatches)) - found.keys()), chunk)
                raise ScheduleError(f"rank {self.rank} never does {absent}")

    def _as_written(self, kind: Kind, m: int, chunk: int) -> Action:
        is_whole = (chunk, m) in self.whole
        return Action(Kind.B if is_whole and kind in (Kind.I, Kind.W) else kind, m, chunk)

    def _missing(self, kind: Kind, m: int, chunk: int) -> Action:
        """Returns the missing action; a backward as B if the chunk's other backwards are B."""
        splits = any((chunk, other) not in self.whole for other in self.positions[Kind.I, chunk])
        halves = (self.positions[Kind.I, chunk], self.positions[Kind.W, chunk])
        whole = kind in (Kind.I, Kind.W) and not splits and not any(m in half for half in halves)
        return Action(Kind.B if whole else kind, m, chunk)

    def check_order(self, microbatches: int) -> None:
        """Raises ScheduleError if an action stands before one of this rank that it needs."""
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
                        f"rank {self.rank} does {self._as_written(kind, m, chunk)} before "
                        f"{self._as_written(need, m, of)}, which it needs"
                    )

    def _needs(self, kind: Kind, chunk: int) -> list[tuple[Kind, int]]:
        """Returns the (kind, chunk) that this kind and chunk needs from the same rank."""
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
    """Returns the peer of each kind of message of each chunk; None where there is no message."""
    peers: dict[tuple[Kind, int], int | None] = {}
    for chunk in range(placement.chunks):
        for kind, offset in _OFFSET.items():
            place = placement.neighbour(rank, chunk, offset)
            peers[kind, chunk] = None if place is None or place[0] == rank else place[0]
    return peers


def _check_pairs(ranks: Sequence[_Rank]) -> None:
    """Raises ScheduleError unless every two ranks agree on the order of their messages.

    Messages match by position: with swapped receives an executor would compute on another
    micro-batch's or chunk's data and train wrongly without an error.
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
    """Runs the groups of every rank, each blocking until all of its counterparts are posted.

    The messages must be paired. Posting is monotone (a rank that can go on now could also go on
    later), so the order in which ranks are tried does not matter. Raises ScheduleError with the
    circle of waiting ranks.
    """
    size = len(groups)
    # posted[is_send][a * size + b]: sends (or receives) from a to b posted so far.
    posted = ([0] * size * size, [0] * size * size)
    position = [0] * size
    entered = [-1] * size  # the last group that each rank has posted
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
    """Follows who waits for whom until a rank comes up again, and describes that circle."""
    path: list[int] = []
    rank = min(blocked)
    # A finished rank has posted all its messages, so a blocked rank waits for a blocked rank.
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
