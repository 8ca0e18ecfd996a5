"""Tests grouped GEMMs: group by group, and by the operators that are one kernel on a GPU."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from parallel3d.device.grouped import Groups, grouped_matmul

SIZES = {
    "uneven": (3, 0, 5, 1),
    "all in one": (0, 9, 0, 0),
    "none": (0, 0, 0, 0),
    "one group": (7,),
}


def groups_of(sizes: tuple[int, ...], *, known: bool = True) -> Groups:
    return Groups.of(torch.tensor(sizes), sizes if known else None)


def operands(sizes: tuple[int, ...], behind: int) -> tuple[Tensor, Tensor, Tensor]:
    """Returns rows of 6 and of 4 numbers, and a 6 × 4 matrix for each group; `behind` rows after
    the last group are NaN."""
    draws = torch.Generator().manual_seed(3)
    total = sum(sizes)
    a, b = (torch.full((total + behind, width), torch.nan) for width in (6, 4))
    for rows in (a, b):
        rows[:total] = torch.randn(total, rows.shape[1], generator=draws)
    return a, b, torch.randn(len(sizes), 6, 4, generator=draws)


@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES.keys())
@pytest.mark.parametrize("behind", [0, 2])
def test_products_are_those_of_each_row_with_the_matrix_of_its_group(
    sizes: tuple[int, ...], behind: int
) -> None:
    a, _, matrices = operands(sizes, behind)
    groups, total = groups_of(sizes), sum(sizes)
    numbers = [number for number, size in enumerate(sizes) for _ in range(size)]
    wanted = torch.stack([a[i] @ matrices[n] for i, n in enumerate(numbers)] or [a.new_empty(4)])
    for found in (
        grouped_matmul(a, matrices, groups),
        torch.ops.parallel3d.grouped_matmul(groups.ends, a, matrices),
    ):
        assert found.shape == (total + behind, 4)
        torch.testing.assert_close(found[:total], wanted[:total])


@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES.keys())
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_products_of_rows_are_added_in_fp32_and_no_row_behind_the_last_group_is_read(
    sizes: tuple[int, ...], dtype: torch.dtype
) -> None:
    a, b, out = operands(sizes, 2)
    a, b = a.to(dtype), b.to(dtype)
    wanted, first = out.double(), 0
    for matrix, size in zip(wanted, sizes, strict=True):
        rows = slice(first, first + size)
        matrix += a[rows].double().t() @ b[rows].double()
        first += size
    torch.ops.parallel3d.add_products(out, groups_of(sizes).ends, a, b)
    torch.testing.assert_close(out.double(), wanted, rtol=1e-6, atol=1e-6)


def test_operators_have_shapes_without_values() -> None:
    a, b, out = (x.to("meta") for x in operands((2, 3), 0))
    ends = torch.empty(2, dtype=torch.int32, device="meta")
    assert torch.ops.parallel3d.grouped_matmul(ends, a, out).shape == (5, 4)
    torch.ops.parallel3d.add_products(out, ends, a, b)


def test_sizes_that_the_device_alone_knows_are_not_guessed() -> None:
    groups = groups_of((2, 1), known=False)
    with pytest.raises(ValueError, match="only known on the device"):
        list(groups.spans())
