"""Makes folders like transformers, for tests of `checkpoint import` and `export`."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

os.environ["HF_HUB_OFFLINE"] = "1"  # set before transformers is imported: tests use no network
import transformers

from parallel3d.checkpoint.hf.folder import read_hf_config, tensors_of
from parallel3d.commands.checkpoint import proof
from parallel3d.commands.generate import state_of
from parallel3d.context_parallel.documents import Documents
from parallel3d.models.keys import ModelConfig
from parallel3d.models.layer_inputs import LayerInputs
from parallel3d.models.transformer import Stage
from parallel3d.parameters.state import spec_of

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
# Every fourth layer attends; a key head serves two value heads.
DELTA = {
    "num_hidden_layers": 4,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 12,
    # In fp32, the norm of a head's small output multiplies its rounding by up to eps^-½.
    "rms_norm_eps": 0.5,
    "attention_bias": True,
    **GROUPED,
}
_SHARED = {
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 20,
    "shared_expert_intermediate_size": 28,
}
# Small models, one of each family with experts.
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
    "qwen3_next": {
        "head_dim": 16,
        "mlp_only_layers": [1],
        "layer_types": ["linear_attention", "full_attention"] * 2,
        **_SHARED,
        **DELTA,
    },
    "qwen3_5_moe_text": {"head_dim": 16, **_SHARED, **DELTA},
}

_LAYERS = {"num_hidden_layers": 8, "sliding_window": 7}  # two periods of four layers
YARN = {
    **{"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 8},
    # With these values, the ramp begins and ends between pairs of the small heads.
    **{"beta_fast": 1.0, "beta_slow": 0.05},
}
# Gates and ups stop at this limit; windows and full layers, the ramp of YaRN between pairs.
EXPERTS["gpt_oss"] = {
    **{"num_local_experts": 6, "num_experts_per_tok": 3, "swiglu_limit": 0.2},
    **{"head_dim": 12, "num_hidden_layers": 4, "sliding_window": 7},
    "rope_parameters": {"rope_theta": 1e4, "truncate": False, **YARN},
    **GROUPED,
}

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
LONGROPE = {
    "rope_type": "longrope",
    "short_factor": [1.0, 1.25, 1.5],
    "long_factor": [1.0, 2.0, 4.0],
}


def phi3_longrope(original: int, share: float = 0.75) -> dict[str, Any]:
    """Returns keys of a Phi-3 that was first trained with `original` tokens."""
    rope = {"rope_theta": 1e4, "partial_rotary_factor": share, **LONGROPE}
    return {"rope_parameters": rope, "original_max_position_embeddings": original, **GROUPED}


_GEMMA = {"head_dim": 12, "query_pre_attn_scalar": 20, **GROUPED}
# Small models of dense families, with at least two periods of their layers: model_type first.
DIALECTS: dict[str, tuple[str, dict[str, Any]]] = {
    "mistral": ("mistral", {"sliding_window": None, "head_dim": 12, **GROUPED}),
    "mistral_window": ("mistral", {"sliding_window": 7, **GROUPED}),
    "ministral3": (
        "ministral3",
        {
            "head_dim": 12,
            "rope_parameters": {
                **{"rope_theta": 1e4, "mscale": 1.0, "mscale_all_dim": 1.0, **YARN},
                "llama_4_scaling_beta": 0.3,
            },
            **GROUPED,
        },
    ),
    "smollm3": ("smollm3", {"num_hidden_layers": 8, **GROUPED}),
    "smollm3_window": ("smollm3", {"use_sliding_window": True, **_LAYERS, **GROUPED}),
    "phi3_window": ("phi3", {"sliding_window": 7, **GROUPED}),
    "phi3_longrope": ("phi3", phi3_longrope(8)),
    "phi3_short": (
        "phi3",
        phi3_longrope(64)
        | {"rope_parameters": phi3_longrope(64)["rope_parameters"] | {"factor": 4.0}},
    ),
    "granite": (
        "granite",
        {
            "embedding_multiplier": 3.0,
            "residual_multiplier": 0.25,
            "attention_multiplier": 0.2,
            "logits_scaling": 0.5,
            **GROUPED,
        },
    ),
    "glm4": ("glm4", {"head_dim": 16, **GROUPED}),
    "seed_oss": (
        "seed_oss",
        {"head_dim": 12, "attention_out_bias": True, **GROUPED}
        | {"attention_dropout": 0.0, "residual_dropout": 0.0},
    ),
    "olmo2": ("olmo2", GROUPED),
    "olmo3": ("olmo3", {"rope_theta": 3e5, "rope_scaling": YARN, **_LAYERS, **GROUPED}),
    "exaone4": (
        "exaone4",
        {"rope_parameters": {"rope_theta": 1e4, **LLAMA3}, **_LAYERS, **GROUPED},
    ),
    "exaone4_full": (
        "exaone4",
        {"sliding_window": None, "layer_types": ["full_attention"] * 2, **GROUPED},
    ),
    "gemma2": (
        "gemma2",
        {"attn_logit_softcapping": 0.5, "final_logit_softcapping": 3.0, **_GEMMA, **_LAYERS},
    ),
    "gemma3_text": (
        "gemma3_text",
        {
            "num_hidden_layers": 12,
            "sliding_window": 7,
            "rope_scaling": {"rope_type": "linear", "factor": 8.0},
            **_GEMMA,
        },
    ),
    "llama_yarn_geglu": (
        "llama",
        {
            "hidden_act": "gelu_pytorch_tanh",
            "rope_parameters": {"rope_theta": 1e4, "truncate": False, **YARN},
            **GROUPED,
        },
    ),
    "qwen2_window": (
        "qwen2",
        {"use_sliding_window": True, "max_window_layers": 1, **_LAYERS, **GROUPED},
    ),
    "qwen3_types": (
        "qwen3",
        {
            "use_sliding_window": True,
            "head_dim": 12,
            "layer_types": ["sliding_attention", "full_attention"] * 4,
            **_LAYERS,
            **GROUPED,
        },
    ),
    "qwen3_5": ("qwen3_5_text", {"head_dim": 16, **DELTA}),
    "olmo_hybrid": ("olmo_hybrid", DELTA),
    "olmo_hybrid_nope": (
        "olmo_hybrid",
        DELTA
        | {"rope_parameters": {"rope_theta": None, "rope_type": "default"}}
        | {"linear_allow_neg_eigval": False, "attention_bias": False},
    ),
    "dots1_window": ("dots1", _DEEPSEEK | _LAYERS | {"max_window_layers": 4}),
}


def save_model(folder: Path, kind: str, **config: Any) -> torch.nn.Module:
    """Saves a model of that kind, with `config` over `SIZES`; every tensor is random, even norms
    and biases, routers' biases included."""
    made = transformers.AutoConfig.for_model(kind, **SIZES | config)
    torch.manual_seed(5)
    model = transformers.AutoModelForCausalLM.from_config(made)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
        for name, parameter in model.named_parameters():
            if name.endswith(
                "dt_bias"
            ):  # slower decays, or hardly a gradient passes through states
                parameter.sub_(2.0)
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.add_(0.3 * torch.randn_like(buffer))
    model.save_pretrained(folder)
    return model


def logits_of(
    stage: Stage, model: ModelConfig, tokens: Tensor, documents: Documents | None = None
) -> Tensor:
    """Returns logits (b, s, vocab_size) with gradients, unlike the proof of an import."""
    assert stage.embedding is not None and stage.head is not None
    x = stage.embedding(tokens, LayerInputs())
    inputs = stage.with_positions(LayerInputs(documents=documents), *tokens.shape)
    for block in stage.layers.values():
        x = block(x, inputs)
    return stage.head.logits(x)[..., : model.vocab_size]


def compare_gradients(stage: Stage, theirs: torch.nn.Module, folder: Path) -> set[str]:
    """Compares the gradients of two models tensor by tensor; returns the names of ours.

    Theirs are saved like weights in `folder`, and read by our names.
    """
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.copy_(parameter.grad)
    theirs.save_pretrained(folder)
    _, expected = read(folder)
    compared = set()
    for parameter in stage.parameters():
        assert parameter.grad is not None
        for piece in spec_of(parameter).shards:
            mine, other = piece.of_local(parameter.grad), piece.of_full(expected[piece.name])
            worst = float((mine - other).abs().max())
            assert worst <= 1e-4 * float(other.abs().max()), piece.name
            compared.add(piece.name)
    return compared


def read(folder: Path) -> tuple[ModelConfig, dict[str, Tensor]]:
    """Returns our model of a Hugging Face folder, and its tensors."""
    found = read_hf_config(folder)
    model = replace(ModelConfig(), **found.keys)
    stored = {"mtp": found.mtp, "quantization": found.quantization}
    return model, dict(tensors_of(folder, model, found.kind, **stored))


def filled(model: ModelConfig, weights: Mapping[str, Tensor]) -> Stage:
    """Returns the whole model on one rank with these weights."""
    stage = proof.blank_model(model)
    fill(stage, weights)
    return stage


def fill(stage: Stage, weights: Mapping[str, Tensor]) -> None:
    """Fills a stage with full tensors by name; it must hold all of them."""
    held = set()
    for kind_and_name, tensor in state_of(stage).items():
        name = kind_and_name.partition("/")[2]
        for chunk, values in tensor.chunks:
            values.copy_(chunk.of(weights[name]))
        held.add(name)
    assert held == weights.keys()
