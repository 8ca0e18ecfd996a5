"""Tests a start, a restart and a run's end on a failing file system."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from parallel3d.checkpoint import manifest
from parallel3d.cli import command_line
from parallel3d.commands.checkpoint.listing import list_runs
from parallel3d.commands.from_run import checkpoints_of
from parallel3d.commands.options import GenerateConfig
from parallel3d.data.sources import Document, blocks_of
from parallel3d.errors import UserError
from parallel3d.files import replace_durably
from parallel3d.metrics.jsonl import MetricsFile, rows_of
from parallel3d.run import directory
from parallel3d.run.directory import check_run, discard_unused, make_run_directory
from parallel3d.run.failure import place_in
from parallel3d.run.launch import or_end
from parallel3d.run.local_workers import Restarts
from parallel3d.run_config import Config
from tests.tools.failing_files import LOST, FailingFiles, Fault
from tests.unit.run.test_restarts import KILLED

ILL = OSError(errno.ESTALE, os.strerror(errno.ESTALE))


def refuse(*_: object, **__: object) -> None:
    raise ILL


@pytest.fixture
def run(tmp_path: Path) -> Config:
    """Makes a run whose folder has the name of a checkpoint."""
    config, folder = make_run_directory(Config(dp=1, run="run", runs_dir=str(tmp_path)))
    (folder / manifest.CHECKPOINTS / "step-00000005").mkdir(parents=True)
    return config


def test_run_whose_checkpoints_cannot_be_listed_is_refused_in_a_sentence(
    run: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(directory, "list_checkpoints", refuse)
    with pytest.raises(UserError, match=r"cannot be listed .ESTALE: Stale file handle"):
        check_run(run, may_resume=True)


@pytest.mark.parametrize("step", [None, 5])
def test_generate_says_that_checkpoints_cannot_be_listed(
    run: Config, monkeypatch: pytest.MonkeyPatch, step: int | None
) -> None:
    run_dir, keys = Path(run.runs_dir, str(run.run)), GenerateConfig(step=step)
    assert [p.name for p in checkpoints_of(run_dir, keys)] == ["step-00000005"]
    monkeypatch.setattr("parallel3d.commands.from_run.list_checkpoints", refuse)
    with pytest.raises(UserError, match=r"cannot be listed .ESTALE"):
        checkpoints_of(run_dir, keys)


@pytest.mark.parametrize("call", ["list_checkpoints", "keep_failures"])
def test_no_restart_on_an_unusable_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    (tmp_path / "checkpoints" / "step-00000005").mkdir(parents=True)
    said: list[str] = []
    monkeypatch.setattr(f"parallel3d.run.local_workers.{call}", refuse)
    assert not Restarts(tmp_path, 2, said.append).decide(KILLED)
    assert said == [f"no restart, as {tmp_path} cannot be used (ESTALE: Stale file handle)"]


def test_an_unreadable_folder_is_not_discarded_and_raises_nothing(
    run: Config, tmp_path: Path
) -> None:
    with FailingFiles(tmp_path, Fault("EIO", "all"), ("listdir", 0)) as calls:
        discard_unused(tmp_path / "run")
    assert calls.failed and (tmp_path / "run" / "config.yaml").exists()


def test_errors_of_the_launcher_are_sentences_without_a_traceback(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    def ill(words: list[str]) -> int:
        raise OSError(errno.EIO, "Input/output error", "/data/runs")

    monkeypatch.setitem(command_line.FAMILIES, "checkpoint", (ill, {}))
    assert command_line.main(["checkpoint", "ls"]) == 1
    said = capsys.readouterr().err
    assert said == "parallel3d: /data/runs cannot be used: EIO: Input/output error.\n"


def test_ls_reports_unreadable_files(
    run: Config, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    (tmp_path / "run" / "metrics.jsonl").touch()
    with FailingFiles(tmp_path, Fault("EIO", "kind"), ("open", 0)):
        list_runs(tmp_path, None)
    assert "metrics.jsonl cannot be read (EIO: Input/output error)" in capsys.readouterr().err


def test_leftovers_of_killed_starts_are_removed_after_a_day(tmp_path: Path) -> None:
    folders = [directory.new_folder(tmp_path) for _ in range(2)]
    old = time.time() - directory.LEFT_S - 60
    os.utime(folders[0], (old, old))
    link = tmp_path / f"{directory.TEMPORARY}link"
    link.symlink_to(folders[1])
    os.utime(link, (old, old), follow_symlinks=False)
    make_run_directory(Config(dp=1, run="new", runs_dir=str(tmp_path)))
    assert not folders[0].exists()
    assert folders[1].exists() and link.exists()
    assert (tmp_path / "new" / "config.yaml").exists()


@pytest.mark.parametrize("lasts", ["once", "kind"])
def test_a_line_that_was_written_but_reported_as_failed_is_there_once(
    tmp_path: Path, lasts: str
) -> None:
    said: list[str] = []
    with FailingFiles(tmp_path, Fault(LOST, lasts), ("write", 1)) as calls:
        file = MetricsFile(tmp_path / "metrics.jsonl", say=said.append)
        for step in range(1, 5):
            file.write({"step": step})
    file.close()
    assert calls.failed and len(said) == 1
    assert [row["step"] for row in rows_of(tmp_path / "metrics.jsonl")] == [1, 2, 3, 4]


def test_finding_the_place_of_a_stack_reads_no_files(monkeypatch: pytest.MonkeyPatch) -> None:
    """Frames without a file would be looked up in the working directory, which may not answer."""
    for call in ("stat", "lstat", "readlink"):
        monkeypatch.setattr(os, call, refuse)
    stack = [("<frozen runpy>", 1, "f"), (command_line.__file__, 7, "main"), ("<string>", 2, "g")]
    assert place_in(stack) == " at parallel3d/cli/command_line.py:7"


@pytest.mark.nightly
def test_a_start_on_a_hanging_disk_ends_with_a_sentence() -> None:
    with or_end(30, "no answer"):
        pass
    code = "import time; from parallel3d.run.launch import or_end\nwith or_end(0.2, 'no answer'):"
    ended = subprocess.run([sys.executable, "-c", f"{code} time.sleep(60)"], capture_output=True)
    assert (ended.returncode, ended.stderr) == (1, b"parallel3d: no answer\n")


def test_text_whose_file_cannot_be_closed_gives_no_traceback(
    tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    book = tmp_path / "book.txt"
    book.write_text("some words\n" * 9)
    document = Document.of("book", str(book), book.stat())
    with FailingFiles(tmp_path, Fault("EIO", "kind"), ("close", 0)) as calls:
        pieces = blocks_of(document)
        next(pieces)
        del pieces  # like where the cache cannot be written
        read = b"".join(blocks_of(document))
    assert (read, calls.failed) == (book.read_bytes(), 2)
    assert capsys.readouterr().err == ""


def test_weights_are_on_the_disk_before_they_have_their_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, done = tmp_path / "weights-final.safetensors", []
    fsync, replace = os.fsync, os.replace

    def flushed(descriptor: int) -> None:
        done.append(Path(os.readlink(f"/proc/self/fd/{descriptor}")).name)
        fsync(descriptor)

    def renamed(source: Path, target: Path) -> None:
        done.append("renamed")
        replace(source, target)

    monkeypatch.setattr(os, "fsync", flushed)
    monkeypatch.setattr(os, "replace", renamed)
    replace_durably(path, b"ones")
    assert done[0].endswith(".partial") and done[1:] == ["renamed", tmp_path.name]
    monkeypatch.setattr(os, "fsync", refuse)
    before = path.read_bytes()
    with pytest.raises(OSError, match="Stale"):
        replace_durably(path, b"zeros")
    assert os.listdir(tmp_path) == [path.name] and path.read_bytes() == before
