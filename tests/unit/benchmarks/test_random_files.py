"""Tests the kill bench's failing files: every call meets the fault, which is reported once."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from benchmarks.failures.random_files import Failing, RandomFiles
from tests.tools.failing_files import Fault

pytestmark = pytest.mark.more


def test_the_fault_meets_calls_of_all_kinds_from_its_number_on(tmp_path: Path) -> None:
    folder, record = tmp_path / "disk", tmp_path / "faults"
    folder.mkdir()
    failing = Failing(str(folder), "0", 1.0, str(record))
    with RandomFiles(failing, Fault("EIO"), begin=1, calls=2) as files:
        os.listdir(folder)
        for call in (lambda: os.listdir(folder), lambda: os.stat(folder)):
            with pytest.raises(OSError, match="Input/output error"):
                call()
        os.stat(folder)
        os.stat(tmp_path)
    assert files.failed == 2
    told = {"what": "EIO", "kind": "listdir", "call": 1, "lasts": 2}
    assert [json.loads(line) for line in record.read_text().splitlines()] == [told]
