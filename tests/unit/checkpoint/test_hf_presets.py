"""Compares presets, and recipes that begin from a folder, with published config.json files."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import yaml

from parallel3d.checkpoint.hf.config import from_hf, kept_keys, to_hf, with_kept
from parallel3d.checkpoint.init_from import model_from
from parallel3d.cli.overrides import presets
from parallel3d.commands.recipes import recipe
from parallel3d.errors import UserError
from parallel3d.models.keys import ModelConfig
from parallel3d.run_config import conf_dir

PUBLISHED = {
    "gpt_oss_20b": {
        "model_type": "gpt_oss",
        "attention_bias": True,
        "attention_dropout": 0.0,
        "experts_per_token": 4,
        "head_dim": 64,
        "hidden_act": "silu",
        "hidden_size": 2880,
        "initial_context_length": 4096,
        "intermediate_size": 2880,
        "layer_types": ["sliding_attention", "full_attention"] * 12,
        "max_position_embeddings": 131072,
        "num_attention_heads": 64,
        "num_experts_per_tok": 4,
        "num_hidden_layers": 24,
        "num_key_value_heads": 8,
        "num_local_experts": 32,
        "rms_norm_eps": 1e-05,
        "rope_scaling": {
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "factor": 32.0,
            "original_max_position_embeddings": 4096,
            "rope_type": "yarn",
            "truncate": False,
        },
        "rope_theta": 150000,
        "router_aux_loss_coef": 0.9,
        "sliding_window": 128,
        "swiglu_limit": 7.0,
        "tie_word_embeddings": False,
        "vocab_size": 201088,
    },
    # The defaults of transformers are those of the large one.
    "gpt_oss_120b": {"model_type": "gpt_oss"},
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

MISTRAL = {
    "model_type": "mistral",
    "hidden_act": "silu",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "max_position_embeddings": 32768,
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-05,
    "rope_theta": 10000.0,
    "sliding_window": 4096,
    "tie_word_embeddings": False,
    "vocab_size": 32000,
}
OLMO2 = {
    "model_type": "olmo2",
    "attention_bias": False,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "max_position_embeddings": 4096,
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 32,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 500000,
    "tie_word_embeddings": False,
    "vocab_size": 100352,
}
GEMMA3 = {
    "model_type": "gemma3_text",
    "attention_bias": False,
    "attn_logit_softcapping": None,
    "cache_implementation": "hybrid",
    "final_logit_softcapping": None,
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "hidden_size": 1152,
    "intermediate_size": 6912,
    "max_position_embeddings": 32768,
    "num_attention_heads": 4,
    "num_hidden_layers": 26,
    "num_key_value_heads": 1,
    "query_pre_attn_scalar": 256,
    "rms_norm_eps": 1e-06,
    "rope_local_base_freq": 10000,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "sliding_window": 512,
    "sliding_window_pattern": 6,
    "vocab_size": 262144,
}
GEMMA3_4B = GEMMA3 | {
    "hidden_size": 2560,
    "intermediate_size": 10240,
    "max_position_embeddings": 131072,
    "num_attention_heads": 8,
    "num_hidden_layers": 34,
    "num_key_value_heads": 4,
    "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
    "sliding_window": 1024,
    "vocab_size": 262208,
}
LONG = (
    1,
    1.118320672,
    1.250641126,
    1.398617824,
    1.564103225,
    1.74916897,
    1.956131817,
    2.187582649,
    2.446418898,
    2.735880826,
    3.059592084,
    3.421605075,
    3.826451687,
    4.279200023,
    4.785517845,
    5.351743533,
    5.984965424,
    6.693110555,
    7.485043894,
    8.370679318,
    9.36110372,
    10.4687158,
    11.70738129,
    13.09260651,
    14.64173252,
    16.37415215,
    18.31155283,
    20.47818807,
    22.90118105,
    25.61086418,
    28.64115884,
    32.03,
    32.1,
    32.13,
    32.23,
    32.6,
    32.61,
    32.64,
    32.66,
    32.7,
    32.71,
    32.93,
    32.97,
    33.28,
    33.49,
    33.5,
    44.16,
    47.77,
)
PHI4 = {
    "model_type": "phi3",
    "attention_bias": False,
    "embd_pdrop": 0.0,
    "hidden_act": "silu",
    "hidden_size": 5120,
    "intermediate_size": 17920,
    "max_position_embeddings": 16384,
    "num_attention_heads": 40,
    "num_hidden_layers": 40,
    "num_key_value_heads": 10,
    "original_max_position_embeddings": 16384,
    "resid_pdrop": 0.0,
    "rms_norm_eps": 1e-05,
    "rope_scaling": None,
    "rope_theta": 250000,
    "sliding_window": None,
    "tie_word_embeddings": False,
    "vocab_size": 100352,
}
PUBLISHED |= {
    "mistral_7b": MISTRAL,
    "mistral_nemo_12b": MISTRAL
    | {
        "head_dim": 128,
        "hidden_size": 5120,
        "max_position_embeddings": 131072,
        "num_hidden_layers": 40,
        "rope_theta": 1000000.0,
        "sliding_window": None,
        "vocab_size": 131072,
    },
    "mistral_small_24b": MISTRAL
    | {
        "head_dim": 128,
        "hidden_size": 5120,
        "intermediate_size": 32768,
        "max_position_embeddings": 32768,
        "num_hidden_layers": 40,
        "rope_theta": 100000000.0,
        "sliding_window": None,
        "vocab_size": 131072,
    },
    "ministral3_8b": {  # text_config of the folder
        "model_type": "ministral3",
        "head_dim": 128,
        "hidden_act": "silu",
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "max_position_embeddings": 262144,
        "num_attention_heads": 32,
        "num_hidden_layers": 34,
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-05,
        "rope_parameters": {
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "factor": 16.0,
            "llama_4_scaling_beta": 0.1,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
            "original_max_position_embeddings": 16384,
            "rope_theta": 1000000.0,
            "rope_type": "yarn",
            "type": "yarn",
        },
        "sliding_window": None,
        "tie_word_embeddings": False,
        "vocab_size": 131072,
    },
    "smollm3_3b": {
        "model_type": "smollm3",
        "attention_bias": False,
        "hidden_act": "silu",
        "hidden_size": 2048,
        "intermediate_size": 11008,
        "layer_types": ["full_attention"] * 36,
        "max_position_embeddings": 65536,
        "max_window_layers": 28,
        "mlp_bias": False,
        "no_rope_layer_interval": 4,
        "no_rope_layers": [1, 1, 1, 0] * 9,
        "num_attention_heads": 16,
        "num_hidden_layers": 36,
        "num_key_value_heads": 4,
        "pretraining_tp": 2,
        "rms_norm_eps": 1e-06,
        "rope_scaling": None,
        "rope_theta": 5000000.0,
        "sliding_window": None,
        "use_sliding_window": False,
        "vocab_size": 128256,
    },
    "phi4_14b": PHI4,
    "phi4_mini": PHI4
    | {
        "auto_map": {"AutoConfig": "configuration_phi3.Phi3Config"},
        "full_attn_mod": 1,
        "hidden_size": 3072,
        "intermediate_size": 8192,
        "interpolate_factor": 1,
        "lm_head_bias": False,
        "max_position_embeddings": 131072,
        "mlp_bias": False,
        "num_attention_heads": 24,
        "num_hidden_layers": 32,
        "num_key_value_heads": 8,
        "original_max_position_embeddings": 4096,
        "partial_rotary_factor": 0.75,
        "rope_scaling": {
            "long_factor": list(LONG),
            "short_factor": [1.0] * 48,
            "type": "longrope",
        },
        "rope_theta": 10000.0,
        "sliding_window": 262144,
        "tie_word_embeddings": True,
        "vocab_size": 200064,
    },
    "granite3_8b": {
        "model_type": "granite",
        "attention_bias": False,
        "attention_multiplier": 0.0078125,
        "embedding_multiplier": 12.0,
        "hidden_act": "silu",
        "hidden_size": 4096,
        "intermediate_size": 12800,
        "logits_scaling": 16.0,
        "max_position_embeddings": 4096,
        "mlp_bias": False,
        "num_attention_heads": 32,
        "num_hidden_layers": 40,
        "num_key_value_heads": 8,
        "residual_multiplier": 0.22,
        "rms_norm_eps": 1e-05,
        "rope_scaling": None,
        "rope_theta": 10000.0,
        "tie_word_embeddings": True,
        "vocab_size": 49155,
    },
    "glm4_9b": {
        "model_type": "glm4",
        "attention_bias": True,
        "head_dim": 128,
        "hidden_act": "silu",
        "hidden_size": 4096,
        "intermediate_size": 13696,
        "max_position_embeddings": 32768,
        "num_attention_heads": 32,
        "num_hidden_layers": 40,
        "num_key_value_heads": 2,
        "partial_rotary_factor": 0.5,
        "rms_norm_eps": 1e-05,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        "vocab_size": 151552,
    },
    "seed_oss_36b": {
        "model_type": "seed_oss",
        "attention_bias": True,
        "attention_dropout": 0.1,
        "attention_out_bias": False,
        "head_dim": 128,
        "hidden_act": "silu",
        "hidden_size": 5120,
        "intermediate_size": 27648,
        "max_position_embeddings": 524288,
        "mlp_bias": False,
        "num_attention_heads": 80,
        "num_hidden_layers": 64,
        "num_key_value_heads": 8,
        "residual_dropout": 0.1,
        "rms_norm_eps": 1e-06,
        "rope_scaling": {"rope_type": "default"},
        "rope_theta": 10000000.0,
        "tie_word_embeddings": False,
        "vocab_size": 155136,
    },
    "olmo2_7b": OLMO2,
    "olmo3_7b": OLMO2
    | {
        "model_type": "olmo3",
        "layer_types": (["sliding_attention"] * 3 + ["full_attention"]) * 8,
        "max_position_embeddings": 65536,
        "rope_scaling": {
            "attention_factor": 1.2079441541679836,
            "beta_fast": 32,
            "beta_slow": 1,
            "factor": 8.0,
            "original_max_position_embeddings": 8192,
            "rope_type": "yarn",
        },
        "sliding_window": 4096,
        "vocab_size": 100278,
    },
    "exaone4_32b": {
        "model_type": "exaone4",
        "head_dim": 128,
        "hidden_act": "silu",
        "hidden_size": 5120,
        "intermediate_size": 27392,
        "layer_types": (["sliding_attention"] * 3 + ["full_attention"]) * 16,
        "max_position_embeddings": 131072,
        "num_attention_heads": 40,
        "num_hidden_layers": 64,
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-05,
        "rope_scaling": {
            "factor": 16.0,
            "high_freq_factor": 4.0,
            "low_freq_factor": 1.0,
            "original_max_position_embeddings": 8192,
            "rope_type": "llama3",
        },
        "rope_theta": 1000000,
        "sliding_window": 4096,
        "sliding_window_pattern": "LLLG",
        "tie_word_embeddings": False,
        "vocab_size": 102400,
    },
    "gemma3_1b": GEMMA3,
    "gemma3_4b": GEMMA3_4B,  # text_config of the folder, with the defaults that it leaves out
    "gemma3_12b": GEMMA3_4B
    | {
        "hidden_size": 3840,
        "intermediate_size": 15360,
        "num_attention_heads": 16,
        "num_hidden_layers": 48,
        "num_key_value_heads": 8,
    },
    "gemma3_27b": GEMMA3_4B
    | {
        "head_dim": 128,
        "hidden_size": 5376,
        "intermediate_size": 21504,
        "num_attention_heads": 32,
        "num_hidden_layers": 62,
        "num_key_value_heads": 16,
        "query_pre_attn_scalar": 168,
    },
}


QWEN3_5 = {  # text_config of the folder
    "model_type": "qwen3_5_text",
    "attention_bias": False,
    "attn_output_gate": True,
    "full_attention_interval": 4,
    "head_dim": 256,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "layer_types": (["linear_attention"] * 3 + ["full_attention"]) * 8,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_value_head_dim": 128,
    "mamba_ssm_dtype": "float32",
    "max_position_embeddings": 262144,
    "mlp_only_layers": [],
    "mtp_num_hidden_layers": 1,
    "mtp_use_dedicated_embeddings": False,
    "num_attention_heads": 16,
    "num_hidden_layers": 32,
    "num_key_value_heads": 4,
    "rms_norm_eps": 1e-06,
    "rope_parameters": {
        "mrope_interleaved": True,
        "mrope_section": [11, 11, 10],
        "partial_rotary_factor": 0.25,
        "rope_theta": 10000000,
        "rope_type": "default",
    },
    "tie_word_embeddings": False,
    "vocab_size": 248320,
}
PUBLISHED |= {
    "qwen3_5_0_8b": QWEN3_5
    | {"hidden_size": 1024, "intermediate_size": 3584, "linear_num_value_heads": 16}
    | {"layer_types": (["linear_attention"] * 3 + ["full_attention"]) * 6}
    | {"num_attention_heads": 8, "num_hidden_layers": 24, "num_key_value_heads": 2}
    | {"tie_word_embeddings": True},
    "qwen3_5_9b": QWEN3_5,
    "qwen3_5_35b_a3b": {key: QWEN3_5[key] for key in QWEN3_5 if key != "intermediate_size"}
    | {"model_type": "qwen3_5_moe_text", "hidden_size": 2048, "num_hidden_layers": 40}
    | {"layer_types": (["linear_attention"] * 3 + ["full_attention"]) * 10}
    | {"num_key_value_heads": 2, "num_experts": 256, "num_experts_per_tok": 8}
    | {"moe_intermediate_size": 512, "shared_expert_intermediate_size": 512}
    | {"router_aux_loss_coef": 0.001, "output_router_logits": False},
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
    "gemma3_4b_sft": PUBLISHED["gemma3_4b"],
    "qwen3_5_9b_sft": PUBLISHED["qwen3_5_9b"],
    "gpt_oss_20b_sft": PUBLISHED["gpt_oss_20b"],
    "gpt2_124m_sft": {
        **{"model_type": "gpt2", "n_embd": 768, "n_head": 12, "n_layer": 12, "n_positions": 1024},
        **{"activation_function": "gelu_new", "vocab_size": 50257, "layer_norm_epsilon": 1e-5},
    },
}


@pytest.mark.nightly
@pytest.mark.parametrize("name", [n for n in presets("experiment") if n.endswith("_sft")])
def test_a_recipe_for_fine_tuning_accepts_its_models_published_folder(
    name: str,
) -> None:
    config, (_, keys, _) = recipe(name), from_hf(FOLDERS[name])
    theirs = ModelConfig(**keys)
    model = model_from(theirs, config.model, lambda _: True, name, theirs.seq_length)
    assert model.seq_length == config.model.seq_length


@pytest.mark.parametrize("name", PUBLISHED)
def test_presets_follow_the_published_config(name: str) -> None:
    _, keys, _ = from_hf(PUBLISHED[name])
    content = yaml.safe_load((conf_dir() / "model" / f"{name}.yaml").read_text())
    ours, theirs = ModelConfig(**content), ModelConfig(**keys)
    same = {"name": "", "seq_length": 1, "head_dim": ours.head_size}
    same["num_query_groups"] = ours.kv_heads
    assert (ours.head_size, ours.kv_heads) == (theirs.head_size, theirs.kv_heads)
    assert replace(ours, **same) == replace(theirs, **same)


# Keys of published folders that no preset needs.
WRITTEN_BY_4 = {
    **{"architectures": ["LlamaForCausalLM"], "bos_token_id": 1, "eos_token_id": 2},
    **{"torch_dtype": "bfloat16", "transformers_version": "4.43.0", "use_cache": True},
}
BESIDE = {
    name: PUBLISHED[name] | more
    for name, more in {
        "llama3_1_8b": {"pretraining_tp": 1},
        "qwen3_8b": {"max_window_layers": 36, "use_sliding_window": False, "sliding_window": None},
        "olmoe_1b_7b": {"pad_token_id": 1, "router_aux_loss_coef": 0.01},
        "glm_4_5_air": {"max_window_layers": 46},
        "seed_oss_36b": {"pretraining_tp": 1},
    }.items()
}
# Further published folders: TinyLlama and SmolLM2-135M, Gemma 2 2B, GPT-2, Qwen1.5-MoE-A2.7B,
# Qwen3-Next-80B-A3B, the text model of LLaVA 1.5.
OTHERS = {
    "tinyllama": {
        **{"model_type": "llama", "hidden_size": 2048, "intermediate_size": 5632},
        **{"attention_bias": False, "hidden_act": "silu", "initializer_range": 0.02},
        **{"max_position_embeddings": 2048, "num_attention_heads": 32, "num_hidden_layers": 22},
        **{"num_key_value_heads": 4, "pretraining_tp": 1, "rms_norm_eps": 1e-5},
        **{"rope_scaling": None, "rope_theta": 10000.0, "tie_word_embeddings": False},
        "vocab_size": 32000,
    },
    "smollm2": {
        **{"model_type": "llama", "hidden_size": 576, "intermediate_size": 1536},
        **{"attention_bias": False, "attention_dropout": 0.0, "hidden_act": "silu"},
        **{"initializer_range": 0.041666666666666664, "is_llama_config": True, "mlp_bias": False},
        **{"max_position_embeddings": 8192, "num_attention_heads": 9, "num_hidden_layers": 30},
        **{"num_key_value_heads": 3, "pretraining_tp": 1, "rms_norm_eps": 1e-5},
        **{"rope_interleaved": False, "rope_scaling": None, "rope_theta": 100000},
        **{"tie_word_embeddings": True, "vocab_size": 49152},
    },
    "gemma2": {
        **{"model_type": "gemma2", "attention_bias": False, "attention_dropout": 0.0},
        **{"attn_logit_softcapping": 50.0, "cache_implementation": "hybrid", "head_dim": 256},
        **{"final_logit_softcapping": 30.0, "hidden_act": "gelu_pytorch_tanh"},
        **{"hidden_activation": "gelu_pytorch_tanh", "hidden_size": 2304},
        **{"initializer_range": 0.02, "intermediate_size": 9216, "max_position_embeddings": 8192},
        **{"num_attention_heads": 8, "num_hidden_layers": 26, "num_key_value_heads": 4},
        **{"pad_token_id": 0, "query_pre_attn_scalar": 256, "rms_norm_eps": 1e-6},
        **{"rope_theta": 10000.0, "sliding_window": 4096, "vocab_size": 256000},
    },
    "gpt2": {
        **{"model_type": "gpt2", "activation_function": "gelu_new", "attn_pdrop": 0.1},
        **{"embd_pdrop": 0.1, "initializer_range": 0.02, "layer_norm_epsilon": 1e-5},
        **{"n_ctx": 1024, "n_embd": 1024, "n_head": 16, "n_layer": 24, "n_positions": 1024},
        **{"n_special": 0, "predict_special_tokens": True, "resid_pdrop": 0.1},
        **{"summary_activation": None, "summary_first_dropout": 0.1, "vocab_size": 50257},
        **{"summary_proj_to_labels": True, "summary_type": "cls_index", "summary_use_proj": True},
        "task_specific_params": {"text-generation": {"do_sample": True, "max_length": 50}},
    },
    "qwen2_moe": {
        **{"model_type": "qwen2_moe", "attention_dropout": 0.0, "decoder_sparse_step": 1},
        **{"hidden_act": "silu", "hidden_size": 2048, "initializer_range": 0.02},
        **{"intermediate_size": 5632, "max_position_embeddings": 8192, "max_window_layers": 21},
        **{"moe_intermediate_size": 1408, "norm_topk_prob": False, "num_attention_heads": 16},
        **{"num_experts": 60, "num_experts_per_tok": 4, "num_hidden_layers": 24},
        **{"num_key_value_heads": 16, "output_router_logits": False, "rms_norm_eps": 1e-6},
        **{"rope_theta": 1000000.0, "router_aux_loss_coef": 0.001, "sliding_window": 32768},
        **{"shared_expert_intermediate_size": 5632, "tie_word_embeddings": False},
        **{"use_sliding_window": False, "vocab_size": 151936},
    },
    "qwen3_next": {
        **{"model_type": "qwen3_next", "attention_bias": False, "attention_dropout": 0.0},
        **{"decoder_sparse_step": 1, "full_attention_interval": 4, "head_dim": 256},
        **{"hidden_act": "silu", "hidden_size": 2048, "initializer_range": 0.02},
        **{"intermediate_size": 5120, "linear_conv_kernel_dim": 4, "linear_key_head_dim": 128},
        **{"linear_num_key_heads": 16, "linear_num_value_heads": 32, "linear_value_head_dim": 128},
        **{"max_position_embeddings": 262144, "mlp_only_layers": [], "num_attention_heads": 16},
        **{"moe_intermediate_size": 512, "norm_topk_prob": True, "num_experts": 512},
        **{"num_experts_per_tok": 10, "num_hidden_layers": 48, "num_key_value_heads": 2},
        **{"output_router_logits": False, "partial_rotary_factor": 0.25, "rms_norm_eps": 1e-6},
        **{"rope_scaling": None, "rope_theta": 10000000, "router_aux_loss_coef": 0.001},
        **{"shared_expert_intermediate_size": 512, "tie_word_embeddings": False},
        **{"use_sliding_window": False, "vocab_size": 151936},
    },
    "llava": {
        **{"model_type": "llama", "max_position_embeddings": 4096, "rms_norm_eps": 1e-5},
        **{"vocab_size": 32064, "add_cross_attention": False, "bad_words_ids": None},
        **{"begin_suppress_tokens": None, "cross_attention_hidden_size": None, "top_p": 1.0},
        **{"decoder_start_token_id": None, "diversity_penalty": 0.0, "do_sample": False},
        **{"early_stopping": False, "encoder_no_repeat_ngram_size": 0, "finetuning_task": None},
        **{"exponential_decay_length_penalty": None, "forced_bos_token_id": None, "top_k": 50},
        **{"forced_eos_token_id": None, "is_decoder": False, "length_penalty": 1.0},
        **{"max_length": 20, "min_length": 0, "no_repeat_ngram_size": 0, "num_beam_groups": 1},
        **{"num_beams": 1, "num_return_sequences": 1, "output_scores": False, "prefix": None},
        **{"pretraining_tp": 1, "pruned_heads": {}, "remove_invalid_values": False},
        **{"repetition_penalty": 1.0, "return_dict_in_generate": False, "sep_token_id": None},
        **{"suppress_tokens": None, "task_specific_params": None, "temperature": 1.0},
        **{"tf_legacy_loss": False, "tie_encoder_decoder": False, "tokenizer_class": None},
        **{"torchscript": False, "typical_p": 1.0, "use_bfloat16": False},
    },
}


@pytest.mark.parametrize("config", [*PUBLISHED.values(), *BESIDE.values(), *OTHERS.values()])
def test_a_run_starts_from_a_published_folder_without_transformers(config: dict[str, Any]) -> None:
    """No key of it is left for a comparison of logits, which `init_from` does not make."""
    assert from_hf(config | WRITTEN_BY_4).unread == {}


@pytest.mark.parametrize(
    ("name", "changed"),
    [
        ("qwen3_5_9b", {"mlp_only_layers": [1]}),
        ("qwen3_30b_a3b", {"use_sliding_window": True, "sliding_window": 7}),
        ("llama3_1_8b", {"tp_pretraining": 1}),
    ],
)
def test_a_key_that_may_change_the_model_is_left_for_a_proof(
    name: str, changed: dict[str, Any]
) -> None:
    """Versions of transformers differ in the windows of Qwen3-MoE's layers."""
    (key,) = from_hf(PUBLISHED[name] | changed).unread
    assert key in (*changed, "max_window_layers")


def test_a_null_that_may_mean_no_positions_or_the_default_is_refused() -> None:
    """transformers 5 reads its default, but folders of OLMo Hybrid may mean no positions."""
    none = {"rope_theta": None, "rope_type": "default"}
    for more in ({"rope_theta": None}, {"rope_parameters": none}):
        found = from_hf({"model_type": "olmo_hybrid", **more})
        assert found.keys["layer_types"] == ["gated_deltanet"] * 3 + ["full_nope"]
    found = from_hf({"model_type": "olmo_hybrid", "rope_parameters": None, "rope_theta": None})
    assert found.keys["layer_types"][-1] == "full_nope"
    with pytest.raises(UserError, match="rope_parameters=null without rope_theta"):
        from_hf({"model_type": "olmo_hybrid", "rope_parameters": None})
    assert from_hf({"model_type": "olmo3", "rope_parameters": None}).keys["rotary_base"] == 5e5


@pytest.mark.parametrize("scaling", [{}, {"rope_type": "yarn", "factor": 4.0}])
def test_an_export_has_the_shares_of_images_in_the_object_that_readers_take(
    scaling: dict[str, Any],
) -> None:
    """With a scaling, transformers takes rope_scaling in place of rope_parameters."""
    config = QWEN3_5 | {"rope_parameters": QWEN3_5["rope_parameters"] | scaling}
    model, kept = ModelConfig(**from_hf(config).keys), kept_keys(config)
    written = with_kept(to_hf(model, "bf16", "qwen3_5_text"), kept)
    assert kept_keys(written)["rope_parameters"] == kept["rope_parameters"]
    assert from_hf(written).keys == from_hf(config).keys
