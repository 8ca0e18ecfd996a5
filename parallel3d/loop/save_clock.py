"""Says when the time for a checkpoint has come, for an interval in time or `auto`.

`auto` takes the interval that loses least (`failure_cost`). It measures the delay of a save, and
takes the mean time between two failures from `recovery.node_days` and the number of nodes, or from
the run's own failures once there are enough of them.

Only rank 0 has a clock. Its request is part of the step's all-reduce (`StepSums.asked`), so that
all ranks save after the same step.
"""

from __future__ import annotations

import statistics
import time
from collections import deque
from collections.abc import Callable

from parallel3d.config.values import seconds_of
from parallel3d.loop.failure_cost import FailureRate, best_interval, failure_rate, span
from parallel3d.metrics.starts import STARTS, failures_of, starts_of
from parallel3d.run.launch import Worker
from parallel3d.run_config import Config
from parallel3d.text import count

FIRST_STEPS = 10  # auto saves first after so many steps, to measure the delay of a save
SAVES = 5  # auto takes the median delay of so many saves
TELLING = 1.5  # a further line tells of an interval that has changed by more than this factor


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

        The nearer one of the two steps around the end of the interval is taken. Before auto knows
        an interval, a further save would wait for the one in flight, and measure that.
        """
        if self.interval_s is None:
            return self._delay is None and self._steps + 1 >= FIRST_STEPS
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
