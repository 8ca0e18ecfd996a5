"""Tests validation sets by name, in a run and with `train.eval_only`."""

from __future__ import annotations

import hashlib
import json
import math
from pathlib import Path

import pytest

from tests.corpora import pair
from tests.e2e.command import PARALLEL3D, TINY, Ended, Shell
from tests.e2e.forked import run_forked

pytestmark = [pytest.mark.at_once(2), pytest.mark.nightly]


def train(shell: Shell, *words: str, ranks: int) -> Ended:
    given = {word.split("=")[0]: word for word in (*TINY, *shell.text(), *words)}
    return run_forked(shell, "train", *given.values(), ranks=ranks)


def digests(run: Path) -> dict[str, str]:
    files = [path for path in run.rglob("*") if path.is_file()]
    return {str(path): hashlib.blake2b(path.read_bytes()).hexdigest() for path in files}


def test_validation_sets_are_evaluated_in_a_run_and_from_its_checkpoint(shell: Shell) -> None:
    text = shell.cwd / "other.txt"
    text.write_text("It was the best of times, it was the worst of times. " * 9)
    pair(shell.cwd / "pair", 1)
    sets = f"data.valid={{web:{text},noise:{shell.cwd / 'pair'}}}"
    words = ("run=mine", sets, "train.eval_batches=null", "checkpoint.every=3")
    words += ("optim.ema_decay=0.9",)
    every = ("train.eval_every=2", "data.valid_fraction=0.05")
    ended = train(shell, *words, *every, ranks=1)
    assert ended.code == 0, ended
    run = shell.cwd / "runs" / "mine"
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    evaluations = [row for row in rows if "eval_loss" in row]
    assert [row["step"] for row in evaluations] == [0, 2, 3]
    assert all(row["eval_loss"] > 0 for row in evaluations)
    last = evaluations[-1]["valid"]
    assert list(last) == ["web", "noise", "web/ema", "noise/ema"]
    # The average lags behind the weights after three steps.
    assert evaluations[0]["valid"]["web"]["loss"] > last["web/ema"]["loss"] > last["web"]["loss"]
    # 478 tokens have a loss: all but the first one, including the end of the text.
    assert last["web"]["tokens"] == 53 * 9
    assert last["web"]["perplexity"] == pytest.approx(math.exp(last["web"]["loss"]))
    summary = json.loads((run / "summary.json").read_text())
    assert summary["valid"] == last and summary["eval_loss"] == evaluations[-1]["eval_loss"]

    before = digests(run)
    alone = train(shell, *words, "train.eval_only=true", "tp=2", ranks=2)
    assert alone.code == 0, alone
    assert [line for line in alone.errors if "web: loss" in line], alone
    rows = [json.loads(line) for line in (run / "evaluations.jsonl").read_text().splitlines()]
    assert len(rows) == 1 and rows[0]["step"] == 3 and rows[0]["layout"]["tp"] == 2
    for name, figures in rows[0]["valid"].items():
        assert figures == pytest.approx(last[name], rel=1e-5)
    after = digests(run)
    assert {name: after.get(name) for name in before} == before
    assert {Path(name).name for name in after.keys() - before.keys()} <= {
        "evaluations.jsonl",
        "placement.json",
    }
    tasks = shell.cwd / "tasks.jsonl"
    row = {"context": "3 bottles of", "choices": [" beer on the", "'wall"], "answer": 0}
    tasks.write_text(f"{json.dumps(row)}\n" * 3)
    of_average = ("run=mine", f"tasks={tasks}", "device=cpu", "weights=ema")
    scored = shell.run(*PARALLEL3D, "eval", *of_average, "tp=2")
    assert scored.code == 0, scored
    assert scored.out.splitlines()[1].split()[:4] == ["task", "rows", "acc", "acc_norm"]
    result = json.loads((run / "eval" / "tasks-step-3-ema.json").read_text())
    assert result["weights"] == "ema"
    assert result["figures"]["tasks"]["rows"] == len(result["rows"]) == 3
    launched = run_forked(shell, "eval", *of_average, ranks=2)
    assert launched.code == 0, launched
    second = json.loads((run / "eval" / "tasks-step-3-ema-2.json").read_text())
    assert second["layout"]["dp"] == 2
    for name, figure in second["figures"]["tasks"].items():
        assert figure == pytest.approx(result["figures"]["tasks"][name], rel=1e-5), name
    again = shell.run(*PARALLEL3D, "eval", "run=mine", f"tasks={tasks}", f"to={tasks}")
    assert again.code == 2 and "exists; it is never overwritten" in again.err, again
    resumed = train(shell, *words, *every, "train.steps=4", ranks=1)
    assert resumed.code == 0, resumed
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows if "valid" in row] == [0, 2, 3, 4]


def test_eval_only_needs_a_checkpoint(shell: Shell) -> None:
    ended = train(shell, "run=none", "train.eval_only=true", ranks=1)
    assert ended.code == 2 and not (shell.cwd / "runs").exists()
    assert "needs a run with a checkpoint" in ended.err, ended
