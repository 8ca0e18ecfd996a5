"""What is fitted: few numbers, each with a meaning, a first guess and how far to trust that guess.

`constants.json` is made by `benchmarks/published.py`; a device and type without a measured run
keeps its guess.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from parallel3d.plan.work import Number

FILE = Path(__file__).with_name("constants.json")

SPEEDS = (
    "v100/fp16",
    "a100/fp16",
    "h100/bf16",
    "h100/fp8",
    "h100_500w/bf16",
    "h100_500w/fp8",
    "h200/bf16",
    "h200/fp8",
    "b200/bf16",
    "b200/fp8",
    "b200/fp4",
    "gb200/bf16",
    "gb200/fp8",
    "gb200/fp4",
)
NETWORKS = ("hdr", "hdr4", "opa", "roce", "ndr", "efa", "edr")
ENGINES = ("megatron", "deepspeed", "nanotron", "fsdp")

# name → (guess, spread of its logarithm). Times in microseconds, shares of a datasheet's rate.
GUESSES: dict[str, tuple[float, float]] = {
    "gemm.ramp": (256.0, 0.7),  # k at which a GEMM reaches half of its rate
    "gemm.wave": (0.7, 0.5),  # how much of an incomplete wave of tiles is lost
    "gemm.small_tile": (0.85, 0.15),  # share of the rate with half the tile, once and again
    "gemm.ragged": (0.75, 0.5),  # share of the rate where a side is no multiple of 64
    "gemm.gap_us": (4.0, 0.5),
    "attention.plain": (0.5, 0.5),  # batched products with scores written out
    "attention.plain_ramp": (100.0, 0.7),
    "attention.score_bytes": (11.0, 0.5),  # bytes moved a score forward
    "attention.odd_head": (0.5, 0.5),  # share of the rate with heads of no multiple of 8
    "memory.rate": (0.75, 0.2),
    "memory.width": (1.0, 0.4),  # factor on the bytes of element-wise operations
    "memory.compiled": (0.5, 0.4),  # of those bytes that compiled code moves
    "head.bytes": (16.0, 0.5),  # bytes moved a logit
    "fp8.cast_bytes": (4.0, 0.7),  # bytes moved an element that is made fp8
    "launch.power": (4.0, 0.5),  # how sharply the larger of host and GPU decides
    "optimizer.bytes": (34.0, 0.4),
    "link.rate": (0.7, 0.3),
    "link.latency_us": (15.0, 0.6),
    "pp.exposed": (1.0, 0.7),
    "pp.hidden": (1.5, 1.0),  # odds of a message to be hidden, where that is asked for
    "dp.hidden": (4.0, 0.7),  # odds of a gradient's bytes
    "fsdp.contention": (1.1, 0.2),
    "cp.exposed": (0.3, 0.7),
    "step.fixed_us": (8000.0, 0.8),
}
PER_SPEED = {"rate": (0.8, 0.25)}  # of the datasheet's peak, of a large GEMM
PER_NETWORK = {
    "rate": (0.55, 0.35),
    "latency_us": (25.0, 0.8),
    "crowd_us": (5.0, 1.5),
    "begin_us": (200.0, 1.5),  # until a message of the pipeline flows to another node
}
PER_ENGINE = {
    "launch_us": (300.0, 0.8),  # host's time for a layer, forward and backward
    "launch_tp_us": (300.0, 1.0),  # more with tp
    "batch_us": (1000.0, 1.0),  # and for a micro-batch
    "hop_us": (200.0, 1.0),  # for a message to the next stage
    "slowest_us": (300.0, 1.0),  # for a layer at tp = 8, where sums wait for the slowest host
    "flash": (0.45, 0.4),  # of a GEMM's rate that its attention reaches over the causal half
    "tp_hidden": (0.7, 1.0),  # odds of tp's messages to lie behind GEMMs, where asked for
}
_FAMILIES = (
    ("speed", SPEEDS, PER_SPEED),
    ("network", NETWORKS, PER_NETWORK),
    ("engine", ENGINES, PER_ENGINE),
)


def guesses() -> dict[str, tuple[float, float]]:
    """All constants' names with (guess, spread)."""
    found = dict(GUESSES)
    for family, names, keys in _FAMILIES:
        for name in names:
            for key, guess in keys.items():
                found[f"{family}.{name}.{key}"] = guess
    found["network.efa.crowd_us"] = (25.0, 1.0)
    return found


def from_odds(odds: Number | float) -> Number:
    """A share from its odds: 0.5 from 1, never quite all."""
    return np.asarray(odds / (1 + odds))


class Constants:
    """Values by name; a family's values as an array in the order of its list."""

    def __init__(self, values: Mapping[str, float]) -> None:
        self.values = {name: guess for name, (guess, _) in guesses().items()}
        self.values.update({name: v for name, v in values.items() if name in self.values})
        if not all(math.isfinite(v) and v > 0 for v in self.values.values()):
            raise ValueError("constants must be positive and finite")

    def __getitem__(self, name: str) -> float:
        return self.values[name]

    def of(self, family: str, key: str, index: Number) -> Number:
        """A family's constant for each row's member."""
        names = next(names for name, names, _ in _FAMILIES if name == family)
        values = np.array([self.values[f"{family}.{name}.{key}"] for name in names])
        return values[np.asarray(index, dtype=int)]


def load(path: Path = FILE) -> Constants:
    """The fitted constants, or the guesses where nothing has been fitted."""
    return Constants(json.loads(path.read_text())["constants"] if path.exists() else {})
