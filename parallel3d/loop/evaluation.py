"""Evaluates held-out text and validation sets every `train.eval_every` steps."""

from __future__ import annotations

import datetime
from collections.abc import Mapping
from dataclasses import dataclass

from parallel3d.build import Trainer
from parallel3d.device.fused import fuses
from parallel3d.errors import UserError, print_line
from parallel3d.loop.data_check import DataCheck, check_data
from parallel3d.loop.rank_run import RankRun
from parallel3d.loop.step_hooks import StepHook
from parallel3d.metrics.jsonl import append_line
from parallel3d.metrics.recorder import evaluation_row, layout_row
from parallel3d.metrics.screen import evaluation_lines
from parallel3d.metrics.units import units_of
from parallel3d.optim.optimizer import EMA
from parallel3d.resolve import layout_of
from parallel3d.run.launch import Worker
from parallel3d.trainer import Score, StepResult

EVALUATIONS = "evaluations.jsonl"  # the file to which `train.eval_only` appends
EvaluationResult = tuple[
    float | None, dict[str, float | None], dict[str, Score], Mapping[str, float]
]


def evaluates(trainer: Trainer) -> bool:
    """Returns whether the run has samples to evaluate."""
    return trainer.held_out is not None or bool(trainer.evaluated_sets)


def evaluate(trainer: Trainer, worker: Worker) -> EvaluationResult | None:
    """Evaluates the held-out text and the validation sets; collective.

    Returns the loss of the held-out text (None without any), the losses of the parts of a blend,
    the scores of the validation sets, and the means of an own loss's terms on the held-out samples;
    returns None if the run has nothing to evaluate.
    """
    if not evaluates(trainer):
        return None
    worker.phase = f"evaluation after step {trainer.steps_done}"
    worker.log.boundary("evaluation")
    with trainer.step_timer.range("evaluation"):
        held_out = None if trainer.held_out is None else trainer.score(trainer.held_out)
        of_parts = {part: trainer.evaluate(part) for part in trainer.held_out_parts}
        of_sets = {name: trainer.score(one) for name, one in trainer.evaluated_sets.items()}
        if trainer.config.optim.ema_decay is not None:
            with trainer.ema_weights():
                if trainer.held_out is not None:
                    of_parts[EMA] = trainer.evaluate()
                for name, one in trainer.evaluated_sets.items():
                    of_sets[f"{name}/{EMA}"] = trainer.score(one)
    if held_out is None:
        return None, of_parts, of_sets, {}
    return held_out.loss, of_parts, of_sets, held_out.terms or {}


@dataclass
class Evaluation(StepHook):
    """Evaluates when an evaluation is due, and validation sets also before a run's first step.

    `data_check` checks that the files are unchanged before a loss is recorded.
    """

    run: RankRun
    data_check: DataCheck

    def __post_init__(self) -> None:
        trainer = self.run.trainer
        self._is_on = trainer.config.train.eval_batches != 0
        # The first evaluation compiles kernels, as the first step does (`run_steps`).
        self._compiles = trainer.config.compile or fuses(trainer.device)

    def before_run(self) -> None:
        """Evaluates the initial weights if the run has validation sets.

        The watchdog is paused, because it does not know the run's usual pace yet.
        """
        if self.run.first > 1 or not self._is_on or not self.run.trainer.evaluated_sets:
            return
        self._evaluate(0, is_watched=False)

    def after_step(self, result: StepResult, seconds: float) -> None:
        """Evaluates and records the losses if an evaluation is due after the step."""
        if self._is_on and self.run.evaluates_after(result.step):
            self._evaluate(result.step, is_watched=not self._compiles)

    def _evaluate(self, step: int, *, is_watched: bool) -> None:
        run = self.run
        if evaluates(run.trainer):
            run.user_hooks.before_evaluation(step)
        paused = run.watchdog_paused(when=not is_watched)
        with run.steps_paused(), paused, run.spent("evaluation"):
            found = evaluate(run.trainer, run.worker)
        self._compiles = False
        if step:
            self.data_check.check(step)
        if found is None:
            return
        figures = run.user_hooks.after_evaluation(step, *found)
        if run.recorder is not None:
            run.recorder.evaluation(step, *found, hooks=figures)


def evaluate_only(trainer: Trainer, worker: Worker, is_restored: bool) -> None:
    """Evaluates the restored checkpoint and appends the results to `EVALUATIONS`; collective.

    metrics.jsonl, summary.json and checkpoints belong to the training and are not changed.
    `is_restored`: whether the trainer holds the weights of a checkpoint.

    Raises:
        UserError: if the run has no checkpoint, or nothing to evaluate.
    """
    config = trainer.config
    if not is_restored:
        raise UserError(
            f"train.eval_only=true needs a checkpoint, but run={config.run} has none: train it "
            "with checkpoint.every=… first, or give another run="
        )
    assert worker.watchdog is not None  # `train` has started it
    worker.watchdog.pause()
    found = evaluate(trainer, worker)
    if found is None:
        raise UserError(
            "train.eval_only=true has nothing to evaluate: give data.valid, as in "
            "'data.valid={web:corpora/web}', or data.valid_fraction=0.05"
        )
    check_data(trainer, worker)
    if worker.rank:
        return
    step, now = trainer.steps_done, datetime.datetime.now(datetime.UTC)
    row = evaluation_row(step, *found)
    row |= {
        "tokens": trainer.consumed_samples * config.model.seq_length,
        "time": now.isoformat(timespec="seconds"),
        "layout": layout_row(layout_of(config)),
        "eval_batches": config.train.eval_batches,
        "precision": config.precision.name,
    }
    path = worker.run_dir / EVALUATIONS
    append_line(path, row)
    reads_bytes = config.data.reads_bytes and units_of(config.model).in_nats
    for sentence in evaluation_lines(reads_bytes, trainer.length.last_step, row):
        print_line(sentence)
    print_line(f"appended to {path}")
