"""Proves a pipeline plan complete, ordered, paired and free of deadlock, or says why not.

It reads the plan alone, whatever made it, and needs no process: a plan that passes here cannot hang
and cannot train on the wrong micro-batch, provided that the transport keeps the order of messages
between two ranks (NCCL and gloo do).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from parallel3d.schedules.actions import Action, Kind, Step, row_of
from parallel3d.schedules.placement import Placement
from parallel3d.schedules.reasons import raise_reason
from parallel3d.schedules.simulate import ScheduleError, run_all

__all__ = ["Report", "ScheduleError", "check"]


@dataclass(frozen=True)
class Report:
    """What a sound plan costs.

    `peak_live[rank]` is the most chunk-activations that this rank holds at once: those of one
    micro-batch in one of its chunks. They count in full from the start of F until nothing needs
    them any more, the end of B or of W. Qi et al. 2023 (table 1) count 34 parts of 34 until I
    and 32 of them from there to W, without what attention keeps; both as 34 is never too little.
    `messages` counts the messages sent by all ranks together.
    """

    placement: Placement
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
    placement: Placement | None = None,
) -> Report:
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
    placement = placement or Placement(len(plan) or 1)
    if len(plan) not in (0, placement.ranks):
        raise ScheduleError(f"the plan has {len(plan)} ranks, and its placement {placement.ranks}")
    expected = _highest(plan) + 1 if microbatches is None else microbatches
    proof = _Proof(plan, placement, expected)
    if not proof.holds():
        raise_reason(plan, microbatches, placement)
        raise AssertionError(f"no fault was found in a plan that could not be proven: {plan}")
    sends = sum(map(len, proof.sent.values()))
    return Report(placement, expected, tuple(proof.peaks), sends)


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
_OWED = {Kind.F: 0, Kind.I: _BITS[Kind.F], Kind.B: _BITS[Kind.F], Kind.W: _BITS[Kind.I]}
_HELD = {Kind.F: 1, Kind.I: 0, Kind.B: -1, Kind.W: -1}  # activations taken or given back
# A message: the way to its other end, what makes it (if sent), and how it is called there.
_MESSAGES = {
    Kind.SEND_F: (1, Kind.F, Kind.RECV_F),
    Kind.RECV_F: (-1, None, Kind.SEND_F),
    Kind.SEND_B: (-1, Kind.I, Kind.RECV_B),
    Kind.RECV_B: (1, None, Kind.SEND_B),
}
# Where deeds of a micro-batch are noted, the bits to look at, how these must be, those to set.
_Computes: TypeAlias = dict[int, tuple[dict[int, int], int, int, int, int]]
_Messages: TypeAlias = dict[int, tuple[dict[int, int], int, int, int, list[int], int]]
_Flow: TypeAlias = list[int]


class _Proof:
    """Runs a plan, every rank to its next group that blocks, and notes what has been done.

    An action may come once, when the bits of what it needs are set; a group ends when of each flow
    between its rank and others as much is posted at the other end. sent, received: (sender,
    receiver) → numbers of the messages in order, alike for both ends.
    """

    def __init__(
        self, plan: Sequence[Sequence[Step]], placement: Placement, microbatches: int
    ) -> None:
        self.plan, self.placement, self.microbatches = plan, placement, microbatches
        self.sent: dict[tuple[int, int], _Flow] = {}
        self.received: dict[tuple[int, int], _Flow] = {}
        self.peaks = [0] * placement.ranks
        self.owed: list[tuple[dict[int, int], int]] = []  # notes, and how each must be at the end

    def holds(self) -> bool:
        """Whether all ranks come to their ends with everything done, in one order of messages."""
        if not self.plan or self.microbatches < 1:
            return False
        runs = [self._run(rank, *self._rules(rank)) for rank in range(self.placement.ranks)]
        try:
            if not run_all(runs):
                return False
        except (KeyError, _UnsoundError):  # a row or a micro-batch that is not this rank's
            return False
        return self.sent == self.received and all(
            list(notes.values()).count(owed) == self.microbatches for notes, owed in self.owed
        )

    def _run(
        self,
        rank: int,
        computes: _Computes,
        messages: _Messages,
        flows: Sequence[tuple[_Flow, _Flow]],
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
            for message in step:
                notes, care, need, bits, flow, first = messages[message.row]
                m = message.microbatch
                done = notes[m]
                if done & care != need:
                    raise _UnsoundError
                notes[m] = done | bits
                flow.append(first + m)
            groups += 1
            for mine, other in flows:
                while len(other) < len(mine):
                    yield groups
        self.peaks[rank] = peak

    def _rules(self, rank: int) -> tuple[_Computes, _Messages, list[tuple[_Flow, _Flow]]]:
        """By row: rules of computations, with the activations that they take; rules of messages,
        with their flow and its number for micro-batch 0. And the flows with their other ends."""
        placement, computes, messages = self.placement, {}, {}
        flows: dict[int, tuple[_Flow, _Flow]] = {}
        notes: dict[int, int] = {}
        shift = all_done = 0
        for chunk in range(placement.chunks):
            stage = placement.stage(rank, chunk)
            before, after = (placement.neighbour(rank, chunk, side) for side in (-1, 1))
            if before is not None and before[0] == rank:
                shift += _WIDTH  # neighbours on one rank share their notes
            else:
                notes, shift, all_done = dict.fromkeys(range(self.microbatches), 0), 0, 0
            inputs = dict.fromkeys(_OWED, 0)
            if before is not None:
                is_here = before[0] == rank
                inputs[Kind.F] = (
                    _BITS[Kind.F] << shift - _WIDTH if is_here else _BITS[Kind.RECV_F] << shift
                )
            if after is not None:
                is_here = after[0] == rank
                inputs[Kind.B] = inputs[Kind.I] = (
                    _BITS[Kind.I] << shift + _WIDTH if is_here else _BITS[Kind.RECV_B] << shift
                )
            for kind, owed in _OWED.items():
                need, bits = owed << shift | inputs[kind], _BITS[kind] << shift
                computes[row_of(kind, chunk)] = notes, need | bits, need, bits, _HELD[kind]
                all_done |= bits
            for kind, (side, maker, _) in _MESSAGES.items():
                place = after if side > 0 else before
                if place is None or place[0] == rank:
                    continue
                need, bits = (_BITS[maker] if maker else 0) << shift, _BITS[kind] << shift
                pair = (rank, place[0]) if maker else (place[0], rank)
                ends = self.sent.setdefault(pair, []), self.received.setdefault(pair, [])
                mine, other = ends if maker else ends[::-1]
                reader = stage + side if maker else stage
                is_backward = kind in (Kind.SEND_B, Kind.RECV_B)
                first = (is_backward * placement.stages + reader) * self.microbatches
                messages[row_of(kind, chunk)] = notes, need | bits, need, bits, mine, first
                flows[id(mine)] = mine, other
                all_done |= bits
            if after is None or after[0] != rank:
                self.owed.append((notes, all_done))
        return computes, messages, list(flows.values())
