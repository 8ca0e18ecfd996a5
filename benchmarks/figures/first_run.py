"""Draws the curve of a first run: training and held-out loss over its steps.

./launch/local.sh tp=2 pp=2 run=first
python -m benchmarks.figures.first_run runs/first/metrics.jsonl docs/first_run.svg
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

COLOURS = ("#1864ab", "#1098ad", "#2b8a3e", "#74b816", "#f08c00", "#d9480f", "#c2255c")
WIDTH, HEIGHT, TOP, BOTTOM = 960, 400, 56, 350
NAMES = {"loss": "training loss of each step", "eval_loss": "held-out loss"}


class Axis(NamedTuple):
    """Maps values from `low` to `high` to pixels from `first` to `last`."""

    low: float
    high: float
    first: float
    last: float
    is_log: bool = True

    def at(self, value: float) -> float:
        low, high, value = (
            (math.log(v) if self.is_log else v) for v in (self.low, self.high, value)
        )
        return self.first + (value - low) / (high - low) * (self.last - self.first)


class Line(NamedTuple):
    """A curve: its name and its points (x, y)."""

    name: str
    points: Sequence[tuple[float, float]]


def path(line: Line, x: Axis, y: Axis, colour: str, width: float = 2) -> str:
    inside = [(a, b) for a, b in line.points if x.low <= a <= x.high and y.low <= b <= y.high]
    points = " ".join(f"{x.at(a):.1f},{y.at(b):.1f}" for a, b in inside)
    return f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="{width}"/>'


def text(x: float, y: float, words: str, size: int = 12, anchor: str = "start") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size}" text-anchor="{anchor}">{words}</text>'


def grid(x: Axis, y: Axis, xs: Sequence[float], ys: Sequence[float], unit: str = "") -> list[str]:
    parts = []
    for value in xs:
        at = x.at(value)
        parts.append(f'<line x1="{at:.1f}" y1="{TOP}" x2="{at:.1f}" y2="{BOTTOM}" class="grid"/>')
        parts.append(text(at, BOTTOM + 18, f"{value:g}{unit}", 11, "middle"))
    for value in ys:
        at = y.at(value)
        parts.append(
            f'<line x1="{x.first}" y1="{at:.1f}" x2="{x.last}" y2="{at:.1f}" class="grid"/>'
        )
        parts.append(text(x.first - 6, at + 4, f"{value:g}", 11, "end"))
    return parts


def curves(metrics: Path) -> list[Line]:
    """Reads the curves of `NAMES` from a run's metrics.jsonl."""
    rows = [json.loads(line) for line in metrics.read_text(encoding="utf-8").splitlines()]
    return [
        Line(name, [(row["step"], row[key]) for row in rows if key in row])
        for key, name in NAMES.items()
    ]


def picture(train: Line, held_out: Line) -> str:
    """Draws both losses in nats per token; the vertical axis is logarithmic."""
    steps = train.points[-1][0]
    x = Axis(0, steps, 60, 930, is_log=False)
    y = Axis(1.7, 6, BOTTOM, TOP)
    marks = [steps * part / 6 for part in range(7)]
    parts = grid(x, y, marks, (2, 2.5, 3, 4, 5))
    parts.append(text(60, 30, "loss (nats per byte) by step, tp=2 pp=2 on two CPU cores", 14))
    for place, (line, colour) in enumerate(((train, COLOURS[0]), (held_out, COLOURS[5]))):
        parts.append(path(line, x, y, colour))
        at = TOP + 20 + 20 * place
        parts.append(f'<rect x="640" y="{at - 5}" width="18" height="3" fill="{colour}"/>')
        parts.append(text(666, at, line.name))
    for step, loss in held_out.points:
        place_of = f'cx="{x.at(step):.1f}" cy="{y.at(loss):.1f}"'
        parts.append(f'<circle {place_of} r="4" fill="{COLOURS[5]}"/>')
    last = held_out.points[-1][1]
    parts.append(text(x.at(steps), y.at(last) + 18, f"{last:.2f}", 12, "end"))
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" '
        'font-family="system-ui, sans-serif"><style>.grid{stroke:#dee2e6}</style>'
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="#fff"/>{"".join(parts)}</svg>\n'
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("metrics", type=Path, help="the run's metrics.jsonl")
    parser.add_argument("svg", type=Path, help="the picture to write")
    given = parser.parse_args()
    train, held_out = curves(given.metrics)
    given.svg.write_text(picture(train, held_out), encoding="utf-8")


if __name__ == "__main__":
    main()
