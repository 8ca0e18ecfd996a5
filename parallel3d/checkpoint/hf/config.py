"""Converts config.json of a Hugging Face model to and from our `model` section.

Pure: no torch, no files. Defaults are those of transformers' configuration classes, which a
config.json may leave out. Keys without a counterpart are refused in one sentence each.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from parallel3d.checkpoint.hf.names import (
    ARCHITECTURES,
    FIXED,
    GPT2,
    HARMLESS,
    LLAMA,
    QWEN2,
    QWEN3,
    Keys,
    from_llama,
    llama_keys,
)
from parallel3d.config.fields import show
from parallel3d.config.schema import ModelConfig
from parallel3d.errors import UserError, nearest_hint

# model.activation ↔ GPT-2's activation_function. Llama has SwiGLU alone, under the name silu.
GPT2_ACTIVATIONS = {"gelu": "gelu", "gelu_tanh": "gelu_new", "relu": "relu"}
# Other names of the tanh approximation, equal up to rounding.
SPELLINGS = {"gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh", "gelu_fast": "gelu_tanh"}
# transformers' GPT2Config.attribute_map.
GPT2_ALIASES = {
    "hidden_size": "n_embd",
    "max_position_embeddings": "n_positions",
    "num_attention_heads": "n_head",
    "num_hidden_layers": "n_layer",
}
WEIGHTS_KEY = "transformers_weights"  # the file with the weights, read where the files are
EOS, POSITIONS = "eos_token_id", "max_position_embeddings"
TOKENS = ("bos_token_id", EOS, "pad_token_id")
TITLES = {LLAMA: "Llama", QWEN2: "Qwen2", QWEN3: "Qwen3", GPT2: "GPT-2"}
TORCH_NAMES = {"fp64": "float64", "fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}


def hf_kind(model: ModelConfig) -> str:
    """Returns "llama", "qwen2", "qwen3" or "gpt2". Raises UserError, with the key, if none fits."""
    position = model.position_embedding
    if position == "none":
        raise UserError(
            "model.position_embedding=none has no counterpart in Hugging Face's Llama and GPT-2 "
            "formats; models with rope (Llama) or learned (GPT-2) can be exported"
        )
    kind, by = GPT2, f"model.position_embedding={position}"
    if position == "rope" and model.qk_norm:
        kind, by = QWEN3, "model.qk_norm=true"
    elif position == "rope":
        kind = LLAMA
        if model.qkv_bias != model.out_bias:
            kind, by = QWEN2, f"model.attention_bias={model.attention_bias}"
    for key, value, allowed in _wanted(model, kind):
        if value not in allowed:
            raise UserError(
                f"model.{key}={show(value)} has no counterpart in Hugging Face's "
                f"{TITLES[kind]} format, which {by} goes to: there it must be "
                f"{' or '.join(show(a) for a in allowed)}"
            )
    if kind != GPT2 and model.head_size % 2:
        raise UserError(
            f"model.num_attention_heads={model.num_attention_heads} gives heads of "
            f"{model.head_size}: Hugging Face's {TITLES[kind]} format rotates even heads alone"
        )
    return kind


def _wanted(model: ModelConfig, kind: str) -> list[tuple[str, Any, tuple[Any, ...]]]:
    """Returns (key, value, values that the format knows) of all keys that the format fixes."""
    heads = model.num_attention_heads
    if kind == GPT2:
        return [
            ("norm", model.norm, ("layernorm",)),
            ("activation", model.activation, tuple(GPT2_ACTIVATIONS)),
            ("bias", model.bias, (True,)),
            ("attention_bias", model.attention_bias, (None, "all")),
            ("num_query_groups", model.kv_heads, (heads,)),
            ("head_dim", model.head_dim, (None, model.hidden_size // heads)),
            ("qk_norm", model.qk_norm, (False,)),
        ]
    wanted: list[tuple[str, Any, tuple[Any, ...]]] = [
        ("norm", model.norm, ("rmsnorm",)),
        ("activation", model.activation, ("swiglu",)),
        ("rotary_percent", model.rotary_percent, (1.0,)),
    ]
    if kind == LLAMA:  # transformers refuses other sizes
        return [*wanted, ("hidden_size", model.hidden_size, (_multiple(model),))]
    if kind == QWEN3:
        wanted.append(("attention_bias", model.attention_bias, (None, "none", "all")))
    return [*wanted, ("bias", model.bias, (False,))]


def _multiple(model: ModelConfig) -> int:
    heads = model.num_attention_heads
    return max(1, model.hidden_size // heads) * heads


def to_hf(model: ModelConfig, dtype: str) -> dict[str, Any]:
    """Returns config.json without tokens; `dtype` is "fp32", "bf16" …. Raises UserError."""
    kind = hf_kind(model)
    common = {
        "architectures": [ARCHITECTURES[kind]],
        "model_type": kind,
        "vocab_size": model.vocab_size,
        "initializer_range": model.init_std,
        "tie_word_embeddings": model.tie_embeddings,
        # transformers before version 5 reads torch_dtype and rope_theta, later versions dtype and
        # rope_parameters; each ignores the other's.
        "torch_dtype": TORCH_NAMES[dtype],
        "dtype": TORCH_NAMES[dtype],
        "use_cache": True,
    }
    if kind == GPT2:
        return common | {
            "n_positions": model.max_positions,
            "n_embd": model.hidden_size,
            "n_layer": model.num_layers,
            "n_head": model.num_attention_heads,
            "n_inner": model.ffn_size,
            "activation_function": GPT2_ACTIVATIONS[model.activation],
            "layer_norm_epsilon": model.norm_eps,
            "resid_pdrop": model.dropout,
            "embd_pdrop": model.dropout,
            "attn_pdrop": model.dropout,
        }
    return common | llama_keys(model, kind)


def kept_keys(config: Mapping[str, Any]) -> dict[str, Any]:
    """Returns special tokens and RoPE's positions, which an export writes again."""
    kept = {key: config[key] for key in TOKENS if key in config}
    for key, value in kept.items():
        numbers = value if key == EOS and isinstance(value, list) else [value]
        if any(type(n) is not int for n in numbers if n is not None):
            raise UserError(f"config.json has {key}={show(value)}: it must be a whole number")
    if POSITIONS in config and config.get("model_type") != GPT2:
        kept[POSITIONS] = Keys(config).get(POSITIONS, 0, int)
    return kept


def from_hf(config: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    """Returns format and `model` section. Raises UserError for an unknown or unsupported key."""
    kind = config.get("model_type")
    if kind not in ARCHITECTURES:
        hint = nearest_hint(str(kind), ARCHITECTURES)
        raise UserError(
            f"config.json has model_type={show(kind)}: it must be one of "
            f"{', '.join(ARCHITECTURES)}{hint}"
        )
    keys = Keys(config, aliases=GPT2_ALIASES if kind == GPT2 else None)
    for key, allowed in FIXED.items():
        keys.require(key, allowed, allowed[0])
    found = _from_gpt2(keys) if kind == GPT2 else from_llama(keys, kind)
    keys.finish(HARMLESS | {"model_type", WEIGHTS_KEY})
    return kind, found


def _from_gpt2(keys: Keys) -> dict[str, Any]:
    activations = (*GPT2_ACTIVATIONS, *SPELLINGS)
    activation = keys.require("activation_function", activations, "gelu_new")
    keys.require("scale_attn_weights", (True,), True)
    keys.require("scale_attn_by_inverse_layer_idx", (False,), False)
    hidden, positions = keys.get("n_embd", 768, int), keys.get("n_positions", 1024, int)
    return {
        "name": "hf_gpt2",
        "num_layers": keys.get("n_layer", 12, int),
        "hidden_size": hidden,
        "num_attention_heads": keys.get("n_head", 12, int),
        "ffn_hidden_size": keys.get("n_inner", 4 * hidden, int, null=4 * hidden),
        "seq_length": positions,
        "max_position_embeddings": positions,
        "vocab_size": keys.get("vocab_size", 50257, int),
        "norm": "layernorm",
        "norm_eps": float(keys.get("layer_norm_epsilon", 1e-5, float)),
        "position_embedding": "learned",
        "activation": SPELLINGS.get(activation, activation),
        "bias": True,
        "tie_embeddings": keys.get("tie_word_embeddings", True, bool),
        "init_std": float(keys.get("initializer_range", 0.02, float)),
    }
