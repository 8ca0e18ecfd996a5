"""Defers the weight gradients of plain modules for schedules that split the backward."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from parallel3d.comm.group import SINGLE
from parallel3d.parameters.gradients import add_gradient, deferred_queue
from parallel3d.parameters.state import state_of
from parallel3d.private_names import backward_hooks, top_saved_tensors_hooks
from parallel3d.tensor_parallel.linear_ops import linear_node


class SplitBackward(TorchFunctionMode):
    """Makes the linear layers and convolutions in its context defer their weight gradients.

    All other layers (norms, embeddings, recurrent layers, `nn.MultiheadAttention`, and layers that
    are compiled, checkpointed or under autocast) compute both gradients at once. Results do not
    change.
    """

    def __torch_function__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        out = DEFERRING[func](*args, **kwargs) if func in DEFERRING else None
        return func(*args, **kwargs) if out is None else out


def _linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor | None:
    if input.dim() == 1 or not _can_defer(input, weight):
        return None
    return linear_node("column", input, weight, bias, SINGLE, None)


def _convolution(
    dims: int,
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: int | Sequence[int] = 1,
    padding: int | str | Sequence[int] = 0,
    dilation: int | Sequence[int] = 1,
    groups: int = 1,
) -> Tensor | None:
    if isinstance(padding, str) or input.dim() != dims + 2 or not _can_defer(input, weight):
        return None
    sizes = (_each(size, dims) for size in (stride, padding, dilation))
    return _Convolution.apply(input, weight, bias, (*sizes, False, [0] * dims, groups))


# Maps a function of torch to our function, which computes the same but defers the weight gradient.
# Our function returns None if it cannot defer this gradient.
DEFERRING: dict[Any, Callable[..., Tensor | None]] = {
    F.linear: _linear,
    torch.conv1d: partial(_convolution, 1),
    torch.conv2d: partial(_convolution, 2),
    torch.conv3d: partial(_convolution, 3),
}


def _each(size: int | Sequence[int], dims: int) -> list[int]:
    sizes = [size] if isinstance(size, int) else list(size)
    return sizes * dims if len(sizes) == 1 else sizes


def _can_defer(input: Tensor, weight: Tensor) -> bool:
    """Returns whether the gradient of `weight` can be deferred.

    The weight must be a stage's parameter and have the input's dtype.
    """
    if not (torch.is_grad_enabled() and weight.requires_grad and weight.is_leaf):
        return False
    if backward_hooks(weight):  # autograd would not call the hooks for a deferred gradient
        return False
    # The recomputation of a checkpointed forward runs outside this mode and must save the same
    # tensors as the first forward.
    hooked = top_saved_tensors_hooks(True)
    if hooked is not None or torch.compiler.is_compiling():
        return False
    if state_of(weight).weight_gradients is None or torch.is_autocast_enabled(input.device.type):
        return False
    return input.dtype == weight.dtype


class _Convolution(torch.autograd.Function):
    """Computes a convolution; `how` has the arguments of `torch.convolution` after the bias."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, how: tuple) -> Tensor:
        ctx.weight = weight
        ctx.how = how
        ctx.bias_shape = None if bias is None else list(bias.shape)
        ctx.save_for_backward(x)
        return torch.convolution(x, weight, bias, *how)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple:
        # x is detached, so that the deferred job does not keep the graph up to the stage's input
        # alive.
        x = ctx.saved_tensors[0].detach()
        weight, needs_x, with_bias = ctx.weight, ctx.needs_input_grad[0], ctx.bias_shape is not None
        gradients = partial(
            torch.ops.aten.convolution_backward, grad, x, weight, ctx.bias_shape, *ctx.how
        )
        jobs = deferred_queue(weight)
        if jobs is None:
            return *gradients((needs_x, True, with_bias)), None
        jobs.append(lambda: add_gradient(weight, gradients((False, True, False))[1]))
        x_grad, _, bias_grad = gradients((needs_x, False, with_bias))
        return x_grad, None, bias_grad, None
