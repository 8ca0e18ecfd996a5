"""RMSNorm of every head of q and k before RoPE (Henry et al. 2020; Qwen3 report, §2)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from parallel3d.config.schema import ModelConfig
from parallel3d.device.fused import fused
from parallel3d.models.context import BuildContext
from parallel3d.models.ops import rms_norm
from parallel3d.parameters.pieces import ParameterSpec, ShardSpec


class QKNorm(nn.Module):
    """One weight for all heads of q and one for those of k; v passes.

    Every tp rank holds both, and each rank's gradient is that of its own heads: they are to be
    added over tp, with sequence parallelism or without. That is what `Piece.copies` says. A
    key-value head on several ranks is no exception: each has it for other query heads.

    Shapes: (b, s, (heads + 2 · kv_heads) · head_dim) → the same.
    """

    def __init__(
        self, prefix: str, model: ModelConfig, heads: tuple[int, int], ctx: BuildContext
    ) -> None:
        super().__init__()
        self.shape = (*heads, model.head_size)
        self.eps = model.norm_eps
        size, tp = (model.head_size,), ctx.tp.size

        def weight(part: str) -> nn.Parameter:
            name = f"{prefix}.{part}_norm.weight"
            piece = ShardSpec(name, size, (0,), size, fill=1.0, copies=tp)
            return ctx.init.parameter(ParameterSpec(size, (piece,), replicated=tp == 1))

        self.q, self.k = weight("q"), weight("k")

    def forward(self, qkv: Tensor) -> Tensor:
        if not torch.compiler.is_compiling():
            return _NormHeads.apply(qkv, self.q, self.k, *self.shape, self.eps)
        q, k, v = _split(qkv, *self.shape)
        q, k = rms_norm(q, self.q, self.eps), rms_norm(k, self.k, self.eps)
        return torch.cat((q, k, v), 2).flatten(2)


class _NormHeads(torch.autograd.Function):
    """One node: the gradient of the projection is written in one piece."""

    @staticmethod
    def forward(
        ctx: Any,
        qkv: Tensor,
        q_weight: Tensor,
        k_weight: Tensor,
        heads: int,
        kv_heads: int,
        head_dim: int,
        eps: float,
    ) -> Tensor:
        ctx.shape = (heads, kv_heads, head_dim)
        out, *scales = norm_heads_forward(qkv, q_weight, k_weight, *ctx.shape, eps)
        ctx.save_for_backward(qkv, q_weight, k_weight, *scales)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple:
        return *norm_heads_backward(grad, *ctx.saved_tensors, *ctx.shape), None, None, None, None


@fused
def norm_heads_forward(
    qkv: Tensor,
    q_weight: Tensor,
    k_weight: Tensor,
    heads: int,
    kv_heads: int,
    head_dim: int,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """The result, and the scales (b, s, heads, 1) of q and of k in fp32 or better."""
    q, k, v = _split(qkv, heads, kv_heads, head_dim)
    (q, q_scale), (k, k_scale) = _normed(q, q_weight, eps), _normed(k, k_weight, eps)
    return torch.cat((q, k, v), 2).flatten(2), q_scale, k_scale


@fused
def norm_heads_backward(
    grad: Tensor,
    qkv: Tensor,
    q_weight: Tensor,
    k_weight: Tensor,
    q_scale: Tensor,
    k_scale: Tensor,
    heads: int,
    kv_heads: int,
    head_dim: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of the projection and of both weights."""
    q, k, _ = _split(qkv, heads, kv_heads, head_dim)
    grad_q, grad_k, grad_v = _split(grad, heads, kv_heads, head_dim)
    grad_q, grad_q_weight = _gradients(grad_q, q, q_weight, q_scale)
    grad_k, grad_k_weight = _gradients(grad_k, k, k_weight, k_scale)
    return torch.cat((grad_q, grad_k, grad_v), 2).flatten(2), grad_q_weight, grad_k_weight


def _split(qkv: Tensor, heads: int, kv_heads: int, head_dim: int) -> tuple[Tensor, ...]:
    """q, k and v as views, (b, s, heads, head_dim)."""
    return qkv.unflatten(-1, (-1, head_dim)).split((heads, kv_heads, kv_heads), dim=2)


def _normed(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return (wide * scale * weight).to(x.dtype), scale


def _gradients(grad: Tensor, x: Tensor, weight: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    """Of x and of the weight: with n = x · scale, dx = scale · (g·w − n · mean(g·w·n))."""
    normed = x * scale
    grad_weight = (grad * normed).flatten(0, -2).sum(0)
    weighed = grad * weight
    along = (weighed * normed).mean(-1, keepdim=True)
    return ((weighed - normed * along) * scale).to(x.dtype), grad_weight.to(weight.dtype)
