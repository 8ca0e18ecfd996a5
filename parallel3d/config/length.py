"""Computes the length of a run, which may have begun with another global batch.

`train.steps` counts optimizer steps. `train.tokens` and `train.epochs` determine a number of
samples, and a run that resumes with another global batch takes as many steps as its remaining
samples need. Its learning-rate schedule then follows the samples too, but it still counts in steps
of the original global batch. So the rate never jumps, a decay does not start twice, and the last
step has the final rate.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from parallel3d.config.values import BatchSizes


class PlannedLength(NamedTuple):
    """The length that a configuration gives to a run.

    Attributes:
        sizes: the global batches of a new run.
        steps: number of steps of a new run.
        budget: number of samples to read; None if `steps` gives the length.
    """

    sizes: BatchSizes
    steps: int
    budget: int | None

    def after(self, steps: int = 0, samples: int = 0, clock: BatchSizes | None = None) -> Length:
        """Returns the length of a run that has taken `steps` steps and read `samples` samples.

        `clock` is the clock in the run's checkpoint (`clock_of`); None stands for the batches of
        this configuration.
        """
        sizes = self.sizes.after(steps, samples)
        if self.budget is None:
            return Length(self.steps, sizes, sizes, None)
        return Length(sizes.steps(self.budget), sizes, clock or sizes, self.budget)


@dataclass(frozen=True)
class Length:
    """Last step of a run, and the position of each step in its learning-rate schedule.

    Attributes:
        last_step: number of the last step, counted over all starts.
        sizes: global batches from this start's first step on.
        clock: global batches of the steps that the learning-rate schedule counts.
        budget: number of samples to read; None if `train.steps` gives the length.
    """

    last_step: int
    sizes: BatchSizes
    clock: BatchSizes
    budget: int | None

    @property
    def samples(self) -> int:
        """Returns the number of samples that all steps read together."""
        return self.sizes.samples(self.last_step)

    @property
    def end(self) -> int:
        """Returns the length of the learning-rate schedule, which is the last step's position."""
        return self.last_step if self.budget is None else self.clock.steps(self.budget)

    def place(self, step: int) -> float:
        """Returns the position of `step` in the learning-rate schedule.

        The step must not be earlier than this start.
        """
        if self.budget is None:
            return step
        if step >= self.last_step:  # the last step may read more samples than the budget
            return self.end
        return self.clock.place(self.sizes.samples(step))

    def clock_at(self, steps: int, samples: int) -> dict[str, Any]:
        """Returns the clock to write into a checkpoint, as JSON."""
        clock = self.clock if self.budget is not None else self.sizes.after(steps, samples)
        sizes = [list(entry) for entry in clock.entries]
        return {"steps": clock.steps_before, "samples": clock.samples_before, "sizes": sizes}


def clock_of(progress: Mapping[str, Any], there: Mapping[str, Any]) -> BatchSizes | None:
    """Returns the clock of a checkpoint with this `progress` and the configuration `there`.

    Checkpoints of older versions have no clock. The clock then has the batches of their
    configuration: from step 0 on if these explain the number of samples read, else from the
    checkpoint on. Returns None at step 0, or if no batch is known. Raises ValueError, TypeError,
    KeyError or AttributeError for invalid values.
    """
    steps, samples = int(progress["steps"]), int(progress["consumed_samples"])
    if not steps:
        return None
    if (kept := progress.get("clock")) is not None:
        entries = tuple((int(first), int(size)) for first, size in kept["sizes"])
        return _checked(BatchSizes(entries, int(kept["steps"]), int(kept["samples"])))
    if "global_batch_size" not in there:
        return None
    schedule = there.get("train", {}).get("batch_schedule") or {0: there["global_batch_size"]}
    clock = _checked(BatchSizes.of(schedule))
    return clock if clock.samples(steps) == samples else clock.after(steps, samples)


def _checked(clock: BatchSizes) -> BatchSizes:
    firsts = [first for first, _ in clock.entries]
    grows = firsts[:1] == [0] and firsts == sorted(set(firsts))
    if not grows or min(clock.sizes) < 1 or min(clock[1:]) < 0:
        raise ValueError(f"invalid clock: {clock}")
    return clock
