"""The command line on the pretended accelerator: every subcommand that computes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.e2e.command import PARALLEL3D, TINY, Ended, Shell

pytestmark = pytest.mark.at_once(2)
SAVING = ("checkpoint.every=2", "optim.lr_decay_steps=6", "precision=fp64")


def run(shell: Shell, app: str, *words: str) -> Ended:
    given = (*TINY, *shell.text(), *words, "device=pretend")
    by_key = {word.split("=")[0]: word for word in given}  # of two equal keys the last
    return shell.run(*PARALLEL3D, *app.split(), *by_key.values())


def losses(folder: Path) -> list[float]:
    rows = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return [row["loss"] for row in rows if "loss" in row]


def test_a_run_is_the_cpus_and_goes_on_under_another_layout(shell: Shell) -> None:
    """Saved beside the training by one rank, taken up by two with zero=3, read by two of tp."""
    layouts = (("train.steps=4",), ("dp=2", "zero=3", "train.steps=6"))
    for words in layouts:
        ended = run(shell, "train", "run=r", *SAVING, *words)
        assert ended.code == 0, ended
    assert "pretended accelerator" in ended.out
    words = (*TINY, *shell.text(), *SAVING, "run=c", "train.steps=6", "checkpoint.every=0")
    by_key = {word.split("=")[0]: word for word in words}
    on_cpu = shell.run(*PARALLEL3D, "train", *by_key.values())
    assert on_cpu.code == 0
    runs = shell.cwd / "runs"
    assert losses(runs / "r") == pytest.approx(losses(runs / "c"), rel=1e-9)
    summary = json.loads((runs / "r" / "summary.json").read_text())
    assert all(rank["allocated"] > 0 for rank in summary["memory"]["ranks"])
    words = ("run=r", "tp=2", "generate.max_tokens=4", "prompt=the", "device=pretend")
    text = shell.run(*PARALLEL3D, "generate", *words)
    assert text.code == 0 and text.out.startswith("the")


def test_verify_and_bench(shell: Shell) -> None:
    ended = run(shell, "verify", "tp=2", "sp=true", "verify.steps=1")
    assert ended.code == 0 and "does not change the model" in ended.out, ended
    words = ("tp=2", "bench.budget_s=0.1", "bench.sizes=[4096]")
    measured = shell.run(*PARALLEL3D, "bench", "comm", *words, "device=pretend")
    assert measured.code == 0 and "pretended_nccl" in measured.out, measured
