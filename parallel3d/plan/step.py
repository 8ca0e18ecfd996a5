"""Seconds of one training step, and where they go."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from parallel3d.plan import kernels, network
from parallel3d.plan.constants import Constants, from_odds
from parallel3d.plan.layer import embedding, head, layer, layer_parameters
from parallel3d.plan.stages import pipeline_time
from parallel3d.plan.work import Number, StepWork


@dataclass(frozen=True)
class StepTime:
    """Seconds of a step by part; `compute` is the slowest stage's, with tp's waits in it."""

    compute: Number
    bubble: Number
    messages: Number
    gradients: Number
    optimizer: Number
    fixed: Number

    @property
    def total(self) -> Any:
        """Seconds of the step."""
        parts = (self.messages, self.gradients, self.optimizer, self.fixed)
        return self.compute + self.bubble + sum(parts)


def step(work: StepWork, c: Constants) -> StepTime:
    """What one step takes. Fields may be arrays: see `Work`."""
    one = layer(work, c)
    ends = head(work, c), embedding(work, c)
    batch = 1e-6 * c.of("engine", "batch_us", work.engine) * np.where(work.graph > 0, 0.1, 1.0)
    each = _gathered(work, c, one.total)
    single = work.pp == 1
    first = work.first * each + ends[1] + batch + np.where(single, ends[0], 0)
    middle = np.where(work.middle > 0, work.middle * each + batch, 0)
    last = np.where(single, first, work.last * each + ends[0] + batch)
    total = work.layers * each + ends[0] + ends[1] + batch * work.pp
    span = pipeline_time(first, middle, last, total, work.microbatches, work.chunks, work.split)
    busy = work.microbatches * np.maximum(np.maximum(first, middle), last)
    backward = (first if np.ndim(first) else np.asarray(first)) * 2 / 3
    return StepTime(
        busy,
        span - busy,
        _messages(work, c),
        _gradients(work, c, backward),
        _optimizer(work, c),
        c["step.fixed_us"] * 1e-6 + 0 * work.layers,
    )


def stage_parameters(work: StepWork) -> tuple[Any, Any, Any]:
    """Elements on a tensor rank of the first, the fullest middle and the last stage."""
    each = layer_parameters(work)
    table = work.vocab * work.hidden / work.tp
    single = work.pp == 1
    own_head = np.where(single & (work.tied > 0), 0, table)
    first = work.first * each + table + np.where(single, own_head, 0)
    return first, work.middle * each, np.where(single, first, work.last * each + table)


def largest_stage(work: StepWork) -> Any:
    """Elements of the stage that holds most."""
    first, middle, last = stage_parameters(work)
    return np.maximum(np.maximum(first, middle), last)


def _gathered(work: StepWork, c: Constants, each: Number) -> Any:
    """A layer's time where parameters are gathered for it (zero 3): twice, gradients once."""
    bytes = 2 * layer_parameters(work)
    wire = 3 * network.gather(work, c, bytes, work.dp, work.tp * work.cp)
    both = kernels.smooth_max(each, wire * c["fsdp.contention"], 4)
    return np.where(work.zero >= 3, both, each)


def _messages(work: StepWork, c: Constants) -> Any:
    """The pipeline's messages that nothing hides: two a micro-batch and chunk, and the fill."""
    shown = c["pp.exposed"] * (1 - work.overlap_pp * from_odds(c["pp.hidden"]))
    trips = 2 * (work.microbatches * work.chunks + work.pp - 1)
    return trips * network.hop(work, c) * shown


def _gradients(work: StepWork, c: Constants, backward: Number) -> Any:
    """Gradients summed over dp (and parameters gathered, zero 1) beyond what a backward hides."""
    ranks, stride = work.dp * work.cp, work.tp
    elements = largest_stage(work)
    summed = network.reduce(work, c, work.grad_bytes * elements, ranks, stride)
    cut = network.gather(work, c, work.grad_bytes * elements, ranks, stride)
    back = network.gather(work, c, 2 * elements, ranks, stride)
    both = np.where(work.zero >= 3, 0.0, np.where(work.zero > 0, cut + back, summed))
    hidden = work.overlap_dp * from_odds(c["dp.hidden"]) * both
    return both - np.minimum(hidden, backward)


def _optimizer(work: StepWork, c: Constants) -> Any:
    ranks = np.where(work.zero > 0, work.dp * work.cp, 1.0)
    return kernels.move(work, c, largest_stage(work) / ranks * c["optimizer.bytes"])
