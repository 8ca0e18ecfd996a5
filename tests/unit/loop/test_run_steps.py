"""Tests that the loop calls every hook around every step, in order, and ends after a signal."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from parallel3d.checkpoint.keys import CheckpointConfig
from parallel3d.comm.operation_log import OperationLog
from parallel3d.loop import data_check
from parallel3d.loop.checkpointing import Checkpointing
from parallel3d.loop.data_check import DataCheck
from parallel3d.loop.health_check import HealthCheck
from parallel3d.loop.keys import TrainConfig
from parallel3d.loop.rank_run import RankRun
from parallel3d.loop.run_steps import run_steps
from parallel3d.loop.step_hooks import StepHook
from parallel3d.run.launch import Worker
from parallel3d.run_config import Config
from parallel3d.trainer import StepResult


class Told(StepHook):
    """Records its calls, in one list with the other hooks."""

    def __init__(self, name: str, said: list[str]) -> None:
        self.name, self.said = name, said

    def before_run(self) -> None:
        self.said.append(f"{self.name} begins")

    def before_step(self, step: int) -> None:
        self.said.append(f"{self.name} before {step}")

    def after_step(self, result: StepResult, seconds: float) -> None:
        assert seconds >= 0
        self.said.append(f"{self.name} after {result.step}")

    def stopped(self, step: int) -> None:
        self.said.append(f"{self.name} stopped after {step}")


def run_of(
    folder: Path, first: int, last: int, stop_after: int | None = None, **keys: Any
) -> tuple[RankRun, list[str]]:
    """Returns the steps of a trainer that computes nothing; a signal comes after `stop_after`."""
    said: list[str] = []
    worker = Worker(0, 0, 1, 1, folder, "local", watchdog=Mock())
    trainer = SimpleNamespace(
        config=Config(dp=1, **keys),
        device=torch.device("cpu"),
        steps_done=first - 1,
        corpus=SimpleNamespace(watched={}),
        valid_files=(),
    )

    def train_step() -> StepResult:
        trainer.steps_done += 1
        said.append(f"step {trainer.steps_done}, {worker.phase}")
        stop = trainer.steps_done == stop_after
        return StepResult(trainer.steps_done, 2.0, 1.0, 1e-3, 64, stop=stop)

    trainer.train_step = train_step
    return RankRun(trainer, worker, None, Mock(), Mock(), first, last), said


def test_hooks_are_called_around_each_step_in_their_order(tmp_path: Path) -> None:
    run, said = run_of(tmp_path, 3, 4)
    run_steps(run, [Told("a", said), Told("b", said)])
    assert said == [
        *("a begins", "b begins"),
        *("a before 3", "b before 3", "step 3, train step 3", "a after 3", "b after 3"),
        *("a before 4", "b before 4", "step 4, train step 4", "a after 4", "b after 4"),
    ]
    assert not run.worker.stopped


@pytest.mark.parametrize("compiled", [True, False])
def test_the_first_compiled_step_says_how_long_it_took(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], compiled: bool
) -> None:
    run, _ = run_of(tmp_path, 3, 5, compile=compiled)
    run_steps(run, [])
    said = re.findall(r"compile=true: the first step took \d+\.\d s", capsys.readouterr().err)
    assert len(said) == compiled


def test_a_signal_ends_the_run_after_its_step(tmp_path: Path) -> None:
    run, said = run_of(tmp_path, 1, 9, stop_after=2)
    run_steps(run, [Told("a", said)])
    assert said[-3:] == ["step 2, train step 2", "a after 2", "a stopped after 2"]
    assert run.worker.stopped


def test_a_signal_in_the_last_step_finds_a_finished_run(tmp_path: Path) -> None:
    run, said = run_of(tmp_path, 1, 2, stop_after=2)
    run_steps(run, [Told("a", said)])
    assert said[-1] == "a after 2" and not run.worker.stopped


def test_a_run_without_checkpoints_saves_nothing_when_stopped(tmp_path: Path) -> None:
    for every in (0, 5):
        run, _ = run_of(tmp_path, 1, 9, stop_after=2, checkpoint=CheckpointConfig(every=every))
        run.trainer.step_timer = Mock(
            range=Mock(return_value=Mock(__enter__=Mock(), __exit__=Mock()))
        )
        checkpointing = Checkpointing(run)
        checkpointing.stopped(2)
        assert run.checkpoints.save.call_count == bool(every)


def test_data_files_are_checked_whenever_something_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every second step is evaluated, step 3 is saved, and the run ends with step 5."""
    looked: list[int] = []
    run, _ = run_of(tmp_path, 1, 5, train=TrainConfig(steps=5, eval_every=2))
    monkeypatch.setattr(
        data_check, "check_data", lambda trainer, worker: looked.append(trainer.steps_done)
    )
    run.checkpoints.is_due.side_effect = lambda step: step == 3
    run_steps(run, [DataCheck(run)])
    assert looked == [2, 3, 4, 5]


class Communicates(StepHook):
    """Reduces over the world after some steps, in the phase that it finds or in one of its own."""

    def __init__(self, log: OperationLog, name: str, steps: range) -> None:
        self.log, self.group, self.steps = log, SimpleNamespace(name=name, ranks=(0, 1)), steps

    def after_step(self, result: StepResult, seconds: float) -> None:
        if result.step in self.steps:
            self.log.start(self.group, "all_reduce", torch.zeros(()))


def communicating(folder: Path, steps: int, **keys: Any) -> tuple[RankRun, list[str]]:
    """Returns steps that communicate, and the divergences that their log has, which grows."""
    run, _ = run_of(folder, 1, steps, **keys)
    log, found, compute = run.worker.log, [], run.trainer.train_step
    group = SimpleNamespace(name="dp", ranks=(0, 1))

    def train_step() -> StepResult:
        for _ in range(2):
            log.start(group, "reduce_scatter", torch.zeros(4))
            found.append(str(log.divergence()))
        return compute()

    run.trainer.train_step = train_step
    return run, found


def test_saves_in_flight_after_some_steps_are_no_divergence(tmp_path: Path) -> None:
    """While a save is written, which takes steps 3 to 5, the ranks ask whether it has ended."""
    run, found = communicating(tmp_path, 9, checkpoint=CheckpointConfig(every=3))
    run.trainer.step_timer = Mock(range=Mock(return_value=Mock(__enter__=Mock(), __exit__=Mock())))
    asks = Communicates(run.worker.log, "world", range(3, 6))
    run.checkpoints.after_step.side_effect = lambda trainer, unwritten, by_time: asks.after_step(
        StepResult(trainer.steps_done, 2.0, 1.0, 1e-3, 64), 0.0
    )
    run_steps(run, [Checkpointing(run)])
    assert found == ["None"] * 18


def test_a_rollback_is_no_divergence(tmp_path: Path) -> None:
    run, found = communicating(tmp_path, 6)
    restores = Communicates(run.worker.log, "dp", range(3, 4))
    health = Mock(rollbacks=0)
    health.after_step.side_effect = lambda result: restores.after_step(result, 0.0)
    run_steps(run, [HealthCheck(run, health)])
    assert found == ["None"] * 12


def test_a_step_that_leaves_out_a_call_diverges_even_with_users_hooks_before_it(
    tmp_path: Path,
) -> None:
    run, found = communicating(tmp_path, 6)
    log, compute = run.worker.log, run.trainer.train_step
    extra = Communicates(log, "tp", range(1, 5))

    def train_step() -> StepResult:
        extra.after_step(StepResult(run.trainer.steps_done + 1, 2.0, 1.0, 1e-3, 64), 0.0)
        return compute()

    class Users(StepHook):
        def before_step(self, step: int) -> None:
            log.boundary("hooks", repeats=False)
            run.worker.phase = "hook Users, before step"

    run.trainer.train_step = train_step
    run_steps(run, [Users()])
    assert found[:8] == ["None"] * 8
    assert found[8] == "left out all_reduce of tp (float32[])"
    assert run.worker.phase == "train step 6"
