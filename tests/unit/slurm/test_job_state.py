"""Tests what a job knows of its last start after a requeue."""

from __future__ import annotations

import json
from pathlib import Path

from parallel3d.metrics.lost_time import interruption
from parallel3d.metrics.recovery_log import RecoveryLine
from parallel3d.slurm.job_state import STATE, JobState

AGAIN = {"SLURM_RESTART_COUNT": "1"}


def kept(folder: Path, state: JobState) -> JobState:
    state.write(folder)
    return JobState.read(folder)


def test_a_start_whose_batch_script_is_gone_was_lost_with_its_node(tmp_path: Path) -> None:
    cause = kept(tmp_path, JobState(starts=2, nodes=4, host="node1")).cut_off(AGAIN)
    assert cause is not None
    assert (cause.kind, cause.host, cause.rank) == ("node", "node1", None)
    line = RecoveryLine(at=50.0, start=3, decision="first", sentence="", cause=cause)
    found = interruption(5.0, 20.0, 60.0, [line], None, {})
    assert (found.cause, found.host) == ("node", "node1")
    assert found.costs["node"].times == 1
    assert found.costs["node"].seconds["queue"] == 30.0


def test_a_start_that_has_ended_was_not_lost(tmp_path: Path) -> None:
    assert kept(tmp_path, JobState(starts=2, nodes=4)).cut_off(AGAIN) is None


def test_another_call_in_the_same_allocation_loses_no_node(tmp_path: Path) -> None:
    state = kept(tmp_path, JobState(starts=2, nodes=4, host="node1"))
    assert state.cut_off({}) is None
    assert state.cut_off({"SLURM_RESTART_COUNT": "0"}) is None


def test_the_state_of_an_older_version_is_read(tmp_path: Path) -> None:
    JobState(starts=2, nodes=4, host="node1").write(tmp_path)
    path = tmp_path / STATE
    content = json.loads(path.read_text())
    del content["host"]
    path.write_text(json.dumps(content))
    assert JobState.read(tmp_path) == JobState(starts=2, nodes=4)
