"""Tells what saves and failures cost a run: the one model of it, for `auto` and for the report.

A save that delays the loop by δ every T seconds costs the share δ/T of the time. A failure every M
seconds loses T/2 of work on average, and takes D until it is noticed, R until the next first step,
and Q in a queue. Together they cost δ/T + (T/2 + D + R + Q)/M, which is least at T = √(2·δ·M)
(Young 1974).
"""

from __future__ import annotations

import math
from typing import NamedTuple

from parallel3d.config.fields import show
from parallel3d.metrics.starts import Failures
from parallel3d.text import three_digits

OWN_FAILURES = 3  # from so many failures on, those of the run give their rate
LONGEST_S = 3600.0  # auto saves at least this often …
LARGEST_SHARE = 0.035  # … unless saves would then take more than this share of the time
WRITES = 1.5  # auto waits at least this multiple of the time in which a checkpoint is written
DAY_S = 86400.0


class FailureRate(NamedTuple):
    """The mean time between two failures of a run, and a clause that says where it is from."""

    seconds: float
    because: str


def failure_rate(node_days: float, nodes: int, failures: Failures, ranks: int) -> FailureRate:
    """Returns the rate of `nodes` nodes with `ranks` ranks, by the run's own failures if any do."""
    if failures.failed >= OWN_FAILURES and failures.rank_s > 0:
        mean = failures.rank_s / ranks / failures.failed
        return FailureRate(mean, f"this run failed {failures.failed} times, every {span(mean)}")
    mean = node_days * DAY_S / nodes
    many = "one node fails" if nodes == 1 else f"one of {nodes} nodes fails"
    return FailureRate(mean, f"{many} every {span(mean)} (recovery.node_days={show(node_days)})")


class Interval(NamedTuple):
    """An interval between saves, and a clause on what keeps it from the best one, or ""."""

    seconds: float
    but: str = ""


def best_interval(delay_s: float, mean_s: float, write_s: float) -> Interval:
    """Returns the interval that loses least time.

    Args:
        delay_s: seconds by which a save delays the loop.
        mean_s: mean seconds between two failures.
        write_s: seconds in which a checkpoint is written, partly in the background.
    """
    best = math.sqrt(2 * delay_s * mean_s)
    shortest, longest = WRITES * write_s, max(LONGEST_S, delay_s / LARGEST_SHARE)
    least = f"; {span(best)} would lose least"
    if best < shortest:
        return Interval(shortest, f"{least}, but one takes {span(write_s)} to write")
    if best > longest:
        return Interval(longest, f"{least}, but auto saves at least every {span(longest)}")
    return Interval(best)


class Waste(NamedTuple):
    """The expected shares of the time that go into saves and failures; None for unknown ones."""

    saves: float | None
    repeated: float | None
    noticing: float | None
    restart: float | None
    queue: float | None

    @property
    def sum(self) -> float:
        return sum(share for share in self if share is not None)

    @property
    def of_wall(self) -> Waste:
        """Returns the shares of the wall time, which is longer by the waste itself."""
        whole = 1 + self.sum
        return Waste(*(None if share is None else share / whole for share in self))


class FailureCosts(NamedTuple):
    """Holds what the model needs to know of a run, in seconds; None for what is unknown.

    Attributes:
        delay: by which a save delays the loop (δ).
        interval: between two saves (T).
        detect: until a failure is noticed (D).
        restart: from then until the next first step, without the queue (R).
        queue: in a queue (Q).
    """

    delay: float | None
    interval: float | None
    detect: float | None
    restart: float | None
    queue: float | None


def expected_waste(run: FailureCosts, mean_s: float) -> Waste:
    """Returns what the model expects of a run that fails every `mean_s` seconds of training.

    The shares are those of the time that makes progress; `Waste.of_wall` gives those of all time.
    """

    def share(seconds: float | None, of: float | None = mean_s) -> float | None:
        return None if seconds is None or not of else seconds / of

    half = None if run.interval is None else run.interval / 2
    saves = share(run.delay, run.interval)
    return Waste(saves, share(half), share(run.detect), share(run.restart), share(run.queue))


def span(seconds: float) -> str:
    """Formats seconds in the largest unit that gives at least 1, as in 4.10 days or 12.0 min."""
    for size, unit in ((DAY_S, "days"), (3600.0, "h"), (60.0, "min"), (1.0, "s")):
        if seconds >= size:
            return f"{three_digits(seconds / size)} {unit}"
    return f"{seconds * 1e3:.3g} ms"
