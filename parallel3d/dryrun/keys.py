"""Declares the options of `parallel3d dryrun`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from parallel3d.config.values import FREE, key


@dataclass
class DryrunConfig:
    """Options of `parallel3d dryrun`."""

    RESUME: ClassVar[str] = FREE
    rank: int | None = key(
        None,
        "the rank to run; null: the first rank of the first, a middle and the last pipeline stage, "
        "with details of the one whose memory peaks highest",
        minimum=0,
    )
    reserve_gb: float = key(
        4.0,
        "memory of a GPU, in 1e9 B, that tensors cannot use: CUDA's context, NCCL's buffers, "
        "cuBLAS's workspace and fragmentation of the allocator",
        minimum=0,
    )
    json: str | None = key(None, "file for everything shown and more, as JSON", holds=Path)
