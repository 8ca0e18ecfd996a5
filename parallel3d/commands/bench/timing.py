"""Timing calls of a group, and sharing out a time budget over rows that are not known yet."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from parallel3d.device import accelerator

# Of the budget; the rest is for the probe of pairs, and for ending.
MEASURING_SHARE = 0.75


def finisher(device: torch.device) -> Callable[[], None]:
    """What waits until the device has done what was asked of it."""
    return lambda: accelerator.synchronize(device)


def timed_calls(
    run: Callable[[], object],
    barrier: Callable[[], object],
    finish: Callable[[], None],
    warmup: int,
    calls: int,
) -> list[float]:
    """Seconds of each of `calls` calls on this rank, every one started behind a barrier."""
    seconds = []
    for number in range(warmup + calls):
        barrier()
        finish()
        start = time.perf_counter()
        run()
        finish()
        if number >= warmup:
            seconds.append(time.perf_counter() - start)
    return seconds


def slowest_rank(by_rank: Sequence[Sequence[float]]) -> float:
    """Median over the calls of the time of each call's slowest rank: [rank][call] → seconds."""
    return statistics.median(max(call) for call in zip(*by_rank, strict=True))


@dataclass
class CallCounts:
    """How often each row is called so that all end in time; no row is left out.

    Attributes:
        estimates: seconds that one call of each row takes, in the order of the rows.
        seconds: for all of them, from now on.
        warmup, calls: for every row as long as time allows. At least one timed call remains.
    """

    estimates: Sequence[float]
    seconds: float
    warmup: int
    calls: int
    row: int = 0
    foreseen: float = 0.0  # what the rows so far should have taken, and did
    spent: float = 0.0
    cut: int = field(default=0)  # rows that had fewer calls

    def next(self) -> tuple[int, int]:
        """(warm-up, timed) calls of the next row."""
        ahead = sum(self.estimates[self.row :])
        full = self.warmup + self.calls
        affordable = (self.seconds - self.spent) / max(ahead * self._pace, 1e-9)
        if affordable >= full:
            return self.warmup, self.calls
        self.cut += 1
        calls = max(1, int(affordable * self.calls / full))
        return max(0, min(self.warmup, int(affordable) - calls)), calls

    @property
    def _pace(self) -> float:
        """How much longer rows take than foreseen; cautious until a few have been seen."""
        return self.spent / self.foreseen if self.row >= 8 and self.foreseen > 0 else 1.0

    def done(self, total_calls: int, seconds: float) -> None:
        """The row took `seconds` for all of its calls."""
        self.foreseen += self.estimates[self.row] * total_calls
        self.spent += seconds
        self.row += 1
