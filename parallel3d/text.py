"""Numbers, sentences and tables as text."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Sequence

LABEL = 11  # width of the label on the left


def si(value: float) -> str:
    """Formats three digits and a prefix: 12.3 k, 989 T; the blank before the unit is included."""
    if not math.isfinite(value):
        return f"{value} "
    for factor, prefix in ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= 0.9995 * factor:  # 999.6 is 1.00 k, never 1e+03
            return f"{three_digits(value / factor)} {prefix}"
    return f"{three_digits(value)} "


def byte_text(nbytes: float) -> str:
    """Formats `1.25 GB`: three digits, decimal units."""
    return f"{si(nbytes)}B" if nbytes >= 999.5 else f"{nbytes:.0f} B"


def loss_words(loss: float | None) -> str:
    """Formats a loss; None: there was no token to predict."""
    return "none" if loss is None else f"{loss:.4f}"


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


def ms(seconds: float) -> str:
    """Formats milliseconds with three digits or more; "no path" for infinity."""
    if math.isinf(seconds):
        return "no path"
    ms = seconds * 1e3
    return f"{ms:,.0f}" if ms >= 99.95 else f"{ms:.3g}"


def percent(fraction: float) -> str:
    """Formats 34.1 %, with three digits for small values too."""
    return f"{three_digits(100 * fraction)} %"


def three_digits(value: float) -> str:
    """Formats 0.12, 1.23, 12.3, 123, 1234."""
    size = abs(value)
    return f"{value:.{0 if size >= 99.95 else 1 if size >= 9.995 else 2}f}"


def count(number: int, word: str) -> str:
    plural = f"{word}es" if word.endswith("ch") else f"{word}s"
    return f"{number:,} {word if number == 1 else plural}"


def shortened(group: Sequence[int]) -> str:
    """Formats `0 8 16 … 56`."""
    shown = [*group[:4], "…", group[-1]] if len(group) > 8 else group
    return " ".join(map(str, shown))


def labelled(label: str, text: str, width: int) -> list[str]:
    return wrap(text, width, label.ljust(LABEL - 1) + " ", " " * LABEL)


def wrap(text: str, width: int, first: str = "", rest: str = "") -> list[str]:
    """Wraps to `width` columns after the indents; words such as tp-cp-pp-dp stay whole."""
    return textwrap.wrap(
        text, width, initial_indent=first, subsequent_indent=rest, break_on_hyphens=False
    )


def aligned(rows: Sequence[Sequence[str]], align: Sequence[str]) -> list[str]:
    """Aligns columns, each by its sign in `align` (< or >), two blanks apart."""
    sizes = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(f"{cell:{a}{n}}" for cell, a, n in zip(row, align, sizes, strict=True)).rstrip()
        for row in rows
    ]
