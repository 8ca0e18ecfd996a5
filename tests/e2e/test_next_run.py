"""Starts a next run from an old one: by `init_from`, and by `train run=old` without further
keys."""

from __future__ import annotations

import json

import pytest
from safetensors.numpy import load_file

from tests.e2e.command import DEVICE, TINY, Shell
from tests.e2e.forked import run_forked
from tests.e2e.here import answer

pytestmark = pytest.mark.nightly

KEPT = ("train.save_weights=true", "checkpoint.every=1", "checkpoint.async_save=false")


def test_a_run_starts_from_another_and_resumes_without_its_keys(
    shell: Shell, capfd: pytest.CaptureFixture[str]
) -> None:
    runs = shell.cwd / "runs"
    model = ("model=llama_tiny", *TINY[:4], "model.num_query_groups=2")
    rest = (*TINY[4:], *shell.text(), *KEPT, "train.steps=2")
    old = run_forked(shell, "train", "run=old", *model, *rest, "tp=2", ranks=2)
    assert old.code == 0, old
    new = run_forked(shell, "train", "run=new", "init_from=old", "seed=9", *rest)
    assert new.code == 0, new
    assert "init_from=old@2 gives model llama_tiny, 2 layers" in new.err
    assert "step 2 of run old" in new.err + new.out
    assert "parallel3d: run=new is a new run (model=llama_tiny, data=text)" in new.errors
    final = load_file(runs / "old" / "weights-final.safetensors")
    begun = load_file(runs / "new" / "weights-initial.safetensors")
    assert final.keys() == begun.keys() and all((begun[n] == w).all() for n, w in final.items())

    longer = run_forked(shell, "train", "run=new", "train.steps=3")
    assert longer.code == 0, longer
    assert "is a new run" not in longer.err
    took, resumed = [line for line in longer.errors if not line.startswith(DEVICE)][:2]
    assert took.startswith("parallel3d: run=new: values kept from its last start: ")
    assert "seed=9" in took and "init_from=old@2" in took
    done = "2 of 3 steps are done, 1 step of 4 sequences to go"
    assert resumed == f"parallel3d: run=new resumes at step 3; changed: train.steps 2 → 3; {done}"
    manifest = next((runs / "new" / "checkpoints").glob("step-00000003/manifest-*.json"))
    config = json.loads(manifest.read_text())["config"]
    assert (config["model"]["hidden_size"], config["init_from"]) == (32, "old@2")

    for words, sentence in (
        (("init_from=od",), "init_from=od must be a run in runs_dir=runs, run@step, or the folder"),
        (("init_from=od",), "the nearest is old"),
        (("init_from=old@7",), "no checkpoint at step=7; the nearest is step=2"),
        (("init_from=old", "model.hidden_size=64"), "init_from=old@2 gives model.hidden_size=32"),
        (("init_from=old", "model=gpt_tiny"), "init_from=old@2 gives model.num_layers=2"),
        (("init_from=old", "init_optimizer=true", "optim=sgd"), "the nearest is optim=adamw"),
        (
            ("init_optimizer=true",),
            "init_optimizer=true loads the optimizer's state from init_from",
        ),
        (("init_from=book.txt",), "must be a run in runs_dir=runs"),
        (("run=new", "init_from=old@1"), "init_from is old@2 there, now old@1"),
        (("run=new", "seed=8"), "seed is 9 there, now 8"),
    ):
        refused = answer(shell, capfd, "train", *words)
        assert refused.code == 2 and sentence in refused.err, refused
        assert len(refused.errors) == 1 or "taken over" in refused.errors[0]
