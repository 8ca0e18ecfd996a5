"""Defines the hooks of a user's script, which `fit` runs around steps, evaluations and saves."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from parallel3d.build import Trainer
from parallel3d.comm.process_groups import ProcessGroups
from parallel3d.errors import UserError
from parallel3d.metrics.jsonl import STEP
from parallel3d.metrics.loggers import NAMES
from parallel3d.run_config import Config
from parallel3d.trainer import StepResult

# The first parts of names that the recorder and the loggers give to figures of their own.
TAKEN = (
    "train",
    "speed",
    "eval",
    "time",
    "times",
    "memory",
    "valid",
    "experts",
    "parts",
    "hooks",
    "terms",
    "eval_terms",
)
METRIC = re.compile(r"[A-Za-z][A-Za-z0-9_.\- ]*(/[A-Za-z0-9_.\- ]+)*")


@dataclass
class LoggedFigures:
    """The figures that hooks have logged for the next line of metrics.

    Attributes:
        has_line: whether a line of metrics follows.
    """

    values: dict[str, float | Tensor] = field(default_factory=dict)
    has_line: bool = False


class Run:
    """A run on one rank, as its hooks see it (`Hook.run`).

    Attributes:
        config: the checked configuration.
        groups: the process groups of this rank: `groups.tp`, `groups.pp`, `groups.cp`, `groups.dp`,
            `groups.world`, and `groups.rank`.
        device: the device of this rank.
        stages: the pipeline stages of this rank, in order; each is an `nn.Module` with the layers
            that this rank holds. `named_parameters` of a stage has the names of a checkpoint.
        run_dir: the folder of the run.
    """

    config: Config
    groups: ProcessGroups
    device: torch.device
    stages: Sequence[nn.Module]
    run_dir: Path

    def __init__(self, trainer: Trainer, run_dir: Path, figures: LoggedFigures) -> None:
        """Hooks are given their run; scripts do not make one."""
        self.config, self.groups, self.device = trainer.config, trainer.groups, trainer.device
        self.stages = trainer.stages
        self.run_dir = run_dir
        self._trainer = trainer
        self._figures = figures

    @property
    def step(self) -> int:
        """Returns the number of optimizer steps done."""
        return self._trainer.steps_done

    @property
    def last_step(self) -> int:
        """Returns the number of the run's last step."""
        return self._trainer.length.last_step

    def log(self, name: str, value: float | Tensor) -> None:
        """Adds a figure to the next line of metrics, that of the step or of the evaluation.

        It is called in `before_step`, `after_step` and `after_evaluation`, on the ranks that have a
        value; the line has the mean of their values. metrics.jsonl has it under `hooks`, W&B and
        TensorBoard by its name, and the summary has the last one.

        Args:
            name: a name such as "probe/norm"; the first part must not be one that the recorder
                uses, such as "train".
            value: a number, or a tensor with one element.
        """
        if not self._figures.has_line:
            raise UserError(
                f"log({name!r}) has no line of metrics here: call it in before_step, after_step or "
                "after_evaluation"
            )
        first = name.partition("/")[0]
        if first in (*TAKEN, *NAMES, *STEP) or not METRIC.fullmatch(name):
            raise UserError(
                f"log({name!r}) must have a name of letters, digits and slashes whose first part "
                f"is not {', '.join(TAKEN[:4])} or another of the recorder's; the nearest is "
                f"probe/{re.sub(r'[^A-Za-z0-9_.]+', '_', name) or 'value'}"
            )
        self._figures.values[name] = value

    def full_parameters(self) -> dict[str, Tensor]:
        """Returns the full tensors by name on rank 0's CPU, and {} on other ranks; collective."""
        return self._trainer.full_parameters()


class Hook:
    """Base class of hooks, which `fit(hooks=[…])` runs around steps, evaluations and saves.

    A hook overrides the methods that it needs. Every rank has the same hooks, and calls them in the
    same order at the same steps, so a method may communicate with other ranks. An error in a method
    ends the run, as any failure does.

    A hook is made before the ranks start. It makes tensors in `before_run` or later, when `run` is
    set. With `train.eval_only` no hook is called.

    Attributes:
        name: the name of its state in a checkpoint, which no other hook of the run may have; None
            stands for the name of the class.
        run: the run on this rank.
    """

    name: str | None = None
    run: Run

    def before_run(self) -> None:
        """Runs before the first step after the run is started or resumed."""

    def before_step(self, step: int) -> None:
        """Runs before a step; steps are counted from 1."""

    def after_step(self, result: StepResult) -> None:
        """Runs after a step.

        The result is equal on every rank. It has `step`, `loss` (nats per token; None if all tokens
        are masked), `grad_norm` (before clipping), `lr`, `tokens`, `skipped` (whether the
        parameters are unchanged, because a value was not finite) and `terms`, the means of the
        named terms of a loss of your own.
        """

    def before_evaluation(self, step: int) -> None:
        """Runs before the evaluation after a step; 0 is before the first step."""

    def after_evaluation(self, step: int, row: Mapping[str, Any]) -> None:
        """Runs after an evaluation; `row` is its line of metrics.jsonl, on every rank."""

    def before_save(self, step: int) -> None:
        """Runs before the checkpoint of a step, which then calls `state_dict`."""

    def after_save(self, step: int) -> None:
        """Runs after the checkpoint of a step, or after its start with `checkpoint.async_save`."""

    def state_dict(self) -> Mapping[str, Any]:
        """Returns what a checkpoint keeps of the hook, by names: tensors and values of JSON.

        A rank returns the entries that it holds; an entry that several ranks hold must be equal on
        them. Nothing is pickled.
        """
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Takes the entries of all ranks, under any layout, tensors on this rank's device.

        Runs before `before_run` of a resumed run, and when a run goes back to a checkpoint.
        """
