"""Peaks of a rank's device: its peak memory in a run, and its peak FLOP/s, the base of MFU."""

from __future__ import annotations

import re
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from parallel3d.device import accelerator
from parallel3d.device.matmul import matmul
from parallel3d.device.precision import COMPUTE
from parallel3d.host.devices import available_cores
from parallel3d.metrics.text import si


class PeakMemory(NamedTuple):
    """Peak bytes of one rank's device since the process began.

    allocated: by tensors. reserved: by the allocator from the device, with gaps.
    """

    allocated: int
    reserved: int


def peak_memory(device: torch.device) -> PeakMemory | None:
    """Returns this rank's peak so far, without synchronisation; None on the CPU."""
    if not accelerator.is_accelerator(device):
        return None
    api = accelerator.module(device)
    return PeakMemory(api.max_memory_allocated(device), api.max_memory_reserved(device))


def summary_of(ranks: Sequence[PeakMemory]) -> dict[str, Any]:
    """Returns the entry of summary.json."""
    return {
        "unit": "bytes, the most at one time",
        "ranks": [{"rank": rank, **memory._asdict()} for rank, memory in enumerate(ranks)],
    }


# Peak FLOP/s: the user's, a datasheet's, or measured where the table lacks the device's name

TERA = 1e12
MEASURE_BUDGET_S = 0.1  # for all timed matmuls together; the start barrier waits for it

_A100 = {"fp64": 19.5, "fp32": 19.5, "tf32": 156.0, "bf16": 312.0}
_H100_SXM = {"fp64": 66.9, "fp32": 66.9, "tf32": 494.7, "bf16": 989.4, "fp8": 1978.9}
_H100_PCIE = {"fp64": 51.0, "fp32": 51.0, "tf32": 378.0, "bf16": 756.0, "fp8": 1513.0}
_HOPPER_NVL = {"fp64": 60.0, "fp32": 60.0, "tf32": 417.5, "bf16": 835.5, "fp8": 1670.5}
_B200 = {"fp64": 37.0, "fp32": 75.0, "tf32": 1125.0, "bf16": 2250.0, "fp8": 4500.0}
_GB200 = {"fp64": 40.0, "fp32": 80.0, "tf32": 1250.0, "bf16": 2500.0, "fp8": 5000.0}
_B300 = {"tf32": 1125.0, "bf16": 2250.0, "fp8": 4500.0}
_GB300 = {"tf32": 1250.0, "bf16": 2500.0, "fp8": 5000.0}
_L4 = {"fp32": 30.3, "tf32": 60.0, "bf16": 121.0, "fp8": 242.5}
_L40S = {"fp32": 91.6, "tf32": 183.0, "bf16": 362.0, "fp8": 733.0}
_RTX_4090 = {"fp32": 82.6, "tf32": 82.6, "bf16": 165.2, "fp8": 330.3}
_MI250X_GCD = {"fp64": 47.9, "fp32": 47.9, "bf16": 191.5}
_MI300X = {"fp64": 163.4, "fp32": 163.4, "tf32": 653.7, "bf16": 1307.4, "fp8": 2614.9}
_MI355X = {"fp32": 157.3, "bf16": 2516.6, "fp8": 5033.2}

# (pattern of the device's name, dense TFLOP/s by type, public source). Vendors print the numbers
# with 2:4 sparsity, which are twice these. fp64 is of matrix units, fp32 of plain units (of matrix
# units that take true fp32), fp16 equals bf16, and accumulation is in fp32.
DATASHEETS: tuple[tuple[str, dict[str, float], str], ...] = (
    (r"\bGB300\b", _GB300, "NVIDIA GB300 NVL72 specifications, per GPU"),
    (r"\bB300\b", _B300, "NVIDIA HGX B300 datasheet, per GPU"),
    (r"\bGB200\b", _GB200, "NVIDIA GB200 NVL72 specifications, per GPU"),
    (r"\bB200\b", _B200, "NVIDIA HGX B200 datasheet, per GPU"),
    (r"\bH200 NVL\b", _HOPPER_NVL, "NVIDIA H200 NVL datasheet"),
    (r"\bH200\b", _H100_SXM, "NVIDIA H200 datasheet"),
    (r"\bH100 NVL\b", _HOPPER_NVL, "NVIDIA H100 NVL datasheet"),
    (r"\bH100 PCIe\b", _H100_PCIE, "NVIDIA H100 PCIe datasheet"),
    (r"\bH100\b", _H100_SXM, "NVIDIA H100 SXM datasheet"),
    (r"\bA100\b", _A100, "NVIDIA A100 datasheet"),
    (r"\bL40S\b", _L40S, "NVIDIA L40S datasheet"),
    (r"\bL4\b", _L4, "NVIDIA L4 datasheet"),
    # The 4090 D and the laptop's 4090 are other, slower chips.
    (r"\bRTX 4090$", _RTX_4090, "NVIDIA Ada architecture whitepaper"),
    # PyTorch shows each of the package's two dies as a device: half of AMD's numbers.
    (r"\bMI250X\b", _MI250X_GCD, "AMD Instinct MI250X datasheet, one of two dies"),
    (r"\bMI300X\b", _MI300X, "AMD Instinct MI300X datasheet"),
    (r"\bMI325X\b", _MI300X, "AMD Instinct MI325X datasheet"),
    (r"\bMI355X\b", _MI355X, "AMD Instinct MI355X datasheet"),
)

_TORCH_TYPES = COMPUTE | {"fp8": torch.bfloat16}  # a plain matmul takes no fp8


@dataclass(frozen=True)
class Peak:
    """Maximum FLOP/s of one device (on CPU: of one rank's share of its machine)."""

    """FLOP/s that one device (on CPU: one rank's share of its machine) can reach at best."""

    flops: float
    source: str

    def __str__(self) -> str:
        return f"{si(self.flops)}FLOP/s ({self.source})"


def device_peak_flops(
    device: torch.device,
    dtype_name: str,
    *,
    local_ranks: int = 1,
    local_cores: int | None = None,
    override_tflops: float | None = None,
) -> Peak:
    """Returns the peak of one rank's device in `dtype_name` (fp64, fp32, tf32, bf16, fp16 or fp8).

    `override_tflops` (`launch.peak_tflops`) wins, then the datasheet, then a measurement: call it
    on one rank per machine while the others wait, or they disturb it.

    CPU ranks of a machine share its cores. With `t` threads a rank and `c` cores, the peak per rank
    is the measured one × min(1, c / (t × local_ranks)), so the ranks' peaks never add up to more
    than the machine's. `c` is `local_cores`, the distinct cores of all local ranks; None takes this
    process's, which is the same unless a launcher bound each rank to cores of its own.
    MFU is model FLOP/s / (world size × this).
    """
    if override_tflops is not None:
        return Peak(override_tflops * TERA, "launch.peak_tflops")
    if accelerator.is_accelerator(device):
        name = accelerator.name(device)
        known = datasheet_peak(name, dtype_name)
        if known is not None:
            return known
        size = _gemm_size(device, dtype_name)
        source = f"measured: {name}, {dtype_name} GEMM of {size}"
        return Peak(_measure(device, dtype_name, size), source)
    cores = local_cores or available_cores()
    threads = min(torch.get_num_threads(), cores)
    share = cpu_share(threads, local_ranks, cores)
    alone = _measure(device, dtype_name, 1024)
    return Peak(alone * share, _cpu_source(dtype_name, threads, local_ranks, cores, share))


def datasheet_peak(device_name: str, dtype_name: str) -> Peak | None:
    """Returns the vendor's dense peak; None if the table lacks the device or the type."""
    if "MIG" in device_name:  # a slice of a GPU under the whole GPU's name
        return None
    for pattern, tflops, source in DATASHEETS:
        if re.search(pattern, device_name):
            value = tflops.get("bf16" if dtype_name == "fp16" else dtype_name)
            return None if value is None else Peak(value * TERA, f"{source}, dense {dtype_name}")
    return None


def cpu_share(threads: int, local_ranks: int, cores: int) -> float:
    """Returns a rank's share of its stand-alone speed when all `local_ranks` compute at once."""
    return min(1.0, cores / (threads * local_ranks))


def _gemm_size(device: torch.device, dtype_name: str) -> int:
    """Returns the size of a GEMM that keeps an accelerator busy within the time budget."""
    size = 1024
    while size < 8192:
        a = _operand(device, dtype_name, size)
        _time(a)
        if _time(a) > MEASURE_BUDGET_S / 40:
            break
        size *= 2
    return size


def _operand(device: torch.device, dtype_name: str, size: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)  # not the run's random numbers
    return torch.randn(size, size, generator=generator).to(device, _TORCH_TYPES[dtype_name])


def _measure(device: torch.device, dtype_name: str, size: int) -> float:
    """Returns FLOP/s of a square GEMM: the fastest run within the budget, after a warm-up."""
    a = _operand(device, dtype_name, size)
    allow_tf32 = torch.backends.cuda.matmul.allow_tf32  # only CUDA uses it
    torch.backends.cuda.matmul.allow_tf32 = dtype_name == "tf32"
    try:
        _time(a)
        times: list[float] = []
        while not times or sum(times) < MEASURE_BUDGET_S:
            times.append(_time(a))
    finally:
        torch.backends.cuda.matmul.allow_tf32 = allow_tf32
    return 2 * size**3 / min(times)


def _time(a: torch.Tensor) -> float:
    """Returns seconds of one a @ a, waiting for the device on both sides."""
    accelerator.synchronize(a.device)
    start = time.perf_counter()
    matmul(a, a)
    accelerator.synchronize(a.device)
    return time.perf_counter() - start


def _cpu_source(dtype_name: str, threads: int, ranks: int, cores: int, share: float) -> str:
    kind = "bf16" if dtype_name == "fp8" else dtype_name
    plural = "s" if threads > 1 else ""
    if share == 1:
        return f"measured: {kind} GEMM on {threads} CPU thread{plural}"
    return f"measured: {kind} GEMM × {cores} cores / {threads * ranks} threads"
