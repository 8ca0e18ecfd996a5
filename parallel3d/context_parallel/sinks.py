"""Attention sinks: a number for each query head that joins the softmax as a score of value 0.

A query whose sink is σ divides its probabilities by Σ exp(scores) + exp(σ), so it may attend to
nothing (gpt-oss; Xiao et al. 2024). Kernels do not know the sinks. With L = log Σ exp(scores) of
all keys of a query, attention without the sink has the result o, and then

    L' = log(exp(L) + exp(σ)),   o' = o · exp(L − L')

is one further step, after the results of all blocks of keys are merged. The backward of the kernels
gives the gradients of q, k and v from o' and L' in place of o and L, and dσ is the sum of
−exp(σ − L') · (dO·o') over the queries of the head.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from parallel3d.device.fused import fused, operator


@fused
def join_sinks(out: Tensor, sums: Tensor, sinks: Tensor) -> tuple[Tensor, Tensor]:
    """Joins the sinks (heads,) into attention's result and its sums, which it overwrites.

    Args:
        out: (b, heads, n, head_dim), over all keys of each query.
        sums: log Σ exp(scores) of each query, (b, heads, n), in fp32 or better.
    """
    joined = torch.logaddexp(sums, sinks.view(-1, 1))
    out.mul_((sums - joined).exp_().unsqueeze(-1))
    return out, sums.copy_(joined)


@fused
def gradient_of_sinks(grad: Tensor, out: Tensor, sums: Tensor, sinks: Tensor) -> Tensor:
    """Returns the gradient of the sinks (heads,), given the results of `join_sinks`."""
    along = (grad.to(sums.dtype) * out).sum(-1)
    return along.mul_((sinks.view(-1, 1) - sums).exp_()).sum((0, 2)).neg_().to(sinks.dtype)


def operator_with_sinks(
    name: str,
    where: str,
    run: Callable,
    shape: Callable,
    gradient: Callable,
    gradient_shape: Callable,
    kept: str,
) -> Callable[..., Tensor]:
    """Returns `device.fused.operator` of attention with a fourth input, the sinks.

    The arguments are those of `operator` for attention to q, k and v without sinks, whose kept
    tensors begin with the result and its sums.
    """

    def forward(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor, *how: Any) -> tuple[Tensor, ...]:
        out, sums, *more = run(q, k, v, *how)
        return *join_sinks(out, sums, sinks), *more

    def forward_shape(q: Tensor, k: Tensor, v: Tensor, _: Tensor, *how: Any) -> Any:
        return shape(q, k, v, *how)

    def backward(
        grad: Tensor, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor, *more: Any
    ) -> tuple[Tensor, ...]:
        out, sums, *_ = more
        of_sinks = gradient_of_sinks(grad, out, sums, sinks)
        return *gradient(grad, q, k, v, *more), of_sinks

    def backward_shape(
        grad: Tensor, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor, *more: Any
    ) -> tuple[Tensor, ...]:
        return *gradient_shape(grad, q, k, v, *more), sinks.new_empty(sinks.shape)

    inputs = "Tensor q, Tensor k, Tensor v, Tensor sinks"
    steps = forward, forward_shape, backward, backward_shape
    return operator(f"{name}_with_sinks", inputs, where, *steps, kept=kept)
