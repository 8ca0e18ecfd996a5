"""Bytes of the fullest GPU at the step's peak, and what holds them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from parallel3d.plan.rates import ENGINES
from parallel3d.plan.step import sizes, stage_parameters, tokens
from parallel3d.plan.work import Number, StepWork

GIB = 2.0**30

# name → (guess, spread of its logarithm); fitted on measured peaks as the times are.
GUESSES: dict[str, tuple[float, float]] = {
    "state.gradients": (1.2, 0.3),  # of a gradient's bytes, which every data rank holds
    "state.sharded": (12.0, 0.2),  # master and moments, cut by zero 1
    "state.gathered": (2.0, 0.7),  # buffers of zero 1, a parameter
    "layer.whole": (4.0, 0.7),  # bytes a token and hidden element on every tensor rank
    "layer.cut": (12.0, 0.5),  # the same where sequence parallelism cuts it
    "layer.inner": (2.5, 0.4),  # a token and output of q, k, v, up, gate, activation
    "layer.selective": (0.5, 0.5),  # share of them that per-operator recomputation keeps
    "stage.whole": (4.0, 0.8),  # a token and hidden element that a micro-batch under way holds
    "stage.cut": (8.0, 0.8),  # once a stage, beside its layers; the part that tp's ranks share
    "logits": (8.0, 0.5),  # a logit of the last stage
    "scratch": (2.0, 0.7),  # a token and element of a layer, once, while no logits are there
    "logits_most_gib": (1e6, 0.01),  # where the loss is made in chunks: of one chunk
    "slack": (1.05, 0.1),  # of the allocator
    "base_gib": (1.5, 0.5),  # communicators, workspaces
    "outside_gib": (5.0, 0.5),  # what the driver counts beside the allocator: context, NCCL
    "tight": (0.85, 0.1),  # share from which on the allocator gives back and asks anew
    "stall_s": (0.5, 0.5),  # what that takes a micro-batch where a pipeline waits for it
    "full": (0.92, 0.1),  # share of a GPU's memory at which a run no longer fits
}


# parallel3d's own, not fitted but read off its code and `parallel3d dryrun`: weights in 2 bytes,
# gradients, master and moments in 4; a layer's inputs of GEMMs and norms; chunks of 2 GiB of
# logits; what its driver and NCCL keep (dryrun.reserve_gb).
PARALLEL3D = {
    "memory.state.gradients": 1.0,
    "memory.state.sharded": 12.0,
    "memory.state.gathered": 0.0,
    "memory.layer.whole": 0.0,
    "memory.layer.cut": 8.0,
    "memory.layer.inner": 2.0,
    "memory.layer.selective": 1.0,
    "memory.stage.whole": 0.0,
    "memory.stage.cut": 2.0,
    "memory.logits": 2.0,
    "memory.logits_most_gib": 2.0,
    "memory.scratch": 5.4,
    "memory.slack": 1.0,
    "memory.base_gib": 3.7,
    "memory.tight": 0.92,
    "memory.full": 1.0,
}


@dataclass(frozen=True)
class MemoryEstimate:
    """Bytes of the fullest stage's GPU; `stage` 0 the first, 1 between, 2 the last."""

    total: Number
    state: Number
    activations: Number
    logits: Number
    stage: Number
    first: Number  # of the first stage's GPU


def memory(work: StepWork, values: Mapping[str, float]) -> MemoryEstimate:
    """The peak of the fullest GPU. Fields may be arrays: see `Work`."""
    v = {name: values.get(f"memory.{name}", guess) for name, (guess, _) in GUESSES.items()}
    state = [_state(work, v, elements) for elements in stage_parameters(work)]
    kept = _kept(work, v)
    held = np.minimum(work.microbatches, work.pp)
    grow = np.where(work.chunks > 1, 1 + (work.pp - 1) / (work.pp * work.chunks), 1.0)
    between = np.minimum(work.microbatches, work.pp - work.live_stage)
    extra = _working(work, v)
    batch = np.where(work.pp > 1, tokens(work) * work.hidden, 0.0)
    batch = batch * (v["stage.whole"] + v["stage.cut"] / work.tp)
    live = [
        held * (work.first * kept * grow + batch),
        between * (work.live_layers * kept * grow + batch),
        np.where(work.pp == 1, work.first, work.last) * kept * grow + batch,
    ]
    logits = v["logits"] * tokens(work) * work.vocab / work.tp
    logits = np.minimum(logits, v["logits_most_gib"] * GIB)
    ends = [
        np.where(work.pp == 1, np.maximum(logits, extra), extra),
        extra,
        np.maximum(logits, extra),
    ]
    totals = np.stack([s + a + e for s, a, e in zip(state, live, ends, strict=True)])
    worst = np.argmax(totals, axis=0)
    peaks = totals * v["slack"] + v["base_gib"] * GIB
    parts = (_pick(worst, of) for of in (state, live, ends))
    return MemoryEstimate(peaks.max(axis=0), *parts, worst, peaks[0])


def stall(work: StepWork, values: Mapping[str, float], peak: Number) -> Any:
    """Seconds of a step that a nearly full GPU of a pipeline loses in its allocator.

    Seen in nanotron's runs; no other published set has rows that could tell.
    """
    share = values.get("memory.tight", GUESSES["tight"][0])
    each = values.get("memory.stall_s", GUESSES["stall_s"][0])
    trips = (work.microbatches + work.pp - 1) * np.minimum(work.pp - 1, 2)
    stalls = (peak > share * work.memory_bytes) & (work.engine == ENGINES.index("nanotron"))
    return np.where(stalls, each * trips, 0.0)


def _pick(which: Number, of: list[Any]) -> Any:
    return np.choose(which, np.broadcast_arrays(*of))


def _state(work: StepWork, v: Mapping[str, float], elements: Number) -> Any:
    """Weights, gradients, master and moments of one stage."""
    ranks = work.dp * work.cp
    cut = np.where(work.zero > 0, ranks, 1.0)
    kept = np.where(work.zero >= 3, ranks, 1.0)
    buffers = np.where((work.zero > 0) & (work.zero < 3) & (ranks > 1), v["state.gathered"], 0.0)
    return elements * (
        (2 + work.grad_bytes * v["state.gradients"]) / kept + v["state.sharded"] / cut + buffers
    )


def _kept(work: StepWork, v: Mapping[str, float]) -> Any:
    """Bytes that one layer keeps of one micro-batch between its forward and its backward."""
    rows = tokens(work)
    inputs = 2 * work.hidden / np.where(work.sequence_parallel > 0, work.tp, 1.0)
    keep = np.where(work.recompute_attention > 0, v["layer.selective"], 1.0)
    return rows * np.where(work.full_recompute > 0, inputs, _saved(work, v) * keep)


def _saved(work: StepWork, v: Mapping[str, float]) -> Any:
    """Bytes a token that a layer saves where nothing is computed again."""
    share = np.where(work.sequence_parallel > 0, work.tp, 1.0)
    qkv, queries, up = sizes(work)
    inner = qkv + queries + up + work.ffn / work.tp
    saved = work.hidden * (v["layer.whole"] + v["layer.cut"] / share) + v["layer.inner"] * inner
    scores = work.heads / work.tp * np.minimum(work.seq, work.window) * 5
    return saved + np.where((work.flash == 0) & (work.recompute_attention == 0), scores, 0.0)


def _working(work: StepWork, v: Mapping[str, float]) -> Any:
    """What exists once: a layer's own tensors while it is computed (again)."""
    once = np.where(work.full_recompute > 0, _saved(work, v), 0.0)
    qkv, queries, up = sizes(work)
    elements = work.hidden + qkv + queries + up + work.ffn / work.tp
    return tokens(work) * (once + v["scratch"] * elements)
