"""Tests a launcher's reads and writes around its ranks on a failing disk: one sentence at most."""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from parallel3d.checkpoint.manifest import CHECKPOINTS, step_folder
from parallel3d.checkpoint.saver import Lease
from parallel3d.data.corpus import check_data
from parallel3d.data.keys import DataConfig
from parallel3d.errors import UserError
from parallel3d.resolve import layout_of
from parallel3d.run.directory import (
    PLACEMENT_FILE,
    check_run,
    discard_unused,
    make_run_directory,
    take_run,
)
from parallel3d.run.failure import RankFailure
from parallel3d.run.local_workers import Restarts, _cause
from parallel3d.run_config import Config
from tests.tools.failing_files import FailingFiles, Fault

KILLED = RankFailure(0, "pp 0, dp 0, tp 0", "here", "", "was killed by SIGKILL", 0.0, "killed")


@pytest.fixture
def config(tmp_path: Path) -> Config:
    return Config(run="run", runs_dir=str(tmp_path / "runs"), dp=1, device="cpu")


def start(config: Config, run_dir: Path) -> int | None:
    check_run(config, may_resume=True)
    make_run_directory(config, may_resume=True)
    return take_run(config, run_dir)


def begun(run_dir: Path) -> None:
    """Makes a run with a checkpoint, a map of its ranks and a record of a failure."""
    (run_dir / CHECKPOINTS / step_folder(5)).mkdir(parents=True)
    (run_dir / "failures").mkdir()
    (run_dir / "failures" / "rank-0.json").write_text("{}")
    (run_dir / PLACEMENT_FILE).write_text('{"ranks": [{"rank": 0, "launch_rank": 0}]}')


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("is_begun", "act"),
    [
        (True, start),
        (True, lambda config, run_dir: Restarts(run_dir, 3, lambda _: None).decide(KILLED)),
        (True, lambda config, run_dir: _cause(layout_of(config), run_dir, {0: -9})),
        (False, lambda config, run_dir: discard_unused(run_dir)),
    ],
    ids=["start", "start the ranks again", "find the cause", "remove an unused run"],
)
def test_every_failing_call_is_a_user_error_or_ignored(
    config: Config, is_begun: bool, act: Callable[[Config, Path], object]
) -> None:
    """Tests that files stay or are removed completely: the next start finds a run's folder or
    none."""
    _, run_dir = make_run_directory(config)
    if is_begun:
        begun(run_dir)
    template = shutil.move(run_dir, run_dir.parent.with_name("template"))

    def prepare() -> None:
        shutil.rmtree(run_dir.parent)
        shutil.copytree(template, run_dir)

    prepare()
    with FailingFiles(run_dir.parent) as calls:
        act(config, run_dir)
    points = calls.points()
    assert len(points) > 3
    locks: list[int] = []
    for point in points:
        prepare()
        with FailingFiles(run_dir.parent, Fault("EIO"), point) as calls:
            try:
                taken = act(config, run_dir)
            except UserError as error:
                assert "\n" not in str(error)
            else:
                if act is start and taken is not None:
                    locks.append(taken)
        assert calls.failed, point
        assert (run_dir / "config.yaml").exists() or not run_dir.exists()
    for lock in locks:
        os.close(lock)


def test_a_failing_lock_is_not_read_as_a_second_start(
    config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, run_dir = make_run_directory(config)

    def refuse(*_: object) -> None:
        raise OSError(errno.EIO, "Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr(fcntl, "flock", refuse)
        with pytest.raises(UserError, match="Input/output error"):
            take_run(config, run_dir)
    lock = take_run(config, run_dir)
    with pytest.raises(UserError, match="is running already"):
        take_run(config, run_dir)
    os.close(lock)


def test_an_unreadable_cache_folder_is_refused(tmp_path: Path) -> None:
    book, folder = tmp_path / "book.txt", tmp_path / "cache"
    book.write_text("one bottle of beer on the wall, " * 99)
    folder.mkdir()
    data = DataConfig(name="text", path=str(book), cache_dir=str(folder))
    check_data(data, 32)
    with (
        FailingFiles(folder, Fault("EIO", "all"), ("stat", 1)),
        pytest.raises(UserError, match="cannot hold the token cache: Input/output error"),
    ):
        check_data(data, 32)


def test_an_unused_run_with_only_a_claim_is_removed(config: Config) -> None:
    _, run_dir = make_run_directory(config)
    assert Lease(run_dir, "a").take() == []
    discard_unused(run_dir)
    assert list(run_dir.parent.iterdir()) == []
