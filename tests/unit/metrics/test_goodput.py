"""Tests goodput (how the wall time of a run's starts was spent) with clocks that the test sets."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from parallel3d.metrics.loggers import figures_of
from parallel3d.metrics.peak import Peak
from parallel3d.metrics.recorder import Recorder
from parallel3d.metrics.recovery_log import Cause, RecoveryLine, append
from parallel3d.metrics.screen import failures_words
from parallel3d.metrics.starts import SUMS, Goodput, goodput, starts_of
from parallel3d.models.keys import ModelConfig
from parallel3d.run_config import Config


class Time:
    """A wall clock that only advances when it is set."""

    def __init__(self) -> None:
        self.now = 1_700_000_000.0

    def __call__(self) -> float:
        return self.now

    def pass_by(self, seconds: float) -> None:
        self.now += seconds


def begin(
    run_dir: Path, time: Time, first: int, start_up: float, load: float | None = None
) -> Recorder:
    config = Config()
    config.model, config.train.steps = ModelConfig(name="gpt_tiny"), 100
    begun = time.now
    loaded = None if load is None else begun + load
    time.pass_by(start_up)
    peak = Peak(1e9, "test")
    recorder = Recorder(config, run_dir, 1e6, peak, first, begun=begun, loaded=loaded, clock=time)
    recorder.start({})
    return recorder


def step(recorder: Recorder, time: Time, number: int, seconds: float = 2.0, **more: object) -> None:
    time.pass_by(seconds)
    recorder.step(number, 1.0, 0.5, 1e-3, 4096, seconds, **more)


def checkpoint(recorder: Recorder, time: Time, seconds: float = 3.0) -> None:
    recorder.waiting()  # when a save begins
    time.pass_by(seconds)
    recorder.spent("checkpoint", seconds)


def seconds_of(run_dir: Path, recorder: Recorder, status: str = "finished") -> dict[str, float]:
    found = recorder.finish(status)["goodput"]
    kept = {key: found[key] for key in found if key.endswith("_s") and found[key]}
    assert found["value"] == pytest.approx(found.get("steps_s", 0) / found["wall_s"])
    assert json.loads((run_dir / "summary.json").read_text())["goodput"] == found
    return kept


def test_goodput_of_an_undisturbed_start(tmp_path: Path) -> None:
    time = Time()
    recorder = begin(tmp_path, time, 1, start_up=10.0)
    for number in (1, 2, 3, 4):
        step(recorder, time, number)
    time.pass_by(5.0)
    recorder.spent("evaluation", 5.0)
    recorder.evaluation(4, 1.0)
    checkpoint(recorder, time)
    time.pass_by(1.0)  # this time is not counted
    expected = {"wall_s": 27.0, "steps_s": 8.0, "start_up_s": 10.0, "evaluation_s": 5.0}
    assert seconds_of(tmp_path, recorder) == expected | {"checkpoint_s": 3.0, "other_s": 1.0}
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [row.get("goodput") for row in rows] == [0.1667, 0.2857, 0.375, 0.4444, None]
    assert (
        not any("lost_to" in row for row in rows) and "causes" not in recorder.finish()["goodput"]
    )


def test_a_run_that_is_killed_and_resumes(tmp_path: Path) -> None:
    """A run is killed in step 6 after a checkpoint of step 3, and waits a minute in the queue."""
    time = Time()
    first = begin(tmp_path, time, 1, start_up=10.0)
    for number in (1, 2, 3):
        step(first, time, number)
    checkpoint(first, time)
    for number in (4, 5):
        step(first, time, number)
    time.pass_by(0.5)  # the time of step 6, which was not recorded
    (killed,) = starts_of(tmp_path / "starts.jsonl")
    assert (killed.step, killed.sums["checkpoint_s"]) == (3, 0.0)  # its end was not recorded

    time.pass_by(60.0)
    second = begin(tmp_path, time, 4, start_up=20.0)
    for number in (4, 5, 6):
        step(second, time, number, 3.0)
    checkpoint(second, time)
    found = seconds_of(tmp_path, second)
    assert found["wall_s"] == 10 + 6 + 3 + 4 + 0.5 + 60 + 20 + 9 + 3
    assert found["steps_s"] == 3 * 2.0 + 3 * 3.0
    assert found["lost_s"] == 2 * 2.0  # steps 4 and 5, done twice
    assert found["start_up_s"] == 10 + 20
    # The last sign was at step 5, two steps after the account of the save, which took 3 s.
    assert found["between_s"] == 3 + 0.5 + 60
    assert found["checkpoint_s"] == 3.0
    assert found.get("other_s", 0) == 0

    time.pass_by(100.0)
    third = begin(tmp_path, time, 7, start_up=1.0)
    step(third, time, 7)
    found = seconds_of(tmp_path, third, "stopped")
    assert (found["steps_s"], found["between_s"]) == (17.0, 163.5)
    assert third.finish()["goodput"]["starts"] == 3


def test_steps_that_change_nothing_or_are_rolled_back_are_lost(tmp_path: Path) -> None:
    time = Time()
    recorder = begin(tmp_path, time, 1, start_up=1.0)
    for number in (1, 2, 3, 4, 5):
        step(recorder, time, number, skipped=number == 4)
    recorder.rolled_back(2)  # steps 3 and 5 no longer count
    step(recorder, time, 6)
    assert seconds_of(tmp_path, recorder) == {
        "wall_s": 13.0, "steps_s": 6.0, "lost_s": 6.0, "start_up_s": 1.0
    }  # fmt: skip
    time.pass_by(9.0)
    again = begin(tmp_path, time, 7, start_up=1.0)
    step(again, time, 7)
    found = seconds_of(tmp_path, again)
    assert (found["steps_s"], found["lost_s"], found["between_s"]) == (8.0, 6.0, 9.0)


def test_goodput_of_starts_by_older_versions(tmp_path: Path) -> None:
    old = {"first_step": 1, "last_step": 9, "started": "2026-11-27T17:00:00+00:00", "host": "a"}
    path = tmp_path / "starts.jsonl"
    path.write_text(f"{json.dumps(old)}\n{{torn\n[]\n")
    (start,) = starts_of(path)
    assert start.begun == start.at == start.account
    found = goodput([start], 30.0, start.begun + 60.0)
    assert isinstance(found, Goodput) and found.value == 0.5
    broken = [old | {"first_step": 1e400}, old | {"begun": 10**400}, {"account": 10**400}]
    odd = {"account": 1e9, "step": 2, **dict.fromkeys(SUMS, 0.0), "status": ["finished"]}
    path.write_text("\n".join(map(json.dumps, [old, *broken, odd])))
    (start,) = starts_of(path)
    assert start.account == 1e9 and hash(start.status)
    assert goodput([], 1.0) is None and starts_of(tmp_path / "none") == []


def test_what_a_node_cost_is_in_the_summary_the_panel_and_the_rows(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A node dies in step 5, the job is queued again, and its first start ends with an error."""
    time = Time()
    first = begin(tmp_path, time, 1, start_up=10.0)
    for number in (1, 2, 3, 4):
        step(first, time, number)
        if number == 3:
            first.waiting()

    def decide(decision: str, cause: Cause | None, **seconds: float) -> None:
        append(tmp_path, RecoveryLine(time.now, 2, decision, "", cause, seconds=seconds), print)

    time.pass_by(40.0)
    decide("requeue", Cause("node", "node3"), detect=33.0, end=5.0, probe=2.0)
    time.pass_by(3600.0)
    decide("first", None)
    time.pass_by(30.0)
    decide("same", Cause("decided", "node1", 0, "TrainingFailure: it is odd"), end=1.0)
    time.pass_by(9.0)
    capsys.readouterr()
    second = begin(tmp_path, time, 4, start_up=20.0, load=15.0)
    step(second, time, 4)
    costs = second.finish("failed")["goodput"]["causes"]
    node = {"times": 1, "lost_s": 2.0, "detect_s": 33.0, "end_s": 5.0, "probe_s": 2.0}
    error = {"times": 1, "detect_s": 29.0, "end_s": 1.0, "start_s": 9.0}
    assert costs == {"node": node | {"queue_s": 3600.0},
                     "error": error | {"load_s": 15.0, "ready_s": 5.0}}  # fmt: skip
    words = "1 × node 1:00:42, 1:00:00 of it in the queue · 1 × error 0:59"
    panel = " ".join(capsys.readouterr().out.replace("│", " ").split())
    assert f"failures {words}" in panel
    *_, row = (json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines())
    shares = {"node": round(3642 / 3719, 4), "error": round(59 / 3719, 4)}
    assert row["lost_to"] == pytest.approx(shares, abs=2e-4)
    assert figures_of(row)["lost_to/node"] == row["lost_to"]["node"]
    lines = [json.loads(line) for line in (tmp_path / "starts.jsonl").read_text().splitlines()]
    (start,) = (line for line in lines if line.get("first_step") == 4)
    assert (start["cause"], start["cause_host"], start["decision"]) == ("node", "node3", "same")
    assert (lines[-1]["status"], lines[-1]["first_step_s"], lines[1]["saves"]) == ("failed", 2.0, 1)


def test_a_run_without_a_failure_has_no_line_about_failures(tmp_path: Path) -> None:
    time = Time()
    for first, status in ((1, "stopped"), (3, "finished"), (5, "interrupted"), (7, "stopped")):
        recorder = begin(tmp_path, time, first, start_up=1.0)
        step(recorder, time, first)
        step(recorder, time, first + 1)
        recorder.waiting()
        spent = recorder.finish(status)["goodput"]
        time.pass_by(60.0)
    assert {cause: cost["times"] for cause, cost in spent["causes"].items()} == {
        "requeue": 1, "user": 2
    }  # fmt: skip
    assert failures_words(spent) == ""
