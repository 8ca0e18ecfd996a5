"""The experts of one rank: rows sorted by expert, grouped GEMMs, and sums in a fixed order.

A token's weight multiplies the activation before the second GEMM. So nothing of the size of the
results is kept, and the weight's gradient is a sum over a row (Guo et al. 2025, SonicMoE,
arXiv:2512.14080).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from parallel3d.device.matmul import matmul
from parallel3d.experts.choice import Rows, sum_of_slots
from parallel3d.parameters.gradients import add_grouped_gradient

Activation = Callable[[Tensor], Tensor]


def grouped_matmul(rows: Tensor, weight: Tensor, counts: tuple[int, ...], rows_of: int) -> Tensor:
    """Multiplies the rows of each expert by its part of `weight`: W (rows_of, in) of each.

    Shapes: (rows, in), (experts · rows_of, in), → (rows, rows_of).
    """
    return _each(rows, weight.unflatten(0, (-1, rows_of)).transpose(1, 2), counts)


def grouped_matmul_back(
    grad: Tensor, weight: Tensor, counts: tuple[int, ...], rows_of: int
) -> Tensor:
    """Returns the gradient of `grouped_matmul`'s rows: (rows, rows_of) → (rows, in)."""
    return _each(grad, weight.unflatten(0, (-1, rows_of)), counts)


def _each(rows: Tensor, matrices: Tensor, counts: tuple[int, ...]) -> Tensor:
    out = rows.new_empty(rows.shape[0], matrices.shape[2])
    first = 0
    for count, matrix in zip(counts, matrices, strict=True):
        if count:
            out[first : first + count] = matmul(rows[first : first + count], matrix)
        first += count
    return out


def run_experts(
    x: Tensor, weights: Tensor, up: Tensor, down: Tensor, rows: Rows, activation: Activation
) -> Tensor:
    """Runs this rank's experts on t tokens: (t, hidden) → (t, hidden).

    Args:
        weights: (t, slots) of each choice, fp32 or better.
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
        # Nothing else names the rows, so that they are free before the second GEMM.
        given = up, rows.counts, _rows_of(up, rows)
        inner = grouped_matmul(x.index_select(0, rows.tokens), *given)
        ctx.save_for_backward(weights, inner, *([x] if up.requires_grad else []))
        active = _weighed(inner, weights.flatten()[rows.slots], activation)
        out = grouped_matmul(active, down, rows.counts, _rows_of(down, rows))
        return sum_of_slots(out, rows.places)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        weights, inner, *kept = ctx.saved_tensors
        tokens = [x.detach() for x in kept]
        of_x, of_up, of_down = (ctx.needs_input_grad[i] for i in (0, 2, 3))
        rows, up, down = ctx.rows, ctx.up, ctx.down
        grad = grad.contiguous()
        grad_out = grad.index_select(0, rows.tokens)
        grad_active = grouped_matmul_back(grad_out, down, rows.counts, _rows_of(down, rows))
        chosen = weights.detach().flatten()[rows.slots]
        with torch.enable_grad():
            leaves = inner.detach().requires_grad_(), chosen.requires_grad_()
            active = _weighed(*leaves, ctx.activation)
        grad_inner, grad_chosen = torch.autograd.grad(active, leaves, grad_active)
        active, chosen, inner = active.detach(), chosen.detach(), inner.detach()
        grad_x = None
        if of_x:
            grad_rows = grouped_matmul_back(grad_inner, up, rows.counts, _rows_of(up, rows))
            grad_x = sum_of_slots(grad_rows, rows.places)
        grad_weights = torch.zeros_like(weights).flatten()
        grad_weights[rows.slots] = grad_chosen

        # A deferred gradient keeps the tokens and `inner`, not the rows and the activations.
        def active_rows() -> Tensor:
            return _weighed(inner, chosen, ctx.activation)

        def grad_of_rows() -> Tensor:
            return grad.index_select(0, rows.tokens)

        def taken() -> Tensor:
            return tokens[0].index_select(0, rows.tokens)

        grad_up = grad_down = None
        if of_down:
            grad_down = add_grouped_gradient(down, grad_of_rows, active_rows, rows.counts)
        if of_up:
            grad_up = add_grouped_gradient(up, lambda: grad_inner, taken, rows.counts)
        return grad_x, grad_weights.view_as(weights), grad_up, grad_down, None, None


def _rows_of(weight: Tensor, rows: Rows) -> int:
    return weight.shape[0] // len(rows.counts)


def _weighed(inner: Tensor, weights: Tensor, activation: Activation) -> Tensor:
    """Returns activations times the rows' weights, rounded once: (rows, inner) → (rows, ffn)."""
    active = activation(inner)
    return (active.to(weights.dtype) * weights.unsqueeze(-1)).to(active.dtype)
