"""The split linear layers as operators that `torch.compile` calls and does not look into.

In a compiled block the compiler fuses what stands between the GEMMs. The GEMMs themselves, their
reductions and their weight gradients stay one operator each, with the very code of the eager layers
(`column_forward` and so on), so that the overlap of reduction and weight gradient, the accumulation
into the gradient buckets and the buckets' readiness work as they do without a compiler.

An operator takes tensors and numbers, so a layer goes by a *handle*, a number in a 0-d tensor: a
plain number would be a constant of the compiled code, and every layer would need its own. To the
compiler the backward operators are pure functions of the output's gradient. That they add to
`main_grad` on the side is safe because nothing in a compiled block reads a gradient bucket.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any, Protocol
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from parallel3d.comm import collectives
from parallel3d.comm.collectives import CompletedWork, Work
from parallel3d.comm.process_groups import Group
from parallel3d.device.matmul import linear, matmul
from parallel3d.parameters.gradients import add_weight_gradient, deferred_jobs
from parallel3d.tensor_parallel.mappings import (
    all_gather_sequence,
    reduce_scatter_sequence,
    sequence_first,
)


class LinearLayer(Protocol):
    """What the operators need of a layer."""

    def run_forward(self, x: Tensor) -> Tensor: ...

    def run_backward(self, grad: Tensor, x: Tensor) -> Tensor: ...


# Where operators find their layers; a layer that is gone leaves by itself.
_layers: WeakValueDictionary[int, LinearLayer] = WeakValueDictionary()
_numbers = itertools.count()


def register(layer: LinearLayer) -> Tensor:
    """The handle of `layer`, an int64 scalar on the CPU; valid as long as the layer lives."""
    number = next(_numbers)
    _layers[number] = layer
    return torch.tensor(number)


def linear_operator(x: Tensor, handle: Tensor, outputs: int, gather: int, split: int) -> Tensor:
    """The layer's forward: (b, s, in) → (b, s · gather / split, outputs).

    Args:
        handle: of `register`.
        outputs: features of the result on this rank.
        gather, split: tp where sequence parallelism gathers (column) or splits (row) the sequence
            here, else 1.
    """
    return torch.ops.parallel3d.linear(x, handle, outputs, gather, split)


def _forward(x: Tensor, handle: Tensor, outputs: int, gather: int, split: int) -> Tensor:
    return _layers[int(handle)].run_forward(x)


def _backward(
    grad: Tensor, x: Tensor, handle: Tensor, outputs: int, gather: int, split: int
) -> Tensor:
    return _layers[int(handle)].run_backward(grad.contiguous(), x)


def _forward_shape(x: Tensor, handle: Tensor, outputs: int, gather: int, split: int) -> Tensor:
    return x.new_empty(x.shape[0], x.shape[1] * gather // split, outputs)


def _backward_shape(
    grad: Tensor, x: Tensor, handle: Tensor, outputs: int, gather: int, split: int
) -> Tensor:
    return x.new_empty(x.shape)


def _remember(ctx: Any, inputs: tuple, output: Tensor) -> None:
    x, handle, *ctx.sizes = inputs
    ctx.save_for_backward(x, handle)


def _differentiate(ctx: Any, grad: Tensor) -> tuple:
    grad_x = torch.ops.parallel3d.linear_backward(grad, *ctx.saved_tensors, *ctx.sizes)
    return grad_x, None, None, None, None


def _define(name: str, signature: str, run: Callable, shape: Callable) -> None:
    _library.define(f"{name}({signature}) -> Tensor")
    _library.impl(name, run, "CompositeExplicitAutograd")
    torch.library.register_fake(f"parallel3d::{name}", shape, lib=_library)


_library = torch.library.Library("parallel3d", "DEF")
_SIZES = "Tensor x, Tensor handle, int outputs, int gather, int split"
_define("linear", _SIZES, _forward, _forward_shape)
_define("linear_backward", f"Tensor grad, {_SIZES}", _backward, _backward_shape)
torch.library.register_autograd(
    "parallel3d::linear", _differentiate, setup_context=_remember, lib=_library
)


# Asynchronous tensor parallelism: the sequence is gathered and scattered piece by piece.
#
# Under sequence parallelism a GEMM stands behind an all-gather, or in front of a reduce-scatter, of
# its own data, so the two cannot run side by side as they are. Cut into pieces of the sequence they
# can: piece i + 1 travels while the GEMM of piece i runs (Wang et al. 2023, "Overlap Communication
# with Dependent Computation via Decomposition in Large Deep Learning Models"). The backward of a
# column-parallel layer needs no pieces: its two GEMMs hide its two collectives as they are.
#
# A piece of an (s/tp) shard has s/(tp·chunks) tokens, and gathered it holds such a run of every
# rank:
#
#     sequence    |  rank 0: a0 a1 a2 a3  |  rank 1: b0 b1 b2 b3  |
#     chunks=2       piece 0: a0 a1 b0 b1    piece 1: a2 a3 b2 b3
#
# so its results go to tp places of the whole. Sums over ranks are those of one piece, element by
# element and in the same order.


def gather_linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    group: Group,
    chunks: int,
    *,
    keep: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """All-gather along the sequence, then x·Wᵀ + b: (b, s/tp, in) → (b, s, out).

    `chunks`: pieces of the sequence; 1: the communication and the GEMM one after the other.

    Returns: the result and, with `keep`, the gathered x (b, s, in).
    """
    if chunks > 1:
        return _gather_linear_in_pieces(x, weight, bias, group, chunks, keep)
    full = all_gather_sequence(x, group)
    return linear(full, weight, bias), full if keep else None


def linear_scatter(x: Tensor, weight: Tensor, group: Group, chunks: int) -> Tensor:
    """x·Wᵀ, summed over the ranks and scattered along the sequence: (b, s, in) → (b, s/tp, out)."""
    if chunks > 1:
        return _linear_scatter_in_pieces(x, weight, group, chunks)
    return reduce_scatter_sequence(linear(x, weight), group)


def _gather_linear_in_pieces(
    x: Tensor, weight: Tensor, bias: Tensor | None, group: Group, chunks: int, keep: bool
) -> tuple[Tensor, Tensor | None]:
    batch, local, inputs = x.shape
    places = (batch, group.size, chunks, local // chunks)
    y = x.new_empty(*places, weight.shape[0])
    full = x.new_empty(*places, inputs) if keep else None
    pieces = sequence_first(x).chunk(chunks)
    gathered, gathering = collectives.all_gather_async(pieces[0], group)
    for i in range(chunks):
        gathering.wait()
        piece = gathered
        if i + 1 < chunks:  # travels while the GEMM of this piece runs
            gathered, gathering = collectives.all_gather_async(pieces[i + 1], group)
        _put(linear(piece, weight, bias), y, i)
        if full is not None:
            _put(piece, full, i)
    return y.flatten(1, 3), None if full is None else full.flatten(1, 3)


def _linear_scatter_in_pieces(x: Tensor, weight: Tensor, group: Group, chunks: int) -> Tensor:
    whole = x.unflatten(1, (group.size, chunks, -1))
    scattered: list[Tensor] = []
    reducing: Work = CompletedWork()
    for i in range(chunks):
        y = linear(_take(whole, i), weight)  # runs while the piece before is summed
        reducing.wait()
        part, reducing = collectives.reduce_scatter_async(y, group)
        scattered.append(part)
    reducing.wait()
    return torch.cat(scattered).transpose(0, 1).contiguous()


def _take(whole: Tensor, i: int) -> Tensor:
    """Piece i of (b, tp, chunks, c, features) as collectives want it: (tp · c, b, features)."""
    return whole[:, :, i].permute(1, 2, 0, 3).flatten(0, 1)


def _put(piece: Tensor, whole: Tensor, i: int) -> None:
    """The reverse of `_take`."""
    whole[:, :, i] = piece.unflatten(0, (whole.shape[1], whole.shape[3])).permute(2, 0, 1, 3)


# Forward and backward of the split linear layers, and the autograd nodes that join them.
#
# The functions are the whole of it: the nodes of eager layers and the operators of compiled blocks
# (`linear_ops`) run the same ones. `sp` is the number of pieces in which sequence parallelism
# communicates (`overlap`), or None without sequence parallelism. Weights stand in `ctx` as they
# are, not among the saved tensors: recomputation (`models/recompute.py`) hands saved tensors back
# as new ones, without the `main_grad` that the weight gradient is added to.


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
    if sp is not None and deferred_jobs(weight) is not None:
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
