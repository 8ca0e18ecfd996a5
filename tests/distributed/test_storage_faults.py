"""Tests storage that fails: a sample of `benchmarks.failures.storage_faults`, and a rank that
cannot read."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest
import torch.distributed as dist

from benchmarks.failures.storage_cases import SCENARIOS, Run
from benchmarks.failures.storage_faults import campaign, try_pair, without_pauses
from parallel3d.blueprint.layout import Layout
from parallel3d.checkpoint.checkpoints import Checkpoints
from parallel3d.checkpoint.manifest import CHECKPOINTS, list_checkpoints, list_damaged
from parallel3d.errors import TrainingFailure
from tests.distributed.cases import Problem
from tests.distributed.harness import make_trainer, plain_groups
from tests.distributed.pool import Pool
from tests.distributed.test_checkpoint import case_of
from tests.tools.failing_files import FailingFiles, Fault

pytestmark = pytest.mark.nightly

PAIRS = 50


@pytest.mark.more
def test_calls_that_fail_lose_nothing(tmp_path: Path) -> None:
    found = campaign(tmp_path, PAIRS, seed=3, say=print)
    assert found["wrong"] == []
    assert (found["tried"], found["pairs"] > 2000) == (PAIRS, True)
    assert found["met"] > PAIRS * 0.9, found
    assert {name for name, _ in found["calls"]} == set(SCENARIOS)
    assert {"open", "read", "write", "fsync", "rename", "close"} <= {k for _, k in found["calls"]}


@pytest.mark.more
def test_faults_that_once_mattered_lose_nothing(tmp_path: Path) -> None:
    """Tests errors that once set good checkpoints aside, or were reported for a save that had
    succeeded."""
    with without_pauses():
        run = Run(tmp_path)
        stale = try_pair(run, "resume", Fault("ESTALE", "kind"), ("open", 3))
        assert (stale.ended, stale.wrong) == ("ended by a sentence", [])
        passing = try_pair(run, "resume", Fault("EIO"), ("read", 2))
        assert (passing.ended, passing.wrong, passing.failed) == ("continued", [], 1)
        housekeeping = try_pair(run, "save", Fault("EACCES", "kind"), ("rmdir", 0))
        assert (housekeeping.ended, housekeeping.wrong) == ("continued with a message", [])


def save_and_be_refused(run_dir: Path) -> tuple[list[str], int, list[str]]:
    """Saves, tries to resume while rank 1 cannot open a file, and resumes; on every rank."""
    groups = plain_groups(Layout(1, 1, 2))
    trainer = make_trainer(case_of("one", Problem("llama_tiny", "adamw", False), run_dir), groups)
    said: list[str] = []
    checkpoints = Checkpoints(trainer.config, run_dir, groups, said.append)
    checkpoints.restore(trainer)
    trainer.train_step()
    checkpoints.save(trainer)
    point = ("open", 0) if dist.get_rank() == 1 else None
    again = Checkpoints(trainer.config, run_dir, groups, said.append)
    refused = []
    try:
        with FailingFiles(run_dir / CHECKPOINTS, Fault("ESTALE", "kind"), point), without_pauses():
            again.restore(trainer)
    except TrainingFailure as ended:
        refused.append(str(ended))
    first_step = again.restore(trainer)
    groups.close()
    return refused, first_step, said


def test_one_rank_that_cannot_read_fails_all_ranks_and_changes_nothing(
    pool: Pool, tmp_path: Path
) -> None:
    answers = pool.run(2, save_and_be_refused, tmp_path)
    sentences = {sentence for refused, _, _ in answers for sentence in refused}
    (sentence,) = sentences
    assert sentence.startswith(f"on rank 1, host {socket.gethostname()}: step-00000001/manifest-")
    assert "ESTALE: " in sentence and "no checkpoint was touched" in sentence
    assert [first for _, first, _ in answers] == [2, 2]
    assert [p.name for p in list_checkpoints(tmp_path)] == ["step-00000001"]
    assert list_damaged(tmp_path) == []
