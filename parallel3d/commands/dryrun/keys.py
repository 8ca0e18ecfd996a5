"""Options of `parallel3d dryrun`."""

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
        "the rank that is played; null: the first of the first, a middle and the last pipeline "
        "stage, with details of the one whose memory peaks highest",
        minimum=0,
    )
    reserve_gb: float = key(
        4.0,
        "memory of a GPU, in 1e9 B, that no tensor gets: CUDA's context, NCCL's buffers, cuBLAS's "
        "workspace and what the allocator loses to fragments",
        minimum=0,
    )
    json: str | None = key(None, "file for everything shown and more, as JSON", holds=Path)
