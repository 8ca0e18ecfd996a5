"""Draws the picture of `batch_sizes.py`: loss against tokens, and tokens to a loss by batch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

COLOURS = ("#1864ab", "#1098ad", "#2b8a3e", "#74b816", "#f08c00", "#d9480f", "#c2255c")
WIDTH, HEIGHT, TOP, BOTTOM = 960, 400, 56, 350


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


def picture(
    curves: Sequence[Line],
    reached: Sequence[Line],
    fits: Sequence[Line],
    predicted: tuple[float, float],
) -> str:
    """Draws the picture.

    `curves`: loss by thousands of tokens, one per batch. `reached`, `fits`: thousands of tokens to
    a loss by batch, measured and fitted, one per loss. `predicted`: the smallest and the largest
    measured noise scale.
    """
    parts = []
    x, y = Axis(4, 1500, 60, 470), Axis(2.4, 5.2, BOTTOM, TOP, is_log=False)
    parts += grid(x, y, (5, 10, 30, 100, 300, 1000), (2.5, 3, 3.5, 4, 4.5, 5), "k")
    parts.append(text(60, 30, "loss (nats per byte) against tokens read, by global batch", 14))
    for i, line in enumerate(curves):
        parts.append(path(line, x, y, COLOURS[i]))
        parts.append(
            f'<rect x="396" y="{TOP + 8 + 17 * i}" width="18" height="3" fill="{COLOURS[i]}"/>'
        )
        parts.append(text(420, TOP + 13 + 17 * i, line.name, 11))
    x, y = Axis(6, 700, 560, 920), Axis(10, 1500, BOTTOM, TOP)
    low, high = (x.at(min(max(b, x.low), x.high)) for b in predicted)
    parts.append(
        f'<rect x="{low:.1f}" y="{TOP}" width="{max(high - low, 2):.1f}" height="{BOTTOM - TOP}" '
        'fill="#ffe8cc"/>'
    )
    parts += grid(x, y, (8, 16, 32, 64, 128, 256, 512), (10, 20, 50, 100, 200, 500, 1000))
    parts.append(text(560, 30, "thousands of tokens to reach a loss, by global batch", 14))
    parts.append(text(low + 4, TOP + 14, "noise scale seen", 11))
    for i, (line, fit) in enumerate(zip(reached, fits, strict=True)):
        colour = COLOURS[2 * i]
        parts.append(path(fit, x, y, colour, 1.5))
        for a, b in line.points:
            parts.append(f'<circle cx="{x.at(a):.1f}" cy="{y.at(b):.1f}" r="4" fill="{colour}"/>')
        parts.append(f'<circle cx="800" cy="{TOP + 222 + 18 * i}" r="4" fill="{colour}"/>')
        parts.append(text(812, TOP + 226 + 18 * i, line.name, 11))
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" '
        'font-family="system-ui, sans-serif"><style>.grid{stroke:#dee2e6}</style>'
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="#fff"/>{"".join(parts)}</svg>\n'
    )
