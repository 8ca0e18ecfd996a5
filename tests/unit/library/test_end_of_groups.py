"""Tests the end of `with p3d.init(…)`: a failed rank does not join in destroying groups."""

from __future__ import annotations

import signal

import pytest

from tests.e2e.ready import run_code

pytestmark = pytest.mark.nightly

# Destroying groups blocks for ever if peers do not take part; here, it blocks for longer than a
# test may last.
SCRIPT = """
import logging, sys, time
import torch
import torch.distributed as dist
import parallel3d as p3d
from parallel3d.comm import process_groups

exits = sys.exit
destroy = dist.destroy_process_group

def destroys(*_):
    print("destroys", flush=True)
    time.sleep(float(sys.argv[3]))
    destroy()

def aborts():
    print("aborts", flush=True)

dist.destroy_process_group = destroys
process_groups.abort_process_group = aborts
groups = p3d.init()
assert sys.exit is exits
assert "parallel3d" not in sys.excepthook.__module__  # torch.distributed has a hook of its own
with groups:
    object.__setattr__(groups, "device", torch.device(sys.argv[2]))
    exec(sys.argv[1])
"""
FAILS = {
    "raise ValueError('wrong')": (1, "ValueError: wrong"),
    "raise KeyboardInterrupt": (-signal.SIGINT, "KeyboardInterrupt"),
    "sys.exit(3)": (3, ""),
    "sys.exit('wrong')": (1, "wrong"),
    "raise SystemExit(3)": (3, ""),
}
GOOD = {
    "pass": "destroys\n",
    "sys.exit()": "destroys\n",
    "try: sys.exit(2)\nexcept SystemExit: pass": "destroys\n",
    "groups.close()": "destroys\n",  # closing twice is no error
    "dist.distributed_c10d._update_default_pg(None)": "",  # the script has closed its world
}


@pytest.mark.parametrize("last", FAILS)
def test_a_script_that_fails_ends_at_once_with_its_code(last: str) -> None:
    code, said = FAILS[last]
    ended = run_code(SCRIPT, last, "cuda", "30")
    assert (ended.returncode, ended.stdout) == (code, "aborts\n")
    assert said in ended.stderr


@pytest.mark.parametrize("last", GOOD)
def test_a_script_that_ends_well_destroys_its_groups(last: str) -> None:
    ended = run_code(SCRIPT, last, "cuda", "0")
    assert (ended.returncode, ended.stdout) == (0, GOOD[last]), ended.stderr
    assert ended.stderr == ""  # nothing is printed unless logging asks for it


def test_on_a_cpu_destroying_groups_does_not_wait() -> None:
    ended = run_code(SCRIPT, "sys.exit(3)", "cpu", "0")
    assert (ended.returncode, ended.stdout) == (3, "destroys\n"), ended.stderr


def test_logging_names_the_device() -> None:
    ended = run_code(
        "import logging; logging.basicConfig(level=logging.INFO)\n" + SCRIPT, "pass", "cpu", "0"
    )
    assert "INFO:parallel3d:device: CPU" in ended.stderr
