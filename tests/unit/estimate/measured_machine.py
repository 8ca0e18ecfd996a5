"""A machine with plain rates, for tests of code that reads a measured one."""

from __future__ import annotations

import dataclasses

from parallel3d.calibrate.record import (
    MEASURED,
    CalibrationSource,
    GroupTime,
    MeasuredRates,
)

MADE = CalibrationSource("cpu", "test", 2, "fp32", "host", "2", "0", "2026-01-01T00:00:00+00:00")
GPUS = dataclasses.replace(MADE, device="cuda", name="NVIDIA H100 80GB HBM3", count=8, type="bf16")
RATES = {
    "product_tflops": 0.05,
    "product_ramp": 20.0,
    "attention_tflops": 0.02,
    "memory_gb_per_s": 10.0,
    "launch_us": 2.0,
    "units": 1.0,
    "rank_gb": 0.2,
    "memory_gb": 8.0,
}
GPU_RATES = RATES | {
    "product_tflops": 700.0,
    "product_ramp": 170.0,
    "attention_tflops": 400.0,
    "memory_gb_per_s": 2500.0,
    "launch_us": 4.0,
    "units": 132.0,
    "rank_gb": 1.0,
    "memory_gb": 80.0,
}


def machine(
    made: CalibrationSource = MADE, most: int = 8, gb_per_s: float = 2.0, **rates: float
) -> MeasuredRates:
    """Returns a machine with groups of up to `most` ranks, and with the given rates."""
    usual = RATES if made.device == "cpu" else GPU_RATES
    sizes = [1 << i for i in range(1, most.bit_length())]
    groups = {
        op: {n: GroupTime(10.0 + n, gb_per_s * (1 if n <= made.count else 0.5)) for n in sizes}
        for op in MEASURED
    }
    return MeasuredRates(made, usual | rates, groups)
