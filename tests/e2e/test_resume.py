"""Tests that a run resumes with the same bits under the same layout, and the same curve under
another."""

from __future__ import annotations

import json
import math
import re
import stat
from itertools import accumulate
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from parallel3d.checkpoint.manifest import list_checkpoints, step_of
from parallel3d.checkpoint.storage import read_full
from tests.corpora import pair
from tests.e2e.command import DEVICE, PARALLEL3D, TINY, Ended, Shell, wait_for
from tests.e2e.forked import run_forked

STEPS = 6
EVERY = 2
LAST = Path("checkpoints", "step-00000006")
# Saved every two steps; the schedule does not depend on where a start ends. The fourth and the
# fifth step read twice as many samples as the others.
SAVING = (f"checkpoint.every={EVERY}", f"optim.lr_decay_steps={STEPS}", "train.save_weights=true")
SAVING += ("train.batch_schedule={0:4,12:8,28:4}",)
SAVING += ("optim.freeze=[layers.0.attention.k.*]", "optim.groups={layers.1.*:{lr_mult:0.5}}")
SECRET = "d41d8cd98f00b204e9800998ecf8427e"
pytestmark = pytest.mark.at_once(2)


def train(shell: Shell, *words: str, ranks: int = 2) -> Ended:
    # The last of two equal keys counts, so the keys of TINY come first.
    given = {word.split("=")[0]: word for word in (*TINY, *shell.text(), *SAVING, *words)}
    shell.environ = {"WANDB_API_KEY": SECRET}
    return run_forked(shell, "train", *given.values(), ranks=ranks)


def said(ended: Ended) -> list[str]:
    """Returns the lines on stderr, without the one about the device."""
    return [line for line in ended.errors if not line.startswith(DEVICE)]


def curve(run: Path) -> list[tuple[int, float, float, int]]:
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [(r["step"], r["loss"], r["grad_norm"], r["tokens"]) for r in rows if "loss" in r]


def evaluations(run: Path) -> dict[int, dict]:
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return {row["step"]: row["valid"] for row in rows if "valid" in row}


def final_weights(run: Path) -> dict[str, bytes]:
    with safe_open(run / "weights-final.safetensors", framework="numpy") as file:
        return {name: file.get_tensor(name).tobytes() for name in file.keys()}  # noqa: SIM118


def flip(path: Path) -> None:
    """Flips a bit of the first tensor, a parameter."""
    content = bytearray(path.read_bytes())
    content[8 + int.from_bytes(content[:8], "little") + 5] ^= 4
    path.write_bytes(content)


@pytest.mark.nightly
def test_auto_says_which_interval_it_chose_and_changes_no_bit(shell: Shell) -> None:
    """The run is stopped in between, and its next start measures again."""
    runs, words = shell.cwd / "runs", ("dp=2", "tp=1", "zero=1", "optim.lr_decay_steps=30")
    whole = train(shell, "run=whole", *words, "train.steps=30", "checkpoint.every=0")
    assert whole.code == 0, whole
    auto = (*words, "run=mine", "checkpoint.every=auto", "checkpoint.async=false")
    for steps, saves in ((16, [10, 16]), (30, [16, 26, 30])):
        ended = train(shell, *auto, f"train.steps={steps}")
        assert ended.code == 0, ended
        (line,) = (line for line in said(ended) if "checkpoint.every=auto" in line)
        assert re.search(
            r"auto: a checkpoint every [\d.]+ (s|min|h), about [\d,]+ steps?, because a save "
            r"delays training by [\d.]+ m?s and one node fails every 264 days "
            r"\(recovery.node_days=264.0\)",
            line,
        ), line
        assert [*map(step_of, reversed(list_checkpoints(runs / "mine")))] == saves
    assert curve(runs / "mine") == curve(runs / "whole")
    assert final_weights(runs / "mine") == final_weights(runs / "whole")


@pytest.mark.nightly
def test_a_run_resumes(shell: Shell) -> None:
    """A run that is stopped half-way and started again equals the uninterrupted one bit for bit.

    It then continues longer, under another layout, with its newest checkpoint damaged.
    """
    runs = shell.cwd / "runs"
    optim = ("optim=muon", "optim.state=bf16", "optim.ema_decay=0.9")
    layout = ("tp=1", "dp=2", "zero=1", *optim)
    sets = f"data.valid={{book:{shell.cwd / 'book.txt'}}}"
    judged = (sets, "data.valid_fraction=0.05", "train.eval_every=2")
    layout = (*layout, *judged)
    # samples of 32; five steps read 28
    tokens = ("train.steps=null", "train.tokens=1000")
    whole = train(shell, "run=whole", *layout, *tokens)
    assert whole.code == 0, whole
    assert "6 steps · 1.02 k tokens" in whole.out
    half = train(shell, "run=mine", *layout, "train.steps=3")
    assert half.code == 0, half
    rest = train(shell, "run=mine", *layout, f"train.steps={STEPS}")
    assert rest.code == 0, rest
    resumed = "parallel3d: run=mine resumes at step 4; changed: train.steps 3 → 6; 3 of 6 steps are"
    assert said(rest) == [f"{resumed} done, 3 steps of 8 to 4 sequences to go"]
    assert curve(runs / "mine") == curve(runs / "whole")
    assert final_weights(runs / "mine") == final_weights(runs / "whole")
    ours, theirs = evaluations(runs / "mine"), evaluations(runs / "whole")
    assert [*ours] == [0, 2, 3, 4, 6] and {step: ours[step] for step in theirs} == theirs
    kinds = ("parameter", "ema", "exp_avg", "exp_avg_sq", "momentum")
    both = [read_full(runs / run / LAST, kinds) for run in ("mine", "whole")]
    assert {name.split("/")[0] for name in both[0]} == set(kinds)
    assert all(torch.equal(tensor, both[1][name]) for name, tensor in both[0].items())
    types = {name.split("/")[0]: tensor.dtype for name, tensor in both[0].items()}
    assert [types[k] for k in kinds] == [torch.float32] * 2 + [torch.bfloat16] * 3
    summary = json.loads((runs / "mine" / "summary.json").read_text())
    assert (summary["first_step"], summary["steps"], summary["status"]) == (4, STEPS, "finished")

    again = train(shell, "run=mine", *layout, f"train.steps={STEPS}")
    assert (again.code, said(again)) == (
        0,
        ["parallel3d: run=mine is finished: 6 steps are done; a larger train.steps continues it"],
    )
    words = ("seed=7", "model.hidden_size=64", "optim.name=adamw")
    other = train(shell, "run=mine", *words, ranks=1)
    assert other.code == 2
    assert "model.hidden_size is 32 there, now 64, optim.name is muon there" in other.err
    assert "now adamw, seed is 1234 there, now 7" in other.err

    folder = runs / "mine" / "checkpoints"
    flip(folder / "step-00000006" / "rank-00001.safetensors")
    plain = (
        *judged,
        "optim.state=fp32",
        "optim.ema_decay=null",
    )  # keys that are not typed keep their values
    moved = train(shell, "run=mine", "dp=1", "zero=0", "train.steps=7", *plain, ranks=1)
    assert moved.code == 0, moved
    kept_keys, damaged, resumed, dropped = said(moved)
    assert kept_keys.endswith(": optim.name=muon, optim.momentum=0.95")
    assert "values kept from its last start" in kept_keys
    assert "optim.state bf16 → fp32" in resumed and "optim.ema_decay 0.9 → null" in resumed
    assert dropped == "parallel3d: optim.ema_decay=null: the average of the weights is dropped"
    assert (
        "is not what was written: the checkpoint is renamed to damaged-step-00000006, and the"
        in damaged
    )
    assert resumed.startswith("parallel3d: run=mine resumes at step 5; layout: ")
    assert "dp 2 → 1" in resumed and "zero 1 → 0" in resumed
    for ours, theirs in zip(curve(runs / "mine"), curve(runs / "whole"), strict=False):
        assert ours[0] == theirs[0] and ours[3] == theirs[3]
        assert abs(ours[1] / theirs[1] - 1) < 1e-5 and abs(ours[2] / theirs[2] - 1) < 1e-5
    assert len(curve(runs / "mine")) == 7

    for path in (runs / "mine").rglob("*"):
        if path.is_file():
            assert SECRET.encode() not in path.read_bytes(), path
            assert stat.S_IMODE(path.stat().st_mode) == 0o600, path
        elif folder in (path, *path.parents):
            assert stat.S_IMODE(path.stat().st_mode) == 0o700
    kept = {"config.yaml", "config-2.yaml", "config-3.yaml"}
    assert {path.name for path in (runs / "mine").glob("config*")} == kept


@pytest.mark.nightly
def test_a_blend_resumes_under_another_layout(shell: Shell) -> None:
    """Tests that samples of a blend of packs do not depend on the layout, and that its past is
    kept."""
    a, b, c = (str(pair(shell.cwd / name, seed)) for seed, name in enumerate("abc"))
    blend = f"data.blend={{{a}:0.7,{b}:0.3}}"
    data = ("data=blend", blend, "data.packing=best_fit", "data.cut_documents=true")
    data += (f"data.cache_dir={shell.cwd / 'cache'}", "data.path=null", "train.eval_every=2")
    whole = train(shell, "run=whole", *data, "dp=1", f"train.steps={STEPS}", ranks=1)
    assert whole.code == 0, whole
    assert train(shell, "run=mine", *data, "dp=2", "train.steps=3").code == 0
    later = f"data.blend_stages={{100000:{{{c}:1}}}}"
    average = "optim.ema_decay=0.9"
    rest = train(shell, "run=mine", *data, later, average, "dp=1", f"train.steps={STEPS}", ranks=1)
    assert rest.code == 0, rest
    assert "the average of the weights starts from the weights of step 3" in rest.err
    assert f"data.blend_stages null → {{100000:{{{c}:1}}}}" in rest.err
    mine, undisturbed = curve(shell.cwd / "runs" / "mine"), curve(shell.cwd / "runs" / "whole")
    assert len(mine) == len(undisturbed) == STEPS
    for ours, theirs in zip(mine, undisturbed, strict=True):
        assert ours[0] == theirs[0] and ours[3] == theirs[3]
        assert abs(ours[1] / theirs[1] - 1) < 1e-5 and abs(ours[2] / theirs[2] - 1) < 1e-5
    lines = (shell.cwd / "runs" / "mine" / "metrics.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in lines]
    losses = [row["eval_losses"] for row in rows if "eval_loss" in row]
    assert set(losses[0]) == {a, b} and set(losses[-1]) == {a, b, c, "ema"}
    read = [row["parts"] for row in rows if "parts" in row][-1]
    assert sum(part["tokens"] for part in read.values()) == rows[-1]["tokens"]
    assert read[c] == {"tokens": 0, "epochs": 0.0} and read[a]["epochs"] > 0

    early = f"data.blend_stages={{16:{{{c}:1}}}}"
    refused = train(shell, "run=mine", *data, early, "dp=1", "train.steps=7", ranks=1)
    assert refused.code == 2 and "cannot resume with another blend" in refused.err


@pytest.mark.nightly
def test_a_full_disk_is_reported_and_training_continues(shell: Shell) -> None:
    """Limits files to 100 KiB, which a checkpoint exceeds: steps continue, and the end reports
    it."""
    words = (*TINY, *shell.text(), "run=full", "checkpoint.every=1", "checkpoint.async_save=false")
    limited = ("bash", "-c", 'ulimit -f 100; exec "$@"', "-", *PARALLEL3D, "train")
    given = {word.split("=")[0]: word for word in words}
    ended = shell.run(*limited, *given.values())
    assert ended.code == 1
    for step in (1, 2, 3):
        said = f"step-0000000{step} could not be written: File too large (rank 0); there is no"
        assert any(said in line for line in ended.errors), ended.err
    assert "the last checkpoint was not written" in ended.errors[-1]
    run = shell.cwd / "runs" / "full"
    assert len(curve(run)) == 3
    assert [path.name for path in (run / "checkpoints").iterdir()] == [".claim"]


IMPORTS = """
import sys
from parallel3d.checkpoint.saver import Saver
from parallel3d.cli.command_line import main

work = Saver._work

def seen(self, *args):
    before = set(sys.modules)
    work(self, *args)
    print("imported in a save:", sorted(set(sys.modules) - before), file=sys.stderr)

Saver._work = seen
sys.exit(main(sys.argv[1:]))
"""


@pytest.mark.nightly
def test_a_save_imports_no_module(shell: Shell) -> None:
    """Tests that resuming may take minutes on a cold file system, although a grace time and a
    watchdog run."""
    words = (*TINY, *shell.text(), "checkpoint.every=2", "checkpoint.async_save=false")
    given = {word.split("=")[0]: word for word in words}  # a key may be typed once
    ended = shell.run(PARALLEL3D[0], "-c", IMPORTS, "train", *given.values())
    assert ended.code == 0 and ended.err.count("imported in a save: []") == 2, ended


def test_a_killed_run_resumes_with_another_batch_and_trains_all_its_tokens(shell: Shell) -> None:
    """A run of 12,800 tokens in steps of four samples is killed and resumes in steps of sixteen."""
    run, rates = shell.cwd / "runs" / "mine", ("optim.lr=1e-3", "optim.min_lr=1e-5")
    length = ("train.steps=null", "train.tokens=12800", "checkpoint.every=10", *rates)
    given = {word.split("=")[0]: word for word in (*TINY, *shell.text(), *length)}
    process = shell.start(*PARALLEL3D, "train", "run=mine", *given.values())
    wait_for(lambda: (run / "checkpoints" / "step-00000010").is_dir(), 60, "step 10")
    process.kill()
    process.communicate()
    shell.wait_until_none_is_left(20)
    done = max(step_of(path) for path in (run / "checkpoints").glob("step-*"))

    left = 400 - 4 * done  # samples of 32 tokens
    to_go = -(-left // 16)
    rest = shell.run(*PARALLEL3D, "train", "run=mine", "global_batch_size=16")
    assert rest.code == 0, rest
    said = (
        f"resumes at step {done + 1}; changed: global_batch_size 4 → 16; {128 * done:,} of 12,800"
    )
    assert f"{said} tokens are done, {to_go} steps of 16 sequences to go" in rest.err
    assert f"{done + to_go} steps · " in rest.out
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    steps = [row for row in rows if "loss" in row]
    assert [row["step"] for row in steps] == list(range(1, done + to_go + 1))
    sizes = [128] * done + [512] * to_go
    assert [row["tokens"] for row in steps] == list(accumulate(sizes))
    assert 12800 <= steps[-1]["tokens"] < 12800 + 512
    lr = [row["lr"] for row in steps]
    assert lr[-1] == 1e-5 and lr[done - 1 :] == sorted(lr[done - 1 :], reverse=True)
    for row in steps[:-1]:  # a cosine over 400 samples, whatever the number of steps
        share = row["tokens"] / 12800
        assert row["lr"] == pytest.approx(1e-5 + 0.495e-3 * (1 + math.cos(math.pi * share)))
    assert 0 < steps[-1]["goodput"] <= 1
    summary = json.loads((run / "summary.json").read_text())
    assert summary["tokens"] == steps[-1]["tokens"] and summary["goodput"]["starts"] == 2

    over = shell.run(*PARALLEL3D, "train", "run=mine", "global_batch_size=64")
    assert over.code == 0 and f"is finished: {done + to_go} steps are done" in over.err


@pytest.mark.nightly
def test_a_start_that_saved_nothing_does_not_bind_later_ones(shell: Shell) -> None:
    """Resumes after the source of the weights has trained further and removed its checkpoint, and
    after refused keys."""
    base = {word.split("=")[0]: word for word in (*TINY, *shell.text())}

    def start(*words: str) -> Ended:
        given = base | {word.split("=")[0]: word for word in words}
        return run_forked(shell, "train", *given.values(), ranks=1)

    assert start("run=old", "train.steps=1", "checkpoint.every=1", "checkpoint.keep=1").code == 0
    begun = start("run=new", "init_from=old", "train.steps=1", "seed=3")
    assert begun.code == 0, begun
    summary = shell.cwd / "runs" / "new" / "summary.json"
    summary.write_text(summary.read_text().replace('"finished"', '"failed"'))  # like after a kill
    assert start("run=old", "train.steps=2", "checkpoint.every=1", "checkpoint.keep=1").code == 0

    gone = start("run=new", "init_from=old@1", "train.steps=1")
    assert gone.code == 2 and "and init_from=old takes the newest" in gone.err
    anew = start("run=new", "init_from=old", "train.steps=1", "seed=4", "checkpoint.every=1")
    assert anew.code == 0, anew
    assert "init_from=old@2 gives model" in anew.err
    assert "starts over at step 1" in anew.err
    bound = start("run=new", "init_from=old", "train.steps=2", "seed=5")
    assert bound.code == 2 and "seed is 4 there, now 5" in bound.err

    # A refused start does not count as the last one.
    book = shell.cwd / "other.txt"
    book.write_text("another text\n" * 900)
    refused = start("run=new", f"data.path={book}", "train.steps=2", "seed=4")
    assert refused.code == 2 and "cannot resume with another text" in refused.err
    there = base["data.path"]
    assert f"give {there} as there, or" in refused.err
    mended = start("run=new", there, "train.steps=1", "seed=4")
    assert mended.code == 0 and "is finished: 1 step" in mended.err, mended
    on = run_forked(shell, "train", "run=new", "train.steps=2", ranks=1)
    assert on.code == 0, on
