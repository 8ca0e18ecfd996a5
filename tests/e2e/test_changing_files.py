"""Tests files that change during a run, or between its starts: some of
`benchmarks.failures.changing_files`.

They cover three kinds of file, each moment, and each correct outcome.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.failures.changing_files import ENDED, SAID, SAME, TOLD
from tests.e2e.ready import run_module

pytestmark = pytest.mark.more

CELLS = {
    "pair .bin, no .json/first step/appended": ENDED,
    "pair .bin, no .json/two steps/replaced": TOLD,
    "pair .bin, no .json/evaluation/truncated": ENDED,
    "pair .bin, no .json/next start/edited": SAID,
    "token cache/evaluation/replaced": TOLD,
    "token cache/next start/edited": SAME,
    "http, time/two steps/replaced": ENDED,
    "http, time/evaluation/old mtime": ENDED,
}


def test_a_change_is_refused_reported_or_without_effect(tmp_path: Path) -> None:
    out = tmp_path / "found.json"
    words = ("--jobs", "1", "--out", str(out), "--starts", "1", "--only", *CELLS)
    ended = run_module("benchmarks.changing_files", *words)
    assert ended.returncode == 0, ended.stdout[-4000:] + ended.stderr[-2000:]
    rows = json.loads(out.read_text())
    assert {f"{kind}/{moment}/{how}": became for kind, moment, how, became, _ in rows} == CELLS
