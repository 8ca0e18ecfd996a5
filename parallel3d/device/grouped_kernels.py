"""Triton kernels for groups of rows; only a process with Triton can import this module."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

# A program computes a tile of COLUMNS_A × COLUMNS_B elements and reads ROWS rows of a group at a
# time. The tile takes 64 fp32 numbers per thread, and the operands take three stages of 32 KiB in
# shared memory.
BLOCKS = {"COLUMNS_A": 128, "COLUMNS_B": 128, "ROWS": 64}
HOW = {"num_warps": 8, "num_stages": 3}


@triton.jit
def add_products_of_groups(  # type: ignore[no-untyped-def]
    out_ptr,
    a_ptr,
    b_ptr,
    ends_ptr,
    a_columns,
    b_columns,
    a_stride,
    b_stride,
    COLUMNS_A: tl.constexpr,
    COLUMNS_B: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Adds aᵀ·b of each group's rows to the group's matrix in `out`.

    `out` is (groups, a_columns, b_columns) in fp32. Rows of other groups, and rows after the last
    group, are masked and never read. Programs that read the same columns of `a` run side by side,
    so that they find them in the cache.
    """
    group = tl.program_id(1).to(tl.int64)
    parts = tl.cdiv(b_columns, COLUMNS_B)
    begin = tl.load(ends_ptr + group - 1, mask=group > 0, other=0)
    end = tl.load(ends_ptr + group)
    if begin < end:
        of_a = (tl.program_id(0) // parts) * COLUMNS_A + tl.arange(0, COLUMNS_A)
        of_b = (tl.program_id(0) % parts) * COLUMNS_B + tl.arange(0, COLUMNS_B)
        rows = tl.arange(0, ROWS)
        total = tl.zeros((COLUMNS_A, COLUMNS_B), dtype=tl.float32)
        for first in range(begin, end, ROWS):
            row = (first + rows).to(tl.int64)
            here = (first + rows < end)[:, None]
            a = tl.load(
                a_ptr + row[:, None] * a_stride + of_a[None, :],
                mask=here & (of_a < a_columns)[None, :],
                other=0.0,
            )
            b = tl.load(
                b_ptr + row[:, None] * b_stride + of_b[None, :],
                mask=here & (of_b < b_columns)[None, :],
                other=0.0,
            )
            total = tl.dot(tl.trans(a), b, total)
        inside = (of_a < a_columns)[:, None] & (of_b < b_columns)[None, :]
        to = out_ptr + (group * a_columns + of_a[:, None]) * b_columns + of_b[None, :]
        tl.store(to, tl.load(to, mask=inside, other=0.0) + total, mask=inside)


def add_products(out: Tensor, a: Tensor, b: Tensor, ends: Tensor) -> None:
    """Launches `add_products_of_groups`; each row of `a` and `b` must be contiguous."""
    groups, a_columns, b_columns = out.shape
    programs = triton.cdiv(a_columns, BLOCKS["COLUMNS_A"]) * triton.cdiv(
        b_columns, BLOCKS["COLUMNS_B"]
    )
    sizes = a_columns, b_columns, a.stride(0), b.stride(0)
    add_products_of_groups[(programs, groups)](out, a, b, ends, *sizes, **BLOCKS, **HOW)
