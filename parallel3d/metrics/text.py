"""Numbers and curves as short text in any terminal's encoding."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

BLOCKS = "▁▂▃▄▅▆▇█"
# For consoles without Unicode (LANG=C, some Slurm logs): a log line must never raise.
_ASCII = str.maketrans(
    dict(zip(BLOCKS, ".:-=+*#@", strict=True))
    | {"×": "x", "·": "-", "┤": "|", "│": "|", "└": "+", "─": "-", "…": "..."}
)


def si(value: float) -> str:
    """Formats three digits and a prefix: 12.3 k, 989 T; the blank before the unit is included."""
    if not math.isfinite(value):
        return f"{value} "
    for factor, prefix in ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= 0.9995 * factor:  # 999.6 is 1.00 k, never 1e+03
            return f"{three_digits(value / factor)} {prefix}"
    return f"{three_digits(value)} "


def loss_words(loss: float | None) -> str:
    """Formats a loss; None: no token to predict."""
    return "none" if loss is None else f"{loss:.4f}"


def aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """Returns the lines of a table: the first column to the left, the others to the right."""
    first, *widths = (max(map(len, column)) for column in zip(*rows, strict=True))
    return [
        name.ljust(first) + "".join(f"  {x:>{w}}" for x, w in zip(cells, widths, strict=True))
        for name, *cells in rows
    ]


def duration(seconds: float) -> str:
    """Formats a time: 0:07, 12:34, 1:02:03, 3d 04:05:06."""
    if not math.isfinite(seconds):
        return "-:--"
    minutes, second = divmod(max(0, round(seconds)), 60)
    hours, minute = divmod(minutes, 60)
    days, hour = divmod(hours, 24)
    if days:
        return f"{days}d {hour:02d}:{minute:02d}:{second:02d}"
    return f"{hour}:{minute:02d}:{second:02d}" if hour else f"{minute}:{second:02d}"


def percent(fraction: float) -> str:
    """Formats 34.1 %, with three digits also for small values."""
    return f"{three_digits(100 * fraction)} %"


def encodable(text: str, encoding: str) -> str:
    """Returns `text` in characters of `encoding`: look-alikes first, then question marks."""
    try:
        text.encode(encoding)
    except UnicodeEncodeError:
        return text.translate(_ASCII).encode(encoding, "replace").decode(encoding)
    return text


def sparkline(values: Sequence[float], width: int) -> str:
    rows = chart(values, width, 1)
    return rows[0] if rows else ""


def chart(values: Sequence[float], width: int, height: int) -> list[str]:
    """Draws finite `values` as `height` rows of at most `width` block characters, top row first.

    More values than columns are averaged. The scale runs from the smallest to the largest value,
    logarithmic if all are positive, so that the end of a loss curve is not flat.
    """
    columns = resample(values, width)
    if not columns or width < 1:
        return []
    if min(columns) > 0:
        columns = [math.log(v) for v in columns]
    low, span = min(columns), max(columns) - min(columns)
    steps = height * len(BLOCKS)
    levels = [1 + round((v - low) / span * (steps - 1)) if span > 0 else 1 for v in columns]
    rows = []
    for floor in range((height - 1) * len(BLOCKS), -1, -len(BLOCKS)):
        filled = (min(len(BLOCKS), level - floor) for level in levels)
        rows.append("".join(BLOCKS[n - 1] if n > 0 else " " for n in filled))
    return rows


class Curve:
    """Means of a long series in bounded memory, with O(1) a value."""

    def __init__(self, capacity: int = 512) -> None:
        """`capacity` (even): bins kept; when all are full, neighbours are merged."""
        self._capacity = capacity
        self._bins: list[float] = []
        self._per_bin = 1
        self._sum = 0.0
        self._count = 0

    def add(self, value: float | None) -> None:
        """Appends a value; None, NaN and infinities are left out."""
        if value is None or not math.isfinite(value):
            return
        self._sum += value
        self._count += 1
        if self._count < self._per_bin:
            return
        self._bins.append(self._sum / self._count)
        self._sum, self._count = 0.0, 0
        if len(self._bins) == self._capacity:
            pairs = zip(self._bins[::2], self._bins[1::2], strict=True)
            self._bins = [(a + b) / 2 for a, b in pairs]
            self._per_bin *= 2

    def values(self) -> list[float]:
        """Returns the bins' means, oldest first; the last bin may hold fewer values."""
        tail = [self._sum / self._count] if self._count else []
        return self._bins + tail


def resample(values: Sequence[float], width: int) -> list[float]:
    """Returns at most `width` means over stretches of equal length."""
    if len(values) <= width:
        return list(values)
    edges = [round(i * len(values) / width) for i in range(width + 1)]
    return [sum(values[a:b]) / (b - a) for a, b in pairwise(edges)]


def three_digits(value: float) -> str:
    """Formats 0.12, 1.23, 12.3, 123, 1234."""
    size = abs(value)
    return f"{value:.{0 if size >= 99.95 else 1 if size >= 9.995 else 2}f}"
