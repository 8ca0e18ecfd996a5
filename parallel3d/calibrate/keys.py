"""Declares the options of `parallel3d calibrate`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from parallel3d.config.values import FREE, key


@dataclass
class CalibrateConfig:
    """Options of `parallel3d calibrate`, which measures in the type of `precision`."""

    RESUME: ClassVar[str] = FREE
    file: str = key("calibrated.yaml", "the cluster file to write", holds=Path)
    replace: bool = key(False, "whether an existing file may be overwritten")
    ranks: int | None = key(
        None,
        "largest number of ranks in a group, a power of two; null: one per GPU, or four per core, "
        "but from 8 to 64",
        minimum=1,
        maximum=1024,
    )
    passes: int = key(3, "how many times each rate is measured", minimum=1)
