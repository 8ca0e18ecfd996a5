"""Output that nobody takes costs the output, not the run."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from parallel3d.host.processes import drop_failed_output, lost_output

LOST_TERMINAL = """
import os, pty, sys
from parallel3d.host.processes import drop_failed_output
master, terminal = pty.openpty()
os.dup2(terminal, 1)
sys.stdout = os.fdopen(1, "w", buffering=1, closefd=False)
{drop}
print("seen")
print(repr(os.read(master, 100)), file=sys.stderr)
os.close(terminal)
os.close(master)
print("into nothing")
sys.stdout.flush()
print("went on", file=sys.stderr)
"""
WRITES = """
import json, sys
from parallel3d.host.processes import drop_failed_output, lost_output
{before}
drop_failed_output()
drop_failed_output()
{close}
print("x" * 9999)
sys.stdout.flush()
json.dump(lost_output(), open("lost.json", "w"))
"""
CLOSED = """
import os, sys
from parallel3d.host.processes import prepare_streams
prepare_streams()
file = open("data", "w")
os.write(1, b"printed by a library")
print("printed", flush=True)
print("an error", file=sys.stderr, flush=True)
print(sys.stdin.read(), end="")
file.write("data")
"""


def run(code: str, cwd: Path, redirect: str = "") -> subprocess.CompletedProcess[str]:
    command = ["bash", "-o", "pipefail", "-c", f'"$0" -c "$1" {redirect}', sys.executable, code]
    buffered = {name: v for name, v in os.environ.items() if name != "PYTHONUNBUFFERED"}
    how = {"capture_output": True, "text": True, "timeout": 300}
    return subprocess.run(command, cwd=cwd, env=buffered, **how)


def test_a_lost_terminal_ends_no_run(tmp_path: Path) -> None:
    ends = {
        drop: run(LOST_TERMINAL.format(drop=drop), tmp_path).stderr
        for drop in ("", "drop_failed_output()")
    }
    assert all("seen" in end for end in ends.values())
    assert ends["drop_failed_output()"].endswith("went on\n")
    assert "Input/output error" in ends[""]  # what it is about


@pytest.mark.parametrize(
    ("before", "close", "redirect", "reason"),
    [
        ("", "", "> /dev/full", "No space left on device"),
        ("print('pending')", "", "> /dev/full", "No space left on device"),
        ("", "", "| true; sleep 0", "Broken pipe"),
        ("", "import os; os.close(1)", "", "Bad file descriptor"),
    ],
    ids=["full disk", "full disk before", "no reader", "closed since"],
)
def test_what_is_lost_is_counted(
    before: str, close: str, redirect: str, reason: str, tmp_path: Path
) -> None:
    code = WRITES.format(before=before, close=close)
    if "pipe" in reason:
        code = f"import time; time.sleep(0.2)\n{code}"
    ended = run(code, tmp_path, redirect)
    assert (ended.returncode, ended.stderr) == (0, "")
    lost = json.loads((tmp_path / "lost.json").read_text())
    if before:  # what failed before has put nothing in the stream's place
        assert lost is None
    else:
        assert lost == {"bytes": 10_000, "reason": reason}


@pytest.mark.parametrize("redirect", [">&-", ">&- 2>&-", "<&- >&- 2>&-"])
def test_closed_streams_take_no_files_number(redirect: str, tmp_path: Path) -> None:
    ended = run(CLOSED, tmp_path, redirect)
    assert ended.returncode == 0
    assert (tmp_path / "data").read_text() == "data"


def test_streams_in_memory_stay(capsys: pytest.CaptureFixture[str]) -> None:
    before = sys.stdout, sys.stderr
    drop_failed_output()
    assert (sys.stdout, sys.stderr) == before
    assert lost_output() is None


def test_letters_that_a_stream_lacks_are_question_marks(tmp_path: Path) -> None:
    code = "from parallel3d.host.processes import *\nprepare_streams()\nprint('2 × 3 · ü…')"
    ended = run(f"import sys; sys.stdout.reconfigure(encoding='ascii')\n{code}", tmp_path)
    assert (ended.stdout, ended.stderr) == ("2 ? 3 ? ??\n", "")
