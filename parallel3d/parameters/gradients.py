"""Gradients on their way into the buckets: at once, or put off until somebody has the time."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from parallel3d.device import accelerator
from parallel3d.device.matmul import is_widened, matmul

Job = Callable[[], None]


class WeightGradients:
    """A queue of the weight gradients of linear layers, which nobody waits for in a backward.

    Zero-bubble schedules (Qi et al. 2023, arXiv:2401.10241) make the gradient of a stage's input
    first (I) and those of its weights later (W), where the rank would idle. All weight gradients
    are made at one place (`add_weight_gradient`), by eager layers, recomputed ones and the
    operators of compiled blocks alike. So to split a backward is to put these calls off.

    Between I and W a job keeps the layer's input and the gradient of its output; what else the
    backward read is free after I. The small gradients of norms, biases and embeddings are made
    with I.
    """

    def __init__(self) -> None:
        self.jobs: list[Job] | None = None  # None: nothing is put off

    @contextmanager
    def deferred(self) -> Iterator[list[Job]]:
        """Within it weight gradients wait in the list that it gives; whoever calls them, in the
        list's order, makes them."""
        jobs: list[Job] = []
        self.jobs = jobs
        try:
            yield jobs
        finally:
            self.jobs = None


def add_weight_gradient(
    weight: Tensor, grad: Tensor, x: Tensor | Callable[[], Tensor]
) -> Tensor | None:
    """The gradient gradᵀ·x of a linear weight, added where the gradient buckets keep it.

    `data_parallel.buckets` gives each parameter a `main_grad` (a view of its bucket) and a
    `register_grad_ready` call. With them the GEMM accumulates in place and autograd gets None;
    without them (a layer on its own, a user's module) autograd gets the gradient. A weight whose
    `weight_gradients` defers them gets it later, in its bucket or in `.grad`.

    Args:
        weight: (out, in). grad: (tokens, out). x: (tokens, in), or what makes it when it is needed.
    """
    main_grad, jobs = getattr(weight, "main_grad", None), deferred_jobs(weight)
    if main_grad is None and jobs is None:
        return matmul(grad.t(), x if isinstance(x, Tensor) else x())

    def add() -> None:
        rows = x if isinstance(x, Tensor) else x()
        if main_grad is None:
            add_gradient(weight, matmul(grad.t(), rows))
        else:
            add_product(main_grad, grad, rows)
            weight.register_grad_ready()

    if jobs is None:
        add()
    else:
        jobs.append(add)
    return None


def deferred_jobs(weight: Tensor) -> list[Job] | None:
    """Where the gradient of this weight has to wait at the moment; None: it is made at once."""
    queue: WeightGradients | None = getattr(weight, "weight_gradients", None)
    return None if queue is None else queue.jobs


def add_product(out: Tensor, grad: Tensor, x: Tensor) -> None:
    """Adds gradᵀ·x (out, in), of (tokens, out) and (tokens, in), to `out` in fp32 or better.

    Where the device's GEMM adds products of half precision to an fp32 matrix, nothing is rounded
    on the way and nothing but `out` is written; fp16 on a CPU is widened and not rounded either.
    Elsewhere the product is rounded to the type of its factors before it is added: 8 bits in bf16,
    and infinite beyond 65,504 in fp16.
    """
    if out.dtype == grad.dtype:
        out.addmm_(grad.t(), x)
    elif adds_wide_products(out.device, grad.dtype, out.dtype):
        torch.addmm(out, grad.t(), x, out_dtype=out.dtype, out=out)
    elif is_widened(grad):
        out.addmm_(grad.float().t(), x.float())
    else:
        out.add_(grad.t() @ x)


@functools.cache
def adds_wide_products(device: torch.device, narrow: torch.dtype, wide: torch.dtype) -> bool:
    """Whether a GEMM of `narrow` matrices on `device` can add to a `wide` one.

    PyTorch has it since 2.10, and not for every device: it is tried once.
    """
    if not accelerator.is_accelerator(device):
        return False
    factor = torch.zeros(16, 16, dtype=narrow, device=device)
    out = torch.zeros(16, 16, dtype=wide, device=device)
    try:
        torch.addmm(out, factor, factor, out_dtype=wide, out=out)
    except (RuntimeError, TypeError):  # no kernel for the types or the device; no such argument
        return False
    return True


def add_gradient(parameter: Tensor, grad: Tensor) -> None:
    """Adds a finished gradient to the parameter's bucket, or to `.grad` where it has none."""
    main_grad = getattr(parameter, "main_grad", None)
    if main_grad is None:
        parameter.grad = grad if parameter.grad is None else parameter.grad + grad
        return
    main_grad.add_(grad)
    parameter.register_grad_ready()
