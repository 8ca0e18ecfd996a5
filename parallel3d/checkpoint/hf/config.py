"""Maps Hugging Face models to ours: the tensors' names, and config.json read key by key.

It uses no torch and no files. Defaults, which a config.json may leave out, are those of
transformers' configuration classes. Keys without a counterpart are refused in one sentence each.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from parallel3d.checkpoint.hf.experts import (
    MTP,
    modules_of,
    read_experts,
    wanted_experts,
    written_experts,
)
from parallel3d.checkpoint.hf.families import (
    DOTS1,
    FAMILIES,
    GLM4_MOE,
    GPT2,
    LLAMA,
    MINIMAX_M2,
    MIXTRAL,
    OLMOE,
    QWEN2,
    QWEN2_MOE,
    QWEN3,
    QWEN3_MOE,
    Family,
)
from parallel3d.checkpoint.hf.read_keys import Keys
from parallel3d.config.fields import show
from parallel3d.config.schema import ModelConfig, full_shapes_of, states_of
from parallel3d.errors import UserError, nearest_hint

HEAD = "lm_head.weight"
ROUTER = "mlp.router"
EMBEDDINGS = dict.fromkeys(FAMILIES, "model.embed_tokens.weight")
EMBEDDINGS[GPT2] = "transformer.wte.weight"
# Their module → ours, before the layers, in each layer, and after them.
_LLAMA = (
    {"model.embed_tokens": "embedding.word"},
    {
        "model.layers.{}.input_layernorm": "input_norm",
        "model.layers.{}.self_attn.q_proj": "attention.q",
        "model.layers.{}.self_attn.k_proj": "attention.k",
        "model.layers.{}.self_attn.v_proj": "attention.v",
        "model.layers.{}.self_attn.o_proj": "attention.out",
        "model.layers.{}.self_attn.q_norm": "attention.q_norm",
        "model.layers.{}.self_attn.k_norm": "attention.k_norm",
        "model.layers.{}.post_attention_layernorm": "mlp_norm",
        "model.layers.{}.mlp.gate_proj": "mlp.gate",
        "model.layers.{}.mlp.up_proj": "mlp.up",
        "model.layers.{}.mlp.down_proj": "mlp.down",
    },
    {"model.norm": "final_norm"},
)
_GPT2 = (
    {"transformer.wte": "embedding.word", "transformer.wpe": "embedding.position"},
    {
        "transformer.h.{}.ln_1": "input_norm",
        "transformer.h.{}.attn.c_attn": "attention.q attention.k attention.v",
        "transformer.h.{}.attn.c_proj": "attention.out",
        "transformer.h.{}.ln_2": "mlp_norm",
        "transformer.h.{}.mlp.c_fc": "mlp.up",
        "transformer.h.{}.mlp.c_proj": "mlp.down",
    },
    {"transformer.ln_f": "final_norm"},
)
# Our key; the key of Llama and its relatives; the key of GPT-2.
_KEYS = (
    ("hidden_size", "hidden_size", "n_embd"),
    ("num_layers", "num_hidden_layers", "n_layer"),
    ("num_attention_heads", "num_attention_heads", "n_head"),
    ("seq_length", "max_position_embeddings", "n_positions"),
    ("vocab_size", "vocab_size", "vocab_size"),
    ("norm_eps", "rms_norm_eps", "layer_norm_epsilon"),
    ("tie_embeddings", "tie_word_embeddings", "tie_word_embeddings"),
    ("init_std", "initializer_range", "initializer_range"),
)
# model.activation ↔ GPT-2's activation_function. Llama only has SwiGLU, under the name silu.
GPT2_ACTIVATIONS = {"gelu": "gelu", "gelu_tanh": "gelu_new", "relu": "relu"}
# Other names of the tanh approximation, equal up to rounding.
SPELLINGS = {"gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh", "gelu_fast": "gelu_tanh"}
# Keys of rope_type=llama3 → our keys.
ORIGINAL = "original_max_position_embeddings"
PART, ROTARY_DIM = "partial_rotary_factor", "rotary_dim"
SCALING = {
    "factor": "rope_scaling_factor",
    "low_freq_factor": "rope_low_freq_factor",
    "high_freq_factor": "rope_high_freq_factor",
    ORIGINAL: "rope_original_length",
}
EOS, POSITIONS = "eos_token_id", "max_position_embeddings"
TOKENS = ("bos_token_id", EOS, "pad_token_id")
TORCH_NAMES = {"fp64": "float64", "fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}
# Keys that cannot change a logit of these families in evaluation, by purpose. `modeling_utils`,
# `masking_utils` and `modeling_*` of transformers 5.23.0 use them for other things, or never.
_HARMLESS = {
    "the file": "_name_or_path name_or_path _commit_hash architectures transformers_version dtype "
    "torch_dtype finetuning_task task_specific_params tokenizer_class model_max_length "
    "max_sequence_length n_ctx output_past predict_special_tokens transformers.js_config "
    "unsloth_fixed unsloth_version is_llama_config n_special",
    "tokens": "bos_token_id eos_token_id pad_token_id sep_token_id cls_token_id unk_token_id "
    "mask_token_id decoder_start_token_id prefix",
    "training": "attention_dropout hidden_dropout resid_pdrop embd_pdrop attn_pdrop "
    "gradient_checkpointing pretraining_tp use_bfloat16 tf_legacy_loss",
    "other heads": "classifier_dropout num_labels _num_labels id2label label2id problem_type "
    "summary_activation summary_first_dropout summary_last_dropout summary_proj_to_labels "
    "summary_type summary_use_proj",
    "the output of a call": "output_attentions output_hidden_states return_dict torchscript "
    "tie_last_hidden_states is_decoder",
    "the implementation": "reorder_and_upcast_attn _attn_implementation_autoset "
    "_flash_attn_2_enabled",
    "Qwen's window, where use_sliding_window is false": "max_window_layers",
    "generation": "use_cache assistant_confidence_threshold assistant_lookbehind bad_words_ids "
    "begin_suppress_tokens diversity_penalty do_sample early_stopping encoder_no_repeat_ngram_size "
    "encoder_repetition_penalty epsilon_cutoff eta_cutoff exponential_decay_length_penalty "
    "forced_bos_token_id forced_eos_token_id length_penalty max_length min_length "
    "no_repeat_ngram_size num_assistant_tokens num_assistant_tokens_schedule num_beam_groups "
    "num_beams num_return_sequences output_scores remove_invalid_values repetition_penalty "
    "return_dict_in_generate suppress_tokens target_lookbehind temperature top_k top_p typical_p",
}
HARMLESS = frozenset(key for keys in _HARMLESS.values() for key in keys.split())
ATTENTION = (None, "eager", "sdpa", "flash_attention_2", "flex_attention")
# Keys that change the result of a model of these families, with their harmless values.
FIXED: dict[str, tuple[Any, ...]] = {
    "is_causal": (True,),
    "is_encoder_decoder": (False,),
    "add_cross_attention": (False,),
    "cross_attention_hidden_size": (None,),
    "chunk_size_feed_forward": (0,),
    "pruned_heads": (None, {}),
    "tie_encoder_decoder": (False,),
    "quantization_config": (None,),
    "use_mrope": (False,),
    "transformers_weights": (None,),  # another file than the usual ones
    "rope_interleaved": (False,),
    "attn_implementation": ATTENTION,
    "_attn_implementation": ATTENTION,
}


@dataclass(frozen=True)
class HFTensor:
    """Describes one tensor of a Hugging Face checkpoint.

    Attributes:
        name: transformers' name, `model.layers.0.self_attn.q_proj.weight`.
        parts: our tensors, concatenated along dimension 0.
        shape: shape of the tensor in the file.
        transposed: the file holds the transpose of the joined parts.
        wide: an export writes it in fp32 or better, whatever the dtype of the others: a router's
            bias, whose differences bf16 would erase.
    """

    name: str
    parts: tuple[str, ...]
    shape: tuple[int, ...]
    transposed: bool = False
    wide: bool = False


def hf_tensors(model: ModelConfig, kind: str) -> list[HFTensor]:
    """Returns every tensor of `model` in the format `kind`, in the order of the layers.

    All but GPT-2 have Llama's names, with separate q, k and v, as here. GPT-2 (`GPT2LMHeadModel`)
    joins and transposes them: its layers are `Conv1D`, whose weight is (inputs, outputs). Rotary
    dimensions are paired (d, d + r/2) there as here, so rows stay in place. A tied head is left
    out, as in transformers.
    """
    shapes, states, tensors = full_shapes_of(model), states_of(model), []
    for theirs, parts, in_layer in _pairs(model, kind):
        if parts[0] not in shapes:
            continue
        shape = (sum(shapes[name][0] for name in parts), *shapes[parts[0]][1:])
        transposed = kind == GPT2 and in_layer and len(shape) == 2
        shape = shape[::-1] if transposed else shape
        tensors.append(HFTensor(theirs, parts, shape, transposed, parts[0] in states))
    if not model.tie_embeddings:
        shape = (model.vocab_size, model.hidden_size)
        tensors.append(HFTensor(HEAD, ("head.weight",), shape))
    return tensors


def _pairs(model: ModelConfig, kind: str) -> Iterator[tuple[str, tuple[str, ...], bool]]:
    """Yields their tensor, our tensors, and whether they are in a layer, whether or not the model
    has them."""
    before, in_layer, after = _GPT2 if kind == GPT2 else _LLAMA
    names = FAMILIES[kind].experts
    if names is not None:
        in_layer = in_layer | modules_of(names, model.num_experts)
    for theirs, ours in before.items():
        yield from _tensors_of(theirs, [ours], False)
    for layer in range(model.num_layers):
        for theirs, ours in in_layer.items():
            mine = [f"layers.{layer}.{part}" for part in ours.split()]
            if ours != ROUTER:
                yield from _tensors_of(theirs.format(layer), mine, True)
                continue
            assert names is not None
            yield f"{theirs.format(layer)}.weight", (f"{mine[0]}.weight",), True
            if names.choice_bias is not None:
                block = f"model.layers.{layer}.{names.block}"
                yield f"{block}.{names.choice_bias}", (f"{mine[0]}.bias",), True
    for theirs, ours in after.items():
        yield from _tensors_of(theirs, [ours], False)


def _tensors_of(
    theirs: str, ours: list[str], in_layer: bool
) -> Iterator[tuple[str, tuple[str, ...], bool]]:
    for part in ("weight", "bias"):
        yield f"{theirs}.{part}", tuple(f"{module}.{part}" for module in ours), in_layer


def hf_kind(model: ModelConfig) -> str:
    """Returns "llama", "qwen3_moe" … Raises UserError, with the key, if none fits."""
    position = model.position_embedding
    if position == "none":
        raise UserError(
            "model.position_embedding=none has no counterpart in Hugging Face's Llama and GPT-2 "
            "formats; models with rope (Llama) or learned (GPT-2) can be exported"
        )
    kind, by = GPT2, f"model.position_embedding={position}"
    if position == "rope" and model.num_experts:
        kind, by = _kind_with_experts(model)
    elif position == "rope" and model.qk_norm:
        kind, by = QWEN3, "model.qk_norm=true"
    elif position == "rope":
        kind = LLAMA
        if model.qkv_bias != model.out_bias:
            kind, by = QWEN2, f"model.attention_bias={model.attention_bias}"
    title = FAMILIES[kind].title
    for key, value, allowed in _wanted(model, kind):
        if value not in allowed:
            raise UserError(
                f"model.{key}={show(value)} has no counterpart in Hugging Face's {title} format, "
                f"which {by} selects: there it must be {' or '.join(show(a) for a in allowed)}"
            )
    rotated = model.head_size * (model.rotary_percent if FAMILIES[kind].rotary else 1)
    if kind != GPT2 and int(rotated) % 2:
        raise UserError(
            f"model.num_attention_heads={model.num_attention_heads} gives heads of "
            f"{model.head_size}: Hugging Face's {title} format only rotates even heads"
        )
    return kind


def _kind_with_experts(model: ModelConfig) -> tuple[str, str]:
    """Returns the format of a model with experts, and the key that selects it."""
    sigmoid, full = model.router_score == "sigmoid", model.qk_norm_width == "full"
    if sigmoid and full:
        return MINIMAX_M2, "model.qk_norm_width=full"
    if sigmoid:
        whole = model.rotary_percent == 1 and model.qkv_bias == model.out_bias
        kind = DOTS1 if model.qk_norm and whole else GLM4_MOE
        return kind, "model.router_score=sigmoid"
    if full:
        return OLMOE, "model.qk_norm_width=full"
    if model.qk_norm:
        return QWEN3_MOE, f"model.num_experts={model.num_experts} with model.qk_norm=true"
    if model.shared_expert_size:
        return QWEN2_MOE, f"model.shared_expert_size={model.shared_expert_size}"
    return MIXTRAL, f"model.num_experts={model.num_experts}"


def _wanted(model: ModelConfig, kind: str) -> list[tuple[str, Any, tuple[Any, ...]]]:
    """Returns (key, value, values that the format knows) for all keys that the format fixes."""
    heads, family = model.num_attention_heads, FAMILIES[kind]
    if kind == GPT2:
        return [
            ("norm", model.norm, ("layernorm",)),
            ("activation", model.activation, tuple(GPT2_ACTIVATIONS)),
            ("bias", model.bias, (True,)),
            ("attention_bias", model.attention_bias, (None, "all")),
            ("num_query_groups", model.kv_heads, (heads,)),
            ("head_dim", model.head_dim, (None, model.hidden_size // heads)),
            ("qk_norm", model.qk_norm, (False,)),
            ("num_experts", model.num_experts, (0,)),
        ]
    wanted: list[tuple[str, Any, tuple[Any, ...]]] = [
        ("norm", model.norm, ("rmsnorm",)),
        ("activation", model.activation, ("swiglu",)),
    ]
    if family.rotary is None:
        wanted.append(("rotary_percent", model.rotary_percent, (1.0,)))
    if family.norm_of_heads is not None:
        wanted.append(("qk_norm_width", model.qk_norm_width, (family.norm_of_heads or "head",)))
    if kind == LLAMA:  # transformers refuses other sizes
        multiple = max(1, model.hidden_size // heads) * heads
        return [*wanted, ("hidden_size", model.hidden_size, (multiple,))]
    if family.norm_of_heads != "":
        wanted.append(("qk_norm", model.qk_norm, (family.norm_of_heads is not None,)))
    if family.bias_key is not None or family.biases is None:
        choices = (None, "none", *([] if family.biases is None else [family.biases]))
        wanted.append(("attention_bias", model.attention_bias, choices))
    if kind == OLMOE:
        wanted.append(("head_dim", model.head_size, (model.hidden_size // heads,)))
    if family.experts is not None:
        wanted += wanted_experts(model, family.experts)
    return [*wanted, ("bias", model.bias, (False,))]


def to_hf(model: ModelConfig, dtype: str) -> dict[str, Any]:
    """Returns config.json without tokens; `dtype` is "fp32", "bf16" …. Raises UserError."""
    kind = hf_kind(model)
    family = FAMILIES[kind]
    sizes = {gpt2 if kind == GPT2 else llama: getattr(model, ours) for ours, llama, gpt2 in _KEYS}
    common = sizes | {
        "architectures": [family.architecture],
        "model_type": kind,
        # transformers before version 5 reads torch_dtype and rope_theta, later versions dtype and
        # rope_parameters; each ignores the other's keys.
        "torch_dtype": TORCH_NAMES[dtype],
        "dtype": TORCH_NAMES[dtype],
        "use_cache": True,
    }
    if kind == GPT2:
        dropout = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), model.dropout)
        activation = GPT2_ACTIVATIONS[model.activation]
        own = {"n_positions": model.max_positions, "n_inner": model.ffn_size}
        return common | dropout | own | {"activation_function": activation}
    keys = common | {
        "intermediate_size": model.ffn_size,
        "num_key_value_heads": model.kv_heads,
        "hidden_act": "silu",
        "attention_dropout": model.dropout,
        **_written_rope(model, family),
    }
    usual = kind == OLMOE or (
        kind in (QWEN2, QWEN2_MOE)
        and model.head_size * model.num_attention_heads == model.hidden_size
    )
    if not usual:
        keys["head_dim"] = model.head_size
    if family.bias_key is not None:
        keys[family.bias_key] = model.qkv_bias
    if kind == LLAMA:
        keys["mlp_bias"] = model.bias
    if family.norm_of_heads == "":
        keys["use_qk_norm"] = model.qk_norm
    if family.window == "switch":
        keys["use_sliding_window"] = False
    elif family.window == "late":
        keys["sliding_window"] = None
    return keys if family.experts is None else keys | written_experts(model, family)


def _written_rope(model: ModelConfig, family: Family) -> dict[str, Any]:
    rope: dict[str, Any] = {"rope_type": "default"}
    if model.rope_scaling_factor > 1:
        scaling = {theirs: getattr(model, ours) for theirs, ours in SCALING.items()}
        rope = {"rope_type": "llama3"} | scaling
    keys: dict[str, Any] = {"rope_theta": model.rotary_base}
    if rope["rope_type"] != "default":  # for transformers before version 5
        keys["rope_scaling"] = rope
    if family.rotary is not None:
        rope = rope | {PART: model.rotary_percent}
        keys[PART] = model.rotary_percent
    if family.has_rotary_dim:
        keys[ROTARY_DIM] = int(model.head_size * model.rotary_percent)
    return keys | {"rope_parameters": {"rope_theta": model.rotary_base} | rope}


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
    if kind not in FAMILIES:
        hint = nearest_hint(str(kind), FAMILIES)
        raise UserError(
            f"config.json has model_type={show(kind)}: it must be one of "
            f"{', '.join(FAMILIES)}{hint}"
        )
    family = FAMILIES[kind]
    keys = Keys(config, aliases=family.aliases)
    for key, allowed in (FIXED | dict(family.fixed)).items():
        keys.require(key, allowed, allowed[0])
    found: dict[str, Any] = {"name": f"hf_{kind}"}
    for ours, llama, gpt2 in _KEYS:
        theirs = gpt2 if kind == GPT2 else llama
        default = family.defaults[theirs]
        value = keys.get(theirs, default, type(default))
        found[ours] = float(value) if isinstance(default, float) else value
    found |= _from_gpt2(keys, found) if kind == GPT2 else _from_llama(keys, kind, found)
    keys.finish(HARMLESS | {"model_type", *family.harmless.split()})
    return kind, found


def _from_gpt2(keys: Keys, sizes: dict[str, Any]) -> dict[str, Any]:
    activations = (*GPT2_ACTIVATIONS, *SPELLINGS)
    activation = keys.require("activation_function", activations, "gelu_new")
    keys.require("scale_attn_weights", (True,), True)
    keys.require("scale_attn_by_inverse_layer_idx", (False,), False)
    usual = 4 * sizes["hidden_size"]
    return {
        "ffn_hidden_size": keys.get("n_inner", usual, int, null=usual),
        "max_position_embeddings": sizes["seq_length"],
        "norm": "layernorm",
        "position_embedding": "learned",
        "activation": SPELLINGS.get(activation, activation),
        "bias": True,
    }


def _from_llama(keys: Keys, kind: str, sizes: dict[str, Any]) -> dict[str, Any]:
    hidden, heads, family = sizes["hidden_size"], sizes["num_attention_heads"], FAMILIES[kind]
    width = _head_dim(keys, kind, hidden, heads)
    keys.require("hidden_act", ("silu", "swish"), "silu")
    _check_windows(keys, family, sizes["num_layers"])
    groups = family.defaults["num_key_value_heads"] or heads
    found = {
        "num_query_groups": keys.get("num_key_value_heads", groups, int, null=heads),
        "head_dim": None if hidden % heads == 0 and width == hidden // heads else width,
        "ffn_hidden_size": keys.get("intermediate_size", family.defaults["intermediate_size"], int),
        "norm": "rmsnorm",
        "position_embedding": "rope",
        **_rope(keys, family, sizes["seq_length"], width),
        "activation": "swiglu",
        **_attention(keys, kind),
    }
    if family.experts is None:
        return found
    if MTP in family.aliases.values():
        keys.get(MTP, 0, int)  # see `mtp_layers`
    return found | read_experts(keys, family, sizes["num_layers"])


def _head_dim(keys: Keys, kind: str, hidden: int, heads: int) -> int:
    """Returns the size of a head, which RoPE needs to be even."""
    if kind in (LLAMA, OLMOE) and hidden % heads:
        raise UserError(
            f"config.json has hidden_size={hidden}, which is not a multiple of "
            f"num_attention_heads={heads}: transformers refuses it as well"
        )
    usual = hidden // heads
    null = {"null": usual} if kind in (LLAMA, MIXTRAL) else {}
    width = keys.get("head_dim", FAMILIES[kind].head_dim or usual, int, **null)
    if width % 2:
        raise UserError(f"config.json has heads of {width}: RoPE turns pairs of dimensions")
    if kind == OLMOE and width != usual:
        raise keys.error("head_dim", width, f"its norms need heads of {usual}")
    return width


def _check_windows(keys: Keys, family: Family, layers: int) -> None:
    """Raises UserError unless every layer attends to all earlier tokens."""
    keys.require("use_sliding_window", (False,), False)
    types = keys.get("layer_types", None, list)
    if family.window == "off":
        keys.require("sliding_window", (None,), None)
    elif family.window == "switch":
        keys.get("sliding_window", None, int)
    else:
        window = keys.get("sliding_window", family.defaults["sliding_window"], int, null=None)
        first = keys.get("max_window_layers", family.defaults["max_window_layers"], int)
        if window is not None and first < layers and types is None:
            raise keys.error("sliding_window", window, "it must be null")
    kinds = keys.get("attn_type_list", None, list)  # MiniMax: 1 is attention to all tokens
    if kinds is not None and any(one != 1 for one in kinds):
        raise keys.error("attn_type_list", kinds, "every layer must be 1")
    if types is None:
        return
    for layer_type in types:
        Keys({"layer_types": layer_type}).require("layer_types", ("full_attention",), None)
    if len(types) != layers:
        raise UserError(
            f"config.json has layer_types of {len(types)} layers, but num_hidden_layers={layers}"
        )


def _attention(keys: Keys, kind: str) -> dict[str, Any]:
    family = FAMILIES[kind]
    norm = family.norm_of_heads
    if norm == "":
        norm = "head" if keys.get("use_qk_norm", False, bool) else None
    found: dict[str, Any] = {"qk_norm": norm is not None}
    if norm == "full":
        found["qk_norm_width"] = norm
    if kind == LLAMA:
        attention = keys.get("attention_bias", False, bool)
        mlp = keys.get("mlp_bias", False, bool)
        differs = None if attention == mlp else "all" if attention else "none"
        return found | {"bias": mlp, "attention_bias": differs}
    keys.require("mlp_bias", (False,), False)
    found["bias"] = False
    if kind == QWEN2:
        keys.require("attention_bias", (True,), True)
        return found | {"attention_bias": family.biases}
    if family.bias_key is None:
        keys.require("attention_bias", (False,), False)
        return found
    usual = family.defaults.get(family.bias_key, False)
    biased = keys.get(family.bias_key, usual, bool)
    return found | {"attention_bias": family.biases if biased else None}


def _rope(keys: Keys, family: Family, positions: int, width: int) -> dict[str, Any]:
    """Returns base, scaling and share of the dimensions, by transformers' precedence.

    `rope_scaling` wins over `rope_parameters`, as a whole. The base in it wins over the top-level
    one, but the top-level `original_max_position_embeddings` wins over the one in it; the default
    is all positions.
    """
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
    top = keys.get("rope_theta", family.base, float)
    found = {"rotary_base": float(rope.get("rope_theta", top, float))}
    if family.rotary is None:
        for place in (rope, keys):
            place.require(PART, (1.0,), 1.0)
    else:
        found["rotary_percent"] = _rotary_percent(keys, rope, family, width)
    if kind == "llama3":
        found |= _scaling(keys, rope, positions)
    else:
        keys.get(ORIGINAL, 0, int)  # has no effect
    rope.finish()
    return found


def _rotary_percent(keys: Keys, rope: Keys, family: Family, width: int) -> float:
    """Returns the share of a head that RoPE turns: the one in `rope`, at the top, of MiniMax's
    rotary_dim, or the family's."""
    share = family.rotary
    if family.has_rotary_dim:
        rotated = keys.get(ROTARY_DIM, None, int)
        share = share if rotated is None else rotated / width
    share = float(rope.get(PART, keys.get(PART, share, float), float))
    if int(width * share) % 2:
        raise keys.error(PART, share, f"it must turn an even part of the {width} dimensions")
    return share


def _scaling(keys: Keys, rope: Keys, positions: int) -> dict[str, Any]:
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
