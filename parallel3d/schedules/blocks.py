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
from itertools import count, product
from typing import NamedTuple

from parallel3d.schedules.actions import ComputeSchedule, Kind, action
from parallel3d.schedules.placement import StageAssignment
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
