"""config.json of the Llama family: Llama, Qwen2 and Qwen3 differ in biases, norms of heads and
defaults. Pure, as `config.py`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from parallel3d.checkpoint.hf.keys import reader, require
from parallel3d.checkpoint.hf.names import LLAMA, QWEN2, QWEN3
from parallel3d.config.schema import ModelConfig
from parallel3d.errors import UserError

# What a rope_type=llama3 says beside its base, and our key for it.
SCALING = {
    "factor": "rope_scaling_factor",
    "low_freq_factor": "rope_low_freq_factor",
    "high_freq_factor": "rope_high_freq_factor",
    "original_max_position_embeddings": "rope_original_length",
}


@dataclass(frozen=True)
class _Defaults:
    """Those of transformers' configuration classes that differ; a config.json may leave them out.

    `kv_heads` and `head_dim` None: by the other sizes.
    """

    ffn: int
    positions: int
    vocab: int
    kv_heads: int | None = None
    head_dim: int | None = None


_QWEN = (22016, 32768, 151936, 32)
DEFAULTS = {
    LLAMA: _Defaults(11008, 2048, 32000),
    QWEN2: _Defaults(*_QWEN),
    QWEN3: _Defaults(*_QWEN, head_dim=128),
}


def llama_keys(model: ModelConfig, kind: str) -> dict[str, Any]:
    """The keys of config.json that are this family's own."""
    rope: dict[str, Any] = {"rope_type": "default"}
    if model.rope_scaling_factor > 1:
        scaling = {theirs: getattr(model, ours) for theirs, ours in SCALING.items()}
        rope = {"rope_type": "llama3"} | scaling
    keys = {
        "hidden_size": model.hidden_size,
        "intermediate_size": model.ffn_size,
        "num_hidden_layers": model.num_layers,
        "num_attention_heads": model.num_attention_heads,
        "num_key_value_heads": model.kv_heads,
        "hidden_act": "silu",
        "max_position_embeddings": model.seq_length,
        "rms_norm_eps": model.norm_eps,
        "rope_theta": model.rotary_base,
        "rope_parameters": {"rope_theta": model.rotary_base} | rope,
        "attention_dropout": model.dropout,
    }
    if rope["rope_type"] != "default":  # as transformers before version 5 reads it
        keys["rope_scaling"] = rope
    if kind != QWEN2 or model.head_size * model.num_attention_heads != model.hidden_size:
        keys["head_dim"] = model.head_size
    if kind == LLAMA:
        return keys | {"attention_bias": model.qkv_bias, "mlp_bias": model.bias}
    keys["use_sliding_window"] = False
    return keys | {"attention_bias": model.qkv_bias} if kind == QWEN3 else keys


def from_llama(config: dict[str, Any], kind: str) -> dict[str, Any]:
    """The keys of our `model` section; raises UserError for what our model cannot express."""
    get, default = reader(config), DEFAULTS[kind]
    hidden, heads = get("hidden_size", 4096), get("num_attention_heads", 32)
    width = get("head_dim", default.head_dim or hidden // heads)
    require(
        {
            "hidden_act": (get("hidden_act", "silu"), ("silu", "swish")),
            "use_sliding_window": (kind != LLAMA and get("use_sliding_window", False), (False,)),
        }
    )
    for layer_type in get("layer_types", []):
        require({"layer_types": (layer_type, ("full_attention",))})
    return {
        "name": f"hf_{kind}",
        "num_layers": get("num_hidden_layers", 32),
        "hidden_size": hidden,
        "num_attention_heads": heads,
        "num_query_groups": get("num_key_value_heads", default.kv_heads or heads),
        "head_dim": None if hidden % heads == 0 and width == hidden // heads else width,
        "ffn_hidden_size": get("intermediate_size", default.ffn),
        "seq_length": get("max_position_embeddings", default.positions),
        "vocab_size": get("vocab_size", default.vocab),
        "norm": "rmsnorm",
        "norm_eps": float(get("rms_norm_eps", 1e-6)),
        "position_embedding": "rope",
        **_rope(config),
        "activation": "swiglu",
        **_attention(config, kind),
        "tie_embeddings": get("tie_word_embeddings", False),
        "init_std": float(get("initializer_range", 0.02)),
    }


def _attention(config: dict[str, Any], kind: str) -> dict[str, Any]:
    """Biases and norms of heads."""
    get = reader(config)
    if kind == QWEN2:
        return {"bias": False, "attention_bias": "qkv"}
    attention = get("attention_bias", False)
    mlp = kind == LLAMA and get("mlp_bias", False)
    require({"attention_bias": (attention, (False, True)), "mlp_bias": (mlp, (False, True))})
    differs = None if attention == mlp else "all" if attention else "none"
    return {"bias": mlp, "attention_bias": differs, "qk_norm": kind == QWEN3}


def _rope(config: dict[str, Any]) -> dict[str, Any]:
    """Base and scaling, in both spellings: as transformers reads them, the old one wins."""
    get = reader(config)
    rope = get("rope_scaling", None) or get("rope_parameters", {})
    if not isinstance(rope, dict):
        raise TypeError("rope_parameters is not an object")
    for key, value in rope.items():
        if isinstance(value, dict):
            raise UserError(
                f"config.json has rope_parameters of its own for {key}, which our model cannot "
                "express: all layers must have the same"
            )
    kind = rope.get("rope_type", rope.get("type", "default"))
    partial = rope.get("partial_rotary_factor", get("partial_rotary_factor", 1.0))
    require(
        {
            "rope_parameters.rope_type": (kind, ("default", "llama3")),
            "partial_rotary_factor": (partial, (1.0,)),
        }
    )
    keys: dict[str, Any] = {
        "rotary_base": float(rope.get("rope_theta") or get("rope_theta", 10000.0))
    }
    if kind == "llama3":
        missing = [theirs for theirs in SCALING if rope.get(theirs) is None]
        if missing:
            raise UserError(f"config.json has rope_type=llama3 without {missing[0]}")
        keys |= {ours: float(rope[theirs]) for theirs, ours in SCALING.items()}
        keys["rope_original_length"] = int(rope["original_max_position_embeddings"])
    return keys
