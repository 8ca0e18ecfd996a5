"""Tests in a process of its own that freed memory stays with the process."""

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
