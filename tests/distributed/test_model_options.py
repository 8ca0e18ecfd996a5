"""Options of model and loss that a layout could get wrong: every layout is the reference still."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
import torch

from parallel3d.checkpoint.storage import chunks_by_name
from parallel3d.topology.layout import Layout
from tests.distributed.cases import Case, Problem
from tests.distributed.harness import (
    References,
    check_cases,
    make_trainer,
    plain_groups,
)
from tests.distributed.pool import Pool

GPT = Problem("gpt_tiny", "sgd", tied=True)
LLAMA = Problem("llama_tiny", "adamw", tied=False)
SMOOTHED = (("label_smoothing", 0.1), ("z_loss", 0.01))
CHUNKS = (("loss.chunk_tokens", 7),)
MLP_CHUNKS = (("mlp_chunk_tokens", 50),)  # which do not divide what they cut
# Key-value heads on two or all of the ranks.
PAIRS = replace(LLAMA, model=(("num_query_groups", 2),))
ONE_HEAD = replace(LLAMA, optimizer="sgd", tied=True, model=(("num_query_groups", 1),))
BIASED = replace(ONE_HEAD, model=(*ONE_HEAD.model, ("bias", True)))
ZERO1, ZERO2, ZERO3 = ((("zero", level),) for level in (1, 2, 3))
GATHER_QK = (("tensor_parallel.attention", "gather_qk"),)
# One probability for all sites: embedding, attention's probabilities, both residual branches.
GPT_DROPS = replace(GPT, model=(("dropout", 0.2),))
LLAMA_DROPS = replace(LLAMA, model=(("dropout", 0.1), ("num_query_groups", 2)))
# Models that people import: heads of 6 where hidden_size / heads is 4.
QK_NORM = (("qk_norm", True), ("head_dim", 6))
QWEN3 = replace(LLAMA, model=(*QK_NORM, ("num_query_groups", 2)))
QWEN3_ONE_HEAD = replace(ONE_HEAD, model=(*QK_NORM, *ONE_HEAD.model, ("attention_bias", "all")))
QWEN2 = replace(LLAMA, tied=True, model=(("attention_bias", "qkv"), ("num_query_groups", 2)))
# Pairs that turn once in 6, 63, 628 and 6,283 positions: two stay, one is between, one slows down.
SCALED = replace(
    LLAMA,
    model=(
        ("head_dim", 8),
        ("rotary_base", 10.0**4),
        ("rope_scaling_factor", 4.0),
        ("rope_original_length", 1000),
    ),
)

CASES = [
    (
        (1, 1, 1),
        [
            Case(replace(GPT, loss=SMOOTHED), keys=CHUNKS),
            Case(GPT_DROPS),
            Case(LLAMA_DROPS, microbatches=2, keys=(("recompute", "full"),)),
            Case(QWEN3, keys=(("recompute", "full"),)),
            Case(QWEN2),
            Case(SCALED),
        ],
    ),
    (
        (2, 1, 1),
        [
            Case(replace(GPT, loss=SMOOTHED), sp=True, embedding="replicated", keys=CHUNKS),
            Case(replace(LLAMA, loss=SMOOTHED), keys=CHUNKS),
            Case(GPT, parallel_output=False, embedding="replicated", keys=CHUNKS),
            Case(GPT_DROPS, sp=True),
            Case(LLAMA_DROPS, keys=(("recompute", "[norm,activation,attention]"),)),
            Case(GPT_DROPS, sp=True, keys=GATHER_QK),
            Case(QWEN3, sp=True, keys=(("recompute", "[norm,attention,mlp]"), *MLP_CHUNKS)),
            Case(replace(QWEN3, optimizer="sgd"), keys=(("recompute", "full"),)),
            Case(QWEN3_ONE_HEAD, bucket_cap_mb=0.02),
            Case(QWEN2, sp=True),
            Case(SCALED),
        ],
    ),
    (
        (4, 1, 1),
        [
            Case(replace(GPT, loss=SMOOTHED), keys=CHUNKS),
            Case(PAIRS, sp=True),
            Case(replace(PAIRS, optimizer="sgd"), bucket_cap_mb=0.02),
            Case(BIASED, sp=True),
            Case(LLAMA_DROPS, sp=True),
            Case(LLAMA_DROPS, keys=(*GATHER_QK, ("recompute", "full"))),
            Case(QWEN3),
            Case(QWEN3_ONE_HEAD, sp=True, keys=GATHER_QK),
            Case(QWEN2),
        ],
    ),
    (
        (2, 2, 1),
        [
            Case(replace(GPT, loss=SMOOTHED), sp=True, keys=CHUNKS),
            Case(replace(LLAMA, loss=SMOOTHED[1:]), schedule="gpipe", parallel_output=False),
            Case(ONE_HEAD, keys=(("recompute", "full"), ("recompute_layers", [1, 0]))),
            Case(replace(QWEN3, optimizer="sgd"), sp=True, schedule="zb_h1"),
            Case(QWEN2, schedule="gpipe"),
        ],
    ),
    (
        (2, 1, 2),
        [
            Case(BIASED, bucket_cap_mb=0.02, keys=ZERO1),
            Case(replace(PAIRS, model=ONE_HEAD.model), sp=True, keys=ZERO1),
            Case(QWEN3_ONE_HEAD, keys=ZERO1),
            Case(QWEN3, sp=True, keys=ZERO2),
            Case(QWEN3_ONE_HEAD, keys=(*ZERO3, ("recompute", "[norm,mlp]"), *MLP_CHUNKS)),
        ],
    ),
    (
        (1, 2, 2),
        [
            Case(replace(LLAMA, loss=SMOOTHED[:1]), keys=(*CHUNKS, *ZERO1)),
            Case(GPT_DROPS),
            Case(replace(QWEN3, tied=True), keys=(*ZERO1, ("recompute", "[mlp]"), *MLP_CHUNKS)),
        ],
    ),
    ((1, 4, 1), [Case(replace(GPT_DROPS, layers=5), microbatches=4)]),
]


@pytest.mark.parametrize(
    ("sizes", "cases"), CASES, ids=["tp{}-pp{}-dp{}".format(*sizes) for sizes, _ in CASES]
)
def test_options_train_as_the_reference_does(
    sizes: tuple[int, int, int], cases: list[Case], pool: Pool, references: References
) -> None:
    check_cases(sizes, cases, pool, references)


NORMED_PAIRS = replace(PAIRS, model=(*PAIRS.model, ("qk_norm", True)))


def trained_and_saved(sizes: tuple[int, int, int]) -> tuple[Counter[str], bool]:
    """Elements that this rank writes into a checkpoint, by name; and whether two steps with q and k
    gathered end in the bits of two steps without."""
    groups = plain_groups(Layout(*sizes))
    ends = []
    for keys in ((), GATHER_QK):
        trainer = make_trainer(Case(NORMED_PAIRS, keys=(*keys, *ZERO1)), groups)
        losses = [trainer.train_step().loss for _ in range(2)]
        ends.append((losses, {n: p.detach().clone() for n, p in trainer.parameters.items()}))
    (losses, plain), (others, gathered) = ends
    equal = losses == others and all(torch.equal(plain[n], gathered[n]) for n in plain)
    saved: Counter[str] = Counter()
    for name, tensor in chunks_by_name(trainer.parameter_slices(), shared=True).items():
        saved[name] += sum(box.elements for box, _ in tensor.chunks)
    groups.close()
    return saved, equal


def test_shared_heads_are_saved_once_and_gathered_ones_change_nothing(pool: Pool) -> None:
    sizes = (4, 1, 1)
    saved: Counter[str] = Counter()
    for found, equal in pool.run(4, trained_and_saved, sizes, timeout_s=900):
        saved += found
        assert equal
    model = Case(NORMED_PAIRS).config(Layout(*sizes)).model
    for kind in ("parameter", "exp_avg", "exp_avg_sq"):
        rows = {"q": model.hidden_size, "k": 2 * model.head_size, "v": 2 * model.head_size}
        for matrix, outputs in rows.items():
            name = f"{kind}/layers.1.attention.{matrix}.weight"
            assert saved[name] == outputs * model.hidden_size, name
        for part in ("q_norm", "k_norm"):  # on all four ranks
            assert saved[f"{kind}/layers.1.attention.{part}.weight"] == model.head_size
