"""Converts between config.json of Hugging Face models and our `model` section, key by key.

A value without a counterpart is refused in one sentence; keys that are not read are returned.
Values that config.json leaves out are the defaults of transformers' configuration classes. This
module neither imports torch nor opens files.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from parallel3d.checkpoint.hf.delta import (
    read_delta,
    wanted_delta,
    without_positions,
    written_delta,
)
from parallel3d.checkpoint.hf.experts import (
    LIMIT,
    LISTED,
    MTP,
    read_experts,
    wanted_experts,
    written_experts,
)
from parallel3d.checkpoint.hf.families import (
    DENSE,
    DOTS1,
    FAMILIES,
    GLM4_MOE,
    GPT2,
    GPT_OSS,
    MINIMAX_M2,
    MIXTRAL,
    OLMOE,
    QWEN2,
    QWEN2_MOE,
    QWEN3,
    QWEN3_5_MOE,
    QWEN3_MOE,
    QWEN3_NEXT,
    Family,
)
from parallel3d.checkpoint.hf.layers import read_layers, wanted_layers, written_layers
from parallel3d.checkpoint.hf.read_keys import Keys
from parallel3d.checkpoint.hf.rope import (
    NEW,
    OLD,
    POSITIONS,
    kept_rope,
    read_rope,
    wanted_rope,
    written_rope,
)
from parallel3d.config.fields import show
from parallel3d.errors import UserError, nearest_hint
from parallel3d.models.dialect import GATED_DELTANET
from parallel3d.models.keys import ModelConfig

# Each row holds our key, the key of all families but GPT-2, and the key of GPT-2.
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
# model.activation ↔ GPT-2's activation_function.
GPT2_ACTIVATIONS = {"gelu": "gelu", "gelu_tanh": "gelu_new", "relu": "relu"}
# transformers has several names for the tanh approximation of GELU; results differ by rounding.
SPELLINGS = {"gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh", "gelu_fast": "gelu_tanh"}
# transformers' name of the gate's non-linearity → model.activation, and the reverse for an export.
GATED = {"silu": "swiglu", "swish": "swiglu", **dict.fromkeys(SPELLINGS, "geglu")}
GATES = {"swiglu": "silu", "geglu": "gelu_pytorch_tanh"}
# Dense families with RoPE; an export uses the first of those that contradict the fewest keys.
_DENSE = (QWEN3, QWEN2, *(kind for kind in DENSE if kind not in (QWEN3, QWEN2, GPT2)))
EOS = "eos_token_id"
TYPE = "model_type"
# Not of config.json: names in a layer of tensors that stay in fp32 in a run, but not in the folder.
NARROW = "tensors of 16 bits"
TOKENS = ("bos_token_id", EOS, "pad_token_id")
TORCH_NAMES = {"fp64": "float64", "fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}
# Keys of generation, which configuration classes before transformers 5 wrote.
GENERATION = (
    *("max_length", "min_length", "max_new_tokens", "do_sample", "early_stopping", "num_beams"),
    *("num_beam_groups", "diversity_penalty", "temperature", "top_k", "top_p", "typical_p"),
    *("repetition_penalty", "length_penalty", "no_repeat_ngram_size", "bad_words_ids"),
    *("encoder_no_repeat_ngram_size", "num_return_sequences", "output_scores", "suppress_tokens"),
    *("return_dict_in_generate", "forced_bos_token_id", "forced_eos_token_id"),
    *("remove_invalid_values", "exponential_decay_length_penalty", "begin_suppress_tokens"),
    *("cache_implementation", "task_specific_params", "prefix", "decoder_start_token_id"),
)
# Keys that describe the file, other heads, generation, or what a call returns, and not the model.
ABOUT = frozenset(
    (
        *GENERATION,
        *("architectures", "transformers_version", "dtype", "torch_dtype", "_name_or_path"),
        *("use_cache", "output_attentions", "output_hidden_states", "return_dict"),
        *("num_labels", "id2label", "label2id", "problem_type", "_commit_hash"),
        *("tokenizer_class", "sep_token_id", "finetuning_task", "torchscript", "use_bfloat16"),
        "tf_legacy_loss",
        # In how many parts products were computed: Llama before transformers 4.48 added them up.
        "pretraining_tp",
    )
)
ATTENTION = (None, "eager", "sdpa", "flash_attention_2", "flex_attention")
# Keys that few models use → the values with which no model of these families changes.
EXPECTED: dict[str, tuple[Any, ...]] = {
    "is_causal": (True,),
    "is_encoder_decoder": (False,),
    "is_decoder": (False, True),
    "add_cross_attention": (False,),
    "cross_attention_hidden_size": (None,),
    "chunk_size_feed_forward": (0,),
    "pruned_heads": (None, {}),
    "tie_encoder_decoder": (False,),
    "use_mrope": (False,),
    "rope_interleaved": (False,),
    "attn_implementation": ATTENTION,
    "_attn_implementation": ATTENTION,
}
# Keys with which the files hold other tensors than those of the model → their allowed values.
FIXED: dict[str, tuple[Any, ...]] = {
    "transformers_weights": (None,),  # names a weights file other than the usual ones
}


class HFConfig(NamedTuple):
    """What config.json says of a model.

    Attributes:
        kind: the format, such as "llama".
        keys: keys of our `model` section.
        unread: keys that parallel3d does not read, with their values.
    """

    kind: str
    keys: dict[str, Any]
    unread: dict[str, Any]


def hf_kind(model: ModelConfig, like: str | None = None) -> str:
    """Returns the Hugging Face format for a model, such as "llama" or "qwen3_moe".

    Raises UserError, which names the key at fault, if no format can express the model. `like` is
    the format from which the model was imported, if any; it is preferred if it can express the
    model.
    """
    position = model.position_embedding
    if position == "none":
        raise UserError(
            "model.position_embedding=none has no counterpart in Hugging Face's Llama and GPT-2 "
            "formats: only models with rope (Llama) or learned (GPT-2) can be exported"
        )
    if like in FAMILIES and not _contradictions(model, like):
        return like
    kind, by = GPT2, f"model.position_embedding={position}"
    if position == "rope" and model.num_experts:
        kind, by = _kind_with_experts(model)
    elif position == "rope":
        recurs = GATED_DELTANET in model.layer_types
        kinds = [name for name in _DENSE if FAMILIES[name].delta is not None or not recurs]
        kind, by = min(kinds, key=lambda name: len(_contradictions(model, name))), ""
    which = f"which {by} selects" if by else "the nearest one"
    title = FAMILIES[kind].title
    for key, value, allowed in _contradictions(model, kind):
        raise UserError(
            f"model.{key}={show(value)} has no counterpart in Hugging Face's {title} format, "
            f"{which}: there it must be {' or '.join(show(a) for a in allowed)}"
        )
    rotated = model.head_size * (model.rotary_percent if FAMILIES[kind].rotary else 1)
    if kind != GPT2 and int(rotated) % 2:
        raise UserError(
            f"model.num_attention_heads={model.num_attention_heads} gives heads of "
            f"{model.head_size} dimensions: Hugging Face's {title} format needs an even number for "
            "RoPE"
        )
    return kind


def _contradictions(model: ModelConfig, kind: str) -> list[tuple[str, Any, tuple[Any, ...]]]:
    return [wanted for wanted in _wanted(model, kind) if wanted[1] not in wanted[2]]


def _kind_with_experts(model: ModelConfig) -> tuple[str, str]:
    """Returns the format for a model with experts, and the key that selects this format."""
    if model.expert_bias:
        return GPT_OSS, "model.expert_bias=true"
    sigmoid, full = model.router_score == "sigmoid", model.qk_norm_width == "full"
    if model.attention_gate or GATED_DELTANET in model.layer_types:
        kind = QWEN3_NEXT if _contradictions(model, QWEN3_5_MOE) else QWEN3_5_MOE
        return kind, f"model.num_experts={model.num_experts} with a gate or gated_deltanet layers"
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
    """Returns (key, the model's value, values that the format can express) for restricted keys.

    A key is restricted if the format cannot express all of its values.
    """
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
            ("attention_gate", model.attention_gate, (False,)),
            ("attention_sinks", model.attention_sinks, (False,)),
            ("num_experts", model.num_experts, (0,)),
            ("norm_position", model.norm_position, ("before",)),
            *wanted_layers(model, family),
            *_wanted_scales(model, family),
        ]
    wanted: list[tuple[str, Any, tuple[Any, ...]]] = [
        ("position_embedding", model.position_embedding, ("rope",)),
        ("norm", model.norm, ("rmsnorm",)),
        ("activation", model.activation, family.activations),
        ("norm_position", model.norm_position, (family.norm_position,)),
        ("norm_zero_centered", model.norm_zero_centered, (family.zero_centered,)),
        ("attention_gate", model.attention_gate, (family.gated,)),
        ("attention_sinks", model.attention_sinks, (family.sinks,)),
    ]
    wanted += (wanted_layers if family.delta is None else wanted_delta)(model, family)
    wanted += wanted_rope(model, family)
    wanted += _wanted_scales(model, family)
    if family.norm_of_heads is not None:
        wanted.append(("qk_norm_width", model.qk_norm_width, (family.norm_of_heads or "head",)))
    if family.norm_of_heads != "":
        wanted.append(("qk_norm", model.qk_norm, (family.norm_of_heads is not None,)))
    wanted.append(("attention_bias", _biases(model), _known_biases(family)))
    if family.whole_heads:  # transformers refuses other sizes
        multiple = max(1, model.hidden_size // heads) * heads
        wanted.append(("hidden_size", model.hidden_size, (multiple,)))
    if family.usual_heads:
        wanted.append(("head_dim", model.head_size, (model.hidden_size // heads,)))
    if family.experts is None:
        wanted.append(("num_experts", model.num_experts, (0,)))
    else:
        wanted += wanted_experts(model, family.experts)
    if not family.joins_experts:
        wanted.append((LIMIT, model.swiglu_limit, (None,)))
    if not family.has_mlp_bias:
        wanted.append(("bias", model.bias, (False,)))
    return wanted


def _biases(model: ModelConfig) -> str:
    """Returns which of attention's biases the model has, as a value of `model.attention_bias`."""
    return "all" if model.out_bias else "qkv" if model.qkv_bias else "none"


def _known_biases(family: Family) -> tuple[str, ...]:
    """Returns the values of `model.attention_bias` that a family can express."""
    known = ["none"] if family.biases is None or family.bias_key is not None else []
    known += [] if family.biases is None else [family.biases]
    return (*known, "all") if family.out_bias_key is not None else tuple(known)


def _wanted_scales(model: ModelConfig, family: Family) -> list[tuple[str, Any, tuple[Any, ...]]]:
    """Returns (key, the model's value, allowed values) for each scale that the family restricts."""
    usual = {"embedding_scale": 1.0, "residual_scale": 1.0, "logit_scale": 1.0, "logit_cap": None}
    if family.root_scale:
        usual["embedding_scale"] = model.hidden_size**0.5
    usual |= {"attention_scale": _head_scale(model), "attention_logit_cap": None}
    free = {scale.ours for scale in family.scales}
    wanted = [(key, _scale(model, key), (one,)) for key, one in usual.items() if key not in free]
    for scale in family.scales:
        if scale.is_whole:
            near = round(_scale(model, scale.ours) ** (1 / scale.power)) ** scale.power
            value = _scale(model, scale.ours)
            is_near = abs(value - near) <= 1e-12 * near
            wanted.append((scale.ours, value, (value if is_near else near,)))
    return wanted


def _head_scale(model: ModelConfig) -> float:
    return float(model.head_size**-0.5)


def _scale(model: ModelConfig, key: str) -> Any:
    """Returns the value of a scale; a null attention_scale counts as 1/√head_size."""
    value = getattr(model, key)
    return _head_scale(model) if key == "attention_scale" and value is None else value


def to_hf(
    model: ModelConfig, dtype: str, like: str | None = None, positions: int = 0
) -> dict[str, Any]:
    """Returns the content of config.json for a model, without special tokens.

    Args:
        model: the model.
        dtype: a word such as "fp32" or "bf16".
        like: see `hf_kind`.
        positions: least value of max_position_embeddings, which is at least the sequence length.

    Raises:
        UserError: as `hf_kind` does.
    """
    kind = hf_kind(model, like)
    family = FAMILIES[kind]
    sizes = {gpt2 if kind == GPT2 else llama: getattr(model, ours) for ours, llama, gpt2 in _KEYS}
    common = sizes | {
        "architectures": [family.architecture],
        "model_type": kind,
        # transformers before version 5 reads torch_dtype and rope_theta, and later versions read
        # dtype and rope_parameters; each version ignores the keys of the other.
        "torch_dtype": TORCH_NAMES[dtype],
        "dtype": TORCH_NAMES[dtype],
        "use_cache": True,
    }
    if kind == GPT2:
        dropout = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), model.dropout)
        activation = GPT2_ACTIVATIONS[model.activation]
        own = {"n_positions": model.max_positions, "n_inner": model.ffn_size}
        return common | dropout | own | {"activation_function": activation}
    positions = max(model.seq_length, positions)
    keys = common | {
        POSITIONS: positions,
        "intermediate_size": model.ffn_size,
        "num_key_value_heads": model.kv_heads,
        family.activation_key: GATES[model.activation],
        **dict.fromkeys(family.dropouts, model.dropout),
        **written_rope(model, family, positions),
        **(written_layers if family.delta is None else written_delta)(model, family),
        **_written_scales(model, family),
    }
    if family.has_head_dim or model.head_size * model.num_attention_heads != model.hidden_size:
        keys["head_dim"] = model.head_size
    if family.bias_key is not None:
        keys[family.bias_key] = model.qkv_bias
    if family.out_bias_key is not None:
        keys[family.out_bias_key] = model.out_bias
    if family.has_mlp_bias:
        keys["mlp_bias"] = model.bias
    if family.norm_of_heads == "":
        keys["use_qk_norm"] = model.qk_norm
    if family.has_pad:
        keys["pad_token_id"] = None
    keys |= {key: family.fixed[key][0] for key in family.fixed if key in family.defaults}
    return keys if family.experts is None else keys | written_experts(model, family)


def _written_scales(model: ModelConfig, family: Family) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for scale in family.scales:
        value = _scale(model, scale.ours)
        if value is not None:
            value = value ** (1 / scale.power)
        found[scale.theirs] = round(value) if value is not None and scale.is_whole else value
    return found


def kept_keys(config: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the keys that an export writes back: format, special tokens and maximum length."""
    kept = {key: config[key] for key in TOKENS if key in config}
    for key, value in kept.items():
        numbers = value if key == EOS and isinstance(value, list) else [value]
        if any(type(n) is not int for n in numbers if n is not None):
            raise UserError(f"config.json has {key}={show(value)}: it must be a whole number")
    if POSITIONS in config and config.get(TYPE) != GPT2:
        kept[POSITIONS] = Keys(config).get(POSITIONS, 0, int)
    if (family := FAMILIES.get(str(config.get(TYPE)))) is not None:
        kept[TYPE] = config[TYPE]
        kept |= {key: config[key] for key in family.kept if key in config}
        if family.multimodal:
            kept |= kept_rope(config)
        narrow = config.get(NARROW)
        if isinstance(narrow, list) and all(isinstance(name, str) for name in narrow):
            kept[NARROW] = narrow
    return kept


def with_kept(config: Mapping[str, Any], kept: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the result of `to_hf` with the keys of other readers that `kept_keys` returned."""
    found = dict(config)
    family = FAMILIES[config[TYPE]]
    if kept.get(TYPE) == config[TYPE]:
        found |= {key: kept[key] for key in family.kept if key in kept}
        if family.multimodal:
            # transformers reads rope_scaling, if there is one, in place of rope_parameters.
            shares = kept_rope(kept).get(NEW, {})
            found |= {key: {**found[key], **shares} for key in (NEW, OLD) if key in found}
    return found


def from_hf(config: dict[str, Any]) -> HFConfig:
    """Returns the format and the `model` section of a config.json, and the keys it did not read.

    Raises UserError if a key has a value that our model cannot express.
    """
    kind = config.get(TYPE)
    if kind not in FAMILIES:
        hint = nearest_hint(str(kind), FAMILIES)
        raise UserError(
            f"config.json has model_type={show(kind)}: it must be one of "
            f"{', '.join(FAMILIES)}, or gemma3, mistral3, llava, qwen3_5 or qwen3_5_moe with one "
            f"of these as text_config{hint}"
        )
    family = FAMILIES[kind]
    keys = Keys(config, aliases=family.aliases)
    for key, allowed in EXPECTED.items():
        keys.expect(key, allowed)
    for key, allowed in (FIXED | dict(family.fixed)).items():
        default = family.defaults.get(key, allowed[0])
        keys.require(key, allowed, default)
    found: dict[str, Any] = {"name": f"hf_{kind}"}
    for ours, llama, gpt2 in _KEYS:
        theirs = gpt2 if kind == GPT2 else llama
        default = family.defaults[theirs]
        value = keys.get(theirs, default, type(default))
        found[ours] = float(value) if isinstance(default, float) else value
    most = ModelConfig.__dataclass_fields__["num_layers"].metadata["maximum"]
    if not 1 <= found["num_layers"] <= most:  # checked before lists have an entry per layer
        theirs = "n_layer" if kind == GPT2 else "num_hidden_layers"
        raise keys.error(theirs, found["num_layers"], f"it must be from 1 to {most}")
    for key, of in family.kept.items():
        keys.get(key, None, of)
    found |= _from_gpt2(keys, found) if kind == GPT2 else _from_llama(keys, kind, found)
    about = {*ABOUT, TYPE, *TOKENS, *family.dropouts, *family.ignored.split()}
    return HFConfig(kind, found, keys.finish(about))


def _from_gpt2(keys: Keys, sizes: dict[str, Any]) -> dict[str, Any]:
    activations = (*GPT2_ACTIVATIONS, *SPELLINGS)
    activation = keys.require("activation_function", activations, "gelu_new")
    keys.require("scale_attn_weights", (True,), True)
    keys.require("scale_attn_by_inverse_layer_idx", (False,), False)
    # Keys of transformers 2, which OpenAI's folders have.
    keys.expect("n_ctx", (sizes["seq_length"],))
    keys.expect("n_special", (0,))
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
    layers, positions = sizes["num_layers"], sizes["seq_length"]
    width = _head_dim(keys, family, hidden, heads)
    gates = tuple(theirs for theirs, ours in GATED.items() if ours in family.activations)
    gate = keys.require(family.activation_key, gates, GATES[family.activations[0]])
    groups = family.defaults["num_key_value_heads"] or heads
    if family.delta is None:
        kinds = read_layers(keys, family, layers, positions)
    else:
        kinds = read_delta(keys, family, sizes)
    slides = kinds.get("sliding_window") is not None
    rope = read_rope(keys, family, positions, width, slides)
    if not rope:
        kinds = without_positions(kinds)
    found = {
        "num_query_groups": keys.get("num_key_value_heads", groups, int, null=heads),
        "head_dim": None if hidden % heads == 0 and width == hidden // heads else width,
        "ffn_hidden_size": keys.get("intermediate_size", family.defaults["intermediate_size"], int),
        "norm": "rmsnorm",
        "norm_position": family.norm_position,
        "norm_zero_centered": family.zero_centered,
        "position_embedding": "rope",
        **rope,
        **kinds,
        "activation": GATED[gate],
        **_attention(keys, family),
        **_scales(keys, family, hidden, width),
    }
    if family.experts is None or family.experts.dense != LISTED:
        keys.expect(LISTED, ([],))  # folders of Qwen3.5 have it, whether or not there are experts
    found |= {"attention_gate": True} if family.gated else {}
    found |= {"attention_sinks": True} if family.sinks else {}
    if family.experts is None:
        return found
    if MTP in family.aliases.values():
        keys.get(MTP, 0, int)  # marks the key as read; `mtp_layers` returns its value
    return found | read_experts(keys, family, layers)


def _head_dim(keys: Keys, family: Family, hidden: int, heads: int) -> int:
    """Returns the size of a head. Raises UserError if it is odd, or if the family forbids it."""
    if family.whole_heads and hidden % heads:
        raise UserError(
            f"config.json has hidden_size={hidden}, which is not a multiple of "
            f"num_attention_heads={heads}: transformers refuses it as well"
        )
    usual = hidden // heads
    null = {"null": usual} if family.null_head_dim else {}
    width = keys.get("head_dim", family.head_dim or usual, int, **null)
    if width % 2:
        raise UserError(f"config.json has heads of {width} dimensions: RoPE needs an even number")
    if family.usual_heads and width != usual:
        raise keys.error("head_dim", width, f"{family.title} needs heads of {usual} dimensions")
    return width


def _attention(keys: Keys, family: Family) -> dict[str, Any]:
    """Returns our keys for the norms of queries and keys, and for all biases."""
    norm = family.norm_of_heads
    if norm == "":
        norm = "head" if keys.get("use_qk_norm", False, bool) else None
    found: dict[str, Any] = {"qk_norm": norm is not None}
    if norm == "full":
        found["qk_norm_width"] = norm
    biased = family.biases is not None
    if family.bias_key is not None:
        biased = keys.get(family.bias_key, family.defaults.get(family.bias_key, False), bool)
    else:
        keys.expect("attention_bias", (biased,))
    words = family.biases if biased else None
    if family.out_bias_key is not None and keys.get(family.out_bias_key, False, bool):
        if not biased:
            raise keys.error(
                family.out_bias_key, True, f"it must be false unless {family.bias_key} is true"
            )
        words = "all"
    if not family.has_mlp_bias:
        keys.expect("mlp_bias", (False,))
        return found | {"bias": False, "attention_bias": words}
    in_mlp = keys.get("mlp_bias", False, bool)
    same = "all" if in_mlp else None
    return found | {"bias": in_mlp, "attention_bias": None if words == same else words or "none"}


def _scales(keys: Keys, family: Family, hidden: int, width: int) -> dict[str, Any]:
    """Returns our keys for the scales. Raises UserError if a scale is not above 0."""
    found: dict[str, Any] = {"embedding_scale": hidden**0.5} if family.root_scale else {}
    for scale in family.scales:
        off = {"null": None} if scale.may_be_off else {}
        value = keys.get(scale.theirs, scale.usual, int if scale.is_whole else float, **off)
        if value is not None and value <= 0:
            raise keys.error(scale.theirs, value, "it must be above 0")
        value = None if value is None else float(value) ** scale.power
        if scale.ours == "attention_scale" and value == float(width) ** -0.5:
            value = None
        found[scale.ours] = value
    return found
