"""Checks that the files of a run's text do not change during the run.

If they changed, the recorded losses would belong to a different text.
"""

from __future__ import annotations

from dataclasses import dataclass

from parallel3d.build import Trainer
from parallel3d.data.tokens import look_at
from parallel3d.errors import print_line
from parallel3d.loop.rank_run import RankRun
from parallel3d.loop.step_hooks import StepHook
from parallel3d.run.launch import Worker
from parallel3d.trainer import StepResult


def check_data(trainer: Trainer, worker: Worker) -> None:
    """Raises UserError if a file that the run reads has changed."""
    if trainer.corpus is None:  # the samples are a script's own
        return
    sentences = look_at([*trainer.corpus.watched.values(), *trainer.valid_files])
    if worker.local_rank == 0:  # other ranks of the host see the same files
        for sentence in sentences:
            print_line(sentence)


@dataclass
class DataCheck(StepHook):
    """Checks the files before an evaluation is recorded, a checkpoint is written or the run ends.

    Attributes:
        checked: the step after which the files were last checked; 0: they were not checked yet.
    """

    run: RankRun
    checked: int = 0

    def check(self, step: int) -> None:
        """Checks the files, at most once after each step. Raises UserError if one has changed."""
        if self.checked == step:
            return
        self.run.worker.phase = f"data check after step {step}"
        check_data(self.run.trainer, self.run.worker)
        self.checked = step

    def after_step(self, result: StepResult, seconds: float) -> None:
        """Checks the files if a checkpoint or an evaluation is due, or if the run stops."""
        run, step = self.run, result.step
        asked = result.stop or result.save
        if asked or run.evaluates_after(step) or run.checkpoints.is_due(step):
            self.check(step)
