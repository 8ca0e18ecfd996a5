"""Maps Hugging Face models to ours: the tensors' names, and config.json read key by key.

It uses no torch and no files. Defaults, which a config.json may leave out, are those of
transformers' configuration classes. Keys without a counterpart are refused in one sentence each.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from parallel3d.config.fields import show
from parallel3d.config.schema import ModelConfig, full_shapes_of
from parallel3d.errors import UserError, nearest_hint

LLAMA = "llama"
QWEN2 = "qwen2"
QWEN3 = "qwen3"
GPT2 = "gpt2"
TITLES = {LLAMA: "Llama", QWEN2: "Qwen2", QWEN3: "Qwen3", GPT2: "GPT-2"}
ARCHITECTURES = {
    LLAMA: "LlamaForCausalLM",
    QWEN2: "Qwen2ForCausalLM",
    QWEN3: "Qwen3ForCausalLM",
    GPT2: "GPT2LMHeadModel",
}
HEAD = "lm_head.weight"
EMBEDDINGS = dict.fromkeys((LLAMA, QWEN2, QWEN3), "model.embed_tokens.weight")
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
# Our key; the key of Llama and Qwen, and of GPT-2; transformers' defaults for Llama, Qwen, GPT-2.
_KEYS: tuple[tuple[str, str, str, Any, Any, Any], ...] = (
    ("hidden_size", "hidden_size", "n_embd", 4096, 4096, 768),
    ("num_layers", "num_hidden_layers", "n_layer", 32, 32, 12),
    ("num_attention_heads", "num_attention_heads", "n_head", 32, 32, 12),
    ("seq_length", "max_position_embeddings", "n_positions", 2048, 32768, 1024),
    ("vocab_size", "vocab_size", "vocab_size", 32000, 151936, 50257),
    ("norm_eps", "rms_norm_eps", "layer_norm_epsilon", 1e-6, 1e-6, 1e-5),
    ("tie_embeddings", "tie_word_embeddings", "tie_word_embeddings", False, False, True),
    ("init_std", "initializer_range", "initializer_range", 0.02, 0.02, 0.02),
)
# transformers' GPT2Config.attribute_map: sizes under Llama's names, which GPT-2 may use as well.
_GPT2_ALIASES = {llama: gpt2 for _, llama, gpt2, *_ in _KEYS[:4]}
# model.activation ↔ GPT-2's activation_function. Llama only has SwiGLU, under the name silu.
GPT2_ACTIVATIONS = {"gelu": "gelu", "gelu_tanh": "gelu_new", "relu": "relu"}
# Other names of the tanh approximation, equal up to rounding.
SPELLINGS = {"gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh", "gelu_fast": "gelu_tanh"}
# Keys of rope_type=llama3 → our keys.
ORIGINAL = "original_max_position_embeddings"
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
SHOWN = 100  # characters shown of a refused value
WORDS = {
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    str: "a word",
    dict: "an object",
    list: "a list",
}
_REFUSED = object()


class Keys:
    """Reads a config.json, or an object in it; each key once, and `finish` refuses the others."""

    def __init__(
        self,
        content: Mapping[str, Any],
        where: str = "config.json",
        aliases: Mapping[str, str] | None = None,
    ) -> None:
        """`aliases`: other name → key. If both are present, transformers takes the alias."""
        self.where = where
        self._left = dict(content)
        for alias, key in (aliases or {}).items():
            if alias in self._left:
                self._left[key] = self._left.pop(alias)

    def get(self, key: str, default: Any, kind: type, *, null: Any = _REFUSED) -> Any:
        """Returns a value. Raises UserError unless it is of `kind`; whole numbers count as
        floats."""
        value = self._left.pop(key, _REFUSED)
        if value is _REFUSED:
            return default
        if value is None and (null is not _REFUSED or default is None):
            return default if null is _REFUSED else null
        if type(value) is kind or (kind is float and type(value) is int):
            return value
        raise self._error(key, value, f"it must be {WORDS[kind]}")

    def require(self, key: str, allowed: tuple[Any, ...], default: Any) -> Any:
        value = self._left.pop(key, default)
        if value not in allowed:
            choices = " or ".join(show(choice) for choice in allowed)
            raise self._error(key, value, f"it must be {choices}")
        return value

    def has(self, key: str) -> bool:
        return key in self._left

    def finish(self, harmless: Collection[str] = ()) -> None:
        """Raises UserError for a key that was not read and is not `harmless`."""
        for key, value in self._left.items():
            if key not in harmless:
                raise UserError(
                    f"{self.where} has {key}={_brief(value)}, which parallel3d does not know and "
                    "which may change the model's results: remove it if it does not"
                )

    def _error(self, key: str, value: Any, must: str) -> UserError:
        return UserError(
            f"{self.where} has {key}={_brief(value)}, which our model cannot express: {must}"
        )


def _brief(value: Any) -> str:
    text = show(value)
    return text if len(text) <= SHOWN else f"{text[:SHOWN]}…"


@dataclass(frozen=True)
class HFTensor:
    """Describes one tensor of a Hugging Face checkpoint.

    Attributes:
        name: transformers' name, `model.layers.0.self_attn.q_proj.weight`.
        parts: our tensors, concatenated along dimension 0.
        shape: shape of the tensor in the file.
        transposed: the file holds the transpose of the joined parts.
    """

    name: str
    parts: tuple[str, ...]
    shape: tuple[int, ...]
    transposed: bool = False


def hf_tensors(model: ModelConfig, kind: str) -> list[HFTensor]:
    """Returns every tensor of `model` in the format `kind`, in the order of the layers.

    Llama (`LlamaForCausalLM`), Qwen2 and Qwen3 have the same names, with separate q, k and v, as
    here. GPT-2 (`GPT2LMHeadModel`) joins and transposes them: its layers are `Conv1D`, whose weight
    is (inputs, outputs). Rotary dimensions are paired (d, d + r/2) there as here, so rows stay in
    place. A tied head is left out, as in transformers.
    """
    shapes, tensors = full_shapes_of(model), []
    for theirs, ours, in_layer in _modules(model, _GPT2 if kind == GPT2 else _LLAMA):
        for part in ("weight", "bias"):
            parts = tuple(f"{module}.{part}" for module in ours)
            if parts[0] not in shapes:
                continue
            shape = (sum(shapes[name][0] for name in parts), *shapes[parts[0]][1:])
            transposed = kind == GPT2 and in_layer and len(shape) == 2
            shape = shape[::-1] if transposed else shape
            tensors.append(HFTensor(f"{theirs}.{part}", parts, shape, transposed))
    if not model.tie_embeddings:
        shape = (model.vocab_size, model.hidden_size)
        tensors.append(HFTensor(HEAD, ("head.weight",), shape))
    return tensors


def _modules(
    model: ModelConfig, names: tuple[dict[str, str], dict[str, str], dict[str, str]]
) -> Iterator[tuple[str, list[str], bool]]:
    """Yields their module, our modules, and whether they are in a layer."""
    before, in_layer, after = names
    for theirs, ours in before.items():
        yield theirs, [ours], False
    for layer in range(model.num_layers):
        for theirs, ours in in_layer.items():
            yield theirs.format(layer), [f"layers.{layer}.{o}" for o in ours.split()], True
    for theirs, ours in after.items():
        yield theirs, [ours], False


def hf_kind(model: ModelConfig) -> str:
    """Returns "llama", "qwen2", "qwen3" or "gpt2". Raises UserError, with the key, if none fits."""
    position = model.position_embedding
    if position == "none":
        raise UserError(
            "model.position_embedding=none has no counterpart in Hugging Face's Llama and GPT-2 "
            "formats; models with rope (Llama) or learned (GPT-2) can be exported"
        )
    kind, by = GPT2, f"model.position_embedding={position}"
    if position == "rope" and model.qk_norm:
        kind, by = QWEN3, "model.qk_norm=true"
    elif position == "rope":
        kind = LLAMA
        if model.qkv_bias != model.out_bias:
            kind, by = QWEN2, f"model.attention_bias={model.attention_bias}"
    for key, value, allowed in _wanted(model, kind):
        if value not in allowed:
            raise UserError(
                f"model.{key}={show(value)} has no counterpart in Hugging Face's "
                f"{TITLES[kind]} format, which {by} selects: there it must be "
                f"{' or '.join(show(a) for a in allowed)}"
            )
    if kind != GPT2 and model.head_size % 2:
        raise UserError(
            f"model.num_attention_heads={model.num_attention_heads} gives heads of "
            f"{model.head_size}: Hugging Face's {TITLES[kind]} format only rotates even heads"
        )
    return kind


def _wanted(model: ModelConfig, kind: str) -> list[tuple[str, Any, tuple[Any, ...]]]:
    """Returns (key, value, values that the format knows) for all keys that the format fixes."""
    heads = model.num_attention_heads
    if kind == GPT2:
        return [
            ("norm", model.norm, ("layernorm",)),
            ("activation", model.activation, tuple(GPT2_ACTIVATIONS)),
            ("bias", model.bias, (True,)),
            ("attention_bias", model.attention_bias, (None, "all")),
            ("num_query_groups", model.kv_heads, (heads,)),
            ("head_dim", model.head_dim, (None, model.hidden_size // heads)),
            ("qk_norm", model.qk_norm, (False,)),
        ]
    wanted: list[tuple[str, Any, tuple[Any, ...]]] = [
        ("norm", model.norm, ("rmsnorm",)),
        ("activation", model.activation, ("swiglu",)),
        ("rotary_percent", model.rotary_percent, (1.0,)),
    ]
    if kind == LLAMA:  # transformers refuses other sizes
        multiple = max(1, model.hidden_size // heads) * heads
        return [*wanted, ("hidden_size", model.hidden_size, (multiple,))]
    if kind == QWEN3:
        wanted.append(("attention_bias", model.attention_bias, (None, "none", "all")))
    return [*wanted, ("bias", model.bias, (False,))]


def to_hf(model: ModelConfig, dtype: str) -> dict[str, Any]:
    """Returns config.json without tokens; `dtype` is "fp32", "bf16" …. Raises UserError."""
    kind = hf_kind(model)
    sizes = {
        gpt2 if kind == GPT2 else llama: getattr(model, ours) for ours, llama, gpt2, *_ in _KEYS
    }
    common = sizes | {
        "architectures": [ARCHITECTURES[kind]],
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
    rope: dict[str, Any] = {"rope_type": "default"}
    if model.rope_scaling_factor > 1:
        scaling = {theirs: getattr(model, ours) for theirs, ours in SCALING.items()}
        rope = {"rope_type": "llama3"} | scaling
    keys = common | {
        "intermediate_size": model.ffn_size,
        "num_key_value_heads": model.kv_heads,
        "hidden_act": "silu",
        "rope_theta": model.rotary_base,
        "rope_parameters": {"rope_theta": model.rotary_base} | rope,
        "attention_dropout": model.dropout,
    }
    if rope["rope_type"] != "default":  # for transformers before version 5
        keys["rope_scaling"] = rope
    if kind != QWEN2 or model.head_size * model.num_attention_heads != model.hidden_size:
        keys["head_dim"] = model.head_size
    if kind == LLAMA:
        return keys | {"attention_bias": model.qkv_bias, "mlp_bias": model.bias}
    keys["use_sliding_window"] = False
    return keys | {"attention_bias": model.qkv_bias} if kind == QWEN3 else keys


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
    if kind not in ARCHITECTURES:
        hint = nearest_hint(str(kind), ARCHITECTURES)
        raise UserError(
            f"config.json has model_type={show(kind)}: it must be one of "
            f"{', '.join(ARCHITECTURES)}{hint}"
        )
    keys = Keys(config, aliases=_GPT2_ALIASES if kind == GPT2 else None)
    for key, allowed in FIXED.items():
        keys.require(key, allowed, allowed[0])
    found: dict[str, Any] = {"name": f"hf_{kind}"}
    for ours, llama, gpt2, *defaults in _KEYS:
        default = defaults[{LLAMA: 0, GPT2: 2}.get(kind, 1)]
        value = keys.get(gpt2 if kind == GPT2 else llama, default, type(default))
        found[ours] = float(value) if isinstance(default, float) else value
    found |= _from_gpt2(keys, found) if kind == GPT2 else _from_llama(keys, kind, found)
    keys.finish(HARMLESS | {"model_type"})
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
    hidden, heads = sizes["hidden_size"], sizes["num_attention_heads"]
    width = _head_dim(keys, kind, hidden, heads)
    keys.require("hidden_act", ("silu", "swish"), "silu")
    _check_layer_types(keys, kind, sizes["num_layers"])
    groups, ffn = (heads, 11008) if kind == LLAMA else (32, 22016)
    return {
        "num_query_groups": keys.get("num_key_value_heads", groups, int, null=heads),
        "head_dim": None if hidden % heads == 0 and width == hidden // heads else width,
        "ffn_hidden_size": keys.get("intermediate_size", ffn, int),
        "norm": "rmsnorm",
        "position_embedding": "rope",
        **_rope(keys, sizes["seq_length"]),
        "activation": "swiglu",
        **_attention(keys, kind),
    }


def _head_dim(keys: Keys, kind: str, hidden: int, heads: int) -> int:
    """Returns the size of a head, which RoPE needs to be even."""
    if kind == LLAMA and hidden % heads:
        raise UserError(
            f"config.json has hidden_size={hidden}, which is not a multiple of "
            f"num_attention_heads={heads}: transformers refuses it as well"
        )
    usual = hidden // heads
    null = {"null": usual} if kind == LLAMA else {}
    width = keys.get("head_dim", 128 if kind == QWEN3 else usual, int, **null)
    if width % 2:
        raise UserError(f"config.json has heads of {width}: RoPE turns pairs of dimensions")
    return width


def _check_layer_types(keys: Keys, kind: str, layers: int) -> None:
    """Raises UserError unless every layer attends to all earlier tokens."""
    keys.require("use_sliding_window", (False,), False)
    if kind == LLAMA:
        keys.require("sliding_window", (None,), None)
    else:
        keys.get("sliding_window", None, int)
    types = keys.get("layer_types", None, list)
    if types is None:
        return
    for layer_type in types:
        Keys({"layer_types": layer_type}).require("layer_types", ("full_attention",), None)
    if len(types) != layers:
        raise UserError(
            f"config.json has layer_types of {len(types)} layers, but num_hidden_layers={layers}"
        )


def _attention(keys: Keys, kind: str) -> dict[str, Any]:
    if kind != LLAMA:
        keys.require("mlp_bias", (False,), False)
    if kind == QWEN2:
        keys.require("attention_bias", (True,), True)
        return {"bias": False, "attention_bias": "qkv"}
    attention = keys.get("attention_bias", False, bool)
    mlp = keys.get("mlp_bias", False, bool)
    differs = None if attention == mlp else "all" if attention else "none"
    return {"bias": mlp, "attention_bias": differs, "qk_norm": kind == QWEN3}


def _rope(keys: Keys, positions: int) -> dict[str, Any]:
    """Returns base and scaling, in both spellings, by transformers' precedence.

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
    top = keys.get("rope_theta", 10000.0, float)
    found = {"rotary_base": float(rope.get("rope_theta", top, float))}
    for place in (rope, keys):
        place.require("partial_rotary_factor", (1.0,), 1.0)
    if kind == "llama3":
        found |= _scaling(keys, rope, positions)
    else:
        keys.get(ORIGINAL, 0, int)  # has no effect
    rope.finish()
    return found


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
