"""A machine made from formulas, for tests of code that reads a measured one."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from math import prod

from parallel3d.blueprint.ops import layer_flops
from parallel3d.config.schema import ModelConfig
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
TP = (1.0, 2.0, 4.0, 8.0)
RECOMPUTED = {"norm": 0.05, "activation": 0.1, "attention": 0.2, "mlp": 0.4, "layer": 0.9}
MODEL = ModelConfig(num_layers=4, hidden_size=256, num_attention_heads=4, seq_length=256)
BLOCK_FLOPS = layer_flops(MODEL)  # seconds of a forward of one token
MADE = CalibrationSource("cpu", "test", 2, "fp32", "host", "2", "0", "2026-01-01T00:00:00+00:00")


def seconds(name: str, at: tuple[float, ...]) -> float:
    """Returns the machine's seconds for a piece of MODEL."""
    if name.startswith("block"):
        return BLOCK_FLOPS * at[1] / at[0] / RATE
    if name in ("head.forward", "head.input", "head.weight"):
        return 2 * MODEL.hidden_size * MODEL.padded_vocab_size * at[1] / at[0] / RATE
    if name.startswith("embedding"):
        return MODEL.hidden_size * at[1] / MOVED
    if name.startswith("recompute"):
        return RECOMPUTED[name.removeprefix("recompute.")]
    if name.removesuffix(".shared") in COLLECTIVES:
        return LATENCY + at[1] * at[0] / 8 / MOVED
    if name in ("together", "threads"):
        return 1.0
    return prod(at) / MOVED


def machine(
    of: Callable[[str, tuple[float, ...]], float] = seconds,
    made: CalibrationSource = MADE,
    **numbers: float,
) -> MeasuredMachine:
    """Returns the machine, with a piece's seconds by `of`."""
    tables = {}
    for name, count in TABLES.items():
        axes: tuple[tuple[float, ...], ...] = (TP, AXIS)[:count]
        if name == "update":
            axes = (AXIS,)
        elif name.removesuffix(".shared") in COLLECTIVES:
            axes = ((2.0, 4.0, 8.0), (64.0, 65536.0, 1e6))
        elif name in ("together", "threads"):
            axes = ((1.0, 2.0),)
        tables[name] = Table(axes, tuple(of(name, at) for at in product(*axes)))
    usual = dict.fromkeys(NUMBERS, 1e-6) | {"memory_gb": 8.0, "rank_gb": 0.2, "peak_tflops": 0.05}
    return MeasuredMachine(made, MODEL, tables, usual | numbers)
