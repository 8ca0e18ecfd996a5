"""Peaks of a rank's device: its peak memory in a run, and its peak FLOP/s, the base of MFU."""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch

from parallel3d.device import accelerator
from parallel3d.device.datasheets import find_device
from parallel3d.device.matmul import matmul
from parallel3d.device.precision import COMPUTE
from parallel3d.host.quotas import available_cores


def peak_memory(device: torch.device) -> dict[str, int] | None:
    """Returns this rank's peak bytes since its process began, without synchronisation.

    "allocated" by tensors, and "reserved" by the allocator from the device, with gaps; None on the
    CPU.
    """
    if not accelerator.is_accelerator(device):
        return None
    api = accelerator.module(device)
    return {
        "allocated": api.max_memory_allocated(device),
        "reserved": api.max_memory_reserved(device),
    }


# Peak FLOP/s: the user's, a datasheet's, or measured where the table lacks the device's name

TERA = 1e12
# One short measurement: on a machine that others use, two starts may differ by a factor.
MEASURED = "roughly measured"
MEASURE_BUDGET_S = 0.1  # for all timed matmuls together; the start barrier waits for it

_TORCH_TYPES = COMPUTE | {"fp8": torch.bfloat16}  # a plain matmul takes no fp8


@dataclass(frozen=True)
class Peak:
    """FLOP/s that one device (on CPU: one rank's share of its machine) can reach at best."""

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

    `override_tflops` (`launch.peak_tflops`) wins, then the datasheet, then a measurement: call it
    on one rank per machine while the others wait, or they disturb it.

    CPU ranks of a machine share its cores. With `t` threads a rank and `c` cores, the peak per rank
    is the measured one × min(1, c / (t × local_ranks)), so the ranks' peaks never add up to more
    than the machine's. MFU is model FLOP/s / (world size × this).
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
    where = f"on {threads} CPU thread{'s' if threads > 1 else ''}"
    if share < 1:
        where = f"× {cores} cores / {threads * local_ranks} threads"
    kind = "bf16" if dtype_name == "fp8" else dtype_name
    flops, _ = _measure(device, dtype_name, 1024)
    return Peak(flops * share, f"{MEASURED}: {kind} GEMM {where}")


def datasheet_peak(
    device_name: str, dtype_name: str, units: int = 0, memory: int = 0
) -> Peak | None:
    """Returns the vendor's dense peak; None if the table lacks the device or the type.

    `units`, `memory`: as for `find_device`, which tells slices of a GPU.
    """
    device = find_device(device_name, units, memory)
    if device is None or dtype_name not in device.peak:
        return None
    return Peak(device.peak[dtype_name] * TERA, f"{device.source}, dense {dtype_name}")


def _measure(device: torch.device, dtype_name: str, most: int) -> tuple[float, int]:
    """Returns FLOP/s of a square GEMM, the fastest run within the budget, and its size.

    It is the least from 1024 on that keeps an accelerator busy, and `most` at most.
    """
    allow_tf32 = torch.backends.cuda.matmul.allow_tf32  # only CUDA uses it
    torch.backends.cuda.matmul.allow_tf32 = dtype_name == "tf32"
    size, times = 1024, list[float]()
    try:
        while True:
            a = _operand(device, dtype_name, size)
            _time(a)  # the first is slower
            if size == most or _time(a) > MEASURE_BUDGET_S / 40:
                break
            size *= 2
        while sum(times) < MEASURE_BUDGET_S:
            times.append(_time(a))
    finally:
        torch.backends.cuda.matmul.allow_tf32 = allow_tf32
    return 2 * size**3 / min(times), size


def _operand(device: torch.device, dtype_name: str, size: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)  # not the run's random numbers
    return torch.randn(size, size, generator=generator).to(device, _TORCH_TYPES[dtype_name])


def _time(a: torch.Tensor) -> float:
    """Returns seconds of one a @ a, waiting for the device on both sides."""
    accelerator.synchronize(a.device)
    start = time.perf_counter()
    matmul(a, a)
    accelerator.synchronize(a.device)
    return time.perf_counter() - start
