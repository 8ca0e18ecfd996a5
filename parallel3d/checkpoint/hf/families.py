"""Families of Hugging Face models: their names, transformers' defaults, and their variations.

A family's defaults, which a config.json may leave out, are those of transformers' configuration
classes. It uses no torch and no files.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

LLAMA = "llama"
QWEN2 = "qwen2"
QWEN3 = "qwen3"
GPT2 = "gpt2"
QWEN3_MOE = "qwen3_moe"
QWEN2_MOE = "qwen2_moe"
MIXTRAL = "mixtral"
OLMOE = "olmoe"
DOTS1 = "dots1"
GLM4_MOE = "glm4_moe"
MINIMAX_M2 = "minimax_m2"


@dataclass(frozen=True)
class ExpertNames:
    """Describes how a family spells its experts.

    Attributes:
        block: module that stands in place of an MLP.
        parts: their names of our gate, up and down in an expert.
        shared: their module of the shared expert; None: the family has none.
        choice_bias: their tensor of the router's bias in `block`; None: the family has none.
        count: key with the number of experts.
        width: key with the width of an expert; `intermediate_size` where no layer is dense.
        shared_width: key with the width of the shared expert, or with the number of experts of
            `width` that it is as large as (`shared_in_experts`).
        gated: the shared expert's output is multiplied by a sigmoid of the token.
        score: `model.router_score`.
        normalizes: norm_topk_prob where the family has no such key; None: it has the key.
        dense: key that says which layers are dense; None: no layer is.
        grouped: it has groups of experts and a scale of their weights.
    """

    block: str
    parts: tuple[str, str, str]
    count: str
    width: str = "moe_intermediate_size"
    shared: str | None = None
    shared_width: str = ""
    shared_in_experts: bool = False
    gated: bool = False
    choice_bias: str | None = None
    score: str = "softmax"
    normalizes: bool | None = None
    dense: str | None = None
    grouped: bool = False


@dataclass(frozen=True)
class Family:
    """Describes a family of models.

    Attributes:
        title: its name in sentences.
        architecture: transformers' class of the language model.
        defaults: values of keys that config.json may leave out.
        aliases: other name of a key → the key, as in transformers' `attribute_map`.
        fixed: keys that may change the result of this family alone, with their harmless values.
        harmless: more keys that change no logit of this family.
        head_dim: default of `head_dim`; None: hidden_size / num_attention_heads.
        biases: `model.attention_bias` that the key `bias_key` switches on; None: no bias.
        bias_key: key that switches attention's biases on; None: `biases` is always so.
        norm_of_heads: norms of q and k: "head", "full", None, or "" where `use_qk_norm` decides.
        rotary: default of partial_rotary_factor; None: every dimension of a head is rotated.
        has_rotary_dim: it may give the number of rotated dimensions as rotary_dim.
        base: default of rope_theta.
        window: "off": sliding_window must be null; "switch": use_sliding_window decides;
            "late": layers from max_window_layers on have it.
        experts: names of its experts; None: a dense family.
    """

    title: str
    architecture: str
    defaults: Mapping[str, Any]
    aliases: Mapping[str, str] = field(default_factory=dict)
    fixed: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    harmless: str = ""
    head_dim: int | None = None
    biases: str | None = None
    bias_key: str | None = None
    norm_of_heads: str | None = None
    rotary: float | None = None
    has_rotary_dim: bool = False
    base: float = 10000.0
    window: str = "off"
    experts: ExpertNames | None = None


def _sizes(
    hidden: int,
    layers: int,
    heads: int,
    kv_heads: int | None,
    ffn: int,
    positions: int,
    vocabulary: int,
    eps: float = 1e-6,
) -> dict[str, Any]:
    return {
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,  # None: as many as query heads
        "intermediate_size": ffn,
        "max_position_embeddings": positions,
        "vocab_size": vocabulary,
        "rms_norm_eps": eps,
        "tie_word_embeddings": False,
        "initializer_range": 0.02,
    }


_PROJECTIONS = ("gate_proj", "up_proj", "down_proj")
_MIXTRAL_PARTS = ("w1", "w3", "w2")
_NO_JITTER = {"router_jitter_noise": (0.0,)}
_DEEPSEEK = ExpertNames(  # the layer of DeepSeek-V3
    "mlp",
    _PROJECTIONS,
    "n_routed_experts",
    shared="shared_experts",
    shared_width="n_shared_experts",
    shared_in_experts=True,
    choice_bias="gate.e_score_correction_bias",
    score="sigmoid",
    dense="first_k_dense_replace",
    grouped=True,
)
_DEEPSEEK_DEFAULTS = {"n_group": 1, "topk_group": 1, "routed_scaling_factor": 1.0}
# Keys of DeepSeek's own code, which transformers does not read.
_DEEPSEEK_FIXED = {"moe_layer_freq": (1,), "scoring_func": ("sigmoid", "noaux_tc")}
_GPT2_SIZES = {
    "n_embd": 768,
    "n_layer": 12,
    "n_head": 12,
    "n_positions": 1024,
    "vocab_size": 50257,
    "layer_norm_epsilon": 1e-5,
    "tie_word_embeddings": True,
    "initializer_range": 0.02,
}

FAMILIES: dict[str, Family] = {
    LLAMA: Family(
        "Llama",
        "LlamaForCausalLM",
        _sizes(4096, 32, 32, None, 11008, 2048, 32000),
        biases="all",
        bias_key="attention_bias",
    ),
    QWEN2: Family(
        "Qwen2",
        "Qwen2ForCausalLM",
        _sizes(4096, 32, 32, 32, 22016, 32768, 151936),
        biases="qkv",
        window="switch",
    ),
    QWEN3: Family(
        "Qwen3",
        "Qwen3ForCausalLM",
        _sizes(4096, 32, 32, 32, 22016, 32768, 151936),
        head_dim=128,
        biases="all",
        bias_key="attention_bias",
        norm_of_heads="head",
        window="switch",
    ),
    GPT2: Family(
        "GPT-2",
        "GPT2LMHeadModel",
        _GPT2_SIZES,
        # Sizes under Llama's names, which GPT-2 may use as well.
        aliases={
            "hidden_size": "n_embd",
            "num_hidden_layers": "n_layer",
            "num_attention_heads": "n_head",
            "max_position_embeddings": "n_positions",
        },
    ),
    QWEN3_MOE: Family(
        "Qwen3-MoE",
        "Qwen3MoeForCausalLM",
        _sizes(2048, 24, 32, 4, 6144, 32768, 151936)
        | {"num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768},
        aliases={"num_local_experts": "num_experts"},
        biases="all",
        bias_key="attention_bias",
        norm_of_heads="head",
        window="switch",
        experts=ExpertNames("mlp", _PROJECTIONS, "num_experts", dense="mlp_only_layers"),
    ),
    QWEN2_MOE: Family(
        "Qwen2-MoE",
        "Qwen2MoeForCausalLM",
        _sizes(2048, 24, 16, 16, 5632, 32768, 151936)
        | {"num_experts": 60, "num_experts_per_tok": 4, "moe_intermediate_size": 1408}
        | {"shared_expert_intermediate_size": 5632, "qkv_bias": True},
        biases="qkv",
        bias_key="qkv_bias",
        window="switch",
        experts=ExpertNames(
            "mlp",
            _PROJECTIONS,
            "num_experts",
            shared="shared_expert",
            shared_width="shared_expert_intermediate_size",
            gated=True,
            dense="mlp_only_layers",
        ),
    ),
    MIXTRAL: Family(
        "Mixtral",
        "MixtralForCausalLM",
        _sizes(4096, 32, 32, 8, 14336, 131072, 32000, 1e-5)
        | {"num_local_experts": 8, "num_experts_per_tok": 2},
        aliases={"num_experts": "num_local_experts"},
        fixed=_NO_JITTER,
        base=1e6,
        experts=ExpertNames(
            "block_sparse_moe",
            _MIXTRAL_PARTS,
            "num_local_experts",
            width="intermediate_size",
            normalizes=True,
        ),
    ),
    OLMOE: Family(
        "OLMoE",
        "OlmoeForCausalLM",
        _sizes(2048, 16, 16, None, 2048, 4096, 50304, 1e-5)
        | {"num_experts": 64, "num_experts_per_tok": 8},
        aliases={"num_local_experts": "num_experts"},
        fixed={"clip_qkv": (None,)},
        biases="all",
        bias_key="attention_bias",
        norm_of_heads="full",
        experts=ExpertNames("mlp", _PROJECTIONS, "num_experts", width="intermediate_size"),
    ),
    DOTS1: Family(
        "dots.llm1",
        "Dots1ForCausalLM",
        _sizes(4608, 62, 32, 32, 10944, 2048, 152064)
        | {"n_routed_experts": None, "num_experts_per_tok": None, "n_shared_experts": None}
        | {"moe_intermediate_size": 1408, "first_k_dense_replace": 0, "sliding_window": 4096}
        | {"max_window_layers": 62, **_DEEPSEEK_DEFAULTS},
        aliases={"num_local_experts": "n_routed_experts"},
        fixed=_DEEPSEEK_FIXED,
        biases="all",
        bias_key="attention_bias",
        norm_of_heads="head",
        window="late",
        experts=_DEEPSEEK,
    ),
    GLM4_MOE: Family(
        "GLM-4.5",
        "Glm4MoeForCausalLM",
        _sizes(4096, 46, 96, 8, 10944, 131072, 151552, 1e-5)
        | {"n_routed_experts": 128, "num_experts_per_tok": 8, "n_shared_experts": 1}
        | {"moe_intermediate_size": 1408, "first_k_dense_replace": 1, "norm_topk_prob": True}
        | _DEEPSEEK_DEFAULTS,
        aliases={
            "num_local_experts": "n_routed_experts",
            "num_mtp_layers": "num_nextn_predict_layers",
        },
        fixed=_DEEPSEEK_FIXED,
        biases="qkv",
        bias_key="attention_bias",
        norm_of_heads="",
        rotary=0.5,
        experts=_DEEPSEEK,
    ),
    MINIMAX_M2: Family(
        "MiniMax-M2",
        "MiniMaxM2ForCausalLM",
        _sizes(3072, 62, 48, 8, 1536, 196608, 200064)
        | {"num_local_experts": 256, "num_experts_per_tok": 8},
        aliases={"num_experts": "num_local_experts"},
        # Keys of MiniMax's own code, which transformers does not read.
        fixed=_NO_JITTER
        | {"scoring_func": ("sigmoid",), "use_routing_bias": (True,), "use_qk_norm": (True,)}
        | {"qk_norm_type": ("per_layer",), "shared_intermediate_size": (0,)}
        | {f"layernorm_{part}_beta": (1.0,) for part in ("full_attention", "mlp")},
        harmless="use_mtp num_mtp_modules mtp_transformer_layers mlp_intermediate_size "
        "layernorm_linear_attention_beta shared_moe_mode",
        head_dim=128,
        norm_of_heads="full",
        rotary=1.0,
        has_rotary_dim=True,
        base=5e6,
        experts=ExpertNames(
            "block_sparse_moe",
            _MIXTRAL_PARTS,
            "num_local_experts",
            width="intermediate_size",
            choice_bias="e_score_correction_bias",
            score="sigmoid",
            normalizes=True,
        ),
    ),
}
