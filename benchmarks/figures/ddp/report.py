"""Writes numbers, tables and pictures into the run directory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.figures.ddp.measures import PARTS
from benchmarks.figures.ddp.nets import NETS
from benchmarks.figures.ddp.pictures import bars, curves
from parallel3d.metrics.jsonl import write_json
from parallel3d.text import three_digits

Rows = Sequence[Mapping[str, Any]]
Series = dict[str, list[float | None]]


def write_report(figures: Mapping[str, Any], folder: Path) -> None:
    """Writes ddp_figures.json, ddp_figures.md and figure_*.svg; prints the tables."""
    write_json(folder / "ddp_figures.json", dict(figures))
    lines = [f"{figures['ranks']} ranks, medians of {figures['steps']} steps; ms.", ""]
    for number, (title, below, key, series_of) in FIGURES.items():
        rows: Rows = figures[number.rstrip("*")]
        places = list(dict.fromkeys(row[key] for row in rows))
        if key in ("ranks", "ready"):
            places.sort()
        apart = "net" in rows[0] and (series_of != "net" or key == "ready")
        for net in NETS if apart else (None,):
            chosen = [row for row in rows if net is None or row["net"] == net]
            mine = [p for p in places if any(row[key] == p for row in chosen)]
            series = _series(chosen, key, mine, series_of)
            head = f"{title}, {net}" if net else title
            name = f"figure_{number}{f'_{net}' if net else ''}.svg"
            shown = [_word(place) for place in mine]
            if key == "ready":
                shown = [word if i % 8 == 0 else "" for i, word in enumerate(shown)]
            (folder / name).write_text(curves(head, below, shown, series))
            lines += [f"Figure {number}: {head}", ""]
            lines += _table(below, shown, series) if key != "ready" else [f"see {name}"]
            lines.append("")
    lines += _breakdown(figures["6"], folder)
    text = "\n".join(lines)
    (folder / "ddp_figures.md").write_text(text + "\n")
    print(f"{text}\n\n{folder / 'ddp_figures.md'}")


# number → title, label of the x axis, key of the x values, key of the series
FIGURES = {
    "2ab": ("All-reduce of 1 Mi parameters", "parameters a call", "parameters", "way"),
    "2cd": ("Share of gradients that are ready", "parameters ready", "ready", "net"),
    "7": ("Step by bucket size", "bucket_cap_mb", "bucket_cap_mb", "way"),
    "9": ("Step by number of ranks", "ranks", "ranks", "way"),
    "10": ("Mean step if every n-th step reduces", "n", "every", "net"),
    "12": ("Step by number of groups used in turn", "groups", "groups", "net"),
}


def _series(rows: Rows, key: str, places: Sequence[object], series_of: str) -> Series:
    """Returns milliseconds by series, in the order of the x axis."""
    found: Series = {}
    for name in dict.fromkeys(row[series_of] for row in rows):
        by_place = {
            row[key]: 1e3 * row.get("step", row.get("seconds"))
            for row in rows
            if row[series_of] == name
        }
        found[str(name)] = [by_place.get(place) for place in places]
    return found


def _word(place: object) -> str:
    if isinstance(place, int) and place >= 1 << 12:
        return f"{place / (1 << 20):.3g}Mi" if place >= 1 << 20 else f"{place >> 10}Ki"
    return f"{place:g}" if isinstance(place, (int, float)) else str(place)


def _table(below: str, places: Sequence[str], series: Series) -> list[str]:
    rows = [f"| {below} | {' | '.join(series)} |", "|---" * (1 + len(series)) + "|"]
    for i, place in enumerate(places):
        values = [of_series[i] for of_series in series.values()]
        cells = ["" if value is None else three_digits(value) for value in values]
        rows.append(f"| {place} | {' | '.join(cells)} |")
    return rows


def _breakdown(rows: Rows, folder: Path) -> list[str]:
    labelled = {
        f"{row['net']}, {row['way']}, {'overlapped' if row['overlap'] else 'at the end'}": {
            part: 1e3 * row[part] for part in PARTS
        }
        for row in rows
    }
    (folder / "figure_6.svg").write_text(bars("Where a step goes", labelled))
    lines = ["Figure 6: where a step goes", "", f"| | {' | '.join(PARTS)} | sum |"]
    lines.append("|---" * (len(PARTS) + 2) + "|")
    for label, parts in labelled.items():
        cells = [three_digits(ms) for ms in (*parts.values(), sum(parts.values()))]
        lines.append(f"| {label} | {' | '.join(cells)} |")
    return lines
