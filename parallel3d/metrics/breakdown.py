"""Where the time of a step goes, of all ranks: `comm.clock` tells it of one, in nine kinds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from parallel3d.comm.clock import KINDS
from parallel3d.topology.layout import Coordinates


@dataclass(frozen=True)
class RankTimes:
    """Mean seconds a step of one rank by kind, and its place in the layout."""

    rank: int
    place: Coordinates
    seconds: Mapping[str, float]

    @property
    def step(self) -> float:
        """Seconds of the whole step."""
        return sum(self.seconds.values())


def by_stage(rows: Sequence[RankTimes]) -> dict[int, dict[str, float]]:
    """Pipeline stage → mean seconds by kind over its ranks, in order."""
    stages: dict[int, list[Mapping[str, float]]] = {}
    for row in sorted(rows, key=lambda row: row.place.pp):
        stages.setdefault(row.place.pp, []).append(row.seconds)
    return {
        stage: {kind: sum(times[kind] for times in ranks) / len(ranks) for kind in KINDS}
        for stage, ranks in stages.items()
    }


def summary_of(rows: Sequence[RankTimes]) -> dict[str, Any]:
    """What summary.json says: mean seconds a step by kind, of every rank."""
    return {
        "unit": "seconds a step, mean",
        "ranks": [
            {"rank": row.rank, **row.place._asdict(), **row.seconds, "step": row.step}
            for row in rows
        ],
    }
