"""Tests pipeline schedules on the command line: trained, drawn, resumed under another one, read
from a file."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.e2e.command import TINY, Ended, Shell
from tests.e2e.forked import run_forked

SMALL = (
    "model.num_layers=4",
    "global_batch_size=6",
    "checkpoint.every=3",
    "optim.lr_decay_steps=5",
    "run=mine",
)
pytestmark = [pytest.mark.at_once(2), pytest.mark.nightly]


def train(shell: Shell, *words: str) -> Ended:
    given = {word.split("=")[0]: word for word in (*TINY, *shell.text(), *SMALL, *words)}
    return run_forked(shell, "train", *given.values(), ranks=2)


def losses(run: Path) -> list[float]:
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [row["loss"] for row in rows if "loss" in row]


def test_a_runs_timeline_is_drawn_and_it_resumes_under_another_schedule(shell: Shell) -> None:
    first = train(shell, "pp=2", "schedule=zbv", "schedule.timeline=true")
    assert first.code == 0, first
    run = shell.cwd / "runs" / "mine"
    assert "timeline.svg" in first.out
    events = json.loads((run / "timeline.json").read_text())["traceEvents"]
    names = {(e["pid"], e["name"]) for e in events if e["ph"] == "X"}
    words = [f"{kind}{m}{chunk}" for kind in "FIW" for m in range(3) for chunk in ("", ".1")]
    assert names == {(rank, word) for rank in (0, 1) for word in words}
    assert all(e["dur"] > 0 for e in events if e["ph"] == "X")
    picture = (run / "timeline.svg").read_text()
    assert picture.count(">idle<") == 4 and "zbv, step 3, measured" in picture
    assert "the same costs, simulated without hops" in picture
    rest = train(shell, "tp=2", "schedule=1f1b", "train.steps=5")
    assert rest.code == 0, rest
    whole = train(shell, "dp=2", "run=whole", "micro_batch_size=1", "train.steps=5")
    assert whole.code == 0, whole
    assert losses(run) == pytest.approx(losses(run.parent / "whole"), rel=1e-4)
    text = run_forked(shell, "generate", "run=mine", "generate.max_tokens=5")
    assert text.code == 0, text


def test_schedule_auto_prints_its_choice(shell: Shell) -> None:
    ended = train(shell, "pp=2", "vpp=2", "schedule=auto", "schedule.memory=2", "train.steps=1")
    assert ended.code == 0, ended
    (said,) = [line for line in ended.errors if "schedule=auto" in line]
    assert "over compute with at most 2 of 1F1B's activations; next" in said
