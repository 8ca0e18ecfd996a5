"""Element-wise parts of a block as single autograd nodes.

Autograd's own graph for these reads and writes the activations two to three times as often (a pass
per operation, copies where slices are joined again). Written as one node, each makes the fewest
passes that its bodies allow, and writes its gradients straight into the tensor that the GEMM behind
it reads. `Ops` holds the bodies: eager ones, a few passes each, or compiled ones, mostly one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

Rotary = tuple[Tensor, Tensor]  # cos and sin, (s, 1, r/2) each


@dataclass(frozen=True)
class Ops:
    """Bodies of the element-wise nodes: functions of tensors, free of autograd."""

    rms_norm_forward: Callable[..., tuple[Tensor, Tensor]]
    rms_norm_backward: Callable[..., tuple[Tensor, Tensor]]
    swiglu_forward: Callable[..., tuple[Tensor, Tensor | None]]
    swiglu_backward: Callable[..., Tensor]
    split_forward: Callable[..., tuple[Tensor, Tensor, Tensor]]
    split_backward: Callable[..., Tensor]

    @classmethod
    def eager(cls) -> Ops:
        """PyTorch's own kernels, one pass each."""
        return cls(
            _rms_norm_forward,
            _rms_norm_backward,
            _swiglu_forward,
            _swiglu_backward,
            _split_forward,
            _split_backward,
        )

    @classmethod
    def compiled(cls) -> Ops:
        """The same functions through TorchInductor, for the shapes that they first meet.

        Compiles at the first call (a C++ compiler on CPU, Triton on CUDA); kept on disk by PyTorch.
        Each set of bodies has its own compiled code, so that models of other shapes in the same
        process do not count against each other's recompilations.
        """
        compile_ = partial(torch.compile, fullgraph=True, dynamic=False, isolate_recompiles=True)
        return cls(
            compile_(_pure_rms_norm_forward),
            compile_(_pure_rms_norm_backward),
            compile_(_pure_swiglu_forward),
            compile_(_pure_swiglu_backward),
            compile_(_pure_split_forward),
            compile_(_pure_split_backward),
        )


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float, ops: Ops) -> Tensor:
        out, scale = ops.rms_norm_forward(x, weight, eps)
        ctx.ops = ops
        ctx.save_for_backward(x, weight, scale)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None, None]:
        return *ctx.ops.rms_norm_backward(grad, *ctx.saved_tensors), None, None


def rms_norm(x: Tensor, weight: Tensor, eps: float, ops: Ops) -> Tensor:
    """x / sqrt(mean(x²) + eps) · weight over the last dimension (Zhang and Sennrich 2019).

    Statistics in fp32 or better. Shapes: (..., h), (h,) → (..., h).
    """
    return _RMSNorm.apply(x, weight, eps, ops)


def _rms_norm_forward(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    wide = x.float() if x.dtype in (torch.bfloat16, torch.float16) else x
    norm = torch.linalg.vector_norm(wide, dim=-1, keepdim=True)
    scale = torch.rsqrt(norm.square_().div_(x.shape[-1]).add_(eps))
    return (wide * scale).mul_(weight).to(x.dtype), scale


def _rms_norm_backward(
    grad: Tensor, x: Tensor, weight: Tensor, scale: Tensor
) -> tuple[Tensor, Tensor]:
    normed = x * scale
    product = grad * normed
    grad_weight = product.flatten(0, -2).sum(0)
    along = torch.matmul(product, weight.to(product.dtype)).unsqueeze(-1)
    grad_x = torch.mul(grad, weight)
    grad_x.addcmul_(normed, along, value=-1.0 / x.shape[-1]).mul_(scale)
    return grad_x.to(x.dtype), grad_weight.to(weight.dtype)


def _pure_rms_norm_forward(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    wide = x.float() if x.dtype in (torch.bfloat16, torch.float16) else x
    scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return (wide * scale * weight).to(x.dtype), scale


def _pure_rms_norm_backward(
    grad: Tensor, x: Tensor, weight: Tensor, scale: Tensor
) -> tuple[Tensor, Tensor]:
    normed, weighted = x * scale, grad * weight
    along = (weighted * normed).mean(-1, keepdim=True)
    grad_x = (weighted - normed * along) * scale
    grad_weight = (grad * normed).flatten(0, -2).sum(0)
    return grad_x.to(x.dtype), grad_weight.to(weight.dtype)


class _SwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate_up: Tensor, ops: Ops) -> Tensor:
        out, silu = ops.swiglu_forward(gate_up)
        ctx.ops = ops
        ctx.save_for_backward(gate_up, silu)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return ctx.ops.swiglu_backward(grad, *ctx.saved_tensors), None


def swiglu(gate_up: Tensor, ops: Ops) -> Tensor:
    """silu(gate) · up (Shazeer 2020) of gate and up side by side: (..., 2f) → (..., f)."""
    return _SwiGLU.apply(gate_up, ops)


def _swiglu_forward(gate_up: Tensor) -> tuple[Tensor, Tensor]:
    gate, up = gate_up.chunk(2, dim=-1)
    silu = F.silu(gate)
    return silu * up, silu


def _swiglu_backward(grad: Tensor, gate_up: Tensor, silu: Tensor) -> Tensor:
    gate, up = gate_up.chunk(2, dim=-1)
    out = torch.empty_like(gate_up)
    grad_gate, grad_up = out.chunk(2, dim=-1)
    torch.mul(grad, silu, out=grad_up)
    torch.ops.aten.silu_backward.grad_input(grad * up, gate, grad_input=grad_gate)
    return out


def _pure_swiglu_forward(gate_up: Tensor) -> tuple[Tensor, None]:
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate) * up, None  # in one pass, silu is cheaper computed twice than kept


def _pure_swiglu_backward(grad: Tensor, gate_up: Tensor, silu: None) -> Tensor:
    wide = gate_up.float() if gate_up.dtype in (torch.bfloat16, torch.float16) else gate_up
    gate, up = wide.chunk(2, dim=-1)
    sigmoid = torch.sigmoid(gate)
    grad_gate = grad * up * sigmoid * (1 + gate * (1 - sigmoid))
    return torch.cat((grad_gate, grad * gate * sigmoid), -1).to(gate_up.dtype)


class _SplitHeads(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, qkv: Tensor, heads: int, kv_heads: int, head_dim: int, rotary: Rotary, ops: Ops
    ) -> tuple[Tensor, Tensor, Tensor]:
        ctx.ops = ops
        ctx.save_for_backward(*rotary)
        return ops.split_forward(qkv, heads, kv_heads, head_dim, rotary)

    @staticmethod
    def backward(ctx: Any, grad_q: Tensor, grad_k: Tensor, grad_v: Tensor) -> tuple:
        grad = ctx.ops.split_backward(grad_q, grad_k, grad_v, ctx.saved_tensors)
        return grad, None, None, None, None, None


def split_heads_rotary(
    qkv: Tensor, heads: int, kv_heads: int, head_dim: int, rotary: Rotary, ops: Ops
) -> tuple[Tensor, Tensor, Tensor]:
    """Splits the fused projection into heads and rotates q and k (RoPE, Su et al. 2021 §3.2.2).

    Args:
        qkv: (b, s, (heads + 2 · kv_heads) · head_dim).
        rotary: cos and sin for the first r dimensions of a head, paired (d, d + r/2).

    Returns: q (b, heads, s, head_dim), k and v (b, kv_heads, s, head_dim), contiguous.
    """
    return _SplitHeads.apply(qkv, heads, kv_heads, head_dim, rotary, ops)


def _split_forward(
    qkv: Tensor, heads: int, kv_heads: int, head_dim: int, rotary: Rotary | None
) -> tuple[Tensor, Tensor, Tensor]:
    parts = qkv.unflatten(-1, (-1, head_dim)).split((heads, kv_heads, kv_heads), dim=2)
    if rotary is None:
        return tuple(part.transpose(1, 2).contiguous() for part in parts)
    batch, sequence = qkv.shape[:2]
    out = tuple(qkv.new_empty(batch, n, sequence, head_dim) for n in (heads, kv_heads))
    for part, to in zip(parts, out, strict=False):
        _rotate(part, *rotary, to.transpose(1, 2))
    return *out, parts[2].transpose(1, 2).contiguous()


def _split_backward(
    grad_q: Tensor, grad_k: Tensor, grad_v: Tensor, rotary: Rotary | None
) -> Tensor:
    grads = tuple(g.transpose(1, 2) for g in (grad_q, grad_k, grad_v))
    if rotary is None:
        return torch.cat(grads, 2).flatten(2)
    sizes = [g.shape[2] for g in grads]
    out = grad_q.new_empty(*grads[0].shape[:2], sum(sizes), grad_q.shape[-1])
    to_q, to_k, to_v = out.split(sizes, dim=2)
    cos, sin = rotary
    _rotate(grads[0], cos, -sin, to_q)  # the inverse rotation is the transpose
    _rotate(grads[1], cos, -sin, to_k)
    to_v.copy_(grads[2])
    return out.flatten(2)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor, out: Tensor) -> None:
    """Rotates the pairs (d, d + r/2) of the first r dimensions of every head into `out`."""
    half = cos.shape[-1]
    a, b = x[..., :half], x[..., half : 2 * half]
    torch.mul(a, cos, out=out[..., :half]).addcmul_(b, sin, value=-1.0)
    torch.mul(b, cos, out=out[..., half : 2 * half]).addcmul_(a, sin)
    out[..., 2 * half :] = x[..., 2 * half :]


def _pure_split_forward(
    qkv: Tensor, heads: int, kv_heads: int, head_dim: int, rotary: Rotary | None
) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v = qkv.unflatten(-1, (-1, head_dim)).split((heads, kv_heads, kv_heads), dim=2)
    if rotary is not None:
        q, k = _pure_rotate(q, *rotary), _pure_rotate(k, *rotary)
    return tuple(part.transpose(1, 2).contiguous() for part in (q, k, v))


def _pure_split_backward(
    grad_q: Tensor, grad_k: Tensor, grad_v: Tensor, rotary: Rotary | None
) -> Tensor:
    q, k, v = (g.transpose(1, 2) for g in (grad_q, grad_k, grad_v))
    if rotary is not None:
        cos, sin = rotary
        q, k = _pure_rotate(q, cos, -sin), _pure_rotate(k, cos, -sin)
    return torch.cat((q, k, v), 2).flatten(2)


def _pure_rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    half = cos.shape[-1]
    a, b, rest = x.split((half, half, x.shape[-1] - 2 * half), dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin, rest), -1).to(x.dtype)
