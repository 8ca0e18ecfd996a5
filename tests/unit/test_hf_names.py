"""Hugging Face's names and config.json against ours, without torch or transformers."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from parallel3d.checkpoint.hf.config import from_hf, hf_kind, to_hf
from parallel3d.checkpoint.hf.names import hf_tensors, logical_shapes
from parallel3d.config.schema import ModelConfig
from parallel3d.errors import UserError

GPT = ModelConfig(num_layers=2, hidden_size=32, num_attention_heads=4, seq_length=16, vocab_size=61)
LLAMA = replace(
    GPT,
    norm="rmsnorm",
    position_embedding="rope",
    activation="swiglu",
    bias=False,
    tie_embeddings=False,
    num_query_groups=2,
    ffn_hidden_size=44,
)


@pytest.mark.parametrize(
    "model",
    [
        GPT,
        replace(GPT, tie_embeddings=False, max_position_embeddings=24, activation="relu"),
        LLAMA,
        replace(LLAMA, bias=True, tie_embeddings=True),
    ],
)
def test_every_logical_tensor_has_its_place_once(model: ModelConfig) -> None:
    parts = [part for tensor in hf_tensors(model, hf_kind(model)) for part in tensor.parts]
    assert sorted(parts) == sorted(logical_shapes(model))


@pytest.mark.parametrize(
    ("model", "key"),
    [
        (replace(LLAMA, rotary_percent=0.5), "model.rotary_percent=0.5"),
        (replace(LLAMA, activation="gelu"), "model.activation=gelu"),
        (replace(LLAMA, norm="layernorm"), "model.norm=layernorm"),
        (replace(LLAMA, hidden_size=36, num_attention_heads=4), "model.num_attention_heads=4"),
        (replace(GPT, position_embedding="none"), "model.position_embedding=none"),
        (replace(GPT, bias=False), "model.bias=false"),
        (replace(GPT, num_query_groups=2), "model.num_query_groups=2"),
        (replace(GPT, norm="rmsnorm"), "model.norm=rmsnorm"),
        (replace(GPT, activation="swiglu"), "model.activation=swiglu"),
    ],
)
def test_what_cannot_be_exported_is_refused_by_its_key(model: ModelConfig, key: str) -> None:
    with pytest.raises(UserError) as refused:
        to_hf(model, "fp32", 256)
    assert key in str(refused.value)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ({"model_type": "mistral"}, "model_type=mistral"),
        ({"hidden_act": "gelu"}, "hidden_act=gelu"),
        ({"head_dim": 64}, "head_dim=64"),
        ({"attention_bias": True}, "mlp_bias=false"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "rope_type=llama3"),
        ({"rope_scaling": {"type": "linear", "factor": 2.0}}, "rope_type=linear"),
        ({"rope_parameters": {"rope_type": "yarn"}}, "rope_type=yarn"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor=0.5"),
        ({"quantization_config": {"bits": 4}}, "quantization_config"),
    ],
)
def test_what_cannot_be_imported_is_refused_by_its_key(changes: dict[str, Any], key: str) -> None:
    config = to_hf(LLAMA, "fp32", 256) | {"rope_parameters": None} | changes
    with pytest.raises(UserError) as refused:
        from_hf(config)
    assert key in str(refused.value)


@pytest.mark.parametrize(
    "changes",
    [
        {"activation_function": "tanh"},
        {"scale_attn_weights": False},
        {"scale_attn_by_inverse_layer_idx": True},
        {"add_cross_attention": True},
    ],
)
def test_gpt2_variants_that_we_do_not_have_are_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(UserError) as refused:
        from_hf(to_hf(GPT, "fp32", 256) | changes)
    assert next(iter(changes)) in str(refused.value)


@pytest.mark.parametrize(
    "model",
    [
        GPT,
        replace(GPT, activation="gelu_tanh", tie_embeddings=False, norm_eps=1e-6),
        LLAMA,
        replace(LLAMA, bias=True, tie_embeddings=True, rotary_base=500000.0),
    ],
)
def test_a_model_that_goes_out_comes_back(model: ModelConfig) -> None:
    _, keys = from_hf(to_hf(model, "fp32", 256))
    back = ModelConfig(**keys)
    for name in ("kv_heads", "ffn_size", "max_positions", "head_dim"):
        assert getattr(back, name) == getattr(model, name), name
    derived = {"name": "", "num_query_groups": 1, "ffn_hidden_size": 1}
    derived["max_position_embeddings"] = back.max_positions
    assert replace(back, **derived) == replace(model, **derived)


def test_the_names_of_old_transformers_are_read() -> None:
    config = {"model_type": "llama", "rope_theta": 12345.0, "torch_dtype": "float16"}
    _, keys = from_hf(config)
    assert keys["rotary_base"] == 12345.0
    assert (keys["num_layers"], keys["norm_eps"], keys["tie_embeddings"]) == (32, 1e-6, False)
    _, keys = from_hf({"model_type": "gpt2"})
    assert (keys["activation"], keys["tie_embeddings"]) == ("gelu_tanh", True)
