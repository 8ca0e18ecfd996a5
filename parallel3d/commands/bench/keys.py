"""Declares the options of `parallel3d bench comm`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from parallel3d.config.values import FREE, key
from parallel3d.faults.keys import OUTLIER


@dataclass
class BenchConfig:
    """Options of `parallel3d bench comm`."""

    RESUME: ClassVar[str] = FREE
    sizes: list[int] = key([4096, 262144, 4194304], "bytes of each message")
    iterations: int = key(5, "number of timed calls of each row; the median counts", minimum=1)
    warmup: int = key(2, "number of untimed calls before the timed ones", minimum=0)
    budget_s: float = key(60.0, "time limit in seconds; iterations are reduced to meet it", above=0)
    outlier: float = key(
        OUTLIER, "report pairs and ranks that are slower than the median by this factor", above=1
    )
    json: str | None = key(
        None, "file for all rows; null: bench.json in the run directory", holds=Path
    )
