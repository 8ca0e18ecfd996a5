"""config.json of a Hugging Face model ↔ our `model` section; what has no counterpart is refused.

Pure: no torch, no files. Defaults are those of transformers' LlamaConfig and GPT2Config, which a
config.json may leave out. Every refusal is one sentence that names the key.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from parallel3d.checkpoint.hf.names import ARCHITECTURES, GPT2, LLAMA
from parallel3d.config.fields import show
from parallel3d.config.schema import ModelConfig
from parallel3d.errors import UserError, nearest

# model.activation ↔ GPT-2's activation_function. Llama has SwiGLU alone, which it calls silu.
GPT2_ACTIVATIONS = {"gelu": "gelu", "gelu_tanh": "gelu_new", "relu": "relu"}
# Other spellings of the tanh approximation, equal to rounding.
SPELLINGS = {"gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh", "gelu_fast": "gelu_tanh"}
TORCH_NAMES = {"fp64": "float64", "fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}


def hf_kind(model: ModelConfig) -> str:
    """The format that can express `model`, "llama" or "gpt2".

    Raises UserError, naming the key, where neither can.
    """
    position = model.position_embedding
    if position == "none":
        raise UserError(
            "model.position_embedding=none has no counterpart in Hugging Face's Llama and GPT-2 "
            "formats; models with rope (Llama) or learned (GPT-2) can be exported"
        )
    kind = LLAMA if position == "rope" else GPT2
    wanted: list[tuple[str, Any, tuple[Any, ...]]]
    if kind == LLAMA:
        wanted = [
            ("norm", model.norm, ("rmsnorm",)),
            ("activation", model.activation, ("swiglu",)),
            ("rotary_percent", model.rotary_percent, (1.0,)),
        ]
    else:
        wanted = [
            ("norm", model.norm, ("layernorm",)),
            ("activation", model.activation, tuple(GPT2_ACTIVATIONS)),
            ("bias", model.bias, (True,)),
            ("num_query_groups", model.kv_heads, (model.num_attention_heads,)),
        ]
    for key, value, allowed in wanted:
        if value not in allowed:
            raise UserError(
                f"model.{key}={show(value)} has no counterpart in Hugging Face's "
                f"{_title(kind)} format, which model.position_embedding={position} goes to: there "
                f"it must be {' or '.join(show(a) for a in allowed)}"
            )
    if kind == LLAMA and model.head_dim % 2:
        raise UserError(
            f"model.num_attention_heads={model.num_attention_heads} gives heads of "
            f"{model.head_dim}: Hugging Face's Llama format rotates even heads alone"
        )
    return kind


def to_hf(model: ModelConfig, dtype: str, end_of_text: int) -> dict[str, Any]:
    """The content of config.json; `dtype` is "fp32", "bf16" …, `end_of_text` the tokenizer's.

    Raises UserError for a model that neither format can express.
    """
    kind = hf_kind(model)
    common = {
        "architectures": [ARCHITECTURES[kind]],
        "model_type": kind,
        "vocab_size": model.vocab_size,
        "initializer_range": model.init_std,
        "tie_word_embeddings": model.tie_embeddings,
        # Documents are parted by one token: a text begins after it as well.
        "bos_token_id": end_of_text,
        "eos_token_id": end_of_text,
        # transformers before version 5 reads torch_dtype and rope_theta, from version 5 on dtype
        # and rope_parameters; each passes over the other's.
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
    return common | {
        "hidden_size": model.hidden_size,
        "intermediate_size": model.ffn_size,
        "num_hidden_layers": model.num_layers,
        "num_attention_heads": model.num_attention_heads,
        "num_key_value_heads": model.kv_heads,
        "head_dim": model.head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": model.seq_length,
        "rms_norm_eps": model.norm_eps,
        "rope_theta": model.rotary_base,
        "rope_parameters": {"rope_theta": model.rotary_base, "rope_type": "default"},
        "attention_bias": model.bias,
        "mlp_bias": model.bias,
        "attention_dropout": model.dropout,
    }


def generation_config(end_of_text: int) -> dict[str, Any]:
    """The content of generation_config.json."""
    return {"bos_token_id": end_of_text, "eos_token_id": end_of_text}


def from_hf(config: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    """The format of a config.json and the keys of our `model` section that it gives.

    Raises UserError, naming the key, for what our model cannot express.
    """
    kind = config.get("model_type")
    if kind not in ARCHITECTURES:
        close = nearest(str(kind), ARCHITECTURES)
        hint = f"; the nearest is {close}" if close else ""
        raise UserError(
            f"config.json has model_type={show(kind)}: it must be one of "
            f"{', '.join(ARCHITECTURES)}{hint}"
        )
    if config.get("quantization_config"):
        raise UserError(
            "config.json has a quantization_config: weights must be floating-point numbers; "
            "export the model without quantization"
        )
    return kind, _from_llama(config) if kind == LLAMA else _from_gpt2(config)


def _from_llama(config: dict[str, Any]) -> dict[str, Any]:
    get = _reader(config)
    hidden, heads = get("hidden_size", 4096), get("num_attention_heads", 32)
    attention_bias = get("attention_bias", False)
    rope = {**(get("rope_scaling", {}) or {}), **(get("rope_parameters", {}) or {})}
    must = {
        "hidden_act": (get("hidden_act", "silu"), ("silu", "swish")),
        "head_dim": (get("head_dim", hidden // heads), (hidden // heads,)),
        "mlp_bias": (get("mlp_bias", False), (attention_bias,)),
        "rope_parameters.rope_type": (
            rope.get("rope_type", rope.get("type", "default")),
            ("default",),
        ),
        "partial_rotary_factor": (
            rope.get("partial_rotary_factor", get("partial_rotary_factor", 1.0)),
            (1.0,),
        ),
    }
    _require(must)
    return {
        "name": "hf_llama",
        "num_layers": get("num_hidden_layers", 32),
        "hidden_size": hidden,
        "num_attention_heads": heads,
        "num_query_groups": get("num_key_value_heads", heads),
        "ffn_hidden_size": get("intermediate_size", 11008),
        "seq_length": get("max_position_embeddings", 2048),
        "vocab_size": get("vocab_size", 32000),
        "norm": "rmsnorm",
        "norm_eps": float(get("rms_norm_eps", 1e-6)),
        "position_embedding": "rope",
        "rotary_base": float(rope.get("rope_theta", get("rope_theta", 10000.0))),
        "activation": "swiglu",
        "bias": attention_bias,
        "tie_embeddings": get("tie_word_embeddings", False),
        "init_std": float(get("initializer_range", 0.02)),
    }


def _from_gpt2(config: dict[str, Any]) -> dict[str, Any]:
    get = _reader(config)
    activation = get("activation_function", "gelu_new")
    must = {
        "activation_function": (activation, (*GPT2_ACTIVATIONS, *SPELLINGS)),
        "scale_attn_weights": (get("scale_attn_weights", True), (True,)),
        "scale_attn_by_inverse_layer_idx": (
            get("scale_attn_by_inverse_layer_idx", False),
            (False,),
        ),
        "add_cross_attention": (get("add_cross_attention", False), (False,)),
    }
    _require(must)
    hidden, positions = get("n_embd", 768), get("n_positions", 1024)
    return {
        "name": "hf_gpt2",
        "num_layers": get("n_layer", 12),
        "hidden_size": hidden,
        "num_attention_heads": get("n_head", 12),
        "ffn_hidden_size": get("n_inner", None) or 4 * hidden,
        "seq_length": positions,
        "max_position_embeddings": positions,
        "vocab_size": get("vocab_size", 50257),
        "norm": "layernorm",
        "norm_eps": float(get("layer_norm_epsilon", 1e-5)),
        "position_embedding": "learned",
        "activation": SPELLINGS.get(activation, activation),
        "bias": True,
        "tie_embeddings": get("tie_word_embeddings", True),
        "init_std": float(get("initializer_range", 0.02)),
    }


def _reader(config: dict[str, Any]) -> Callable[[str, Any], Any]:
    """Reads a key; null and a missing key both stand for transformers' default."""

    def get(key: str, default: Any) -> Any:
        value = config.get(key)
        return default if value is None else value

    return get


def _require(must: dict[str, tuple[Any, tuple[Any, ...]]]) -> None:
    for key, (value, allowed) in must.items():
        if value not in allowed:
            choices = " or ".join(show(choice) for choice in allowed)
            raise UserError(
                f"config.json has {key}={show(value)}, which our model cannot express: it must "
                f"be {choices}"
            )


def _title(kind: str) -> str:
    return "Llama" if kind == LLAMA else "GPT-2"
