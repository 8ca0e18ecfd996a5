"""config.json of the Llama family: Llama, Qwen2 and Qwen3 differ in biases, norms of heads and
defaults. Pure, as `config.py`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from parallel3d.checkpoint.hf.keys import Keys
from parallel3d.checkpoint.hf.names import LLAMA, QWEN2, QWEN3
from parallel3d.config.schema import ModelConfig
from parallel3d.errors import UserError

# What a rope_type=llama3 says beside its base, and our key for it.
ORIGINAL = "original_max_position_embeddings"
SCALING = {
    "factor": "rope_scaling_factor",
    "low_freq_factor": "rope_low_freq_factor",
    "high_freq_factor": "rope_high_freq_factor",
    ORIGINAL: "rope_original_length",
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


def from_llama(keys: Keys, kind: str) -> dict[str, Any]:
    """The keys of our `model` section; raises UserError for what our model cannot express."""
    default = DEFAULTS[kind]
    hidden, heads = keys.get("hidden_size", 4096, int), keys.get("num_attention_heads", 32, int)
    layers = keys.get("num_hidden_layers", 32, int)
    positions = keys.get("max_position_embeddings", default.positions, int)
    width = _head_dim(keys, kind, hidden, heads)
    keys.require("hidden_act", ("silu", "swish"), "silu")
    _all_alike(keys, kind, layers)
    return {
        "name": f"hf_{kind}",
        "num_layers": layers,
        "hidden_size": hidden,
        "num_attention_heads": heads,
        "num_query_groups": keys.get(
            "num_key_value_heads", default.kv_heads or heads, int, null=heads
        ),
        "head_dim": None if hidden % heads == 0 and width == hidden // heads else width,
        "ffn_hidden_size": keys.get("intermediate_size", default.ffn, int),
        "seq_length": positions,
        "vocab_size": keys.get("vocab_size", default.vocab, int),
        "norm": "rmsnorm",
        "norm_eps": float(keys.get("rms_norm_eps", 1e-6, float)),
        "position_embedding": "rope",
        **_rope(keys, positions),
        "activation": "swiglu",
        **_attention(keys, kind),
        "tie_embeddings": keys.get("tie_word_embeddings", False, bool),
        "init_std": float(keys.get("initializer_range", 0.02, float)),
    }


def _head_dim(keys: Keys, kind: str, hidden: int, heads: int) -> int:
    """The size of a head, of which RoPE turns pairs of dimensions."""
    if kind == LLAMA and hidden % heads:
        raise UserError(
            f"config.json has hidden_size={hidden}, which is not a multiple of "
            f"num_attention_heads={heads}: transformers refuses it as well"
        )
    usual = hidden // heads
    null = {"null": usual} if kind == LLAMA else {}
    width = keys.get("head_dim", default=DEFAULTS[kind].head_dim or usual, kind=int, **null)
    if width % 2:
        raise UserError(f"config.json has heads of {width}: RoPE turns pairs of dimensions")
    return width


def _all_alike(keys: Keys, kind: str, layers: int) -> None:
    """Raises UserError unless every layer attends to all that came before."""
    keys.require("use_sliding_window", (False,), False)
    if kind == LLAMA:
        keys.require("sliding_window", (None,), None)
    else:
        keys.get("sliding_window", None, int)
    types = keys.get("layer_types", None, list)
    if types is None:
        return
    for layer_type in types:
        Keys({"layer_types": layer_type}).require("layer_types", ("full_attention",), None)
    if len(types) != layers:
        raise UserError(
            f"config.json has layer_types of {len(types)} layers and num_hidden_layers={layers}"
        )


def _attention(keys: Keys, kind: str) -> dict[str, Any]:
    """Biases and norms of heads."""
    if kind != LLAMA:
        keys.require("mlp_bias", (False,), False)
    if kind == QWEN2:
        keys.require("attention_bias", (True,), True)
        return {"bias": False, "attention_bias": "qkv"}
    attention = keys.get("attention_bias", False, bool)
    mlp = keys.get("mlp_bias", False, bool)
    differs = None if attention == mlp else "all" if attention else "none"
    return {"bias": mlp, "attention_bias": differs, "qk_norm": kind == QWEN3}


def _rope(keys: Keys, positions: int) -> dict[str, Any]:
    """Base and scaling, in both spellings, by transformers' order of what goes first:
    `rope_scaling` before `rope_parameters`, as a whole; the base in it before that at the top; but
    `original_max_position_embeddings` at the top before that in it, else all positions."""
    old = keys.get("rope_scaling", None, dict)
    new = keys.get("rope_parameters", None, dict)
    content: dict[str, Any] = old or new or {}
    for key, value in content.items():
        if isinstance(value, dict):
            raise UserError(
                f"config.json has rope_parameters of its own for {key}, which our model cannot "
                "express: all layers must have the same"
            )
    rope = Keys(content, "rope_parameters of config.json")
    old_name = rope.get("type", "default", str)
    kind = rope.require("rope_type", ("default", "llama3"), old_name)
    top = keys.get("rope_theta", 10000.0, float)
    found = {"rotary_base": float(rope.get("rope_theta", top, float))}
    for place in (rope, keys):
        place.require("partial_rotary_factor", (1.0,), 1.0)
    if kind == "llama3":
        found |= _scaling(keys, rope, positions)
    else:
        keys.get(ORIGINAL, 0, int)  # of no effect
    rope.finish()
    return found


def _scaling(keys: Keys, rope: Keys, positions: int) -> dict[str, Any]:
    """What a rope_type=llama3 says beside its base."""
    inside = rope.get(ORIGINAL, positions, int)
    values: dict[str, Any] = {ORIGINAL: keys.get(ORIGINAL, inside, int)}
    for theirs in ("factor", "low_freq_factor", "high_freq_factor"):
        if not rope.has(theirs):
            raise UserError(f"config.json has rope_type=llama3 without {theirs}")
        values[theirs] = float(rope.get(theirs, 0.0, float))
    low, high = values["low_freq_factor"], values["high_freq_factor"]
    if low >= high:
        raise UserError(
            f"config.json has rope_type=llama3 with low_freq_factor={low:g}, which must be below "
            f"high_freq_factor={high:g}"
        )
    return {ours: values[theirs] for theirs, ours in SCALING.items()}
