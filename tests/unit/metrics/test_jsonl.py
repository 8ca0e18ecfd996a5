"""Tests metrics.jsonl: whole lines whatever happens, valid JSON whatever the values."""

from __future__ import annotations

import errno
import json
import math
import os
import resource
import signal
import subprocess
import sys
import tracemalloc
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from parallel3d.metrics.jsonl import MetricsFile, finite, rows_of, value, write_json
from tests.tools.failing_files import FailingFiles, Fault


@pytest.mark.nightly
def test_every_line_survives_sigkill(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    program = (
        "import os, sys; from pathlib import Path\n"
        "from parallel3d.metrics.jsonl import MetricsFile\n"
        "file = MetricsFile(Path(sys.argv[1]))\n"
        "for step in range(1, 51): file.write({'step': step})\n"
        "os.kill(os.getpid(), 9)\n"
    )
    root = str(Path(__file__).resolve().parents[3])
    environment = os.environ | {"PYTHONPATH": root}
    done = subprocess.run([sys.executable, "-c", program, str(path)], check=False, env=environment)
    assert done.returncode == -signal.SIGKILL
    assert [row["step"] for row in rows_of(path)] == list(range(1, 51))


@pytest.mark.parametrize("odd", [math.nan, math.inf, -math.inf])
def test_infinite_and_nan_values_survive_a_round_trip_as_valid_json(
    tmp_path: Path, odd: float
) -> None:
    with MetricsFile(tmp_path / "metrics.jsonl") as file:
        file.write({"step": 1, "loss": odd, "lr": 0.5})
    text = (tmp_path / "metrics.jsonl").read_text()

    def refuse(token: str) -> float:
        raise AssertionError(f"{token} is not JSON")

    row = json.loads(text, parse_constant=refuse)
    assert row == {"step": 1, "loss": None, "lr": 0.5, "nonfinite": {"loss": repr(odd)}}
    assert repr(value(row, "loss")) == repr(odd)
    assert value(row, "lr") == 0.5


def test_finite_rows_get_no_note() -> None:
    assert finite({"step": 1, "loss": 2.0}) == {"step": 1, "loss": 2.0}


def test_resume_drops_rows_of_repeated_steps_and_keeps_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    with MetricsFile(path) as file:
        for step in (1, 2, 3, 4):
            file.write({"step": step})
    with path.open("a") as torn:
        torn.write('{"step": 5, "lo')
    before = path.read_bytes()
    stay: list[dict] = []
    with MetricsFile(path, 3, stay.append) as file:
        assert [row["step"] for row in stay] == [1, 2]
        file.write({"step": 3})
    assert [row["step"] for row in rows_of(path)] == [1, 2, 3]
    assert (tmp_path / "metrics.jsonl.1").read_bytes() == before


def test_resume_without_anything_to_drop_leaves_the_file_untouched(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    with MetricsFile(path) as file:
        file.write({"step": 1, "loss": 0.1 + 0.2})
    before = path.read_bytes()
    MetricsFile(path, first_step=2).close()
    assert path.read_bytes() == before
    assert os.listdir(tmp_path) == ["metrics.jsonl"]


def test_a_fresh_start_in_a_used_directory_keeps_the_old_metrics_file(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    with MetricsFile(path) as file:
        file.write({"step": 0, "eval_loss": 5.0})
        file.write({"step": 1})
    MetricsFile(path, 1, pytest.fail).close()
    assert path.read_bytes() == b""
    assert len([*rows_of(tmp_path / "metrics.jsonl.1")]) == 2


def test_write_json_replaces_the_whole_file_or_nothing(tmp_path: Path) -> None:
    path = tmp_path / "summary.json"
    write_json(path, {"a": 1})
    with pytest.raises(ValueError, match="JSON"):
        write_json(path, {"a": math.nan})
    assert json.loads(path.read_text()) == {"a": 1}


def rows(*steps: int) -> bytes:
    return b"".join(b'{"step": %d, "tokens": %d}\n' % (step, 10 * step) for step in steps)


def die_in(call: str, after: bool) -> None:
    """Ends this process at its next call of a function of `os`, before or after the call."""
    real = getattr(os, call)

    def dying(*words: object) -> None:
        if after:
            real(*words)
        os._exit(9)

    setattr(os, call, dying)


@pytest.mark.parametrize("call", ["link", "replace", "fsync"])
def test_a_resume_killed_half_way_loses_no_row(tmp_path: Path, call: str) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(rows(1, 2, 3, 4))
    for after in (False, True):
        child = os.fork()
        if child == 0:
            die_in(call, after)
            MetricsFile(path, first_step=3)
            os._exit(1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 9
        assert path.read_bytes() in (rows(1, 2, 3, 4), rows(1, 2))
        path.write_bytes(rows(1, 2, 3, 4))
    assert (tmp_path / "metrics.jsonl.1").exists() == (call != "fsync")
    MetricsFile(path, first_step=3).close()
    assert path.read_bytes() == rows(1, 2)


def test_without_hard_links_the_old_file_is_copied(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(rows(1, 2, 3))

    def refuse(*_: object) -> None:
        raise PermissionError(errno.EPERM, "no links here")

    monkeypatch.setattr(os, "link", refuse)
    MetricsFile(path, first_step=2).close()
    assert path.read_bytes() == rows(1)
    assert (tmp_path / "metrics.jsonl.1").read_bytes() == rows(1, 2, 3)


def test_a_link_in_the_place_of_the_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "precious").write_text("thesis")
    (tmp_path / "metrics.jsonl").symlink_to(tmp_path / "precious")
    with pytest.raises(OSError, match="symbolic"):
        MetricsFile(tmp_path / "metrics.jsonl")
    assert (tmp_path / "precious").read_text() == "thesis"


DAMAGES = {
    "NULs": bytes(100) + b"\n",
    "torn, then others": b'{"step": 5, "lo\n',
    "no UTF-8": b'{"step": 5, "x": "\xff"}\n',
    "no row": b"[1, 2]\n",
    "no step": b'{"loss": 1}\n',
    "deep": b"[" * 100_000 + b"\n",
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_lines_are_left_out_and_counted(tmp_path: Path, damage: str) -> None:
    path = tmp_path / "metrics.jsonl"
    before = rows(1) + DAMAGES[damage] + rows(2) + DAMAGES[damage] + rows(3)
    path.write_bytes(before)
    said: list[str] = []
    stay: list[dict] = []
    MetricsFile(path, 4, stay.append, said.append).close()
    assert [row["step"] for row in stay] == [1, 2, 3]
    assert path.read_bytes() == rows(1, 2, 3)
    assert (tmp_path / "metrics.jsonl.1").read_bytes() == before
    assert len(said) == 1 and "had 2 damaged lines" in said[0] and "metrics.jsonl.1" in said[0]
    MetricsFile(path, 4, say=pytest.fail).close()


@pytest.mark.nightly
def test_a_long_file_is_not_held_in_memory(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(rows(*range(1, 60_001)))
    count = 0

    def seen(row: dict) -> None:
        nonlocal count
        count += 1

    tracemalloc.start()
    try:
        MetricsFile(path, 50_001, seen).close()
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert count == 50_000
    assert peak < 3_000_000  # a copied piece that is not a row


def limited(size: int | None) -> None:
    """Limits every file to `size` bytes from here on, like on a full disk."""
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (hard if size is None else size, hard))


@contextmanager
def limits_are_lifted() -> Iterator[None]:
    """Restores the limit before the test is over: pytest writes to a file, too, if its output goes
    to one."""
    try:
        yield
    finally:
        limited(None)
        signal.signal(signal.SIGXFSZ, signal.SIG_DFL)


@limits_are_lifted()
def test_lines_that_cannot_be_written_are_logged_once_kept_and_never_torn(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    said: list[str] = []
    with MetricsFile(path, say=said.append) as file:
        file.write({"step": 1})
        limited(20)  # in the middle of the second line
        for step in (2, 3, 4):
            file.write({"step": step})
        assert path.stat().st_size == 20
        limited(None)
        file.write({"step": 5})
        assert [row["step"] for row in rows_of(path)] == [1, 2, 3, 4, 5]
    assert len(said) == 1 and f"{path} cannot be written (File too large)" in said[0]


@limits_are_lifted()
def test_lines_that_are_lost_at_the_end_are_counted(tmp_path: Path) -> None:
    said: list[str] = []
    with MetricsFile(tmp_path / "metrics.jsonl", say=said.append) as file:
        limited(0)
        for step in (1, 2):
            file.write({"step": step})
    assert len(said) == 2 and said[1].startswith("2 lines of ")


@pytest.mark.parametrize(
    ("there", "first_step", "missing"),
    [((1, 2, 3), 5, 1), ((2, 2, 6), 10, 7), ((), 3, 2)],
)
def test_steps_without_a_line_are_reported_at_each_resume(
    tmp_path: Path, there: tuple[int, ...], first_step: int, missing: int
) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(rows(*there))
    for _ in range(2):
        said: list[str] = []
        MetricsFile(path, first_step, say=said.append).close()
        lacks = f"{path} lacks {missing} of the steps before step {first_step}: "
        assert len(said) == 1 and lacks in said[0]


def test_lost_lines_are_counted_even_if_the_file_cannot_be_closed(tmp_path: Path) -> None:
    said: list[str] = []
    fault, path = Fault("ESTALE", "all"), tmp_path / "metrics.jsonl"
    with (
        FailingFiles(tmp_path, fault, ("write", 0)) as calls,
        MetricsFile(path, say=said.append) as file,
    ):
        file.write({"step": 1})
    assert calls.counts["close"] >= 1
    assert len(said) == 2 and said[1].startswith("1 line of ")


@limits_are_lifted()
def test_delayed_lines_are_written_once_and_in_order(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    file = MetricsFile(path)
    limited(40)  # in the middle of the second line
    for step in (1, 2, 3):
        file.write({"step": step, "tokens": 10 * step})
    waited = tuple(file.waiting)
    limited(None)
    assert waited == tuple(rows(2, 3).decode().splitlines(keepends=True))
    torn = path.read_bytes()
    file.write({"step": 4, "tokens": 40})
    assert file.waiting == []
    for there in (torn, path.read_bytes(), rows(1)):
        path.write_bytes(there)
        stay: list[dict] = []
        MetricsFile(path, 4, stay.append, pytest.fail, waited).close()
        assert path.read_bytes() == rows(1, 2, 3)
        assert [row["step"] for row in stay] == [1, 2, 3]
