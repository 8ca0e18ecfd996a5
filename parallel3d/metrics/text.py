"""Numbers as short text."""

from __future__ import annotations

import math


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


def three_digits(value: float) -> str:
    """Formats 0.12, 1.23, 12.3, 123, 1234."""
    size = abs(value)
    return f"{value:.{0 if size >= 99.95 else 1 if size >= 9.995 else 2}f}"
