"""Convolves each channel of a sequence by itself with a few taps, causally, within documents.

The forward and the backward are sums of shifted products, so that a document's tokens read exactly
0 of the tokens before it. The backward keeps the input alone.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from parallel3d.device.fused import fused


def causal_convolution(
    x: Tensor, weight: Tensor, places: Tensor | None, widths: tuple[int, ...]
) -> tuple[Tensor, ...]:
    """Returns silu(convolution of x) for the last s tokens of x, as one tensor for each width.

    Sums are in fp32 or better. The last tap multiplies the token itself, as in `nn.Conv1d`.

    Args:
        x: (b, h + s, channels): h tokens that are only read, and the s tokens.
        weight: (channels, taps).
        places: (s,) or (b, s), the number of tokens that a token may read before itself, such as
            its position in its document; None: all of x, in which h is then 0.
        widths: numbers of channels, which add up to those of x.
    """
    if torch.compiler.is_compiling():
        y = F.silu(_convolved(x, weight, places)).to(x.dtype)
        return tuple(part.contiguous() for part in y.split(widths, dim=-1))
    return _Convolution.apply(x, weight, places, widths)


class _Convolution(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, places: Tensor | None, widths: tuple[int, ...]
    ) -> tuple[Tensor, ...]:
        ctx.save_for_backward(x, weight, places)
        return convolution_forward(x, weight, places, widths)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, places = ctx.saved_tensors
        return *convolution_backward(torch.cat(grads, dim=-1), x, weight, places), None, None


@fused
def convolution_forward(
    x: Tensor, weight: Tensor, places: Tensor | None, widths: tuple[int, ...]
) -> tuple[Tensor, ...]:
    y = F.silu(_convolved(x, weight, places)).to(x.dtype)
    return tuple(part.contiguous() for part in y.split(widths, dim=-1))


@fused
def convolution_backward(
    grad: Tensor, x: Tensor, weight: Tensor, places: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Returns the gradients of x and of the weight."""
    y = _convolved(x, weight, places)
    sigmoid = torch.sigmoid(y)
    grad = grad.to(y.dtype) * sigmoid * (1.0 + y * (1.0 - sigmoid))
    wide, taps, length = _with_tokens_before(x, weight, places), weight.shape[1], y.shape[1]
    of_x, of_weight = torch.zeros_like(wide), []
    for before in range(taps):
        end = wide.shape[1] - before
        seen = _seen(grad, places, before)
        of_weight.append((seen * wide[:, end - length : end]).sum((0, 1)))
        of_x[:, end - length : end].addcmul_(seen, weight[:, taps - 1 - before].to(y.dtype))
    of_x = of_x[:, wide.shape[1] - x.shape[1] :]
    return of_x.to(x.dtype), torch.stack(of_weight[::-1], dim=1).to(weight.dtype)


def _convolved(x: Tensor, weight: Tensor, places: Tensor | None) -> Tensor:
    """Returns the convolution of x, in fp32 or better."""
    wide, taps = _with_tokens_before(x, weight, places), weight.shape[1]
    length = x.shape[1] if places is None else places.shape[-1]
    found = wide[:, wide.shape[1] - length :] * weight[:, taps - 1]
    for before in range(1, taps):
        end = wide.shape[1] - before
        read = _seen(wide[:, end - length : end], places, before)
        found.addcmul_(read, weight[:, taps - 1 - before].to(wide.dtype))
    return found


def _with_tokens_before(x: Tensor, weight: Tensor, places: Tensor | None) -> Tensor:
    """Returns x in fp32 or better, with zeros before it that the first tokens read."""
    given = 0 if places is None else x.shape[1] - places.shape[-1]
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    return F.pad(wide, (0, 0, max(0, weight.shape[1] - 1 - given), 0))


def _seen(x: Tensor, places: Tensor | None, before: int) -> Tensor:
    """Returns x, but 0 for tokens that may not read the token this far before them."""
    if places is None or before == 0:
        return x
    return x * (places >= before).unsqueeze(-1)
