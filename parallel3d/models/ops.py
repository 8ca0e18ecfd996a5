"""Element-wise parts of a block as single autograd nodes.

Autograd's own graph for these reads and writes the activations two to three times as often (a pass
per operation, copies where slices are joined again). Written as one node, each makes the fewest
passes that eager mode allows, and writes its gradients straight into the tensor that the GEMM
behind it reads.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        wide = x.float() if x.dtype in (torch.bfloat16, torch.float16) else x
        norm = torch.linalg.vector_norm(wide, dim=-1, keepdim=True)
        scale = torch.rsqrt(norm.square_().div_(x.shape[-1]).add_(eps))
        ctx.save_for_backward(x, weight, scale)
        return (wide * scale).mul_(weight).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        x, weight, scale = ctx.saved_tensors
        normed = x * scale
        product = grad * normed
        grad_weight = product.flatten(0, -2).sum(0)
        along = torch.matmul(product, weight.to(product.dtype)).unsqueeze(-1)
        grad_x = torch.mul(grad, weight)
        grad_x.addcmul_(normed, along, value=-1.0 / x.shape[-1]).mul_(scale)
        return grad_x.to(x.dtype), grad_weight.to(weight.dtype), None


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / sqrt(mean(x²) + eps) · weight over the last dimension (Zhang and Sennrich 2019).

    Statistics in fp32 or better. Shapes: (..., h), (h,) → (..., h).
    """
    return _RMSNorm.apply(x, weight, eps)


class _SwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate_up: Tensor) -> Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        silu = F.silu(gate)
        ctx.save_for_backward(gate_up, silu)
        return silu * up

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        gate_up, silu = ctx.saved_tensors
        gate, up = gate_up.chunk(2, dim=-1)
        out = torch.empty_like(gate_up)
        grad_gate, grad_up = out.chunk(2, dim=-1)
        torch.mul(grad, silu, out=grad_up)
        torch.ops.aten.silu_backward.grad_input(grad * up, gate, grad_input=grad_gate)
        return out


def swiglu(gate_up: Tensor) -> Tensor:
    """silu(gate) · up (Shazeer 2020) of gate and up side by side: (..., 2f) → (..., f)."""
    return _SwiGLU.apply(gate_up)


class _SplitHeads(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, qkv: Tensor, heads: int, kv_heads: int, head_dim: int, cos: Tensor, sin: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        ctx.heads, ctx.kv_heads, ctx.head_dim = heads, kv_heads, head_dim
        ctx.save_for_backward(cos, sin)
        parts = qkv.unflatten(-1, (-1, head_dim))
        qk, v = parts.split((heads + kv_heads, kv_heads), dim=2)
        out = torch.empty_like(qk)
        _rotate(qk, cos, sin, out)
        q, k = out.split((heads, kv_heads), dim=2)
        return q, k, v

    @staticmethod
    def backward(ctx: Any, grad_q: Tensor, grad_k: Tensor, grad_v: Tensor) -> tuple:
        cos, sin = ctx.saved_tensors
        heads, kv_heads = ctx.heads, ctx.kv_heads
        batch, sequence = grad_q.shape[:2]
        out = grad_q.new_empty(batch, sequence, heads + 2 * kv_heads, ctx.head_dim)
        to_q, to_k, to_v = out.split((heads, kv_heads, kv_heads), dim=2)
        _rotate(grad_q, cos, -sin, to_q)  # the inverse rotation is the transpose
        _rotate(grad_k, cos, -sin, to_k)
        to_v.copy_(grad_v)
        return out.flatten(2), None, None, None, None, None


def _rotate(x: Tensor, cos: Tensor, sin: Tensor, out: Tensor) -> None:
    """Rotates the pairs (d, d + r/2) of the first r dimensions of every head into `out`."""
    half = cos.shape[-1]
    a, b = x[..., :half], x[..., half : 2 * half]
    torch.mul(a, cos, out=out[..., :half]).addcmul_(b, sin, value=-1.0)
    torch.mul(b, cos, out=out[..., half : 2 * half]).addcmul_(a, sin)
    out[..., 2 * half :] = x[..., 2 * half :]


def split_heads_rotary(
    qkv: Tensor, heads: int, kv_heads: int, head_dim: int, cos: Tensor, sin: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Splits the fused projection into heads and rotates q and k (RoPE, Su et al. 2021 §3.2.2).

    Args:
        qkv: (b, s, (heads + 2 · kv_heads) · head_dim).
        cos, sin: (s, 1, r/2), for the first r dimensions of a head, paired (d, d + r/2).

    Returns: q (b, s, heads, head_dim), k and v (b, s, kv_heads, head_dim).
    """
    return _SplitHeads.apply(qkv, heads, kv_heads, head_dim, cos, sin)
