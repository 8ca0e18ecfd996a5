"""Compares the planner's figures for parallel3d's own code with arithmetic, and with dry runs."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.planner.longest import WAYS, row
from benchmarks.planner.plan_dryrun import NAMES, CaseSampler, configured, off
from parallel3d import versions
from parallel3d.blueprint.keys import ClusterConfig
from parallel3d.blueprint.parameters import parameter_count
from parallel3d.blueprint.rank import PipelineRank
from parallel3d.estimate.fitted_cost import load, load_own, step
from parallel3d.estimate.layer_memory import LayerMemories
from parallel3d.estimate.memory import peak_memory, peak_stage
from parallel3d.estimate.search import card_of, layouts, planned, sizes_of, works
from parallel3d.topology.assumptions import preset
from tests.e2e.ready import run_module

ROOT = Path(__file__).parents[3]
ONE = {"model": "llama_1b", "dp": 1, "micro_batch_size": 8, "global_batch_size": 8}
PIPELINE = {"model": "llama3_8b", "pp": 4, "dp": 1, "micro_batch_size": 1, "global_batch_size": 16}

# One of each kind: dtypes of moments, tp with and without sp, schedules, stages of zero, recompute,
# context parallelism, offloaded layers, and the ends of FSDP2's backward (a tied table on one rank,
# gradients of several micro-batches).
PLAYED = (
    {"model": "gpt2_124m", "layers": 2, "tp": 2, "sp": True, "dp": 1, "micro_batch_size": 2,
     "global_batch_size": 4, "recompute": "full", "cp": 2, "state": "bf16", "ema_decay": 0.9},
    {"model": "qwen3_8b", "layers": 4, "pp": 4, "dp": 2, "zero": 1, "schedule": "zb_h1", "tp": 2,
     "sp": True, "micro_batch_size": 1, "global_batch_size": 10, "rank": 8, "cp": 2,
     "recompute": "[norm,mlp]", "state": "bf16"},
    {"model": "llama3_8b", "layers": 4, "pp": 2, "vpp": 2, "dp": 1, "schedule": "zbv",
     "cp": 8, "style": "heads", "seq_length": 65536, "micro_batch_size": 1,
     "global_batch_size": 4, "rank": 8},
    {"model": "llama3_8b", "layers": 4, "pp": 2, "vpp": 2, "dp": 2, "zero": 2, "tp": 2,
     "schedule": "interleaved_zb", "recompute": "full", "micro_batch_size": 2,
     "global_batch_size": 16, "rank": 4},
    {"model": "gpt2_124m", "layers": 4, "pp": 2, "vpp": 2, "dp": 2, "zero": 3, "schedule": "zbv",
     "recompute": "[norm,attention,mlp]", "micro_batch_size": 1, "global_batch_size": 8},
    {"model": "gpt3_175b", "layers": 4, "tp": 2, "sp": True, "pp": 2, "dp": 1, "cp": 2,
     "style": "ring", "micro_batch_size": 1, "global_batch_size": 2, "rank": 4},
    {"model": "llama3_8b", "layers": 12, "pp": 4, "dp": 1, "micro_batch_size": 1,
     "global_batch_size": 8, "offload_layers": [3]},
    {"model": "gpt2_124m", "layers": 2, "dp": 8, "cp": 4, "style": "ring", "zero": 3,
     "recompute": "full", "micro_batch_size": 1, "global_batch_size": 8},
    {"model": "llama_1b", "layers": 4, "pp": 2, "dp": 8, "zero": 3, "every": False,
     "recompute": "full", "micro_batch_size": 1, "global_batch_size": 48},
)  # fmt: skip

# The same kinds in other combinations, which rarely show more.
FURTHER = (
    {"model": "llama3_70b", "layers": 8, "pp": 2, "vpp": 2, "dp": 1, "schedule": "interleaved",
     "tp": 8, "sp": True, "micro_batch_size": 1, "global_batch_size": 4, "cp": 4, "style": "ring",
     "recompute": "[norm,activation,attention]"},
    {"model": "llama3_8b", "layers": 4, "dp": 8, "zero": 3, "micro_batch_size": 1,
     "global_batch_size": 16, "state": "bf16"},
    {"model": "gpt3_175b", "layers": 2, "tp": 4, "dp": 8, "zero": 2, "micro_batch_size": 1,
     "global_batch_size": 16},
    {"model": "qwen3_8b", "layers": 2, "tp": 2, "dp": 4, "zero": 1, "state": "bf16", "rank": 2,
     "micro_batch_size": 1, "global_batch_size": 4},
    {"model": "llama_1b", "layers": 8, "pp": 2, "vpp": 2, "dp": 4, "zero": 2, "schedule": "zbv",
     "micro_batch_size": 1, "global_batch_size": 8},
    {"model": "gpt2_124m", "layers": 8, "tp": 4, "sp": True, "pp": 4, "dp": 8, "cp": 2, "zero": 2,
     "recompute": "[norm,activation]", "micro_batch_size": 1, "global_batch_size": 32},
    {"model": "llama_1b", "layers": 2, "tp": 4, "dp": 1, "cp": 4, "style": "heads",
     "recompute": "full", "micro_batch_size": 2, "global_batch_size": 4},
    {"model": "qwen2_5_0_5b", "layers": 4, "tp": 2, "pp": 2, "dp": 4, "cp": 2, "sp": True,
     "zero": 2, "micro_batch_size": 1, "global_batch_size": 8},
    {"model": "qwen2_5_0_5b", "layers": 8, "pp": 2, "dp": 8, "zero": 2, "every": True,
     "recompute": "full", "micro_batch_size": 1, "global_batch_size": 16},
    {"model": "qwen3_8b", "layers": 2, "dp": 1, "cp": 2, "zero": 3, "recompute": "[mlp]",
     "micro_batch_size": 2, "global_batch_size": 2},
)  # fmt: skip


MIXTURE = {"num_experts": 16, "experts_per_token": 4, "expert_ffn_size": 768, "vocab_size": 8192}
SIGMOID = {"router_score": "sigmoid", "router_bias": True, "router_normalize": False}
SHARED = {"shared_expert_size": 1024, "shared_expert_gate": True}
LOSSES = {"aux_loss": 0.01, "z_loss": 0.001}
EXPERTS = (
    {"model": "qwen3_8b", "layers": 2, "dp": 1, "micro_batch_size": 2, "global_batch_size": 2,
     "experts": MIXTURE | SHARED, "moe": LOSSES, "recompute": "[norm,activation]"},
    {"model": "llama_1b", "layers": 2, "tp": 2, "sp": True, "dp": 4, "ep": 4, "zero": 1,
     "micro_batch_size": 2, "global_batch_size": 8, "experts": MIXTURE | SIGMOID,
     "moe": LOSSES | {"dispatch": "all_to_all"}, "recompute": "[mlp]", "state": "bf16"},
    {"model": "llama3_8b", "layers": 4, "cp": 2, "dp": 2, "ep": 2, "pp": 2, "schedule": "zb_h1",
     "micro_batch_size": 1, "global_batch_size": 8, "rank": 0,
     "experts": MIXTURE | SHARED | {"dense_layers": [0]}, "moe": {"dispatch": "gather"}},
    {"model": "llama_1b", "layers": 2, "tp": 4, "sp": True, "dp": 1, "ep": 2, "zero": 3,
     "micro_batch_size": 1, "global_batch_size": 2, "experts": MIXTURE | SHARED,
     "moe": {"dispatch": "all_to_all"}, "recompute": "full"},
    {"model": "llama_1b", "layers": 8, "pp": 2, "vpp": 2, "dp": 2, "ep": 2, "schedule": "zbv",
     "micro_batch_size": 1, "global_batch_size": 8, "rank": 2, "recompute": "full",
     "experts": MIXTURE | {"router_groups": 4, "router_top_groups": 2}, "moe": LOSSES},
    # FSDP2 with a dense layer before one of experts, whose gradients several ranks or one sum.
    {"model": "llama_1b", "layers": 2, "tp": 4, "sp": True, "dp": 8, "ep": 2, "zero": 3,
     "micro_batch_size": 1, "global_batch_size": 8, "every": False, "recompute": "[mlp]",
     "experts": MIXTURE | SHARED | {"num_experts": 64, "dense_layers": [0]}},
    {"model": "llama_1b", "layers": 2, "tp": 4, "sp": True, "dp": 1, "cp": 2, "ep": 8, "zero": 3,
     "style": "heads", "micro_batch_size": 2, "global_batch_size": 6, "recompute": "full",
     "experts": MIXTURE | SHARED | {"dense_layers": [0]}},
    # The recomputation ends before the last GEMM of the shared expert and its communication.
    {"model": "llama_1b", "layers": 2, "tp": 2, "sp": True, "dp": 1, "micro_batch_size": 1,
     "global_batch_size": 2, "experts": MIXTURE | {"shared_expert_size": 1024},
     "recompute": "[mlp]"},
)  # fmt: skip

# Positions of norms, with scales and a cap, which change no sizes.
SCALES = {"embedding_scale": 64.0, "residual_scale": 0.5, "attention_scale": 0.1,
          "logit_scale": 0.5, "logit_cap": 30.0}  # fmt: skip
GEMMA = {"norm_position": "both", "norm_zero_centered": True, "activation": "geglu", **SCALES}
DIALECTS = (
    {"model": "qwen3_8b", "layers": 2, "dp": 2, "zero": 1, "micro_batch_size": 1,
     "global_batch_size": 4, "recompute": "full", "dialect": GEMMA},
    {"model": "llama_1b", "layers": 4, "tp": 2, "sp": True, "pp": 2, "dp": 1,
     "micro_batch_size": 1, "global_batch_size": 4, "recompute": "[norm,mlp]", "dialect": GEMMA},
    {"model": "llama_1b", "layers": 2, "tp": 2, "sp": True, "dp": 1, "micro_batch_size": 1,
     "global_batch_size": 2, "recompute": "full", "dialect": {"norm_position": "after"}},
    # The operand of a linear layer waits for W, and is the input of the layer.
    {"model": "llama_tiny", "layers": 24, "pp": 4, "vpp": 2, "dp": 1, "schedule": "zbv", "rank": 3,
     "micro_batch_size": 2, "global_batch_size": 24, "recompute": "[norm,attention,mlp]",
     "dialect": {"hidden_size": 256, "num_attention_heads": 4, "num_query_groups": 4,
                 "ffn_hidden_size": 768, "vocab_size": 32000, "seq_length": 256,
                 "activation": "gelu", "norm_position": "after", "tie_embeddings": False}},
    {"model": "llama3_8b", "layers": 2, "dp": 1, "cp": 2, "zero": 3, "micro_batch_size": 1,
     "global_batch_size": 2, "recompute": "[norm,activation]",
     "dialect": {"norm_position": "after", "qk_norm": True, "qk_norm_width": "full"}},
    {"model": "llama3_8b", "layers": 2, "dp": 1, "cp": 2, "tp": 2, "micro_batch_size": 1,
     "global_batch_size": 2, "recompute": "[attention]",
     "dialect": {"query_temperature": 0.1, "rope_scaling": "yarn", "rope_scaling_factor": 16.0}},
    {"model": "gpt2_124m", "layers": 2, "tp": 2, "dp": 1, "micro_batch_size": 2,
     "global_batch_size": 4, "dialect": {"norm_position": "both", "residual_scale": 0.5}},
    {"model": "llama_1b", "layers": 2, "tp": 2, "sp": True, "dp": 2, "ep": 2, "zero": 1,
     "micro_batch_size": 1, "global_batch_size": 4, "recompute": "full",
     "experts": MIXTURE | SHARED, "dialect": GEMMA, "moe": {"dispatch": "all_to_all"}},
    {"model": "llama_1b", "layers": 2, "dp": 2, "ep": 2, "micro_batch_size": 1,
     "global_batch_size": 4, "recompute": "[norm,mlp]", "experts": MIXTURE, "dialect": GEMMA},
)  # fmt: skip

# Moments that only small models show: the forward of a frozen layer, the input of FSDP2's last
# reduction, experts that one rank reduces alone, and the embedding's backward.
SMALL = {"hidden_size": 512, "num_attention_heads": 16, "head_dim": 32, "num_query_groups": None,
         "ffn_hidden_size": 2048, "vocab_size": 512, "seq_length": 512}  # fmt: skip
DELTA = SMALL | {
    "layer_types": ["gated_deltanet", "gated_deltanet", "gated_deltanet", "full"],
    "attention_gate": True, "delta_key_heads": 4, "delta_value_heads": 8, "delta_key_size": 64,
}  # fmt: skip
DELTANETS = (
    {"model": "llama_tiny", "layers": 4, "tp": 2, "sp": True, "dp": 1, "micro_batch_size": 2,
     "global_batch_size": 4, "recompute": "[norm,attention]", "dialect": DELTA},
    # Two ranks share a key head.
    {"model": "llama_tiny", "layers": 4, "tp": 8, "dp": 2, "zero": 1, "micro_batch_size": 1,
     "global_batch_size": 4, "dialect": DELTA},
    {"model": "llama_tiny", "layers": 8, "pp": 2, "dp": 2, "zero": 3, "micro_batch_size": 1,
     "global_batch_size": 8, "rank": 0, "dialect": DELTA},
    {"model": "llama_tiny", "layers": 4, "cp": 2, "tp": 2, "sp": True, "dp": 1, "ep": 2,
     "micro_batch_size": 1, "global_batch_size": 2, "recompute": "full", "dialect": DELTA,
     "experts": MIXTURE | SHARED},
)  # fmt: skip
MOMENTS = (
    {"model": "llama_tiny", "layers": 1, "dp": 8, "zero": 3, "micro_batch_size": 1,
     "global_batch_size": 8, "freeze": ["embedding.*", "layers.0.*"], "dialect": SMALL},
    {"model": "llama_tiny", "layers": 2, "pp": 2, "dp": 2, "tp": 2, "zero": 3, "rank": 4,
     "micro_batch_size": 1, "global_batch_size": 8, "freeze": ["embedding.*"],
     "dialect": SMALL | {"seq_length": 256, "vocab_size": 8192, "tie_embeddings": True}},
    {"model": "llama_tiny", "layers": 1, "dp": 1, "cp": 2, "ep": 2, "zero": 2, "every": True,
     "precision": "fp32", "recompute": "selective", "micro_batch_size": 1, "global_batch_size": 4,
     "experts": MIXTURE, "dialect": SMALL},
    {"model": "llama_tiny", "layers": 8, "tp": 4, "sp": True, "pp": 2, "vpp": 2, "dp": 1,
     "schedule": "interleaved_zb", "recompute": "full", "micro_batch_size": 1,
     "global_batch_size": 2, "dialect": SMALL | {"ffn_hidden_size": 1024}},
)  # fmt: skip

# Limits in per cent by which the plan's memory may be below and above the dry run's. Its formulas
# are for FSDP2 of torch 2.13; FSDP2 of 2.11 keeps more in one layout.
OFF = {(2, 13): ("1", "12"), (2, 15): ("3", "12"), (2, 11): ("14", "12")}


@pytest.mark.nightly
@pytest.mark.parametrize(
    "cases",
    [
        pytest.param(PLAYED, id="played"),
        pytest.param(EXPERTS, id="experts"),
        pytest.param(DIALECTS, id="dialects"),
        pytest.param(MOMENTS, id="moments"),
        pytest.param(DELTANETS, id="deltanets"),
        pytest.param(FURTHER, id="more", marks=pytest.mark.more),
    ],
)
def test_dry_runs_send_the_planned_bytes_and_need_no_more_memory_than_the_bound(
    cases: tuple[dict[str, Any], ...],
) -> None:
    """Runs in a process of its own: the simulated device is enabled once and for all there."""
    off_by = OFF.get(versions.parts(torch.__version__)[:2], ("14", "12"))
    words = [word for case in cases for word in ("--case", json.dumps(case))]
    for option, value in zip(("--below", "--above"), off_by, strict=True):
        words += [option, value]
    done = run_module("benchmarks.planner.plan_dryrun", *words)
    assert done.returncode == 0, done.stdout + done.stderr
    table = done.stdout.partition("\nlowest bounds\n")[0]  # the same rows follow, some of them
    assert len(re.findall(r"^\| \w+ \| ", table, re.M)) == len(cases) + 1
    assert all(f"{name}: median" in done.stdout for name in NAMES)


@pytest.mark.slow
@pytest.mark.parametrize("style", ["gather", "heads", "ring"])
def test_a_split_sequence_needs_the_memory_of_its_part_and_of_gathered_keys(style: str) -> None:
    keys = {"model": "llama3_8b", "layers": 4, "dp": 1, "micro_batch_size": 1}
    keys |= {"global_batch_size": 1, "recompute": "full", "seq_length": 131072}
    split, part = (
        configured(keys | more) for more in ({"cp": 8, "style": style}, {"seq_length": 131072 // 8})
    )
    found, least = (peak_memory(config, 0) for config in (split, part))
    assert found.states == least.states
    # The rows of the rotary tables are kept for each micro-batch.
    assert 1 < found.activations / least.activations < 1.02
    more = found.temporary - least.temporary
    # Keys and values of a layer, of all tokens; with heads, the results of attention by heads.
    assert more == {"gather": 2 * 2 * 131072 * 1024, "heads": 2 * 16384 * 4096, "ring": 0}[style]
    zero = [peak_memory(configured(keys | {"cp": 8, "zero": z}), 0).optimizer for z in (0, 1)]
    assert zero[1] == zero[0] / 8


@pytest.mark.slow
def test_state_and_activations_by_hand() -> None:
    """Compares with docs/dryrun.md's account of Llama 1B: 18 bytes per parameter, 64.55 GB
    altogether."""
    found, count = peak_memory(configured(ONE), 0), parameter_count(configured(ONE).model)
    state = found.parameters + found.gradients + found.masters + found.optimizer
    assert state == 18 * count
    assert -3 < off(64.55e9, found.total) < 12


@pytest.mark.slow
def test_recomputation_keeps_less_and_full_least() -> None:
    less = "[layer]", "[norm,attention,mlp]", "[norm,activation]", "[norm]", "none"
    kept = []
    for parts in less:
        rank = PipelineRank(planned(configured(ONE | {"recompute": parts})), 0)
        layers = LayerMemories(rank.blueprint).of_stage(rank, rank.stages[0])
        kept.append(layers[0].kept)
    assert kept == sorted({*kept})


@pytest.mark.slow
def test_zero_divides_exactly_its_tensors() -> None:
    base = PIPELINE | {"pp": 1, "dp": 8, "global_batch_size": 16}
    none, one, three = (peak_memory(configured(base | {"zero": z}), 0) for z in (0, 1, 3))
    assert one.optimizer == pytest.approx(none.optimizer / 8)
    assert one.gradients == none.gradients
    assert three.gradients == pytest.approx(none.gradients / 8)
    assert three.parameters < none.parameters


@pytest.mark.slow
def test_the_fullest_rank_is_the_fullest_of_all() -> None:
    for schedule, vpp in (("1f1b", 1), ("interleaved", 2), ("zbv", 2)):
        config = configured(PIPELINE | {"schedule": schedule, "vpp": vpp})
        index, most = peak_stage(planned(config))
        everyone = [peak_memory(config, i).total for i in range(4)]
        assert most.total == max(everyone) == everyone[index]


def test_a_step_on_an_h100_is_priced_as_it_was_timed() -> None:
    """Compares with docs/gpu.md: llama_1b, 8 sequences of 4,096 tokens at once, 509 ms; other GPUs
    only have other rates."""
    fixed = {"micro_batch_size": 8, "recompute": "none", "zero": 0}
    seconds = []
    for gpu in ("dgx_h100", "dgx_a100"):
        keys = {"cluster": ClusterConfig(**preset("cluster", gpu))}
        config = dataclasses.replace(configured(ONE), **keys)
        choices = [*layouts(sizes_of(config), 1, 1, 8, fixed)]
        work, card = works(choices, sizes_of(config), 8), card_of(config)[0]
        seconds.append([float(step(work, c).total[0]) for c in (load(), load_own(card))])
    (others, own), unknown = seconds
    assert own == pytest.approx(0.509, rel=0.05) and others > 0.6
    assert unknown[0] == unknown[1]


def test_equal_seeds_sample_equal_cases_and_errors_have_a_sign() -> None:
    first, again = iter(CaseSampler(3)), iter(CaseSampler(3))
    assert [next(first) for _ in range(3)] == [next(again) for _ in range(3)]
    assert off(100.0, 103.0) == pytest.approx(3) and off(100.0, 97.0) == pytest.approx(-3)
    assert off(0.0, 0.0) == 0 and off(0.0, 1.0) == float("inf")


@pytest.mark.more
def test_the_longest_sequences_of_the_page() -> None:
    page = (ROOT / "docs" / "long_context.md").read_text(encoding="utf-8")
    base = {"model": "llama3_8b", "tp": 8, "sp": True, "dp": 1, "micro_batch_size": 1}
    for way in (WAYS[4], WAYS[-1]):
        line = row(base | way | {"global_batch_size": 4}, 81.5e9, plays=False)
        assert f"` | {line} |\n" in page


@pytest.mark.slow
def test_a_wrong_formula_is_detected() -> None:
    """Tests that the comparison can fail, as it does for a layer that keeps nothing."""
    config = configured(PIPELINE)
    layers = dataclasses.replace(config, model=dataclasses.replace(config.model, num_layers=28))
    assert abs(off(peak_memory(config, 0).total, peak_memory(layers, 0).total)) > 3
