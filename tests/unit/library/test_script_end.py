"""Tests the end of a script that uses the library: a failed rank does not join in destroying
groups."""

from __future__ import annotations

import pytest

from tests.e2e.ready import run_code

pytestmark = pytest.mark.nightly

# Destroying groups blocks for ever if peers do not take part; here, it blocks for longer than a
# test may last.
SCRIPT = """
import sys, threading, time
import torch
import torch.distributed as dist
import parallel3d as p3d

groups = p3d.init()
groups.device = torch.device(sys.argv[2])

def destroys(*_):
    print("destroys", flush=True)
    time.sleep(float(sys.argv[3]))

def aborts():
    print("aborts", flush=True)

dist.destroy_process_group = destroys
dist.distributed_c10d._abort_process_group = aborts
print("not flushed", end=" ")
exec(sys.argv[1])
"""
FAILS = {
    "raise ValueError('wrong')": (1, "ValueError: wrong", ""),
    "raise KeyboardInterrupt": (130, "KeyboardInterrupt", ""),
    "sys.exit(3)": (3, "", "aborts\n"),
    "sys.exit('wrong')": (1, "wrong", "aborts\n"),
}
CAUGHT = "try: sys.exit(2)\nexcept SystemExit: pass\n"
GOOD = {
    "pass": "destroys\n",
    "sys.exit()": "destroys\n",
    "sys.ps1 = '>'\ntry: 1 / 0\nexcept ZeroDivisionError: sys.excepthook(*sys.exc_info())":
        "destroys\n",
    "t = threading.Thread(target=lambda: 1 / 0)\nt.start()\nt.join()": "destroys\n",
    CAUGHT: "aborts\n",
    CAUGHT + "sys.exit(0)": "destroys\n",
    "dist.distributed_c10d._update_default_pg(None)": "",  # the script has closed its world
}  # fmt: skip


@pytest.mark.parametrize("last", FAILS)
def test_a_script_that_fails_ends_at_once_with_its_code(last: str) -> None:
    code, said, end = FAILS[last]
    ended = run_code(SCRIPT, last, "cuda", "30")
    assert (ended.returncode, ended.stdout) == (code, f"not flushed {end}")
    assert said in ended.stderr


@pytest.mark.parametrize("last", GOOD)
def test_a_script_that_ends_well_destroys_its_groups(last: str) -> None:
    ended = run_code(SCRIPT, last, "cuda", "0")
    assert (ended.returncode, ended.stdout) == (0, f"not flushed {GOOD[last]}"), ended.stderr


def test_on_a_cpu_destroying_groups_does_not_wait() -> None:
    ended = run_code(SCRIPT, "sys.exit(3)", "cpu", "0")
    assert (ended.returncode, ended.stdout) == (3, "not flushed destroys\n"), ended.stderr
