"""Finds the matrix products and the attention in a kernel of the simulated device."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.utils.flop_counter import flop_registry

from parallel3d.device import grouped, wide  # noqa: F401  (they register the operators below)
from parallel3d.simulated_device.attention import FLASH, FLASH_BACKWARD
from parallel3d.simulated_device.machine import Kernel
from parallel3d.trace.layer_trace import AttentionCalls, MatrixProducts

ATTENTION = {FLASH: 2, FLASH_BACKWARD: 5}  # number of GEMMs (Dao et al. 2022)
aten = torch.ops.aten
_ALIKE = {aten.addmm_: aten.addmm, aten.baddbmm_: aten.baddbmm}
# Rows, columns, inner size and groups of products, and the dtype of their factors. The rows of a
# grouped GEMM are divided among its groups, and are summed over each group for a weight gradient.
Factors: TypeAlias = tuple[float, float, float, int, torch.dtype]


def name_of(dtype: torch.dtype) -> str:
    """Returns a dtype's name without "torch."."""
    return str(dtype).removeprefix("torch.")


def attention_of(kernel: Kernel) -> AttentionCalls | None:
    """Returns the attention that a kernel computes, or None if it computes none."""
    if kernel.name not in ATTENTION or kernel.call is None:
        return None
    _, (q, k, v), how, _ = kernel.call
    batch, heads, length, width = q.shape
    return AttentionCalls(
        count=1,
        products=ATTENTION[kernel.name],
        sequences=batch,
        heads=heads,
        key_heads=k.shape[1],
        width=width,
        value_width=v.shape[-1],
        queries=length,
        keys=k.shape[-2],
        causal=how["causal"],
        window=how["window"],
        dtype=name_of(q.dtype),
        nbytes=kernel.nbytes,
    )


def product_of(kernel: Kernel) -> MatrixProducts | None:
    """Returns the products that a kernel computes, or None if it computes none.

    An operator whose factors are not known here, such as a convolution, counts as one product with
    as many FLOPs as torch's counter finds.
    """
    if kernel.call is None or kernel.name in ATTENTION:
        return None
    operator, args, named, out = kernel.call
    packet = _ALIKE.get(operator.overloadpacket, operator.overloadpacket)
    if packet in _FACTORS:
        factors = _FACTORS[packet](*args)
        return MatrixProducts(1, *factors[:-1], name_of(factors[-1]), kernel.nbytes)
    count = flop_registry.get(packet)
    if count is None:
        return None
    flops = count(*args, **named, out_val=out)
    first = next(a for a in args[::-1] if isinstance(a, Tensor))
    return MatrixProducts(1, flops / 2, 1, 1, 1, name_of(first.dtype), kernel.nbytes)


def _matmul(a: Tensor, b: Tensor, *_: Any) -> Factors:
    return a.shape[0], b.shape[1], a.shape[1], 1, b.dtype


def _batched(a: Tensor, b: Tensor, *_: Any) -> Factors:
    return a.shape[1], b.shape[2], a.shape[2], a.shape[0], b.dtype


def _grouped(ends: Tensor, rows: Tensor, matrices: Tensor) -> Factors:
    count, inner, columns = matrices.shape  # each row is multiplied by one matrix only
    return rows.shape[0] / count, columns, inner, count, matrices.dtype


def _sums(out: Tensor, ends: Tensor, a: Tensor, b: Tensor) -> Factors:
    count = out.shape[0]
    return a.shape[1], b.shape[1], a.shape[0] / count, count, b.dtype


def _wide_linear(x: Tensor, weight: Tensor) -> Factors:
    inner = weight.shape[1]
    return math.prod(x.shape) // inner, weight.shape[0], inner, 1, weight.dtype


_FACTORS: dict[Any, Callable[..., Factors]] = {
    aten.mm: _matmul,
    aten.addmm: lambda _, a, b, *__: _matmul(a, b),
    aten.bmm: _batched,
    aten.baddbmm: lambda _, a, b, *__: _batched(a, b),
    torch.ops.parallel3d.grouped_matmul: _grouped,
    torch.ops.parallel3d.add_products: _sums,
    torch.ops.parallel3d.wide_linear: _wide_linear,
}
