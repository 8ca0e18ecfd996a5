"""V-Half: a pattern that every micro-batch repeats, chosen for the little memory that it takes.

Qi et al. 2024 (arXiv:2405.15362): where F, I and W take the same time, a rank of two chunks spends
six units of it on a micro-batch. If the six actions of one micro-batch start at times that differ
by no multiple of six on any rank, all other micro-batches can follow it, six units apart, with
nothing idle; and what a rank holds is how long it holds each chunk, over six. On two and three
ranks every such pattern holds at least ¾ and ⅔ of 1F1B's peak: there micro-batches follow at a
longer distance, with units that stay idle, which is the price of the half.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from itertools import count, product
from typing import NamedTuple

from parallel3d.errors import UserError, nearest
from parallel3d.schedules import orders
from parallel3d.schedules.actions import ComputeSchedule, Kind, PipelineProgram, action
from parallel3d.schedules.messages import add_communication
from parallel3d.schedules.orders import StageAssignment
from parallel3d.schedules.simulate import Costs, clock

FULL = 6  # units from one micro-batch to the next where none stays idle
HALF = 0.6  # of 1F1B's peak: what a pattern may hold and still go by its name
# Units from a stage to the next one: forward down and up the V, backward down and up it. Two
# passes in opposite directions must not meet: their sum has a divisor of the period in common.
PACES = ((1, 2, 1, 2), (2, 1, 2, 1), (1, 1, 1, 1), (4, 1, 1, 1), (3, 1, 1, 1))
TRIED = 64  # patterns, the shortest of those that hold little, whose step is timed
_PASSES = ((Kind.F, 0), (Kind.F, 1), (Kind.I, 1), (Kind.I, 0), (Kind.W, 1), (Kind.W, 0))


class _Pattern(NamedTuple):
    """Starts of the first micro-batch's six actions on each rank, in the order of _PASSES, and the
    units after which the next micro-batch does the same."""

    rows: tuple[tuple[int, ...], ...]
    period: int

    @property
    def length(self) -> int:
        return max(map(max, self.rows))

    @property
    def peak(self) -> int:
        """The most chunk-activations that a rank holds once all follow each other."""
        return max(
            sum(
                (time - row[f]) // self.period - (time - row[w] - 1) // self.period
                for f, w in ((0, 5), (1, 4))
            )
            for row in self.rows
            for time in row
        )


def v_half(ranks: int, microbatches: int) -> ComputeSchedule:
    """V-Half: about half of 1F1B's activations, two chunks as a V; from four ranks on for about
    half of its bubble, on two and three for more than twice of it."""
    return _orders(_pattern(ranks), microbatches)


def _orders(pattern: _Pattern, microbatches: int) -> ComputeSchedule:
    """What the micro-batches do when each starts a period after the one before, in order."""
    return [
        [
            action(kind, m, chunk)
            for _, m, kind, chunk in sorted(
                (start + pattern.period * m, m, kind, chunk)
                for start, (kind, chunk) in zip(row, _PASSES, strict=True)
                for m in range(microbatches)
            )
        ]
        for row in pattern.rows
    ]


@functools.lru_cache(maxsize=256)
def _pattern(ranks: int) -> _Pattern:
    """Of the patterns that hold HALF of 1F1B's peak, those of the shortest period, the fastest."""
    most = max(2, int(HALF * 2 * ranks))  # one micro-batch has two chunks
    found: list[tuple[int, int, _Pattern]] = []
    for period in count(FULL):
        for paces in PACES:
            for turns in product(range(1, period + 1), repeat=3):
                pattern = _made(ranks, period, paces, turns)
                if pattern is not None and pattern.peak <= most:
                    found.append((pattern.length, pattern.peak, pattern))
        if found:
            break
    placement = StageAssignment(ranks, 2, "v")
    costs = Costs.even(placement)

    def seconds(choice: tuple[int, int, _Pattern]) -> float:
        _, ends = clock(_orders(choice[-1], 2 * ranks), placement, costs)
        return max(end[-1] for end in ends)

    return min(sorted(found)[:TRIED], key=seconds)[-1]


def _made(
    ranks: int, period: int, paces: tuple[int, ...], turns: tuple[int, ...]
) -> _Pattern | None:
    """The pattern of these paces and of these times at the three turns; None if actions meet."""
    last = ranks - 1
    begin = [0]
    for pace, turn in zip(paces, turns, strict=False):
        begin.append(begin[-1] + last * pace + turn)
    rows = []
    for rank in range(ranks):
        row = [begin[leg] + paces[leg] * (last - rank if leg % 2 else rank) for leg in range(4)]
        taken = {start % period for start in row}
        if len(taken) < 4:
            return None
        for after in (row[2], row[3]):
            start = next(t for t in range(after + 1, after + period) if t % period not in taken)
            taken.add(start % period)
            row.append(start)
        rows.append(tuple(row))
    return _Pattern(tuple(rows), period)


# Schedules by name: the orders, where the stages lie, and the plan that an executor runs.


ONE_CHUNK = ("gpipe", "1f1b", "zb_h1")
LOOPED = ("interleaved", "interleaved_zb")
V_SHAPED = ("zbv", "v_half")
NAMED_SCHEDULES = ("gpipe", "1f1b", "interleaved", "zb_h1", "interleaved_zb", "zbv", "v_half")
# They need messages in the order in which these are made: a receive stands before its reader.
IN_ORDER = ("gpipe", "1f1b")


@dataclass(frozen=True)
class Schedule:
    """What each rank computes, in order, and which stages it holds."""

    name: str
    placement: StageAssignment
    microbatches: int
    orders: ComputeSchedule

    @property
    def splits_backward(self) -> bool:
        """Whether some backward is made as I and W."""
        return any(step.kind == Kind.I for order in self.orders for step in order)

    def plan(self) -> PipelineProgram:
        """The orders with their messages. Raises ScheduleError where ranks wait for each other."""
        return self._with_messages(self.orders)

    def forwards(self) -> PipelineProgram:
        """The plan of an evaluation: the forwards alone, in the same order."""
        return self._with_messages([[s for s in o if s.kind == Kind.F] for o in self.orders])

    def _with_messages(self, orders: ComputeSchedule) -> PipelineProgram:
        return add_communication(orders, None if self.name in IN_ORDER else self.placement)


def make(name: str, ranks: int, microbatches: int, chunks: int = 1) -> Schedule:
    """The schedule `name`, one of FORMS, on `ranks` ranks of `chunks` chunks.

    Raises:
        UserError: an unknown name, or a number of chunks that the schedule does not have.
        ValueError: fewer than one rank, chunk or micro-batch.
    """
    if ranks < 1 or microbatches < 1 or chunks < 1:
        raise ValueError(
            f"a schedule needs a rank, a chunk and a micro-batch, not {ranks=}, {chunks=}, "
            f"{microbatches=}"
        )
    if name not in NAMED_SCHEDULES:
        choice = nearest(name, NAMED_SCHEDULES) or "1f1b"
        raise UserError(
            f"schedule={name} is not known: choose one of {', '.join(NAMED_SCHEDULES)} "
            f"(nearest: {choice})."
        )
    check_vpp(name, chunks)
    placement = StageAssignment(ranks, chunks, "v" if name in V_SHAPED else "loop")
    made: ComputeSchedule
    if name == "gpipe":
        made = orders.gpipe(ranks, microbatches)
    elif name == "1f1b":
        made = orders.one_f_one_b(ranks, microbatches)
    elif name == "interleaved":
        made = orders.interleaved(ranks, chunks, microbatches)
    elif name == "zbv":
        made = orders.zero_bubble_v(ranks, microbatches)
    elif name == "v_half":
        made = v_half(ranks, microbatches)
    else:  # zb_h1 is the interleaved form of one chunk
        made = orders.interleaved_zero_bubble(ranks, chunks, microbatches)
    return Schedule(name, placement, microbatches, made)


def check_vpp(name: str, chunks: int) -> None:
    """Refuse a number of chunks that the schedule `name` does not have; raises UserError."""
    if name in V_SHAPED and chunks != 2:
        raise UserError(
            f"schedule={name} lays two chunks of each rank out as a V, so vpp={chunks} must be 2; "
            "the nearest is vpp=2."
        )
    if name in ONE_CHUNK and chunks != 1:
        other = "interleaved_zb" if name == "zb_h1" else "interleaved"
        raise UserError(
            f"schedule={name} has one chunk per rank, so vpp={chunks} does not fit it; the nearest "
            f"is vpp=1, or schedule={other}."
        )
