"""Tests which failures make the launcher restart the local ranks."""

from __future__ import annotations

from pathlib import Path

import pytest

from parallel3d.metrics.recovery_log import Cause, read
from parallel3d.run.failure import RankFailure
from parallel3d.run.local_workers import Restarts


def failed(error: str, kind: str = "error", phase: str = "train step 7") -> RankFailure:
    return RankFailure(2, "pp 0, dp 2, tp 0", "here", phase, error, 1.0, kind)


KILLED = failed("was killed by SIGKILL", "killed", "")


@pytest.fixture
def said() -> list[str]:
    return []


@pytest.fixture
def restarts(tmp_path: Path, said: list[str]) -> Restarts:
    (tmp_path / "checkpoints" / "step-00000005").mkdir(parents=True)
    return Restarts(tmp_path, 2, said.append)


def test_killed_rank_is_started_again_until_the_limit(restarts: Restarts, said: list[str]) -> None:
    assert [restarts.decide(KILLED) for _ in range(3)] == [True, True, False]
    who = "rank 2 (pp 0, dp 2, tp 0) on here was killed by SIGKILL"
    assert said == [f"{who}; restart {n} of 2 from step 5" for n in (1, 2)]


def test_without_a_checkpoint_the_run_ends(tmp_path: Path) -> None:
    assert not Restarts(tmp_path, 2, print).decide(KILLED)


def test_the_same_error_at_the_same_step_is_not_retried_a_third_time(restarts: Restarts) -> None:
    assert restarts.decide(failed("ValueError: odd"))
    assert not restarts.decide(failed("ValueError: odd"))
    assert restarts.decide(failed("ValueError: odd", phase="train step 8"))


@pytest.mark.parametrize(
    "cause", [failed("tp=0 cannot be", "user"), failed("TrainingFailure: loss is nan", "decided")]
)
def test_failures_that_would_repeat_are_not_restarted(
    restarts: Restarts, cause: RankFailure
) -> None:
    assert not restarts.decide(cause)


def test_records_of_a_failure_do_not_reach_the_next(restarts: Restarts) -> None:
    record = restarts.run_dir / "failures" / "rank-2.json"
    record.parent.mkdir()
    record.write_text("{}")
    assert restarts.decide(KILLED)
    assert not record.exists()
    assert (restarts.run_dir / "failures-1" / "rank-2.json").exists()


def test_decisions_about_a_run_that_has_begun_are_recorded(restarts: Restarts) -> None:
    assert restarts.decide(KILLED) and read(restarts.run_dir) == []
    (restarts.run_dir / "starts.jsonl").touch()
    assert restarts.decide(KILLED, noticed=3.5) and not restarts.decide(KILLED)
    again, end = read(restarts.run_dir)
    assert (again.decision, again.start, end.decision, end.start) == ("same", 3, "stop", 4)
    assert again.cause == Cause("killed", "here", 2, "was killed by SIGKILL")
    assert (again.failed_at, again.seconds["detect"]) == (1.0, 2.5) and again.seconds["end"] > 0
    assert again.sentence.endswith("restart 2 of 2 from step 5")
