"""A machine made of formulas, for tests of what reads one."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from math import prod

from parallel3d.estimate.profiled_cost import (
    NUMBERS,
    TABLES,
    CalibrationSource,
    MeasuredMachine,
    Table,
)

AXIS = (16.0, 256.0, 4096.0)
COLLECTIVES = ("all_reduce", "all_gather", "reduce_scatter", "send_recv")
RATE = 50e9  # FLOP/s of a product
MOVED = 2e9  # elements a second
LATENCY = 20e-6
MADE = CalibrationSource("cpu", "test", 2, "fp32", "host", "2", "0", "2026-01-01T00:00:00+00:00")


def seconds(name: str, at: tuple[float, ...]) -> float:
    """What the machine takes for a piece."""
    if name.startswith("gemm"):
        return 2 * prod(at) / RATE
    if name.startswith(("attention", "rotary")):
        heads, tokens, width = at
        return 4 * heads * tokens**2 * width / RATE
    if name.removesuffix(".shared") in COLLECTIVES:
        return LATENCY + at[1] * at[0] / 8 / MOVED
    if name.startswith("together") or name == "threads":
        return 1.0
    return prod(at) / MOVED


def machine(
    of: Callable[[str, tuple[float, ...]], float] = seconds,
    made: CalibrationSource = MADE,
    **numbers: float,
) -> MeasuredMachine:
    """The machine, a piece's seconds as `of` says."""
    tables = {}
    for name, count in TABLES.items():
        axes: tuple[tuple[float, ...], ...] = (AXIS,) * count
        if name.removesuffix(".shared") in COLLECTIVES:
            axes = ((2.0, 4.0, 8.0), (64.0, 65536.0, 1e6))
        elif name.startswith("together") or name == "threads":
            axes = ((1.0, 2.0),)
        tables[name] = Table(axes, tuple(of(name, at) for at in product(*axes)))
    usual = dict.fromkeys(NUMBERS, 1e-6) | {"memory_gb": 8.0, "rank_gb": 0.2, "peak_tflops": 0.05}
    return MeasuredMachine(made, tables, usual | numbers)
