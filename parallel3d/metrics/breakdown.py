"""Breakdown of a step's time over all ranks, in `comm.step_timer`'s kinds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from parallel3d.comm import collectives
from parallel3d.comm.operation_log import blocking
from parallel3d.comm.process_groups import ProcessGroups
from parallel3d.comm.step_timer import KINDS, StepTimer
from parallel3d.topology.layout import Coordinates


@dataclass(frozen=True)
class RankTimes:
    """Mean seconds a step of one rank by kind, and the rank's coordinates."""

    rank: int
    place: Coordinates
    seconds: Mapping[str, float]

    @property
    def step(self) -> float:
        """Seconds of the whole step."""
        return sum(self.seconds.values())


def times_of_ranks(
    timer: StepTimer, groups: ProcessGroups, device: torch.device
) -> list[RankTimes]:
    """Returns the mean times of the steps so far of every rank in rank order; collective."""
    mine = torch.tensor([list(timer.means().values())], dtype=torch.float64)
    everyone = collectives.all_gather(mine.to(device), groups.world)
    with blocking(groups.world):
        rows = everyone.tolist()
    return [
        RankTimes(rank, groups.layout.coordinates(rank), dict(zip(KINDS, row, strict=True)))
        for rank, row in enumerate(rows)
    ]


def by_stage(rows: Sequence[RankTimes]) -> dict[int, dict[str, float]]:
    stages: dict[int, list[Mapping[str, float]]] = {}
    for row in sorted(rows, key=lambda row: row.place.pp):
        stages.setdefault(row.place.pp, []).append(row.seconds)
    return {
        stage: {kind: sum(times[kind] for times in ranks) / len(ranks) for kind in KINDS}
        for stage, ranks in stages.items()
    }


def summary_of(rows: Sequence[RankTimes]) -> dict[str, Any]:
    """Returns the entry of summary.json: mean seconds a step by kind, of every rank."""
    return {
        "unit": "seconds a step, mean",
        "ranks": [
            {"rank": row.rank, **row.place._asdict(), **row.seconds, "step": row.step}
            for row in rows
        ],
    }
