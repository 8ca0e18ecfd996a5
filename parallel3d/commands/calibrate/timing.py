"""Times of one call on this rank's device: the best of several, as what disturbs only adds."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from parallel3d.device import accelerator

Run = Callable[[], object]
LEAST_S = 1e-3  # of a measurement: calls are repeated up to that
MOST_CALLS = 1000
BURSTS, LONG_S = 3, 0.02  # of a burst that is repeated no more


def clock_of(device: torch.device) -> Callable[[], float]:
    """On a CPU the process's own seconds, by which neighbours on the machine show little."""
    if accelerator.is_accelerator(device):
        return time.perf_counter
    return time.process_time


def seconds_of(run: Run, device: torch.device, clock: Callable[[], float] | None = None) -> float:
    """Seconds of one call, the device's work included; the first call is not counted.

    The best of a few bursts, each short enough to lie within a process's turn on a busy core.
    """
    now = clock or clock_of(device)
    run()
    accelerator.synchronize(device)
    calls, found = 1, []
    while True:
        start = now()
        for _ in range(calls):
            run()
        accelerator.synchronize(device)
        spent = now() - start
        if spent >= LEAST_S or calls >= MOST_CALLS:
            found.append(spent / calls)
            if len(found) == BURSTS or spent > LONG_S:
                return min(found)
        else:
            calls = min(MOST_CALLS, max(2 * calls, int(calls * LEAST_S / max(spent, 1e-6)) + 1))
