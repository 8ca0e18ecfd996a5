"""Finds the matrix products and the attention in a kernel of the simulated device."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.flop_counter import flop_registry

from parallel3d.models.flops import keys_seen
from parallel3d.simulated_device.attention import FLASH, FLASH_BACKWARD
from parallel3d.simulated_device.machine import Kernel

ATTENTION = {FLASH: 2, FLASH_BACKWARD: 5}  # number of GEMMs (Dao et al. 2022)
aten = torch.ops.aten
_ALIKE = {aten.addmm_: aten.addmm, aten.baddbmm_: aten.baddbmm}


class Product(NamedTuple):
    """A matrix product, or several of the same size: `groups` × (rows, inner) · (inner, columns).

    Attributes:
        dtype: the dtype of the factors.
        groups: number of products; the rows of a grouped GEMM are divided among its groups,
            and its rows' products are summed over each group for a weight gradient.
    """

    rows: float
    columns: int
    inner: float
    groups: int
    dtype: torch.dtype

    @property
    def flops(self) -> float:
        return 2.0 * self.groups * self.rows * self.columns * self.inner


class AttentionCall(NamedTuple):
    """A call of the attention kernel, for `sequences` sequences of equal length.

    Attributes:
        products: number of products of queries and keys: 2 in a forward and 5 in a backward.
        heads, key_heads: number of query and of key heads.
        width, value_width: size of a head of q and k, and of v.
        queries, keys: length of a sequence.
        causal: whether a query sees only the keys up to its own position.
        window: number of keys that a query sees, or None for all.
    """

    products: int
    sequences: int
    heads: int
    key_heads: int
    width: int
    value_width: int
    queries: int
    keys: int
    causal: bool
    window: int | None
    dtype: torch.dtype

    @property
    def flops(self) -> float:
        seen = keys_seen(self.queries, self.keys, self.causal, self.window)
        each = self.sequences * self.heads * self.queries * self.width
        return 2.0 * self.products * each * seen


def attention_of(kernel: Kernel) -> AttentionCall | None:
    """Returns the attention that a kernel computes, or None if it computes none."""
    if kernel.name not in ATTENTION or kernel.call is None:
        return None
    _, (q, k, v), how, _ = kernel.call
    batch, heads, length, width = q.shape
    of_heads = heads, k.shape[1], width, v.shape[-1]
    seen = how["causal"], how["window"], q.dtype
    return AttentionCall(ATTENTION[kernel.name], batch, *of_heads, length, k.shape[-2], *seen)


def product_of(kernel: Kernel) -> Product | None:
    """Returns the product that a kernel computes, or None if it computes none.

    An operator whose factors are not known here, such as a convolution, counts as one product with
    as many FLOPs as torch's counter finds.
    """
    if kernel.call is None or kernel.name in ATTENTION:
        return None
    operator, args, named, out = kernel.call
    packet = _ALIKE.get(operator.overloadpacket, operator.overloadpacket)
    if packet in _FACTORS:
        return _FACTORS[packet](*args)
    count = flop_registry.get(packet)
    if count is None:
        return None
    flops = count(*args, **named, out_val=out)
    first = next(a for a in args[::-1] if isinstance(a, Tensor))
    return Product(flops / 2, 1, 1, 1, first.dtype)


def _matmul(a: Tensor, b: Tensor, *_: Any) -> Product:
    return Product(a.shape[0], b.shape[1], a.shape[1], 1, b.dtype)


def _batched(a: Tensor, b: Tensor, *_: Any) -> Product:
    return Product(a.shape[1], b.shape[2], a.shape[2], a.shape[0], b.dtype)


def _grouped(ends: Tensor, rows: Tensor, matrices: Tensor) -> Product:
    count, inner, columns = matrices.shape  # each row is multiplied by one matrix only
    return Product(rows.shape[0] / count, columns, inner, count, matrices.dtype)


def _sums(out: Tensor, ends: Tensor, a: Tensor, b: Tensor) -> Product:
    count = out.shape[0]
    return Product(a.shape[1], b.shape[1], a.shape[0] / count, count, b.dtype)


def _wide_linear(x: Tensor, weight: Tensor) -> Product:
    inner = weight.shape[1]
    return Product(math.prod(x.shape) // inner, weight.shape[0], inner, 1, weight.dtype)


_FACTORS: dict[Any, Callable[..., Product]] = {
    aten.mm: _matmul,
    aten.addmm: lambda _, a, b, *__: _matmul(a, b),
    aten.bmm: _batched,
    aten.baddbmm: lambda _, a, b, *__: _batched(a, b),
    torch.ops.parallel3d.grouped_matmul: _grouped,
    torch.ops.parallel3d.add_products: _sums,
    torch.ops.parallel3d.wide_linear: _wide_linear,
}
