"""Proves a pipeline plan complete, ordered, paired and free of deadlock, or says why not.

It reads the plan alone, whatever made it, and needs no process: a plan that passes here cannot hang
and cannot train on the wrong micro-batch, provided that the transport keeps the order of messages
between two ranks (NCCL and gloo do).
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from parallel3d.schedules.actions import Action, Kind, Step, row_of
from parallel3d.schedules.placement import StageAssignment
from parallel3d.schedules.reasons import raise_reason
from parallel3d.schedules.simulate import ScheduleError, run_all

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
        raise_reason(plan, microbatches, placement)
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
    """Something is not as it must be; `raise_reason` knows what."""


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
