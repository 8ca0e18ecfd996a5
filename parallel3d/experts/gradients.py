"""Adds the weight gradients of experts to their gradient bucket."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from parallel3d.device.grouped import Groups, add_products, has_grouped_kernels
from parallel3d.parameters.gradients import add_matmul, add_or_defer


def add_grouped_gradient(
    weight: Tensor, grad: Callable[[], Tensor], x: Callable[[], Tensor], groups: Groups
) -> Tensor | None:
    """Adds the gradients gradᵀ·x of the experts' matrices to their bucket, or returns them.

    It does for several experts what `parameters.gradients.add_weight_gradient` does for a linear
    layer. An expert without rows gets a zero gradient, so that every rank has gradients of all of
    its experts.

    Args:
        weight: (experts · out, in), the experts' matrices, one after the other.
        grad, x: functions that return the gradients, (rows, out), and the inputs, (rows, in), both
            sorted by expert.
        groups: the rows of each expert.
    """

    def add(out: Tensor) -> None:
        matrices = out.unflatten(0, (len(groups.ends), -1))
        grad_rows, x_rows = grad(), x()
        wide = out.dtype == torch.promote_types(x_rows.dtype, torch.float32)
        if wide and has_grouped_kernels(x_rows.device, x_rows.dtype):
            add_products(matrices, grad_rows, x_rows, groups)
            return
        for matrix, rows in zip(matrices, groups.spans(), strict=True):
            if rows.start < rows.stop:
                add_matmul(matrix, grad_rows[rows], x_rows[rows])

    def computed() -> Tensor:
        out = torch.zeros_like(weight, dtype=torch.promote_types(weight.dtype, torch.float32))
        add(out)
        return out.to(weight.dtype)

    return add_or_defer(weight, computed, add)
