"""Runs three jobs of `benchmarks.node_faults`, which does sixty; a seed gives the same plan."""

from __future__ import annotations

import json
import os
from collections import Counter
from pathlib import Path

import pytest

from benchmarks.failures.node_faults import KINDS, plan
from tests.e2e import rails
from tests.e2e.private_slurm import why_not
from tests.e2e.ready import run_module

pytestmark = pytest.mark.nightly
REASON = None if os.environ.get("CI") else why_not() or rails.why_not()


def test_a_seed_gives_the_same_faults_and_each_kind_its_turn() -> None:
    trials = plan(7, 60)
    assert [trial.faults for trial in trials] == [trial.faults for trial in plan(7, 60)]
    assert {len(trial.faults) for trial in trials} == {1, 2, 3}
    kinds = Counter(kind for trial in trials for kind, _ in trial.faults)
    assert set(kinds) == set(KINDS) and max(kinds.values()) - min(kinds.values()) <= 1


@pytest.mark.skipif(REASON is not None, reason=str(REASON))
def test_jobs_that_lose_nodes_end_with_the_undisturbed_runs_bits(tmp_path: Path) -> None:
    out = tmp_path / "node_faults.json"
    ended = run_module("benchmarks.node_faults", "--runs", "3", "--seed", "0", "--json", str(out))
    assert ended.returncode == 0, ended.stdout + ended.stderr
    trials = json.loads(out.read_text())["trials"]
    assert [trial["state"] for trial in trials] == ["COMPLETED"] * 3
    assert all(trial["is_bit_equal"] and trial["has_rows_once"] for trial in trials)
