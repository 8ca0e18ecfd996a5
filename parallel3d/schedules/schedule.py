"""Makes the named schedules, and the programs that an executor runs."""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from itertools import count, product
from typing import NamedTuple

from parallel3d.errors import UserError, nearest
from parallel3d.schedules import orders
from parallel3d.schedules.actions import ComputeSchedule, Kind, PipelineProgram, action
from parallel3d.schedules.messages import add_communication
from parallel3d.schedules.orders import StageAssignment
from parallel3d.schedules.walk import walk

ONE_CHUNK = ("gpipe", "1f1b", "zb_h1")
LOOPED = ("interleaved", "interleaved_zb")
V_SHAPED = ("zbv", "v_half")
NAMED_SCHEDULES = ("gpipe", "1f1b", "interleaved", "zb_h1", "interleaved_zb", "zbv", "v_half")
# Schedules that read messages in the order in which they are sent, so that a receive may come
# directly before the computation that reads it.
IN_ORDER = ("gpipe", "1f1b")
WITHOUT_SPLIT = ("gpipe", "1f1b", "interleaved")  # schedules whose backwards are whole


@dataclass(frozen=True)
class Schedule:
    """A pipeline schedule: each rank's compute order, and the assignment of stages to ranks."""

    name: str
    assignment: StageAssignment
    microbatches: int
    orders: ComputeSchedule

    @property
    def splits_backward(self) -> bool:
        """Whether any backward is split into I and W."""
        return any(step.kind == Kind.I for order in self.orders for step in order)

    def with_whole_backwards(self) -> Schedule:
        """Returns the same schedule with a B in place of each I, and without any W."""
        orders = [
            [
                action(Kind.B, step.microbatch, step.chunk) if step.kind == Kind.I else step
                for step in order
                if step.kind != Kind.W
            ]
            for order in self.orders
        ]
        return replace(self, orders=orders)

    def a_forward_ahead(self) -> Schedule:
        """Returns the schedule of one rank in which each backward follows the next forward.

        Its order is F0, F1, B0, F2, B1 and so on.
        """
        (order,) = self.orders
        forwards, backwards = ([s for s in order if s.kind == kind] for kind in (Kind.F, Kind.B))
        return replace(self, orders=[orders.in_turn(forwards, backwards, 1)])

    def program(self) -> PipelineProgram:
        """Returns the orders with their messages. Raises ScheduleError if the ranks deadlock."""
        return self._with_messages(self.orders)

    def forwards(self) -> PipelineProgram:
        """Returns the program of an evaluation, which has only the forwards, in the same order."""
        return self._with_messages([[s for s in o if s.kind == Kind.F] for o in self.orders])

    def _with_messages(self, orders: ComputeSchedule) -> PipelineProgram:
        assignment = None if self.name in IN_ORDER else self.assignment
        return add_communication(orders, assignment, self.microbatches)


def make(name: str, ranks: int, microbatches: int, chunks: int = 1) -> Schedule:
    """Returns the schedule `name` on `ranks` ranks with `chunks` chunks each.

    Raises:
        UserError: the name is not in NAMED_SCHEDULES, or does not allow this number of chunks.
        ValueError: there is fewer than one rank, chunk or micro-batch.
    """
    if microbatches < 1:
        raise ValueError(f"a schedule needs a micro-batch, not {microbatches=}")
    if name not in NAMED_SCHEDULES:
        choice = nearest(name, NAMED_SCHEDULES) or "1f1b"
        raise UserError(
            f"schedule={name} is not known: choose one of {', '.join(NAMED_SCHEDULES)} "
            f"(nearest: {choice})."
        )
    check_vpp(name, chunks)
    assignment = assignment_of(name, ranks, chunks)
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
    else:  # zb_h1 is interleaved_zb with one chunk
        made = orders.interleaved_zero_bubble(ranks, chunks, microbatches)
    return Schedule(name, assignment, microbatches, made)


def assignment_of(name: str, ranks: int, chunks: int) -> StageAssignment:
    """Returns the assignment of stages to ranks of the schedule `name`, in loops or as a V."""
    return StageAssignment(ranks, chunks, "v" if name in V_SHAPED else "loop")


def check_vpp(name: str, chunks: int) -> None:
    """Raises UserError unless the schedule `name` allows this number of chunks per rank."""
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


# V-Half (Qi et al. 2024, arXiv:2405.15362). If F, I and W take one unit of time each, a rank of two
# chunks computes for six units per micro-batch. If the six actions of one micro-batch start at
# times that differ modulo six on every rank, the other micro-batches can follow at intervals of six
# units without idle time. If a chunk's activations live for n units, a rank holds those of n / 6
# micro-batches. On two and three ranks every such pattern holds at least 3/4 and 2/3 of 1F1B's
# peak; a longer period, with idle units, reduces this to about one half.
FULL = 6  # units between two micro-batches if no rank is idle
HALF = 0.6  # largest accepted peak, as a fraction of 1F1B's peak
# Units from one stage to the next, in the forward down and up the V and in the backward down and
# up. Passes in opposite directions would collide unless the sum of their paces shares a divisor
# with the period.
PACES = ((1, 2, 1, 2), (2, 1, 2, 1), (1, 1, 1, 1), (4, 1, 1, 1), (3, 1, 1, 1))
TRIED = 64  # number of patterns that are timed: the shortest of those with a low peak
_PASSES = ((Kind.F, 0), (Kind.F, 1), (Kind.I, 1), (Kind.I, 0), (Kind.W, 1), (Kind.W, 0))


class _Pattern(NamedTuple):
    """The times at which the actions of one micro-batch start, in units.

    Attributes:
        rows: for each rank, the start of each action in the order of _PASSES.
        period: units after which the next micro-batch repeats the pattern.
    """

    rows: tuple[tuple[int, ...], ...]
    period: int

    @property
    def length(self) -> int:
        return max(map(max, self.rows))

    @property
    def peak(self) -> int:
        """The largest number of chunk-activations that a rank holds in the steady state."""
        return max(
            sum(
                (time - row[f]) // self.period - (time - row[w] - 1) // self.period
                for f, w in ((0, 5), (1, 4))
            )
            for row in self.rows
            for time in row
        )


def v_half(ranks: int, microbatches: int) -> ComputeSchedule:
    """Returns the orders of V-Half: two chunks in a V, with about half of 1F1B's activations.

    From four ranks on the bubble is about half of 1F1B's. On two and three ranks it is more than
    twice as large as 1F1B's.
    """
    return _orders(_pattern(ranks), microbatches)


def _orders(pattern: _Pattern, microbatches: int) -> ComputeSchedule:
    """Returns each rank's order if one micro-batch starts per period."""
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
    """Returns the fastest pattern that holds at most HALF of 1F1B's peak.

    Only the shortest period that allows such a pattern is considered.
    """
    most = max(2, int(HALF * 2 * ranks))  # a single micro-batch has two chunks
    found: list[tuple[int, int, _Pattern]] = []
    for period in count(FULL):
        for paces in PACES:
            for turns in product(range(1, period + 1), repeat=3):
                pattern = _made(ranks, period, paces, turns)
                if pattern is not None and pattern.peak <= most:
                    found.append((pattern.length, pattern.peak, pattern))
        if found:
            break
    assignment = StageAssignment(ranks, 2, "v")

    def seconds(choice: tuple[int, int, _Pattern]) -> float:
        return walk(_orders(choice[-1], 2 * ranks), assignment).ended().seconds

    return min(sorted(found)[:TRIED], key=seconds)[-1]


def _made(
    ranks: int, period: int, paces: tuple[int, ...], turns: tuple[int, ...]
) -> _Pattern | None:
    """Returns the pattern with these paces and these waits at the three turns of the V.

    The result is None if two actions collide on a rank.
    """
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
