"""Tests `recovery.jsonl`: what is appended is read again; neither disk nor damage stops a run."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from parallel3d.metrics import recovery_log
from parallel3d.metrics.recovery_log import RECOVERY, Cause, RecoveryLine, append, read

LINE = RecoveryLine(
    at=1_700_000_000.25,
    start=3,
    decision="replace",
    sentence="node3 does not answer: node9 takes its place",
    cause=Cause("node", "node3", None, "no beat for 30 s"),
    nodes=("node1", "node9"),
    failed_at=1_699_999_960.5,
    seconds={"detect": 30.0, "end": 5.5, "probe": 2.0, "decide": 0.25},
    inputs={"nodes": ["node1", "node3", "node9"], "limits": {"spares": 1}},
)
SHORT = RecoveryLine(1_700_000_100.0, 4, "done", "the run is finished")


def test_lines_that_were_appended_are_read_again(tmp_path: Path) -> None:
    said: list[str] = []
    assert read(tmp_path) == []
    assert append(tmp_path, LINE, said.append) and append(tmp_path, SHORT, said.append)
    assert read(tmp_path) == [LINE, SHORT] and said == []
    rows = [json.loads(text) for text in (tmp_path / RECOVERY).read_text().splitlines()]
    assert rows[0]["cause"]["host"] == "node3" and "inputs" not in rows[1]
    assert (tmp_path / RECOVERY).stat().st_mode & 0o777 == 0o600


def test_a_line_that_a_crash_cut_off_harms_no_other(tmp_path: Path) -> None:
    append(tmp_path, LINE, print)
    whole = (tmp_path / RECOVERY).read_bytes()
    for length in (0, 1, 40, len(whole) // 2, len(whole) - 2, len(whole) - 1):
        (tmp_path / RECOVERY).write_bytes(whole[:length])
        assert append(tmp_path, SHORT, print)
        is_whole = length == len(whole) - 1  # it only lacks the end of the line
        assert read(tmp_path) == ([LINE, SHORT] if is_whole else [SHORT])


@pytest.mark.parametrize(
    "damage",
    [
        {"at": "NaN"},
        {"at": None},
        {"start": "x"},
        {"decision": "maybe"},
        {"cause": "node"},
        {"cause": {"kind": "node"}},
        {"nodes": 3},
        {"failed_at": math.inf},
        {"seconds": []},
        {"inputs": [1]},
    ],
)
def test_damaged_lines_are_left_out(tmp_path: Path, damage: dict[str, object]) -> None:
    (tmp_path / RECOVERY).write_text(f"\n[]\n{{}}\n{json.dumps(LINE.row() | damage)}\n\0\xff{{\n")
    append(tmp_path, SHORT, print)
    assert read(tmp_path) == [SHORT]


def test_of_a_huge_file_the_end_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for _ in range(20):
        append(tmp_path, LINE, print)
    append(tmp_path, SHORT, print)
    size = (tmp_path / RECOVERY).stat().st_size
    monkeypatch.setattr(recovery_log, "MOST_BYTES", size // 3)
    assert 5 <= len(read(tmp_path)) <= 7 and read(tmp_path)[-1] == SHORT


def test_what_cannot_be_written_is_said_and_stops_nobody(tmp_path: Path) -> None:
    said: list[str] = []
    assert not append(tmp_path / "gone", SHORT, said.append)
    (tmp_path / RECOVERY).symlink_to(tmp_path / "elsewhere")  # another user's trap
    assert not append(tmp_path, SHORT, said.append)
    assert len(said) == 2 and all("cannot be written" in sentence for sentence in said)
    (tmp_path / RECOVERY).unlink()
    odd = RecoveryLine(1.0, 1, "first", "", seconds={"detect": math.nan}, inputs={"path": tmp_path})
    assert not append(tmp_path, odd, said.append) and "cannot hold" in said[-1]


def test_a_full_disk_is_said_and_stops_nobody() -> None:
    class Full(type(Path())):  # type: ignore[misc]
        def __truediv__(self, name: str) -> Path:
            return Path("/dev/full")

    said: list[str] = []
    assert not append(Full("/"), SHORT, said.append)
    assert "No space left" in said[0] and read(Path("/dev")) == []


def test_seconds_that_nobody_knows_are_missing(tmp_path: Path) -> None:
    line = RecoveryLine(5.0, 1, "first", "", seconds={"detect": math.nan, "end": 1.0})
    assert append(tmp_path, line, print) and read(tmp_path)[0].seconds == {"end": 1.0}
