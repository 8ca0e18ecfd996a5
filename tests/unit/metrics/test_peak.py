"""Tests the peak against which MFU is measured."""

from __future__ import annotations

import itertools
import time
from types import SimpleNamespace

import pytest
import torch

from parallel3d.device import accelerator
from parallel3d.metrics import peak as peak_module
from parallel3d.metrics.peak import (
    datasheet_peak,
    device_peak_flops,
    peak_memory,
)

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("name", "dtype", "tflops"),
    [
        ("NVIDIA A100-SXM4-80GB", "bf16", 312.0),
        ("NVIDIA A100-SXM4-80GB", "fp32", 19.5),
        ("NVIDIA H100 80GB HBM3", "bf16", 989.4),
        ("NVIDIA H100 80GB HBM3", "fp16", 989.4),
        ("NVIDIA H100 80GB HBM3", "tf32", 494.7),
        ("NVIDIA H100 PCIe", "bf16", 756.0),
        ("NVIDIA H100 NVL", "bf16", 835.5),
        ("NVIDIA H200", "fp8", 1978.9),
        ("NVIDIA B200", "bf16", 2250.0),
        ("NVIDIA GB200", "bf16", 2500.0),
        ("NVIDIA B300 SXM6 AC", "bf16", 2250.0),
        ("NVIDIA GB300", "bf16", 2500.0),
        ("NVIDIA L4", "bf16", 121.0),
        ("NVIDIA L40S", "bf16", 362.0),
        ("NVIDIA GeForce RTX 4090", "bf16", 165.2),
        ("AMD Instinct MI250X", "bf16", 191.5),
        ("AMD Instinct MI300X", "fp8", 2614.9),
        ("AMD Instinct MI325X", "bf16", 1307.4),
        ("AMD Instinct MI355X", "bf16", 2516.6),
    ],
)
def test_datasheet_gives_each_device_its_own_dense_peak(
    name: str, dtype: str, tflops: float
) -> None:
    peak = datasheet_peak(name, dtype)
    assert peak is not None
    assert peak.flops == pytest.approx(tflops * 1e12)
    assert "datasheet" in peak.source or "whitepaper" in peak.source or "spec" in peak.source


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("NVIDIA H20", "bf16"),  # this is not an H200
        ("NVIDIA GH200 480GB", "bf16"),
        ("NVIDIA H800", "bf16"),  # a GPU without a known datasheet, such as the A800
        ("NVIDIA A800-SXM4-80GB", "bf16"),
        ("NVIDIA B300 SXM6 AC", "fp64"),  # it has nearly no memory
        ("NVIDIA GeForce RTX 4090 D", "bf16"),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", "bf16"),
        ("NVIDIA A100-SXM4-40GB MIG 1g.5gb", "bf16"),  # a seventh of the GPU
        ("GRID A100-20C", "bf16"),  # shares of virtual GPUs
        ("NVIDIA A100-40C", "bf16"),
        ("GRID A100D-3-40C", "bf16"),
        ("NVIDIA L40S-48Q", "bf16"),
        ("NVIDIA H100-2-20C", "bf16"),
        ("NVIDIA A100-SXM4-80GB", "fp8"),  # this dtype has no peak
        ("Tesla T4", "fp16"),
    ],
)
def test_a_device_missing_in_the_table_is_not_guessed(name: str, dtype: str) -> None:
    assert datasheet_peak(name, dtype) is None


GIB = 1 << 30


@pytest.mark.parametrize(
    ("name", "units", "gib", "known"),
    [
        ("AMD Instinct MI300X", 304, 192, True),
        ("AMD Instinct MI300X", 38, 24, False),  # CPX: an eighth
        ("AMD Instinct MI300X", 152, 96, False),
        ("AMD Instinct MI300X", 0, 0, True),  # not reported
        ("NVIDIA A100-SXM4-40GB", 108, 39, True),
        ("NVIDIA A100-SXM-64GB", 124, 63, False),  # this is another chip
        ("NVIDIA A100-SXM4-80GB", 42, 39, False),
        ("NVIDIA H100 80GB HBM3", 132, 80, True),
        ("NVIDIA H100 80GB HBM3", 132, 20, False),
        ("NVIDIA H100 PCIe", 114, 80, True),
        ("NVIDIA GeForce RTX 4090", 128, 24, True),
        ("NVIDIA L4", 58, 22, True),
    ],
)
def test_a_slice_does_not_have_the_whole_cards_peak(
    name: str, units: int, gib: int, known: bool
) -> None:
    assert (datasheet_peak(name, "bf16", units, gib * GIB) is not None) is known


def test_override_wins_and_is_named() -> None:
    peak = device_peak_flops(CPU, "fp32", override_tflops=2.5)
    assert (peak.flops, peak.source) == (2.5e12, "launch.peak_tflops")


@pytest.mark.nightly
def test_a_cpu_is_measured_and_divided_among_its_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    # every second call is slow
    clock = itertools.accumulate(itertools.cycle([0.0, 0.02, 0.0, 0.04]))
    monkeypatch.setattr(time, "perf_counter", lambda: next(clock))
    monkeypatch.setattr(peak_module, "available_cores", lambda: 1)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        alone = device_peak_flops(CPU, "fp32", local_ranks=1)
        shared = device_peak_flops(CPU, "fp32", local_ranks=8)
    finally:
        torch.set_num_threads(threads)
    assert alone.flops == pytest.approx(2 * 1024**3 / 0.02)  # the fastest call counts
    assert alone.source == "roughly measured: fp32 GEMM on 1 CPU thread"
    assert shared.source == "roughly measured: fp32 GEMM × 1 cores / 8 threads"
    assert shared.flops == pytest.approx(alone.flops / 8)


@pytest.mark.nightly
def test_measuring_does_not_change_the_random_state() -> None:
    torch.manual_seed(5)
    before = torch.get_rng_state()
    device_peak_flops(CPU, "fp32")
    assert torch.equal(torch.get_rng_state(), before)


class Chip:
    """An accelerator's module, with the names that peaks of speed and memory need."""

    units = 0

    def get_device_name(self, device: torch.device) -> str:
        return self.name

    def get_device_properties(self, device: torch.device) -> SimpleNamespace:
        return SimpleNamespace(multi_processor_count=self.units, total_memory=0)

    def max_memory_allocated(self, device: torch.device) -> int:
        return 5

    def max_memory_reserved(self, device: torch.device) -> int:
        return 8


@pytest.fixture
def chip(monkeypatch: pytest.MonkeyPatch) -> Chip:
    made = Chip()
    monkeypatch.setattr(accelerator, "is_accelerator", lambda device: True)
    monkeypatch.setattr(accelerator, "module", lambda device: made)
    monkeypatch.setattr(accelerator, "synchronize", lambda device: None)
    return made


def test_an_accelerator_in_the_table_has_the_peak_of_its_datasheet(chip: Chip) -> None:
    chip.name = "NVIDIA H200"
    peak = device_peak_flops(torch.device("cuda:0"), "bf16")
    assert peak.flops == pytest.approx(989.4e12)
    assert peak.source == "NVIDIA H200 datasheet, dense bf16"


@pytest.mark.parametrize(("flops", "size"), [(1e15, 8192), (2e13, 4096), (1e9, 1024)])
def test_an_unknown_accelerator_is_measured_at_a_size_that_fits_its_speed(
    flops: float, size: int, chip: Chip, monkeypatch: pytest.MonkeyPatch
) -> None:
    chip.name = "New Chip"
    sizes = []

    def operand(device: torch.device, dtype_name: str, n: int) -> int:
        sizes.append(n)
        return n

    monkeypatch.setattr(peak_module, "_operand", operand)
    monkeypatch.setattr(peak_module, "_time", lambda n: 2 * n**3 / flops)
    peak = device_peak_flops(CPU, "bf16")
    assert peak.flops == pytest.approx(flops)
    assert peak.source == f"roughly measured: New Chip, bf16 GEMM of {size}"
    assert max(sizes) == size


def test_peak_memory_is_the_accelerators_and_none_on_a_cpu(
    request: pytest.FixtureRequest,
) -> None:
    assert peak_memory(CPU) is None
    request.getfixturevalue("chip")
    assert peak_memory(CPU) == {"allocated": 5, "reserved": 8}
