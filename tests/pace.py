"""How slow this machine is just now. No test's verdict may depend on it.

A claim about speed ("answered in a second") is a figure of a quiet core of today, times `pace`:
`in_time` asks for that, a fifth of a second itself, only where it decides. A wait that only a hang
makes long lasts `PATIENCE` times what it should on that core.
"""

from __future__ import annotations

import time
from collections.abc import Callable

PATIENCE = 5
QUIET_S = 0.05  # what the loop takes on the core for which the limits in the tests were set


def pace(clock: Callable[[], float] = time.perf_counter) -> float:
    """At least 1: how many times longer work takes at this moment, by `clock`, than it should.

    The slowest of three samples, and half as much again: the load changes from second to second.
    """
    samples = []
    for _ in range(3):
        start = clock()
        sum(i * i for i in range(1_000_000))
        samples.append(clock() - start)
    return max(1.0, 1.5 * max(samples) / QUIET_S)


def in_time(took_s: float, limit_s: float) -> bool:
    """Whether what took so long takes less than `limit_s` where nothing slows it."""
    return took_s < limit_s or took_s < limit_s * pace()


def in_cpu_time(took_s: float, limit_s: float) -> bool:
    """The same of a processor's time, and of `pace` by it: others that run here cost it little."""
    return took_s < limit_s or took_s < limit_s * pace(time.process_time)
