"""Defers weight gradients of plain modules, for schedules that split the backward."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from parallel3d.comm.group import SINGLE
from parallel3d.parameters.gradients import add_gradient, deferred_queue
from parallel3d.parameters.sharding import state_of
from parallel3d.tensor_parallel.linear_ops import ColumnNode

CONVOLUTIONS = {torch.conv1d: 1, torch.conv2d: 2, torch.conv3d: 3}
CONVOLUTION = ("input", "weight", "bias", "stride", "padding", "dilation", "groups")


class SplitBackward(TorchFunctionMode):
    """Makes linear layers and convolutions of a forward defer their weight gradients.

    Other layers (norms, embeddings, recurrent layers, `nn.MultiheadAttention`, whatever is
    compiled, checkpointed or under autocast) compute both gradients at once, which changes no
    result.
    """

    def __torch_function__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is F.linear:
            arguments = _by_name(("input", "weight", "bias"), args, kwargs)
            if _can_defer(arguments):
                x, weight, bias = (arguments.get(key) for key in ("input", "weight", "bias"))
                return ColumnNode.apply(x, weight, bias, SINGLE, None)
        elif func in CONVOLUTIONS:
            arguments = _by_name(CONVOLUTION, args, kwargs)
            dims, padding = CONVOLUTIONS[func], arguments.get("padding", 0)
            if not isinstance(padding, str) and _can_defer(arguments, dims + 2):
                how = (
                    _each(arguments.get("stride", 1), dims),
                    _each(padding, dims),
                    _each(arguments.get("dilation", 1), dims),
                    arguments.get("groups", 1),
                )
                return _Convolution.apply(
                    arguments["input"], arguments["weight"], arguments.get("bias"), how
                )
        return func(*args, **kwargs)


def _by_name(names: tuple[str, ...], args: tuple, kwargs: dict[str, Any]) -> dict[str, Any]:
    return dict(zip(names, args, strict=False)) | kwargs


def _each(size: int | tuple[int, ...], dims: int) -> list[int]:
    sizes = [size] if isinstance(size, int) else list(size)
    return sizes * dims if len(sizes) == 1 else sizes


def _can_defer(arguments: dict[str, Any], dims: int = 0) -> bool:
    """Returns whether weight is a stage's parameter in the type of its input (`dims` 0: any)."""
    x, weight = arguments["input"], arguments["weight"]
    if not (torch.is_grad_enabled() and weight.requires_grad and weight.is_leaf):
        return False
    if weight._backward_hooks:  # autograd would not call them for a deferred gradient
        return False
    # The recompute of a checkpointed forward runs outside of this mode and must save the same
    # tensors as the first forward.
    hooked = torch._C._autograd._top_saved_tensors_default_hooks(True)
    if hooked is not None or torch.compiler.is_compiling():
        return False
    if state_of(weight).weight_gradients is None or torch.is_autocast_enabled(x.device.type):
        return False
    return x.dtype == weight.dtype and (x.dim() == dims if dims else x.dim() > 1)


class _Convolution(torch.autograd.Function):
    """Computes a convolution; `how` is stride, padding, dilation and groups."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, how: tuple) -> Tensor:
        ctx.how, ctx.biases = how, None if bias is None else list(bias.shape)
        ctx.weight = weight
        ctx.save_for_backward(x)
        return torch.convolution(x, weight, bias, *_aten_arguments(how))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple:
        (x,) = ctx.saved_tensors
        weight, biases, how = ctx.weight, ctx.biases, _aten_arguments(ctx.how)

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


def _aten_arguments(how: tuple) -> tuple:
    stride, padding, dilation, groups = how
    return stride, padding, dilation, False, [0] * len(stride), groups
