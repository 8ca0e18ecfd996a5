"""Breakdown of a step's time over all ranks, in `comm.step_timer`'s kinds, and its picture."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

import torch

from parallel3d.comm.exchange import all_gather_json
from parallel3d.comm.process_groups import ProcessGroups
from parallel3d.comm.step_timer import KINDS, StepTimer
from parallel3d.metrics.text import three_digits
from parallel3d.topology.layout import Coordinates
from parallel3d.topology.svg import GREY, GROUPS, NVLINK, RAILS, Canvas


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

    def row(self) -> dict[str, Any]:
        """Returns the rank's entry in summary.json."""
        return {"rank": self.rank, **self.place._asdict(), **self.seconds, "step": self.step}


def times_of_ranks(
    timer: StepTimer, groups: ProcessGroups, device: torch.device
) -> list[RankTimes]:
    """Returns the mean times of the steps so far of every rank in rank order; collective."""
    everyone = all_gather_json(timer.means(), groups.world.handle, device)
    return [RankTimes(r, groups.layout.coordinates(r), t) for r, t in enumerate(everyone)]


def by_stage(rows: Sequence[RankTimes]) -> dict[int, dict[str, float]]:
    """Returns each stage's times by kind, means over its ranks."""
    stages: defaultdict[int, list[Mapping[str, float]]] = defaultdict(list)
    for row in sorted(rows, key=lambda row: row.place.pp):
        stages[row.place.pp].append(row.seconds)
    return {
        stage: {kind: fmean(times[kind] for times in ranks) for kind in KINDS}
        for stage, ranks in stages.items()
    }


# The picture: stacked bars rank by rank, as in figure 6 of Li et al. 2020


MAX_BARS = 16  # of more ranks a bar is the mean of a pipeline stage
LENGTH, HEIGHT, GAP = 640.0, 24.0, 10.0  # of a bar; between bars

# Compute in greys, communication in its dimension's colour, waiting hollow.
COLOURS = {
    "forward": "#d0d6dc",
    "backward": "#98a2ac",
    **GROUPS,
    "model": RAILS[6][0],
    "optimizer": RAILS[7][0],
    "data": RAILS[5][0],
    "idle": "#ffffff",
}
DARK = (*GROUPS, "model", "optimizer")
LABELS = {"model": "tied table, loss, norm", "optimizer": "optimizer and rest"}
LABELS |= {kind: f"{kind}, exposed" for kind in GROUPS}


def breakdown_svg(rows: Sequence[RankTimes], title: str) -> str:
    """Draws a bar for each rank, or for each stage where there are more than `MAX_BARS` ranks."""
    canvas = Canvas()
    has_cp = any(row.place.cp for row in rows)
    bars = [(f"rank {row.rank} ({row.place.named(has_cp)})", row.seconds) for row in rows]
    if len(rows) > MAX_BARS:
        bars = [(f"stage {stage}, mean", times) for stage, times in by_stage(rows).items()]
        bars = bars[:: -(-len(bars) // MAX_BARS)]  # every n-th stage of a deep pipeline
    used = [kind for kind in KINDS if any(times[kind] for _, times in bars)]
    longest = max(sum(times.values()) for _, times in bars)
    left = 24 + max(Canvas.measure(label, 13) for label, _ in bars) + 12
    canvas.text(24, 38, title, size=20, weight=600)
    canvas.text(24, 62, "mean over the steps; ms", size=13, fill=NVLINK)
    top = _legend(canvas, used, 92) + 30
    scale = LENGTH / longest if longest else 0.0
    for label, times in bars:
        canvas.text(24, top + 0.7 * HEIGHT, label, size=13)
        _bar(canvas, {kind: times[kind] for kind in used}, left, top, scale)
        top += HEIGHT + GAP
    return canvas.svg(title)


def _legend(canvas: Canvas, used: list[str], y: float) -> float:
    x = 24.0
    for kind in used:
        label = LABELS.get(kind, kind)
        width = 30 + Canvas.measure(label, 13) + 18
        if x + width > 24 + LENGTH + 200:
            x, y = 24.0, y + 26
        _rect(canvas, kind, x, y - 12, 22, 16)
        canvas.text(x + 30, y + 1, label, size=13)
        x += width
    return y


def _bar(canvas: Canvas, times: dict[str, float], x: float, y: float, scale: float) -> None:
    for kind, seconds in times.items():
        width = seconds * scale
        if width < 0.05:
            continue
        shown = three_digits(1e3 * seconds)
        _rect(canvas, kind, x, y, width, HEIGHT, tip=f"{LABELS.get(kind, kind)}: {shown} ms")
        if Canvas.measure(shown, 11) + 6 < width:
            ink = "#ffffff" if kind in DARK else "#212529"
            middle = x + width / 2
            canvas.text(middle, y + 0.66 * HEIGHT, shown, size=11, anchor="middle", fill=ink)
        x += width
    canvas.text(
        x + 8, y + 0.7 * HEIGHT, three_digits(1e3 * sum(times.values())), size=13, weight=600
    )


def _rect(
    canvas: Canvas, kind: str, x: float, y: float, width: float, height: float, tip: str = ""
) -> None:
    edge, dash = (GREY, "3 3") if kind == "idle" else ("", "")
    canvas.rect(x, y, width, height, COLOURS[kind], edge, dash=dash, cls=kind, tip=tip)
