"""Runs tensor-parallel linear layers forward and backward, as autograd nodes and as operators.

Nodes and operators run the same functions (`column_forward` and so on). `torch.compile` fuses the
code between the GEMMs, but cannot look into the operators. So the overlap of the reduction with the
weight gradient and the accumulation into gradient buckets work as in eager mode.
"""

from __future__ import annotations

from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from parallel3d.comm import collectives
from parallel3d.comm.collectives import CompletedWork, Work
from parallel3d.comm.group import Group
from parallel3d.device.fused import operator, registered
from parallel3d.device.matmul import linear, matmul
from parallel3d.parameters.gradients import add_gradient, add_weight_gradient, deferred_queue
from parallel3d.tensor_parallel.mappings import (
    all_gather_sequence,
    reduce_scatter_sequence,
    sequence_first,
)


class LinearLayer(Protocol):
    split: str  # "column" or "row"
    weight: nn.Parameter
    bias: nn.Parameter | None
    group: Group
    sp: int | None
    handle: Tensor | None


def _forward(x: Tensor, handle: Tensor, outputs: int, gather: int, scatter: int) -> Tensor:
    layer: LinearLayer = registered(handle)
    return run_forward(layer.split, x, layer.weight, layer.bias, layer.group, layer.sp)


def _forward_shape(x: Tensor, handle: Tensor, outputs: int, gather: int, scatter: int) -> Tensor:
    return x.new_empty(x.shape[0], x.shape[1] * gather // scatter, outputs)


def _backward(grad: Tensor, x: Tensor, handle: Tensor, *sizes: int) -> Tensor:
    # The compiler assumes that this is a pure function of `grad`. It may still add to
    # `main_grad`, because nothing in a compiled block reads a gradient bucket.
    layer: LinearLayer = registered(handle)
    grad = grad.contiguous()
    _add_bias_gradient(layer, grad)
    grad_x, grad_weight = run_backward(layer.split, grad, x, layer.weight, layer.group, layer.sp)
    if grad_weight is not None:
        add_gradient(layer.weight, grad_weight)
    assert grad_x is not None
    return grad_x


def _add_bias_gradient(layer: LinearLayer, grad: Tensor) -> None:
    if layer.split == "column" and layer.bias is not None and layer.bias.requires_grad:
        add_gradient(layer.bias, grad.flatten(0, -2).sum(0))


def _backward_of_frozen(grad: Tensor, handle: Tensor, *sizes: int) -> Tensor:
    layer: LinearLayer = registered(handle)
    grad = grad.contiguous()
    _add_bias_gradient(layer, grad)
    grad_x, _ = run_backward(layer.split, grad, None, layer.weight, layer.group, layer.sp)
    assert grad_x is not None
    return grad_x


def _shape_of_input(
    grad: Tensor, handle: Tensor, outputs: int, gather: int, scatter: int, inputs: int
) -> Tensor:
    return grad.new_empty(grad.shape[0], grad.shape[1] * scatter // gather, inputs)


# Runs a layer's forward: (b, s, in) → (b, s · gather / scatter, outputs). With sequence parallelism
# `gather` is tp in a column-parallel layer, and `scatter` in a row-parallel one; else they are 1.
compiled_linear = operator(
    "linear",
    "Tensor x",
    "Tensor handle, int outputs, int gather, int scatter",
    _forward,
    _forward_shape,
    _backward,
    lambda grad, x, *_: x.new_empty(x.shape),
    kept="",
)

# Does the same for a layer with a frozen weight, whose backward does not need the input.
compiled_frozen_linear = operator(
    "frozen_linear",
    "Tensor x",
    "Tensor handle, int outputs, int gather, int scatter, int inputs",
    lambda x, handle, outputs, gather, scatter, _: _forward(x, handle, outputs, gather, scatter),
    lambda x, handle, outputs, gather, scatter, _: _forward_shape(
        x, handle, outputs, gather, scatter
    ),
    _backward_of_frozen,
    _shape_of_input,
)


def compiled(layer: LinearLayer, x: Tensor, outputs: int, gather: int, scatter: int) -> Tensor:
    """Runs a layer's forward in a compiled block; the weight's gradient goes to its bucket."""
    if layer.weight.requires_grad:
        return compiled_linear(x, layer.handle, outputs, gather, scatter)
    return compiled_frozen_linear(x, layer.handle, outputs, gather, scatter, x.shape[-1])


# Asynchronous tensor parallelism sends chunk i + 1 of the sequence while the GEMM of chunk i runs
# (Wang et al. 2023, "Overlap Communication with Dependent Computation via Decomposition in Large
# Deep Learning Models"). The backward of a column-parallel layer needs no chunks, because its two
# GEMMs hide its two collectives.
#
# A chunk of a shard (s/tp) has s/(tp·chunks) tokens. A gathered chunk has such a run of tokens from
# every rank, so its results go to tp places in the sequence:
#
#     sequence    |  rank 0: a0 a1 a2 a3  |  rank 1: b0 b1 b2 b3  |
#     chunks=2       chunk 0: a0 a1 b0 b1    chunk 1: a2 a3 b2 b3


def gather_linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    group: Group,
    chunks: int,
    *,
    keep: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """All-gathers x along the sequence and computes x·Wᵀ + b: (b, s/tp, in) → (b, s, out).

    Returns the result, and the gathered x (b, s, in) if `keep`, else None.
    """
    if chunks > 1:
        return _gather_linear_in_chunks(x, weight, bias, group, chunks, keep)
    full = all_gather_sequence(x, group)
    return linear(full, weight, bias), full if keep else None


def linear_scatter(x: Tensor, weight: Tensor, group: Group, chunks: int) -> Tensor:
    """Computes x·Wᵀ and reduce-scatters it along the sequence: (b, s, in) → (b, s/tp, out)."""
    if chunks > 1:
        return _linear_scatter_in_chunks(x, weight, group, chunks)
    return reduce_scatter_sequence(linear(x, weight), group)


def _gather_linear_in_chunks(
    x: Tensor, weight: Tensor, bias: Tensor | None, group: Group, chunks: int, keep: bool
) -> tuple[Tensor, Tensor | None]:
    batch, local, inputs = x.shape
    places = (batch, group.size, chunks, local // chunks)
    y = x.new_empty(*places, weight.shape[0])
    full = x.new_empty(*places, inputs) if keep else None
    shards = sequence_first(x).chunk(chunks)
    gathered, gathering = collectives.all_gather_async(shards[0], group)
    for i in range(chunks):
        gathering.wait()
        chunk = gathered
        if i + 1 < chunks:  # the next chunk is sent during this chunk's GEMM
            gathered, gathering = collectives.all_gather_async(shards[i + 1], group)
        _put(linear(chunk, weight, bias), y, i)
        if full is not None:
            _put(chunk, full, i)
    return y.flatten(1, 3), None if full is None else full.flatten(1, 3)


def _linear_scatter_in_chunks(x: Tensor, weight: Tensor, group: Group, chunks: int) -> Tensor:
    whole = x.unflatten(1, (group.size, chunks, -1))
    scattered: list[Tensor] = []
    reducing: Work = CompletedWork()
    for i in range(chunks):
        y = linear(_take(whole, i), weight)  # runs while the previous chunk is reduced
        reducing.wait()
        part, reducing = collectives.reduce_scatter_async(y, group)
        scattered.append(part)
    reducing.wait()
    return torch.cat(scattered).transpose(0, 1).contiguous()


def _take(whole: Tensor, i: int) -> Tensor:
    """Returns chunk i of (b, tp, chunks, c, features) for a collective: (tp · c, b, features)."""
    return whole[:, :, i].permute(1, 2, 0, 3).flatten(0, 1)


def _put(chunk: Tensor, whole: Tensor, i: int) -> None:
    whole[:, :, i] = chunk.unflatten(0, (whole.shape[1], whole.shape[3])).permute(2, 0, 1, 3)


# In the forward and backward functions `sp` is the number of chunks in which sequence parallelism
# communicates, or None without sequence parallelism.


def column_forward(
    x: Tensor, weight: Tensor, bias: Tensor | None, group: Group, sp: int | None
) -> Tensor:
    """Runs f (or the all-gather) and the GEMM: (b, s or s/tp, in) → (b, s, out/tp)."""
    if sp is None:
        return linear(x, weight, bias)
    return gather_linear(x, weight, bias, group, sp)[0]


def column_backward(
    grad: Tensor, x: Tensor | None, weight: Tensor, group: Group, sp: int | None, of_x: bool = True
) -> tuple[Tensor | None, Tensor | None]:
    """Returns the gradients of x and of the weight; the latter is None if it went to a bucket.

    Under sequence parallelism x is this rank's shard, which is gathered again while the GEMM of the
    input gradient runs. The input gradient is reduced while the GEMM of the weight gradient runs.

    Args:
        x: the input of the forward; None if the weight is frozen.
        of_x: whether x needs a gradient.
    """
    rows = grad.flatten(0, -2)
    if x is None:
        grad_x = matmul(grad, weight)
        return (
            collectives.all_reduce(grad_x, group)
            if sp is None
            else reduce_scatter_sequence(grad_x, group)
        ), None
    if not of_x and sp is None:
        return None, add_weight_gradient(weight, rows, x.flatten(0, -2))
    if not of_x:
        gather = partial(all_gather_sequence, x, group)
        return None, add_weight_gradient(weight, rows, lambda: gather().flatten(0, -2))
    if sp is not None and deferred_queue(weight) is not None:
        grad_x, reducing = collectives.reduce_scatter_async(
            sequence_first(matmul(grad, weight)), group
        )
        # The deferred weight gradient gathers x, so only the shard is kept until then.
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
    """Runs the GEMM and g (or the reduce-scatter): (b, s, in/tp) → (b, s or s/tp, out)."""
    if sp is None:
        return collectives.all_reduce(linear(x, weight), group)
    return linear_scatter(x, weight, group, sp)


def row_backward(
    grad: Tensor, x: Tensor | None, weight: Tensor, group: Group, sp: int | None, of_x: bool = True
) -> tuple[Tensor | None, Tensor | None]:
    """Returns the gradients of x and of the weight, like `column_backward`."""
    grad_x, full = None, grad
    if sp is None:
        grad_x = matmul(grad, weight) if of_x else None
    elif of_x:
        grad_x, gathered = gather_linear(grad, weight.t(), None, group, sp, keep=x is not None)
        full = grad if gathered is None else gathered
    else:
        full = all_gather_sequence(grad, group)
    if x is None:
        return grad_x, None
    return grad_x, add_weight_gradient(weight, full.flatten(0, -2), x.flatten(0, -2))


def run_forward(
    split: str, x: Tensor, weight: Tensor, bias: Tensor | None, group: Group, sp: int | None
) -> Tensor:
    """Runs a forward; the caller adds a row-parallel layer's bias, after the reduction."""
    if split == "row":
        return row_forward(x, weight, group, sp)
    return column_forward(x, weight, bias, group, sp)


def run_backward(
    split: str,
    grad: Tensor,
    x: Tensor | None,
    weight: Tensor,
    group: Group,
    sp: int | None,
    of_x: bool = True,
) -> tuple[Tensor | None, Tensor | None]:
    """Returns the gradients of x and of the weight; the arguments are as in `column_backward`."""
    if split == "row":
        return row_backward(grad, x, weight, group, sp, of_x)
    return column_backward(grad, x, weight, group, sp, of_x)


# The autograd nodes keep weights in `ctx` itself, not among the saved tensors, because
# recomputation (`models/checkpointing.py`) replaces saved tensors with new ones that have no
# `main_grad`.


class _Keep(torch.autograd.Function):
    """Saves the input of the following node, which finds it through the list `kept`.

    A node saves tensors after its forward, and a recomputation ends when the last tensor is saved.
    This node saves the input of a segment's last GEMM earlier, so that the recomputation ends
    before this GEMM and its communication, whose results the backward does not need.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, kept: list[Any]) -> Tensor:
        ctx.save_for_backward(x)
        kept.append(ctx)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


class _Linear(torch.autograd.Function):
    """Runs the communication and the GEMM of a column- or row-parallel layer in one node.

    With two nodes, autograd would finish the reduction of the input gradient before it starts the
    weight gradient. `kept` has the `_Keep` node that saved x, or is empty. With a frozen weight
    nothing is saved, because the input gradient only needs the weight.
    """

    @staticmethod
    def forward(
        ctx: Any,
        split: str,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        group: Group,
        sp: int | None,
        kept: list[Any],
    ) -> Tensor:
        ctx.split = split
        ctx.weight = weight
        ctx.trains = weight.requires_grad
        ctx.trains_bias = bias is not None and bias.requires_grad
        ctx.group = group
        ctx.sp = sp
        ctx.kept = kept
        if ctx.trains and not kept:
            ctx.save_for_backward(x)
        return run_forward(split, x, weight, bias, group, sp)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple:
        grad = grad.contiguous()
        x = None
        if ctx.trains:
            (x,) = (ctx.kept[0] if ctx.kept else ctx).saved_tensors
            # A deferred weight gradient keeps x. If x kept its graph, the stage's input and its
            # gradient would stay alive too.
            x = x.detach()
        grad_bias = grad.flatten(0, -2).sum(0) if ctx.trains_bias else None
        # x has no gradient if it is data or the result of frozen layers only.
        of_x = ctx.needs_input_grad[1]
        gradients: tuple[Tensor | None, Tensor | None] = (None, None)
        if of_x or x is not None:
            gradients = run_backward(ctx.split, grad, x, ctx.weight, ctx.group, ctx.sp, of_x)
        return None, *gradients, grad_bias, None, None, None


def linear_node(
    split: str,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    group: Group,
    sp: int | None,
    recomputed: bool = False,
) -> Tensor:
    """Runs `column_forward` (split "column") or `row_forward` (split "row") as an autograd node.

    `recomputed`: whether a recomputation of x must stop before this GEMM.
    """
    kept: list[Any] = []
    if recomputed and x.requires_grad and weight.requires_grad:  # data is never recomputed
        x = _Keep.apply(x, kept)
    return _Linear.apply(split, x, weight, bias, group, sp, kept)
