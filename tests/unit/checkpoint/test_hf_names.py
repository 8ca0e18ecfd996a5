"""Compares Hugging Face's names and config.json with ours, without torch or transformers."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

import pytest
import yaml

from parallel3d.checkpoint.hf.config import from_hf, hf_kind, to_hf
from parallel3d.checkpoint.hf.names import hf_tensors
from parallel3d.commands.init_from import model_from
from parallel3d.commands.recipes import recipe
from parallel3d.config.overrides import presets
from parallel3d.config.schema import ModelConfig, conf_dir, full_shapes_of
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
    parts = [part for tensor in hf_tensors(model, hf_kind(model)) for part in tensor.parts]
    assert sorted(parts) == sorted(full_shapes_of(model))


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
        ({"quantization_config": {"bits": 4}}, "quantization_config"),
        ({"rope_scaling": LLAMA3 | {"low_freq_factor": 5.0}}, "low_freq_factor=5"),
        ({"rope_scaling": LLAMA3 | {"factor": None}}, "factor=null"),
        ({"is_causal": False}, "is_causal=false"),
        ({"original_max_position_embeddings": 8.0}, "original_max_position_embeddings=8.0"),
        ({"residual_multiplier": 0.5}, "residual_multiplier=0.5"),
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
        (MIXTRAL, {"norm_topk_prob": True}, "norm_topk_prob=true"),
        (MIXTRAL, {"num_local_experts": 0}, "num_local_experts=0"),
        (MIXTRAL, {"num_experts": None}, "num_local_experts=null"),
        (OLMOE, {"clip_qkv": 8.0}, "clip_qkv=8.0"),
        (OLMOE, {"head_dim": 12}, "head_dim=12"),
        (OLMOE, {"shared_expert_intermediate_size": 8}, "shared_expert_intermediate_size=8"),
        (QWEN3_MOE, {"use_sliding_window": 1}, "use_sliding_window=1"),
        (QWEN3_MOE, {"layer_types": ["linear_attention"] * 2}, "=linear_attention"),
        (QWEN3_MOE, {"decoder_sparse_step": 0}, "decoder_sparse_step=0"),
        (QWEN3_MOE, {"mlp_only_layers": [True]}, "mlp_only_layers=[true]"),
        (QWEN3_MOE, {"n_shared_experts": 1}, "n_shared_experts=1"),
        (QWEN2_MOE, {"shared_expert_intermediate_size": 0}, "shared_expert_intermediate_size=0"),
        (DOTS1, {"sliding_window": None, "layer_types": ["sliding_attention"] * 2}, "sliding_wind"),
        (DOTS1, {"n_routed_experts": None}, "n_routed_experts=null"),
        (DOTS1, {"n_shared_experts": None}, "n_shared_experts=null"),
        (DOTS1, {"moe_layer_freq": 2}, "moe_layer_freq=2"),
        (DOTS1, {"scoring_func": "softmax"}, "scoring_func=softmax"),
        (GLM, {"rope_parameters": {"partial_rotary_factor": 0.6}}, "partial_rotary_factor=0.6"),
        (GLM, {"index_topk": 64}, "index_topk=64"),
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


def test_layers_are_dense_as_the_families_say() -> None:
    config = to_hf(replace(QWEN3_MOE, num_layers=6), "fp32")
    _, keys = from_hf(config | {"mlp_only_layers": [1, 9], "decoder_sparse_step": 2})
    assert keys["dense_layers"] == [0, 1, 2, 4]
    _, keys = from_hf(config | {"mlp_only_layers": None})
    assert keys["dense_layers"] == []
    _, keys = from_hf(to_hf(replace(GLM, num_layers=3, dense_layers=[0, 1]), "fp32"))
    assert keys["dense_layers"] == [0, 1]
    assert keys["shared_expert_size"] == 40


def test_other_names_of_the_number_of_experts_go_first() -> None:
    config = to_hf(QWEN3_MOE, "fp32")
    assert from_hf(config | {"num_local_experts": 16})[1]["num_experts"] == 16
    assert from_hf(to_hf(MIXTRAL, "fp32") | {"num_experts": 16})[1]["num_experts"] == 16


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
        {"add_cross_attention": True},
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
    _, keys = from_hf(to_hf(model, "fp32"))
    back = ModelConfig(**keys)
    for name in ("kv_heads", "ffn_size", "max_positions", "head_size", "expert_size", "qkv_bias"):
        assert getattr(back, name) == getattr(model, name), name
    derived = {"name": "", "num_query_groups": 1, "ffn_hidden_size": 1, "expert_ffn_size": 1}
    derived["max_position_embeddings"] = back.max_positions
    assert replace(back, **derived) == replace(model, **derived)


def test_the_names_of_old_transformers_are_read() -> None:
    config = {"model_type": "llama", "rope_theta": 12345.0, "torch_dtype": "float16"}
    _, keys = from_hf(config)
    assert keys["rotary_base"] == 12345.0
    assert keys["head_dim"] is keys["attention_bias"] is None
    assert (keys["num_layers"], keys["norm_eps"], keys["tie_embeddings"]) == (32, 1e-6, False)
    _, keys = from_hf({"model_type": "gpt2"})
    assert (keys["activation"], keys["tie_embeddings"]) == ("gelu_tanh", True)


PUBLISHED = {
    "llama3_1_8b": {
        "model_type": "llama",
        "attention_bias": False,
        "hidden_act": "silu",
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "max_position_embeddings": 131072,
        "mlp_bias": False,
        "num_attention_heads": 32,
        "num_hidden_layers": 32,
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-05,
        "rope_scaling": {
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
            "rope_type": "llama3",
        },
        "rope_theta": 500000.0,
        "tie_word_embeddings": False,
        "vocab_size": 128256,
    },
    "qwen2_5_0_5b": {
        "model_type": "qwen2",
        "hidden_act": "silu",
        "hidden_size": 896,
        "intermediate_size": 4864,
        "max_position_embeddings": 32768,
        "max_window_layers": 24,
        "num_attention_heads": 14,
        "num_hidden_layers": 24,
        "num_key_value_heads": 2,
        "rms_norm_eps": 1e-06,
        "rope_theta": 1000000.0,
        "sliding_window": 32768,
        "tie_word_embeddings": True,
        "use_sliding_window": False,
        "vocab_size": 151936,
    },
    "qwen3_0_6b": {
        "model_type": "qwen3",
        "attention_bias": False,
        "head_dim": 128,
        "hidden_act": "silu",
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "max_position_embeddings": 40960,
        "max_window_layers": 28,
        "num_attention_heads": 16,
        "num_hidden_layers": 28,
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-06,
        "rope_scaling": None,
        "rope_theta": 1000000,
        "sliding_window": None,
        "tie_word_embeddings": True,
        "use_sliding_window": False,
        "vocab_size": 151936,
    },
    "qwen3_8b": {
        "model_type": "qwen3",
        "attention_bias": False,
        "head_dim": 128,
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "num_attention_heads": 32,
        "num_hidden_layers": 36,
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-06,
        "rope_theta": 1000000,
        "tie_word_embeddings": False,
        "vocab_size": 151936,
    },
}


QWEN3_MIXTURE = {
    "model_type": "qwen3_moe",
    "attention_bias": False,
    "decoder_sparse_step": 1,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "max_position_embeddings": 40960,
    "max_window_layers": 48,
    "mlp_only_layers": [],
    "moe_intermediate_size": 768,
    "norm_topk_prob": True,
    "num_attention_heads": 32,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 48,
    "num_key_value_heads": 4,
    "output_router_logits": False,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 1000000.0,
    "router_aux_loss_coef": 0.001,
    "sliding_window": None,
    "tie_word_embeddings": False,
    "use_sliding_window": False,
    "vocab_size": 151936,
}
PUBLISHED |= {
    "qwen3_30b_a3b": QWEN3_MIXTURE,
    "qwen3_235b_a22b": QWEN3_MIXTURE
    | {"hidden_size": 4096, "intermediate_size": 12288, "moe_intermediate_size": 1536}
    | {"num_attention_heads": 64, "num_hidden_layers": 94, "max_window_layers": 94},
    "mixtral_8x7b": {
        "model_type": "mixtral",
        "hidden_act": "silu",
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "max_position_embeddings": 32768,
        "num_attention_heads": 32,
        "num_experts_per_tok": 2,
        "num_hidden_layers": 32,
        "num_key_value_heads": 8,
        "num_local_experts": 8,
        "output_router_logits": False,
        "rms_norm_eps": 1e-05,
        "rope_theta": 1000000.0,
        "router_aux_loss_coef": 0.02,
        "sliding_window": None,
        "tie_word_embeddings": False,
        "vocab_size": 32000,
    },
    "olmoe_1b_7b": {
        "model_type": "olmoe",
        "attention_bias": False,
        "clip_qkv": None,
        "hidden_act": "silu",
        "hidden_size": 2048,
        "intermediate_size": 1024,
        "max_position_embeddings": 4096,
        "norm_topk_prob": False,
        "num_attention_heads": 16,
        "num_experts": 64,
        "num_experts_per_tok": 8,
        "num_hidden_layers": 16,
        "num_key_value_heads": 16,
        "output_router_logits": False,
        "rms_norm_eps": 1e-05,
        "rope_scaling": None,
        "rope_theta": 10000.0,
        "router_aux_loss_coef": 0.01,
        "tie_word_embeddings": False,
        "vocab_size": 50304,
    },
    "dots1": {
        "model_type": "dots1",
        "attention_bias": False,
        "first_k_dense_replace": 1,
        "hidden_act": "silu",
        "hidden_size": 4096,
        "intermediate_size": 10944,
        "max_position_embeddings": 32768,
        "moe_intermediate_size": 1408,
        "n_routed_experts": 128,
        "n_shared_experts": 2,
        "norm_topk_prob": True,
        "num_attention_heads": 32,
        "num_experts_per_tok": 6,
        "num_hidden_layers": 62,
        "num_key_value_heads": 32,
        "rms_norm_eps": 1e-05,
        "rope_theta": 10000000,
        "routed_scaling_factor": 2.5,
        "scoring_func": "noaux_tc",
        "sliding_window": None,
        "tie_word_embeddings": False,
        "vocab_size": 152064,
    },
    "glm_4_5_air": {
        "model_type": "glm4_moe",
        "attention_bias": True,
        "first_k_dense_replace": 1,
        "head_dim": 128,
        "hidden_act": "silu",
        "hidden_size": 4096,
        "intermediate_size": 10944,
        "max_position_embeddings": 131072,
        "moe_intermediate_size": 1408,
        "n_group": 1,
        "n_routed_experts": 128,
        "n_shared_experts": 1,
        "norm_topk_prob": True,
        "num_attention_heads": 96,
        "num_experts_per_tok": 8,
        "num_hidden_layers": 46,
        "num_key_value_heads": 8,
        "num_nextn_predict_layers": 1,
        "partial_rotary_factor": 0.5,
        "rms_norm_eps": 1e-05,
        "rope_scaling": None,
        "rope_theta": 1000000,
        "routed_scaling_factor": 1.0,
        "tie_word_embeddings": False,
        "topk_group": 1,
        "use_qk_norm": False,
        "vocab_size": 151552,
    },
}


OF_8B = PUBLISHED["llama3_1_8b"]
# Folders from which the recipes for fine-tuning start.
FOLDERS = {
    "llama3_1_8b_sft": OF_8B,
    "llama3_1_70b_sft": OF_8B
    | {"hidden_size": 8192, "intermediate_size": 28672}
    | {"num_attention_heads": 64, "num_hidden_layers": 80},
    "llama_1b_sft": OF_8B
    | {"head_dim": 64, "hidden_size": 2048, "num_hidden_layers": 16, "intermediate_size": 8192}
    | {"rope_scaling": OF_8B["rope_scaling"] | {"factor": 32.0}, "tie_word_embeddings": True},
    "qwen3_8b_sft": PUBLISHED["qwen3_8b"] | {"max_position_embeddings": 40960},
    "gpt2_124m_sft": {
        **{"model_type": "gpt2", "n_embd": 768, "n_head": 12, "n_layer": 12, "n_positions": 1024},
        **{"activation_function": "gelu_new", "vocab_size": 50257, "layer_norm_epsilon": 1e-5},
    },
}


@pytest.mark.slow
@pytest.mark.parametrize("name", [n for n in presets("experiment") if n.endswith("_sft")])
def test_a_recipe_for_fine_tuning_accepts_its_models_published_folder(
    name: str,
) -> None:
    config, (_, keys) = recipe(name), from_hf(FOLDERS[name])
    theirs = ModelConfig(**keys)
    model = model_from(theirs, config.model, lambda _: True, name, theirs.seq_length)
    assert model.seq_length == config.model.seq_length


@pytest.mark.parametrize("name", PUBLISHED)
def test_presets_follow_the_published_config(name: str) -> None:
    _, keys = from_hf(PUBLISHED[name])
    content = yaml.safe_load((conf_dir() / "model" / f"{name}.yaml").read_text())
    ours, theirs = ModelConfig(**content), ModelConfig(**keys)
    same = {"name": "", "seq_length": 1, "head_dim": ours.head_size}
    same["num_query_groups"] = ours.kv_heads
    assert (ours.head_size, ours.kv_heads) == (theirs.head_size, theirs.kv_heads)
    assert replace(ours, **same) == replace(theirs, **same)
