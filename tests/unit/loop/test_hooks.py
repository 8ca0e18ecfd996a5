"""Tests what a script's hooks may be named, log and keep, and what they are told."""

from __future__ import annotations

import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from parallel3d.comm.process_groups import ProcessGroups
from parallel3d.errors import UserError
from parallel3d.loop.hooks import Hook
from parallel3d.loop.user_hooks import UserHooks, check_hooks
from parallel3d.metrics.loggers import figures_of
from parallel3d.run.launch import Worker
from parallel3d.trainer import StepResult


class Counts(Hook):
    def state_dict(self) -> dict[str, Any]:
        return {"count": 1}


class Named(Counts):
    name = "a name/with a slash"


def opened(hooks: list[Hook], folder: Path) -> UserHooks:
    """Returns the hooks of a run of one rank, which has done two steps."""
    worker = Worker(0, 0, 1, 1, folder, "local")
    groups = ProcessGroups.single()
    user_hooks = UserHooks(hooks, groups, worker)
    length = SimpleNamespace(last_step=9)
    trainer = SimpleNamespace(
        config=None, groups=groups, device=torch.device("cpu"), stages=(), steps_done=2
    )
    trainer.length = length
    user_hooks.open(trainer)
    return user_hooks


@pytest.mark.parametrize(
    ("hooks", "said"),
    [
        ([object()], "is object; give objects of a class of Hook"),
        ([Counts], "is a class, not an object; give objects"),
        ([Counts(), Counts()], "2 hooks with a state have the name Counts; give each a name"),
        ([Named()], "'a name/with a slash' of a hook with a state must have 1 to 100 letters"),
    ],
)
def test_hooks_that_cannot_run_are_refused_before_a_rank_starts(hooks: list, said: str) -> None:
    with pytest.raises(UserError, match="fit\\(hooks=…\\)") as refused:
        check_hooks(hooks)
    assert said in str(refused.value)


def test_hooks_without_a_state_may_share_a_name() -> None:
    check_hooks([Hook(), Hook(), Counts()])


@pytest.mark.parametrize(
    "name", ["loss", "train/loss", "time/mine", "step", "", "a//b", "_step", "naïve", "eval_loss"]
)
def test_a_figure_may_not_have_a_name_of_the_recorder(name: str, tmp_path: Path) -> None:
    class Logs(Hook):
        def after_step(self, result: StepResult) -> None:
            self.run.log(name, 1.0)

    with pytest.raises(UserError, match="the nearest is probe/"):
        opened([Logs()], tmp_path).after_step(StepResult(3, 2.0, 1.0, 1e-3, 64), 0.1)


def test_a_figure_without_a_line_of_metrics_is_refused(tmp_path: Path) -> None:
    class Logs(Hook):
        def before_save(self, step: int) -> None:
            self.run.log("probe/norm", 1.0)

    with pytest.raises(UserError, match="call it in before_step, after_step or after_evaluation"):
        opened([Logs()], tmp_path).before_save(3)


def test_figures_reach_the_loggers_by_their_names_and_are_taken_once(tmp_path: Path) -> None:
    class Logs(Hook):
        def before_step(self, step: int) -> None:
            self.run.log("probe/before", step)

        def after_step(self, result: StepResult) -> None:
            self.run.log("probe/norm", torch.tensor([2.5]))
            self.run.log("probe/ratio", math.inf)

    hooks = opened([Logs()], tmp_path)
    hooks.before_step(3)
    hooks.after_step(StepResult(3, 2.0, 1.0, 1e-3, 64), 0.1)
    figures = hooks.take()
    assert figures == {
        **{"probe/before": 3.0, "probe/norm": 2.5, "probe/ratio": None},
        "nonfinite": {"probe/ratio": "inf"},
    }
    assert hooks.take() == {}
    assert figures_of({"step": 3, "hooks": figures}) == {
        **{"step": 3, "probe/before": 3.0, "probe/norm": 2.5, "probe/ratio": math.inf}
    }


def test_a_failure_names_the_hook_and_the_step(tmp_path: Path) -> None:
    class Fails(Hook):
        def after_step(self, result: StepResult) -> None:
            raise ZeroDivisionError

    hooks = opened([Hook(), Fails()], tmp_path)
    with pytest.raises(ZeroDivisionError):
        hooks.after_step(StepResult(3, 2.0, 1.0, 1e-3, 64), 0.1)
    assert hooks.worker.phase == "hook Fails, after step 3"


def test_hooks_see_the_run_and_its_evaluations(tmp_path: Path) -> None:
    class Sees(Hook):
        def after_evaluation(self, step: int, row: dict[str, Any]) -> None:
            seen = self.run.step, self.run.last_step, self.run.run_dir, self.run.groups.rank
            assert seen == (2, 9, tmp_path, 0)
            self.run.log("probe/eval", row["eval_loss"] + row["eval_losses"]["web"])

    assert opened([Sees()], tmp_path).after_evaluation(2, 3.0, {"web": 0.5}, {}) == {
        "probe/eval": 3.5
    }
