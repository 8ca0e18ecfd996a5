"""How slow this machine is just now. No test's verdict may depend on it.

A claim about speed ("answered in a second") is a figure of a quiet core of today, times `pace`. A
wait that only a hang makes long lasts `PATIENCE` times what it should on that core.
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


def cpu_pace() -> float:
    """`pace` by the processor's time of this process: others that run here cost it little."""
    return pace(time.process_time)
