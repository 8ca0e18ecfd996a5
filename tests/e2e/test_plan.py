"""Tests `parallel3d plan` as typed: its output and refusals."""

from __future__ import annotations

import re

import pytest

from tests.e2e.command import Shell
from tests.e2e.here import answer

pytestmark = pytest.mark.nightly

USUAL = {
    "model": "llama3_8b",
    "cluster": "dgx_h100",
    "cluster.nodes": "2",
    "global_batch_size": "16",
    "plan.confirm": "0",
}


def test_plan_prints_ten_layouts_and_the_keys_to_use(
    shell: Shell, capfd: pytest.CaptureFixture[str]
) -> None:
    ended = answer(shell, capfd, "plan", "model=llama3_70b", "cluster=dgx_h100", "cluster.nodes=16",
                   "global_batch_size=256", "plan.confirm=0")  # fmt: skip
    progress = re.compile(r"plan: layout \d+ of \d+ …\n")  # every 10 s, on a slow machine
    assert (ended.code, progress.sub("", ended.err)) == (0, "")
    assert len(re.findall(r"^ +\d+ +\d+ +\d+ +\d+ +\d+", ended.out, re.M)) == 10
    assert re.search(r"parallel3d train … tp=\d+ pp=\d+ dp=\d+ micro_batch_size=\d+", ended.out)
    after_the_table = ended.out.partition("\n 10 ")[2].splitlines()[1]
    assert after_the_table.startswith("Kernels have the rates"), "not this machine's"


def test_a_default_batch_is_reported_first(shell: Shell, capfd: pytest.CaptureFixture[str]) -> None:
    words = ["plan", "model=llama3_8b", "cluster=dgx_h100", "cluster.nodes=8", "tp=8", "pp=1",
             "zero=1", "recompute=none", "plan.confirm=0"]  # fmt: skip
    ended = answer(shell, capfd, *words)
    first, empty, title = ended.out.splitlines()[:3]
    assert first.startswith("global_batch_size=16 was not given") and not empty
    assert first.endswith("such as global_batch_size=256 (2.10 Mtokens a step).")
    assert title.startswith("llama3_8b on 64 GPUs")
    for typed in ("global_batch_size=16", "global_batch_size=256"):
        assert "was not given" not in answer(shell, capfd, *words, typed).out


@pytest.mark.parametrize(
    "more", [("tp=1", "schedule=1f1b"), pytest.param((), marks=pytest.mark.slow)]
)
def test_a_mixture_of_experts_has_a_layout_that_fits(
    shell: Shell, capfd: pytest.CaptureFixture[str], more: tuple[str, ...]
) -> None:
    words = ["plan", "model=qwen3_30b_a3b", "cluster=dgx_h100", "cluster.nodes=2",
             "global_batch_size=64", "plan.confirm=0", *more]  # fmt: skip
    ended = answer(shell, capfd, *words)
    assert ended.code == 0, ended.err
    assert ended.cpu_s < 60, "a search takes seconds"
    title, _, head = ended.out.splitlines()[:3]
    assert title.startswith("qwen3_30b_a3b (30.5 B parameters, 3.35 B active) on 16 GPUs")
    assert re.search(r"a step: \d+ layouts, \d+ of the fastest \d+ fit", title)
    rows = re.findall(r"^ +\d+ +\d+ +\d+ +\d+ +\d+.*", ended.out, re.M)
    assert len(rows) == 10 and "  ep  step s" in head
    fits = [int(row.split("  bound  ")[0].split()[-1]) for row in rows]
    assert all(gib <= 80 for gib in fits)
    command = re.search(r"parallel3d train … (tp=\d+ pp=\d+ dp=\d+ .*)", ended.out)
    assert command is not None and ("ep=" in command[1]) is ("The first fits" in ended.out)


BAD = [
    (("cluster.gpu=H900",), "cluster.gpu=H900 must be one of .*the nearest is"),
    (("precision=fp32",), "precision=fp32 must be one of bf16, fp16 on a GPU"),
    (("offload_layers=[3,1]",), r"must have 1 entry in a plan.*nearest is offload_layers=\[3\]"),
    (("ep=2",), "ep=2 must be 1 for model=llama3_8b, which has no experts; the nearest is ep=1"),
    (("model=moe_tiny", "ep=5"), "ep=5 must divide tp · cp · dp=16; the nearest is ep=4"),
    (("tp=3",), "tp=3 must divide the 16 GPUs .*the nearest is 2"),
    (("pp=64", "cluster.nodes=64"), "pp=64 must be at most .*the nearest is 32"),
    (("tp=2", "pp=2", "global_batch_size=15"), "global_batch_size=15 must be .*nearest is 16"),
    (("model.num_layers=1000000",), "num_layers=1000000 must be .*the nearest is .*=4096"),
    (
        (
            "model.seq_length=1000000000",
            "tp=8",
            "cp=1",
            "pp=1",
            "micro_batch_size=1",
            "recompute=full",
        ),
        "cluster.nodes must be larger, but no number that was tried, up to 4, suffices",
    ),
    (
        ("model.vocab_size=99999999999", "tp=8", "pp=1", "micro_batch_size=1", "recompute=full"),
        "cluster.nodes must be larger, but no number that was tried, up to 128, suffices",
    ),
    (
        ("model=gpt2_124m", "cp=8", "context_parallel.style=heads"),
        "style=heads needs cp=8 to divide the 12 query heads .*the nearest is",
    ),
    (("cp=2", "context_parallel.style=ring", "model.dropout=0.1"), "nearest is .*style=gather"),
    (("cp=2", "tensor_parallel.attention=gather_qk"), "the nearest is .*attention=heads"),
    (("model=llama3_405b",), "fits no layout .*needs .* GiB more than .*cluster.nodes=16"),
]


@pytest.mark.parametrize(("words", "said"), BAD)
def test_bad_input_is_one_sentence(
    shell: Shell, capfd: pytest.CaptureFixture[str], words: tuple[str, ...], said: str
) -> None:
    keys = USUAL | dict(word.split("=", 1) for word in words)
    ended = answer(shell, capfd, "plan", *(f"{key}={value}" for key, value in keys.items()))
    assert ended.code == 2 and ended.out == ""
    # A slow machine also sees how far the search is.
    lines = [line for line in ended.err.splitlines() if not re.fullmatch("plan: .* …", line)]
    assert len(lines) == 1 and re.search(said, lines[0]), ended.err
