"""Seconds of one kernel: a GEMM, attention, operations that only move memory."""

from __future__ import annotations

from typing import Any

import numpy as np

from parallel3d.plan.constants import Constants
from parallel3d.plan.work import Number, StepWork

# rows, columns, parts of k that are summed afterwards, and how often the tile was halved
_TILES = (
    (256, 128, 1, 0),
    (128, 128, 1, 1),
    (128, 64, 1, 2),
    (256, 128, 4, 0),
    (128, 128, 3, 1),
)


def smooth_max(a: Number, b: Number, power: float = 6.0) -> Any:
    """Nearly max(a, b) of two times, a little more where they are close: neither hides wholly."""
    big = np.maximum(a, b)
    small = np.minimum(a, b)
    return big * (1 + (small / np.maximum(big, 1e-12)) ** power) ** (1 / power)


def gemm(work: StepWork, c: Constants, m: Number, n: Number, k: Number, times: Number = 1.0) -> Any:
    """Seconds of an (m, k) × (k, n) product, `times` of them in one launch.

    Rate: the device's for large products, less for short k (fill and drain of each tile), for
    tiles that reach over the edge, for a last wave that leaves units idle (cuBLAS picks among
    tiles, so not all of it), for sides that do not fit a tensor core's rows.
    """
    ragged = (np.mod(n, 64) != 0) | (np.mod(k, 64) != 0)
    rate = c.of("speed", "rate", work.speed) * work.peak
    rate = rate * np.where(ragged, c["gemm.ragged"], 1.0)
    compute = np.inf
    for rows, columns, parts, share in _TILES:
        waves = np.ceil(m / rows) * np.ceil(n / columns) * parts * times / work.units
        wave = (np.ceil(waves) / waves) ** c["gemm.wave"] * waves * work.units
        tile = 2.0 * rows * columns * (k / parts + c["gemm.ramp"])
        compute = np.minimum(compute, wave * tile / (rate * c["gemm.small_tile"] ** share))
    moved = 2 * (m * k + k * n + m * n) * times / (work.memory_rate * c["memory.rate"])
    return smooth_max(compute, moved, 4) + c["gemm.gap_us"] * 1e-6


def move(work: StepWork, c: Constants, bytes: Number) -> Any:
    """Seconds of operations that move `bytes` through memory."""
    return bytes / (work.memory_rate * c["memory.rate"])


def attention(work: StepWork, c: Constants) -> tuple[Any, Any]:
    """Seconds of scores, softmax and values of one layer: (forward, backward) of a micro-batch.

    Flash kernels skip the masked half, and their backward is 2.5 forwards. Plain ones multiply all
    of the square and write it: forward, twice in the backward.
    """
    queries = work.micro_batch * work.heads / work.tp * work.seq / work.cp  # rows of scores
    keys = np.minimum(work.seq, work.window)
    flops = 4.0 * queries * keys * work.head_size
    odd = np.where(np.mod(work.head_size, 8) != 0, c["attention.odd_head"], 1.0)
    causal = np.where(work.window < work.seq, 1.0, 0.5)
    width = np.where(work.head_size < 96, 0.75, 1.0)  # half-empty products with narrow heads
    base = c.of("speed", "rate", work.speed) * work.peak_attention * odd
    flash = flops * causal / (base * c.of("engine", "flash", work.engine) * width)
    ramp = 1 + c["attention.plain_ramp"] / work.head_size
    plain = flops / (base * c["attention.plain"]) * ramp
    written = queries * keys * c["attention.score_bytes"] * np.where(work.dropout > 0, 1.0, 0.7)
    plain = plain + move(work, c, written)
    gap = 3 * c["gemm.gap_us"] * 1e-6
    forward = np.where(work.flash > 0, flash, plain) + gap
    return forward, np.where(work.flash > 0, 2.5, 2.0) * forward
