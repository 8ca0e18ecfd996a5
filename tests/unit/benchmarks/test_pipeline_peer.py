"""Tests `benchmarks.speed.pipeline peer`: contenders take turns, and one that ends is neither
waited for nor hidden."""

from __future__ import annotations

import os
import textwrap
from pathlib import Path

import pytest

from benchmarks.peers import pipelines as pipeline_peer
from benchmarks.peers.pipelines import Contender, Failed, Setting

pytestmark = pytest.mark.more

STEPS = """
    import json, time
    while True:
        with open({file!r}, "a") as steps:
            print(json.dumps({{"step_time_s": {seconds}}}), file=steps)
        until = time.process_time() + 0.03  # three ticks, in which the kernel counts
        while time.process_time() < until:
            pass
"""


def contender(name: str, folder: Path, seconds: float | None) -> Contender:
    """Reports steps of this duration; None: ends at once."""
    file = str(folder / name)
    code = "raise SystemExit(1)"
    if seconds is not None:
        code = textwrap.dedent(STEPS).format(file=file, seconds=seconds)
    return Contender(name, ["-c", code], 1, folder, name)


def row(folder: Path, monkeypatch: pytest.MonkeyPatch, of: dict[str, float | None]) -> Contender:
    for side in ("ours", "theirs"):
        make = {name: contender(name, folder, seconds) for name, seconds in of.items()}
        monkeypatch.setattr(pipeline_peer, side, lambda name, of, make=make: make[name])
    setting = Setting(2, 8, "fp32", [], folder, folder)
    return pipeline_peer._row(setting, 3, (["zbv"], ["1F1B", "ZB-V"]))


@pytest.mark.slow
def test_the_ratio_is_to_the_fastest_that_runs_and_failures_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    best = row(tmp_path, monkeypatch, {"zbv": 0.5, "1F1B": 0.6, "ZB-V": None})
    assert best.name == "zbv" and best.medians == [500.0] * 3
    line = capsys.readouterr().out
    assert "zbv 500 (500–500; " in line and "1F1B 600 (600–600; " in line
    assert "**1.20×** (1.20–1.20)" in line and ", ZB-V failed |" in line


def test_one_of_ours_that_fails_ends_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(Failed, match="zbv"):
        row(tmp_path, monkeypatch, {"zbv": None, "1F1B": 0.6, "ZB-V": 0.7})


def test_a_contender_is_stopped_between_its_turns(tmp_path: Path) -> None:
    one = contender("one", tmp_path, 0.1)
    try:
        one.start()
        one.turn()
        os.waitid(os.P_PID, one.processes[0].pid, os.WSTOPPED)
    finally:
        one.end()
    # The step in which it was stopped does not count.
    assert len(one.counted) == pipeline_peer.TURN - 1
