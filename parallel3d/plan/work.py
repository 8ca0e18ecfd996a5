"""One training step as the planner sees it: a model, a layout, what the software does with them.

Every field is a number or an array of them: all of this room's arithmetic goes element by element,
so one call prices one layout, a table of measured runs, or a search's million candidates.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

import numpy as np
from numpy.typing import NDArray

from parallel3d.config.schema import ModelConfig

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
    window: Number  # keys that a query sees at most
    # layout
    tp: Number
    pp: Number
    dp: Number
    cp: Number
    chunks: Number  # model chunks a rank of the pipeline
    split: Number  # what backwards in two halves leave of the bubble (zero bubble), 0: whole ones
    micro_batch: Number
    microbatches: Number
    gpus_per_node: Number  # GPUs of one NVLink domain
    # stages: layers of the first, the fullest between and the last; see stages.py
    first: Number
    middle: Number
    last: Number
    live_stage: Number  # the stage between that holds most activations, by number
    live_layers: Number  # its layers
    # what the software does
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
    scatter_gather: Number  # messages of the pipeline cut by tp
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
    # names of constants: device and type, fabric, engine, as indices into their lists
    speed: Number
    fabric: Number
    engine: Number

    def take(self, rows: Number) -> StepWork:
        """Some rows of a table."""
        return StepWork(*(getattr(self, f.name)[rows] for f in fields(self)))

    def __len__(self) -> int:
        return len(self.layers)


def table(rows: list[dict[str, float]]) -> StepWork:
    """Rows of equal fields as one Work of arrays. Raises KeyError for a field that a row lacks."""
    names = [f.name for f in fields(StepWork)]
    return StepWork(*(np.array([row[name] for row in rows], dtype=float) for name in names))


def sizes_of_model(model: ModelConfig) -> dict[str, float]:
    """The fields of `Work` that a decoder without experts alone decides."""
    return {
        "layers": model.num_layers, "hidden": model.hidden_size,
        "heads": model.num_attention_heads, "kv_heads": model.kv_heads,
        "head_size": model.head_size, "ffn": model.ffn_size,
        "gated": float(model.activation == "swiglu"), "vocab": model.padded_vocab_size,
        "tied": float(model.tie_embeddings), "seq": model.seq_length, "window": np.inf, "cp": 1,
        "experts": 1, "active_experts": 1, "ep": 1,
    }  # fmt: skip
