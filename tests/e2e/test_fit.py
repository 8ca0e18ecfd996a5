"""Trains by scripts that call `fit`: their starts, hooks, states and mistakes."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from parallel3d.checkpoint.manifest import read_manifest
from parallel3d.checkpoint.storage import read_full
from parallel3d.metrics.jsonl import rows_of
from tests.e2e.command import ROOT, TINY, TORCHRUN, Shell
from tests.e2e.forked import Forked, run_forked

pytestmark = pytest.mark.nightly

WORDS = [*TINY, "precision=fp64", "optim.lr_decay_style=constant", "checkpoint.every=3"]
# Keeps a mean of the losses on every rank, and one of the first layer on the ranks that hold it.
SCRIPT = f"""
import torch
import parallel3d as p3d


class Probe(p3d.Hook):
    def before_run(self):
        groups = self.run.groups
        self.has_first = groups.pp.index == 0
        if not hasattr(self, "loss"):
            self.loss, self.first, self.steps = torch.zeros(1, dtype=torch.float64), 0.0, 0

    def after_step(self, result):
        self.steps += 1
        self.loss = 0.5 * self.loss + result.loss
        if self.has_first:
            self.first += result.grad_norm
            self.run.log("probe/first", self.first)

    def after_evaluation(self, step, row):
        self.run.log("probe/eval", row["eval_loss"])

    def state_dict(self):
        first = {{"first": self.first}} if self.has_first else {{}}
        return {{"loss": self.loss, "steps": self.steps}} | first

    def load_state_dict(self, state):
        self.loss, self.steps, self.first = state["loss"], state["steps"], state["first"]


if __name__ == "__main__":
    p3d.fit({[word for word in WORDS if word != "train.eval_every=0"]!r}, hooks=[Probe()])
"""
EVALUATES = ("data.valid_fraction=0.1", "train.eval_every=3")


def kept(folder: Path) -> dict[str, Any]:
    """Returns the state of the hook in a checkpoint."""
    (name, state), *_ = read_manifest(folder).progress["hooks"].items()
    assert name == "Probe"
    return state["values"] | {"loss": read_full(folder, ("hook",))["hook/Probe/loss"].item()}


def run_of(shell: Shell, name: str) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Returns the state of the hook after step 6, and the lines of the steps."""
    folder = shell.cwd / "runs" / name
    rows = [row for row in rows_of(folder / "metrics.jsonl") if "loss" in row]
    return kept(folder / "checkpoints" / "step-00000006"), rows


def test_a_hooks_figures_and_state_are_the_same_after_a_resume_under_another_layout(
    shell: Shell,
) -> None:
    words = (*shell.text(), *EVALUATES)
    assert run_forked(shell, "-c", SCRIPT, "run=one", "train.steps=6", *words).code == 0
    first = run_forked(shell, "-c", SCRIPT, "run=two", "tp=2", "pp=2", *words)
    assert first.code == 0, first.err
    again = ("run=two", "tp=1", "pp=2", "dp=1", "train.steps=6")
    second = run_forked(shell, "-c", SCRIPT, *again, *words, ranks=2)  # started by a launcher
    assert second.code == 0, second.err
    assert "begins anew" not in second.err
    (one, alone), (two, together) = run_of(shell, "one"), run_of(shell, "two")
    assert one["steps"] == two["steps"] == 6
    assert two == pytest.approx(one, rel=1e-9)
    figures = [[row["hooks"]["probe/first"] for row in rows] for rows in (alone, together)]
    assert figures[1] == pytest.approx(figures[0], rel=1e-9)
    summary = json.loads((shell.cwd / "runs" / "two" / "summary.json").read_text())
    assert summary["hooks"]["probe/first"] == together[-1]["hooks"]["probe/first"]
    assert summary["hooks"]["probe/eval"] == summary["eval_loss"]
    assert "probe/first" in second.out  # the closing panel


def test_a_script_starts_its_ranks_and_a_word_of_the_command_line_replaces_its_own(
    shell: Shell,
) -> None:
    (shell.cwd / "my_train.py").write_text(SCRIPT)
    script = (sys.executable, "my_train.py")
    words = ("run=r", "dp=2", "train.tokens=256", "checkpoint.every=0")
    ended = shell.run(*script, *words, *shell.text(), "train.eval_every=0")
    assert ended.code == 0, ended.err
    assert "given twice" not in ended.err
    rows = rows_of(shell.cwd / "runs" / "r" / "metrics.jsonl")
    assert [row["tokens"] for row in rows if "loss" in row] == [128, 256]
    refused = shell.run(*script, "tpp=2")
    assert refused.code == 2
    assert "nearest is tp" in refused.err
    assert "Traceback" not in refused.err


def test_a_hook_that_one_rank_lacks_and_an_error_in_a_hook_end_the_run_in_a_sentence(
    shell: Shell,
) -> None:
    words = (*shell.text(), "dp=2", "checkpoint.every=0", "train.eval_every=0")
    lacks = SCRIPT.replace("[Probe()]", "[Probe()] if os.environ['RANK'] == '0' else []")
    launched = Forked(shell)
    launched.add_world(2, "-c", "import os\n" + lacks, "run=a", *words)
    launched.start()
    ranks = launched.ends()
    assert [rank.code for rank in ranks] == [2, 2]
    said = "".join(rank.err for rank in ranks)
    assert "fit(hooks=[]) on rank 1 must be hooks=['Probe'], as on rank 0" in said
    assert "Traceback" not in said
    fails = SCRIPT.replace("self.steps += 1", "self.steps += 1 / (self.run.groups.dp.index - 1)")
    ended = run_forked(shell, "-c", fails, "run=b", *words)
    assert ended.code == 1
    said = ended.errors[-1]
    assert "rank 1 (pp 0, dp 1, tp 0)" in said
    assert "failed in hook Probe, after step 1" in said
    assert "ZeroDivisionError" in said


def test_torchrun_starts_the_script(shell: Shell) -> None:
    (shell.cwd / "my_train.py").write_text(SCRIPT)
    words = (*shell.text(), "run=r", "tp=2", "checkpoint.every=0", "train.eval_every=0")
    ended = shell.run(*TORCHRUN, "--nproc-per-node=2", "my_train.py", *words)
    assert ended.code == 0, ended.err
    rows = rows_of(shell.cwd / "runs" / "r" / "metrics.jsonl")
    *_, last = (row for row in rows if "loss" in row)
    assert last["step"] == 3
    assert "probe/first" in last["hooks"]


OWN_SAMPLES = f"""
import numpy as np
import parallel3d as p3d


class Counting:
    def __init__(self, seq_length, first, windows):
        self.seq_length, self.first, self.windows = seq_length, first, windows

    def sample(self, i):
        tokens = (self.first + i % self.windows + 3 * np.arange(self.seq_length + 1)) % 32
        return p3d.Sample(tokens.astype(np.int64), np.ones(self.seq_length, bool))


p3d.fit(
    {[word for word in WORDS if word != "train.eval_every=0"]!r},
    train=lambda config: Counting(config.model.seq_length, 0, 20),
    valid=Counting(32, 1, 10),
)
"""


def test_a_run_with_samples_of_the_scripts_own_is_resumed_under_another_layout(
    shell: Shell,
) -> None:
    words = ("train.eval_every=3", "train.eval_batches=null")
    alone = run_forked(shell, "-c", OWN_SAMPLES, "run=one", "train.steps=6", *words)
    assert alone.code == 0, alone.err
    assert "the script's own: Counting, 20 samples" in alone.out
    assert run_forked(shell, "-c", OWN_SAMPLES, "run=two", "pp=2", *words).code == 0
    again = ("run=two", "tp=2", "pp=1", "train.steps=6")
    assert run_forked(shell, "-c", OWN_SAMPLES, *again, *words).code == 0
    rows = [[*rows_of(shell.cwd / "runs" / run / "metrics.jsonl")] for run in ("one", "two")]
    for key in ("loss", "eval_loss"):
        one, two = ([row[key] for row in each if key in row] for each in rows)
        assert len(one) in (2, 6)
        assert two == pytest.approx(one, rel=1e-9)
    refused = run_forked(shell, "train", "run=two", "train.steps=9")
    assert refused.code == 2
    assert "data.name=own is for a script that gives its samples to fit(train=…)" in refused.err


@pytest.mark.parametrize(
    ("word", "said"),
    [
        ("data=text", "data=text has no effect on the samples that the script gives fit(train=…)"),
        ("model.seq_length=16", "fit(valid=…) has samples of 32 tokens, but must have model.seq_"),
    ],
)
def test_samples_that_do_not_fit_are_refused_in_a_sentence(
    shell: Shell, word: str, said: str
) -> None:
    ended = run_forked(shell, "-c", OWN_SAMPLES, word)
    assert ended.code == 2
    assert said in ended.err
    assert "Traceback" not in ended.err


OPTIMIZER = f"""
import functools
import torch
import parallel3d as p3d

nadam = functools.partial(torch.optim.NAdam, decoupled_weight_decay=True)
p3d.fit({WORDS!r}, optimizer=nadam)
"""
TREATED = (
    "optim.lr=0.01",
    "optim.freeze=[layers.1.mlp.*]",
    "optim.groups={layers.0.*:{lr_mult:0.5}}",
)


def test_an_optimizer_of_the_scripts_own_trains_equally_under_every_layout_and_zero_stage(
    shell: Shell,
) -> None:
    words = (*shell.text(), *TREATED)
    ended = run_forked(shell, "-c", OPTIMIZER, "run=one", "train.steps=9", *words)
    assert ended.code == 0, ended.err
    layouts = [
        ("dp=2", "zero=1", "train.steps=3"),
        ("dp=2", "zero=2", "train.steps=6"),
        ("tp=2", "dp=1", "pp=2", "zero=0", "train.steps=9"),
    ]
    for layout in layouts:
        ended = run_forked(shell, "-c", OPTIMIZER, "run=two", *layout, *words)
        assert ended.code == 0, ended.err
    ended = run_forked(shell, "-c", OPTIMIZER, "run=three", "dp=2", "zero=3", *words)
    assert ended.code == 0, ended.err
    runs = [shell.cwd / "runs" / run for run in ("one", "two", "three")]
    rows = [[*rows_of(run / "metrics.jsonl")] for run in runs]
    one, two, three = ([row["loss"] for row in each if "loss" in row] for each in rows)
    assert len(one) == 9
    assert one[8] < one[0] - 0.1
    assert two == pytest.approx(one, rel=1e-9)
    assert three == pytest.approx(one[:3], rel=1e-9)
    last = [run / "checkpoints" / "step-00000009" for run in runs[:2]]
    kinds = ("parameter", "optimizer.exp_avg", "optimizer.exp_avg_sq")
    mine, theirs = (read_full(folder, kinds) for folder in last)
    assert mine.keys() == theirs.keys()
    assert any(name.startswith("optimizer.exp_avg_sq/") for name in mine)
    for name, value in mine.items():
        assert float((value - theirs[name]).abs().max()) < 1e-9, name
    kept = [read_manifest(folder).progress["optimizer"] for folder in last]
    assert kept[0] == kept[1]
    assert kept[0]["scalars"]["step"] == 9


def test_a_start_without_the_runs_optimizer_or_with_another_is_refused_and_changes_nothing(
    shell: Shell,
) -> None:
    words = (*shell.text(), "run=r")
    assert run_forked(shell, "-c", OPTIMIZER, *words).code == 0
    for script, more, said in (
        (("train",), (), "optim.name=own is for a script that gives its optimizer"),
        (("-c", OPTIMIZER), ("optim=sgd",), "optim=sgd has no effect beside the optimizer that"),
        (("-c", OPTIMIZER.replace("optimizer=nadam", "")), (), "optim.name=own is for a script"),
        (
            ("-c", OPTIMIZER.replace("=nadam", "=torch.optim.AdamW")),
            (),
            "gives AdamW, but the checkpoint has the state of NAdam",
        ),
        (
            ("-c", OPTIMIZER.replace("=nadam", "=torch.optim.Adafactor")),
            ("dp=2",),
            "its state row_var is (4, 1) for a parameter",
        ),
        (("-c", OPTIMIZER), ("optim.freeze=[embedding.*]",), "must stay []"),
    ):
        ended = run_forked(shell, *script, *words, *more, "train.steps=6")
        assert ended.code == 2, ended.err
        assert said in ended.err
        assert "Traceback" not in ended.err
    folders = [*(shell.cwd / "runs" / "r" / "checkpoints").glob("*-*")]
    assert [folder.name for folder in folders] == ["step-00000003"]


def test_the_example_logs_the_same_figures_on_one_rank_and_on_four(shell: Shell) -> None:
    script = (ROOT / "examples" / "probe_hook.py").read_text()
    assert len(script.splitlines()) < 100
    tiny = [word for word in WORDS if word != "train.eval_every=0"]
    words = (
        *shell.text(),
        *EVALUATES,
        *tiny,
        "model.num_query_groups=2",
        "model.ffn_hidden_size=64",
    )
    found = []
    for run, layout in (("one", ()), ("four", ("tp=2", "pp=2", "recompute=full"))):
        ended = run_forked(shell, "-c", script, f"run={run}", *layout, *words)
        assert ended.code == 0, ended.err
        rows = rows_of(shell.cwd / "runs" / run / "metrics.jsonl")
        found.append([row["hooks"] for row in rows if "hooks" in row])
    assert [sorted(figures) for figures in found[0]] == [
        *[["layers/0", "layers/1"]] * 3,
        ["smooth/eval_loss"],
    ]
    for one, four in zip(*found, strict=True):
        assert four == pytest.approx(one, rel=1e-9)


def test_a_script_that_has_computed_before_its_ranks_are_forked_is_refused(shell: Shell) -> None:
    """OpenMP's threads are not forked, and a rank would wait for them."""
    computes = """
import torch
from parallel3d.run import local_workers

local_workers.FORK_TRIAL_S = 3
torch.set_num_threads(2)
torch.randn(1 << 20).exp()
"""
    words = (*shell.text(), "run=r", "dp=2", "train.eval_every=0")
    shell.environ["OMP_NUM_THREADS"] = "2"
    ended = run_forked(shell, "-c", computes + SCRIPT, *words)
    assert ended.code == 2
    assert "the script has computed with large tensors before fit()" in ended.err
    assert "Traceback" not in ended.err
    assert not (shell.cwd / "runs" / "r").exists()


def test_the_first_word_of_a_scripts_command_line_is_a_subcommand(shell: Shell) -> None:
    """Held-out samples are scored, and the layout is verified, with samples and optimizer of the
    script; hooks and the script's own run= are left alone."""
    parts = "train=lambda config: Counting(config.model.seq_length, 0, 20),"
    both = OWN_SAMPLES.replace("p3d.fit(\n    [", "import torch\np3d.fit(\n    ['run=mine', ")
    script = ("-c", both.replace(parts, f"{parts} optimizer=torch.optim.NAdam,"))
    more = ("optim.weight_decay=0.1", "dp=2", "train.eval_every=0")
    assert run_forked(shell, *script, *more).code == 0
    scored = run_forked(shell, *script, "eval", *more)
    assert scored.code == 0, scored.err
    assert "eval 3/3  held-out loss" in scored.err
    verified = run_forked(shell, *script, "verify", "zero=1", *more, "verify.steps=1")
    assert verified.code == 0, verified.out + verified.err
    assert "fp64 · own" in verified.out
    assert "The layout does not change the model." in verified.out
    dry = run_forked(shell, *script, "dryrun", *more, "cluster=dgx_h100")
    assert dry.code == 0, dry.err
    assert "Memory of rank 0" in dry.out
    assert len([*(shell.cwd / "runs").iterdir()]) == 2


def test_help_of_a_script_and_words_that_are_none_of_its_subcommands(shell: Shell) -> None:
    helped = run_forked(shell, "-c", SCRIPT, "--help")
    assert helped.out.startswith("python my_train.py train [key=value …]")
    assert "  verify    prove that" in helped.out
    of_verify = run_forked(shell, "-c", SCRIPT, "verify", "--help")
    assert of_verify.out.startswith("python my_train.py verify [key=value …]")
    assert "verify.steps=5" in of_verify.out
    for words, said in (
        (
            ("generate", "run=r"),
            "generate takes no part of a script: run parallel3d generate run=r",
        ),
        (("init", "slurm"), "init takes no part of a script: run parallel3d init slurm"),
        (("verfy", "tp=2"), "verfy is not a subcommand of a script"),
        (("tp=2", "verify"), "verify is a subcommand, and must be the first word"),
    ):
        refused = run_forked(shell, "-c", SCRIPT, *words)
        assert refused.code == 2
        assert said in refused.err
        assert "Traceback" not in refused.err


OWN_MODEL = """
import sys
sys.path.insert(0, ROOT)
import parallel3d as p3d
from tests.distributed import planted_models

p3d.fit(
    ["micro_batch_size=2", "global_batch_size=8", "device=cpu", "launch.peak_tflops=0.1"],
    model=planted_models.NAME, train=planted_models.Samples(),
)
""".replace("ROOT", repr(str(ROOT)))


def test_verify_dryrun_topology_and_plan_take_a_model_of_the_scripts_own(shell: Shell) -> None:
    sound, wrong = (OWN_MODEL.replace("NAME", name) for name in ("Sound", "MissingSum"))
    words = ("verify", "tp=2", "verify.steps=1")
    ended = run_forked(shell, "-c", sound, *words)
    assert ended.code == 0, ended.out + ended.err
    assert "The layout does not change the model." in ended.out
    ended = run_forked(shell, "-c", wrong, *words)
    assert ended.code == 1
    assert "Likely cause: each rank of tp has a part of the gradient" in ended.out
    dry = run_forked(shell, "-c", sound, "dryrun", "tp=2", "pp=2", "cluster=dgx_h100")
    assert dry.code == 0, dry.err
    assert "Memory of rank" in dry.out
    mapped = run_forked(shell, "-c", sound, "topology", "tp=2", "pp=2", "cluster=dgx_h100")
    assert "Sound in fp32" in mapped.out
    planned = run_forked(shell, "-c", sound, "plan", "cluster=dgx_h100", "cp=1", "pp=2")
    assert planned.code == 0, planned.err
    assert "Sound on 8 GPUs of dgx_h100, bf16, 8 samples a step: " in planned.out
    assert planned.out.splitlines()[-1].startswith("python my_train.py tp=")
    refused = run_forked(shell, "-c", sound, "layout=auto", "launch.ranks=2")
    assert refused.code == 2
    assert "layout=auto needs to know how fast this machine is" in refused.err
