"""Defines hooks around the steps of a run; each is a file here, and their order is fixed."""

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
        recorder: writes metrics on rank 0; None on other ranks.
        first: the first step of this start.
        last: the last step of this start.
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
    def watchdog_paused(self, when: bool = True) -> Iterator[None]:
        """Pauses the watchdog during a block that may take long; does nothing unless `when`."""
        watchdog = self.worker.watchdog
        assert watchdog is not None  # `train` has started it
        if when:
            watchdog.pause()
        yield
        if when:
            watchdog.resume()

    def evaluates_after(self, step: int) -> bool:
        """Returns whether an evaluation follows a step: every `train.eval_every` steps and the
        last."""
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
    """Base class of hooks. Every rank has the same hooks in the same order.

    A hook overrides the methods that it needs, and each of these may communicate.
    """

    def before_run(self) -> None:
        """Runs before the first step of this start."""

    def before_step(self, step: int) -> None:
        """Runs before a step."""

    def after_step(self, result: StepResult, seconds: float) -> None:
        """Runs after a step that took `seconds` on the wall."""

    def stopped(self, step: int) -> None:
        """Runs where a signal ends the run after a step."""
