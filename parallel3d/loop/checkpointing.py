"""Saves the run every `checkpoint.every` steps, and when a signal stops it."""

from __future__ import annotations

from dataclasses import dataclass

from parallel3d.loop.hooks import Hook, Run
from parallel3d.trainer import StepResult


@dataclass
class Checkpointing(Hook):
    """Saves checkpoints, which include the lines of metrics that are not on disk yet."""

    run: Run

    def after_step(self, result: StepResult, seconds: float) -> None:
        """Saves if a checkpoint is due."""
        run = self.run
        run.worker.phase = f"checkpoint after step {result.step}"
        with run.trainer.step_timer.range("checkpoint"), run.spent("checkpoint"):
            run.checkpoints.after_step(run.trainer, self._unwritten)

    def stopped(self, step: int) -> None:
        """Saves the run when a signal ends it, unless `checkpoint.every` is 0."""
        if self.run.trainer.config.checkpoint.every:
            with self.run.spent("checkpoint"):
                self.run.checkpoints.save(self.run.trainer, self._unwritten)

    def _unwritten(self) -> tuple[str, ...]:
        recorder = self.run.recorder
        return () if recorder is None else recorder.waiting()
