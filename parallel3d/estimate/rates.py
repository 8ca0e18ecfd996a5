"""Fitted constants, fabrics, and the seconds of kernels, collectives and messages.

`benchmarks/published.py` writes `constants.json`; a device and type without a measured run keeps
its guess.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from parallel3d.estimate.network import bus_factor
from parallel3d.estimate.work import Number, StepWork

FILE = Path(__file__).with_name("constants.json")

SPEEDS = (
    *("v100/fp16", "a100/fp16", "h100/bf16", "h100/fp8", "h100_500w/bf16", "h100_500w/fp8"),
    *("h200/bf16", "h200/fp8", "b200/bf16", "b200/fp8", "b200/fp4"),
    *("gb200/bf16", "gb200/fp8", "gb200/fp4"),
)
NETWORKS = ("hdr", "hdr4", "opa", "roce", "ndr", "efa", "edr")
ENGINES = ("megatron", "deepspeed", "nanotron", "fsdp")

# name → (guess, spread of its logarithm). Times in microseconds, rates as fractions of a
# datasheet's.
GUESSES: dict[str, tuple[float, float]] = {
    "gemm.ramp": (256.0, 0.7),  # k at which a GEMM reaches half of its rate
    "gemm.wave": (0.7, 0.5),  # fraction of an incomplete wave of tiles that is lost
    "gemm.ragged": (0.75, 0.5),  # fraction of the rate where a side is no multiple of 64
    "gemm.gap_us": (4.0, 0.5),
    "attention.plain": (0.5, 0.5),  # batched matmuls with scores in memory
    "attention.score_bytes": (11.0, 0.5),  # bytes moved a score forward
    "memory.rate": (0.75, 0.2),
    "memory.width": (1.0, 0.4),  # factor on the bytes of element-wise operations
    "memory.compiled": (0.5, 0.4),  # of those bytes that compiled code moves
    "head.bytes": (16.0, 0.5),  # bytes moved a logit
    "fp8.cast_bytes": (4.0, 0.7),  # bytes moved an element that is made fp8
    "optimizer.bytes": (34.0, 0.4),
    "link.rate": (0.7, 0.3),
    "link.latency_us": (15.0, 0.6),
    "pp.exposed": (1.0, 0.7),
    "pp.hidden": (1.5, 1.0),  # odds that a message is hidden, with overlap
    "cp.exposed": (0.3, 0.7),
    "step.fixed_us": (8000.0, 0.8),
}
PER_SPEED = {"rate": (0.8, 0.25)}  # of a large GEMM, as a fraction of the datasheet's peak
PER_NETWORK = {
    "rate": (0.55, 0.35),
    "latency_us": (25.0, 0.8),
    "crowd_us": (5.0, 1.5),
    "begin_us": (200.0, 1.5),  # until a pipeline message flows to another node
}
PER_ENGINE = {
    "launch_us": (300.0, 0.8),  # host time for a layer, forward and backward
    "launch_tp_us": (300.0, 1.0),  # more with tp
    "batch_us": (1000.0, 1.0),  # for a micro-batch
    "hop_us": (200.0, 1.0),  # for a message to the next stage
    "slowest_us": (300.0, 1.0),  # for a layer at tp = 8, where the slowest host counts
    "flash": (0.45, 0.4),  # attention's fraction of a GEMM's rate over the causal half
    "dp_hidden": (2.0, 1.0),  # odds that gradients, and zero 1's parameters, hide, with overlap
    "dp_messages": (1.0, 1.0),  # collectives of a layer's gradients
    "tp_hidden": (0.7, 1.0),  # odds that tp's collectives hide behind GEMMs, with overlap
}
_FAMILIES = (
    ("speed", SPEEDS, PER_SPEED),
    ("network", NETWORKS, PER_NETWORK),
    ("engine", ENGINES, PER_ENGINE),
)


def guesses() -> dict[str, tuple[float, float]]:
    """Returns (guess, spread) of all constants by name."""
    found = dict(GUESSES)
    for family, names, keys in _FAMILIES:
        for name in names:
            for key, guess in keys.items():
                found[f"{family}.{name}.{key}"] = guess
    found["network.efa.crowd_us"] = (25.0, 1.0)
    found["engine.nanotron.dp_hidden"] = (0.3, 0.7)
    found["engine.megatron.dp_messages"] = (0.2, 1.0)  # several layers are one bucket
    return found


def from_odds(odds: Number | float) -> Number:
    """Converts odds to a fraction: 1 is 0.5."""
    return np.asarray(odds / (1 + odds))


class Constants:
    """Values by name; those of a family also as an array."""

    def __init__(self, values: Mapping[str, float]) -> None:
        self.values = {name: guess for name, (guess, _) in guesses().items()}
        self.values.update({name: v for name, v in values.items() if name in self.values})
        if not all(math.isfinite(v) and v > 0 for v in self.values.values()):
            raise ValueError("constants must be positive and finite")

    def __getitem__(self, name: str) -> float:
        return self.values[name]

    def of(self, family: str, key: str, index: Number) -> Number:
        """Returns a family's constant for each row's member."""
        names = next(names for name, names, _ in _FAMILIES if name == family)
        values = np.array([self.values[f"{family}.{name}.{key}"] for name in names])
        return values[np.asarray(index, dtype=int)]


def load(path: Path = FILE) -> Constants:
    """Reads the fitted constants, or returns the guesses if there is no file."""
    return Constants(json.loads(path.read_text())["constants"] if path.exists() else {})


def range_of_a_new_place() -> tuple[float, float]:
    """Returns measured over predicted seconds of runs on a GPU, network or engine that was left out
    of the fit: four of five are between the two figures."""
    low, high = json.loads(FILE.read_text())["ranges"]["place"]
    return low, high


# Of a GEMM: rows, columns, splits of k. cuBLAS takes the best of them.
_TILES = ((256, 128, 1), (128, 128, 1), (128, 64, 1), (256, 128, 4), (128, 128, 3))


def smooth_max(a: Number, b: Number) -> Any:
    """Returns nearly max(a, b) of two times, more where they are close: neither hides fully."""
    return (a**4 + b**4) ** 0.25


def gemm(work: StepWork, c: Constants, m: Number, n: Number, k: Number) -> Any:
    """Returns seconds of an (m, k) × (k, n) matmul.

    The rate of large matmuls, reduced for short k (fill and drain of each tile), tiles that reach
    over the edge, an incomplete last wave (partly: cuBLAS picks among tiles) and ragged sides.
    """
    ragged = (np.mod(n, 64) != 0) | (np.mod(k, 64) != 0)
    rate = c.of("speed", "rate", work.speed) * work.peak
    rate = rate * np.where(ragged, c["gemm.ragged"], 1.0)
    compute: Any = np.inf
    for rows, columns, parts in _TILES:
        waves = np.ceil(m / rows) * np.ceil(n / columns) * parts / work.units
        wave = (np.ceil(waves) / waves) ** c["gemm.wave"] * waves * work.units
        tile = 2.0 * rows * columns * (k / parts + c["gemm.ramp"])
        compute = np.minimum(compute, wave * tile / rate)
    moved = 2 * (m * k + k * n + m * n) / (work.memory_rate * c["memory.rate"])
    return smooth_max(compute, moved) + c["gemm.gap_us"] * 1e-6


def move(work: StepWork, c: Constants, bytes: Number) -> Any:
    """Returns seconds of operations that move `bytes` through memory."""
    return bytes / (work.memory_rate * c["memory.rate"])


def attention(work: StepWork, c: Constants) -> tuple[Any, Any]:
    """Returns (forward, backward) seconds of one layer's scores, softmax and values.

    Flash kernels skip the masked half, and their backward is 2.5 forwards. Plain ones compute the
    full square and write it: forward, twice in the backward.
    """
    queries = work.micro_batch * work.heads / work.tp * work.seq / work.cp  # rows of scores
    keys = np.minimum(work.seq, work.window)
    flops = 4.0 * queries * keys * work.head_size
    causal = np.where(work.window < work.seq, 1.0, 0.5)
    width = np.where(work.head_size < 96, 0.75, 1.0)  # narrow heads fill half of a tensor core
    base = c.of("speed", "rate", work.speed) * work.peak_attention
    flash = flops * causal / (base * c.of("engine", "flash", work.engine) * width)
    plain = flops / (base * c["attention.plain"])
    written = queries * keys * c["attention.score_bytes"] * np.where(work.dropout > 0, 1.0, 0.7)
    plain = plain + move(work, c, written)
    gap = 3 * c["gemm.gap_us"] * 1e-6
    forward = np.where(work.flash > 0, flash, plain) + gap
    return forward, np.where(work.flash > 0, 2.5, 2.0) * forward


_RING = 32  # ranks up to which latency is a ring's; larger groups add a tree's


def ring_rate(work: StepWork, c: Constants, ranks: Number, stride: Number | int) -> Any:
    """Returns bytes/s of a ring over `ranks` GPUs that are `stride` apart.

    Inside a node that of the link; else at most the network bandwidth of the ring's members in one
    node, as the node's other rings run at the same time.
    """
    members = np.clip(np.floor(work.gpus_per_node / stride), 1, ranks)
    link = work.link_rate * c["link.rate"]
    fabric = work.fabric_rate * c.of("network", "rate", work.fabric) * members
    return np.where(members >= ranks, link, np.minimum(link, fabric))


def latency(
    work: StepWork, c: Constants, ranks: Number, stride: Number | int, steps: Number
) -> Any:
    """Returns the latency of a collective of `steps` steps over the network."""
    members = np.clip(np.floor(work.gpus_per_node / stride), 1, ranks)
    network = c.of("network", "latency_us", work.fabric) * steps
    return 1e-6 * (c["link.latency_us"] + np.where(members >= ranks, 0, network))


def gather(work: StepWork, c: Constants, bytes: Number, ranks: Number, stride: Number | int) -> Any:
    """Returns seconds of an all-gather or reduce-scatter of `bytes`; an all-reduce is two."""
    wire = bus_factor("all_gather", ranks) * bytes / ring_rate(work, c, ranks, stride)
    steps = np.where(ranks > _RING, _RING - 1 + 6 * np.log2(ranks / _RING), ranks - 1)
    return np.where(ranks > 1, wire + latency(work, c, ranks, stride, steps), 0.0)


def reduce(work: StepWork, c: Constants, bytes: Number, ranks: Number, stride: Number | int) -> Any:
    """Returns seconds of an all-reduce of `bytes` by tree or ring."""
    wire = bus_factor("all_reduce", ranks) * bytes / ring_rate(work, c, ranks, stride)
    steps = 2 * np.log2(np.maximum(ranks, 2))
    return np.where(ranks > 1, wire + latency(work, c, ranks, stride, steps), 0.0)


def hop(work: StepWork, c: Constants) -> Any:
    """Returns seconds of a micro-batch's activations to the next stage, tp × cp × dp ranks away."""
    stride = work.tp * work.cp * work.dp
    bytes = 2 * work.micro_batch * work.seq / work.cp * work.hidden
    inside = stride * work.pp <= work.gpus_per_node
    cut = np.maximum(work.scatter_gather, work.sequence_parallel)
    share = np.where(cut > 0, work.tp, 1.0)
    # Full copies from every tensor rank share the node's network as slices do.
    rate = np.where(
        inside,
        work.link_rate * c["link.rate"],
        work.fabric_rate * c.of("network", "rate", work.fabric),
    )
    software = c.of("engine", "hop_us", work.engine)
    wire = np.where(inside, c["link.latency_us"], c.of("network", "begin_us", work.fabric))
    return np.where(work.pp > 1, bytes / share / rate + 1e-6 * (software + wire), 0.0)
