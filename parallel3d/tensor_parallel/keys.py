"""Keys of tensor-parallel layers and of the loss."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from parallel3d.config.conflicts import Conflict, NoneOf, OneOf
from parallel3d.config.values import (
    FREE,
    key,
)


@dataclass
class TensorParallelConfig:
    """Computation and communication of tensor-parallel layers; does not change results."""

    RESUME: ClassVar[str] = FREE
    attention: str = key(
        "heads",
        "heads: each rank attends with its own heads; gather_qk: q and k are all-gathered first "
        "and v stays local (equal results, more bytes: for comparison)",
        choices=("heads", "gather_qk"),
    )
    chunks: int = key(
        1,
        "pieces in which sp gathers and scatters the sequence, each while the GEMM of a "
        "neighbouring piece runs (asynchronous tensor parallelism); 1: all at once",
        minimum=1,
        tried=(2,),
    )


@dataclass
class LossConfig:
    """The training loss. Held-out losses are always plain cross-entropies."""

    label_smoothing: float = key(
        0.0,
        "share of each target spread evenly over the vocabulary (Szegedy et al. 2016 §7)",
        minimum=0,
        below=1,
        tried=(0.1,),
    )
    z_loss: float = key(
        0.0,
        "weight of the squared log of the softmax's sum (PaLM, Chowdhery et al. 2022 §5)",
        minimum=0,
        tried=(0.0001,),
    )
    chunk_tokens: int | None = key(
        None,
        "tokens whose logits exist at a time; null: on a GPU as many as fit into 2 GiB, on a CPU "
        "as many as fit into 64 MiB in fp32, at least 1024",
        minimum=1,
        resume=FREE,
    )


NEEDS_SP = Conflict(
    {"tensor_parallel.chunks": NoneOf(1), "sp": OneOf(False)},
    "{tensor_parallel.chunks} needs sp=true, as it cuts what sequence parallelism gathers and "
    "scatters",
    (("sp", True), ("tensor_parallel.chunks", 1)),
)
CONFLICTS = (
    NEEDS_SP,
    Conflict(
        {"tensor_parallel.attention": OneOf("gather_qk"), "compile": OneOf(True)},
        "{tensor_parallel.attention} is for comparison and is not compiled",
        (("tensor_parallel.attention", "heads"), ("compile", False)),
    ),
)
