"""Tests options of model and loss that a layout could get wrong: every layout still equals the
reference."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
import torch

from parallel3d.blueprint.layout import Layout
from parallel3d.checkpoint.storage import chunks_by_name
from tests.distributed.cases import Case, Problem
from tests.distributed.harness import References, Sizes, check_cases, make_trainer, plain_groups
from tests.distributed.pool import Pool

LLAMA = Problem("llama_tiny", "adamw", tied=False)
# Key-value heads on two or all of the ranks.
PAIRS = replace(LLAMA, model=(("num_query_groups", 2),))
ONE_HEAD = replace(LLAMA, optimizer="sgd", tied=True, model=(("num_query_groups", 1),))
ZERO1, ZERO3 = ((("zero", level),) for level in (1, 3))
GATHER_QK = (("tensor_parallel.attention", "gather_qk"),)
STYLES = ("gather", "heads", "ring")
MLP_CHUNKS = (("mlp_chunk_tokens", 50),)  # sizes of pieces that do not divide the whole
# Like models that people import: heads of 6 although hidden_size / heads is 4; and biases in
# attention alone, including its output's.
QK_NORM = (("qk_norm", True), ("head_dim", 6))
# Norms over all heads, whose sums of squares tensor parallelism divides (OLMoE).
FULL_NORM = (*QK_NORM, ("qk_norm_width", "full"))
FULL_ONE_HEAD = replace(ONE_HEAD, model=(*FULL_NORM, *ONE_HEAD.model))
FULL_PAIRS = replace(PAIRS, model=(*PAIRS.model, ("qk_norm", True), ("qk_norm_width", "full")))
# A factor of the scores, which every kernel takes (Granite, Gemma).
SCALED = replace(PAIRS, model=(*PAIRS.model, ("attention_scale", 0.11)))
SCALED_DROPPED = replace(SCALED, model=(*SCALED.model, ("dropout", 0.2)))
SCALED_PACKS = replace(SCALED, documents=True)
# Norms after attention and MLP (OLMo 2), or on both sides with weights around 0 (Gemma).
AFTER = replace(LLAMA, model=(("norm_position", "after"), ("residual_scale", 0.6)))
AFTER_FULL = replace(FULL_PAIRS, model=(*FULL_PAIRS.model, *AFTER.model, ("dropout", 0.2)))
GEMMA = replace(
    ONE_HEAD,
    model=(
        *ONE_HEAD.model,
        *(("activation", "geglu"), ("norm_position", "both"), ("norm_zero_centered", True)),
        *(("qk_norm", True), ("embedding_scale", 5.7), ("attention_scale", 0.3)),
        *(("logit_scale", 0.7), ("logit_cap", 2.0)),
    ),
    loss=(("label_smoothing", 0.1), ("z_loss", 0.01)),
)
FULL_GEMMA = replace(GEMMA, optimizer="adamw", model=(*GEMMA.model, ("qk_norm_width", "full")))
LAYER_NORMS = replace(LLAMA, model=(("norm", "layernorm"), ("norm_position", "both")))
EXPERTS = replace(
    GEMMA,
    model=(
        *GEMMA.model,
        *(("num_experts", 8), ("experts_per_token", 2), ("expert_ffn_size", 24)),
        *(("shared_expert_size", 16), ("bias", False)),
    ),
)
# Positions that are scaled, and queries that grow with them (Ministral 3).
YARN = replace(
    PAIRS,
    model=(
        *(*PAIRS.model, ("rope_scaling", "yarn"), ("rope_scaling_factor", 4.0)),
        *(("rope_original_length", 3), ("rotary_base", 100.0), ("rope_beta_fast", 1.5)),
        *(("rope_beta_slow", 0.1), ("query_temperature", 0.5)),
    ),
)
YARN_PACKS = replace(YARN, documents=True)
# RoPE of sliding layers is not scaled, and other layers have no positions.
MIXED_YARN = replace(
    YARN_PACKS,
    model=(
        *(*YARN.model, ("sliding_window", 5), ("sliding_rotary_base", 50.0)),
        ("layer_types", ("sliding", "full", "full_nope")),
    ),
)
QWEN3_ONE_HEAD = replace(ONE_HEAD, model=(*QK_NORM, *ONE_HEAD.model, ("attention_bias", "all")))

# The matrix combines all other options with every layout.
CASES = [
    (
        (4, 1, 1),
        [
            Case(QWEN3_ONE_HEAD, sp=True, keys=GATHER_QK),
            Case(FULL_PAIRS, sp=True, keys=(("recompute", "[attention]"),)),
            Case(FULL_ONE_HEAD, keys=GATHER_QK),
            Case(FULL_GEMMA, sp=True, keys=(("recompute", "[norm,activation]"),)),
        ],
    ),
    (
        (2, 1, 2),
        [
            Case(QWEN3_ONE_HEAD, keys=(*ZERO3, ("recompute", "[norm,mlp]"), *MLP_CHUNKS)),
            Case(FULL_ONE_HEAD, sp=True, keys=(*ZERO3, ("recompute", "full"))),
            Case(FULL_GEMMA, sp=True, compile=True),
            Case(AFTER, sp=True, keys=(*ZERO3, ("recompute", "full"))),
            Case(AFTER_FULL, keys=(("recompute", "[norm,mlp]"), *MLP_CHUNKS)),
            Case(GEMMA, parallel_output=False, keys=(("recompute", "full"),)),
            Case(
                GEMMA,
                sp=True,
                keys=(*ZERO3, ("recompute", "[norm,mlp]"), ("loss.chunk_tokens", 7)),
            ),
            Case(LAYER_NORMS, sp=True),
            Case(SCALED_PACKS, sp=True),
            Case(SCALED_DROPPED, keys=(("recompute", "selective"),)),
            Case(SCALED, keys=(("attention_kernel", "math"),)),
        ],
    ),
    (
        (2, 2, 1),
        [
            Case(FULL_ONE_HEAD, schedule="zb_h1"),
            Case(AFTER, schedule="zb_h1", sp=True),
            Case(YARN, schedule="zb_h1", sp=True, keys=(("recompute", "[attention]"),)),
            Case(YARN_PACKS, keys=GATHER_QK),
            Case(GEMMA, schedule="zb_h1"),
        ],
    ),
    (
        (2, 1, 1, 1, 2),
        [
            Case(EXPERTS, sp=True),
            Case(EXPERTS, sp=True, keys=(("recompute", "[norm,mlp]"),)),
            Case(EXPERTS, sp=True, keys=(("recompute", "full"),)),
        ],
    ),
    (
        (1, 1, 1),
        [
            Case(FULL_PAIRS, compile=True),
            Case(SCALED_PACKS, compile=True),
            Case(GEMMA, compile=True),
            Case(AFTER, compile=True),
        ],
    ),
    (
        (2, 1, 1, 2),
        [
            Case(FULL_PAIRS, keys=ZERO1),
            *(Case(SCALED, keys=(("context_parallel.style", style),)) for style in STYLES),
            Case(SCALED_PACKS, keys=(("attention_kernel", "math"),)),
            Case(SCALED_DROPPED),
            *(Case(YARN_PACKS, keys=(("context_parallel.style", style),)) for style in STYLES),
            Case(MIXED_YARN),
        ],
    ),
]


@pytest.mark.parametrize(
    ("sizes", "cases"), CASES, ids=["-".join(map(str, sizes)) for sizes, _ in CASES]
)
def test_model_options_train_like_the_reference(
    sizes: Sizes, cases: list[Case], pool: Pool, references: References
) -> None:
    check_cases(sizes, cases, pool, references)


NORMED_PAIRS = replace(PAIRS, model=(*PAIRS.model, ("qk_norm", True)))


def trained_and_saved(sizes: tuple[int, int, int]) -> tuple[Counter[str], bool]:
    """Returns the elements that this rank writes into a checkpoint, by name, and whether two steps
    with gathered q and k give the same bits as two steps without."""
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


def test_shared_heads_are_saved_once_and_gather_qk_changes_no_bit(pool: Pool) -> None:
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
        for part in ("q_norm", "k_norm"):  # all four ranks have these parameters
            assert saved[f"{kind}/layers.1.attention.{part}.weight"] == model.head_size
