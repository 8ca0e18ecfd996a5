"""Maps names and keys of Hugging Face models to ours, and reads config.json key by key."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from parallel3d.config.fields import show
from parallel3d.config.schema import ModelConfig, full_shapes_of
from parallel3d.errors import UserError

# Keys that cannot change a logit of these families in evaluation, by purpose. `modeling_utils`,
# `masking_utils` and `modeling_*` of transformers 5.23.0 read them for something else, or never.
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
    "what a call returns": "output_attentions output_hidden_states return_dict torchscript "
    "tie_last_hidden_states is_decoder",
    "how the same is computed": "reorder_and_upcast_attn _attn_implementation_autoset "
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
# Keys that change what a model of these families computes, with the values that do not.
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
    "rope_interleaved": (False,),
    "attn_implementation": ATTENTION,
    "_attn_implementation": ATTENTION,
}
SHOWN = 100  # characters of a value that is refused
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
        """`aliases`: other name → key. Of both, transformers takes the alias."""
        self.where, self._left = where, dict(content)
        for alias, key in (aliases or {}).items():
            if alias in self._left:
                self._left[key] = self._left.pop(alias)

    def get(self, key: str, default: Any, kind: type, *, null: Any = _REFUSED) -> Any:
        """Returns a value. Raises UserError unless it is of `kind`; whole numbers are floats."""
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
                    "which may change what the model computes: take it out if it does not"
                )

    def _error(self, key: str, value: Any, must: str) -> UserError:
        return UserError(
            f"{self.where} has {key}={_brief(value)}, which our model cannot express: {must}"
        )


def _brief(value: Any) -> str:
    text = show(value)
    return text if len(text) <= SHOWN else f"{text[:SHOWN]}…"


LLAMA, QWEN2, QWEN3, GPT2 = "llama", "qwen2", "qwen3", "gpt2"
ARCHITECTURES = {
    LLAMA: "LlamaForCausalLM",
    QWEN2: "Qwen2ForCausalLM",
    QWEN3: "Qwen3ForCausalLM",
    GPT2: "GPT2LMHeadModel",
}
HEAD = "lm_head.weight"
EMBEDDINGS = dict.fromkeys((LLAMA, QWEN2, QWEN3), "model.embed_tokens.weight")
EMBEDDINGS[GPT2] = "transformer.wte.weight"


@dataclass(frozen=True)
class HFTensor:
    """Describes one tensor of a Hugging Face checkpoint.

    Attributes:
        name: transformers' name, `model.layers.0.self_attn.q_proj.weight`.
        parts: our tensors, concatenated along dimension 0.
        shape: of the tensor in the file.
        transposed: the file holds the transpose of the joined parts.
    """

    name: str
    parts: tuple[str, ...]
    shape: tuple[int, ...]
    transposed: bool = False


def hf_tensors(model: ModelConfig, kind: str) -> list[HFTensor]:
    """Returns every tensor of `model` in the format `kind`, in the order of the layers.

    Llama (`LlamaForCausalLM`), Qwen2 and Qwen3 have equal names, with separate q, k and v, as here.
    GPT-2 (`GPT2LMHeadModel`) joins and transposes them: its layers are `Conv1D`, whose weight is
    (inputs, outputs). Rotary dimensions are paired (d, d + r/2) there as here, so rows stay in
    place. A tied head is left out, as in transformers.
    """
    tensors = _gpt2(model) if kind == GPT2 else _llama(model)
    if not model.tie_embeddings:
        shape = (model.vocab_size, model.hidden_size)
        tensors.append(HFTensor(HEAD, ("head.weight",), shape))
    return tensors


def _llama(model: ModelConfig) -> list[HFTensor]:
    shapes = full_shapes_of(model)
    names = {"embedding.word.weight": EMBEDDINGS[LLAMA]}
    for layer in range(model.num_layers):
        ours, theirs = f"layers.{layer}", f"model.layers.{layer}"
        names[f"{ours}.input_norm.weight"] = f"{theirs}.input_layernorm.weight"
        for part in ("weight", "bias"):
            for short, long in (("q", "q"), ("k", "k"), ("v", "v"), ("out", "o")):
                names[f"{ours}.attention.{short}.{part}"] = f"{theirs}.self_attn.{long}_proj.{part}"
        for part in ("q_norm", "k_norm"):
            names[f"{ours}.attention.{part}.weight"] = f"{theirs}.self_attn.{part}.weight"
        names[f"{ours}.mlp_norm.weight"] = f"{theirs}.post_attention_layernorm.weight"
        for part in ("weight", "bias"):
            for short in ("gate", "up", "down"):
                names[f"{ours}.mlp.{short}.{part}"] = f"{theirs}.mlp.{short}_proj.{part}"
    names["final_norm.weight"] = "model.norm.weight"
    return [HFTensor(name, (ours,), shapes[ours]) for ours, name in names.items() if ours in shapes]


def _gpt2(model: ModelConfig) -> list[HFTensor]:
    shapes = full_shapes_of(model)
    tensors = [
        HFTensor(EMBEDDINGS[GPT2], ("embedding.word.weight",), ()),
        HFTensor("transformer.wpe.weight", ("embedding.position.weight",), ()),
    ]
    for layer in range(model.num_layers):
        ours, theirs = f"layers.{layer}", f"transformer.h.{layer}"

        def both(
            name: str, *parts: str, conv: bool = True, ours: str = ours, theirs: str = theirs
        ) -> list[HFTensor]:
            return [
                HFTensor(
                    f"{theirs}.{name}.{kind}",
                    tuple(f"{ours}.{part}.{kind}" for part in parts),
                    (),
                    transposed=conv and kind == "weight",
                )
                for kind in ("weight", "bias")
            ]

        tensors += both("ln_1", "input_norm", conv=False)
        tensors += both("attn.c_attn", "attention.q", "attention.k", "attention.v")
        tensors += both("attn.c_proj", "attention.out")
        tensors += both("ln_2", "mlp_norm", conv=False)
        tensors += both("mlp.c_fc", "mlp.up")
        tensors += both("mlp.c_proj", "mlp.down")
    tensors += [
        HFTensor(f"transformer.ln_f.{kind}", (f"final_norm.{kind}",), ())
        for kind in ("weight", "bias")
    ]
    return [_shaped(tensor, shapes) for tensor in tensors]


def _shaped(tensor: HFTensor, shapes: dict[str, tuple[int, ...]]) -> HFTensor:
    rows = sum(shapes[part][0] for part in tensor.parts)
    shape = (rows, *shapes[tensor.parts[0]][1:])
    return HFTensor(
        tensor.name, tensor.parts, shape[::-1] if tensor.transposed else shape, tensor.transposed
    )


# Keys of rope_type=llama3, and ours.
ORIGINAL = "original_max_position_embeddings"
SCALING = {
    "factor": "rope_scaling_factor",
    "low_freq_factor": "rope_low_freq_factor",
    "high_freq_factor": "rope_high_freq_factor",
    ORIGINAL: "rope_original_length",
}


@dataclass(frozen=True)
class _Defaults:
    """Holds transformers' defaults of a family; None: derived from the other sizes."""

    ffn: int
    positions: int
    vocab: int
    kv_heads: int | None = None
    head_dim: int | None = None


_QWEN = (22016, 32768, 151936, 32)
DEFAULTS = {
    LLAMA: _Defaults(11008, 2048, 32000),
    QWEN2: _Defaults(*_QWEN),
    QWEN3: _Defaults(*_QWEN, head_dim=128),
}


def llama_keys(model: ModelConfig, kind: str) -> dict[str, Any]:
    rope: dict[str, Any] = {"rope_type": "default"}
    if model.rope_scaling_factor > 1:
        scaling = {theirs: getattr(model, ours) for theirs, ours in SCALING.items()}
        rope = {"rope_type": "llama3"} | scaling
    keys = {
        "hidden_size": model.hidden_size,
        "intermediate_size": model.ffn_size,
        "num_hidden_layers": model.num_layers,
        "num_attention_heads": model.num_attention_heads,
        "num_key_value_heads": model.kv_heads,
        "hidden_act": "silu",
        "max_position_embeddings": model.seq_length,
        "rms_norm_eps": model.norm_eps,
        "rope_theta": model.rotary_base,
        "rope_parameters": {"rope_theta": model.rotary_base} | rope,
        "attention_dropout": model.dropout,
    }
    if rope["rope_type"] != "default":  # as transformers before version 5 reads it
        keys["rope_scaling"] = rope
    if kind != QWEN2 or model.head_size * model.num_attention_heads != model.hidden_size:
        keys["head_dim"] = model.head_size
    if kind == LLAMA:
        return keys | {"attention_bias": model.qkv_bias, "mlp_bias": model.bias}
    keys["use_sliding_window"] = False
    return keys | {"attention_bias": model.qkv_bias} if kind == QWEN3 else keys


def from_llama(keys: Keys, kind: str) -> dict[str, Any]:
    """Returns our `model` section; raises UserError for what our model cannot express."""
    default = DEFAULTS[kind]
    hidden, heads = keys.get("hidden_size", 4096, int), keys.get("num_attention_heads", 32, int)
    layers = keys.get("num_hidden_layers", 32, int)
    positions = keys.get("max_position_embeddings", default.positions, int)
    width = _head_dim(keys, kind, hidden, heads)
    keys.require("hidden_act", ("silu", "swish"), "silu")
    _all_alike(keys, kind, layers)
    return {
        "name": f"hf_{kind}",
        "num_layers": layers,
        "hidden_size": hidden,
        "num_attention_heads": heads,
        "num_query_groups": keys.get(
            "num_key_value_heads", default.kv_heads or heads, int, null=heads
        ),
        "head_dim": None if hidden % heads == 0 and width == hidden // heads else width,
        "ffn_hidden_size": keys.get("intermediate_size", default.ffn, int),
        "seq_length": positions,
        "vocab_size": keys.get("vocab_size", default.vocab, int),
        "norm": "rmsnorm",
        "norm_eps": float(keys.get("rms_norm_eps", 1e-6, float)),
        "position_embedding": "rope",
        **_rope(keys, positions),
        "activation": "swiglu",
        **_attention(keys, kind),
        "tie_embeddings": keys.get("tie_word_embeddings", False, bool),
        "init_std": float(keys.get("initializer_range", 0.02, float)),
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
    width = keys.get("head_dim", default=DEFAULTS[kind].head_dim or usual, kind=int, **null)
    if width % 2:
        raise UserError(f"config.json has heads of {width}: RoPE turns pairs of dimensions")
    return width


def _all_alike(keys: Keys, kind: str, layers: int) -> None:
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
            f"config.json has layer_types of {len(types)} layers and num_hidden_layers={layers}"
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

    `rope_scaling` before `rope_parameters`, as a whole; the base in it before that at the top; but
    `original_max_position_embeddings` at the top before that in it, else all positions.
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
