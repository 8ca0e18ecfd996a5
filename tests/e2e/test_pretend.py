"""The command line on the pretended accelerator: every subcommand that computes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.e2e.command import PARALLEL3D, TINY, Shell
from tests.e2e.forked import run_forked

pytestmark = pytest.mark.at_once(2)
SAVING = ("checkpoint.every=2", "optim.lr_decay_steps=6", "precision=fp64")


def given(shell: Shell, *words: str) -> list[str]:
    """Of two equal keys the last."""
    return list({word.split("=")[0]: word for word in (*TINY, *shell.text(), *words)}.values())


def losses(folder: Path) -> list[float]:
    rows = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return [row["loss"] for row in rows if "loss" in row]


def test_a_run_is_the_cpus_and_goes_on_under_another_layout(shell: Shell) -> None:
    """Saved beside the training by one rank, taken up by two with zero=3, read by two of tp."""
    layouts = (("train.steps=4", "trace=true"), ("dp=2", "zero=3", "train.steps=6"))
    for ranks, words in enumerate(layouts, 1):
        saving = given(shell, "run=r", *SAVING, *words, "device=pretend")
        ended = run_forked(shell, "train", *saving, ranks=ranks)
        assert ended.code == 0, ended
        assert "pretended accelerator" in ended.out
    words = given(shell, *SAVING, "run=c", "train.steps=6", "checkpoint.every=0")
    assert run_forked(shell, "train", *words).code == 0
    runs = shell.cwd / "runs"
    assert losses(runs / "r") == pytest.approx(losses(runs / "c"), rel=1e-9)
    events = json.loads((runs / "r" / "trace.json").read_text())["traceEvents"]
    assert all(e["dur"] > 0 for e in events if e["ph"] == "X"), "told by the device's events"
    summary = json.loads((runs / "r" / "summary.json").read_text())
    assert all(rank["allocated"] > 0 for rank in summary["memory"]["ranks"])
    words = ("run=r", "tp=2", "generate.max_tokens=4", "prompt=the", "device=pretend")
    text = run_forked(shell, "generate", *words)
    assert text.code == 0 and text.out.startswith("the")


def test_verify_and_bench(shell: Shell) -> None:
    """The first as typed: it starts its ranks itself."""
    words = given(shell, "tp=2", "sp=true", "verify.steps=1", "device=pretend")
    ended = shell.run(*PARALLEL3D, "verify", *words)
    assert ended.code == 0 and "does not change the model" in ended.out, ended
    words = ("tp=2", "bench.budget_s=0.1", "bench.sizes=[4096]", "device=pretend")
    measured = run_forked(shell, "bench", "comm", *words, ranks=2)
    assert measured.code == 0 and "pretended_nccl" in measured.out, measured
