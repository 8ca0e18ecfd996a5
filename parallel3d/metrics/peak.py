"""Finds a device's peak memory in a run, and its peak FLOP/s, the base of MFU."""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch

from parallel3d.device import accelerator
from parallel3d.device.datasheets import find_device
from parallel3d.device.matmul import matmul
from parallel3d.device.precision import COMPUTE
from parallel3d.host.quotas import available_cores
from parallel3d.text import count


def peak_memory(device: torch.device) -> dict[str, int] | None:
    """Returns this rank's peak memory in bytes since its process began, without synchronizing.

    "allocated" counts tensors; "reserved" counts all memory that the allocator holds. Returns
    None on the CPU.
    """
    if not accelerator.is_accelerator(device):
        return None
    api = accelerator.module(device)
    return {
        "allocated": api.max_memory_allocated(device),
        "reserved": api.max_memory_reserved(device),
    }


# The peak FLOP/s are given by the user, come from a datasheet, or are measured if no datasheet is
# known for the device.

TERA = 1e12
# The measurement is so short that two starts on a shared machine may differ several-fold.
MEASURED = "roughly measured"
# Seconds for all timed matmuls together; this is short, as the other ranks wait meanwhile.
MEASURE_BUDGET_S = 0.1

_TORCH_TYPES = COMPUTE | {"fp8": torch.bfloat16}  # torch.matmul does not support fp8


@dataclass(frozen=True)
class Peak:
    """Peak FLOP/s of one device, or on CPUs of one rank's share of the machine."""

    flops: float
    source: str


def device_peak_flops(
    device: torch.device,
    dtype_name: str,
    *,
    local_ranks: int = 1,
    override_tflops: float | None = None,
) -> Peak:
    """Returns the peak of one rank's device in `dtype_name` (fp64, fp32, tf32, bf16, fp16 or fp8).

    The value is `override_tflops` (`launch.peak_tflops`) if it is given, else the datasheet's. If
    the datasheets lack the device, the peak is measured. Call this on one rank per machine while
    the others wait, since they would disturb the measurement.

    CPU ranks of a machine share its cores. With `t` threads per rank and `c` cores, a rank's peak
    is the measured peak × min(1, c / (t × local_ranks)), so that the peaks of all ranks never add
    up to more than the machine's. MFU is the model's FLOP/s / (world size × this peak).
    """
    if override_tflops is not None:
        return Peak(override_tflops * TERA, "launch.peak_tflops")
    if accelerator.is_accelerator(device):
        name = accelerator.name(device)
        facts = accelerator.module(device).get_device_properties(device)
        units, memory = facts.multi_processor_count, facts.total_memory
        if (known := datasheet_peak(name, dtype_name, units, memory)) is not None:
            return known
        flops, size = _measure(device, dtype_name, 8192)
        return Peak(flops, f"{MEASURED}: {name}, {dtype_name} GEMM of {size}")
    cores = available_cores()
    threads = min(torch.get_num_threads(), cores)
    share = min(1.0, cores / (threads * local_ranks))
    where = f"on {count(threads, 'CPU thread')}"
    if share < 1:
        where = f"× {cores} cores / {threads * local_ranks} threads"
    kind = "bf16" if dtype_name == "fp8" else dtype_name
    flops, _ = _measure(device, dtype_name, 1024)
    return Peak(flops * share, f"{MEASURED}: {kind} GEMM {where}")


def datasheet_peak(
    device_name: str, dtype_name: str, units: int = 0, memory: int = 0
) -> Peak | None:
    """Returns the vendor's peak for dense matmuls, or None if the table lacks device or dtype.

    `units` and `memory` are passed to `find_device`, which needs them to recognize slices of a GPU.
    """
    device = find_device(device_name, units, memory)
    if device is None or dtype_name not in device.peak:
        return None
    return Peak(device.peak[dtype_name] * TERA, f"{device.source}, dense {dtype_name}")


def _measure(device: torch.device, dtype_name: str, most: int) -> tuple[float, int]:
    """Returns the FLOP/s of a square GEMM in its fastest run within the time budget, and its size.

    The size is the smallest power of two, from 1024 to `most`, whose GEMM takes long enough to
    keep an accelerator busy.
    """
    allow_tf32 = torch.backends.cuda.matmul.allow_tf32  # only CUDA uses tf32
    torch.backends.cuda.matmul.allow_tf32 = dtype_name == "tf32"
    size = 1024
    times: list[float] = []
    try:
        while True:
            a = _operand(device, dtype_name, size)
            _time(a)  # the first call is slower
            if size == most or _time(a) > MEASURE_BUDGET_S / 40:
                break
            size *= 2
        while sum(times) < MEASURE_BUDGET_S:
            times.append(_time(a))
    finally:
        torch.backends.cuda.matmul.allow_tf32 = allow_tf32
    return 2 * size**3 / min(times), size


def _operand(device: torch.device, dtype_name: str, size: int) -> torch.Tensor:
    # a separate generator, so that the run draws the same random numbers as without this
    generator = torch.Generator().manual_seed(0)
    return torch.randn(size, size, generator=generator).to(device, _TORCH_TYPES[dtype_name])


def _time(a: torch.Tensor) -> float:
    """Returns the seconds of one `a @ a`; synchronizes the device before and after."""
    accelerator.synchronize(a.device)
    start = time.perf_counter()
    matmul(a, a)
    accelerator.synchronize(a.device)
    return time.perf_counter() - start
