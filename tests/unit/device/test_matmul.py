"""Tests large fp32 matmuls on a CPU by oneDNN: equal results, only where oneDNN is faster."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from benchmarks.speed import matmul as benchmark
from parallel3d.comm.group import SINGLE
from parallel3d.device import matmul as matmul_module
from parallel3d.device.matmul import linear, matmul, onednn_is_faster
from parallel3d.tensor_parallel.linear_ops import linear_node
from tests.operators import Operators

ROWS, INPUTS, OUTPUTS = (2, 256), 128, 264  # 17.3 million multiply-adds
NAME = "_linear_pointwise"


@pytest.fixture(autouse=True)
def faster(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pretends that this processor runs oneDNN faster."""
    monkeypatch.setattr(matmul_module, "onednn_is_faster", lambda: True)


def factors(dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(5)
    sizes = ((*ROWS, INPUTS), (OUTPUTS, INPUTS), (OUTPUTS,))
    x, weight, bias = (torch.randn(*size, generator=generator).to(dtype) for size in sizes)
    return x, weight, bias


@pytest.mark.parametrize("has_bias", [False, True])
def test_the_products_are_those_of_double_precision(has_bias: bool) -> None:
    x, weight, bias = factors()
    given = bias if has_bias else None
    with Operators() as operators:
        y = linear(x, weight, given)
        back = matmul(y, weight)
    assert operators.names.count(NAME) == 2
    assert y.shape == (*ROWS, OUTPUTS) and back.shape == x.shape
    exact = x.double() @ weight.double().t() + (bias.double() if has_bias else 0)
    torch.testing.assert_close(y.double(), exact, rtol=1e-5, atol=1e-4)
    torch.testing.assert_close(back.double(), y.double() @ weight.double(), rtol=1e-5, atol=2e-3)


def test_widened_factors_use_the_same_library() -> None:
    x, weight, _ = factors(torch.float16)
    with Operators() as operators:
        y = linear(x, weight)
    assert NAME in operators.names and y.dtype == torch.float16
    torch.testing.assert_close(y.double(), x.double() @ weight.double().t(), rtol=1e-3, atol=1e-4)


def test_unsupported_calls_are_left_to_pytorch() -> None:
    x, weight, bias = factors()
    wanted = weight.clone().requires_grad_()
    with Operators() as operators:
        linear(x.double(), weight.double())
        linear(x[:, ::2], weight)  # x has gaps
        linear(x[:1].contiguous(), weight, bias)  # small
        linear(x, wanted).sum().backward()  # the input has no gradient
    assert NAME not in operators.names
    torch.testing.assert_close(wanted.grad, x.flatten(0, 1).sum(0).expand(OUTPUTS, INPUTS))


def test_layers_train_with_it() -> None:
    """Functions with an autograd node of our own."""
    x, weight, bias = factors()
    x.requires_grad_()
    parameters = nn.Parameter(weight), nn.Parameter(bias)
    with Operators() as operators:
        linear_node("column", x, *parameters, SINGLE, None).square().sum().backward()
    assert operators.names.count(NAME) == 2  # the forward, and the gradient of the input
    exact = [t.detach().double().requires_grad_() for t in (x, *parameters)]
    (exact[0] @ exact[1].t() + exact[2]).square().sum().backward()
    for tensor, expected in zip((x, *parameters), exact, strict=True):
        error = (tensor.grad.double() - expected.grad).norm() / expected.grad.norm()
        assert error < 1e-6


@pytest.mark.parametrize(
    ("vendor", "capability", "has_onednn", "is_faster"),
    [
        ("AuthenticAMD", "AVX512", True, True),
        ("AuthenticAMD", "AVX512", False, False),
        ("AuthenticAMD", "AVX2", True, False),
        ("AuthenticAMD", "DEFAULT", True, False),
        ("GenuineIntel", "AVX512", True, False),  # MKL knows its vendor's processors
        (None, "AVX512", True, False),  # a system that has no such file
    ],
)
def test_the_processors_that_use_onednn(
    vendor: str | None,
    capability: str,
    has_onednn: bool,
    is_faster: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cpuinfo = tmp_path / "cpuinfo"
    if vendor is not None:
        cpuinfo.write_text(f"processor\t: 0\nvendor_id\t: {vendor}\n")
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: capability)
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: has_onednn)
    assert onednn_is_faster(cpuinfo) is is_faster


@pytest.mark.more
def test_the_benchmark_times_both(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(benchmark, "TURN_S", 0.0)
    cells = benchmark.row(16, 8, 24).strip("| ").split(" | ")
    assert cells[0] == "16 × 8 × 24" and len(cells) == 3
    for cell in cells[1:]:
        times, ratio = cell.split(": ")
        theirs, ours = (float(time) for time in times.removesuffix(" µs").split(", "))
        assert theirs > 0 and ours > 0 and ratio.endswith("×")
