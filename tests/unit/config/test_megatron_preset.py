"""Tests that `experiment=megatron_345m` equals the launch after which it is named, flag by flag."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import Any

import pytest

import parallel3d
from parallel3d.checkpoint.identity import flat
from parallel3d.config.fields import other_names

# The values of NVIDIA/Megatron-LM's examples/pretrain_gpt_distributed_with_mp.sh (commit 090e141).
# Flags with the same meaning on both sides are listed under the flag, the others below under their
# key.
FLAGS = {
    "--tensor-model-parallel-size": 2,
    "--pipeline-model-parallel-size": 2,
    "--num-layers": 24,
    "--hidden-size": 1024,
    "--num-attention-heads": 16,
    "--micro-batch-size": 4,
    "--global-batch-size": 16,
    "--seq-length": 1024,
    "--max-position-embeddings": 1024,
    "--train-iters": 500000,
    "--lr-decay-iters": 320000,
    "--lr": 0.00015,
    "--lr-decay-style": "cosine",
    "--min-lr": 1.0e-5,
    "--weight-decay": 1e-2,
    "--clip-grad": 1.0,
    "--lr-warmup-fraction": 0.01,
    "--log-interval": 100,
    "--save-interval": 10000,
    "--eval-interval": 1000,
    "--eval-iters": 10,
}
OTHERWISE = {
    "recompute": "full",  # --checkpoint-activations
    "data.valid_fraction": 50 / (949 + 50 + 1),  # --split 949,50,1
    "precision.name": "fp16",  # --fp16
    "precision.lm_cross_entropy": "fp16",  # --fp16-lm-cross-entropy
    "model.vocab_size": 50257,  # --vocab-file of GPT-2
}
# Values that the launch leaves to the defaults of that code (megatron/arguments.py of the commit).
DEFAULTS = {
    "--ffn-hidden-size": 4096,  # four times the hidden size
    "--kv-channels": None,  # hidden size / heads
    "--make-vocab-size-divisible-by": 128,
    "--hidden-dropout": 0.1,
    "--init-method-std": 0.02,
    "--norm-epsilon": 1e-5,
    "--adam-beta1": 0.9,
    "--adam-beta2": 0.999,
    "--adam-eps": 1e-8,
    "--seed": 1234,
    "--min-loss-scale": 1.0,
    "--loss-scale-window": 1000,
    "--hysteresis": 2,
}


@pytest.fixture(scope="module")
def values() -> dict[str, Any]:
    config = parallel3d.compose("experiment=megatron_345m", world_size=4)
    return flat(dataclasses.asdict(config))


@pytest.mark.parametrize("flag", FLAGS | DEFAULTS)
def test_a_flag_has_its_value(flag: str, values: dict[str, Any]) -> None:
    (name,) = [name for name, row in other_names().items() if row.flags == (flag,)]
    assert values[name] == (FLAGS | DEFAULTS)[flag]


def test_differently_spelled_flags_and_the_shape_of_a_gpt(values: dict[str, Any]) -> None:
    shape = {
        "model.position_embedding": "learned",
        "model.norm": "layernorm",
        "model.activation": "gelu_tanh",  # the GELU of its fused bias and GELU kernel
        "model.bias": True,
        "model.tie_embeddings": True,
        "model.num_query_groups": 16,
        "optim.name": "adamw",
        "dp": 1,
    }
    wanted = OTHERWISE | shape
    assert {name: values[name] for name in wanted} == wanted


@pytest.mark.slow
def test_the_line_with_sequence_parallel_changes_only_sp_and_recompute(
    values: dict[str, Any],
) -> None:
    page = (Path(__file__).parents[3] / "docs" / "megatron_345m.md").read_text("utf-8")
    words = re.search(r"^parallel3d train (experiment=\S+ sp=true \S+) +#", page, re.M)[1].split()
    other = flat(dataclasses.asdict(parallel3d.compose(*words, world_size=4)))
    changed = {name: other[name] for name in values if other[name] != values[name]}
    assert changed == {"sp": True, "recompute": "none"}
