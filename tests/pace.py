"""Measures how slow this machine is at the moment, so that no test's verdict depends on it.

A limit of speed ("answered in a second") is the time on an idle current core, times `pace`.
`in_time` measures the pace, which takes a fifth of a second itself, only if it decides. A wait that
is only long in a hang lasts up to `PATIENCE` times its duration on that core.
"""

from __future__ import annotations

import time
from collections.abc import Callable

PATIENCE = 5
QUIET_S = 0.05  # seconds of the loop on the core for which the tests' limits were set


def pace(clock: Callable[[], float] = time.perf_counter) -> float:
    """Returns the factor, at least 1, by which work takes longer than it should at this moment, by
    `clock`.

    It is the slowest of three samples, times 1.5: the load changes from second to second.
    """
    samples = []
    for _ in range(3):
        start = clock()
        sum(i * i for i in range(1_000_000))
        samples.append(clock() - start)
    return max(1.0, 1.5 * max(samples) / QUIET_S)


def in_time(took_s: float, limit_s: float) -> bool:
    """Returns whether work of this duration would take less than `limit_s` on an idle machine."""
    return took_s < limit_s or took_s < limit_s * pace()


def in_cpu_time(took_s: float, limit_s: float) -> bool:
    """Does the same for CPU time, with `pace` by CPU time, which other processes hardly affect."""
    return took_s < limit_s or took_s < limit_s * pace(time.process_time)
