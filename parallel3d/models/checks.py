"""Checks the keys of the transformer."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

from parallel3d.config.fields import (
    show,
)
from parallel3d.config.values import AUTO
from parallel3d.errors import UserError, closest, nearest, nearest_multiple
from parallel3d.models.declared import ATTENTION, MIXERS
from parallel3d.models.dialect import (
    FULL,
    FULL_NOPE,
    GATED_DELTANET,
    LAYER_TYPES,
    LLAMA3,
    LONGROPE,
    SLIDING,
    SLIDING_NOPE,
    YARN,
    DeltaKeys,
)
from parallel3d.models.keys import ModelConfig
from parallel3d.models.repeats import Repeats

# Layer type without positions → the same type with positions.
NOPE = {FULL_NOPE: FULL, SLIDING_NOPE: SLIDING}


def check_model(model: ModelConfig) -> None:
    """Raises UserError if numbers of heads or positions, or RoPE keys, contradict each other."""
    hidden, heads, kv_heads = model.hidden_size, model.num_attention_heads, model.kv_heads
    if model.head_dim is None and hidden % heads:
        raise UserError(
            f"model.hidden_size={hidden} must be a multiple of model.num_attention_heads={heads}; "
            f"the nearest is model.hidden_size={nearest_multiple(hidden, heads)}."
        )
    if heads % kv_heads:
        close = closest(kv_heads, lambda n: heads % n == 0, heads) or 1
        raise UserError(
            f"model.num_query_groups={kv_heads} must divide model.num_attention_heads={heads}; "
            f"the nearest is model.num_query_groups={close}."
        )
    if model.position_embedding == "learned" and model.seq_length > model.max_positions:
        raise UserError(
            f"model.seq_length={model.seq_length} must be at most "
            f"model.max_position_embeddings={model.max_positions} with learned positions; the "
            f"nearest is model.seq_length={model.max_positions}."
        )
    if model.position_embedding == "rope" and model.rotary_pairs < 1:
        # The proposed share is rounded up, so that its product with head_dim is not just below 2.
        least = f"model.rotary_percent={math.ceil(2 / model.head_size * 1e4) / 1e4:g}"
        raise UserError(
            f"model.rotary_percent={show(model.rotary_percent)} leaves fewer than 2 of the "
            f"{model.head_size} dimensions of a head to RoPE, which rotates pairs; the nearest is "
            f"{least if model.head_size > 1 else 'model.head_dim=2'}."
        )
    _check_rope(model)


# Keys that split or change the layers of the transformer, with the only value that a run of a
# user's own model may have, and what they act on.
OF_TRANSFORMER = {
    "cp": (1, "splits the sequences of the transformer's attention"),
    "ep": (1, "divides the transformer's experts"),
    "compile": (False, "compiles the transformer's layers"),
    "tensor_parallel.chunks": (1, "cuts the messages of the transformer's layers"),
    "tensor_parallel.attention": ("heads", "gathers heads of the transformer's attention"),
    "mlp_chunk_tokens": (None, "cuts the transformer's MLPs"),
    "attention_kernel": (AUTO, "is the kernel of the transformer's attention"),
    "delta_kernel": (AUTO, "is the kernel of the transformer's gated_deltanet"),
    "loss.label_smoothing": (0.0, "is part of the transformer's loss"),
    "loss.z_loss": (0.0, "is part of the transformer's loss"),
}


def check_own_model(recompute: Any, value: Callable[[str], Any]) -> None:
    """Raises UserError for a key that a run of a user's own model cannot have.

    `value` maps a key to its value.
    """
    for name, (only, does) in OF_TRANSFORMER.items():
        if value(name) != only:
            raise UserError(
                f"{name}={show(value(name))} {does}, and has no effect on a model of your own; the "
                f"nearest is {name}={show(only)}."
            )
    repeats = Repeats.of(recompute)
    if repeats and not repeats.layer:
        raise UserError(
            f"recompute={show(recompute)} names parts of the transformer's layers, but blocks of a "
            "model of your own are recomputed as a whole or not at all; the nearest is "
            "recompute=full."
        )


def _check_rope(model: ModelConfig) -> None:
    low, high = model.rope_low_freq_factor, model.rope_high_freq_factor
    if model.rope_scaling == LLAMA3 and model.rope_scaling_factor > 1 and low >= high:
        raise UserError(
            f"model.rope_low_freq_factor={show(low)} must be below model.rope_high_freq_factor="
            f"{show(high)}; the nearest is model.rope_low_freq_factor={show(high / 4)}."
        )
    if model.position_embedding != "rope":
        return
    fast, slow = model.rope_beta_fast, model.rope_beta_slow
    if model.rope_scaling == YARN and slow >= fast:
        raise UserError(
            f"model.rope_beta_slow={show(slow)} must be below model.rope_beta_fast={show(fast)}; "
            f"the nearest is model.rope_beta_slow={show(fast / 32)}."
        )
    if model.rope_scaling != LONGROPE:
        return
    for name in ("rope_short_factors", "rope_long_factors"):
        factors = getattr(model, name)
        if len(factors) != model.rotary_pairs:
            raise UserError(
                f"model.{name} has {len(factors)} numbers, but model.rope_scaling=longrope needs "
                f"one for each of the {model.rotary_pairs} pairs of dimensions that RoPE rotates; "
                "the nearest is model.rope_scaling=yarn, which needs none."
            )
        if least := [factor for factor in factors if factor <= 0]:
            raise UserError(
                f"model.{name} has {show(least[0])}, but divisors of frequencies must be above 0; "
                "the nearest is 1, which changes nothing."
            )
    if model.rope_original_length < 2:
        raise UserError(
            f"model.rope_original_length={model.rope_original_length} must be at least 2 with "
            "model.rope_scaling=longrope, which divides by its logarithm; the nearest is "
            "model.rope_original_length=2."
        )


def check_layer_types(model: ModelConfig) -> None:
    """Raises UserError if layer types, sliding window and RoPE bases contradict each other."""
    types, window = model.layer_types, model.sliding_window
    shown = f"model.layer_types={show(list(types))}"
    allowed = (*LAYER_TYPES, *(name for name in MIXERS if name != ATTENTION))
    for word in types:
        if word not in allowed:
            close = nearest(str(word), allowed) or FULL
            fixed = [close if other == word else other for other in types]
            raise UserError(
                f"{shown} must have {', '.join(allowed[:-1])} or {allowed[-1]} for each "
                f"layer; the nearest is model.layer_types={show(fixed)}."
            )
    words = types[: model.num_layers]
    slides = any(word in (SLIDING, SLIDING_NOPE) for word in words)
    if window is None and slides:
        raise UserError(
            f"{shown} has sliding layers, which need model.sliding_window, the keys that a query "
            f"sees; the nearest is model.sliding_window={min(4096, model.seq_length)}."
        )
    if window is not None and not slides:
        raise UserError(
            f"model.sliding_window={window} is the window of sliding layers, but {shown} has none "
            f"among {model.num_layers} layers; the nearest is model.sliding_window=null."
        )
    if any(word in NOPE for word in words) and model.position_embedding != "rope":
        fixed = [NOPE.get(word, word) for word in types]
        raise UserError(
            f"{shown} has layers without rotary positions, but the others have none either with "
            f"model.position_embedding={model.position_embedding}; the nearest is "
            f"model.layer_types={show(fixed)}."
        )
    _check_delta(model, words)
    _check_attention(model)
    base = model.sliding_rotary_base
    if base is not None and all(rope.is_scaled for rope in model.ropes):
        raise UserError(
            f"model.sliding_rotary_base={show(base)} is the RoPE base of sliding layers, but with "
            f"{shown} and model.position_embedding={model.position_embedding} none is rotated; "
            "the nearest is model.sliding_rotary_base=null."
        )


# Keys of what attention has beside its heads, with their values where it has no such part.
PARTS_OF_ATTENTION = {
    "attention_gate": False,
    "attention_sinks": False,
    "attention_logit_cap": None,
}


def _check_attention(model: ModelConfig) -> None:
    """Raises UserError if a part of attention has no layer with attention.

    The whole of `layer_types` counts, also beyond `num_layers`: a shorter model of a family is a
    common trial, and its keys are the family's.
    """
    if _has_attention(model):
        return
    for name, without in PARTS_OF_ATTENTION.items():
        if (value := getattr(model, name)) != without:
            raise UserError(
                f"model.{name}={show(value)} is a part of attention, but model.layer_types="
                f"{show(list(model.layer_types))} has none; the nearest is "
                f"model.{name}={show(without)}."
            )


def _has_attention(model: ModelConfig) -> bool:
    return not model.layer_types or any(word in LAYER_TYPES for word in model.layer_types)


def check_kernels(model: ModelConfig, attention: str, delta: str) -> None:
    """Raises UserError if a kernel is named that no layer of the model can use.

    `attention` and `delta` are the keys `attention_kernel` and `delta_kernel`.
    """
    uses = (
        ("attention_kernel", attention, "attention", _has_attention(model)),
        ("delta_kernel", delta, GATED_DELTANET, GATED_DELTANET in model.layer_types),
    )
    for name, kernel, mixer, is_used in uses:
        if kernel != AUTO and not is_used:
            raise UserError(
                f"{name}={kernel} is a kernel of {mixer}, but model.layer_types="
                f"{show(list(model.layer_types))} has none; the nearest is {name}={AUTO}."
            )


def _check_delta(model: ModelConfig, words: list[str]) -> None:
    """Raises UserError if keys of gated DeltaNet contradict each other or have no such layer.

    `words`: the layer types of the model.
    """
    shown = f"model.layer_types={show(list(model.layer_types))}"
    for field in dataclasses.fields(DeltaKeys):
        value = getattr(model, field.name)
        if value != field.default and GATED_DELTANET not in words:
            raise UserError(
                f"model.{field.name}={show(value)} belongs to gated_deltanet, but {shown} "
                f"has none among {model.num_layers} layers; the nearest is "
                f"model.{field.name}={show(field.default)}."
            )
    heads, key_heads = model.value_heads, model.key_heads
    if GATED_DELTANET in words and heads % key_heads:
        raise UserError(
            f"model.delta_value_heads={heads} must be a multiple of model.delta_key_heads="
            f"{key_heads}, as each key head serves equally many value heads; the nearest is "
            f"model.delta_value_heads={nearest_multiple(heads, key_heads)}."
        )
