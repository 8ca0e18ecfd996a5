"""Saves the run every `checkpoint.every` steps, and when a signal stops it."""

from __future__ import annotations

import time
from dataclasses import dataclass

from parallel3d.loop.rank_run import RankRun
from parallel3d.loop.step_hooks import StepHook
from parallel3d.trainer import StepResult


@dataclass
class Checkpointing(StepHook):
    """Saves checkpoints, which include the lines of metrics that are not on disk yet."""

    run: RankRun

    def before_run(self) -> None:
        """Starts the clock of saves by time."""
        if self.run.save_clock is not None:
            self.run.save_clock.begin()

    def after_step(self, result: StepResult, seconds: float) -> None:
        """Saves if a checkpoint is due."""
        run, checkpoints = self.run, self.run.checkpoints
        is_due = result.save or checkpoints.is_due(result.step)
        if is_due:
            run.user_hooks.before_save(result.step)
        run.worker.phase = f"checkpoint after step {result.step}"
        # While a save is being written, the ranks ask after each step whether it has ended.
        run.worker.log.boundary("checkpoint", repeats=False)
        start = time.perf_counter()
        with run.trainer.step_timer.range("checkpoint"), run.spent("checkpoint"):
            checkpoints.after_step(run.trainer, self._unwritten, by_time=result.save)
        save_s = time.perf_counter() - start
        if run.save_clock is not None:
            writes = checkpoints.step_in_flight is not None
            run.save_clock.after_step(seconds, save_s, saved=is_due, writes=writes)
        if is_due:
            run.user_hooks.after_save(result.step)

    def stopped(self, step: int) -> None:
        """Saves the run when a signal ends it, unless `checkpoint.every` is 0."""
        run = self.run
        if not run.trainer.config.checkpoint.every:
            return
        is_new = run.checkpoints.saved_step != step
        if is_new:
            run.user_hooks.before_save(step)
        with run.spent("checkpoint"):
            run.checkpoints.save(run.trainer, self._unwritten)
        if is_new:
            run.user_hooks.after_save(step)

    def _unwritten(self) -> tuple[str, ...]:
        recorder = self.run.recorder
        return () if recorder is None else recorder.waiting()
