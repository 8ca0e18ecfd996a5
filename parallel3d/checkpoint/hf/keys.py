"""Reading a config.json key by key: types are checked, and no key is passed over unread."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from parallel3d.config.fields import show
from parallel3d.errors import UserError

# Keys that cannot change a logit of these families in evaluation, by what they are for:
# transformers 5.23.0's `modeling_utils`, `masking_utils` and `modeling_*` read them for something
# else, or not at all.
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
# Keys with which a model of these families computes something else, unless they are so.
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
    """The keys of a config.json, or of an object inside it called `where`.

    Every key is read at most once; `finish` refuses those that nobody has read.
    """

    def __init__(
        self,
        content: Mapping[str, Any],
        where: str = "config.json",
        aliases: Mapping[str, str] | None = None,
    ) -> None:
        """`aliases`: other name → the key it stands for. Of both, transformers takes the alias."""
        self.where, self._left = where, dict(content)
        for alias, key in (aliases or {}).items():
            if alias in self._left:
                self._left[key] = self._left.pop(alias)

    def get(self, key: str, default: Any, kind: type, *, null: Any = _REFUSED) -> Any:
        """The value of `key`, `default` where it is missing and `null` where it is null.

        Where `default` is None, null may stand for it. Raises UserError for a value that is not
        of `kind`: a whole number is a float, true is no number.
        """
        value = self._left.pop(key, _REFUSED)
        if value is _REFUSED:
            return default
        if value is None and (null is not _REFUSED or default is None):
            return default if null is _REFUSED else null
        if type(value) is kind or (kind is float and type(value) is int):
            return value
        raise self._error(key, value, f"it must be {WORDS[kind]}")

    def require(self, key: str, allowed: tuple[Any, ...], default: Any) -> Any:
        """The value of `key`, which must be one of `allowed`; raises UserError for another."""
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
