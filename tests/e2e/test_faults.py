"""Runs a short kill test: one run and three kills; `benchmarks.failures.kills` does fifty."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.e2e.ready import run_module

pytestmark = pytest.mark.more

SEED = "1915"  # kills a rank, then all ranks, then the launcher, each while a checkpoint is written


def test_a_killed_run_ends_with_the_undisturbed_runs_weights_and_losses(tmp_path: Path) -> None:
    out = tmp_path / "faults.json"
    words = ("--runs", "1", "--seed", SEED, "--steps", "30", "--out", str(out))
    words += ("--launcher", "forked")
    ended = run_module("benchmarks.faults", *words)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    found = json.loads(out.read_text())
    assert found["good"] == 1
    assert all(r["weights_equal"] and r["steps_once"] for r in found["runs"])
    done = [kill["target"] for run in found["runs"] for kill in run["kills"] if kill["at_step"]]
    assert len(done) >= 2  # a kill may come too late on a slow machine
