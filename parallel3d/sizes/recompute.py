"""What `recompute` costs a layer: FLOPs and collectives that its backward makes again, by part.

The clock of schedules, the traffic table and the planner read it here; what the parts are is said
in `models/recompute.py`, the bytes that they leave in `plan/own/layer.py`.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import NamedTuple

from parallel3d.config.schema import ModelConfig


class LayerFlops(NamedTuple):
    """Forward FLOPs of one layer and token: its four GEMMs, and causal attention's two products."""

    qkv: float
    attention: float
    out: float
    up: float
    down: float


def layer_flops(model: ModelConfig) -> LayerFlops:
    """Over all tensor ranks; norms and the like are no products."""
    h, ffn = model.hidden_size, model.ffn_size
    queries, keys = (n * model.head_size for n in (model.num_attention_heads, model.kv_heads))
    return LayerFlops(
        2.0 * h * (queries + 2 * keys),
        2.0 * queries * model.seq_length,
        2.0 * queries * h,
        2.0 * h * ffn * (2 if model.activation == "swiglu" else 1),
        2.0 * ffn * h,
    )


def flops_again(model: ModelConfig, parts: Collection[str]) -> float:
    """Of one layer and token, beside the forward: a layer's last GEMM is never made again."""
    forward = layer_flops(model)
    if "layer" in parts:
        return sum(forward) - forward.down
    return forward.attention * ("attention" in parts) + forward.up * ("mlp" in parts)


class CollectivesAgain(NamedTuple):
    """Of hidden states over tp, by a layer: all-reduces or, under sequence parallelism, all-gathers
    and reduce-scatters instead."""

    sums: int
    gathers: int
    scatters: int


def collectives_again(parts: Collection[str]) -> CollectivesAgain:
    """Segments that hold a linear layer whose result is wanted: both of attention, or `up`."""
    if "layer" in parts:
        return CollectivesAgain(1, 2, 1)
    return CollectivesAgain(0, int("mlp" in parts), 0)


def recomputing(given: Sequence[int] | None, stage: int, layers: int) -> int:
    """How many of a stage's `layers` layers recompute, by `recompute_layers`."""
    if not given:
        return layers
    return min(layers, given[0] if len(given) == 1 else given[stage])
