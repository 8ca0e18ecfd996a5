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
