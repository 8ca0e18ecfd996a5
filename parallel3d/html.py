"""Writes self-contained HTML pages with sections, tables and stacked bars."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from html import escape

SHORT = 16  # cells with more letters than this may wrap
STYLE = """
:root{color-scheme:light dark} body{font:15px/1.5 system-ui,sans-serif;margin:0}
main{max-width:1180px;margin:0 auto;padding:24px} h1{font-size:26px;margin:0} h2{font-size:19px}
section{border-top:1px solid #8886;margin-top:28px} pre{background:#8882;padding:12px;
border-left:4px solid #3b7dc4;white-space:pre-wrap} .wide{overflow-x:auto}
table{border-collapse:collapse;width:100%;font-variant-numeric:tabular-nums}
th,td{text-align:left;padding:6px;border-bottom:1px solid #8884;font-size:14px}
td{white-space:nowrap} td.words{white-space:normal;overflow-wrap:break-word}
.bar{position:relative;display:flex;height:18px;min-width:120px}
.big .bar{height:40px;margin:12px 0} .bar i{display:block} .bar u{position:absolute;top:-3px;
bottom:-3px;width:2px;background:#d33} .key i{display:inline-block;width:12px;height:12px;
margin:0 6px 0 14px} .paper{background:#fff;padding:8px;overflow:auto;max-height:760px}
.paper svg{max-width:100%;height:auto}
"""


def whole_page(mark: str, title: str, body: str, head: str = "") -> str:
    """Returns an HTML page.

    Args:
        mark: an attribute of <html> that names the writer of the page.
        title, body: the page's title and content, already in HTML.
        head: more HTML for <head>.
    """
    return f"""<!DOCTYPE html><html lang='en' {mark}><head><meta charset='utf-8'>
<meta name='viewport' content='width=device-width,initial-scale=1'>
<title>{title}</title><style>{STYLE}</style>{head}</head><body><main>{body}</main></body></html>
"""


def section(heading: str, words: str, *parts: str) -> str:
    """Returns a section; `heading` and `words` are plain text, `parts` are already in HTML."""
    said = f"<p>{escape(words)}</p>" if words else ""
    return f"<section><h2>{escape(heading)}</h2>{said}{''.join(parts)}</section>"


def stacked_bar(
    parts: Mapping[str, float], whole: float, unit: str, limit: float | None = None
) -> str:
    """Returns a bar with a segment for each of `parts`; a length of `whole` is the full width.

    A line marks `limit`, unless it is None.
    """
    made = "".join(
        f"<i style='width:{100 * value / whole:.2f}%;background:{colour(place)}' "
        f"title='{escape(f'{kind}: {value:.3g} {unit}')}'></i>"
        for place, (kind, value) in enumerate(parts.items())
        if value > 0
    )
    line = "" if limit is None else f"<u style='left:{100 * limit / whole:.2f}%'></u>"
    return f"<div class='bar'>{made}{line}</div>"


def bar_key(kinds: Iterable[str]) -> str:
    """Returns a legend of the colours that `stacked_bar` gives to these parts."""
    named = enumerate(map(escape, kinds))
    items = (f"<i style='background:{colour(place)}'></i>{kind}" for place, kind in named)
    return f"<div class='key'>{''.join(items)}</div>"


def colour(place: int) -> str:
    """Returns the colour of number `place`; the hues of successive colours differ by 137.5°."""
    return f"hsl({(210 + 137.5 * place) % 360:.0f} 50% 48%)"


def html_table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Returns a table; the cells of `head` and `rows` are already in HTML, and long ones wrap."""
    top = "".join(f"<th>{cell}</th>" for cell in head)
    body = "".join(f"<tr>{''.join(map(_cell, row))}</tr>" for row in rows)
    return f"<div class='wide'><table><tr>{top}</tr>{body}</table></div>"


def _cell(cell: str) -> str:
    """Returns a table cell; one with up to `SHORT` letters stays on one line."""
    letters = len(re.sub("<[^>]*>", "", cell))
    return f"<td class='words'>{cell}</td>" if letters > SHORT else f"<td>{cell}</td>"
