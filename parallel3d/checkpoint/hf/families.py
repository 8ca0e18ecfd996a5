"""Describes families of Hugging Face models: tensor names, defaults, and differences from Llama.

A config.json may leave out values that equal the defaults of transformers' configuration class.
This module neither imports torch nor opens files.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
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
MISTRAL = "mistral"
MINISTRAL3 = "ministral3"
SMOLLM3 = "smollm3"
PHI3 = "phi3"
GRANITE = "granite"
GLM4 = "glm4"
SEED_OSS = "seed_oss"
OLMO2 = "olmo2"
OLMO3 = "olmo3"
EXAONE4 = "exaone4"
GEMMA2 = "gemma2"
GEMMA3 = "gemma3_text"
QWEN3_NEXT = "qwen3_next"
QWEN3_5 = "qwen3_5_text"
QWEN3_5_MOE = "qwen3_5_moe_text"
OLMO_HYBRID = "olmo_hybrid"
GPT_OSS = "gpt_oss"


@dataclass(frozen=True)
class ExpertNames:
    """Describes the names and keys that a family uses for its experts.

    Attributes:
        block: name of the module with the experts, which takes the place of the MLP.
        parts: transformers' names of our gate, up and down projections in an expert.
        count: key with the number of experts.
        width: key with the width of an expert, which is `intermediate_size` in families without
            dense layers.
        shared: transformers' name of the shared expert, or None if the family has none.
        shared_width: key with the width of the shared expert.
        shared_in_experts: whether that width is given as a multiple of a routed expert's width.
        gated: whether the shared expert's output is multiplied by a sigmoid that depends on the
            token.
        choice_bias: name of the tensor in `block` with the router's bias, or None without a bias.
        score: the family's `model.router_score`.
        normalizes: whether the weights of the chosen experts are normalized; with None, the key
            norm_topk_prob decides.
        dense: key that selects the dense layers, or None if no layer is dense.
        grouped: whether the router chooses among groups of experts, and scales the weights.
        router: name of the module in `block` with the router.
        joined: whether a file holds the experts of a layer in tensors that join them, as
            gate_up_proj, whose names and form are in `names`. Such experts and their router have
            biases, and a limited swiglu.
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
    router: str = "gate"
    joined: bool = False


@dataclass(frozen=True)
class Windows:
    """Describes which layers of a family have a window if config.json has no list of layer types.

    Attributes:
        rule: which layers have a window. The rule "all" selects every layer, "late" the layers from
            max_window_layers on, "early" every second layer before max_window_layers, "period" all
            but every `period`th layer, and "unrotated" the layers without positions.
        size: default of sliding_window, or None if no layer has a window by default.
        switch: whether use_sliding_window must be true for layers to have a window.
        period: period of the rule "period" or, with "unrotated", of the layers without positions.
        period_key: key that gives another `period`, or "" if there is no such key.
        last: default of max_window_layers.
        nope: whether layers without a window have no positions if other layers have a window, as in
            EXAONE 4.
    """

    rule: str
    size: int | None = 4096
    switch: bool = False
    period: int = 0
    period_key: str = ""
    last: int = 28
    nope: bool = False

    @property
    def by_layer(self) -> bool:
        """Returns whether layer_types may assign a window to individual layers."""
        return self.rule != "all"


@dataclass(frozen=True)
class Scale:
    """Describes a scale of the model's values, and its key in config.json.

    Attributes:
        ours: our key.
        theirs: transformers' key.
        usual: default of transformers' key, or None if the scale is off by default.
        power: exponent that turns transformers' value into ours.
        is_whole: whether the value of transformers' key is a whole number.
        may_be_off: whether the value of transformers' key may be null, which means off.
    """

    ours: str
    theirs: str
    usual: float | None = 1.0
    power: float = 1.0
    is_whole: bool = False
    may_be_off: bool = False


# transformers' norms over the hidden dimension in a layer → ours.
BEFORE = {"input_layernorm": "input_norm", "post_attention_layernorm": "mlp_norm"}


@dataclass(frozen=True)
class DeltaNames:
    """Describes the layers with a gated DeltaNet: names in a layer, and defaults of their keys.

    Attributes:
        modules: transformers' module or tensor → ours that it joins, separated by spaces.
        by_head: those of them whose rows are grouped by key heads: a group has the rows of the
            first of our modules for a key head, then those of the second, and so on.
        norms: transformers' module of each norm in such a layer → ours.
        other_names: other name of a norm that transformers reads as well → the name in `norms` or
            in the family's own.
        norm_eps: epsilon of the norm of each head's output, or None for that of other norms.
        negative: default of linear_allow_neg_eigval, or None if there is no such key.
        sizes: defaults of keys for numbers and sizes of heads; without them, they follow from the
            attention's, as in OLMo Hybrid.
        both_kinds: whether a model must have layers of attention, too.
    """

    modules: Mapping[str, str]
    by_head: frozenset[str] = frozenset()
    norms: Mapping[str, str] = field(default_factory=lambda: BEFORE)
    other_names: Mapping[str, str] = field(default_factory=dict)
    norm_eps: float | None = None
    negative: bool | None = None
    sizes: Mapping[str, int] | None = None
    both_kinds: bool = False

    @property
    def norm_position(self) -> str:
        """Returns where such a layer has norms, as in `model.norm_position`."""
        return _position(self.norms)


AFTER = {
    "post_attention_layernorm": "attention_output_norm",
    "post_feedforward_layernorm": "mlp_output_norm",
}
GEMMA_NORMS = {
    "input_layernorm": "input_norm",
    "post_attention_layernorm": "attention_output_norm",
    "pre_feedforward_layernorm": "mlp_norm",
    "post_feedforward_layernorm": "mlp_output_norm",
}
GLM_NORMS = {
    "input_layernorm": "input_norm",
    "post_self_attn_layernorm": "attention_output_norm",
    "post_attention_layernorm": "mlp_norm",
    "post_mlp_layernorm": "mlp_output_norm",
}
# transformers' module → our modules that it joins, in their order along dimension 0.
_JOINED_QKV = {"self_attn.qkv_proj": "attention.q attention.k attention.v"}
_JOINED_MLP = {"mlp.gate_up_proj": "mlp.gate mlp.up"}
SCALINGS = ("default", "llama3", "linear", "yarn", "longrope")


def _position(norms: Mapping[str, str]) -> str:
    before, after = (name in norms.values() for name in ("mlp_norm", "mlp_output_norm"))
    return "both" if before and after else "before" if before else "after"


@dataclass(frozen=True)
class Family:
    """Describes a family of models.

    Attributes:
        title: name of the family in messages.
        architecture: transformers' class of the language model.
        defaults: values of keys that config.json may leave out.
        aliases: other name of a key → the key, as in transformers' `attribute_map`.
        fixed: further keys that may change the logits of this family → their harmless values. An
            absent key has its value in `defaults`, or else the first harmless value.
        ignored: further keys of the family's config class that its model ignores, separated by
            spaces.
        norms: transformers' module of each norm in a layer → ours.
        joined: transformers' module that joins several projections → ours, separated by spaces.
        head_dim: default of `head_dim`; None means hidden_size / num_attention_heads.
        null_head_dim: whether `head_dim` may be null, which means hidden_size /
            num_attention_heads.
        has_head_dim: whether an export always writes `head_dim`; otherwise it only writes a value
            that differs from hidden_size / num_attention_heads.
        whole_heads: whether transformers refuses a hidden_size that is not a multiple of the number
            of heads.
        usual_heads: whether the size of a head must be hidden_size / num_attention_heads.
        activation_key: key with the MLP's non-linearity.
        activations: allowed values of `model.activation`, the default first.
        biases: value of `model.attention_bias` if attention has biases, or None if it has none.
        bias_key: key that switches the biases of attention on; with None, `biases` always applies.
        out_bias_key: key that adds a bias to attention's output projection, or None if there is no
            such key.
        has_mlp_bias: whether the key mlp_bias switches the MLP's biases on.
        dropouts: keys with dropout probabilities.
        norm_of_heads: `model.qk_norm_width` of the norms of queries and keys, or None without such
            norms. With "", the key use_qk_norm switches norms of each head on.
        rotary: default of partial_rotary_factor, or None if every dimension of a head is rotated.
        has_rotary_dim: whether rotary_dim may give the number of rotated dimensions.
        pairs: whether RoPE pairs dimensions 2i and 2i + 1 of a head. Our model pairs i and i + r/2.
        base: default of rope_theta.
        local_base: default base of layers with a window, in families whose layers with and without
            a window have separate rope_parameters; with None, all layers share rope_parameters.
        local_key: top-level key that overrides `local_base`, or "" if there is no such key.
        scalings: allowed values of rope_type.
        rope_names: other name of a rope_type → the rope_type.
        rope: value of rope_parameters if config.json has none.
        original: default of original_max_position_embeddings at the top level, or None if there is
            no such default.
        sinks: whether attention has sinks.
        has_temperature: whether llama_4_scaling_beta in rope_parameters scales the queries.
        windows: which layers have a window, or None if no layer may have one.
        zero_centered: whether norms multiply by 1 + weight.
        root_scale: whether the embedding is multiplied by √hidden_size.
        scales: scales of the model's values.
        has_pad: whether transformers has a default pad_token_id, which might lie outside of the
            vocabulary, so that an export writes null.
        experts: names of the experts, or None if the family is dense.
        gated: whether attention's output has a gate, whose rows follow those of the queries in each
            head of self_attn.q_proj.
        delta: names of the layers with a gated DeltaNet, or None if the family has no such layers.
        may_lack_positions: whether rope_theta may be null, which means that no layer rotates.
        multimodal: whether rope_parameters may say how images and videos share the frequencies.
        others: beginning of the names of tensors that transformers leaves out, and that an export
            writes back unchanged; "" if there are none.
        kept: further keys that transformers does not read, and that an export writes back → the
            type of their values.
    """

    title: str
    architecture: str
    defaults: Mapping[str, Any]
    aliases: Mapping[str, str] = field(default_factory=dict)
    fixed: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    ignored: str = ""
    norms: Mapping[str, str] = field(default_factory=lambda: BEFORE)
    joined: Mapping[str, str] = field(default_factory=dict)
    head_dim: int | None = None
    null_head_dim: bool = False
    has_head_dim: bool = True
    whole_heads: bool = False
    usual_heads: bool = False
    activation_key: str = "hidden_act"
    activations: tuple[str, ...] = ("swiglu",)
    biases: str | None = None
    bias_key: str | None = None
    out_bias_key: str | None = None
    has_mlp_bias: bool = False
    dropouts: tuple[str, ...] = ("attention_dropout",)
    norm_of_heads: str | None = None
    rotary: float | None = None
    has_rotary_dim: bool = False
    pairs: bool = False
    base: float = 10000.0
    local_base: float | None = None
    local_key: str = ""
    scalings: tuple[str, ...] = SCALINGS
    rope_names: Mapping[str, str] = field(default_factory=dict)
    rope: Mapping[str, Any] = field(default_factory=dict)
    original: int | None = None
    sinks: bool = False
    has_temperature: bool = False
    windows: Windows | None = None
    zero_centered: bool = False
    root_scale: bool = False
    scales: tuple[Scale, ...] = ()
    has_pad: bool = False
    experts: ExpertNames | None = None
    gated: bool = False
    delta: DeltaNames | None = None
    may_lack_positions: bool = False
    multimodal: bool = False
    others: str = ""
    kept: Mapping[str, type] = field(default_factory=dict)

    @property
    def joins_experts(self) -> bool:
        """Returns whether a file joins the experts of a layer, transposed."""
        return self.experts is not None and self.experts.joined

    @property
    def norm_position(self) -> str:
        """Returns the family's `model.norm_position`."""
        return _position(self.norms)


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
        "num_key_value_heads": kv_heads,  # None means one for each query head
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
_DEEPSEEK = ExpertNames(  # names in a layer of DeepSeek-V3
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
_GEMMA_DEFAULTS = {"tie_word_embeddings": True}
_GEMMA_FIXED = {"use_bidirectional_attention": (None, False)}


def _cap(usual: float | None) -> Scale:
    return Scale("logit_cap", "final_logit_softcapping", usual, may_be_off=True)


_QUERY_SCALAR = Scale("attention_scale", "query_pre_attn_scalar", 256, -0.5, is_whole=True)

_DELTA_SIZES = {
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
}
_IN_DELTA = {
    "linear_attn.conv1d": "attention.q_conv attention.k_conv attention.v_conv",
    "linear_attn.A_log": "attention.A_log",
    "linear_attn.dt_bias": "attention.dt_bias",
    "linear_attn.norm": "attention.o_norm",
    "linear_attn.out_proj": "attention.out",
}
_QWEN3_NEXT_DELTA = DeltaNames(
    {
        "linear_attn.in_proj_qkvz": "attention.q attention.k attention.v attention.z",
        "linear_attn.in_proj_ba": "attention.b attention.a",
        **_IN_DELTA,
    },
    by_head=frozenset(("linear_attn.in_proj_qkvz", "linear_attn.in_proj_ba")),
    sizes=_DELTA_SIZES,
)
_QWEN3_5_DELTA = DeltaNames(
    {
        "linear_attn.in_proj_qkv": "attention.q attention.k attention.v",
        "linear_attn.in_proj_z": "attention.z",
        "linear_attn.in_proj_b": "attention.b",
        "linear_attn.in_proj_a": "attention.a",
        **_IN_DELTA,
    },
    sizes=_DELTA_SIZES,
)
# Keys of other readers, which transformers does not read, with the only values that have a meaning.
_QWEN3_5_FIXED = {
    "attn_output_gate": (True,),
    "output_gate_type": ("swish",),
    "mamba_ssm_dtype": ("float32",),
}
_QWEN3_5_WRITTEN = {key: value for key, (value,) in _QWEN3_5_FIXED.items()}
_QWEN3_5 = Family(
    "Qwen3.5",
    "Qwen3_5ForCausalLM",
    _sizes(4096, 32, 16, 4, 12288, 32768, 248320) | _QWEN3_5_WRITTEN,
    fixed=_QWEN3_5_FIXED,
    head_dim=256,
    biases="all",
    bias_key="attention_bias",
    norm_of_heads="head",
    rotary=0.25,
    zero_centered=True,
    gated=True,
    delta=_QWEN3_5_DELTA,
    multimodal=True,
    others="mtp.",
    kept={"mtp_num_hidden_layers": int, "mtp_use_dedicated_embeddings": bool},
)
_OLMO_DELTA = DeltaNames(
    {
        **{f"linear_attn.{part}_proj": f"attention.{part}" for part in "qkvba"},
        "linear_attn.g_proj": "attention.z",
        **{f"linear_attn.{part}_conv1d": f"attention.{part}_conv" for part in "qkv"},
        "linear_attn.A_log": "attention.A_log",
        "linear_attn.dt_bias": "attention.dt_bias",
        "linear_attn.o_norm": "attention.o_norm",
        "linear_attn.o_proj": "attention.out",
    },
    norms={"attention_layer_norm": "input_norm", "feedforward_layer_norm": "mlp_norm"},
    other_names={
        "input_layernorm": "attention_layer_norm",
        "post_attention_layernorm": "feedforward_layer_norm",
        "feedforward_layer_norm": "post_attention_layernorm",
    },
    norm_eps=1e-5,
    negative=True,
    both_kinds=True,
)
_QWEN2_EXPERTS = ExpertNames(
    "mlp",
    _PROJECTIONS,
    "num_experts",
    shared="shared_expert",
    shared_width="shared_expert_intermediate_size",
    gated=True,
    dense="mlp_only_layers",
)

_OLMO2 = Family(
    "OLMo 2",
    "Olmo2ForCausalLM",
    _sizes(4096, 32, 32, None, 11008, 2048, 50304, 1e-5),
    norms=AFTER,
    has_head_dim=False,
    biases="all",
    bias_key="attention_bias",
    norm_of_heads="full",
    has_pad=True,
)

FAMILIES: dict[str, Family] = {
    LLAMA: Family(
        "Llama",
        "LlamaForCausalLM",
        _sizes(4096, 32, 32, None, 11008, 2048, 32000),
        ignored="is_llama_config",  # a key of SmolLM's own converter
        null_head_dim=True,
        whole_heads=True,
        activations=("swiglu", "geglu"),
        biases="all",
        bias_key="attention_bias",
        has_mlp_bias=True,
    ),
    QWEN2: Family(
        "Qwen2",
        "Qwen2ForCausalLM",
        _sizes(4096, 32, 32, 32, 22016, 32768, 151936),
        has_head_dim=False,
        biases="qkv",
        windows=Windows("late", switch=True),
    ),
    QWEN3: Family(
        "Qwen3",
        "Qwen3ForCausalLM",
        _sizes(4096, 32, 32, 32, 22016, 32768, 151936),
        head_dim=128,
        biases="all",
        bias_key="attention_bias",
        norm_of_heads="head",
        windows=Windows("late", switch=True),
    ),
    GPT2: Family(
        "GPT-2",
        "GPT2LMHeadModel",
        _GPT2_SIZES,
        # A GPT-2 config may use these names of Llama for its sizes.
        aliases={
            "hidden_size": "n_embd",
            "num_hidden_layers": "n_layer",
            "num_attention_heads": "n_head",
            "max_position_embeddings": "n_positions",
        },
        dropouts=("attn_pdrop", "embd_pdrop", "resid_pdrop", "summary_first_dropout"),
        ignored="reorder_and_upcast_attn summary_activation summary_proj_to_labels summary_type "
        "summary_use_proj output_past predict_special_tokens",
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
        windows=Windows("all", switch=True),
        experts=ExpertNames("mlp", _PROJECTIONS, "num_experts", dense="mlp_only_layers"),
    ),
    QWEN2_MOE: Family(
        "Qwen2-MoE",
        "Qwen2MoeForCausalLM",
        _sizes(2048, 24, 16, 16, 5632, 32768, 151936)
        | {"num_experts": 60, "num_experts_per_tok": 4, "moe_intermediate_size": 1408}
        | {"shared_expert_intermediate_size": 5632, "qkv_bias": True},
        has_head_dim=False,
        biases="qkv",
        bias_key="qkv_bias",
        windows=Windows("early", switch=True),
        experts=_QWEN2_EXPERTS,
    ),
    MIXTRAL: Family(
        "Mixtral",
        "MixtralForCausalLM",
        _sizes(4096, 32, 32, 8, 14336, 131072, 32000, 1e-5)
        | {"num_local_experts": 8, "num_experts_per_tok": 2},
        aliases={"num_experts": "num_local_experts"},
        fixed=_NO_JITTER,
        null_head_dim=True,
        base=1e6,
        windows=Windows("all", None),
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
        has_head_dim=False,
        whole_heads=True,
        usual_heads=True,
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
        | {"moe_intermediate_size": 1408, "first_k_dense_replace": 0, **_DEEPSEEK_DEFAULTS},
        aliases={"num_local_experts": "n_routed_experts"},
        fixed=_DEEPSEEK_FIXED,
        biases="all",
        bias_key="attention_bias",
        norm_of_heads="head",
        windows=Windows("late", last=62),
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
        ignored="use_mtp num_mtp_modules mtp_transformer_layers mlp_intermediate_size "
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
    GPT_OSS: Family(
        "gpt-oss",
        "GptOssForCausalLM",
        _sizes(2880, 36, 64, 8, 2880, 131072, 201088, 1e-5)
        | {"num_local_experts": 128, "num_experts_per_tok": 4, "swiglu_limit": 7.0}
        | {"attention_bias": True},
        aliases={"num_experts": "num_local_experts"},
        fixed={"swiglu_alpha": (1.702,)},
        ignored="initial_context_length",  # a key of OpenAI's own code
        head_dim=64,
        null_head_dim=True,
        biases="all",
        bias_key="attention_bias",
        sinks=True,
        base=150000.0,
        rope={
            "rope_type": "yarn",
            "factor": 32.0,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "truncate": False,
            "original_max_position_embeddings": 4096,
        },
        windows=Windows("period", 128, period=2),
        experts=ExpertNames(
            "mlp",
            _PROJECTIONS,
            "num_local_experts",
            width="intermediate_size",
            normalizes=True,
            router="router",
            joined=True,
        ),
    ),
    MISTRAL: Family(
        "Mistral",
        "MistralForCausalLM",
        _sizes(4096, 32, 32, 8, 14336, 131072, 32000),
        null_head_dim=True,
        activations=("swiglu", "geglu"),
        windows=Windows("all"),
    ),
    PHI3: Family(
        "Phi-3",
        "Phi3ForCausalLM",
        _sizes(3072, 32, 32, None, 8192, 4096, 32064, 1e-5),
        # Keys of Microsoft's own code. transformers neither reads them nor runs that code.
        fixed={"lm_head_bias": (False,), "full_attn_mod": (1,), "interpolate_factor": (1,)},
        ignored="auto_map",
        joined=_JOINED_QKV | _JOINED_MLP,
        dropouts=("attention_dropout", "resid_pdrop", "embd_pdrop"),
        has_head_dim=False,
        rotary=1.0,
        scalings=("default", "longrope"),
        rope_names={"su": "longrope", "yarn": "longrope"},
        original=4096,
        windows=Windows("all", None),
        has_pad=True,
    ),
    SMOLLM3: Family(
        "SmolLM3",
        "SmolLM3ForCausalLM",
        _sizes(2048, 36, 16, 4, 11008, 32768, 128256) | {"tie_word_embeddings": True},
        has_head_dim=False,
        biases="all",
        bias_key="attention_bias",
        has_mlp_bias=True,
        base=2e6,
        windows=Windows("unrotated", None, switch=True, period=4),
        has_pad=True,
    ),
    SEED_OSS: Family(
        "Seed-OSS",
        "SeedOssForCausalLM",
        _sizes(4096, 64, 80, 8, 27648, 524288, 155136) | {"attention_bias": True},
        ignored="residual_dropout",
        dropouts=("attention_dropout", "residual_dropout"),
        head_dim=128,
        null_head_dim=True,
        biases="qkv",
        bias_key="attention_bias",
        out_bias_key="attention_out_bias",
        has_mlp_bias=True,
        has_pad=True,
    ),
    GRANITE: Family(
        "Granite",
        "GraniteForCausalLM",
        _sizes(4096, 32, 32, None, 11008, 2048, 32000),
        has_head_dim=False,
        biases="all",
        bias_key="attention_bias",
        has_mlp_bias=True,
        scales=(
            Scale("embedding_scale", "embedding_multiplier"),
            Scale("residual_scale", "residual_multiplier"),
            Scale("attention_scale", "attention_multiplier"),
            Scale("logit_scale", "logits_scaling", power=-1.0),
        ),
    ),
    GLM4: Family(
        "GLM-4",
        "Glm4ForCausalLM",
        _sizes(4096, 40, 32, 2, 13696, 131072, 151552, 1.5625e-7) | {"attention_bias": True},
        norms=GLM_NORMS,
        joined=_JOINED_MLP,
        head_dim=128,
        biases="qkv",
        bias_key="attention_bias",
        rotary=0.5,
        pairs=True,
        has_pad=True,
    ),
    OLMO2: _OLMO2,
    OLMO3: replace(
        _OLMO2,
        title="OLMo 3",
        architecture="Olmo3ForCausalLM",
        base=5e5,
        local_base=5e5,
        windows=Windows("period", period=4),
    ),
    EXAONE4: Family(
        "EXAONE 4",
        "Exaone4ForCausalLM",
        _sizes(4096, 32, 32, 32, 16384, 2048, 102400, 1e-5),
        norms=AFTER,
        has_head_dim=False,
        norm_of_heads="head",
        windows=Windows("period", period=4, period_key="sliding_window_pattern", nope=True),
    ),
    MINISTRAL3: Family(
        "Ministral 3",
        "Ministral3ForCausalLM",
        _sizes(4096, 34, 32, 8, 14336, 262144, 131072, 1e-5),
        head_dim=128,
        rope={
            "type": "yarn",
            "rope_theta": 1e6,
            "factor": 16.0,
            "original_max_position_embeddings": 16384,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
            "llama_4_scaling_beta": 0.1,
        },
        has_temperature=True,
        windows=Windows("all", None),
        has_pad=True,
    ),
    GEMMA2: Family(
        "Gemma 2",
        "Gemma2ForCausalLM",
        _sizes(2304, 26, 8, 4, 9216, 8192, 256000) | _GEMMA_DEFAULTS,
        fixed=_GEMMA_FIXED,
        ignored="hidden_act",
        norms=GEMMA_NORMS,
        head_dim=256,
        whole_heads=True,
        activation_key="hidden_activation",
        activations=("geglu", "swiglu"),
        biases="all",
        bias_key="attention_bias",
        windows=Windows("period", period=2),
        zero_centered=True,
        root_scale=True,
        scales=(
            _QUERY_SCALAR,
            Scale("attention_logit_cap", "attn_logit_softcapping", 50.0, may_be_off=True),
            _cap(30.0),
        ),
        has_pad=True,
    ),
    GEMMA3: Family(
        "Gemma 3",
        "Gemma3ForCausalLM",
        _sizes(2304, 26, 8, 4, 9216, 131072, 262208) | _GEMMA_DEFAULTS,
        fixed=_GEMMA_FIXED | {"attn_logit_softcapping": (None,)},
        ignored="hidden_act _sliding_window_pattern",
        norms=GEMMA_NORMS,
        head_dim=256,
        whole_heads=True,
        activation_key="hidden_activation",
        activations=("geglu", "swiglu"),
        biases="all",
        bias_key="attention_bias",
        norm_of_heads="head",
        base=1e6,
        local_base=1e4,
        local_key="rope_local_base_freq",
        windows=Windows("period", period=6, period_key="sliding_window_pattern"),
        zero_centered=True,
        root_scale=True,
        scales=(
            _QUERY_SCALAR,
            _cap(None),
        ),
        has_pad=True,
    ),
    QWEN3_NEXT: replace(
        _QWEN3_5,
        title="Qwen3-Next",
        architecture="Qwen3NextForCausalLM",
        defaults=_sizes(2048, 48, 16, 2, 5632, 32768, 151936)
        | {"num_experts": 512, "num_experts_per_tok": 10, "moe_intermediate_size": 512}
        | {"shared_expert_intermediate_size": 512, "norm_topk_prob": True},
        delta=_QWEN3_NEXT_DELTA,
        multimodal=False,
        experts=_QWEN2_EXPERTS,
    ),
    QWEN3_5: _QWEN3_5,
    QWEN3_5_MOE: replace(
        _QWEN3_5,
        title="Qwen3.5-MoE",
        architecture="Qwen3_5MoeForCausalLM",
        defaults=_sizes(2048, 40, 16, 2, 512, 32768, 248320)
        | {"num_experts": 256, "num_experts_per_tok": 8, "moe_intermediate_size": 512}
        | {"shared_expert_intermediate_size": 512}
        | _QWEN3_5_WRITTEN,
        experts=replace(_QWEN2_EXPERTS, normalizes=True, dense=None),
    ),
    OLMO_HYBRID: replace(
        _OLMO2,
        title="OLMo Hybrid",
        architecture="OlmoHybridForCausalLM",
        defaults=_sizes(3840, 32, 30, None, 11008, 65536, 100352),
        ignored="linear_a_log_min linear_a_log_max linear_dt_min linear_dt_max "
        "linear_dt_init_floor",
        delta=_OLMO_DELTA,
        may_lack_positions=True,
    ),
}
DENSE = tuple(kind for kind, family in FAMILIES.items() if family.experts is None)
