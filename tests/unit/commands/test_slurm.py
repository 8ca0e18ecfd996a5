"""Tests what `parallel3d slurm` says about the nodes and the decisions of a run."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path

import pytest

from parallel3d.commands.slurm import slurm
from parallel3d.errors import UserError
from parallel3d.metrics import recovery_log
from parallel3d.models.keys import ModelConfig
from parallel3d.run.directory import save_config
from parallel3d.run_config import Config
from parallel3d.slurm import nodes
from parallel3d.slurm.decide import DAY_S, Evidence, decide, line_of
from tests.unit.slurm.test_decide import BOOM, after, before


def silent(sentence: str) -> None:
    raise AssertionError(sentence)


@pytest.fixture
def run_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "runs" / "web"
    folder.mkdir(parents=True)
    return folder


def out(run_dir: Path, age_days: float) -> None:
    entry = Evidence("does not answer", time.time() - age_days * DAY_S, 2, decisive=True)
    nodes.add(run_dir, {"node3": (entry,)}, time.time(), 100.0, silent)


def test_nodes_lists_and_forgets(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out(run_dir, 1)
    assert slurm(["nodes", "run=web"]) == 0
    assert "node3  left out" in capsys.readouterr().out
    assert slurm(["nodes", "web", "forget=node3"]) == 0
    assert slurm(["nodes", "web"]) == 0
    assert capsys.readouterr().out == "web: no node is left out, and none has a strike\n" * 2
    with pytest.raises(UserError, match=r"forget=node3: .* has no entry of this node"):
        slurm(["nodes", "web", "forget=node3"])


def test_nodes_expire_by_the_runs_own_key(
    run_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out(run_dir, 8)
    slurm(["nodes", "web"])
    assert "no node is left out" in capsys.readouterr().out
    config = Config(model=ModelConfig(name="gpt_tiny"))
    config.recovery.exclude_days = 9.0
    save_config(config, run_dir)
    slurm(["nodes", "web"])
    assert "node3  left out" in capsys.readouterr().out


def test_decide_repeats_the_decisions(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert slurm(["decide", "web"]) == 0
    assert capsys.readouterr().out == "web: recovery.jsonl has no decision of a Slurm job\n"
    lines = [line_of(inputs, decide(inputs)) for inputs in (before(), after(BOOM))]
    for line in lines:
        assert recovery_log.append(run_dir, line, silent)
    assert slurm(["decide", "web"]) == 0
    assert capsys.readouterr().out.splitlines() == [
        f"start {line.start}: {line.decision}: {line.sentence}" for line in lines
    ]
    other = replace(lines[1], decision="stop", nodes=(), sentence="no restart")
    recovery_log.append(run_dir, other, silent)
    assert slurm(["decide", "web"]) == 1
    assert "start 2: stop: no restart; now: same: " in capsys.readouterr().out


def test_a_folder_that_is_no_run_is_refused(run_dir: Path) -> None:
    with pytest.raises(UserError, match=r"runs/other is no folder of a run; give runs_dir="):
        slurm(["nodes", "other"])
