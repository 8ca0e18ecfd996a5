"""RMSNorm over all heads of q as one vector, and likewise of k (OLMoE, MiniMax-M2).

Tensor parallelism splits the heads, so the ranks all-reduce two numbers per token: the mean squares
of q and k in the forward, and two means of products in the backward.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from parallel3d.comm import collectives
from parallel3d.comm.group import Group
from parallel3d.device.fused import fused, operator, register, registered
from parallel3d.models.declared import offset_of
from parallel3d.models.keys import ModelConfig
from parallel3d.models.layers import BuildContext, QKNorm
from parallel3d.models.ops import Heads, gain_of, heads_of, rms_norm
from parallel3d.parameters.declaration import Held


def norm_of_heads(
    held: Held, model: ModelConfig, shape: Heads, ctx: BuildContext
) -> nn.Module | None:
    """Returns the norm of q and k that is declared, or None if there is none."""
    if not held:
        return None
    norm = FullQKNorm if model.qk_norm_width == "full" else QKNorm
    return norm(held, model, shape, ctx)


class FullQKNorm(nn.Module):
    """Applies RMSNorm to q and to k before RoPE, each over all heads of the model.

    A rank holds the weights of its own heads. A key-value head that is on several ranks counts once
    in the mean. The gradient that each of these ranks computes for it covers only the rank's own
    query heads.

    Shapes: (b, s, (heads + 2 · kv_heads) · head_dim) → the same.
    """

    def __init__(self, held: Held, model: ModelConfig, shape: Heads, ctx: BuildContext) -> None:
        super().__init__()
        self.shape = shape
        self.eps = model.norm_eps
        self.offset = offset_of(model)
        self.tp = ctx.tp
        self.q, self.k = ctx.parameter(held["q"]), ctx.parameter(held["k"])
        # A sum over the ranks counts every copy of a key-value head, so the mean divides by the
        # width of all copies.
        self.widths = (len(self.q) * ctx.tp.size, len(self.k) * ctx.tp.size)
        self.handle = register(self)

    def forward(self, qkv: Tensor) -> Tensor:
        if not torch.compiler.is_compiling():
            return _FullNorm.apply(qkv, self.q, self.k, self.handle)
        if self.tp.size > 1:
            return _full_norm(qkv, self.q, self.k, self.handle)
        (q, k, v), how = heads_of(qkv, self.shape), (self.eps, self.offset)
        q, k = rms_norm(q.flatten(2), self.q, *how), rms_norm(k.flatten(2), self.k, *how)
        return torch.cat((q, k, v.flatten(2)), -1)


def _forward(
    qkv: Tensor, q_weight: Tensor, k_weight: Tensor, handle: Tensor
) -> tuple[Tensor, Tensor]:
    """Returns qkv with q and k normalised, and their scales (b, s, 2): 1 / sqrt(mean square)."""
    norm: FullQKNorm = registered(handle)
    squares = sum_over_ranks(sums_of_squares(qkv, norm.widths, norm.shape), norm.tp)
    return scaled_heads(qkv, q_weight, k_weight, squares, norm.shape, norm.eps, norm.offset)


def _backward(
    grad: Tensor, qkv: Tensor, q_weight: Tensor, k_weight: Tensor, scales: Tensor, handle: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    norm: FullQKNorm = registered(handle)
    norms = q_weight, k_weight, scales
    along, of_q, of_k = full_norm_sums(grad, qkv, *norms, norm.widths, norm.shape, norm.offset)
    # The gradient of a key-value head is the sum of its copies' gradients, so each copy subtracts
    # only its share of the mean: the widths in `norm.widths` count all copies.
    shared = *norms, sum_over_ranks(along, norm.tp), norm.shape, norm.offset
    return full_norm_backward(grad, qkv, *shared), of_q, of_k


class _FullNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, qkv: Tensor, q_weight: Tensor, k_weight: Tensor, handle: Tensor
    ) -> Tensor:
        out, scales = _forward(qkv, q_weight, k_weight, handle)
        ctx.save_for_backward(qkv, q_weight, k_weight, scales)
        ctx.handle = handle
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        saved = *ctx.saved_tensors, ctx.handle
        return *_backward(grad, *saved), None


def _shapes(
    qkv: Tensor, q_weight: Tensor, k_weight: Tensor, handle: Tensor
) -> tuple[Tensor, Tensor]:
    wide = torch.promote_types(qkv.dtype, torch.float32)
    return qkv.new_empty(qkv.shape), qkv.new_empty(*qkv.shape[:2], 2, dtype=wide)


# Compiled blocks call this operator, because their graphs cannot contain the sums over the ranks.
# Both of its results are kept for the backward (`kept`).
_full_norm = operator(
    "full_norm",
    "Tensor qkv, Tensor q_weight, Tensor k_weight",
    "Tensor handle",
    _forward,
    _shapes,
    lambda grad, qkv, q, k, out, *more: _backward(grad, qkv, q, k, *more),
    lambda grad, *saved: tuple(x.new_empty(x.shape) for x in saved[:3]),
    kept="Tensor out, Tensor scales",
)


def sum_over_ranks(x: Tensor, tp: Group) -> Tensor:
    """Sums this rank's partial means `x` over the tensor-parallel ranks, in place."""
    return collectives.all_reduce(x, tp) if tp.size > 1 else x


def _parts(qkv: Tensor, shape: Heads) -> tuple[Tensor, Tensor, Tensor]:
    """Returns q, k and v, (b, s, width) each, with q and k in fp32 or better."""
    wide = torch.promote_types(qkv.dtype, torch.float32)
    q, k, v = (part.flatten(2) for part in heads_of(qkv, shape))
    return q.to(wide), k.to(wide), v


@fused
def sums_of_squares(qkv: Tensor, widths: tuple[int, int], shape: Heads) -> Tensor:
    """Returns this rank's contributions to the mean squares of q and k, (b, s, 2)."""
    q, k, _ = _parts(qkv, shape)
    return torch.stack((q.square().sum(-1) / widths[0], k.square().sum(-1) / widths[1]), -1)


@fused
def scaled_heads(
    qkv: Tensor,
    q_weight: Tensor,
    k_weight: Tensor,
    squares: Tensor,
    shape: Heads,
    eps: float,
    offset: float,
) -> tuple[Tensor, Tensor]:
    """Returns qkv with q and k normalised, and the scales (b, s, 2) of q and k.

    `squares`, (b, s, 2), are the mean squares of q and k over all ranks.
    """
    q, k, v = _parts(qkv, shape)
    scales = torch.rsqrt(squares + eps)
    q = (q * scales[..., :1] * gain_of(q_weight, offset)).to(qkv.dtype)
    k = (k * scales[..., 1:] * gain_of(k_weight, offset)).to(qkv.dtype)
    return torch.cat((q, k, v), -1), scales


@fused
def full_norm_sums(
    grad: Tensor,
    qkv: Tensor,
    q_weight: Tensor,
    k_weight: Tensor,
    scales: Tensor,
    widths: tuple[int, int],
    shape: Heads,
    offset: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns this rank's contributions to two means, (b, s, 2), and both weights' gradients.

    The means are those of grad · weight · normalised for q and for k.
    """
    q, k, _ = _parts(qkv, shape)
    grad_q, grad_k, _ = _parts(grad, shape)
    by_q, by_k = grad_q * q * scales[..., :1], grad_k * k * scales[..., 1:]
    q_gain, k_gain = gain_of(q_weight, offset), gain_of(k_weight, offset)
    of_heads = (by_q * q_gain).sum(-1) / widths[0], (by_k * k_gain).sum(-1) / widths[1]
    along = torch.stack(of_heads, -1)
    of_q, of_k = (part.flatten(0, -2).sum(0) for part in (by_q, by_k))
    return along, of_q.to(q_weight.dtype), of_k.to(k_weight.dtype)


@fused
def full_norm_backward(
    grad: Tensor,
    qkv: Tensor,
    q_weight: Tensor,
    k_weight: Tensor,
    scales: Tensor,
    along: Tensor,
    shape: Heads,
    offset: float,
) -> Tensor:
    """Returns the gradient of qkv.

    For q and k it is scale · (grad · weight − normalised · along), where `along` has the means of
    `full_norm_sums` over all ranks. The gradient of v is passed through.
    """
    q, k, _ = _parts(qkv, shape)
    grad_q, grad_k, grad_v = _parts(grad, shape)
    q_scale, k_scale = scales[..., :1], scales[..., 1:]
    q_gain, k_gain = gain_of(q_weight, offset), gain_of(k_weight, offset)
    of_q = (grad_q * q_gain - q * q_scale * along[..., :1]) * q_scale
    of_k = (grad_k * k_gain - k * k_scale * along[..., 1:]) * k_scale
    return torch.cat((of_q.to(qkv.dtype), of_k.to(qkv.dtype), grad_v), -1)
