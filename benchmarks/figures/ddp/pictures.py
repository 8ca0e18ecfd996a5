"""Draws curves and stacked bars as SVG."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from parallel3d.svg import DARK, GREY, PALETTE, Canvas
from parallel3d.text import three_digits

WIDTH, HEIGHT, LEFT, TOP = 560.0, 280.0, 80.0, 100.0
COLOURS = {
    "forward": "#d0d6dc",
    "backward": "#98a2ac",
    "exposed": "#2b8a3e",
    "optimizer": "#9c755f",
}


def curves(
    title: str, below: str, places: Sequence[str], series: Mapping[str, Sequence[float | None]]
) -> str:
    """Draws milliseconds at equally spaced x values; None leaves a value out.

    A series whose name ends in "priced" is drawn thin.
    """
    canvas = Canvas()
    canvas.text(24, 38, title, size=20, weight=600)
    highest = max(value for values in series.values() for value in values if value is not None)
    step = WIDTH / max(1, len(places) - 1)
    bottom = TOP + HEIGHT
    for quarter in range(5):
        y = bottom - quarter * HEIGHT / 4
        canvas.line(LEFT, y, LEFT + WIDTH, y, GREY, 0.6)
        canvas.text(24, y + 4, three_digits(highest * quarter / 4), size=12, fill=DARK)
    for i, place in enumerate(places):
        canvas.text(LEFT + i * step, bottom + 20, place, size=12, anchor="middle")
    canvas.text(24, TOP - 16, "ms", size=12, fill=DARK)
    canvas.text(LEFT + WIDTH / 2, bottom + 44, below, size=13, anchor="middle")
    x = LEFT
    for number, (name, values) in enumerate(series.items()):
        colour = PALETTE[number % len(PALETTE)][0]
        points = [
            (LEFT + i * step, bottom - HEIGHT * value / highest)
            for i, value in enumerate(values)
            if value is not None
        ]
        line = "M" + " L".join(f"{a:.1f} {b:.1f}" for a, b in points)
        marks = {"cls": "priced"} if name.endswith("priced") else {}
        canvas.path(line, colour, 1.2 if marks else 2.4, **marks)
        for a, b in points:
            canvas.rect(a - 3, b - 3, 6, 6, colour)
        canvas.rect(x, 62, 22, 6, colour)
        canvas.text(x + 28, 70, name, size=13)
        x += 28 + Canvas.measure(name, 13) + 20
    return canvas.svg(title)


def bars(title: str, rows: Mapping[str, Mapping[str, float]]) -> str:
    """Draws a bar for each row, stacked from its parts in milliseconds (figure 6 of the paper)."""
    canvas = Canvas()
    canvas.text(24, 38, title, size=20, weight=600)
    left = 40 + max(Canvas.measure(label, 13) for label in rows)
    longest = max(sum(parts[name] for name in COLOURS) for parts in rows.values())
    x = 24.0
    for name, colour in COLOURS.items():
        canvas.rect(x, 58, 22, 14, colour, GREY)
        words = "communication, exposed" if name == "exposed" else name
        canvas.text(x + 28, 70, words, size=13)
        x += 28 + Canvas.measure(words, 13) + 20
    y = TOP
    for label, parts in rows.items():
        canvas.text(24, y + 17, label, size=13)
        x = left
        for name, colour in COLOURS.items():
            width = WIDTH * parts[name] / longest
            words = three_digits(parts[name])
            canvas.rect(x, y, width, 24, colour, GREY, tip=f"{name}: {words} ms")
            if Canvas.measure(words, 11) + 6 < width:
                ink = "#ffffff" if name in ("exposed", "optimizer") else "#212529"
                canvas.text(x + width / 2, y + 16, words, size=11, anchor="middle", fill=ink)
            x += width
        y += 36
    canvas.text(left, y + 10, "mean over the ranks, ms", size=12, fill=DARK)
    return canvas.svg(title)
