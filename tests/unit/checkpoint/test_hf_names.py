"""Compares Hugging Face's names and config.json with ours, without torch or transformers."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

import pytest

from parallel3d.checkpoint.hf import their_code
from parallel3d.checkpoint.hf.config import GENERATION, from_hf, hf_kind, to_hf
from parallel3d.checkpoint.hf.families import FAMILIES
from parallel3d.checkpoint.hf.names import hf_tensors
from parallel3d.checkpoint.hf.their_code import check_unread
from parallel3d.errors import UserError
from parallel3d.models.declared import full_shapes_of
from parallel3d.models.keys import ModelConfig

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
SCALED = replace(LLAMA, rope_scaling_factor=8.0, rope_low_freq_factor=1.5, rope_original_length=64)
QWEN2 = replace(LLAMA, attention_bias="qkv", tie_embeddings=True)
QWEN3 = replace(LLAMA, qk_norm=True, head_dim=10)
MIXTRAL = replace(LLAMA, num_experts=4)
QWEN3_MOE = replace(QWEN3, num_experts=8, expert_ffn_size=20, dense_layers=[1])
QWEN2_MOE = replace(
    LLAMA,
    attention_bias="qkv",
    num_experts=8,
    expert_ffn_size=20,
    shared_expert_size=28,
    shared_expert_gate=True,
    router_normalize=False,
)
OLMOE = replace(LLAMA, qk_norm=True, qk_norm_width="full", num_experts=8)
DOTS1 = replace(
    QWEN3,
    num_experts=8,
    expert_ffn_size=20,
    shared_expert_size=40,
    router_score="sigmoid",
    router_bias=True,
    router_scale=2.5,
    router_groups=4,
    router_top_groups=2,
    dense_layers=[0],
)
GLM = replace(DOTS1, qk_norm=False, attention_bias="qkv", rotary_percent=0.5, head_dim=16)
MINIMAX = replace(OLMOE, router_score="sigmoid", router_bias=True, rotary_percent=0.5, head_dim=12)
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}


@pytest.mark.parametrize(
    "model",
    [
        GPT,
        replace(GPT, tie_embeddings=False, max_position_embeddings=24, activation="relu"),
        LLAMA,
        replace(LLAMA, bias=True, tie_embeddings=True),
        replace(LLAMA, bias=True, attention_bias="none"),
        QWEN2,
        replace(QWEN3, attention_bias="all"),
        *(MIXTRAL, QWEN3_MOE, QWEN2_MOE, OLMOE, DOTS1, GLM, MINIMAX),
    ],
)
def test_every_logical_tensor_has_its_place_once(model: ModelConfig) -> None:
    tensors = hf_tensors(model, hf_kind(model))
    assert sorted(part for t in tensors for part in t.parts) == sorted(full_shapes_of(model))
    assert len({tensor.name for tensor in tensors}) == len(tensors)


@pytest.mark.parametrize(
    ("model", "key"),
    [
        (replace(QWEN3, rotary_percent=0.5), "model.rotary_percent=0.5"),
        (replace(LLAMA, activation="gelu"), "model.activation=gelu"),
        (replace(LLAMA, norm="layernorm"), "model.norm=layernorm"),
        (replace(LLAMA, hidden_size=36, num_attention_heads=4), "model.num_attention_heads=4"),
        (replace(GPT, position_embedding="none"), "model.position_embedding=none"),
        (replace(GPT, bias=False), "model.bias=false"),
        (replace(GPT, num_query_groups=2), "model.num_query_groups=2"),
        (replace(GPT, norm="rmsnorm"), "model.norm=rmsnorm"),
        (replace(GPT, activation="swiglu"), "model.activation=swiglu"),
        (replace(GPT, qk_norm=True), "model.qk_norm=true"),
        (replace(GPT, attention_bias="qkv"), "model.attention_bias=qkv"),
        (replace(GPT, head_dim=12), "model.head_dim=12"),
        (replace(QWEN3, bias=True), "model.bias=true"),
        (replace(QWEN3, attention_bias="qkv"), "model.attention_bias=qkv"),
        (replace(QWEN3, head_dim=9), "heads of 9"),
        (replace(LLAMA, hidden_size=34, head_dim=8, activation="geglu", bias=True), "=34"),
        (replace(GPT, num_experts=4), "model.num_experts=4"),
        (replace(QWEN3, qk_norm_width="full"), "model.qk_norm_width=full"),
        (replace(MIXTRAL, router_normalize=False), "model.router_normalize=false"),
        (replace(MIXTRAL, dense_layers=[0]), "model.dense_layers=[0]"),
        (replace(MIXTRAL, rotary_percent=0.5), "model.rotary_percent=0.5"),
        (replace(QWEN3_MOE, router_scale=2.0), "model.router_scale=2"),
        (replace(QWEN3_MOE, router_bias=True), "model.router_bias=true"),
        (replace(QWEN3_MOE, shared_expert_size=20), "model.shared_expert_size=20"),
        (replace(QWEN2_MOE, shared_expert_gate=False), "model.shared_expert_gate=false"),
        (replace(QWEN2_MOE, router_groups=2), "model.router_groups=2"),
        (replace(OLMOE, head_dim=12), "model.head_dim=12"),
        (replace(OLMOE, dense_layers=[1]), "model.dense_layers=[1]"),
        (replace(DOTS1, dense_layers=[1]), "model.dense_layers=[1]"),
        (replace(DOTS1, shared_expert_size=30), "model.shared_expert_size=30"),
        (replace(DOTS1, router_bias=False), "model.router_bias=false"),
        (replace(GLM, attention_bias="all"), "model.attention_bias=all"),
        (replace(GLM, shared_expert_size=0), "model.shared_expert_size=0"),
        (replace(MINIMAX, router_normalize=False), "model.router_normalize=false"),
        (replace(MINIMAX, attention_bias="qkv"), "model.attention_bias=qkv"),
    ],
)
def test_what_cannot_be_exported_is_refused_by_its_key(model: ModelConfig, key: str) -> None:
    with pytest.raises(UserError) as refused:
        to_hf(model, "fp32")
    assert key in str(refused.value)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ({"model_type": "mistrall"}, "model_type=mistrall"),
        ({"hidden_act": "gelu"}, "hidden_act=gelu"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "without low_freq_factor"),
        ({"rope_parameters": {"full_attention": {"rope_theta": 1e6}}}, "full_attention"),
        ({"use_sliding_window": True}, "use_sliding_window=true"),
        ({"layer_types": ["sliding_attention"] * 2}, "=sliding_attention"),
        ({"model_type": "qwen3", "layer_types": ["chunked_attention"]}, "=chunked_attention"),
        ({"model_type": "qwen3", "layer_types": ["sliding_attention"] * 2}, "sliding_attention"),
        ({"model_type": "qwen2", "rope_scaling": {"type": "yarn"}}, "rope_type=yarn without f"),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "rope_type=dynamic"),
        ({"rope_parameters": {"rope_type": "linear"}}, "rope_type=linear without factor"),
        ({"attention_bias": "yes"}, "attention_bias=yes"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor=0.5"),
        ({"rope_scaling": LLAMA3 | {"low_freq_factor": 5.0}}, "low_freq_factor=5"),
        ({"rope_scaling": LLAMA3 | {"factor": None}}, "factor=null"),
        ({"original_max_position_embeddings": 8.0}, "original_max_position_embeddings=8.0"),
    ],
)
def test_what_cannot_be_imported_is_refused_by_its_key(changes: dict[str, Any], key: str) -> None:
    config = to_hf(LLAMA, "fp32") | {"rope_parameters": None} | changes
    with pytest.raises(UserError) as refused:
        from_hf(config)
    assert key in str(refused.value)


@pytest.mark.parametrize(
    ("model", "changes", "key"),
    [
        (MIXTRAL, {"router_jitter_noise": 0.1}, "router_jitter_noise=0.1"),
        (MIXTRAL, {"sliding_window": "4096"}, "sliding_window=4096"),
        (MIXTRAL, {"num_local_experts": 0}, "num_local_experts=0"),
        (MIXTRAL, {"num_experts": None}, "num_local_experts=null"),
        (OLMOE, {"clip_qkv": 8.0}, "clip_qkv=8.0"),
        (OLMOE, {"head_dim": 12}, "head_dim=12"),
        (QWEN3_MOE, {"use_sliding_window": 1}, "use_sliding_window=1"),
        (QWEN3_MOE, {"layer_types": ["linear_attention"] * 2}, "=linear_attention"),
        (QWEN3_MOE, {"decoder_sparse_step": 0}, "decoder_sparse_step=0"),
        (QWEN3_MOE, {"mlp_only_layers": [True]}, "mlp_only_layers=[true]"),
        (QWEN2_MOE, {"shared_expert_intermediate_size": 0}, "shared_expert_intermediate_size=0"),
        (DOTS1, {"sliding_window": None, "layer_types": ["sliding_attention"] * 2}, "sliding_wind"),
        (DOTS1, {"n_routed_experts": None}, "n_routed_experts=null"),
        (DOTS1, {"n_shared_experts": None}, "n_shared_experts=null"),
        (DOTS1, {"moe_layer_freq": 2}, "moe_layer_freq=2"),
        (DOTS1, {"scoring_func": "softmax"}, "scoring_func=softmax"),
        (GLM, {"rope_parameters": {"partial_rotary_factor": 0.6}}, "partial_rotary_factor=0.6"),
        (MINIMAX, {"attn_type_list": [1, 0]}, "attn_type_list=[1,0]"),
        (MINIMAX, {"shared_intermediate_size": 64}, "shared_intermediate_size=64"),
        (MINIMAX, {"use_routing_bias": False}, "use_routing_bias=false"),
    ],
)
def test_unsupported_experts_are_refused_by_their_key(
    model: ModelConfig, changes: dict[str, Any], key: str
) -> None:
    with pytest.raises(UserError) as refused:
        from_hf(to_hf(model, "fp32") | changes)
    assert key in str(refused.value)
    assert "\n" not in str(refused.value)


# Keys that no reader knows, by model; the code of transformers does not mention them.
IGNORED = [
    (LLAMA, {"residual_multiplier": 0.5, "unsloth_version": "2026.4"}),
    (QWEN3_MOE, {"qkv_bias": False, "use_qk_norm": True, "shared_expert_intermediate_size": 0}),
    (OLMOE, {"shared_expert_intermediate_size": 8}),
    (MIXTRAL, {"norm_topk_prob": True}),
    (GLM, {"index_topk": 64}),
    (MINIMAX, {"attention_bias": True}),
]


@pytest.mark.parametrize(("model", "unread"), IGNORED)
def test_a_key_without_effect_in_transformers_is_taken(
    model: ModelConfig, unread: dict[str, Any]
) -> None:
    plain = from_hf(to_hf(model, "fp32"))
    found = from_hf(to_hf(model, "fp32") | unread)
    assert (found.keys, found.unread, plain.unread) == (plain.keys, unread, {})
    check_unread("from=hf", found.kind, unread, "nothing is compared", "compare them")


@pytest.mark.parametrize(
    ("model", "unread"), [(LLAMA, {"is_causal": False}), (GPT, {"add_cross_attention": True})]
)
def test_a_key_that_transformers_reads_needs_a_proof(
    model: ModelConfig, unread: dict[str, Any]
) -> None:
    found = from_hf(to_hf(model, "fp32") | unread | {"vision_tower": "clip"})
    assert found.unread == unread | {"vision_tower": "clip"}
    [(key, value)] = unread.items()
    with pytest.raises(UserError) as refused:
        check_unread("from=hf", found.kind, found.unread, "nothing is compared", "compare them")
    assert f"from=hf: config.json has {key}={str(value).lower()}, which" in str(refused.value)
    assert str(refused.value).endswith("nothing is compared; compare them")


@pytest.mark.nightly
@pytest.mark.parametrize("kind", FAMILIES)
def test_no_model_of_transformers_computes_with_keys_of_generation(kind: str) -> None:
    check_unread("from=hf", kind, dict.fromkeys(GENERATION), "nothing is compared", "compare them")


def test_without_transformers_every_key_needs_a_proof(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(their_code.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UserError, match="has unsloth_version=2026, which"):
        check_unread("from=hf", "llama", {"unsloth_version": "2026"}, "nothing is compared", "…")


def test_layers_are_dense_as_the_families_say() -> None:
    config = to_hf(replace(QWEN3_MOE, num_layers=6), "fp32")
    _, keys, _ = from_hf(config | {"mlp_only_layers": [1, 9], "decoder_sparse_step": 2})
    assert keys["dense_layers"] == [0, 1, 2, 4]
    _, keys, _ = from_hf(config | {"mlp_only_layers": None})
    assert keys["dense_layers"] == []
    _, keys, _ = from_hf(to_hf(replace(GLM, num_layers=3, dense_layers=[0, 1]), "fp32"))
    assert keys["dense_layers"] == [0, 1]
    assert keys["shared_expert_size"] == 40


def test_other_names_of_the_number_of_experts_go_first() -> None:
    config = to_hf(QWEN3_MOE, "fp32")
    assert from_hf(config | {"num_local_experts": 16})[1]["num_experts"] == 16
    assert from_hf(to_hf(MIXTRAL, "fp32") | {"num_experts": 16})[1]["num_experts"] == 16


@pytest.mark.slow
def test_names_of_very_many_experts_take_linear_time() -> None:
    """A quadratic loop over 46,000 names would take minutes."""
    model = replace(DOTS1, num_layers=60, num_experts=256)
    begun = time.process_time()
    assert len(hf_tensors(model, "dots1")) > 59 * 256 * 3
    assert time.process_time() - begun < 5


@pytest.mark.parametrize(
    "changes",
    [
        {"activation_function": "tanh"},
        {"scale_attn_weights": False},
        {"scale_attn_by_inverse_layer_idx": True},
    ],
)
def test_unsupported_gpt2_variants_are_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(UserError) as refused:
        from_hf(to_hf(GPT, "fp32") | changes)
    assert next(iter(changes)) in str(refused.value)


@pytest.mark.parametrize(
    "model",
    [
        GPT,
        replace(GPT, activation="gelu_tanh", tie_embeddings=False, norm_eps=1e-6),
        LLAMA,
        replace(LLAMA, bias=True, tie_embeddings=True, rotary_base=500000.0),
        replace(LLAMA, attention_bias="all"),
        replace(LLAMA, bias=True, attention_bias="none"),
        replace(LLAMA, head_dim=12),
        SCALED,
        QWEN2,
        replace(QWEN2, head_dim=6),
        QWEN3,
        replace(QWEN3, head_dim=None, attention_bias="all"),
        *(MIXTRAL, QWEN3_MOE, QWEN2_MOE, OLMOE, DOTS1, GLM, MINIMAX),
        replace(MIXTRAL, head_dim=12),
        replace(OLMOE, router_normalize=False, attention_bias="all"),
        replace(GLM, qk_norm=True, rotary_percent=1.0, rope_scaling_factor=8.0),
    ],
)
def test_an_exported_model_is_imported_as_the_same_model(model: ModelConfig) -> None:
    _, keys, _ = from_hf(to_hf(model, "fp32"))
    back = ModelConfig(**keys)
    for name in ("kv_heads", "ffn_size", "max_positions", "head_size", "expert_size", "qkv_bias"):
        assert getattr(back, name) == getattr(model, name), name
    derived = {"name": "", "num_query_groups": 1, "ffn_hidden_size": 1, "expert_ffn_size": 1}
    derived["max_position_embeddings"] = back.max_positions
    assert replace(back, **derived) == replace(model, **derived)


def test_the_names_of_old_transformers_are_read() -> None:
    config = {"model_type": "llama", "rope_theta": 12345.0, "torch_dtype": "float16"}
    _, keys, _ = from_hf(config)
    assert keys["rotary_base"] == 12345.0
    assert keys["head_dim"] is keys["attention_bias"] is None
    assert (keys["num_layers"], keys["norm_eps"], keys["tie_embeddings"]) == (32, 1e-6, False)
    _, keys, _ = from_hf({"model_type": "gpt2"})
    assert (keys["activation"], keys["tie_embeddings"]) == ("gelu_tanh", True)


def test_a_tensor_without_a_name_is_refused() -> None:
    model = replace(LLAMA, norm_position="after")
    with pytest.raises(UserError, match=r"layers\.0\.attention_output_norm\.weight has no name in"):
        hf_tensors(model, "llama")
