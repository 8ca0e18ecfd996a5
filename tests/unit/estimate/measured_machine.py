"""A machine made from formulas, for tests of code that reads a measured one."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import product
from math import prod

from parallel3d.blueprint.ops import layer_flops, layer_kinds
from parallel3d.estimate.profiled_cost import (
    NUMBERS,
    CalibrationSource,
    MeasuredMachine,
    Table,
    tables_of,
)
from parallel3d.models.keys import ModelConfig

AXIS = (16.0, 256.0, 4096.0)
COLLECTIVES = ("all_reduce", "all_gather", "reduce_scatter", "send_recv", "all_to_all")
RATE = 50e9  # FLOP/s of a product
MOVED = 2e9  # elements per second
LATENCY = 20e-6
TP = (1.0, 2.0, 4.0, 8.0)
RECOMPUTED = {"norm": 0.05, "activation": 0.1, "attention": 0.2, "mlp": 0.4, "layer": 0.9}
MODEL = ModelConfig(num_layers=4, hidden_size=256, num_attention_heads=4, seq_length=256)
BLOCK_FLOPS = layer_flops(MODEL)  # seconds of a forward of one token
# Layers with a window and a MLP, then layers with experts: two kinds.
MIXED = ModelConfig(
    num_layers=4, hidden_size=256, num_attention_heads=4, seq_length=256, norm="rmsnorm",
    position_embedding="rope", bias=False, activation="swiglu", layer_types=["sliding", "full"],
    sliding_window=32, num_experts=8, experts_per_token=2, expert_ffn_size=128, dense_layers=[0, 2],
)  # fmt: skip
MADE = CalibrationSource("cpu", "test", 2, "fp32", "host", "2", "0", "2026-01-01T00:00:00+00:00")


def seconds(name: str, at: tuple[float, ...], model: ModelConfig = MODEL) -> float:
    """Returns the machine's seconds for a piece of the model."""
    if name.startswith("block"):
        kind = [*layer_kinds(model)][int(name.split(".")[1]) if name.count(".") == 2 else 0]
        return layer_flops(model, kind=kind) * at[1] / at[0] / RATE
    if name.startswith("experts"):  # a rank with fewer experts is as fast
        return 1.0
    if name in ("head.forward", "head.input", "head.weight"):
        return 2 * model.hidden_size * model.padded_vocab_size * at[1] / at[0] / RATE
    if name.startswith("embedding"):
        return model.hidden_size * at[1] / MOVED
    if name.startswith("recompute"):
        return RECOMPUTED[name.split(".")[-1]]
    if name.removesuffix(".shared") in COLLECTIVES:
        return LATENCY + at[1] * at[0] / 8 / MOVED
    if name in ("together", "threads"):
        return 1.0
    return prod(at) / MOVED


def machine(
    of: Callable[[str, tuple[float, ...]], float] | None = None,
    made: CalibrationSource = MADE,
    model: ModelConfig = MODEL,
    **numbers: float,
) -> MeasuredMachine:
    """Returns the machine that was measured for a model, with a piece's seconds by `of`."""
    of = partial(seconds, model=model) if of is None else of
    tables = {}
    for name, count in tables_of(model).items():
        axes: tuple[tuple[float, ...], ...] = (TP, AXIS)[:count]
        if name == "update":
            axes = (AXIS,)
        elif name.removesuffix(".shared") in COLLECTIVES:
            axes = ((2.0, 4.0, 8.0), (64.0, 65536.0, 1e6))
        elif name in ("together", "threads"):
            axes = ((1.0, 2.0),)
        tables[name] = Table(axes, tuple(of(name, at) for at in product(*axes)))
    usual = dict.fromkeys(NUMBERS, 1e-6) | {"memory_gb": 8.0, "rank_gb": 0.2, "peak_tflops": 0.05}
    return MeasuredMachine(made, model, tables, usual | numbers)
