"""Which layers a stage holds, and how long a pipeline takes, in closed form.

`schedules/simulate.py` is the clock of the runs themselves; the tests hold this form to it.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import numpy as np

from parallel3d.plan.work import Number
from parallel3d.schedules.schedule import make
from parallel3d.schedules.simulate import Costs, clock


@dataclass(frozen=True)
class LayerSplit:
    """Layers of the first stage, of the fullest between, of the last; the stage between that holds
    most activations (stage s of p keeps up to p - s micro-batches) and its layers."""

    first: int
    middle: int
    last: int
    live_stage: int
    live_layers: int


def split_evenly(layers: int, stages: int, ends: bool = False) -> LayerSplit:
    """Equal stages, the rest to the first ones; `ends`: embedding and head count as a layer."""
    slots = layers + 2 * ends
    counts = [slots // stages + (stage < slots % stages) for stage in range(stages)]
    if ends and stages > 1:
        counts[0], counts[-1] = max(counts[0] - 1, 0), max(counts[-1] - 1, 0)
    elif ends:
        counts = [layers]
    return _of(counts)


def split_by_cost(layers: int, head: float, stages: int) -> LayerSplit:
    """Blocks in order, a new stage as soon as a block ends beyond the stage's share of all costs.

    `head` is the head's cost in layers. A block moves on by at most one stage, so a head that is
    larger than a share leaves the last stages empty.
    """
    share = (layers + head) / stages
    counts = [0] * stages
    stage = 0
    for block in range(1, layers + 1):
        stage += block > share * (stage + 1) * (1 + 1e-9) and stage < stages - 1
        counts[stage] += 1
    stage += layers + head > share * (stage + 1) * (1 + 1e-9) and stage < stages - 1
    counts[stage:] = [counts[stage]]  # what comes behind the head is empty
    return _of(counts)


def split_balanced(layers: int, head: float, stages: int) -> LayerSplit:
    """Stages whose slowest is as fast as can be, the last with the head; every stage has a layer.

    `head` is the head's cost in layers.
    """
    if stages == 1:
        return split_evenly(layers, 1)
    others = stages - 1

    def slowest(mine: int) -> tuple[float, int]:
        return max(-(-(layers - mine) // others), mine + head), -mine

    last = min(range(1, layers - others + 1), key=slowest)
    rest = layers - last
    return _of([rest // others + (stage < rest % others) for stage in range(others)] + [last])


def stages_by_cost(layers: int, head: float, stages: int) -> int:
    """Stages that `split_by_cost` gives something to do; one more block follows the head."""
    share, stage = (layers + head) / stages, 0
    for end in (*range(1, layers + 1), layers + head, layers + head):
        stage += end > share * (stage + 1) * (1 + 1e-9) and stage < stages - 1
    return stage + 1


def _of(counts: list[int]) -> LayerSplit:
    stages = len(counts)
    if stages == 1:
        return LayerSplit(counts[0], 0, counts[0], 0, counts[0])
    between = range(1, stages - 1)
    live = max(between, key=lambda s: counts[s] * (stages - s), default=0)
    fullest = max((counts[s] for s in between), default=0)
    return LayerSplit(counts[0], fullest, counts[-1], live, counts[live] if stages > 2 else 0)


# What splitting backwards leaves of the bubble: (F + I - W) / (F + I + W) at 1 : 1.2 : 0.8, which
# the clock of schedules/ gives for zb_h1 and interleaved_zb within 0.02; zbv's is 0.2 of 1F1B's.
SPLIT_BUBBLE = 0.47
_COSTS = (1.0, 1.2, 0.8)
_CLOCKED = 16  # ranks up to which V-Half, which has no closed form, is timed


def share_left(schedule: str, ranks: int, microbatches: int) -> float:
    """What a schedule of split backwards leaves of the bubble of as many chunks; 0: not split."""
    if schedule == "v_half":
        return _v_half(min(ranks, _CLOCKED), microbatches * min(ranks, _CLOCKED) // ranks)
    return {"zb_h1": SPLIT_BUBBLE, "interleaved_zb": SPLIT_BUBBLE, "zbv": 0.4}.get(schedule, 0.0)


@functools.lru_cache(maxsize=256)
def _v_half(ranks: int, microbatches: int) -> float:
    """By the clock; what it idles between micro-batches grows with their number."""
    if ranks == 1:
        return 1.0
    idle = [_idle(ranks, count) for count in (2 * ranks, 3 * ranks)]
    more = (idle[1] - idle[0]) / ranks
    return max(idle[0] + more * (microbatches - 2 * ranks), 0.1) * 2 / (ranks - 1)


@functools.lru_cache(maxsize=64)
def _idle(ranks: int, microbatches: int) -> float:
    """Micro-batches' worth of a rank's time that V-Half takes beyond its compute."""
    made = make("v_half", ranks, microbatches, 2)
    _, ends = clock(made.orders, made.placement, Costs.even(made.placement, *_COSTS))
    return max(end[-1] for end in ends) / sum(_COSTS) - microbatches


def pipeline_time(
    first: Number,
    middle: Number,
    last: Number,
    total: Number,
    microbatches: Number,
    chunks: Number,
    split: Number = 0.0,
) -> Any:
    """Seconds from the first forward to the last backward of 1F1B, plain (chunks 1) or interleaved.

    Costs are a micro-batch's forward and backward on the first, the slowest middle and the last
    stage, and on all together: the slowest works all the time, and the others fill and drain.
    `split`: what split backwards leave of that (`share_left`), 0 where they are whole.
    """
    left = np.where(np.asarray(split) > 0, split, 1.0)
    slowest = np.maximum(np.maximum(first, middle), last)
    return microbatches * slowest + np.maximum(total - slowest, 0) / chunks * left
