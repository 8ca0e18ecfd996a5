"""A measured time as a function of sizes: a grid of points, and what lies between them."""

from __future__ import annotations

import functools
import math
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise, product


@dataclass(frozen=True)
class Table:
    """Seconds over a grid of sizes, the last axis fastest.

    Between points logarithms are linear, as the time of a kernel is a power of its sizes. Beyond
    the last point of an axis the last slope goes on; before the first the time stays: what is so
    small only costs its launch.

    Raises ValueError for axes that do not rise, or times that are not as many, or not positive.
    """

    axes: tuple[tuple[float, ...], ...]
    seconds: tuple[float, ...]

    def __post_init__(self) -> None:
        for axis in self.axes:
            if not axis or axis[0] <= 0 or any(a >= b for a, b in pairwise(axis)):
                raise ValueError("an axis must rise from a positive number")
        if len(self.seconds) != math.prod(map(len, self.axes)):
            raise ValueError(f"{len(self.seconds)} times do not fill the grid")
        if not all(0 < s < math.inf for s in self.seconds):
            raise ValueError("times must be positive and finite")

    def __call__(self, *at: float) -> float:
        """Seconds at these sizes, one an axis; 0 where one is 0."""
        if not all(at):
            return 0.0
        return _between(self, at)

    def _between(self, at: Sequence[float]) -> float:
        below, weights = [], []
        for axis, value in zip(self.axes, at, strict=True):
            low = min(max(bisect_right(axis, value) - 1, 0), max(len(axis) - 2, 0))
            below.append(low)
            if len(axis) == 1 or value <= axis[0]:
                weights.append(0.0)
            else:
                weights.append(math.log(value / axis[low]) / math.log(axis[low + 1] / axis[low]))
        found = 0.0
        for corner in product((0, 1), repeat=len(at)):
            share = math.prod(w if up else 1 - w for up, w in zip(corner, weights, strict=True))
            if share:
                place = [low + up for low, up in zip(below, corner, strict=True)]
                found += share * math.log(self._at(place))
        return math.exp(found)

    def _at(self, index: Sequence[int]) -> float:
        place = 0
        for axis, i in zip(self.axes, index, strict=True):
            place = place * len(axis) + min(i, len(axis) - 1)
        return self.seconds[place]


@functools.lru_cache(maxsize=1 << 16)
def _between(table: Table, at: tuple[float, ...]) -> float:
    return table._between(at)
