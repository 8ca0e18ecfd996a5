"""Stacked bars, legends and tables of the page: plain HTML, nothing drawn by a script."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from html import escape

from parallel3d.plan.report.style import name_of


def bar(parts: Mapping[str, float], whole: float, unit: str, digits: int = 3) -> str:
    """A bar as long as the sum of `parts` is of `whole`; each part names itself and its size."""
    made = []
    for kind, value in parts.items():
        if value <= 0:
            continue
        tip = escape(f"{kind}: {value:.{digits}g} {unit}")
        made.append(
            f"<i style='width:{100 * value / whole:.2f}%;background:var(--{name_of(kind)})' "
            f"title='{tip}'></i>"
        )
    return f"<div class='bar'>{''.join(made)}</div>"


def legend(kinds: Iterable[tuple[str, str]]) -> str:
    """(kind, words) each with its colour."""
    items = [
        f"<span><i style='background:var(--{name_of(kind)})'></i>{escape(words)}</span>"
        for kind, words in kinds
    ]
    return f"<div class='legend'>{''.join(items)}</div>"


def table(
    head: Sequence[str], rows: Sequence[Sequence[str]], left: Sequence[int], best: int | None = None
) -> str:
    """A table of cells that are HTML already; columns in `left` are text, row `best` is marked."""

    def cells(tag: str, row: Sequence[str]) -> str:
        found = []
        for i, cell in enumerate(row):
            kind = " class='l'" if i in left else ""
            if tag == "td" and i == len(row) - 1 and i in left:
                kind = " class='l why'"
            found.append(f"<{tag}{kind}>{cell}</{tag}>")
        return "".join(found)

    body = "".join(
        f"<tr{' class=best' if i == best else ''}>{cells('td', row)}</tr>"
        for i, row in enumerate(rows)
    )
    top = cells("th", head)
    return (
        f"<div class='wide'><table><thead><tr>{top}</tr></thead><tbody>{body}</tbody></table></div>"
    )


def held(parts: Mapping[str, float], room: float, longest: float, unit: str) -> str:
    """A memory bar of `longest` GB, with a line where the GPU's room ends."""
    mark = f"<span class='room' style='left:{100 * room / longest:.2f}%'></span>"
    return f"<div class='held'>{bar(parts, longest, unit)}{mark}</div>"
