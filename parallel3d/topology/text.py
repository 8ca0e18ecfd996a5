"""Numbers, sentences and tables as the topology's text has them."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Sequence

LABEL = 11  # columns of the words at the left


def byte_text(nbytes: float) -> str:
    """Formats `1.25 GB`: three digits, decimal units."""
    sizes = (1e18, 1e15, 1e12, 1e9, 1e6, 1e3)
    for unit, size in zip(("EB", "PB", "TB", "GB", "MB", "kB"), sizes, strict=True):
        if nbytes >= 0.9995 * size:
            value = nbytes / size
            digits = 2 if value < 9.995 else 1 if value < 99.95 else 0
            return f"{value:,.{digits}f} {unit}"
    return f"{nbytes:.0f} B"


def ms(seconds: float) -> str:
    """Formats milliseconds in three digits or more; infinite: there is no path."""
    if math.isinf(seconds):
        return "no path"
    ms = seconds * 1e3
    return f"{ms:,.0f}" if ms >= 99.95 else f"{ms:.3g}"


def percent(share: float) -> str:
    """Formats whole percents, but with two digits near 0 % and 100 %."""
    if 0 < share < 0.005 or 0.995 <= share < 1:
        return f"{100 * share:.2f} %"
    return f"{100 * share:.0f} %"


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


def aligned(rows: Sequence[Sequence[str]], align: str) -> list[str]:
    """Aligns columns, each by its character of `align` (< or >), two blanks apart."""
    sizes = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(f"{cell:{a}{n}}" for cell, a, n in zip(row, align, sizes, strict=True)).rstrip()
        for row in rows
    ]
