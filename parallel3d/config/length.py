"""The length of a run that may have begun with another global batch.

`train.steps` counts optimizer steps. `train.tokens` and `train.epochs` are a number of samples: a
run that goes on with another global batch has as many steps to go as its samples need. Its schedule
of the learning rate then goes by samples too, and in units of the steps with which it began: a rate
never jumps, a decay that has begun is not begun again, and the last step has the end value.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from parallel3d.config.schema import Config
from parallel3d.config.values import BatchSizes


@dataclass(frozen=True)
class Length:
    """Gives the last step of a run and the place of each step in its schedule of the rate.

    Attributes:
        last_step: of all starts together.
        sizes: the batches of this start, from where it begins.
        clock: the batches whose steps the keys of the schedule count.
        budget: samples that are to be read; None where `train.steps` counts.
    """

    last_step: int
    sizes: BatchSizes
    clock: BatchSizes
    budget: int | None

    @classmethod
    def of_run(
        cls, config: Config, steps: int = 0, samples: int = 0, clock: BatchSizes | None = None
    ) -> Length:
        """Returns the length of a run that has done `steps` steps of `samples` samples.

        `clock`: as the run's checkpoint has it (`clock_of`); None: this configuration's batches.
        """
        sizes = config.batch_sizes.after(steps, samples)
        if config.budget is None:
            return cls(config.train_steps, sizes, sizes, None)
        return cls(sizes.steps(config.budget), sizes, clock or sizes, config.budget)

    @property
    def samples(self) -> int:
        """Samples that all steps together read."""
        return self.sizes.samples(self.last_step)

    @property
    def end(self) -> int:
        """The steps of the schedule of the learning rate: the place of the last step."""
        return self.last_step if self.budget is None else self.clock.steps(self.budget)

    def place(self, step: int) -> float:
        """Returns the place of `step`, not before this start, in the schedule of the rate."""
        if self.budget is None:
            return step
        if step >= self.last_step:  # which reads more than the budget, by less than a step
            return self.end
        return self.clock.place(self.sizes.samples(step))

    def clock_at(self, steps: int, samples: int) -> dict[str, Any]:
        """Returns the clock that a checkpoint keeps, as JSON."""
        clock = self.clock if self.budget is not None else self.sizes.after(steps, samples)
        sizes = [list(entry) for entry in clock.entries]
        return {"steps": clock.steps_before, "samples": clock.samples_before, "sizes": sizes}


def clock_of(progress: Mapping[str, Any], there: Mapping[str, Any]) -> BatchSizes | None:
    """Returns the clock of a checkpoint with this `progress` and the configuration `there`.

    An older one kept none: its steps are those of its own batches, all of them or, if it had others
    before, from there on. None at step 0, as nothing has begun. Raises ValueError, TypeError,
    KeyError and AttributeError for values that make no sense.
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
        raise ValueError(f"a clock of {clock}")
    return clock
