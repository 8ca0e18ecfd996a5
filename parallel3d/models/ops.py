"""Element-wise parts of a block as single autograd nodes.

Autograd's own graph for these reads and writes the activations two to three times as often (a pass
per operation, copies where slices are joined again). Written as one node, each makes the fewest
passes that PyTorch's kernels allow, and writes its gradients straight into the tensor that the GEMM
behind it reads. On an accelerator the forward and the backward of a node are one kernel each
(`fused`), which makes again in registers what a CPU had better keep. Inside a compiled block
(`compile=true`) the same functions are written as plain arithmetic instead, which TorchInductor
joins with what stands around it.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from parallel3d.device.accelerator import is_on_accelerator
from parallel3d.device.fused import fused

Rotary = tuple[Tensor, Tensor]  # cos and sin, (s, 1, r/2) or (b, s, 1, r/2) each


def _wide(x: Tensor) -> Tensor:
    """`x` in fp32 or better: statistics and sigmoids are taken there."""
    return x.float() if x.dtype in (torch.bfloat16, torch.float16) else x


@fused
def rms_norm_forward(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """The result, and the scale (..., 1) in fp32 or better."""
    return _normed(x, weight, eps)


@fused
def rms_norm_backward(
    grad: Tensor, x: Tensor, weight: Tensor, scale: Tensor
) -> tuple[Tensor, Tensor]:
    """Gradients of x and of the weight."""
    return _norm_gradients(None, grad, x, weight, scale)


@fused
def add_rms_norm_forward(
    x: Tensor, y: Tensor, weight: Tensor, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """x + y, its norm, and the scale (..., 1) in fp32 or better."""
    total = x + y
    return total, *_normed(total, weight, eps)


@fused
def add_rms_norm_backward(
    grad_total: Tensor, grad: Tensor, total: Tensor, weight: Tensor, scale: Tensor
) -> tuple[Tensor, Tensor]:
    """Gradients of both terms of the total, which are equal, and of the weight.

    `grad_total` comes from what reads the total beside the norm, `grad` from the norm's result.
    """
    return _norm_gradients(grad_total, grad, total, weight, scale)


def _normed(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    wide = _wide(x)
    norm = torch.linalg.vector_norm(wide, dim=-1, keepdim=True)
    scale = torch.rsqrt(norm.square_().div_(x.shape[-1]).add_(eps))
    return (wide * scale).mul_(weight).to(x.dtype), scale


def _norm_gradients(
    beside: Tensor | None, grad: Tensor, x: Tensor, weight: Tensor, scale: Tensor
) -> tuple[Tensor, Tensor]:
    """Gradients of x, with `beside` added before it is rounded to its type, and of the weight."""
    shape, parts = x.shape, [grad, x, scale] + ([] if beside is None else [beside])
    if all(part.is_contiguous() for part in parts):
        # As matrices: TorchInductor then adds along rows and columns and writes grad_x in one pass,
        # where of three dimensions it makes two (10 bytes an element in bf16 instead of 6).
        grad, x, scale, *rest = (part.flatten(0, -2) for part in parts)
        beside = rest[0] if rest else None
    normed = x * scale
    product = grad * normed
    grad_weight = product.flatten(0, -2).sum(0)
    along = torch.matmul(product, weight.to(product.dtype)).unsqueeze(-1)
    grad_x = torch.mul(grad, weight)
    grad_x.addcmul_(normed, along, value=-1.0 / x.shape[-1]).mul_(scale)
    if beside is not None:
        grad_x = grad_x + beside
    return grad_x.to(x.dtype).view(shape), grad_weight.to(weight.dtype)


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        y, scale = rms_norm_forward(x, weight, eps)
        ctx.save_for_backward(x, weight, scale)
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        return *rms_norm_backward(grad, *ctx.saved_tensors), None


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / sqrt(mean(x²) + eps) · weight over the last dimension (Zhang and Sennrich 2019).

    Statistics in fp32 or better. Shapes: (..., h), (h,) → (..., h).
    """
    if not torch.compiler.is_compiling():
        return _RMSNorm.apply(x, weight, eps)
    wide = _wide(x)
    scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return (wide * scale * weight).to(x.dtype)


class _AddRMSNorm(torch.autograd.Function):
    """The residual stream with a branch added, and its norm; y None: the stream and its norm.

    In the backward the stream's own gradient joins the norm's in the same kernel. Apart, autograd
    would read both and write their sum.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, y: Tensor | None, weight: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]:
        ctx.adds = y is not None
        if y is None:
            total = x.view_as(x)  # autograd takes no input as a result
            normed, scale = rms_norm_forward(x, weight, eps)
        else:
            total, normed, scale = add_rms_norm_forward(x, y, weight, eps)
        ctx.save_for_backward(total, weight, scale)
        return total, normed

    @staticmethod
    def backward(ctx: Any, grad_total: Tensor, grad: Tensor) -> tuple:
        grad_x, grad_weight = add_rms_norm_backward(grad_total, grad, *ctx.saved_tensors)
        return grad_x, grad_x if ctx.adds else None, grad_weight, None


def add_rms_norm(x: Tensor, y: Tensor | None, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """x + y (x where y is None) and `rms_norm` of it, for accelerators in eager mode.

    One kernel forward and one backward: the sum is written and not read again for its norm.
    """
    return _AddRMSNorm.apply(x, y, weight, eps)


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


@fused
def swiglu_forward(gate_up: Tensor) -> Tensor:
    gate, up = gate_up.chunk(2, dim=-1)
    return (F.silu(_wide(gate)) * up).to(gate_up.dtype)


@fused
def swiglu_backward(grad: Tensor, gate_up: Tensor) -> Tensor:
    """silu'(z) = σ(z)·(1 + z·(1 − σ(z)))."""
    gate, up = gate_up.chunk(2, dim=-1)
    gate, grad = _wide(gate), _wide(grad)
    sigmoid = torch.sigmoid(gate)
    grad_gate = grad * up * sigmoid * (1.0 + gate * (1.0 - sigmoid))
    return torch.cat((grad_gate, grad * gate * sigmoid), -1).to(gate_up.dtype)


class _FusedSwiGLU(torch.autograd.Function):
    """Keeps nothing beside its input: silu is made again while that is read."""

    @staticmethod
    def forward(ctx: Any, gate_up: Tensor) -> Tensor:
        ctx.save_for_backward(gate_up)
        return swiglu_forward(gate_up)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return swiglu_backward(grad, *ctx.saved_tensors)


def swiglu(gate_up: Tensor) -> Tensor:
    """silu(gate) · up (Shazeer 2020) of gate and up side by side: (..., 2f) → (..., f)."""
    if not torch.compiler.is_compiling():
        node = _FusedSwiGLU if is_on_accelerator(gate_up) else _SwiGLU
        return node.apply(gate_up)
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate) * up


class _SplitHeads(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, qkv: Tensor, heads: int, kv_heads: int, head_dim: int, rotary: Rotary
    ) -> tuple[Tensor, Tensor, Tensor]:
        ctx.save_for_backward(*rotary)
        parts = qkv.unflatten(-1, (-1, head_dim)).split((heads, kv_heads, kv_heads), dim=2)
        batch, sequence = qkv.shape[:2]
        out = tuple(qkv.new_empty(batch, n, sequence, head_dim) for n in (heads, kv_heads))
        for part, to in zip(parts, out, strict=False):
            _rotate(part, *rotary, to.transpose(1, 2))
        return *out, parts[2].transpose(1, 2).contiguous()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple:
        to_split = tuple(g.transpose(1, 2) for g in grads)
        sizes = [g.shape[2] for g in to_split]
        out = grads[0].new_empty(*to_split[0].shape[:2], sum(sizes), grads[0].shape[-1])
        to_q, to_k, to_v = out.split(sizes, dim=2)
        cos, sin = ctx.saved_tensors
        _rotate(to_split[0], cos, -sin, to_q)  # the inverse rotation is the transpose
        _rotate(to_split[1], cos, -sin, to_k)
        to_v.copy_(to_split[2])
        return out.flatten(2), None, None, None, None


@fused
def split_heads_forward(
    qkv: Tensor, cos: Tensor, sin: Tensor, heads: int, kv_heads: int, head_dim: int
) -> tuple[Tensor, Tensor, Tensor]:
    """q, k and v apart, contiguous (b, s, heads, head_dim) each, q and k rotated."""
    q, k, v = qkv.unflatten(-1, (-1, head_dim)).split((heads, kv_heads, kv_heads), dim=2)
    return _rotated(q, cos, sin), _rotated(k, cos, sin), v.contiguous()


@fused
def split_heads_backward(q: Tensor, k: Tensor, v: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Gradients (b, s, heads, head_dim) of q, k and v as the gradient of the projection."""
    # The inverse rotation is the transpose. v is a mere copy: no attention backward of PyTorch has
    # an out= that could write into a slice.
    return torch.cat((_rotated(q, cos, -sin), _rotated(k, cos, -sin), v), 2).flatten(2)


class _FusedSplitHeads(torch.autograd.Function):
    """`_SplitHeads` for accelerators. There attention's kernels take the heads of a token side by
    side as well, and give their output likewise, so that nothing is copied to join the heads."""

    @staticmethod
    def forward(
        ctx: Any, qkv: Tensor, heads: int, kv_heads: int, head_dim: int, rotary: Rotary
    ) -> tuple[Tensor, ...]:
        ctx.save_for_backward(*rotary)
        parts = split_heads_forward(qkv, *rotary, heads, kv_heads, head_dim)
        return tuple(part.transpose(1, 2) for part in parts)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple:
        parts = (grad.transpose(1, 2) for grad in grads)
        return split_heads_backward(*parts, *ctx.saved_tensors), None, None, None, None


def split_heads_rotary(
    qkv: Tensor, heads: int, kv_heads: int, head_dim: int, rotary: Rotary
) -> tuple[Tensor, Tensor, Tensor]:
    """Splits the fused projection into heads and rotates q and k (RoPE, Su et al. 2021 §3.2.2).

    Args:
        qkv: (b, s, (heads + 2 · kv_heads) · head_dim).
        rotary: cos and sin for the first r dimensions of a head, paired (d, d + r/2).

    Returns: q (b, heads, s, head_dim), k and v (b, kv_heads, s, head_dim).
    """
    if not torch.compiler.is_compiling():
        node = _FusedSplitHeads if is_on_accelerator(qkv) else _SplitHeads
        return node.apply(qkv, heads, kv_heads, head_dim, rotary)
    q, k, v = qkv.unflatten(-1, (-1, head_dim)).split((heads, kv_heads, kv_heads), dim=2)
    q, k = _rotated(q, *rotary), _rotated(k, *rotary)
    return q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor, out: Tensor) -> None:
    """Rotates the pairs (d, d + r/2) of the first r dimensions of every head into `out`."""
    half = cos.shape[-1]
    a, b = x[..., :half], x[..., half : 2 * half]
    torch.mul(a, cos, out=out[..., :half]).addcmul_(b, sin, value=-1.0)
    torch.mul(b, cos, out=out[..., half : 2 * half]).addcmul_(a, sin)
    out[..., 2 * half :] = x[..., 2 * half :]


def _rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """What `_rotate` writes, as arithmetic.

    a·cos − b·sin and b·cos + a·sin are one expression over both halves, so that a compiler reads
    and writes a head once, without joining halves.
    """
    half = cos.shape[-1]
    pairs = x[..., : 2 * half].unflatten(-1, (2, half))
    signs = torch.arange(-1, 2, 2, device=x.device).unsqueeze(-1)
    # The signs go with the heads: their product with sin would be kept for the backward.
    turned = pairs * cos.unsqueeze(-2) + pairs.flip(-2) * signs * sin.unsqueeze(-2)
    turned = turned.flatten(-2).to(x.dtype)
    if 2 * half == x.shape[-1]:
        return turned
    return torch.cat((turned, x[..., 2 * half :]), -1)
