"""Checks that a style of context parallelism fits the model."""

from __future__ import annotations

from parallel3d.config.fields import check_conflicts
from parallel3d.config.values import AUTO, HEADS
from parallel3d.context_parallel.keys import CONFLICTS
from parallel3d.errors import UserError
from parallel3d.models.declared import MIXERS, layer_kinds
from parallel3d.models.keys import ModelConfig


def check_context_parallel(
    model: ModelConfig, style: str, attention: str, *, tp: int, cp: int, states: str = AUTO
) -> None:
    """Raises UserError if a style of context parallelism does not fit the model.

    Args:
        style: the key `context_parallel.style`.
        attention: the key `tensor_parallel.attention`.
        states: the key `context_parallel.states`.
    """
    if cp == 1:
        return
    values = {
        "context_parallel.style": style,
        "tensor_parallel.attention": attention,
        "model.dropout": model.dropout,
        "cp": cp,
    }
    check_conflicts(CONFLICTS, values.__getitem__)
    for kind in model.attention_kinds if style == "heads" else ():
        heads, kv_heads = kind.heads // tp, max(1, kind.kv_heads // tp)
        if heads % cp or (kv_heads % cp and cp % kv_heads):
            raise UserError(
                f"context_parallel.style=heads needs cp={cp} to divide the {heads} query heads and "
                f"{kv_heads} key-value heads of a tensor-parallel rank; the nearest is "
                "context_parallel.style=gather, for any heads."
            )
    for layer in layer_kinds(model) if states == HEADS else ():
        if layer.mixer is None or not MIXERS[layer.mixer].hands_states:
            continue
        shared = max(1, layer.kv_heads // tp)
        if shared % cp:
            raise UserError(
                f"context_parallel.states=heads needs cp={cp} to divide the number of key heads of "
                f"{layer.mixer} on a tensor-parallel rank, {shared}; the nearest is "
                "context_parallel.states=chain, for any heads."
            )
