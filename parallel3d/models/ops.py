"""RMSNorm, SwiGLU, GeGLU and rotary positions as single autograd nodes.

Graphs of autograd's own operations would read and write the activations two to three times as
often. On an accelerator the forward and the backward of a node are one kernel each (`fused`). In a
compiled block (`compile=true`) the functions are plain arithmetic, which TorchInductor fuses with
the code around it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from parallel3d.device.accelerator import is_on_accelerator
from parallel3d.device.fused import fused

Heads = tuple[int, int, int]  # heads, key-value heads, head_dim
Rotary = tuple[Tensor, Tensor]  # cos and sin, (s, 1, r/2) or (b, s, 1, r/2) each
# Constants of the tanh approximation of GELU (Hendrycks and Gimpel 2016).
SQRT_2_OVER_PI, CUBIC = math.sqrt(2 / math.pi), 0.044715
SLOPE = 1.702  # of the gate's sigmoid in gpt-oss, for which silu comes close to gelu


def _wide(x: Tensor) -> Tensor:
    """Returns `x` in fp32 or better."""
    return x.float() if x.dtype in (torch.bfloat16, torch.float16) else x


def gain_of(weight: Tensor, offset: float) -> Tensor:
    """Returns the factor by which an RMSNorm multiplies: its weight plus the offset.

    With an offset the sum is in fp32 or better.
    """
    # In bf16 a sum with 1 would lose most bits of a small weight.
    return _wide(weight) + offset if offset else weight


@fused
def rms_norm_forward(x: Tensor, weight: Tensor, eps: float, offset: float) -> tuple[Tensor, Tensor]:
    return _normed(x, gain_of(weight, offset), eps)


@fused
def rms_norm_backward(
    grad: Tensor, x: Tensor, weight: Tensor, scale: Tensor, offset: float
) -> tuple[Tensor, Tensor]:
    return _norm_gradients(None, grad, x, weight, scale, offset)


@fused
def add_rms_norm_forward(
    x: Tensor, y: Tensor, weight: Tensor, eps: float, offset: float
) -> tuple[Tensor, Tensor, Tensor]:
    total = x + y
    return total, *_normed(total, gain_of(weight, offset), eps)


@fused
def add_rms_norm_backward(
    grad_total: Tensor, grad: Tensor, total: Tensor, weight: Tensor, scale: Tensor, offset: float
) -> tuple[Tensor, Tensor]:
    """Returns the gradient of the addends, which is the same for both, and that of the weight.

    `grad_total` is the gradient of the sum and `grad` that of its norm.
    """
    return _norm_gradients(grad_total, grad, total, weight, scale, offset)


def _normed(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    wide = _wide(x)
    norm = torch.linalg.vector_norm(wide, dim=-1, keepdim=True)
    scale = torch.rsqrt(norm.square_().div_(x.shape[-1]).add_(eps))
    return (wide * scale).mul_(weight).to(x.dtype), scale


def _norm_gradients(
    grad_total: Tensor | None,
    grad: Tensor,
    x: Tensor,
    weight: Tensor,
    scale: Tensor,
    offset: float,
) -> tuple[Tensor, Tensor]:
    """Returns the gradients of x and of the weight.

    If `grad_total` is not None, it is added to the gradient of x before rounding.
    """
    gain = gain_of(weight, offset)
    shape, parts = x.shape, [grad, x, scale] + ([] if grad_total is None else [grad_total])
    if all(part.is_contiguous() for part in parts):
        # For matrices TorchInductor reduces rows and columns and writes grad_x in one pass. For
        # tensors of three dimensions it needs two passes, which move 10 bytes per element in bf16
        # instead of 6.
        grad, x, scale, *rest = (part.flatten(0, -2) for part in parts)
        grad_total = rest[0] if rest else None
    normed = x * scale
    weighted = grad * normed
    grad_weight = weighted.flatten(0, -2).sum(0)
    along = torch.matmul(weighted, gain.to(weighted.dtype)).unsqueeze(-1)
    grad_x = torch.mul(grad, gain)
    grad_x.addcmul_(normed, along, value=-1.0 / x.shape[-1]).mul_(scale)
    if grad_total is not None:
        grad_x = grad_x + grad_total
    return grad_x.to(x.dtype).view(shape), grad_weight.to(weight.dtype)


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float, offset: float) -> Tensor:
        y, scale = rms_norm_forward(x, weight, eps, offset)
        ctx.save_for_backward(x, weight, scale)
        ctx.offset = offset
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None, None]:
        saved = *ctx.saved_tensors, ctx.offset
        return *rms_norm_backward(grad, *saved), None, None


def rms_norm(x: Tensor, weight: Tensor, eps: float, offset: float = 0.0) -> Tensor:
    """Returns x / sqrt(mean(x²) + eps) · (offset + weight) over the last dimension.

    This is RMSNorm (Zhang and Sennrich 2019). Statistics are in fp32 or better.

    Shapes: (..., h), (h,) → (..., h).
    """
    if not torch.compiler.is_compiling():
        return _RMSNorm.apply(x, weight, eps, offset)
    wide = _wide(x)
    scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return (wide * scale * gain_of(weight, offset)).to(x.dtype)


class _AddRMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, y: Tensor | None, weight: Tensor, eps: float, offset: float
    ) -> tuple[Tensor, Tensor]:
        ctx.adds = y is not None
        if y is None:
            total = x.view_as(x)  # autograd does not allow a function to return its input
            normed, scale = rms_norm_forward(x, weight, eps, offset)
        else:
            total, normed, scale = add_rms_norm_forward(x, y, weight, eps, offset)
        ctx.save_for_backward(total, weight, scale)
        ctx.offset = offset
        return total, normed

    @staticmethod
    def backward(ctx: Any, grad_total: Tensor, grad: Tensor) -> tuple:
        saved = *ctx.saved_tensors, ctx.offset
        grad_x, grad_weight = add_rms_norm_backward(grad_total, grad, *saved)
        return grad_x, grad_x if ctx.adds else None, grad_weight, None, None


def add_rms_norm(
    x: Tensor, y: Tensor | None, weight: Tensor, eps: float, offset: float = 0.0
) -> tuple[Tensor, Tensor]:
    """Returns x + y (x if y is None) and its `rms_norm`.

    On an accelerator the forward is one kernel, and so is the backward.
    """
    return _AddRMSNorm.apply(x, y, weight, eps, offset)


@fused
def swiglu_forward(gate_up: Tensor) -> Tensor:
    gate, up = gate_up.chunk(2, dim=-1)
    return (F.silu(_wide(gate)) * up).to(gate_up.dtype)


@fused
def swiglu_backward(grad: Tensor, gate_up: Tensor) -> Tensor:
    gate, up = gate_up.chunk(2, dim=-1)
    gate, grad = _wide(gate), _wide(grad)
    sigmoid = torch.sigmoid(gate)
    # silu'(z) = σ(z)·(1 + z·(1 − σ(z)))
    grad_gate = grad * up * sigmoid * (1.0 + gate * (1.0 - sigmoid))
    return torch.cat((grad_gate, grad * gate * sigmoid), -1).to(gate_up.dtype)


@fused
def geglu_forward(gate_up: Tensor) -> Tensor:
    gate, up = gate_up.chunk(2, dim=-1)
    return (F.gelu(_wide(gate), approximate="tanh") * up).to(gate_up.dtype)


@fused
def geglu_backward(grad: Tensor, gate_up: Tensor) -> Tensor:
    gate, up = gate_up.chunk(2, dim=-1)
    gate, grad = _wide(gate), _wide(grad)
    share, slope = _share(gate, "geglu", None)
    grad_gate = grad * up * (share + gate * slope)
    return torch.cat((grad_gate, grad * gate * share), -1).to(gate_up.dtype)


@fused
def clamped_swiglu_forward(gate_up: Tensor, limit: float) -> Tensor:
    return _clamped_swiglu(gate_up, limit)


def _clamped_swiglu(gate_up: Tensor, limit: float) -> Tensor:
    gate, up = _clamped(gate_up, limit)
    return (gate * torch.sigmoid(SLOPE * gate) * up).to(gate_up.dtype)


@fused
def clamped_swiglu_backward(grad: Tensor, gate_up: Tensor, limit: float) -> Tensor:
    gate, up = _clamped(gate_up, limit)
    grad, (share, slope) = _wide(grad), _share(gate, "swiglu", limit)
    found = torch.cat((grad * up * (share + gate * slope), grad * gate * share), -1)
    return _within(found, gate_up, limit).to(gate_up.dtype)


def _clamped(gate_up: Tensor, limit: float | None) -> tuple[Tensor, Tensor]:
    """Returns the two factors of a gated activation, before the gate's non-linearity."""
    gate, up = gate_up.chunk(2, dim=-1)
    if limit is None:
        return _wide(gate), up
    return _wide(gate).clamp(max=limit), _wide(up).clamp(-limit, limit) + 1.0


def _within(grad: Tensor, gate_up: Tensor, limit: float | None) -> Tensor:
    """Returns the gradients of gate and up, given those of what is left of them by the limit."""
    if limit is None:
        return grad
    gate, up = _wide(gate_up).chunk(2, dim=-1)  # the limit is not rounded to 16 bits
    return grad.where(torch.cat((gate <= limit, up.abs() <= limit), -1), 0.0)


def _silu_backward(grad: Tensor, gate: Tensor, out: Tensor) -> None:
    torch.ops.aten.silu_backward.grad_input(grad, gate, grad_input=out)


def _gelu_backward(grad: Tensor, gate: Tensor, out: Tensor) -> None:
    torch.ops.aten.gelu_backward.grad_input(grad, gate, approximate="tanh", grad_input=out)


class _Gate(NamedTuple):
    """The non-linearity of a gated MLP, as fused kernels and as a PyTorch operation.

    Attributes:
        forward, backward: fused functions of concatenated gate and up.
        alone: the non-linearity of the gate, as a single PyTorch operation; None: there is none.
        alone_backward: the backward of `alone`, which writes the gradient into its last argument.
    """

    forward: Callable[[Tensor], Tensor]
    backward: Callable[[Tensor, Tensor], Tensor]
    alone: Callable[[Tensor], Tensor] | None = None
    alone_backward: Callable[[Tensor, Tensor, Tensor], None] | None = None


def _gate(name: str, limit: float | None) -> _Gate:
    if limit is not None:
        return _Gate(
            lambda gate_up: clamped_swiglu_forward(gate_up, limit),
            lambda grad, gate_up: clamped_swiglu_backward(grad, gate_up, limit),
        )
    if name == "swiglu":
        return _Gate(swiglu_forward, swiglu_backward, F.silu, _silu_backward)
    alone = partial(F.gelu, approximate="tanh")
    return _Gate(geglu_forward, geglu_backward, alone, _gelu_backward)


class _Gated(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate_up: Tensor, name: str, limit: float | None) -> Tensor:
        ctx.how, of = (name, limit), _gate(name, limit)
        if of.alone is None or is_on_accelerator(gate_up):
            ctx.save_for_backward(gate_up)  # the backward's kernel recomputes the gate's result
            return of.forward(gate_up)
        gate, up = gate_up.chunk(2, dim=-1)
        active = of.alone(gate)
        ctx.save_for_backward(gate_up, active)
        return active * up

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        (gate_up, *kept), of = ctx.saved_tensors, _gate(*ctx.how)
        if not kept or of.alone_backward is None:
            return of.backward(grad, gate_up), None, None
        gate, up = gate_up.chunk(2, dim=-1)
        out = torch.empty_like(gate_up)
        grad_gate, grad_up = out.chunk(2, dim=-1)
        torch.mul(grad, kept[0], out=grad_up)
        of.alone_backward(grad * up, gate, grad_gate)
        return out, None, None


@partial(fused, rows=True)
def weighed_forward(
    gate_up: Tensor, weights: Tensor, name: str, limit: float | None = None
) -> Tensor:
    """Returns the gated activation of each row times the row's weight, rounded once.

    Shapes: (rows, 2f), (rows,) → (rows, f).
    """
    gate, up = _clamped(gate_up, limit)
    share, _ = _share(gate, name, limit)
    return (gate * share * up * weights.unsqueeze(-1)).to(gate_up.dtype)


@partial(fused, rows=True)
def weighed_backward(
    grad: Tensor, gate_up: Tensor, weights: Tensor, name: str, limit: float | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the gradients of the rows and of their weights, and the result of the forward."""
    gate, up = _clamped(gate_up, limit)
    grad, weights = _wide(grad), weights.unsqueeze(-1)
    share, slope = _share(gate, name, limit)
    active = gate * share
    weighed = grad * weights
    grad_gate = weighed * up * (share + gate * slope)
    grad_gate_up = torch.cat((grad_gate, weighed * active), -1)
    grad_gate_up = _within(grad_gate_up, gate_up, limit).to(gate_up.dtype)
    active = active * up
    return grad_gate_up, (grad * active).sum(-1), (active * weights).to(gate_up.dtype)


def _share(gate: Tensor, name: str, limit: float | None) -> tuple[Tensor, Tensor]:
    """Returns s(z) and its derivative, where z · s(z) is the non-linearity of the gate z."""
    if name == "swiglu":
        share = torch.sigmoid(gate if limit is None else SLOPE * gate)
        slope = share * (1.0 - share)
        return share, slope if limit is None else SLOPE * slope
    # gelu: s = (1 + tanh u) / 2 with u = √(2/π)·(z + 0.044715·z³), and s' = (1 − tanh² u)·u' / 2.
    tanh = torch.tanh(SQRT_2_OVER_PI * (gate + CUBIC * gate**3))
    slope = 0.5 * (1.0 - tanh * tanh) * SQRT_2_OVER_PI * (1.0 + 3.0 * CUBIC * gate * gate)
    return 0.5 + 0.5 * tanh, slope


def swiglu(gate_up: Tensor, limit: float | None = None) -> Tensor:
    """Returns silu(gate) · up (Shazeer 2020) of concatenated gate and up: (..., 2f) → (..., f).

    With a limit l it is (u + 1) · g · σ(1.702 · g), where g is the gate up to l, and u is up within
    ±l (gpt-oss, arXiv:2508.10925).
    """
    return _gated(gate_up, "swiglu", limit)


def geglu(gate_up: Tensor) -> Tensor:
    """Returns gelu_tanh(gate) · up (Shazeer 2020) of concatenated gate and up, like `swiglu`."""
    return _gated(gate_up, "geglu")


def _gated(gate_up: Tensor, name: str, limit: float | None = None) -> Tensor:
    if not torch.compiler.is_compiling():
        return _Gated.apply(gate_up, name, limit)
    if limit is not None:
        return _clamped_swiglu(gate_up, limit)
    gate, up = gate_up.chunk(2, dim=-1)
    alone = _gate(name, limit).alone
    assert alone is not None  # only a limit leaves no single operation
    return alone(gate) * up


@fused
def sigmoid_gate_forward(y: Tensor, gate: Tensor) -> Tensor:
    return (_wide(y) * torch.sigmoid(_wide(gate))).to(y.dtype)


@fused
def sigmoid_gate_backward(grad: Tensor, y: Tensor, gate: Tensor) -> tuple[Tensor, Tensor]:
    grad, share = _wide(grad), torch.sigmoid(_wide(gate))
    # σ'(z) = σ(z)·(1 − σ(z))
    grad_gate = grad * y * share * (1.0 - share)
    return (grad * share).to(y.dtype), grad_gate.to(gate.dtype)


class _SigmoidGated(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, y: Tensor, gate: Tensor) -> Tensor:
        ctx.save_for_backward(y, gate)
        return sigmoid_gate_forward(y, gate)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        return sigmoid_gate_backward(grad, *ctx.saved_tensors)


def sigmoid_gated(y: Tensor, gate: Tensor) -> Tensor:
    """Returns y · σ(gate), element by element (Qiu et al. 2025, gated attention)."""
    if not torch.compiler.is_compiling():
        return _SigmoidGated.apply(y, gate)
    return (_wide(y) * torch.sigmoid(_wide(gate))).to(y.dtype)


def heads_of(qkv: Tensor, shape: Heads) -> tuple[Tensor, Tensor, Tensor]:
    """Views (b, s, (heads + 2 · kv_heads) · head_dim) as q, k and v, (b, s, heads, head_dim)."""
    heads, kv_heads, head_dim = shape
    q, k, v = qkv.unflatten(-1, (-1, head_dim)).split((heads, kv_heads, kv_heads), dim=2)
    return q, k, v


class _SplitHeads(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, qkv: Tensor, shape: Heads, rotary: Rotary) -> tuple[Tensor, ...]:
        ctx.save_for_backward(*rotary)
        if is_on_accelerator(qkv):  # its attention kernels accept (b, s, heads, head_dim)
            return tuple(x.transpose(1, 2) for x in split_heads_forward(qkv, *rotary, shape))
        q, k, v = heads_of(qkv, shape)
        batch, sequence = qkv.shape[:2]
        out = tuple(qkv.new_empty(batch, n, sequence, shape[2]) for n in shape[:2])
        for part, to in zip((q, k), out, strict=True):
            _rotate(part, *rotary, to.transpose(1, 2))
        return *out, v.transpose(1, 2).contiguous()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        parts = [grad.transpose(1, 2) for grad in grads]
        if is_on_accelerator(grads[0]):
            return split_heads_backward(*parts, *ctx.saved_tensors), None, None
        cos, sin = ctx.saved_tensors
        sizes = [part.shape[2] for part in parts]
        out = grads[0].new_empty(*parts[0].shape[:2], sum(sizes), grads[0].shape[-1])
        to_q, to_k, to_v = out.split(sizes, dim=2)
        _rotate(parts[0], cos, -sin, to_q)  # the inverse rotation is the transpose
        _rotate(parts[1], cos, -sin, to_k)
        to_v.copy_(parts[2])
        return out.flatten(2), None, None


@fused
def split_heads_forward(
    qkv: Tensor, cos: Tensor, sin: Tensor, shape: Heads
) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v = heads_of(qkv, shape)
    return _rotated(q, cos, sin), _rotated(k, cos, sin), v.contiguous()


@fused
def split_heads_backward(q: Tensor, k: Tensor, v: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Returns the gradient of qkv, given the gradients (b, s, heads, head_dim) of q, k and v."""
    # The inverse rotation is the transpose. v's gradient is copied, because PyTorch's attention
    # backward has no `out` argument with which to write into a slice.
    return torch.cat((_rotated(q, cos, -sin), _rotated(k, cos, -sin), v), 2).flatten(2)


def split_heads(qkv: Tensor, shape: Heads, rotary: Rotary | None) -> tuple[Tensor, Tensor, Tensor]:
    """Splits the fused projection into heads and rotates q and k (RoPE, Su et al. 2021 §3.2.2).

    Args:
        qkv: (b, s, (heads + 2 · kv_heads) · head_dim).
        rotary: cos and sin for the first r dimensions of a head, paired (d, d + r/2), or None for
            no rotation.

    Returns: q (b, heads, s, head_dim), k and v (b, kv_heads, s, head_dim).
    """
    if rotary is not None and not torch.compiler.is_compiling():
        return _SplitHeads.apply(qkv, shape, rotary)
    q, k, v = heads_of(qkv, shape)
    if rotary is not None:
        q, k = _rotated(q, *rotary), _rotated(k, *rotary)
    return q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor, out: Tensor) -> None:
    """Writes x to `out`, with the pairs (d, d + r/2) of each head's first r dimensions rotated."""
    half = cos.shape[-1]
    a, b = x[..., :half], x[..., half : 2 * half]
    torch.mul(a, cos, out=out[..., :half]).addcmul_(b, sin, value=-1.0)
    torch.mul(b, cos, out=out[..., half : 2 * half]).addcmul_(a, sin)
    out[..., 2 * half :] = x[..., 2 * half :]


def _rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Returns the result of `_rotate`, as one expression over both halves that a compiler fuses."""
    half = cos.shape[-1]
    pairs = x[..., : 2 * half].unflatten(-1, (2, half))
    signs = torch.arange(-1, 2, 2, device=x.device).unsqueeze(-1)
    # The signs multiply the pairs, not sin, because signs · sin would be kept for the backward.
    turned = pairs * cos.unsqueeze(-2) + pairs.flip(-2) * signs * sin.unsqueeze(-2)
    turned = turned.flatten(-2).to(x.dtype)
    if 2 * half == x.shape[-1]:
        return turned
    return torch.cat((turned, x[..., 2 * half :]), -1)
