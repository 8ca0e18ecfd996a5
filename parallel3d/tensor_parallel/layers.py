"""Linear layers split over a tensor-parallel group (Shoeybi et al. 2019 §3).

With sequence parallelism (Korthikanti et al. 2022 §4.2.2) the reductions become reduce-scatters and
all-gathers of the same total volume, and the activations between blocks are split.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

import torch
from torch import Tensor, nn

from parallel3d.comm.group import Group
from parallel3d.parameters.gradients import add_gradient
from parallel3d.parameters.sharding import (
    Initializer,
    ParameterSpec,
    ShardSpec,
)
from parallel3d.tensor_parallel import linear_ops
from parallel3d.tensor_parallel.linear_ops import (
    ColumnNode,
    RowNode,
    column_backward,
    column_forward,
    column_node,
    row_backward,
    row_forward,
    row_node,
)

# The word embedding


def _sequence_chunks(sp: bool, group: Group, chunks: int) -> int | None:
    return chunks if sp and group.size > 1 else None


def column_parallel_linear(
    x: Tensor, weight: Tensor, bias: Tensor | None, group: Group, sp: bool
) -> Tensor:
    """Returns x·Wᵀ + b for this rank's rows of W: (b, s, in) → (b, s, out/tp).

    Under sequence parallelism x is (b, s/tp, in) and is gathered first.
    """
    return ColumnNode.apply(x, weight, bias, group, _sequence_chunks(sp, group, 1))


class ColumnParallelLinear(nn.Module):
    """Computes y = x·Wᵀ + b with the rows of W (output features) split over `group`.

    One GEMM may serve several full matrices (q, k and v; gate and up): each is split on its own, so
    that every rank holds whole heads and matching halves.

    Args:
        outputs: matrix name → its full number of rows, divisible by the group's size.
        tp_replicas: matrix name → consecutive ranks that hold the same rows of it.
        std: of the initial weights; biases start at zero.
        chunks: in which the sequence is gathered (see `gather_linear`).
        recomputed: x may be recomputed in the backward, and then without this GEMM.

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
        chunks: int = 1,
        recomputed: bool = False,
        tp_replicas: Mapping[str, int] = MappingProxyType({}),
    ) -> None:
        super().__init__()
        self.group, self.sp = group, _sequence_chunks(sp, group, chunks)
        self.node = column_node if recomputed else ColumnNode.apply
        weights, biases, row = [], [], 0
        for name, rows in outputs.items():
            shared = tp_replicas.get(name, 1)
            local = rows * shared // group.size
            start = group.index // shared * local
            full = f"{prefix}.{name}"
            place = ((rows, inputs), (start, 0), (local, inputs))
            weights.append(ShardSpec(f"{full}.weight", *place, row, std, tp_replicas=shared))
            biases.append(
                ShardSpec(f"{full}.bias", (rows,), (start,), (local,), row, tp_replicas=shared)
            )
            row += local
        self.sizes = [shard.shape[0] for shard in weights]
        split = group.size == 1
        self.weight = init.parameter(ParameterSpec((row, inputs), tuple(weights), split))
        spec = ParameterSpec((row,), tuple(biases), split)
        self.bias = init.parameter(spec) if bias else None
        self.handle = linear_ops.register(self)

    def forward(self, x: Tensor) -> Tensor:
        if torch.compiler.is_compiling():
            gather = 1 if self.sp is None else self.group.size
            return linear_ops.linear_operator(x, self.handle, self.weight.shape[0], gather, 1)
        return self.node(x, self.weight, self.bias, self.group, self.sp)

    def run_forward(self, x: Tensor) -> Tensor:
        return column_forward(x, self.weight, self.bias, self.group, self.sp)

    def run_backward(self, grad: Tensor, x: Tensor) -> Tensor:
        if self.bias is not None:
            add_gradient(self.bias, grad.flatten(0, -2).sum(0))
        grad_x, grad_weight = column_backward(grad, x, self.weight, self.group, self.sp)
        if grad_weight is not None:
            add_gradient(self.weight, grad_weight)
        return grad_x


class RowParallelLinear(nn.Module):
    """Computes y = Σ over ranks of x·Wᵀ, + b, with the columns of W (input features) split.

    The bias is added once, after the reduction, and is replicated. Shapes: (b, s, inputs/tp) → (b,
    s, outputs), or (b, s/tp, outputs) under sequence parallelism.
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
        chunks: int = 1,
        recomputed: bool = False,
    ) -> None:
        super().__init__()
        self.group, self.sp = group, _sequence_chunks(sp, group, chunks)
        self.node = row_node if recomputed else RowNode.apply
        local = inputs // group.size
        shard = ShardSpec(
            f"{name}.weight", (outputs, inputs), (0, local * group.index), (outputs, local), std=std
        )
        replicated = group.size == 1
        self.weight = init.parameter(ParameterSpec((outputs, local), (shard,), replicated))
        whole = ShardSpec(f"{name}.bias", (outputs,), (0,), (outputs,))
        self.bias = init.parameter(ParameterSpec((outputs,), (whole,), True)) if bias else None
        self.handle = linear_ops.register(self)

    def forward(self, x: Tensor) -> Tensor:
        if torch.compiler.is_compiling():
            split = 1 if self.sp is None else self.group.size
            y = linear_ops.linear_operator(x, self.handle, self.weight.shape[0], 1, split)
        else:
            y = self.node(x, self.weight, self.group, self.sp)
        return y if self.bias is None else y + self.bias

    def run_forward(self, x: Tensor) -> Tensor:
        return row_forward(x, self.weight, self.group, self.sp)

    def run_backward(self, grad: Tensor, x: Tensor) -> Tensor:
        grad_x, grad_weight = row_backward(grad, x, self.weight, self.group, self.sp)
        if grad_weight is not None:
            add_gradient(self.weight, grad_weight)
        return grad_x
