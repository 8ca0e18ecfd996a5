"""Formats numbers, wraps sentences and aligns tables."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Sequence

LABEL = 11  # number of columns for the label in `labelled`


def si(value: float) -> str:
    """Formats a number with three digits, a blank and an SI prefix, as in "12.3 k" or "7.00 "."""
    if not math.isfinite(value):
        return f"{value} "
    for factor, prefix in ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= 0.9995 * factor:  # 999.6 is shown as 1.00 k, not as 1000
            return f"{three_digits(value / factor)} {prefix}"
    return f"{three_digits(value)} "


def byte_text(nbytes: float) -> str:
    """Formats a number of bytes with three digits and a decimal unit, as in 1.25 GB."""
    return f"{si(nbytes)}B" if nbytes >= 999.5 else f"{nbytes:.0f} B"


def loss_words(loss: float | None) -> str:
    """Formats a loss; None, for a text without a token to predict, becomes "none"."""
    return "none" if loss is None else f"{loss:.4f}"


def duration(seconds: float) -> str:
    """Formats a duration, as in 0:07, 12:34, 1:02:03 or 3d 04:05:06; "-:--" if it is not finite."""
    if not math.isfinite(seconds):
        return "-:--"
    minutes, second = divmod(max(0, round(seconds)), 60)
    hours, minute = divmod(minutes, 60)
    days, hour = divmod(hours, 24)
    if days:
        return f"{days}d {hour:02d}:{minute:02d}:{second:02d}"
    return f"{hour}:{minute:02d}:{second:02d}" if hour else f"{minute}:{second:02d}"


def ms(seconds: float) -> str:
    """Formats seconds as milliseconds with at least three digits; infinity becomes "no path"."""
    if math.isinf(seconds):
        return "no path"
    ms = seconds * 1e3
    return f"{ms:,.0f}" if ms >= 99.95 else f"{ms:.3g}"


def percent(fraction: float) -> str:
    """Formats a fraction as a percentage, as in "34.1 %"."""
    return f"{three_digits(100 * fraction)} %"


def three_digits(value: float) -> str:
    """Formats a number with up to two decimals, as in 0.12, 1.23, 12.3, 123 or 1234."""
    size = abs(value)
    return f"{value:.{0 if size >= 99.95 else 1 if size >= 9.995 else 2}f}"


def count(number: int, word: str) -> str:
    plural = f"{word}es" if word.endswith("ch") else f"{word}s"
    return f"{number:,} {word if number == 1 else plural}"


def shortened(group: Sequence[int]) -> str:
    """Formats numbers, as in "0 8 16"; shortens more than eight to the first four and the last."""
    shown = [*group[:4], "…", group[-1]] if len(group) > 8 else group
    return " ".join(map(str, shown))


def labelled(label: str, text: str, width: int) -> list[str]:
    return wrap(text, width, label.ljust(LABEL - 1) + " ", " " * LABEL)


def wrap(text: str, width: int, first: str = "", rest: str = "") -> list[str]:
    """Wraps text to lines of `width` columns; words such as tp-cp-pp-dp stay whole.

    `first` and `rest` are put before the first line and before the other lines.
    """
    return textwrap.wrap(
        text, width, initial_indent=first, subsequent_indent=rest, break_on_hyphens=False
    )


def aligned(rows: Sequence[Sequence[str]], align: Sequence[str]) -> list[str]:
    """Returns the rows as lines with aligned columns, two blanks apart.

    `align` has a sign for each column: < for left and > for right.
    """
    sizes = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(f"{cell:{a}{n}}" for cell, a, n in zip(row, align, sizes, strict=True)).rstrip()
        for row in rows
    ]
