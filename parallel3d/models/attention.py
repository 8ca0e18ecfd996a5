"""Causal self-attention from the fused projection: heads split, rotated, attended, joined."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from parallel3d.models.ops import Rotary, split_heads_rotary


def causal_attention(
    qkv: Tensor, heads: int, kv_heads: int, head_dim: int, rotary: Rotary | None
) -> Tensor:
    """softmax(q·kᵀ / sqrt(head_dim) + causal mask)·v per head (Vaswani et al. 2017 §3.2).

    Query head h reads key-value head h // (heads // kv_heads) (GQA, Ainslie et al. 2023).

    Args:
        qkv: (b, s, (heads + 2 · kv_heads) · head_dim): q, k and v side by side.
        rotary: cos and sin to rotate q and k with; None: they stay as they are.

    Returns: (b, s, heads · head_dim).
    """
    if rotary is not None:
        q, k, v = split_heads_rotary(qkv, heads, kv_heads, head_dim, rotary)
    else:
        parts = qkv.unflatten(-1, (-1, head_dim)).split((heads, kv_heads, kv_heads), dim=2)
        q, k, v = (t.transpose(1, 2) for t in parts)
    if kv_heads != heads:
        k, v = (t.repeat_interleave(heads // kv_heads, dim=1) for t in (k, v))
    y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    return y.transpose(1, 2).flatten(2)
