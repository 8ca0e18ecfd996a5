"""Linear layers split over a tensor-parallel group (Shoeybi et al. 2019 §3).

A column-parallel layer followed by a row-parallel one needs one reduction forward and one backward.
With sequence parallelism (Korthikanti et al. 2022 §4.2.2) the reductions become reduce-scatters
and all-gathers of the same total volume, and the activations between blocks are split.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from parallel3d import collectives
from parallel3d.tensor_parallel.mappings import (
    all_gather_sequence,
    reduce_from_tensor_parallel,
    scatter_to_sequence,
    sequence_first,
)
from parallel3d.tensor_parallel.parameters import (
    Initializer,
    ParameterSpec,
    Piece,
    add_weight_gradient,
)
from parallel3d.topology.process_groups import Group


class _ColumnLinear(torch.autograd.Function):
    """f (or its sequence-parallel form) and the GEMM in one node.

    Apart, autograd would finish the reduction of the input gradient before it starts the weight
    gradient. Here the reduction travels while the weight-gradient GEMM runs.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, group: Group, sp: bool
    ) -> Tensor:
        ctx.group, ctx.sp, ctx.has_bias = group, sp, bias is not None
        ctx.save_for_backward(x, weight)  # under sp the shard is kept and gathered again
        full = all_gather_sequence(x, group) if sp else x
        return F.linear(full, weight, bias)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple:
        x, weight = ctx.saved_tensors
        grad = grad.contiguous()
        if ctx.sp:
            gathered, gathering = collectives.all_gather_async(sequence_first(x), ctx.group)
            grad_full = sequence_first(grad @ weight)
            gathering.wait()
            grad_x, reducing = collectives.reduce_scatter_async(grad_full, ctx.group)
            full = gathered.transpose(0, 1)
        else:
            grad_x, full = grad @ weight, x
            reducing = collectives.all_reduce_async(grad_x, ctx.group)
        grad_weight = add_weight_gradient(weight, grad.flatten(0, -2), full.flatten(0, -2))
        grad_bias = grad.flatten(0, -2).sum(0) if ctx.has_bias else None
        reducing.wait()
        if ctx.sp:
            grad_x = grad_x.transpose(0, 1).contiguous()
        return grad_x, grad_weight, grad_bias, None, None


class _RowLinear(torch.autograd.Function):
    """The GEMM of a row-parallel layer; its reduction is g, applied by the caller."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return F.linear(x, weight)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor | None]:
        x, weight = ctx.saved_tensors
        grad = grad.contiguous()
        grad_x = grad @ weight
        return grad_x, add_weight_gradient(weight, grad.flatten(0, -2), x.flatten(0, -2))


def column_parallel_linear(
    x: Tensor, weight: Tensor, bias: Tensor | None, group: Group, sp: bool
) -> Tensor:
    """x·Wᵀ + b for this rank's rows of W: (b, s, in) → (b, s, out/tp).

    Under sequence parallelism x is (b, s/tp, in) and is gathered first.
    """
    return _ColumnLinear.apply(x, weight, bias, group, sp and group.size > 1)


class ColumnParallelLinear(nn.Module):
    """y = x·Wᵀ + b with the rows of W (output features) split over `group`.

    One GEMM may serve several logical matrices (q, k and v; gate and up): each is split on its own,
    so that every rank holds whole heads and matching halves.

    Args:
        prefix: logical name up to the matrix names, `layers.0.attention`.
        outputs: matrix name → its full number of rows; each must divide by the group's size.
        inputs: columns.
        std: of the initial weights; biases start at zero.

    Shapes: (b, s, inputs) → (b, s, Σ outputs / tp), the matrices' results side by side.
    """

    def __init__(
        self,
        prefix: str,
        outputs: dict[str, int],
        inputs: int,
        *,
        bias: bool,
        std: float,
        group: Group,
        sp: bool,
        init: Initializer,
    ) -> None:
        super().__init__()
        self.group, self.sp = group, sp
        weights, biases, row = [], [], 0
        for name, rows in outputs.items():
            local, start = rows // group.size, rows // group.size * group.index
            full = f"{prefix}.{name}"
            weights.append(
                Piece(f"{full}.weight", (rows, inputs), (start, 0), (local, inputs), row, std)
            )
            biases.append(Piece(f"{full}.bias", (rows,), (start,), (local,), row))
            row += local
        self.sizes = [piece.shape[0] for piece in weights]
        split = group.size == 1
        self.weight = init.parameter(ParameterSpec((row, inputs), tuple(weights), split))
        spec = ParameterSpec((row,), tuple(biases), split)
        self.bias = init.parameter(spec) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        return column_parallel_linear(x, self.weight, self.bias, self.group, self.sp)


class RowParallelLinear(nn.Module):
    """y = Σ over ranks of x·Wᵀ, + b, with the columns of W (input features) split over `group`.

    The bias is added once, after the reduction, and is replicated.

    Shapes: (b, s, inputs/tp) → (b, s, outputs), or (b, s/tp, outputs) under sequence parallelism.
    """

    def __init__(
        self,
        name: str,
        inputs: int,
        outputs: int,
        *,
        bias: bool,
        std: float,
        group: Group,
        sp: bool,
        init: Initializer,
    ) -> None:
        super().__init__()
        self.group, self.sp = group, sp
        local = inputs // group.size
        piece = Piece(
            f"{name}.weight",
            (outputs, inputs),
            (0, local * group.index),
            (outputs, local),
            std=std,
        )
        replicated = group.size == 1
        self.weight = init.parameter(ParameterSpec((outputs, local), (piece,), replicated))
        whole = Piece(f"{name}.bias", (outputs,), (0,), (outputs,))
        self.bias = init.parameter(ParameterSpec((outputs,), (whole,), True)) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        y = _RowLinear.apply(x, self.weight)
        if self.sp:
            y = scatter_to_sequence(y, self.group)
        else:
            y = reduce_from_tensor_parallel(y, self.group)
        return y if self.bias is None else y + self.bias
