"""Tests products of half-precision matrices with fp32 results."""

from __future__ import annotations

import pytest
import torch

from parallel3d.device.wide import has_wide_kernel, wide_linear


def operands(dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    draws = torch.Generator().manual_seed(1)
    x, weight = (torch.randn(shape, generator=draws) for shape in ((2, 5, 48), (7, 48)))
    return x.to(dtype), weight.to(dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_results_are_fp32_or_better_and_not_rounded_to_half_precision(dtype: torch.dtype) -> None:
    x, weight = operands(dtype)
    found = wide_linear(x, weight)
    assert found.dtype == torch.promote_types(dtype, torch.float32)
    exact = x.double() @ weight.double().t()
    assert (found.double() - exact).abs().max() < 1e-5


def test_the_operator_has_the_bits_of_copies_in_fp32() -> None:
    """It is one kernel on a GPU; the simulated device runs this form of it."""
    x, weight = operands(torch.bfloat16)
    found = torch.ops.parallel3d.wide_linear(x.flatten(0, 1), weight)
    assert torch.equal(found, wide_linear(x, weight).flatten(0, 1))
    made = torch.ops.parallel3d.wide_linear(x.flatten(0, 1).to("meta"), weight.to("meta"))
    assert (made.shape, made.dtype) == ((10, 7), torch.float32)


def test_a_cpu_has_no_such_kernel() -> None:
    assert not has_wide_kernel(torch.device("cpu"))
    assert not has_wide_kernel(torch.device("meta"))
