"""Gives PyTorch's fused cells of `nn.GRU` and `nn.LSTM` their shapes on meta tensors.

PyTorch runs these cells on an accelerator without a library of its own, and 2.13 has no meta
kernels for them. Gates are (b, 3 h) for a GRU and (b, 4 h) for an LSTM, states (b, h).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from parallel3d.private_names import (
    fused_gru_cell,
    fused_gru_cell_backward,
    fused_lstm_cell,
    fused_lstm_cell_backward,
)

Results = tuple[Tensor | None, ...]


def _gru(gates: Tensor, hidden_gates: Tensor, hx: Tensor, *biases: Any) -> Results:
    return torch.empty_like(hx), hx.new_empty(hx.shape[0], 5 * hx.shape[1])


def _gru_backward(grad: Tensor, workspace: Tensor, has_bias: bool) -> Results:
    rows, hidden = grad.shape
    gates = [grad.new_empty(rows, 3 * hidden) for _ in range(2)]
    biases = [grad.new_empty(3 * hidden) if has_bias else None for _ in range(2)]
    return *gates, torch.empty_like(grad), *biases


def _lstm(gates: Tensor, hidden_gates: Tensor, cx: Tensor, *biases: Any) -> Results:
    return torch.empty_like(cx), torch.empty_like(cx), torch.empty_like(gates)


def _lstm_backward(
    grad_hy: Tensor | None,
    grad_cy: Tensor | None,
    cx: Tensor,
    cy: Tensor,
    workspace: Tensor,
    has_bias: bool,
) -> Results:
    biases = workspace.new_empty(workspace.shape[1]) if has_bias else None
    return torch.empty_like(workspace), torch.empty_like(cx), biases


CELLS: dict[Any, Callable[..., Results]] = {
    fused_gru_cell.default: _gru,
    fused_gru_cell_backward.default: _gru_backward,
    fused_lstm_cell.default: _lstm,
    fused_lstm_cell_backward.default: _lstm_backward,
}
