"""Scales and caps products: logits of the head, and scores of attention."""

from __future__ import annotations

import torch
from torch import Tensor


def scaled_and_capped(products: Tensor, scale: float, cap: float | None) -> Tensor:
    """Returns c · tanh(scale · products / c), or the scaled products if the cap c is None.

    Gemma 2 caps so (report, arXiv:2408.00118, §2).
    """
    z = products if scale == 1.0 else products * scale
    return z if cap is None else cap * torch.tanh(z / cap)


def slope_of(z: Tensor, scale: float, cap: float | None) -> Tensor | float:
    """Returns the derivative of the result z with respect to the products."""
    return scale if cap is None else scale * (1.0 - (z / cap).square())
