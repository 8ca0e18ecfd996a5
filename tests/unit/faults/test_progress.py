"""Tests the file in which a rank tells the guard of its host how far it is."""

from __future__ import annotations

import os
import stat
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest

from parallel3d.blueprint.layout import Layout
from parallel3d.faults import progress as files
from parallel3d.faults.progress import PROGRESS, ProgressFile, folder, make_folder, read
from parallel3d.faults.watchdog import Watchdog
from parallel3d.host.processes import born
from parallel3d.loop import evaluation, run_steps
from parallel3d.loop.rank_run import RankRun
from parallel3d.run import worker as worker_module
from parallel3d.run.launch import Worker


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """A clock that a test sets."""
    now = SimpleNamespace(now=100.0)
    monkeypatch.setattr(files.time, "monotonic", lambda: now.now)
    return now


def made(tmp_path: Path) -> tuple[ProgressFile, str]:
    path = str(tmp_path / "own")
    kept = ProgressFile.opened(5, {PROGRESS: path})
    assert kept is not None
    return kept, f"{path}/rank-5"


def test_without_the_variable_nothing_is_made(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    assert ProgressFile.opened(0, {}) is None and ProgressFile.opened(0, {PROGRESS: ""}) is None
    assert os.listdir(tmp_path) == []


def test_a_file_names_its_process_and_belongs_to_its_user_alone(tmp_path: Path) -> None:
    _, path = made(tmp_path)
    seen = read(path)
    assert seen is not None
    me = os.getpid()
    assert (seen.rank, seen.pid, seen.born) == (5, me, born(me))
    assert (seen.steps, seen.median, seen.state) == (0, 0.0, "paused")
    assert stat.S_IMODE(os.stat(path).st_mode) == 0o600
    assert stat.S_IMODE(os.stat(tmp_path / "own").st_mode) == 0o700
    assert os.listdir(tmp_path / "own") == ["rank-5"]


def test_steps_are_counted_with_their_median(tmp_path: Path, clock: SimpleNamespace) -> None:
    kept, path = made(tmp_path)
    kept.resume()
    for seconds in (90, 2, 2, 3, 50, 2):
        clock.now += seconds
        kept.step_ended()
    seen = read(path)
    assert seen is not None
    assert (seen.steps, seen.since, seen.state) == (6, clock.now, "stepping")
    assert seen.median == 2  # the first step, which may compile, is not among them


def test_a_pause_is_no_part_of_a_step(tmp_path: Path, clock: SimpleNamespace) -> None:
    kept, path = made(tmp_path)
    kept.resume()
    for _ in range(2):
        clock.now += 2
        kept.step_ended()
    kept.pause()
    clock.now += 600
    seen = read(path)
    assert seen is not None and (seen.state, seen.since) == ("paused", clock.now - 600)
    kept.resume()
    seen = read(path)
    assert seen is not None and (seen.state, seen.since) == ("stepping", clock.now)
    clock.now += 2
    kept.step_ended()
    seen = read(path)
    assert seen is not None and (seen.steps, seen.median) == (3, 2)
    kept.done()
    seen = read(path)
    assert seen is not None and (seen.steps, seen.state) == (3, "done")


@pytest.mark.parametrize("content", [b"", b"x" * 63, b"x" * 64, bytes(64)])
def test_a_file_of_another_kind_is_no_ranks(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "rank-0").write_bytes(content)
    assert read(str(tmp_path / "rank-0")) is None
    assert read(str(tmp_path / "rank-1")) is None


def test_the_folder_of_a_start_is_its_own() -> None:
    assert folder("7", 1) != folder("7", 2) != folder("8", 2)


@pytest.mark.parametrize("kind", ["link", "open to others", "file"])
def test_a_folder_that_others_may_change_is_refused(kind: str, tmp_path: Path) -> None:
    path = tmp_path / "own"
    if kind == "link":
        (tmp_path / "else").mkdir(mode=0o700)
        path.symlink_to(tmp_path / "else")
    elif kind == "file":
        path.write_text("")
    else:
        path.mkdir()
        path.chmod(0o770)
    with pytest.raises(OSError, match="belongs to you alone"):
        make_folder(str(path))


def test_a_rank_trains_without_a_file_that_cannot_be_made(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    environ = {PROGRESS: str(tmp_path / "no" / "folder")}
    assert worker_module._progress(0, environ) is None
    said = capsys.readouterr().err
    assert len(said.splitlines()) == 1 and "cannot be used (No such file" in said


# --- where the loop tells it ------------------------------------------------------------------


def kept_calls() -> tuple[Worker, list[str]]:
    calls: list[str] = []
    worker = Worker(0, 0, 1, 1, Path(), "slurm")
    worker.progress_file = Mock(
        pause=lambda: calls.append("pause"),
        resume=lambda: calls.append("resume"),
        step_ended=lambda: calls.append("step"),
    )
    return worker, calls


def test_each_step_and_the_watchdogs_pauses_are_told() -> None:
    worker, calls = kept_calls()
    watchdog = Watchdog(Layout(), worker, None, 60.0, 60.0)
    worker.watchdog = watchdog
    trainer: Any = SimpleNamespace(
        config=SimpleNamespace(compile=True),
        device="cpu",
        train_step=lambda: calls.append("work") or SimpleNamespace(stop=False),
    )
    run = RankRun(trainer, worker, None, Mock(), Mock(), 1, 3)
    run_steps.run_steps(run, [])
    assert calls == ["pause", "work", "resume", "step", "work", "step", "work", "step"]


def test_an_evaluation_is_a_pause_even_if_the_watchdog_watches_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    worker, calls = kept_calls()
    worker.watchdog = Mock()
    trainer: Any = SimpleNamespace(
        config=SimpleNamespace(compile=False, train=SimpleNamespace(eval_batches=1, eval_every=1)),
        device="cpu",
        evaluated_sets=[],
    )
    monkeypatch.setattr(evaluation, "fuses", lambda _: False)
    monkeypatch.setattr(evaluation, "evaluates", lambda _: False)
    monkeypatch.setattr(evaluation, "evaluate", lambda *_: calls.append("evaluation"))
    run = RankRun(trainer, worker, None, Mock(), Mock(), 1, 3)
    evaluation.Evaluation(run, Mock()).after_step(SimpleNamespace(step=1), 0.1)  # type: ignore[arg-type]
    assert calls == ["pause", "evaluation", "resume"]
    assert not worker.watchdog.pause.called


def test_nothing_is_known_of_a_rank_whose_pid_is_that_of_a_container(tmp_path: Path) -> None:
    """Its process would seem to be away, and its start would be ended for it."""
    _, path = made(tmp_path)
    assert read(path) is not None
    with open(path, "r+b") as file:
        file.seek(files.SPACE_AT)
        file.write(files.SPACE.pack(os.stat("/proc/self/ns/pid").st_ino + 1))
    assert read(path) is None
