"""Causal self-attention from the fused projection, as one autograd node where that is faster.

PyTorch's CPU kernel recomputes the probabilities in backward and masks blocks that it has already
multiplied. For the sequences that a CPU trains on, batched GEMMs over blocks of queries, each
against the keys up to the block's end, do 5/8 of the full work at the GEMM library's speed. The
probabilities are kept for backward: about heads · s · (s + BLOCK) / 2 numbers per sequence.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from parallel3d.models.ops import Ops, Rotary, split_heads_rotary

BLOCK = 64  # queries per block
LONGEST = 512  # at 1024 the kept probabilities outgrow the other activations, and nothing is won


class _BlockedAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        qkv: Tensor,
        heads: int,
        kv_heads: int,
        head_dim: int,
        rotary: Rotary | None,
        ops: Ops,
    ) -> Tensor:
        batch, sequence = qkv.shape[:2]
        rows = batch * kv_heads  # the query heads of a group share their keys: more rows, no copies
        q, k, v = ops.split_forward(qkv, heads, kv_heads, head_dim, rotary)
        q = q.view(rows, -1, sequence, head_dim)
        k, v = k.view(rows, sequence, head_dim), v.view(rows, sequence, head_dim)
        out = qkv.new_empty(batch, sequence, heads, head_dim)
        blocks = out.view(batch, sequence, kv_heads, -1, head_dim).permute(0, 2, 3, 1, 4)
        future = q.new_full((BLOCK, BLOCK), -torch.inf).triu_(1)
        kept = []
        for start in range(0, sequence, BLOCK):
            end = min(start + BLOCK, sequence)
            queries = q[:, :, start:end].reshape(rows, -1, head_dim)
            scores = _scaled_bmm(queries, k[:, :end].transpose(1, 2), head_dim**-0.5)
            diagonal = scores.view(rows, -1, end - start, end)[..., start:]
            diagonal += future[: end - start, : end - start]
            kept.append(torch.softmax(scores, -1))
            y = torch.bmm(kept[-1], v[:, :end])
            blocks[:, :, :, start:end] = y.view(batch, kv_heads, -1, end - start, head_dim)
        ctx.sizes, ctx.rotary, ctx.ops = (kv_heads, head_dim), rotary, ops
        ctx.save_for_backward(q, k, v, *kept)
        return out.flatten(2)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple:
        q, k, v, *kept = ctx.saved_tensors
        kv_heads, head_dim = ctx.sizes
        batch, sequence = grad.shape[:2]
        rows = k.shape[0]
        blocks = grad.view(batch, sequence, kv_heads, -1, head_dim).permute(0, 2, 3, 1, 4)
        grad_q = torch.empty_like(q)
        grad_k = grad_v = None
        for i in reversed(range(len(kept))):  # the last block touches every key: it allocates
            start, end = i * BLOCK, min((i + 1) * BLOCK, sequence)
            queries = q[:, :, start:end].reshape(rows, -1, head_dim)
            grad_y = blocks[:, :, :, start:end].reshape(rows, -1, head_dim)
            grad_p = torch.bmm(grad_y, v[:, :end].transpose(1, 2))
            grad_s = torch._softmax_backward_data(grad_p, kept[i], -1, kept[i].dtype)
            part = _scaled_bmm(grad_s, k[:, :end], head_dim**-0.5)
            grad_q[:, :, start:end] = part.view(rows, -1, end - start, head_dim)
            to_k = _scaled_bmm(grad_s.transpose(1, 2), queries, head_dim**-0.5)
            to_v = torch.bmm(kept[i].transpose(1, 2), grad_y)
            if grad_k is None:
                grad_k, grad_v = to_k, to_v
            else:
                grad_k[:, :end] += to_k
                grad_v[:, :end] += to_v
        grads = (t.view(batch, -1, sequence, head_dim) for t in (grad_q, grad_k, grad_v))
        return ctx.ops.split_backward(*grads, ctx.rotary), None, None, None, None, None


def _scaled_bmm(a: Tensor, b: Tensor, scale: float) -> Tensor:
    out = a.new_empty(a.shape[0], a.shape[1], b.shape[2])
    return torch.baddbmm(out, a, b, beta=0.0, alpha=scale, out=out)


def causal_attention(
    qkv: Tensor, heads: int, kv_heads: int, head_dim: int, rotary: Rotary | None, ops: Ops
) -> Tensor:
    """softmax(q·kᵀ / sqrt(head_dim) + causal mask)·v per head (Vaswani et al. 2017 §3.2).

    Query head h reads key-value head h // (heads // kv_heads) (GQA, Ainslie et al. 2023).

    Args:
        qkv: (b, s, (heads + 2 · kv_heads) · head_dim): q, k and v side by side.
        rotary: cos and sin to rotate q and k with; None: they stay as they are.

    Returns: (b, s, heads · head_dim).
    """
    exact = qkv.dtype in (torch.float32, torch.float64)
    if qkv.device.type == "cpu" and exact and qkv.shape[1] <= LONGEST:
        return _BlockedAttention.apply(qkv, heads, kv_heads, head_dim, rotary, ops)
    if rotary is not None:
        q, k, v = split_heads_rotary(qkv, heads, kv_heads, head_dim, rotary, ops)
    else:
        parts = qkv.unflatten(-1, (-1, head_dim)).split((heads, kv_heads, kv_heads), dim=2)
        q, k, v = (t.transpose(1, 2) for t in parts)
    if kv_heads != heads:
        k, v = (t.repeat_interleave(heads // kv_heads, dim=1) for t in (k, v))
    y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    return y.transpose(1, 2).flatten(2)
