"""Weight gradients of plain modules, put off for schedules that split a backward."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from parallel3d.comm.process_groups import SINGLE
from parallel3d.parameters.gradients import add_gradient, deferred_queue
from parallel3d.tensor_parallel.linear_ops import ColumnNode

CONVOLUTIONS = {torch.conv1d: 1, torch.conv2d: 2, torch.conv3d: 3}
CONVOLUTION = ("input", "weight", "bias", "stride", "padding", "dilation", "groups")


class SplitBackward(TorchFunctionMode):
    """In a forward under it linear layers and convolutions make their weight gradients apart.

    What else has parameters (norms, embeddings, recurrent layers, `nn.MultiheadAttention`, what is
    compiled, checkpointed or under autocast) makes them with the gradient of its input, which
    changes no result.
    """

    def __torch_function__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        named = dict(kwargs or {})
        if func is F.linear:
            given = _given(("input", "weight", "bias"), args, named)
            if _can_wait(given):
                x, weight, bias = (given.get(key) for key in ("input", "weight", "bias"))
                return ColumnNode.apply(x, weight, bias, SINGLE, None)
        elif func in CONVOLUTIONS:
            given = _given(CONVOLUTION, args, named)
            dims, padding = CONVOLUTIONS[func], given.get("padding", 0)
            if not isinstance(padding, str) and _can_wait(given, dims + 2):
                how = (
                    _each(given.get("stride", 1), dims),
                    _each(padding, dims),
                    _each(given.get("dilation", 1), dims),
                    given.get("groups", 1),
                )
                return _Convolution.apply(given["input"], given["weight"], given.get("bias"), how)
        return func(*args, **named)


def _given(names: tuple[str, ...], args: tuple, named: dict[str, Any]) -> dict[str, Any]:
    return dict(zip(names, args, strict=False)) | named


def _each(size: int | tuple[int, ...], dims: int) -> list[int]:
    sizes = [size] if isinstance(size, int) else list(size)
    return sizes * dims if len(sizes) == 1 else sizes


def _can_wait(given: dict[str, Any], dims: int = 0) -> bool:
    """Whether the weight is a parameter of a stage, in the type of its input.

    `dims`: the input's, or 0 where any number from two on will do.
    """
    x, weight = given["input"], given["weight"]
    if not (torch.is_grad_enabled() and weight.requires_grad and weight.is_leaf):
        return False
    if weight._backward_hooks:  # autograd calls them, and a gradient put off does not pass there
        return False
    # A checkpointed forward is repeated in the backward, outside of this mode, and has to save the
    # same tensors then.
    hooked = torch._C._autograd._top_saved_tensors_default_hooks(True)
    if hooked is not None or torch.compiler.is_compiling():
        return False
    if not hasattr(weight, "weight_gradients") or torch.is_autocast_enabled(x.device.type):
        return False
    return x.dtype == weight.dtype and (x.dim() == dims if dims else x.dim() > 1)


class _Convolution(torch.autograd.Function):
    """A convolution whose weight gradient may wait. how: stride, padding, dilation, groups."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, how: tuple) -> Tensor:
        ctx.how, ctx.biases = how, None if bias is None else list(bias.shape)
        ctx.weight = weight
        ctx.save_for_backward(x)
        return torch.convolution(x, weight, bias, *_spelled(how))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple:
        (x,) = ctx.saved_tensors
        weight, biases, how = ctx.weight, ctx.biases, _spelled(ctx.how)

        def gradients(*wanted: bool) -> tuple:
            found = torch.ops.aten.convolution_backward(grad, x, weight, biases, *how, wanted)
            return tuple(found)

        def add() -> None:
            add_gradient(weight, gradients(False, True, False)[1])

        jobs = deferred_queue(weight)
        needs_x, with_bias = ctx.needs_input_grad[0], biases is not None
        if jobs is None:
            return *gradients(needs_x, True, with_bias), None
        jobs.append(add)
        x_grad, _, bias_grad = gradients(needs_x, False, with_bias)
        return x_grad, None, bias_grad, None


def _spelled(how: tuple) -> tuple:
    """As aten wants it: transposed and output_padding in their places."""
    stride, padding, dilation, groups = how
    return stride, padding, dilation, False, [0] * len(stride), groups
