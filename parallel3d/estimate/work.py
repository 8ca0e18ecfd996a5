"""One training step as the planner sees it: model, layout, software and hardware as numbers.

Every field is a number or an array: the planner's arithmetic is element-wise, so that one call
prices one layout, a table of measured runs, or all candidates of a search.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from parallel3d.config.schema import ModelConfig
from parallel3d.estimate.ops import Op, Widths, layer_ops
from parallel3d.schedules.costs import Costs
from parallel3d.schedules.schedule import make
from parallel3d.schedules.walk import walk

Number = NDArray[Any]
OF_EXPERTS = ("mlp.up", "mlp.activation", "mlp.down")  # each active expert of a token does these


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
    # software
    zero: Number
    recompute_norm: Number  # flags: without parts that others imply
    recompute_activation: Number
    recompute_attention: Number
    recompute_mlp: Number
    recompute_layer: Number
    recompute_end: Number  # what no part repeats: other frameworks repeat whole layers
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

    @property
    def tokens(self) -> Number:
        """Tokens of a micro-batch on one context rank."""
        return self.micro_batch * self.seq / self.cp

    @functools.cached_property
    def widths(self) -> Widths:
        """Sizes of a layer on one tensor rank."""
        key_heads = np.maximum(self.kv_heads / self.tp, 1)
        return Widths(
            self.hidden, self.heads * self.head_size / self.tp, key_heads * self.head_size,
            self.heads / self.tp, key_heads, self.ffn / self.tp, self.gated,
            np.where(self.sequence_parallel > 0, self.tp, 1.0), rope=1,
        )  # fmt: skip

    @functools.cached_property
    def ops(self) -> list[Op]:
        """Operations of a layer on one tensor rank."""
        return layer_ops(self.widths)

    def held(self, op: Op) -> Any:
        """Returns the elements of a GEMM's weights on a tensor rank, of all its experts."""
        local = np.where(self.experts > 1, self.experts / self.ep, 1.0)
        return op.inputs * op.outputs * (local if op.name in OF_EXPERTS else 1.0)

    @functools.cached_property
    def parameters(self) -> Any:
        """Elements of a layer's matrices on a tensor rank."""
        return sum(self.held(op) for op in self.ops if op.kind == "gemm")


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


# Time of a pipeline in closed form (tested against `schedules/walk.py`).

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
    stage, and on all together: the slowest works all the time, the others fill and drain.
    `split`: the fraction of the bubble that remains (`share_left`), 0 for whole backwards.
    """
    left = np.where(np.asarray(split) > 0, split, 1.0)
    slowest = np.maximum(np.maximum(first, middle), last)
    return microbatches * slowest + np.maximum(total - slowest, 0) / chunks * left
