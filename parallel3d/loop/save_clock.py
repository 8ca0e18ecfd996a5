"""Says when the time for a checkpoint has come, for an interval in time or `auto`.

A save that delays the loop by δ every T seconds costs the share δ/T of the time, and a failure
every M seconds loses T/2 of work on average. Their sum is least at T = √(2·δ·M) (Young 1974).
`auto` measures δ and takes M from `recovery.node_days` and the number of nodes, or from the run's
own failures once there are enough of them.

Only rank 0 has a clock. Its request is part of the step's all-reduce (`StepSums.asked`), so that
all ranks save after the same step.
"""

from __future__ import annotations

import math
import statistics
import time
from collections import deque
from collections.abc import Callable
from typing import NamedTuple

from parallel3d.config.fields import show
from parallel3d.config.values import seconds_of
from parallel3d.metrics.starts import STARTS, Failures, failures_of, starts_of
from parallel3d.run.launch import Worker
from parallel3d.run_config import Config
from parallel3d.text import count, three_digits

FIRST_STEPS = 10  # auto saves first after so many steps, to measure the delay of a save
OWN_FAILURES = 3  # from so many failures on, those of the run give their rate
SAVES = 5  # auto takes the median delay of so many saves
LONGEST_S = 3600.0  # auto saves at least this often …
LARGEST_SHARE = 0.035  # … unless saves would then take more than this share of the time
WRITES = 1.5  # auto waits at least this multiple of the time in which a checkpoint is written
TELLING = 1.5  # a further line tells of an interval that has changed by more than this factor
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


def span(seconds: float) -> str:
    """Formats seconds in the largest unit that gives at least 1, as in 4.10 days or 12.0 min."""
    for size, unit in ((DAY_S, "days"), (3600.0, "h"), (60.0, "min"), (1.0, "s")):
        if seconds >= size:
            return f"{three_digits(seconds / size)} {unit}"
    return f"{seconds * 1e3:.3g} ms"


class SaveClock:
    """Counts the time since the last save on rank 0, and with `auto` measures the saves.

    Args:
        interval_s: the interval in seconds, or None for `auto`.
        rate: returns the failure rate; called after a save was measured.
        say: logs a sentence for the user.
        clock: returns the time in seconds, which never goes back.
    """

    def __init__(
        self,
        interval_s: float | None,
        rate: Callable[[], FailureRate],
        say: Callable[[str], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.interval_s = interval_s
        self._is_auto = interval_s is None
        self._rate = rate
        self._say = say
        self._clock = clock
        self._since = clock()  # when the last save began
        self._steps = 0  # steps since then
        self._seconds: deque[float] = deque(maxlen=50)  # of steps without a save in flight
        self._delay: float | None = None  # of the save in flight
        self._least = 0.0  # the part of it that the loop waited for
        self._delays: deque[float] = deque(maxlen=SAVES)
        self._writes: deque[float] = deque(maxlen=SAVES)
        self._told_s: float | None = None

    @property
    def _step_s(self) -> float:
        return statistics.median(self._seconds) if self._seconds else 0.0

    def begin(self) -> None:
        """Counts from now on, at the first step."""
        self._since = self._clock()

    def is_due(self) -> bool:
        """Returns whether to save after this step, whose end is near.

        The nearer one of the two steps around the end of the interval is taken.
        """
        if self.interval_s is None:
            return self._steps + 1 >= FIRST_STEPS
        return self._clock() - self._since + self._step_s / 2 >= self.interval_s

    def after_step(self, seconds: float, save_s: float, *, saved: bool, writes: bool) -> None:
        """Takes note of a step and of what checkpoints took after it.

        Args:
            seconds: duration of the step.
            save_s: seconds that the loop then spent on checkpoints.
            saved: whether a save was due.
            writes: whether a save is still written in the background.
        """
        self._steps += 1
        if self._delay is None:
            self._seconds.append(seconds)
        else:  # the copy and the writing of values may have slowed this step down
            self._delay += seconds - self._step_s + (0.0 if saved else save_s)
            if saved or not writes:
                self._measured()
        if saved:
            self._since, self._steps = self._clock() - save_s, 0
            self._delay = self._least = save_s
            if not writes:
                self._measured()

    def _measured(self) -> None:
        """Takes the delay of a save that has ended, and with `auto` chooses the interval anew."""
        assert self._delay is not None
        self._delays.append(max(self._delay, self._least))  # other steps may have been faster
        self._writes.append(self._clock() - self._since)
        self._delay = None
        if self._is_auto:
            self._choose()

    def _choose(self) -> None:
        delay, write, rate = *map(statistics.median, (self._delays, self._writes)), self._rate()
        interval = best_interval(delay, rate.seconds, write)
        self.interval_s = interval.seconds
        told = self._told_s
        if told is not None and 1 / TELLING <= interval.seconds / told <= TELLING:
            return
        self._told_s = interval.seconds
        steps = max(1, round(interval.seconds / self._step_s)) if self._step_s else 1
        self._say(
            f"checkpoint.every=auto: a checkpoint every {span(interval.seconds)}, about "
            f"{count(steps, 'step')}, because a save delays training by {span(delay)} and "
            f"{rate.because}{interval.but}"
        )


def save_clock(
    config: Config,
    worker: Worker,
    say: Callable[[str], None],
    clock: Callable[[], float] = time.monotonic,
) -> SaveClock | None:
    """Returns the clock of a run; None on ranks other than 0, and for an interval in steps."""
    settings, ranks = config.checkpoint, worker.world_size
    if worker.rank != 0 or not settings.is_timed or config.train.eval_only:
        return None
    nodes = -(-ranks // worker.local_world_size)

    def rate() -> FailureRate:
        failures = failures_of(starts_of(worker.run_dir / STARTS))
        return failure_rate(config.recovery.node_days, nodes, failures, ranks)

    return SaveClock(seconds_of(settings.every), rate, say, clock)
