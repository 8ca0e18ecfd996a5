"""Checks every step for skipped updates, loss spikes and replicas that drift apart."""

from __future__ import annotations

from dataclasses import dataclass

from parallel3d.faults.health import Health
from parallel3d.loop.rank_run import RankRun
from parallel3d.loop.step_hooks import StepHook
from parallel3d.trainer import StepResult


@dataclass
class HealthCheck(StepHook):
    """Checks the health of the training after every step, and records rollbacks to a checkpoint."""

    run: RankRun
    health: Health

    def after_step(self, result: StepResult, seconds: float) -> None:
        """Checks the step. Raises TrainingFailure on all ranks if the run cannot continue."""
        run, before = self.run, self.health.rollbacks
        run.worker.phase = f"health check after step {result.step}"
        run.worker.log.boundary("health check", repeats=False)  # a rollback restores
        self.health.after_step(result)
        if run.recorder is not None and self.health.rollbacks > before:
            run.recorder.rolled_back(run.checkpoints.saved_step)
