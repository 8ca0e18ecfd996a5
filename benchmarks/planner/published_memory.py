"""Formulas for the peak memory of published runs, with fitted constants.

The planner's own formula, without fitted constants, is in `parallel3d/estimate/memory.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from benchmarks.planner.published_run import ENGINES, PublishedRun
from parallel3d.estimate.fitted_cost import Number, expert_parameters, stage_parameters

GIB = 2.0**30

# name → (guess, spread of its logarithm); fitted on measured peaks.
GUESSES: dict[str, tuple[float, float]] = {
    "state.gradients": (1.2, 0.3),  # share of a gradient's bytes, on every data-parallel rank
    "state.sharded": (12.0, 0.2),  # bytes of master and moments, sharded by zero 1
    "state.gathered": (2.0, 0.7),  # buffers of zero 1, bytes per parameter
    "layer.whole": (4.0, 0.7),  # bytes per token and hidden element on every tensor-parallel rank
    "layer.kept": (2.5, 0.4),  # bytes per element that a layer's operations keep until its backward
    "layer.selective": (0.5, 0.5),  # fraction of these that is kept under selective recomputation
    "stage.whole": (4.0, 0.8),  # bytes per token and hidden element of a micro-batch in flight
    "stage.cut": (8.0, 0.8),  # the same, sharded over tp
    "logits": (8.0, 0.5),  # bytes per logit of the last stage
    "scratch": (2.0, 0.7),  # bytes per such element, once, while there are no logits
    "slack": (1.05, 0.1),  # overhead of the allocator
    "base_gib": (1.5, 0.5),  # GiB of communicators and workspaces
    "outside_gib": (5.0, 0.5),  # GiB that only the driver counts: context, NCCL
    "tight": (0.85, 0.1),  # share of memory above which the allocator frees and retries
    "stall_s": (0.5, 0.5),  # seconds that such retries cost per micro-batch of a pipeline
    "full": (0.92, 0.1),  # share of a GPU's memory above which a run does not fit
}


@dataclass(frozen=True)
class MemoryEstimate:
    """Bytes of the fullest GPU, of its stage's state and activations, and of the first stage's GPU.
    `stage`: its place in `PublishedRun.ranks`."""

    total: Number
    state: Number
    activations: Number
    stage: Number
    first: Number


def memory(work: PublishedRun, values: Mapping[str, float]) -> MemoryEstimate:
    """Returns the peak memory of the fullest GPU. Fields may be arrays: see `PublishedRun`."""
    v = {name: values.get(f"memory.{name}", guess) for name, (guess, _) in GUESSES.items()}
    states = _state(work, v, stage_parameters(work), work.dp * work.cp)
    if any(kind.has_experts for kind in work.by_kind):
        states = states + _state(work, v, expert_parameters(work), work.edp)
    each = _kept(work, v)
    held = np.minimum(work.microbatches, work.pp)
    grow = np.where(work.chunks > 1, 1 + (work.pp - 1) / (work.pp * work.chunks), 1.0)
    between = np.minimum(work.microbatches, work.pp - 1)
    extra = _working(work, v)
    batch = np.where(work.pp > 1, work.tokens * work.hidden, 0.0)
    batch = batch * (v["stage.whole"] + v["stage.cut"] / work.tp)
    layers = work.ranks.layers
    middle = between * (work.layers / work.pp * each * grow + batch)
    live = [
        held * (layers[0] * each * grow + batch),
        *[middle] * (len(layers) - 2),
        layers[-1] * each * grow + batch,
    ]
    logits = v["logits"] * work.tokens * work.vocab / work.tp
    ends = np.where(work.ranks.heads > 0, np.maximum(logits, extra), extra)
    totals = np.stack([s + a + e for s, a, e in zip(states, live, ends, strict=True)])
    worst = np.argmax(totals, axis=0)
    peaks = totals * v["slack"] + v["base_gib"] * GIB
    state, activations = (np.choose(worst, np.broadcast_arrays(*of)) for of in (states, live))
    return MemoryEstimate(peaks.max(axis=0), state, activations, worst, peaks[0])


def stalled(work: PublishedRun, values: Mapping[str, float], peak: Number, seconds: Number) -> Any:
    """Returns a step's seconds plus what nanotron's pipelines lose in stalls. If a GPU is nearly
    full and its allocator retries, they wait half a second for each micro-batch and message, unless
    ZeRO shards the gradients; this happens with more than two replicas or four nodes. No other
    published set has such rows. If it is uncertain whether the GPU is full, the price is the mean
    of the logarithms, so that a layout that needs less memory is preferred."""
    tight = values.get("memory.tight", GUESSES["tight"][0])
    each = values.get("memory.stall_s", GUESSES["stall_s"][0])
    waits = each * (work.microbatches + work.pp - 1) * np.minimum(work.pp - 1, 2)
    gpus = work.tp * work.pp * work.dp
    across = (gpus > work.gpus_per_node) & ((work.dp > 2) | (gpus > 4 * work.gpus_per_node))
    whole = (work.zero == 0) & (work.tied == 0) & (work.dp > 1) & across
    chance = np.clip((peak / work.memory_bytes - tight) / 0.1 + 0.5, 0, 1)
    chance = np.where(whole, 1.0, np.where(work.microbatches > 1, chance, 0.0))
    chance = np.where(work.engine == ENGINES.index("nanotron"), chance, 0.0)
    return seconds * (1 + waits / seconds) ** chance


def _state(work: PublishedRun, v: Mapping[str, float], elements: Number, ranks: Number) -> Any:
    """Returns weights, gradients, master and moments of elements that `ranks` replicate."""
    cut = np.where(work.zero > 0, ranks, 1.0)
    kept = np.where(work.zero >= 3, ranks, 1.0)
    buffers = np.where((work.zero > 0) & (work.zero < 3) & (ranks > 1), v["state.gathered"], 0.0)
    return elements * (
        (2 + work.grad_bytes * v["state.gradients"]) / kept + v["state.sharded"] / cut + buffers
    )


def _kept(work: PublishedRun, v: Mapping[str, float]) -> Any:
    """Returns the activation bytes of one layer and micro-batch, from forward to backward."""
    inputs = 2 * work.hidden / work.share
    keep = np.where(work.recompute_attention > 0, v["layer.selective"], 1.0)
    return work.tokens * np.where(work.recompute_layer > 0, inputs, _saved(work, v) * keep)


def _saved(work: PublishedRun, v: Mapping[str, float]) -> Any:
    """Returns the activation bytes per token of one layer without recomputation."""
    saved = work.hidden * v["layer.whole"] + v["layer.kept"] * _kept_elements(work)
    scores = (work.heads / work.tp) * np.minimum(work.seq, work.window) * 5
    return saved + np.where((work.flash == 0) & (work.recompute_attention == 0), scores, 0.0)


def _kept_elements(work: PublishedRun) -> Any:
    totals = work.ranks.totals
    each = (sum(op.keeps for op in kind.ops) for kind in work.by_kind)
    return sum(n * of for n, of in zip(totals, each, strict=True)) / totals.sum(axis=0)


def _working(work: PublishedRun, v: Mapping[str, float]) -> Any:
    """Returns the bytes of the one layer that is being computed or recomputed."""
    once = np.where(work.recompute_layer > 0, _saved(work, v), 0.0)
    return work.tokens * (once + v["scratch"] * _kept_elements(work))
