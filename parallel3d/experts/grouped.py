"""Runs one rank's experts: sorts rows by expert, runs grouped GEMMs on them, and sums the results.

The activation is multiplied by the token's weight before the second GEMM. So the results of the
second GEMM need not be kept, and the gradient of a weight is a sum over the elements of a row (Guo
et al. 2025, SonicMoE, arXiv:2512.14080). Each token's rows are summed in a fixed order.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from parallel3d.device.accelerator import is_on_accelerator
from parallel3d.device.fused import fused
from parallel3d.device.grouped import Groups, grouped_matmul
from parallel3d.device.matmul import matmul
from parallel3d.experts.gradients import add_grouped_gradient
from parallel3d.experts.rows import Rows, sum_of_slots
from parallel3d.parameters.gradients import deferred_queue


class Activation(NamedTuple):
    """The non-linearity of experts, which maps the `inner` features of a row to `ffn` features.

    Attributes:
        plain: the function itself.
        weighed: a kernel for accelerators that also multiplies each row by its weight; None:
            `_weighed` multiplies the result of `plain`.
        weighed_backward: a kernel for accelerators that takes (gradient, rows, weights) and returns
            the gradients of the rows and of the weights, and the result of `weighed`; None:
            autograd differentiates `_weighed`.
    """

    plain: Callable[[Tensor], Tensor]
    weighed: Callable[[Tensor, Tensor], Tensor] | None = None
    weighed_backward: Callable[[Tensor, Tensor, Tensor], tuple[Tensor, ...]] | None = None


def run_experts(
    x: Tensor,
    weights: Tensor,
    up: Tensor,
    down: Tensor,
    rows: Rows,
    activation: Activation,
    bias: Tensor | None = None,
) -> Tensor:
    """Runs this rank's experts on t tokens: (t, hidden) → (t, hidden).

    Args:
        weights: (t, slots), the weight of each choice, in fp32 or fp64.
        up: (experts · inner, hidden), the experts' first matrices, one after the other.
        down: (experts · hidden, ffn), the experts' second matrices, one after the other.
        rows: the rows of each expert.
        activation: the non-linearity, from `inner` to `ffn` features.
        bias: (experts · inner,), the biases of the first matrices; None: there are none.
    """
    return _Experts.apply(x, weights, up, down, rows, activation, bias)


def add_biases(y: Tensor, weights: Tensor, bias: Tensor, rows: Rows) -> Tensor:
    """Adds the biases of this rank's experts' second matrices to `run_experts`' result `y`.

    A token gets the bias of each expert that it chose times the weight of this choice, because
    weights are multiplied before the second matrices.

    Args:
        bias: (experts · hidden,), the biases, one after the other.
    """
    return _WeighedBiases.apply(y, weights, bias, rows)


class _WeighedBiases(torch.autograd.Function):
    """Adds W·b, where W (t, experts) has the weights of this rank's experts for each token."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, weights: Tensor, bias: Tensor, rows: Rows) -> Tensor:
        biases = bias.unflatten(0, (-1, y.shape[1]))
        chosen = rows.experts()
        # The column behind the last one takes the choices of other ranks' experts.
        of_experts = weights.new_zeros(len(weights), len(biases) + 1)
        of_experts = of_experts.scatter_(1, chosen, weights)[:, :-1].to(y.dtype)
        ctx.bias = bias
        ctx.dtype = weights.dtype
        ctx.save_for_backward(of_experts, chosen)
        return y + matmul(of_experts, biases)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        of_experts, chosen = ctx.saved_tensors
        biases = ctx.bias.detach().unflatten(0, (-1, grad.shape[1]))
        grad_bias = None
        if ctx.needs_input_grad[2]:
            grad_bias = matmul(of_experts.t(), grad).flatten()
        # An expert of another rank is a column of zeros.
        of_all = F.pad(matmul(grad, biases.t()).to(ctx.dtype), (0, 1))
        return grad, of_all.gather(1, chosen), grad_bias, None


class _Experts(torch.autograd.Function):
    """Runs the experts, and keeps little for the backward.

    It keeps x (unless `up` is frozen), the result of the first GEMM and the tokens' weights, and
    recomputes everything else. The experts' matrices are attributes of `ctx` rather than saved
    tensors, like the weights of linear layers (`linear_ops`).
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
        bias: Tensor | None,
    ) -> Tensor:
        ctx.up = up
        ctx.down = down
        ctx.rows = rows
        ctx.activation = activation
        # No variable refers to the gathered rows, so that they are freed before the second GEMM.
        inner = grouped_matmul(x.index_select(0, rows.tokens), *_transposed(up, rows))
        if bias is not None:
            inner = add_bias_of_rows(inner, bias.unflatten(0, (-1, inner.shape[1])), rows.owners())
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

        # A deferred weight gradient keeps only x and `inner`, and calls these functions to
        # compute the gathered rows and the activations.
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
        grad_bias = sum_of_groups(grad_inner, rows).flatten() if ctx.needs_input_grad[6] else None
        return grad_x, grad_weights.view_as(weights), grad_up, grad_down, None, None, grad_bias


@partial(fused, rows=True)
def add_bias_of_rows(rows: Tensor, biases: Tensor, owners: Tensor) -> Tensor:
    """Adds its expert's bias to each row: (rows, n), (experts, n), (rows,) → (rows, n)."""
    return rows + biases.index_select(0, owners)


def sum_of_groups(values: Tensor, rows: Rows) -> Tensor:
    """Returns the sum of each expert's rows: (rows, n) → (experts, n).

    It is a product with the table of which row is whose, because a sum by atomic additions would
    have other bits in each run. An expert without rows gets zeros.
    """
    experts = torch.arange(len(rows.groups.ends), device=values.device).unsqueeze(1)
    return matmul((rows.owners() == experts).to(values.dtype), values)


def _same(x: Tensor) -> Tensor:
    return x


def _matrices(weight: Tensor, rows: Rows) -> Tensor:
    """Returns a view of the weight (experts · out, in) as matrices, (experts, out, in)."""
    return weight.unflatten(0, (len(rows.groups.ends), -1))


def _transposed(weight: Tensor, rows: Rows) -> tuple[Tensor, Groups]:
    """Returns the experts' transposed matrices, (experts, in, out), and the groups of rows."""
    return _matrices(weight, rows).transpose(1, 2), rows.groups


def _weighed(inner: Tensor, weights: Tensor, activation: Activation) -> Tensor:
    """Returns each row's activation times its weight: (rows, inner) → (rows, ffn)."""
    if activation.weighed is not None and is_on_accelerator(inner):
        return activation.weighed(inner, weights)
    active = activation.plain(inner)
    return (active.to(weights.dtype) * weights.unsqueeze(-1)).to(active.dtype)


def _weighed_backward(
    grad: Tensor, inner: Tensor, weights: Tensor, activation: Activation
) -> tuple[Tensor, ...]:
    """Returns the gradients of `inner` and of the weights, and `_weighed`'s recomputed result."""
    if activation.weighed_backward is not None and is_on_accelerator(inner):
        return activation.weighed_backward(grad, inner, weights)
    with torch.enable_grad():
        leaves = inner.detach().requires_grad_(), weights.detach().requires_grad_()
        active = _weighed(*leaves, activation)
    return *torch.autograd.grad(active, leaves, grad), active.detach()
