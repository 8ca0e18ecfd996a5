"""Options of `parallel3d topology`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from parallel3d.config.values import FREE, key


@dataclass
class TopologyConfig:
    """Options of `parallel3d topology`."""

    RESUME: ClassVar[str] = FREE
    rank: int = key(0, "the rank whose groups are highlighted", minimum=0)
    svg: str | None = key(None, "file for a picture of the cluster, as SVG", holds=Path)
    json: str | None = key(None, "file for everything shown, as JSON", holds=Path)
    search: int = key(5, "rows of the placement search to list; 0: no search", minimum=0)
