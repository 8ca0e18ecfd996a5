"""Holds what one rank needs to run its steps, for the hooks around them."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from parallel3d.build import Trainer
from parallel3d.checkpoint.checkpoints import Checkpoints
from parallel3d.loop.save_clock import SaveClock
from parallel3d.loop.user_hooks import UserHooks
from parallel3d.metrics.recorder import Recorder
from parallel3d.run.launch import Worker


@dataclass(frozen=True)
class RankRun:
    """Holds the objects that one rank needs to run its steps.

    Attributes:
        recorder: the writer of metrics on rank 0; None on other ranks.
        user_hooks: the hooks of a user's script; none for `parallel3d train`.
        first, last: the first and the last step since the run was last started or resumed.
        save_clock: says on rank 0 when to save by time; None on other ranks, and if the number of
            steps says it.
    """

    trainer: Trainer
    worker: Worker
    recorder: Recorder | None
    checkpoints: Checkpoints
    user_hooks: UserHooks
    first: int
    last: int
    save_clock: SaveClock | None = None

    @contextmanager
    def spent(self, part: str) -> Iterator[None]:
        """Records the wall time of a `with` block as spent on `part`, for the run's goodput."""
        with spent(self.recorder, part):
            yield

    @contextmanager
    def watchdog_paused(self, when: bool = True) -> Iterator[None]:
        """Pauses the watchdog during a long `with` block; no-op if `when` is false."""
        watchdog = self.worker.watchdog
        assert watchdog is not None  # `train` has started it
        if when:
            watchdog.pause()
        yield
        if when:
            watchdog.resume()

    @contextmanager
    def steps_paused(self) -> Iterator[None]:
        """Tells this host's guard, if there is one, that no step ends during a `with` block."""
        progress = self.worker.progress_file
        if progress is not None:
            progress.pause()
        yield
        if progress is not None:
            progress.resume()

    def evaluates_after(self, step: int) -> bool:
        """Returns whether an evaluation follows a step.

        Evaluations follow every `train.eval_every`-th step and the last one.
        """
        every = self.trainer.config.train.eval_every
        return step == self.last or bool(every and step % every == 0)


@contextmanager
def spent(recorder: Recorder | None, part: str) -> Iterator[None]:
    """Records the wall time of a `with` block as spent on `part`, for the run's goodput.

    No-op if `recorder` is None.
    """
    start = time.perf_counter()
    yield
    if recorder is not None:
        recorder.spent(part, time.perf_counter() - start)
