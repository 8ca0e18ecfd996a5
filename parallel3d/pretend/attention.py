"""Attention on the pretended device: one kernel forward and one backward, as flash attention is."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from parallel3d.pretend.device import TYPE
from parallel3d.pretend.tensor import PretendedTensor, launch

FLASH, FLASH_BACKWARD = "flash attention", "flash attention backward"


def register() -> torch.library.Library:
    """Takes the place of the composite, which asks C++ for a device's kernels."""
    library = torch.library.Library("aten", "IMPL")
    for key in ("AutogradPrivateUse1", "PrivateUse1"):
        library.impl("scaled_dot_product_attention", _attention, key)
    return library


def _attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """(b, heads, s, d), (b, kv heads, s, d) twice → (b, heads, s, d), stored (b, s, heads, d)."""
    if attn_mask is not None or dropout_p:
        raise NotImplementedError(f"attention with a mask or dropout on the {TYPE} device")
    if query.shape[1] != key.shape[1] and not enable_gqa:
        raise RuntimeError("fewer key-value heads than query heads need enable_gqa=True")
    scale = 1.0 / math.sqrt(query.shape[-1]) if scale is None else scale
    return _Attention.apply(query, key, value, is_causal, scale)


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float
    ) -> PretendedTensor:
        b, heads, s, _ = q.shape
        wide = torch.promote_types(q.dtype, torch.float32)
        out = torch.empty(b, s, heads, v.shape[-1], dtype=q.dtype, device=q.device).transpose(1, 2)
        sums = torch.empty(b, heads, s, dtype=wide, device=q.device)
        if not q.data_.is_meta:
            scores, _, values = _scores(q.data_, k.data_, v.data_, causal, scale)
            out.data_.copy_(scores.softmax(-1) @ values)
            sums.data_.copy_(scores.logsumexp(-1))
        call = (FLASH, [q.data_, k.data_], {"causal": causal}, None)
        launch(FLASH, [q, k, v], [out, sums], call)
        ctx.save_for_backward(q, k, v, out, sums)
        ctx.how = causal, scale
        return out

    @staticmethod
    def backward(ctx: Any, grad: PretendedTensor) -> tuple:
        q, k, v, out, sums = ctx.saved_tensors
        causal, scale = ctx.how
        grads = [torch.empty_like(t) for t in (q, k, v)]
        if not q.data_.is_meta:
            found = _gradients(grad.data_, q.data_, k.data_, v.data_, sums.data_, causal, scale)
            for to, value in zip(grads, found, strict=True):
                to.data_.copy_(value)
        call = (FLASH_BACKWARD, [q.data_, k.data_], {"causal": causal}, None)
        launch(FLASH_BACKWARD, [grad, q, k, v, out, sums], grads, call)
        return *grads, None, None


def _scores(
    q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """(b, heads, s, t) scores, and keys and values for every query head, in fp32 or better."""
    wide, times = torch.promote_types(q.dtype, torch.float32), q.shape[1] // k.shape[1]
    keys, values = (t.to(wide).repeat_interleave(times, 1) for t in (k, v))
    scores = q.to(wide) @ keys.transpose(-2, -1) * scale
    if causal:
        future = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
        scores = scores.masked_fill(future, -torch.inf)
    return scores, keys, values


def _gradients(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, sums: Tensor, causal: bool, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Of queries, keys and values (Dao et al. 2022, algorithm 4, in one block)."""
    scores, keys, values = _scores(q, k, v, causal, scale)
    chances = torch.exp(scores - sums.unsqueeze(-1))
    grad = grad.to(chances.dtype)
    of_chances = grad @ values.transpose(-2, -1)
    of_scores = chances * (of_chances - (of_chances * chances).sum(-1, keepdim=True)) * scale
    of_keys = of_scores.transpose(-2, -1) @ q.to(chances.dtype)
    of_values = chances.transpose(-2, -1) @ grad
    shared = (k.shape[1], -1)
    return (
        of_scores @ keys,
        of_keys.unflatten(1, shared).sum(2),
        of_values.unflatten(1, shared).sum(2),
    )
