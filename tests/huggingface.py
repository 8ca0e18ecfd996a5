"""Makes folders like those of transformers, for tests of `checkpoint import` and `export`."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

os.environ["HF_HUB_OFFLINE"] = "1"  # set before transformers is imported: tests use no network
import transformers

from parallel3d.commands.generate import state_of
from parallel3d.models.transformer import Stage

SIZES = {
    "vocab_size": 61,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "initializer_range": 0.2,
}
GROUPED = {"num_key_value_heads": 2, "intermediate_size": 44}
_DEEPSEEK = {
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 20,
    "n_shared_experts": 2,
    "routed_scaling_factor": 2.5,
    "norm_topk_prob": True,
    "first_k_dense_replace": 1,
    **GROUPED,
}
# Small models of each family with experts.
EXPERTS: dict[str, dict[str, Any]] = {
    "qwen3_moe": {
        "num_experts": 6,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 20,
        "mlp_only_layers": [0],
        "norm_topk_prob": True,
        "head_dim": 12,
        **GROUPED,
    },
    "mixtral": {"num_local_experts": 6, **GROUPED},
    "olmoe": {"num_experts": 8, "num_experts_per_tok": 3, **GROUPED},
    "qwen2_moe": {
        "num_experts": 6,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 20,
        "shared_expert_intermediate_size": 28,
        "decoder_sparse_step": 2,
        **GROUPED,
    },
    "dots1": _DEEPSEEK,
    "glm4_moe": {
        "attention_bias": True,
        "head_dim": 16,
        "n_group": 4,
        "topk_group": 2,
        **_DEEPSEEK,
    },
    "minimax_m2": {
        "num_local_experts": 6,
        "num_experts_per_tok": 2,
        "head_dim": 12,
        "rotary_dim": 6,
        **GROUPED,
    },
}


def save_model(folder: Path, kind: str, **config: Any) -> torch.nn.Module:
    """Saves a model of that kind, with `config` over `SIZES`; every tensor is random, also norms
    and biases, those of routers included."""
    made = transformers.AutoConfig.for_model(kind, **SIZES | config)
    torch.manual_seed(5)
    model = transformers.AutoModelForCausalLM.from_config(made)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.add_(0.3 * torch.randn_like(buffer))
    model.save_pretrained(folder)
    return model


def fill(stage: Stage, weights: Mapping[str, Tensor]) -> None:
    """Fills a stage with full tensors by name; it must hold all of them."""
    held = set()
    for kind_and_name, tensor in state_of(stage).items():
        name = kind_and_name.partition("/")[2]
        for chunk, values in tensor.chunks:
            values.copy_(chunk.of(weights[name]))
        held.add(name)
    assert held == weights.keys()
