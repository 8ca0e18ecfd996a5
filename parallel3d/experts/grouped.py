"""Runs the experts of one rank: rows sorted by expert, grouped GEMMs, sums in a fixed order.

A token's weight multiplies the activation before the second GEMM. So the second GEMM's results need
not be kept, and the weight's gradient is a sum over a row (Guo et al. 2025, SonicMoE,
arXiv:2512.14080).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from parallel3d.device.accelerator import is_on_accelerator
from parallel3d.device.grouped import Groups, grouped_matmul
from parallel3d.experts.choice import Rows, sum_of_slots
from parallel3d.experts.gradients import add_grouped_gradient
from parallel3d.parameters.gradients import deferred_queue


class Activation(NamedTuple):
    """The non-linearity of experts, which maps the `inner` features of a row to `ffn` features.

    Attributes:
        plain: the function itself.
        weighed: a kernel that also multiplies each row by its weight; None: `_weighed` does so.
        weighed_backward: a kernel that takes (gradient, rows, weights) and returns the gradients of
            the rows and of the weights, and the result of `weighed`.
    """

    plain: Callable[[Tensor], Tensor]
    weighed: Callable[[Tensor, Tensor], Tensor] | None = None
    weighed_backward: Callable[[Tensor, Tensor, Tensor], tuple[Tensor, ...]] | None = None


def run_experts(
    x: Tensor, weights: Tensor, up: Tensor, down: Tensor, rows: Rows, activation: Activation
) -> Tensor:
    """Runs this rank's experts on t tokens: (t, hidden) → (t, hidden).

    Args:
        weights: (t, slots), the weight of each choice, fp32 or better.
        up: (experts · inner, hidden), down: (experts · hidden, ffn): the experts' matrices, one
            after the other.
        activation: the non-linearity, from `inner` to `ffn` features.
    """
    return _Experts.apply(x, weights, up, down, rows, activation)


class _Experts(torch.autograd.Function):
    """Keeps x (unless `up` is frozen), the result of `up` and the weights; everything else is
    computed again.

    Weights of the experts are kept in `ctx` itself, like those of linear layers (`linear_ops`).
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weights: Tensor,
        up: Tensor,
        down: Tensor,
        rows: Rows,
        activation: Activation,
    ) -> Tensor:
        ctx.up = up
        ctx.down = down
        ctx.rows = rows
        ctx.activation = activation
        # No variable holds the gathered rows, so that their memory is free before the second GEMM.
        inner = grouped_matmul(x.index_select(0, rows.tokens), *_transposed(up, rows))
        ctx.save_for_backward(weights, inner, *([x] if up.requires_grad else []))
        active = _weighed(inner, weights.flatten()[rows.slots], activation)
        out = grouped_matmul(active, *_transposed(down, rows))
        return sum_of_slots(out, rows.places)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        weights, inner, *kept = ctx.saved_tensors
        tokens = [x.detach() for x in kept]
        of_x, of_up, of_down = (ctx.needs_input_grad[i] for i in (0, 2, 3))
        rows, up, down = ctx.rows, ctx.up, ctx.down
        grad = grad.contiguous()
        grad_out = grad.index_select(0, rows.tokens)
        grad_active = grouped_matmul(grad_out, _matrices(down, rows), rows.groups)
        chosen = weights.detach().flatten()[rows.slots]
        inner = inner.detach()
        grad_inner, grad_chosen, active = _weighed_backward(
            grad_active, inner, chosen, ctx.activation
        )
        del grad_active

        # A deferred gradient keeps x and `inner` and recomputes the gathered rows and the
        # activations.
        def active_rows() -> Tensor:
            return _weighed(inner, chosen, ctx.activation)

        def grad_of_rows() -> Tensor:
            return grad.index_select(0, rows.tokens)

        def taken() -> Tensor:
            return tokens[0].index_select(0, rows.tokens)

        grad_up = grad_down = grad_x = None
        if of_down and deferred_queue(down) is None:
            grad_down = add_grouped_gradient(
                down, partial(_same, grad_out), partial(_same, active), rows.groups
            )
        elif of_down:
            grad_down = add_grouped_gradient(down, grad_of_rows, active_rows, rows.groups)
        del active, grad_out
        if of_x:
            grad_rows = grouped_matmul(grad_inner, _matrices(up, rows), rows.groups)
            grad_x = sum_of_slots(grad_rows, rows.places)
            del grad_rows
        grad_weights = torch.zeros_like(weights).flatten()
        grad_weights[rows.slots] = grad_chosen
        if of_up:
            grad_up = add_grouped_gradient(up, lambda: grad_inner, taken, rows.groups)
        return grad_x, grad_weights.view_as(weights), grad_up, grad_down, None, None


def _same(x: Tensor) -> Tensor:
    return x


def _matrices(weight: Tensor, rows: Rows) -> Tensor:
    """Views (experts · out, in) as the experts' matrices, (experts, out, in)."""
    return weight.unflatten(0, (len(rows.groups.ends), -1))


def _transposed(weight: Tensor, rows: Rows) -> tuple[Tensor, Groups]:
    """Returns the transposed matrices, (experts, in, out), and the groups of rows."""
    return _matrices(weight, rows).transpose(1, 2), rows.groups


def _weighed(inner: Tensor, weights: Tensor, activation: Activation) -> Tensor:
    """Returns activations times the rows' weights, rounded once: (rows, inner) → (rows, ffn)."""
    if activation.weighed is not None and is_on_accelerator(inner):
        return activation.weighed(inner, weights)
    active = activation.plain(inner)
    return (active.to(weights.dtype) * weights.unsqueeze(-1)).to(active.dtype)


def _weighed_backward(
    grad: Tensor, inner: Tensor, weights: Tensor, activation: Activation
) -> tuple[Tensor, ...]:
    """Returns the gradients of `inner` and of the weights, and the result of `_weighed`."""
    if activation.weighed_backward is not None and is_on_accelerator(inner):
        return activation.weighed_backward(grad, inner, weights)
    with torch.enable_grad():
        leaves = inner.detach().requires_grad_(), weights.detach().requires_grad_()
        active = _weighed(*leaves, activation)
    return *torch.autograd.grad(active, leaves, grad), active.detach()
