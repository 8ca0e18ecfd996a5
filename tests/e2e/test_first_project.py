"""Runs docs/first_project.md as it stands: recipe, training, cooldown, average, tuning, export."""

from __future__ import annotations

import json
import re
import shlex
import signal
import sys
from pathlib import Path

import pytest
from safetensors.torch import load_file

from tests.e2e.command import PARALLEL3D, ROOT, Shell, wait_for
from tests.e2e.forked import run_forked

pytestmark = pytest.mark.more
PAGE = (ROOT / "docs" / "first_project.md").read_text(encoding="utf-8")
# The parts of the page that are shorter here.
SHORTER = {
    '"[a-f]*.py"': '"[b-c]*.py"',
    "  steps: 300\n  eval_every: 100": "  steps: 24\n  eval_every: 12\n  eval_batches: 1",
    "  every: 50": "  every: 4",
    "  lr_warmup_steps: 5": "  lr_warmup_steps: 2",
    "profile.steps=[11,12]": "profile.steps=[3,4] launch.peak_tflops=0.1",
    "base@250": "base@8",
    "train.steps=300 optim.lr_decay_style": "train.steps=14 optim.lr_decay_style",
    "wsd_decay_steps=50": "wsd_decay_steps=6",
    "checkpoint.every=10": "checkpoint.every=2",
    "train.steps=100 optim.lr": "train.steps=8 launch.peak_tflops=0.1 optim.lr",
}
ENVIRON = {"HF_HUB_OFFLINE": "1"}


def blocks() -> list[tuple[str, str]]:
    """Returns the page's blocks in order, each with its language, made shorter."""
    page = PAGE
    for long, short in SHORTER.items():
        assert long in page
        page = page.replace(long, short)
    return re.findall(r"```(\w*)\n(.*?)```", page, re.DOTALL)


def rows(run: Path) -> list[dict]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def stopped_early(shell: Shell, words: list[str]) -> None:
    """Types the first training, and Ctrl-C after its sixth step."""
    metrics = shell.cwd / "runs/base/metrics.jsonl"
    process = shell.start(*PARALLEL3D, *words, "train.log_every=1", **ENVIRON)

    def has_six() -> bool:
        assert process.poll() is None, shell.finish(process, 0.0)
        return metrics.exists() and '"step": 6' in metrics.read_text()

    wait_for(has_six, 120, "step 6")
    process.send_signal(signal.SIGINT)
    ended = shell.finish(process, 0.0)
    assert ended.code == 130, ended


def test_from_a_recipe_to_an_export(shell: Shell) -> None:
    """Each command does what the page says, on the files of the preceding one."""
    said = {}
    for language, block in blocks():
        if language == "python":
            ended = shell.run(sys.executable, "-c", block)
            assert ended.code == 0, ended
        if language == "yaml":
            (shell.cwd / "mine/experiment/small.yaml").write_text(block)
        if language:
            continue
        for line in block.replace("\\\n", " ").splitlines():
            program, *words = shlex.split(line)
            assert program == "parallel3d"
            if "experiment=small" in words:
                stopped_early(shell, words)
                continue
            if words[0] in ("checkpoint", "data", "report"):
                ended = run_forked(shell, *words)
            else:
                ended = shell.run(*PARALLEL3D, *words, **ENVIRON)
            assert ended.code == 0, (line, ended)
            said[line] = ended.out
    base, cooled, chat = (shell.cwd / "runs" / name for name in ("base", "cooled", "chat"))
    assert "gpt2_124m" in said["parallel3d recipes"]
    steps = [row["step"] for row in rows(base) if "loss" in row]
    assert steps == list(range(1, 25))
    judged = [row for row in rows(base) if "valid" in row]
    assert [row["step"] for row in judged] == [0, 12, 24]
    assert all(set(row["valid"]) == {"web", "code"} for row in judged)
    assert list((base / "profile").iterdir())
    # The branch reads the same samples as the uninterrupted run: at step 9 the losses are equal.
    loss = [{r["step"]: r["loss"] for r in rows(run) if "loss" in r} for run in (base, cooled)]
    assert loss[0][9] == loss[1][9]
    assert [r["lr"] for r in rows(cooled) if r["step"] == 14 and "lr" in r] == [6e-5]
    lr = {r["step"]: r["lr"] for r in rows(cooled) if "lr" in r}
    assert lr[8] == 3e-3 > lr[9] > lr[13]
    losses = [row["loss"] for row in rows(chat) if "loss" in row]
    assert losses[-1] < losses[0]
    weights = load_file(shell.cwd / "my_model/model.safetensors")
    assert sum(p.numel() for p in weights.values()) > 800_000
    assert "cooled" in (shell.cwd / "report.html").read_text()
