"""Tests that a run continues if nobody reads its output."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from parallel3d.host.processes import drop_failed_output

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
import sys
from parallel3d.host.processes import drop_failed_output
{before}
drop_failed_output()
drop_failed_output()
{close}
print("x" * 9999)
sys.stdout.flush()
open("after", "w").close()
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


def test_a_lost_terminal_does_not_end_the_run(tmp_path: Path) -> None:
    ends = {
        drop: run(LOST_TERMINAL.format(drop=drop), tmp_path).stderr
        for drop in ("", "drop_failed_output()")
    }
    assert all("seen" in end for end in ends.values())
    assert ends["drop_failed_output()"].endswith("went on\n")
    assert "Input/output error" in ends[""]  # without it, the run fails


@pytest.mark.slow
@pytest.mark.parametrize(
    ("before", "close", "redirect"),
    [
        ("", "", "> /dev/full"),
        ("print('pending')", "", "> /dev/full"),
        ("import time; time.sleep(0.2)", "", "| true; sleep 0"),
        ("", "import os; os.close(1)", ""),
    ],
    ids=["full disk", "full disk before", "no reader", "closed since"],
)
def test_lost_output_does_not_end_the_process(
    before: str, close: str, redirect: str, tmp_path: Path
) -> None:
    ended = run(WRITES.format(before=before, close=close), tmp_path, redirect)
    assert (ended.returncode, ended.stderr) == (0, "")
    assert (tmp_path / "after").exists()


@pytest.mark.parametrize("redirect", [">&-", ">&- 2>&-", "<&- >&- 2>&-"])
def test_closed_streams_do_not_leave_their_numbers_to_other_files(
    redirect: str, tmp_path: Path
) -> None:
    ended = run(CLOSED, tmp_path, redirect)
    assert ended.returncode == 0
    assert (tmp_path / "data").read_text() == "data"


def test_streams_in_memory_are_kept(capsys: pytest.CaptureFixture[str]) -> None:
    before = sys.stdout, sys.stderr
    drop_failed_output()
    assert (sys.stdout, sys.stderr) == before


def test_characters_that_a_stream_cannot_encode_become_question_marks(tmp_path: Path) -> None:
    code = "from parallel3d.host.processes import *\nprepare_streams()\nprint('2 × 3 · ü…')"
    ended = run(f"import sys; sys.stdout.reconfigure(encoding='ascii')\n{code}", tmp_path)
    assert (ended.stdout, ended.stderr) == ("2 ? 3 ? ??\n", "")


# Runs commands in forks of one process, with an unwritable standard output, and prints their codes.
COMMANDS = """
import os, sys
from parallel3d.cli.command_line import main as run
for words in sys.argv[2:]:
    child = os.fork()
    if child == 0:
        if sys.argv[1] == "pipe":
            reading, output = os.pipe()
            os.close(reading)
        else:
            output = os.open("/dev/full", os.O_WRONLY)
        os.dup2(output, 1)
        sys.exit(run(words.split()))
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""
PRINTING = [
    "help",
    "--version",
    "help train",
    "train --help",
    "train --cfg job",
    "train --hydra-help",
    "checkpoint ls --help",
    "recipes",
    "report --help",
    "schedule pp=2",
    "topology tp=2",
]


@pytest.mark.slow
@pytest.mark.nightly
@pytest.mark.parametrize("unbuffered", ["", "1"])
@pytest.mark.parametrize(("output", "code"), [("pipe", 141), ("full", 1)])
def test_a_command_that_cannot_print_ends_quietly_or_in_a_sentence(
    output: str, code: int, unbuffered: str, tmp_path: Path
) -> None:
    (tmp_path / "runs").mkdir()
    ended = subprocess.run(
        [sys.executable, "-c", COMMANDS, output, *PRINTING],
        cwd=tmp_path,
        env=dict(os.environ, PYTHONUNBUFFERED=unbuffered),
        capture_output=True,
        text=True,
    )
    said = ended.stderr.splitlines()
    codes = dict(zip(PRINTING, map(int, ended.stdout.split()), strict=True))
    if output == "pipe":
        assert (codes, said) == (dict.fromkeys(PRINTING, code), [])
    else:
        assert {*codes.values()} <= {1, 2} and len(said) == len(PRINTING), (codes, said)
        assert all(line.startswith("parallel3d: ") and "No space left" in line for line in said)
