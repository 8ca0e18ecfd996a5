"""Adds gradients to their buckets: at once, or as deferred weight gradients."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from torch import Tensor

from parallel3d.device import accelerator
from parallel3d.device.matmul import is_widened, matmul
from parallel3d.parameters.state import DeferredGradient, state_of


def deferred_queue(weight: Tensor) -> list[DeferredGradient] | None:
    """Returns the queue for deferred gradients of this weight, or None if none are deferred."""
    weight_gradients = state_of(weight).weight_gradients
    return None if weight_gradients is None else weight_gradients.queue


def add_weight_gradient(
    weight: Tensor, grad: Tensor, x: Tensor | Callable[[], Tensor]
) -> Tensor | None:
    """Adds the gradient gradᵀ·x of a linear weight to its bucket, or returns it.

    If the weight has a `main_grad`, the GEMM adds to it and the result, for autograd, is None. A
    deferred weight gradient is added later, to the bucket or to `.grad`.

    Args:
        weight: (out, in).
        grad: (tokens, out).
        x: (tokens, in), or a function that returns it.
    """

    def rows() -> Tensor:
        return x if isinstance(x, Tensor) else x()

    return add_or_defer(
        weight,
        lambda: matmul(grad.t(), rows()),
        lambda main_grad: add_matmul(main_grad, grad, rows()),
    )


def add_or_defer(
    weight: Tensor, computed: Callable[[], Tensor], add_to: Callable[[Tensor], None]
) -> Tensor | None:
    """Adds a weight's gradient to its bucket, at once or later, or returns it for autograd.

    Args:
        computed: returns the gradient.
        add_to: adds the gradient to its argument, the `main_grad` of the weight.
    """
    state, queue = state_of(weight), deferred_queue(weight)
    main_grad = state.main_grad
    if main_grad is None and queue is None:
        return computed()

    def add() -> None:
        if main_grad is None:
            add_gradient(weight, computed())
        else:
            add_to(main_grad)
            state.added = (state.added + 1) % state.additions
            if state.added == 0:
                state.register_grad_ready()

    if queue is None:
        add()
    else:
        queue.append(add)
    return None


def add_matmul(out: Tensor, grad: Tensor, x: Tensor) -> None:
    """Adds the product gradᵀ·x to `out`, whose dtype is the same or more precise.

    Shapes: `out` (out, in), `grad` (tokens, out), `x` (tokens, in). The product is not rounded if
    the device's GEMM adds half precision to fp32, nor for fp16 on a CPU, where factors are
    converted to fp32. Otherwise, it is first rounded to the factors' dtype: bf16 keeps 8 bits, and
    in fp16 values beyond 65,504 become infinite.
    """
    if out.dtype == grad.dtype:
        out.addmm_(grad.t(), x)
    elif supports_wide_addmm(out.device, grad.dtype, out.dtype):
        torch.addmm(out, grad.t(), x, out_dtype=out.dtype, out=out)
    elif is_widened(grad):
        out.addmm_(grad.float().t(), x.float())
    else:
        out.add_(grad.t() @ x)


@functools.cache
def supports_wide_addmm(device: torch.device, narrow: torch.dtype, wide: torch.dtype) -> bool:
    """Returns whether a GEMM of `narrow` matrices on `device` can add to a `wide` matrix.

    PyTorch supports this since 2.10, but not on every device, so the GEMM is tried once.
    """
    if not accelerator.is_accelerator(device):
        return False
    factor = torch.zeros(16, 16, dtype=narrow, device=device)
    out = torch.zeros(16, 16, dtype=wide, device=device)
    try:
        torch.addmm(out, factor, factor, out_dtype=wide, out=out)
    except (RuntimeError, TypeError):  # there is no such kernel, or no argument `out_dtype`
        return False
    return True


def add_gradient(parameter: Tensor, grad: Tensor) -> None:
    """Adds a finished gradient to the parameter's bucket, or to `.grad` if there is no bucket."""
    state = state_of(parameter)
    if state.main_grad is None:
        parameter.grad = grad if parameter.grad is None else parameter.grad + grad
        return
    state.main_grad.add_(grad)
    state.register_grad_ready()
