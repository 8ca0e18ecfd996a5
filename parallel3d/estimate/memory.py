"""Peak memory of a layout by fitted formulas, for other frameworks' runs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from parallel3d.estimate.rates import ENGINES
from parallel3d.estimate.step import sizes, stage_parameters, tokens
from parallel3d.estimate.work import Number, StepWork

GIB = 2.0**30

# name → (guess, spread of its logarithm); fitted on measured peaks.
GUESSES: dict[str, tuple[float, float]] = {
    "state.gradients": (1.2, 0.3),  # of a gradient's bytes, on every data rank
    "state.sharded": (12.0, 0.2),  # master and moments, sharded by zero 1
    "state.gathered": (2.0, 0.7),  # buffers of zero 1, a parameter
    "layer.whole": (4.0, 0.7),  # bytes a token and hidden element on every tensor rank
    "layer.cut": (12.0, 0.5),  # the same, sharded by sequence parallelism
    "layer.inner": (2.5, 0.4),  # a token and output of q, k, v, up, gate, activation
    "layer.selective": (0.5, 0.5),  # fraction of them kept under selective recomputation
    "stage.whole": (4.0, 0.8),  # a token and hidden element of a micro-batch in flight
    "stage.cut": (8.0, 0.8),  # the same, sharded over tp
    "logits": (8.0, 0.5),  # a logit of the last stage
    "scratch": (2.0, 0.7),  # a token and element of a layer, once, while there are no logits
    "logits_most_gib": (1e6, 0.01),  # cap where the loss is computed in chunks
    "slack": (1.05, 0.1),  # of the allocator
    "base_gib": (1.5, 0.5),  # communicators, workspaces
    "outside_gib": (5.0, 0.5),  # counted by the driver only: context, NCCL
    "tight": (0.85, 0.1),  # share of memory above which the allocator frees and retries
    "stall_s": (0.5, 0.5),  # seconds of that per micro-batch of a pipeline
    "full": (0.92, 0.1),  # share of a GPU's memory above which a run does not fit
}


# parallel3d's own constants, read off its code and `parallel3d dryrun`: weights in 2 bytes;
# gradients, master and moments in 4; inputs of GEMMs and norms; loss chunks of 2 GiB of logits;
# memory of driver and NCCL (dryrun.reserve_gb).
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
    """Bytes of the fullest stage's GPU; `stage`: 0 the first, 1 between, 2 the last."""

    total: Number
    state: Number
    activations: Number
    logits: Number
    stage: Number
    first: Number  # of the first stage's GPU


def memory(work: StepWork, values: Mapping[str, float]) -> MemoryEstimate:
    """Returns the peak memory of the fullest GPU. Fields may be arrays: see `StepWork`."""
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
    state, activations, ends = (_pick(worst, of) for of in (state, live, ends))
    return MemoryEstimate(peaks.max(axis=0), state, activations, ends, worst, peaks[0])


def stalled(work: StepWork, values: Mapping[str, float], peak: Number, seconds: Number) -> Any:
    """Returns a step's seconds with what nanotron's pipelines lose in stalls.

    They wait half a second for each micro-batch and message where a GPU is nearly full and its
    allocator retries, and where no ZeRO shards gradients of more than two replicas or four nodes.
    No other published set has such rows. Between surely not and surely full the price is the mean
    of the logarithms, so that a layout that needs less memory goes first.
    """
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


def _pick(which: Number, of: list[Any]) -> Any:
    return np.choose(which, np.broadcast_arrays(*of))


def _state(work: StepWork, v: Mapping[str, float], elements: Number) -> Any:
    """Returns weights, gradients, master and moments of one stage."""
    ranks = work.dp * work.cp
    cut = np.where(work.zero > 0, ranks, 1.0)
    kept = np.where(work.zero >= 3, ranks, 1.0)
    buffers = np.where((work.zero > 0) & (work.zero < 3) & (ranks > 1), v["state.gathered"], 0.0)
    return elements * (
        (2 + work.grad_bytes * v["state.gradients"]) / kept + v["state.sharded"] / cut + buffers
    )


def _kept(work: StepWork, v: Mapping[str, float]) -> Any:
    """Returns the activation bytes of one layer and micro-batch, from forward to backward."""
    rows = tokens(work)
    inputs = 2 * work.hidden / np.where(work.sequence_parallel > 0, work.tp, 1.0)
    keep = np.where(work.recompute_attention > 0, v["layer.selective"], 1.0)
    return rows * np.where(work.full_recompute > 0, inputs, _saved(work, v) * keep)


def _saved(work: StepWork, v: Mapping[str, float]) -> Any:
    """Returns the activation bytes a token of one layer without recomputation."""
    share = np.where(work.sequence_parallel > 0, work.tp, 1.0)
    qkv, queries, up = sizes(work)
    inner = qkv + queries + up + work.ffn / work.tp
    saved = work.hidden * (v["layer.whole"] + v["layer.cut"] / share) + v["layer.inner"] * inner
    scores = work.heads / work.tp * np.minimum(work.seq, work.window) * 5
    return saved + np.where((work.flash == 0) & (work.recompute_attention == 0), scores, 0.0)


def _working(work: StepWork, v: Mapping[str, float]) -> Any:
    """Returns the bytes of the one layer that is being computed or recomputed."""
    once = np.where(work.full_recompute > 0, _saved(work, v), 0.0)
    qkv, queries, up = sizes(work)
    elements = work.hidden + qkv + queries + up + work.ffn / work.tp
    return tokens(work) * (once + v["scratch"] * elements)
