"""Compares dry runs of mixtures of experts with runs on simulated devices."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from tests.e2e.ready import run_module

MODEL = {
    "num_layers": 2, "hidden_size": 64, "num_attention_heads": 4, "num_query_groups": 2,
    "ffn_hidden_size": 96, "seq_length": 128, "vocab_size": 250, "norm": "rmsnorm",
    "position_embedding": "rope", "activation": "swiglu", "bias": False, "tie_embeddings": False,
    "num_experts": 8, "experts_per_token": 2, "expert_ffn_size": 48,
}  # fmt: skip
GATED = {"shared_expert_size": 32, "shared_expert_gate": True, "dense_layers": [0]}
BIASES = {"router_score": "sigmoid", "router_bias": True, "router_groups": 4}
# Tokens sent and gathered, experts in one kernel and one by one, deferred weight gradients, and
# twelve micro-batches, whose messages in flight are memory too.
DRAWS: tuple[dict[str, Any], ...] = (
    {"dp": 2, "ep": 2, "zero": 1, "micro_batch_size": 2, "global_batch_size": 8,
     "recompute": "[mlp]", "moe": {"dispatch": "all_to_all", "aux_loss": 0.01},
     "model": MODEL | GATED},
    {"tp": 2, "sp": True, "dp": 1, "ep": 2, "micro_batch_size": 1, "global_batch_size": 2,
     "moe": {"dispatch": "gather", "z_loss": 0.001},
     "model": MODEL | BIASES | {"router_top_groups": 2}},
    {"pp": 2, "dp": 1, "schedule": "zb_h1", "precision": "fp32", "micro_batch_size": 2,
     "global_batch_size": 24, "model": MODEL | GATED},
    # The first stage has a dense layer alone, and each expert is on one rank of the second one.
    {"pp": 2, "dp": 2, "ep": 2, "zero": 3, "micro_batch_size": 1, "global_batch_size": 4,
     "model": MODEL | GATED},
)  # fmt: skip


def compared(*words: str) -> str:
    """Runs the comparison in a process of its own: the simulated device is enabled once and for all
    there."""
    done = run_module("benchmarks.planner.experts_dryrun", *words)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.nightly
def test_dry_runs_have_the_launches_bytes_and_memory_of_runs() -> None:
    said = compared(*(word for draw in DRAWS for word in ("--draw", json.dumps(draw))))
    assert "4 draws, 6 dry runs: 6 equal in launches and bytes" in said
    # The messages of a long pipeline are in the peak: a rank's error is a fraction of one.
    errors = [float(e) for e in re.findall(r"^\| 2 \| \d \| (\S+) \|", said, re.M)]
    assert len(errors) == 2 and max(map(abs, errors)) < 1


@pytest.mark.more
@pytest.mark.nightly
def test_dry_runs_of_random_mixtures_are_like_runs() -> None:
    said = compared("--count", "6", "--seed", "7")
    assert said.count("| yes |") >= 6
