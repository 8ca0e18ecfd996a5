"""Checks of the transformer's keys."""

from __future__ import annotations

import math

from parallel3d.config.fields import (
    show,
)
from parallel3d.config.schema import (
    ModelConfig,
)
from parallel3d.errors import UserError, closest, nearest_multiple


def check_model(model: ModelConfig) -> None:
    """Raises UserError for heads, positions or RoPE that do not fit the model's sizes."""
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
    if model.position_embedding == "rope" and int(model.head_size * model.rotary_percent) < 2:
        # It is rounded up, so that its product with head_dim is not just below 2.
        least = f"model.rotary_percent={math.ceil(2 / model.head_size * 1e4) / 1e4:g}"
        raise UserError(
            f"model.rotary_percent={show(model.rotary_percent)} leaves fewer than 2 of the "
            f"{model.head_size} dimensions of a head to RoPE, which rotates pairs; the nearest is "
            f"{least if model.head_size > 1 else 'model.head_dim=2'}."
        )
    low, high = model.rope_low_freq_factor, model.rope_high_freq_factor
    if model.rope_scaling_factor > 1 and low >= high:
        raise UserError(
            f"model.rope_low_freq_factor={show(low)} must be below model.rope_high_freq_factor="
            f"{show(high)}; the nearest is model.rope_low_freq_factor={show(high / 4)}."
        )
