"""One training step as the planner sees it: model, layout, software and hardware as numbers.

Every field is a number or an array: the planner's arithmetic is element-wise, so that one call
prices one layout, a table of measured runs, or all candidates of a search.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
from numpy.typing import NDArray

from parallel3d.config.schema import ModelConfig
from parallel3d.schedules.costs import Costs
from parallel3d.schedules.schedule import make
from parallel3d.schedules.walk import walk

Number = NDArray[Any]


@dataclass(frozen=True)
class StepWork:
    """Sizes are of the whole model and the whole layout; flags are 0 or 1."""

    layers: Number
    hidden: Number
    heads: Number
    kv_heads: Number
    head_size: Number
    ffn: Number  # of one expert, where there are experts
    gated: Number  # three matrices in the MLP instead of two
    vocab: Number
    tied: Number
    seq: Number
    window: Number  # the most keys that a query sees
    # layout
    tp: Number
    pp: Number
    dp: Number
    cp: Number
    chunks: Number  # model chunks a rank of the pipeline
    split: Number  # fraction of the bubble that split backwards leave (zero bubble); 0: whole ones
    micro_batch: Number
    microbatches: Number
    gpus_per_node: Number  # GPUs of one NVLink domain
    # stages: layers of the first, the fullest between, and the last
    first: Number
    middle: Number
    last: Number
    live_stage: Number  # index of the stage between that holds most activations
    live_layers: Number  # its layers
    # software
    zero: Number
    full_recompute: Number
    recompute_attention: Number
    recompute_norm: Number
    recompute_activation: Number
    recompute_mlp: Number  # up and the activation
    sequence_parallel: Number
    flash: Number
    dropout: Number
    parallel_block: Number  # attention and MLP from one norm: half of tp's collectives
    overlap_tp: Number
    overlap_pp: Number
    overlap_dp: Number
    scatter_gather: Number  # Megatron's scatter_gather_tensors_in_pipeline
    graph: Number  # kernels launched as one graph
    compiled: Number  # element-wise operations in few kernels
    fp8: Number
    experts: Number
    active_experts: Number
    ep: Number
    grad_bytes: Number
    # hardware
    peak: Number  # FLOP/s of the type of the GEMMs
    peak_attention: Number  # of the type of attention
    memory_bytes: Number
    memory_rate: Number  # bytes/s
    units: Number
    link_rate: Number  # bytes/s one way
    fabric_rate: Number  # bytes/s one way of one GPU's share
    # Constants by device and type, fabric, engine: indices into the lists of `rates`.
    speed: Number
    fabric: Number
    engine: Number

    def take(self, rows: Number) -> StepWork:
        """Returns some rows of a table."""
        return StepWork(*(getattr(self, f.name)[rows] for f in fields(self)))

    def __len__(self) -> int:
        return len(self.layers)


def table(rows: list[dict[str, float]]) -> StepWork:
    """Converts rows to one `StepWork` of arrays. Raises KeyError for a field that a row lacks."""
    names = [f.name for f in fields(StepWork)]
    return StepWork(*(np.array([row[name] for row in rows], dtype=float) for name in names))


def sizes_of_model(model: ModelConfig) -> dict[str, float]:
    """Returns the fields of `StepWork` that the model alone decides (no experts)."""
    return {
        "layers": model.num_layers, "hidden": model.hidden_size,
        "heads": model.num_attention_heads, "kv_heads": model.kv_heads,
        "head_size": model.head_size, "ffn": model.ffn_size,
        "gated": float(model.activation == "swiglu"), "vocab": model.padded_vocab_size,
        "tied": float(model.tie_embeddings), "seq": model.seq_length, "window": np.inf, "cp": 1,
        "experts": 1, "active_experts": 1, "ep": 1,
    }  # fmt: skip


# Layers of a stage, and the time of a pipeline in closed form (tested against
# `schedules/walk.py`).


@dataclass(frozen=True)
class LayerSplit:
    """Layers of the first stage, the fullest between and the last; and the index and layers of the
    stage between with most activations (stage s of p holds up to p - s micro-batches)."""

    first: int
    middle: int
    last: int
    live_stage: int
    live_layers: int


def split_evenly(layers: int, stages: int, ends: bool = False) -> LayerSplit:
    """Splits evenly, the rest to the first stages; `ends`: embedding and head count as a layer."""
    slots = layers + 2 * ends
    counts = [slots // stages + (stage < slots % stages) for stage in range(stages)]
    if ends and stages > 1:
        counts[0], counts[-1] = max(counts[0] - 1, 0), max(counts[-1] - 1, 0)
    elif ends:
        counts = [layers]
    return _of(counts)


def split_by_cost(layers: int, head: float, stages: int) -> LayerSplit:
    """Starts a new stage as soon as a block ends beyond the stage's share of all costs.

    `head` is the head's cost in layers. A block moves on by at most one stage, so a head larger
    than a share leaves the last stages empty.
    """
    share = (layers + head) / stages
    counts = [0] * stages
    stage = 0
    for block in range(1, layers + 1):
        stage += block > share * (stage + 1) * (1 + 1e-9) and stage < stages - 1
        counts[stage] += 1
    stage += layers + head > share * (stage + 1) * (1 + 1e-9) and stage < stages - 1
    counts[stage:] = [counts[stage]]  # the stages after the head are empty
    return _of(counts)


def split_balanced(layers: int, head: float, stages: int) -> LayerSplit:
    """Minimises the slowest stage, the last with the head (its cost in layers); none is empty."""
    if stages == 1:
        return split_evenly(layers, 1)
    others = stages - 1

    def slowest(mine: int) -> tuple[float, int]:
        return max(-(-(layers - mine) // others), mine + head), -mine

    last = min(range(1, layers - others + 1), key=slowest)
    rest = layers - last
    return _of([rest // others + (stage < rest % others) for stage in range(others)] + [last])


def stages_by_cost(layers: int, head: float, stages: int) -> int:
    """Returns the non-empty stages of `split_by_cost`; one more block follows the head."""
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


# Bubble left by split backwards: (F + I - W) / (F + I + W) at 1 : 1.2 : 0.8, which simulated zb_h1
# and interleaved_zb match within 0.02; zbv's is 0.2 of 1F1B's.
SPLIT_BUBBLE = 0.47
_COSTS = (1.0, 1.2, 0.8)
_CLOCKED = 16  # the most ranks for which V-Half, without a closed form, is simulated


def share_left(schedule: str, ranks: int, microbatches: int) -> float:
    """Returns the fraction of the bubble that split backwards leave; 0: the schedule has none."""
    if schedule == "v_half":
        return _v_half(min(ranks, _CLOCKED), microbatches * min(ranks, _CLOCKED) // ranks)
    return {"zb_h1": SPLIT_BUBBLE, "interleaved_zb": SPLIT_BUBBLE, "zbv": 0.4}.get(schedule, 0.0)


@functools.lru_cache(maxsize=256)
def _v_half(ranks: int, microbatches: int) -> float:
    """Simulates V-Half; its idle time between micro-batches grows linearly with their number."""
    if ranks == 1:
        return 1.0
    few, many = (_idle(ranks, count) for count in (2 * ranks, 3 * ranks))
    idle = few + (many - few) / ranks * (microbatches - 2 * ranks)
    return max(idle, 0.1) * 2 / (ranks - 1)


@functools.lru_cache(maxsize=64)
def _idle(ranks: int, microbatches: int) -> float:
    """Returns V-Half's time beyond compute, in micro-batches."""
    made = make("v_half", ranks, microbatches, 2)
    found = walk(made.orders, made.placement, Costs.even(made.placement, *_COSTS)).ended()
    return found.seconds / sum(_COSTS) - microbatches


def pipeline_time(
    first: Number,
    middle: Number,
    last: Number,
    total: Number,
    microbatches: Number,
    chunks: Number,
    split: Number | float = 0.0,
) -> Any:
    """Returns seconds of 1F1B's step, plain (chunks 1) or interleaved.

    Costs are a micro-batch's forward and backward on the first, the slowest middle and the last
    stage,
    and on all together: the slowest works all the time, the others fill and drain.
    `split`: the fraction of the bubble that remains (`share_left`), 0 for whole backwards.
    """
    left = np.where(np.asarray(split) > 0, split, 1.0)
    slowest = np.maximum(np.maximum(first, middle), last)
    return microbatches * slowest + np.maximum(total - slowest, 0) / chunks * left
