"""Runs the hooks of a user's script, gathers their figures, and names their states."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from parallel3d.build import Trainer
from parallel3d.comm.exchange import all_gather_json, check_agreement
from parallel3d.comm.process_groups import ProcessGroups
from parallel3d.errors import UserError
from parallel3d.loop.hooks import Hook, LoggedFigures, Run
from parallel3d.loop.step_hooks import StepHook
from parallel3d.metrics.jsonl import finite
from parallel3d.metrics.recorder import evaluation_row
from parallel3d.run.launch import Worker
from parallel3d.trainer import Score, StepResult

Figures = dict[str, Any]


def name_of(hook: Hook) -> str:
    return type(hook).__name__ if hook.name is None else hook.name


def check_hooks(hooks: Sequence[Hook]) -> None:
    """Raises UserError for objects that are no hooks, and for states without a name of their own.

    It runs before the ranks start.
    """
    for hook in hooks:
        if not isinstance(hook, Hook):
            what = "a class, not an object" if isinstance(hook, type) else type(hook).__name__
            raise UserError(f"fit(hooks=…): {hook!r} is {what}; give objects of a class of Hook")
    names = [name_of(hook) for hook in hooks if has_state(hook)]
    for name in names:
        if not re.fullmatch(r"[\w.-]{1,100}", name):
            raise UserError(
                f"fit(hooks=…): the name {name!r} of a hook with a state must have 1 to 100 "
                "letters, digits, dots, dashes and underscores"
            )
        if names.count(name) > 1:
            raise UserError(
                f"fit(hooks=…): {names.count(name)} hooks with a state have the name {name}; give "
                f"each a name of its own, such as name = '{name}2'"
            )


def has_state(hook: Hook) -> bool:
    return type(hook).state_dict is not Hook.state_dict


class UserHooks(StepHook):
    """Runs the hooks of a script around the steps of a run.

    Their figures of a step are taken by `take`, before the step's line is recorded.
    """

    def __init__(self, hooks: Sequence[Hook], groups: ProcessGroups, worker: Worker) -> None:
        self.hooks, self.groups, self.worker = list(hooks), groups, worker
        self.figures = LoggedFigures()

    def check_same(self) -> None:
        """Raises UserError on every rank if a rank has other hooks; collective."""
        names = {"hooks": [name_of(hook) for hook in self.hooks]}
        check_agreement("fit", names, self.groups.world.handle, self.groups.device)

    @property
    def states(self) -> dict[str, Hook]:
        """Returns the hooks that checkpoints keep, by name."""
        return {name_of(hook): hook for hook in self.hooks if has_state(hook)}

    def open(self, trainer: Trainer) -> None:
        """Gives the hooks their run."""
        run = Run(trainer, self.worker.run_dir, self.figures)
        for hook in self.hooks:
            hook.run = run

    def before_run(self) -> None:
        """Runs the hooks before the first step."""
        self._call("before the first step", lambda hook: hook.before_run())

    def before_step(self, step: int) -> None:
        """Runs the hooks before a step."""
        with self._logging():
            self._call(f"before step {step}", lambda hook: hook.before_step(step))

    def after_step(self, result: StepResult, seconds: float) -> None:
        """Runs the hooks after a step."""
        with self._logging():
            self._call(f"after step {result.step}", lambda hook: hook.after_step(result))

    def before_evaluation(self, step: int) -> None:
        """Runs the hooks before an evaluation."""
        self._call(
            f"before the evaluation after step {step}", lambda hook: hook.before_evaluation(step)
        )

    def after_evaluation(
        self,
        step: int,
        eval_loss: float | None,
        of_parts: Mapping[str, float | None],
        of_sets: Mapping[str, Score],
        terms: Mapping[str, float] = {},
    ) -> Figures:
        """Runs the hooks after an evaluation, and returns their figures; collective."""
        row = evaluation_row(step, eval_loss, of_parts, of_sets, terms)
        with self._logging():
            self._call(
                f"after the evaluation after step {step}",
                lambda hook: hook.after_evaluation(step, row),
            )
        return self.take()

    def before_save(self, step: int) -> None:
        """Runs the hooks before a save."""
        self._call(f"before the save of step {step}", lambda hook: hook.before_save(step))

    def after_save(self, step: int) -> None:
        """Runs the hooks after a save."""
        self._call(f"after the save of step {step}", lambda hook: hook.after_save(step))

    def take(self) -> Figures:
        """Returns the means of what the ranks have logged since the last call; collective."""
        if not self.hooks:
            return {}
        mine = {name: float(value) for name, value in self.figures.values.items()}
        self.figures.values.clear()
        found: dict[str, list[float]] = {}
        for theirs in all_gather_json(mine, self.groups.world.handle, self.groups.device):
            for name, value in theirs.items():
                found.setdefault(name, []).append(value)
        return finite({name: sum(values) / len(values) for name, values in found.items()})

    def _call(self, when: str, call: Callable[[Hook], object]) -> None:
        if self.hooks:
            self.worker.log.boundary("hooks", repeats=False)
        for hook in self.hooks:
            self.worker.phase = f"hook {name_of(hook)}, {when}"
            call(hook)

    @contextmanager
    def _logging(self) -> Iterator[None]:
        self.figures.has_line = True
        yield  # an error in the block ends the run
        self.figures.has_line = False
