"""Runs training and scripts on the simulated accelerator from the command line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.e2e.command import TINY, Ended, Shell
from tests.e2e.forked import Forked, run_forked

pytestmark = [pytest.mark.at_once(2), pytest.mark.nightly]
SAVING = ("checkpoint.every=2", "optim.lr_decay_steps=3", "precision=fp64")


def given(shell: Shell, *words: str) -> list[str]:
    """Returns the arguments; the last of two equal keys counts."""
    return list({word.split("=")[0]: word for word in (*TINY, *shell.text(), *words)}.values())


def losses(folder: Path) -> list[float]:
    rows = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return [row["loss"] for row in rows if "loss" in row]


def test_a_run_equals_the_cpus_and_resumes_under_another_layout(shell: Shell) -> None:
    """Saves in the background on one rank, resumes on two with zero=3, reads on two tensor ranks,
    evaluates, and draws the last step."""
    layouts = (("train.steps=2", "schedule.timeline=true"), ("dp=2", "zero=3", "train.steps=3"))
    for ranks, words in enumerate(layouts, 1):
        saving = given(shell, "run=r", *SAVING, *words, "device=simulated")
        ended = run_forked(shell, "train", *saving, ranks=ranks)
        assert ended.code == 0, ended
        assert "simulated accelerator" in ended.out
    words = given(shell, *SAVING, "run=c", "train.steps=3", "checkpoint.every=0")
    assert run_forked(shell, "train", *words).code == 0
    runs = shell.cwd / "runs"
    assert losses(runs / "r") == pytest.approx(losses(runs / "c"), rel=1e-9)
    events = json.loads((runs / "r" / "timeline.json").read_text())["traceEvents"]
    assert all(e["dur"] > 0 for e in events if e["ph"] == "X"), "told by the device's events"
    summary = json.loads((runs / "r" / "summary.json").read_text())
    assert all(rank["allocated"] > 0 for rank in summary["memory"]["ranks"])
    words = ("run=r", "tp=2", "generate.max_tokens=4", "prompt=the", "device=simulated")
    text = run_forked(shell, "generate", *words)
    assert text.code == 0 and text.out.startswith("the")
    (shell.cwd / "rows.jsonl").write_text('{"context": "a", "choices": ["b", "c"], "answer": 0}')
    judged = run_forked(shell, "eval", "run=r", "tasks=rows.jsonl", "device=simulated")
    assert judged.code == 0 and "acc_norm" in judged.out, judged


SCRIPT = """
import torch
import torch.distributed as dist
import parallel3d as p3d

with p3d.init(tp=2, device="simulated", timeout_s=60) as groups:
    if groups.rank == 0 and LAST:
        exec(LAST)
    dist.all_reduce(torch.ones(3, device=groups.device), group=groups.tp.handle)
"""


def run_script(shell: Shell, last: str) -> list[Ended]:
    """Runs a script on two ranks, of which the first ends with `last`."""
    forked = Forked(shell)
    forked.add_world(2, "-c", SCRIPT.replace("LAST", repr(last)))
    forked.start()
    return forked.ends()


def test_a_script_that_fails_on_one_rank_ends_at_once(shell: Shell) -> None:
    """The peer that waits does not destroy a group with it: the connection breaks."""
    failed, waiting = run_script(shell, "raise ValueError('wrong')")
    assert failed.code == 1 and failed.err.endswith("ValueError: wrong\n"), failed
    assert waiting.code == 1 and "calls destroy" not in waiting.err, waiting
    assert "onnection" in waiting.err, waiting
    ended = run_script(shell, "")
    assert [(each.code, each.errors) for each in ended] == [(0, [])] * 2, ended


def test_a_run_with_a_kernel_of_half_precision_generates_in_fp32(shell: Shell) -> None:
    """Tests a size for which flash attention has no kernel on accelerators: the usual kernel
    generates the text."""
    kernel = ("run=f", "precision=bf16", "attention_kernel=flash", "device=simulated")
    words = given(shell, *kernel, "train.steps=1", "checkpoint.every=1")
    ended = run_forked(shell, "train", *words)
    assert ended.code == 0, ended
    text = run_forked(shell, "generate", "run=f", "generate.max_tokens=4", "device=simulated")
    assert text.code == 0 and len(text.out) > 1, text
    words = given(shell, *kernel, "run=g", "attention_kernel=fa3")
    refused = run_forked(shell, "train", *words)
    assert refused.code == 2 and "cannot use flash_attn_interface here" in refused.err, refused


def test_verify_on_the_simulated_device_equals_the_cpu(shell: Shell) -> None:
    words = given(shell, "tp=2", "sp=true", "verify.steps=1", "device=simulated")
    ended = run_forked(shell, "verify", *words)
    assert ended.code == 0 and "does not change the" in ended.out, ended


# Runs `calibrate`, which measures for minutes, with few calls. It takes three times as long as on
# the CPU itself.
SMALL = """
from parallel3d.run.worker import APPS
APPS["calibrate"] = "tests.e2e.small_figures", "calibrate"
import sys
from parallel3d.__main__ import main
sys.exit(main())
"""


def test_bench_comm_runs_on_two_simulated_devices(shell: Shell) -> None:
    words = ("bench.budget_s=0.1", "bench.sizes=[4096]", "bench.iterations=1", "bench.warmup=0")
    bench = run_forked(shell, "bench", "comm", "dp=2", "device=simulated", *words, ranks=2)
    assert bench.code == 0 and "simulated_nccl" in bench.out, bench
    words = (*TINY[:4], "calibrate.file=here.yaml", "calibrate.passes=1", "device=cpu")
    measured = run_forked(shell, "-c", SMALL, "calibrate", *words, ranks=2)
    assert measured.code == 0 and "here.yaml" in measured.out + measured.err, measured
    assert "parallel3d: calibrate: all_reduce over 2 ranks" in measured.err
