"""Forward and backward of the split linear layers, and the autograd nodes that join them.

The functions are the whole of it: the nodes of eager layers and the operators of compiled blocks
(`linear_ops`) run the same ones. `sp` is the number of pieces in which sequence parallelism
communicates (`overlap`), or None without sequence parallelism. Weights stand in `ctx` as they are,
not among the saved tensors: recomputation (`models/recompute.py`) hands saved tensors back as new
ones, without the `main_grad` that the weight gradient is added to.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from parallel3d.comm import collectives
from parallel3d.comm.group import Group
from parallel3d.device.products import linear, matmul
from parallel3d.parameters.gradients import add_weight_gradient, waiting_jobs
from parallel3d.tensor_parallel.mappings import all_gather_sequence, sequence_first
from parallel3d.tensor_parallel.overlap import gather_linear, linear_scatter


def column_forward(
    x: Tensor, weight: Tensor, bias: Tensor | None, group: Group, sp: int | None
) -> Tensor:
    """f and the GEMM: (b, s or s/tp, in) → (b, s, out/tp)."""
    if sp is None:
        return linear(x, weight, bias)
    return gather_linear(x, weight, bias, group, sp)[0]


def column_backward(
    grad: Tensor, x: Tensor, weight: Tensor, group: Group, sp: int | None
) -> tuple[Tensor, Tensor | None]:
    """Gradients of x and, without a bucket, of the weight.

    Under sequence parallelism the shard was kept and is gathered again while the input-gradient
    GEMM runs. The reduction of the input gradient travels while the weight-gradient GEMM runs.
    Where that is put off, the gather is too: until then the shard is all that is kept.
    """
    rows = grad.flatten(0, -2)
    if sp is not None and waiting_jobs(weight) is not None:
        grad_x, reducing = collectives.reduce_scatter_async(
            sequence_first(matmul(grad, weight)), group
        )
        add_weight_gradient(weight, rows, lambda: all_gather_sequence(x, group).flatten(0, -2))
        reducing.wait()
        return grad_x.transpose(0, 1).contiguous(), None
    if sp is not None:
        gathered, gathering = collectives.all_gather_async(sequence_first(x), group)
        grad_full = sequence_first(matmul(grad, weight))
        gathering.wait()
        grad_x, reducing = collectives.reduce_scatter_async(grad_full, group)
        full = gathered.transpose(0, 1)
    else:
        grad_x, full = matmul(grad, weight), x
        reducing = collectives.all_reduce_async(grad_x, group)
    grad_weight = add_weight_gradient(weight, rows, full.flatten(0, -2))
    reducing.wait()
    return grad_x if sp is None else grad_x.transpose(0, 1).contiguous(), grad_weight


def row_forward(x: Tensor, weight: Tensor, group: Group, sp: int | None) -> Tensor:
    """The GEMM and g: (b, s, in/tp) → (b, s or s/tp, out)."""
    if sp is None:
        return collectives.all_reduce(linear(x, weight), group)
    return linear_scatter(x, weight, group, sp)


def row_backward(
    grad: Tensor, x: Tensor, weight: Tensor, group: Group, sp: int | None
) -> tuple[Tensor, Tensor | None]:
    """Gradients of x and, without a bucket, of the weight."""
    if sp is None:
        grad_x, full = matmul(grad, weight), grad
    else:
        grad_x, full = gather_linear(grad, weight.t(), None, group, sp, keep=True)
    return grad_x, add_weight_gradient(weight, full.flatten(0, -2), x.flatten(0, -2))


NOTHING = (None, None, None)  # gradients of a group, of what communicates over it, of what is kept


class SavedOperands:
    """What a `_Keep` node saved, for the node behind it."""

    node: Any

    @property
    def tensor(self) -> Tensor:
        return self.node.saved_tensors[0]


class _Keep(torch.autograd.Function):
    """Saves the input of the node behind it.

    A node saves its tensors after its forward. Recomputation ends with the last tensor that it
    looks for: saved by a node of its own, the input of the GEMM that ends a segment ends it before
    this GEMM and its communication, which nothing in the backward needs.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, kept: SavedOperands) -> Tensor:
        ctx.save_for_backward(x)
        kept.node = ctx
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


def _operand(ctx: Any) -> Tensor:
    """x of a node, saved by itself or in front of it."""
    return ctx.saved_tensors[0] if ctx.kept is None else ctx.kept.tensor


class ColumnNode(torch.autograd.Function):
    """f (or its sequence-parallel form) and the GEMM in one node.

    Apart, autograd would finish the reduction of the input gradient before it starts the weight
    gradient. `kept`: x is saved in front of it.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        group: Group,
        sp: int | None,
        kept: SavedOperands | None = None,
    ) -> Tensor:
        ctx.weight, ctx.group, ctx.sp, ctx.has_bias = weight, group, sp, bias is not None
        ctx.kept = kept
        if kept is None:
            ctx.save_for_backward(x)
        return column_forward(x, weight, bias, group, sp)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple:
        grad = grad.contiguous()
        grad_bias = grad.flatten(0, -2).sum(0) if ctx.has_bias else None
        x = _operand(ctx)
        if ctx.sp is None and not ctx.needs_input_grad[0]:  # data: nobody to reduce for
            rows = x.flatten(0, -2)
            grad_weight = add_weight_gradient(ctx.weight, grad.flatten(0, -2), rows)
            return None, grad_weight, grad_bias, *NOTHING
        return *column_backward(grad, x, ctx.weight, ctx.group, ctx.sp), grad_bias, *NOTHING


def column_node(
    x: Tensor, weight: Tensor, bias: Tensor | None, group: Group, sp: int | None
) -> Tensor:
    """`ColumnNode` that may end what is recomputed; x needs a gradient."""
    kept = SavedOperands()
    return ColumnNode.apply(_Keep.apply(x, kept), weight, bias, group, sp, kept)


class RowNode(torch.autograd.Function):
    """The GEMM and g. `kept`: x is saved in front of it."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        group: Group,
        sp: int | None,
        kept: SavedOperands | None = None,
    ) -> Tensor:
        ctx.kept, ctx.weight, ctx.group, ctx.sp = kept, weight, group, sp
        if kept is None:
            ctx.save_for_backward(x)
        return row_forward(x, weight, group, sp)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple:
        x = _operand(ctx)
        return *row_backward(grad.contiguous(), x, ctx.weight, ctx.group, ctx.sp), *NOTHING


def row_node(x: Tensor, weight: Tensor, group: Group, sp: int | None) -> Tensor:
    """`RowNode` that may end what is recomputed."""
    kept = SavedOperands()
    return RowNode.apply(_Keep.apply(x, kept), weight, group, sp, kept)
