"""Compares config.json of families with windows, norms and scales with ours, without torch."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from parallel3d.checkpoint.hf.config import from_hf, hf_kind, to_hf
from parallel3d.checkpoint.hf.families import FAMILIES as FORMATS
from parallel3d.checkpoint.hf.names import hf_tensors
from parallel3d.checkpoint.hf.rope import longrope_attention, unlike_before_5
from parallel3d.errors import UserError
from parallel3d.models.declared import full_shapes_of
from parallel3d.models.keys import ModelConfig

LLAMA = ModelConfig(
    num_layers=8,
    hidden_size=32,
    num_attention_heads=4,
    num_query_groups=2,
    ffn_hidden_size=44,
    seq_length=64,
    vocab_size=61,
    norm="rmsnorm",
    position_embedding="rope",
    activation="swiglu",
    bias=False,
    tie_embeddings=False,
)
YARN = {"rope_scaling": "yarn", "rope_scaling_factor": 4.0, "rope_original_length": 16}
LONGROPE = {
    "rope_scaling": "longrope",
    "rope_scaling_factor": 4.0,
    "rope_original_length": 16,
    "rope_short_factors": [1.0, 1.5],
    "rope_long_factors": [2.0, 3.5],
}
OLMO2 = replace(LLAMA, norm_position="after", qk_norm=True, qk_norm_width="full")
SLIDES = {"sliding_window": 5}
GEMMA2 = replace(
    LLAMA,
    norm_position="both",
    norm_zero_centered=True,
    activation="geglu",
    embedding_scale=32**0.5,
    attention_scale=24**-0.5,
    head_dim=12,
    **SLIDES,
)
GEMMA3 = replace(
    GEMMA2,
    qk_norm=True,
    layer_types=["sliding"] * 5 + ["full"],
    rotary_base=1e6,
    sliding_rotary_base=1e4,
    rope_scaling="linear",
    rope_scaling_factor=8.0,
)
QWEN3_5 = replace(
    LLAMA,
    head_dim=16,
    norm_zero_centered=True,
    qk_norm=True,
    attention_gate=True,
    rotary_percent=0.25,
    layer_types=["gated_deltanet"] * 3 + ["full"],
    delta_key_heads=2,
    delta_value_heads=4,
    delta_key_size=6,
    delta_value_size=8,
)
OLMO_HYBRID = replace(
    OLMO2,
    layer_types=["gated_deltanet", "full"],
    delta_key_heads=2,
    delta_value_heads=2,
    delta_key_size=6,
    delta_value_size=12,
    delta_negative=True,
    delta_norm_position="before",
    delta_norm_eps=1e-5,
)
OF_EXPERTS = {"num_experts": 4, "expert_ffn_size": 20, "shared_expert_size": 28}
FAMILIES = {
    "qwen3_5_text": QWEN3_5,
    "qwen3_5_moe_text": replace(QWEN3_5, shared_expert_gate=True, **OF_EXPERTS),
    "qwen3_next": replace(QWEN3_5, shared_expert_gate=True, dense_layers=[1], **OF_EXPERTS),
    "olmo_hybrid": OLMO_HYBRID,
    "mistral": replace(LLAMA, layer_types=["sliding"], **SLIDES),
    "phi3": replace(LLAMA, rotary_percent=0.5, **LONGROPE),
    "phi3_factor_1": replace(LLAMA, rotary_percent=0.5, **LONGROPE | {"rope_scaling_factor": 1.0}),
    "smollm3": replace(LLAMA, layer_types=["full", "full", "full", "full_nope"]),
    "seed_oss": replace(LLAMA, attention_bias="qkv", bias=True, head_dim=12),
    "granite": replace(
        LLAMA, embedding_scale=12.0, residual_scale=0.25, attention_scale=0.125, logit_scale=1 / 8
    ),
    "glm4": replace(LLAMA, norm_position="both", rotary_percent=0.5, attention_bias="qkv"),
    "olmo2": OLMO2,
    "olmo3": replace(
        OLMO2, layer_types=["sliding"] * 3 + ["full"], sliding_rotary_base=5e5, **SLIDES, **YARN
    ),
    "exaone4": replace(
        LLAMA,
        norm_position="after",
        qk_norm=True,
        layer_types=["sliding"] * 3 + ["full_nope"],
        **SLIDES,
    ),
    "ministral3": replace(LLAMA, query_temperature=0.1, rope_attention_factor=1.0, **YARN),
    "gemma2": replace(
        GEMMA2, layer_types=["sliding", "full"], logit_cap=30.0, attention_logit_cap=50.0
    ),
    "gemma3_text": GEMMA3,
    # Older families with unusual values of their keys.
    "llama": replace(LLAMA, activation="geglu", **YARN),
    "llama_factor_1": replace(
        LLAMA, rope_scaling="yarn", rope_attention_factor=1.5, rope_original_length=16
    ),
    "qwen2": replace(
        LLAMA, attention_bias="qkv", layer_types=["full"] * 5 + ["sliding"] * 3, **SLIDES
    ),
    "qwen3": replace(LLAMA, qk_norm=True, layer_types=["sliding", "full"], **SLIDES),
}


@pytest.mark.parametrize("name", FAMILIES)
def test_a_model_of_a_family_is_exported_as_that_family_and_comes_back(name: str) -> None:
    model, kind = FAMILIES[name], name.removesuffix("_factor_1")
    assert hf_kind(model) == kind
    found, keys, _ = from_hf(to_hf(model, "fp32"))
    assert found == kind
    back = ModelConfig(**keys)
    same = {"name": "", "head_dim": back.head_size, "attention_bias": None, "bias": False}
    assert (back.head_size, back.qkv_bias, back.out_bias) == (
        model.head_size,
        model.qkv_bias,
        model.out_bias,
    )
    assert replace(back, **same) == replace(model, **same)


@pytest.mark.parametrize("name", FAMILIES)
def test_every_tensor_of_a_family_has_its_place_once(name: str) -> None:
    model, kind = FAMILIES[name], name.removesuffix("_factor_1")
    tensors = hf_tensors(model, kind)
    assert sorted(part for t in tensors for part in t.parts) == sorted(full_shapes_of(model))
    assert len({t.name for t in tensors}) == len(tensors)
    assert {t.pairs for t in tensors} == ({None, (8, 4)} if kind == "glm4" else {None})


@pytest.mark.parametrize("kind", ["mistral", "smollm3", "seed_oss", "granite", "ministral3"])
def test_an_export_has_the_format_of_the_folder_that_was_imported(kind: str) -> None:
    """A plain Llama can also be written as these families."""
    assert hf_kind(LLAMA) == "llama"
    assert to_hf(LLAMA, "fp32", kind)["model_type"] == kind
    assert hf_kind(FAMILIES["olmo2"], kind) == "olmo2"


@pytest.mark.parametrize(
    ("kind", "changes", "key"),
    [
        ("mistral", {"layer_types": ["sliding", "full"], "norm": "layernorm"}, "model.norm=layern"),
        ("olmo2", {"norm_zero_centered": True}, "model.norm_zero_centered=true"),
        ("qwen3_5_text", {"delta_negative": True}, "model.delta_negative=true"),
        ("qwen3_5_text", {"attention_sinks": True}, "model.attention_sinks=true"),
        ("qwen3_next", {"delta_norm_eps": 1e-3}, "model.delta_norm_eps=0.001"),
        ("olmo_hybrid", {"delta_norm_position": None}, "model.delta_norm_position=after"),
        ("olmo2", {"residual_scale": 0.5}, "model.residual_scale=0.5"),
        ("olmo2", {"attention_gate": True}, "model.attention_gate=true"),
        ("olmo2", {"attention_sinks": True}, "model.attention_sinks=true"),
        ("gemma3_text", {"attention_logit_cap": 50.0}, "model.attention_logit_cap=50"),
        ("exaone4", {"layer_types": ["sliding", "full"], "qk_norm": False}, "model.norm_position"),
        ("gemma3_text", {"embedding_scale": 2.0}, "model.embedding_scale=2"),
        ("gemma3_text", {"attention_scale": 0.3}, "model.attention_scale=0.3"),
        ("gemma3_text", {"rope_scaling": "yarn", "rope_truncate": False}, "model.rope_truncate=f"),
        ("gemma2", {"sliding_rotary_base": 100.0}, "model.sliding_rotary_base=100"),
        ("granite", {"query_temperature": 0.1}, "model.query_temperature=0.1"),
        ("phi3", {"rope_scaling": "yarn"}, "model.rotary_percent=0.5"),
    ],
)
def test_mixtures_of_families_are_refused_by_their_key(
    kind: str, changes: dict[str, Any], key: str
) -> None:
    with pytest.raises(UserError) as refused:
        to_hf(replace(FAMILIES[kind], **changes), "fp32")
    assert key in str(refused.value)
    assert "\n" not in str(refused.value)


SIZES = {"num_hidden_layers": 8}


@pytest.mark.parametrize(
    ("config", "types", "window"),
    [
        ({"model_type": "mistral"}, ["sliding"], 4096),
        ({"model_type": "mistral", "sliding_window": None}, [], None),
        # the window is as long as the sequence
        ({"model_type": "mistral", "sliding_window": 131072}, [], None),
        ({"model_type": "phi3"}, [], None),
        ({"model_type": "phi3", "sliding_window": 2047}, ["sliding"], 2047),
        ({"model_type": "ministral3"}, [], None),
        ({"model_type": "smollm3"}, ["full", "full", "full", "full_nope"], None),
        ({"model_type": "smollm3", "no_rope_layers": [1] * 9}, [], None),
        ({"model_type": "smollm3", "no_rope_layer_interval": 2}, ["full", "full_nope"], None),
        (
            {"model_type": "smollm3", "use_sliding_window": True, "sliding_window": 7},
            ["full", "full", "full", "sliding_nope"],
            7,
        ),
        ({"model_type": "olmo3"}, ["sliding"] * 3 + ["full"], 4096),
        ({"model_type": "exaone4"}, ["sliding"] * 3 + ["full_nope"], 4096),
        ({"model_type": "exaone4", "sliding_window": None}, [], None),
        ({"model_type": "exaone4", "sliding_window_pattern": "LG"}, ["sliding", "full_nope"], 4096),
        (
            {"model_type": "gemma2", "attn_logit_softcapping": None},
            ["sliding", "full"],
            4096,
        ),
        ({"model_type": "gemma3_text"}, [*["sliding"] * 5, "full"], 4096),
        ({"model_type": "gemma3_text", "sliding_window_pattern": 2}, ["sliding", "full"], 4096),
        ({"model_type": "qwen2", "sliding_window": 8, "max_window_layers": 3}, [], None),
        (
            {"model_type": "qwen3", "use_sliding_window": True, "max_window_layers": 3},
            ["full"] * 3 + ["sliding"] * 5,
            4096,
        ),
        ({"model_type": "qwen3", "use_sliding_window": True}, [], None),
        ({"model_type": "qwen3_moe", "use_sliding_window": True}, ["sliding"], 4096),
        (
            {"model_type": "qwen2_moe", "use_sliding_window": True, "max_window_layers": 4},
            ["sliding", "full", "sliding", "full", "full", "full", "full", "full"],
            4096,
        ),
        ({"model_type": "mixtral", "sliding_window": 9}, ["sliding"], 9),
    ],
)
def test_layers_have_windows_as_transformers_defaults_say(
    config: dict[str, Any], types: list[str], window: int | None
) -> None:
    _, keys, _ = from_hf(SIZES | config)
    assert (keys["layer_types"], keys["sliding_window"]) == (types, window)


@pytest.mark.parametrize(
    ("config", "found"),
    [
        ({"model_type": "olmo3", "rope_theta": 7e5}, {"rotary_base": 7e5, "local": 5e5}),
        ({"model_type": "gemma3_text"}, {"rotary_base": 1e6, "local": 1e4}),
        (
            {"model_type": "gemma3_text", "rope_local_base_freq": 3e4, "rope_theta": 2e6},
            {"rotary_base": 2e6, "local": 3e4},
        ),
        ({"model_type": "olmo3"}, {"rotary_base": 5e5, "local": None}),
        (
            {"model_type": "olmo3", "rope_scaling": {"rope_type": "linear", "factor": 2.0}},
            {"rotary_base": 5e5, "local": 5e5, "rope_scaling": "linear"},
        ),
        (
            {"model_type": "ministral3"},
            {"rope_scaling": "yarn", "rope_attention_factor": 1.0, "query_temperature": 0.1},
        ),
        (
            {"model_type": "qwen3", "rope_scaling": {"type": "yarn", "factor": 4.0}},
            {"rope_scaling": "yarn", "rope_attention_factor": None, "rope_original_length": 32768},
        ),
        ({"model_type": "smollm3"}, {"rotary_base": 2e6}),
    ],
)
def test_bases_and_scalings_are_those_of_transformers(
    config: dict[str, Any], found: dict[str, Any]
) -> None:
    _, keys, _ = from_hf(SIZES | config)
    keys["local"] = keys.get("sliding_rotary_base")
    assert {key: keys[key] for key in found} == found


@pytest.mark.parametrize(
    ("config", "said"),
    [
        (
            {"model_type": "gemma3_text", "attn_logit_softcapping": 50.0},
            "attn_logit_softcapping=50.0, which our model cannot express",
        ),
        ({"model_type": "gemma2", "attn_logit_softcapping": 0.0}, "attn_logit_softcapping=0.0"),
        ({"model_type": "gemma3_text", "use_bidirectional_attention": True}, "use_bidirectional"),
        ({"model_type": "gemma3_text", "sliding_window": None}, "sliding_window must be a whole"),
        ({"model_type": "gemma3_text", "query_pre_attn_scalar": 0}, "query_pre_attn_scalar=0"),
        (
            {
                "model_type": "gemma3_text",
                "rope_parameters": {"sliding_attention": {"rope_type": "linear", "factor": 2.0}},
            },
            "scaling for sliding_attention",
        ),
        ({"model_type": "mistral", "layer_types": ["full_attention"] * 8}, "must be sliding_atten"),
        ({"model_type": "ministral3", "rope_parameters": {}}, "has llama_4_scaling_beta=null"),
        ({"model_type": "smollm3", "no_rope_layers": [1, 0]}, "no_rope_layers=[1,0]"),
        ({"model_type": "smollm3", "no_rope_layer_interval": 0}, "no_rope_layer_interval=0"),
        ({"model_type": "exaone4", "sliding_window_pattern": "LLL"}, "sliding_window_pattern=LLL"),
        ({"model_type": "granite", "residual_multiplier": -1.0}, "residual_multiplier=-1.0"),
        ({"model_type": "granite", "sliding_window": 8}, "sliding_window=8"),
        ({"model_type": "phi3", "lm_head_bias": True}, "lm_head_bias=true"),
        ({"model_type": "phi3", "rope_scaling": {"type": "linear", "factor": 2.0}}, "=linear"),
        (
            {"model_type": "phi3", "rope_scaling": {"type": "su", "factor": 2.0}},
            "short_factor=[]",
        ),
        ({"model_type": "seed_oss", "attention_bias": False, "attention_out_bias": True}, "_out_b"),
        ({"model_type": "glm4", "partial_rotary_factor": 0.305}, "partial_rotary_factor=0.305"),
    ],
)
def test_dialects_without_counterpart_are_refused_by_their_key(
    config: dict[str, Any], said: str
) -> None:
    with pytest.raises(UserError) as refused:
        from_hf(SIZES | config)
    assert said in str(refused.value)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("kept", [0, 1024])
def test_longrope_has_the_form_that_transformers_4_and_5_read(kept: int) -> None:
    """transformers 4.57 refuses a fourth key, and reads the other values at the top level."""
    model = replace(FAMILIES["phi3"], seq_length=24)
    assert model.rope_scaling_factor * model.rope_original_length >= model.seq_length
    config = to_hf(model, "fp32", "phi3", kept)
    assert sorted(config["rope_scaling"]) == ["long_factor", "short_factor", "type"]
    assert config["rope_scaling"]["type"] == "longrope"
    assert config["original_max_position_embeddings"] == model.rope_original_length
    positions = config["max_position_embeddings"]
    assert positions == model.rope_scaling_factor * model.rope_original_length
    for form in ({}, {"rope_scaling": None}):  # without it, version 5 reads rope_parameters
        found = from_hf(config | form)[1] | {"seq_length": 24, "name": model.name}
        assert replace(model, **found) == model


def test_another_attention_factor_needs_the_form_of_transformers_5() -> None:
    model = replace(FAMILIES["phi3"], rope_attention_factor=1.7)
    config = to_hf(model, "fp32", "phi3")
    assert config["rope_scaling"]["attention_factor"] == 1.7  # refused before version 5, not lost


def test_longrope_of_one_token_is_exported_with_its_attention_factor() -> None:
    model = replace(FAMILIES["phi3"], rope_original_length=1, rope_attention_factor=1.2)
    found = from_hf(to_hf(model, "fp32", "phi3")).keys
    assert (found["rope_original_length"], found["rope_attention_factor"]) == (1, 1.2)


@pytest.mark.parametrize(
    ("name", "changes", "differs"),
    [
        ("olmo3", {"sliding_rotary_base": 1e6}, True),
        ("olmo3", {"rotary_base": 1e6, "sliding_rotary_base": 1e6}, False),
        ("olmo3", {"sliding_rotary_base": None}, True),
        ("olmo3", {"sliding_rotary_base": None} | {"rope_scaling_factor": 1.0}, False),
        ("gemma3_text", {"sliding_rotary_base": 1e6}, False),
        ("gemma3_text", {"sliding_rotary_base": None, "rope_scaling_factor": 8.0}, True),
        ("mistral", {}, False),
    ],
)
def test_an_export_that_transformers_4_reads_differently_is_told(
    name: str, changes: dict[str, Any], differs: bool
) -> None:
    model = replace(FAMILIES[name], **{"rope_scaling": "linear", **changes})
    if changes.get("rope_scaling_factor") is None and name == "olmo3":
        model = replace(model, rope_scaling_factor=4.0)
    sentence = unlike_before_5(model, FORMATS[name])
    assert (sentence is not None) == differs
    if sentence is not None:
        assert f"rope_theta={model.rotary_base:g} without scaling" in sentence


def test_longrope_of_other_families_gives_the_lengths_and_factors_of_both_versions() -> None:
    lists = {"rope_short_factors": [1.0, 1.5] * 2, "rope_long_factors": [2.0, 3.5] * 2}
    model = replace(LLAMA, **LONGROPE | lists)
    config = to_hf(model, "fp32", "llama")
    assert config["original_max_position_embeddings"] == model.rope_original_length
    usual = longrope_attention(model.rope_scaling_factor, model.rope_original_length)
    assert config["rope_scaling"]["attention_factor"] == usual
    assert replace(model, **from_hf(config)[1] | {"name": model.name}) == model
