"""Tests matmuls in fp16 on a CPU, which are computed in fp32 and rounded once."""

from __future__ import annotations

import torch

from parallel3d.device.matmul import linear, matmul
from tests.operators import Operators


def test_products_in_fp16_are_those_of_fp32_rounded_once() -> None:
    generator = torch.Generator().manual_seed(5)
    x, weight, bias = (
        torch.randn(*size, generator=generator).half()
        for size in ((2, 24, 128), (264, 128), (264,))
    )
    with Operators() as operators:
        y, back = linear(x, weight, bias), matmul(x, weight.t())
    wide = x.float() @ weight.float().t()
    assert torch.equal(
        y, torch.nn.functional.linear(x.float(), weight.float(), bias.float()).half()
    )
    assert torch.equal(back, wide.half())
    assert operators.names.count("_to_copy") >= 5


def test_other_types_are_left_to_pytorch() -> None:
    x, weight = torch.randn(3, 8), torch.randn(4, 8)
    for dtype in (torch.float32, torch.float64, torch.bfloat16):
        a, b = x.to(dtype), weight.to(dtype)
        with Operators() as operators:
            assert linear(a, b).dtype == matmul(a, b.t()).dtype == dtype
        assert "_to_copy" not in operators.names
