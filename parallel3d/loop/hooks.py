"""What happens around the steps of a run: one file for each thing, called in a fixed order."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from parallel3d.checkpoint.checkpoints import Checkpoints
from parallel3d.metrics.recorder import Recorder
from parallel3d.run.launch import Worker
from parallel3d.trainer import StepResult, Trainer


@dataclass(frozen=True)
class Run:
    """The steps of a run on one rank.

    Attributes:
        recorder: writes metrics, on rank 0; None on the others.
        first, last: the steps that this start does.
    """

    trainer: Trainer
    worker: Worker
    recorder: Recorder | None
    checkpoints: Checkpoints
    first: int
    last: int

    @contextmanager
    def spent(self, part: str) -> Iterator[None]:
        """Records the wall time of a block, for the run's goodput."""
        with spent(self.recorder, part):
            yield

    @contextmanager
    def resting(self, when: bool = True) -> Iterator[None]:
        """Lets the watchdog rest in a block that may take long, `when` it may."""
        watchdog = self.worker.watchdog
        assert watchdog is not None  # `train` has started it
        if when:
            watchdog.rest()
        yield
        if when:
            watchdog.go_on()

    def evaluates_after(self, step: int) -> bool:
        """Returns whether step ends in an evaluation: every `train.eval_every`-th, and the last."""
        every = self.trainer.config.train.eval_every
        return step == self.last or bool(every and step % every == 0)


@contextmanager
def spent(recorder: Recorder | None, part: str) -> Iterator[None]:
    """Records the wall time of a block, for the run's goodput."""
    start = time.perf_counter()
    yield
    if recorder is not None:
        recorder.spent(part, time.perf_counter() - start)


class Hook:
    """Something that happens around the steps. Every rank has the same hooks in the same order.

    A hook overrides what it needs; each of its methods may communicate.
    """

    def before_run(self) -> None:
        """Runs before the first step of this start."""

    def before_step(self, step: int) -> None:
        """Runs before a step."""

    def after_step(self, result: StepResult, seconds: float) -> None:
        """Runs after a step that took `seconds` on the wall."""

    def stopped(self, step: int) -> None:
        """Runs where a signal ends the run after a step."""
