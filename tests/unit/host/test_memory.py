"""Tests in a process of its own that freed memory stays with the process, or is returned."""

from __future__ import annotations

import subprocess
import sys

import pytest

pytestmark = pytest.mark.nightly

PROGRAM = """
import ctypes, resource, sys
import numpy as np
from parallel3d.host.memory import keep_freed_memory
if sys.argv[1] == "keep":
    assert keep_freed_memory()
def touch():
    blocks = [np.ones(4 << 20, dtype=np.uint8) for _ in range(8)]
    return sum(int(b[0]) for b in blocks)
touch()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(4):
    touch()
    np.ones(48 << 20, dtype=np.uint8)  # beyond what the C library keeps by itself
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def answer(program: str, mode: str) -> str:
    command = [sys.executable, "-c", program, mode]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def page_faults(mode: str) -> int:
    return int(answer(PROGRAM, mode))


def test_reused_blocks_cost_no_page_faults() -> None:
    plain, kept = page_faults("plain"), page_faults("keep")
    assert plain > 4 * (48 << 20) / (2 << 20)  # at least one per page, even if pages are huge
    assert kept < plain / 4


HELD = """
import sys
from pathlib import Path
import numpy as np
from parallel3d.host.memory import give_back_freed_memory
if sys.argv[1] == "give":
    assert give_back_freed_memory()
def touched():
    return np.ones(20 << 20, dtype=np.uint8)
touched()  # once freed, the C library keeps blocks of this size
pairs = [(touched(), np.ones(100_000, dtype=np.uint8)) for _ in range(6)]
live = [small for _, small in pairs]
del pairs
status = Path("/proc/self/status").read_text()
print(int(status.partition("VmRSS:")[2].split()[0]) << 10)
"""


def test_memory_between_live_blocks_is_returned() -> None:
    plain, given = (int(answer(HELD, mode)) for mode in ("plain", "give"))
    assert plain - given > 5 * (20 << 20)
