"""Pictures of schedules, in text and SVG."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from html import escape

from parallel3d.schedules.actions import Kind
from parallel3d.schedules.orders import StageAssignment
from parallel3d.schedules.walk import Span, Timeline

_FILL = {Kind.F: "─", Kind.B: "━", Kind.I: "━", Kind.W: "─"}
_IDLE = "·"
_KINDS = {
    Kind.F: "forward",
    Kind.B: "backward",
    Kind.I: "input gradient",
    Kind.W: "weight gradient",
}

_FONT = "font-family='system-ui, Helvetica, Arial, sans-serif'"
# Blue, orange and green also differ in lightness, for grey print and colour-blind readers. Later
# chunks are drawn in shades towards the second colour.
_COLOURS = {
    Kind.F: ("#1f5a99", "#74a9dd"),
    Kind.B: ("#f2a33a", "#f8cd8d"),
    Kind.I: ("#f2a33a", "#f8cd8d"),
    Kind.W: ("#a3d69b", "#cdeac8"),
}
_INK = {Kind.F: "#ffffff", Kind.B: "#222222", Kind.I: "#222222", Kind.W: "#222222"}
_EMPTY, _EDGE, _WAY = "#ffffff", "#d5dae0", "#5c636a"
_MOST_BOXES = 8000  # above it, one path per colour and rank, without tooltips
_MOST_WAYS = 1500  # messages whose lines are drawn


def render_text(timeline: Timeline, width: int | None = None) -> str:
    """Draws a fixed-width picture, one line per rank: `F3─` forward, `B3━━━` backward, `·` idle.

    I and W are the halves of a split backward, `F3.1` is of chunk 1. Boxes are to scale, the
    shortest as wide as its name. A picture wider than `width` columns has one letter for the
    dominant kind in each column's time.
    """
    boxes = [span for spans in timeline.spans for span in spans]
    scale = max((len(str(s.action)) + 1) / (s.end - s.start) for s in boxes)
    digits = len(str(len(timeline.spans) - 1))
    margin = len("rank ") + digits + len(" || 100.0%")
    columns = _column(timeline.makespan, scale)
    available = columns if width is None else width - margin
    words = ", ".join(f"{kind} {_KINDS[kind]}" for kind in _kinds(timeline))
    heading = (
        " " * (len("rank ") + digits + 2)
        + f"{words}, · idle; bubble {timeline.bubble_fraction:.1%}, of each rank:"
    )

    def line(spans: Sequence[Span]) -> str:
        if columns > available:
            return _overview_line(spans, timeline.makespan, max(available, 2))
        return _text_line(spans, scale, columns)

    rows = [
        f"rank {rank:>{digits}} |{line(spans)}| {bubble:6.1%}"
        for rank, (spans, bubble) in enumerate(zip(timeline.spans, timeline.bubble, strict=True))
    ]
    return "\n".join([heading, *rows])


def _text_line(spans: Sequence[Span], scale: float, columns: int) -> str:
    line = [_IDLE] * columns
    for span in spans:
        start, end = _column(span.start, scale), _column(span.end, scale)
        # The last column of a box stays blank, so that neighbours do not run together.
        line[start:end] = str(span.action).ljust(end - start - 1, _FILL[span.action.kind]) + " "
    return "".join(line)


def _overview_line(spans: Sequence[Span], makespan: float, columns: int) -> str:
    """Draws the whole step in `columns` letters: the kind that fills most of each column's time."""
    line, step, first = [], makespan / columns, 0
    for column in range(columns):
        start, end = column * step, (column + 1) * step
        while first < len(spans) and spans[first].end <= start:
            first += 1
        shares = {_IDLE: step}
        for span in spans[first:]:
            if span.start >= end:
                break
            share = min(end, span.end) - max(start, span.start)
            shares[_IDLE] -= share
            shares[span.action.kind] = shares.get(span.action.kind, 0.0) + share
        line.append(max(shares, key=shares.__getitem__))
    return "".join(line)


def _kinds(timeline: Timeline) -> list[Kind]:
    """The kinds that occur, in the order of _KINDS."""
    found = {span.action.kind for spans in timeline.spans for span in spans}
    return [kind for kind in _KINDS if kind in found]


def _column(seconds: float, scale: float) -> int:
    return int(seconds * scale + 0.5)


def render_svg(
    timeline: Timeline,
    title: str = "Pipeline schedule",
    width: int = 1200,
    placement: StageAssignment | None = None,
    hop: float = 0.0,
    unit: str = " s",
    until: float | None = None,
) -> str:
    """Draws the classic pipeline diagram as a stand-alone SVG, `width` pixels wide.

    Boxes have their micro-batch's number where it fits and a tooltip with action and times, up to
    _MOST_BOXES. The title ends with the bubble: the idle share of all ranks' time. With `placement`
    and `hop`, lines show up to _MOST_WAYS messages. The time axis ends at `until` (default:
    makespan).
    """
    ranks = len(timeline.spans)
    row, gap = (34, 6) if ranks <= 16 else (max(12, 560 // ranks), 2)
    top, left, right = 92, 76, 76
    bottom = top + ranks * (row + gap)
    height = bottom + 40
    until = until or timeline.makespan
    scale = (width - left - right) / until
    chunks = 1 + max(span.action.chunk for spans in timeline.spans for span in spans)
    label = "stage" if chunks == 1 else "rank"
    size = 14 if row >= 20 else 10
    heading = f"{escape(title)}: {timeline.bubble_fraction:.1%} bubble"
    parts = [
        "<svg xmlns='http://www.w3.org/2000/svg' data-by='parallel3d schedule' "
        f"viewBox='0 0 {width} {height}' {_FONT}",
        f"width='{width}' height='{height}' font-size='14' fill='#222222'>",
        f"<rect width='{width}' height='{height}' fill='#ffffff'/>",
        f"<text x='{left}' y='34' font-size='{20 if len(title) < 60 else 16}' "
        f"font-weight='600'>{heading}</text>",
        *_legend(timeline, left, chunks),
        f"<text x='{width - right + 10}' y='{top - 10}' font-size='13'>idle</text>",
    ]
    few = sum(map(len, timeline.spans)) <= _MOST_BOXES
    for rank, (spans, bubble) in enumerate(zip(timeline.spans, timeline.bubble, strict=True)):
        y = top + rank * (row + gap)
        middle = f"{y + row / 2 + 0.36 * size:g}"
        text = f"y='{middle}' font-size='{size}'"
        parts.append(f"<text x='{left - 10}' {text} text-anchor='end'>{label} {rank}</text>")
        parts.append(
            f"<rect x='{left}' y='{y}' width='{width - left - right}' height='{row}' "
            f"fill='{_EMPTY}' stroke='{_EDGE}'/>"
        )
        parts += _boxes(spans, few, chunks, left, y, row, scale, unit)
        parts.append(f"<text x='{width - right + 10}' {text}>{bubble:.1%}</text>")
    if placement is not None and hop > 0:
        parts += _ways(timeline, placement, hop, (left, top, row, gap, scale))
    parts += _axis(until, left, width - right, bottom, unit)
    return "\n".join([*parts, "</svg>"]) + "\n"


def _boxes(
    spans: Sequence[Span], few: bool, chunks: int, left: int, y: int, row: int, scale: float,
    unit: str,
) -> Iterator[str]:  # fmt: skip
    """Yields a box for each span; many as one path a colour, a tenth of the bytes."""
    digits = max(len(str(span.action.microbatch)) for span in spans)
    paths: dict[str, list[str]] = {}
    for span in spans:
        kind = span.action.kind
        colour = _shade(kind, span.action.chunk, chunks)
        x, w = left + span.start * scale, (span.end - span.start) * scale
        if not few:
            paths.setdefault(colour, []).append(f"M{x:.1f} {y}h{w:.1f}v{row}h-{w:.1f}z")
            continue
        tip = f"<title>{span.action}: {span.start:.6g}{unit} to {span.end:.6g}{unit}</title>"
        edge = "stroke='#ffffff' stroke-width='1'" if w > 4 else ""
        box = (
            f"<g>{tip}<rect x='{x:.2f}' y='{y}' width='{w:.2f}' height='{row}' "
            f"fill='{colour}' {edge}/>"
        )
        # A digit is about 0.6 em wide; the size fits the longest number, so that all are shown
        # alike.
        size = min(15.0, 0.8 * row, (w - 3) / (0.6 * digits))
        if size >= 9:
            ink = _INK[kind] if span.action.chunk * 2 < chunks else "#222222"
            box += (
                f"<text x='{x + w / 2:.2f}' y='{y + row / 2 + 0.36 * size:.2f}' "
                f"text-anchor='middle' font-size='{size:.1f}' fill='{ink}'>"
                f"{span.action.microbatch}</text>"
            )
        yield box + "</g>"
    for colour, outlines in paths.items():
        yield f"<path fill='{colour}' d='{''.join(outlines)}'/>"


def _shade(kind: Kind, chunk: int, chunks: int) -> str:
    """Returns the colour of a kind, lighter from the first chunk to the last."""
    share = chunk / (chunks - 1) if chunks > 1 else 0.0
    first, last = ([int(colour[i : i + 2], 16) for i in (1, 3, 5)] for colour in _COLOURS[kind])
    return "#" + "".join(
        f"{round(a + (b - a) * share):02x}" for a, b in zip(first, last, strict=True)
    )


def _ways(
    timeline: Timeline,
    placement: StageAssignment,
    hop: float,
    where: tuple[int, int, int, int, float],
) -> Iterator[str]:
    """Yields thin lines from the end of an action to the arrival of its message."""
    left, top, row, gap, scale = where
    lines = []
    for rank, spans in enumerate(timeline.spans):
        for span in spans:
            if span.action.kind == Kind.W:
                continue
            offset = 1 if span.action.kind == Kind.F else -1
            reader = placement.neighbour(rank, span.action.chunk, offset)
            if reader is None or reader[0] == rank:
                continue
            x1, x2 = left + span.end * scale, left + (span.end + hop) * scale
            y1, y2 = (top + r * (row + gap) + row / 2 for r in (rank, reader[0]))
            lines.append(f"M{x1:.2f} {y1:g}L{x2:.2f} {y2:g}")
    if len(lines) <= _MOST_WAYS:
        yield f"<path d='{''.join(lines)}' fill='none' stroke='{_WAY}' stroke-opacity='0.45'/>"


def _legend(timeline: Timeline, left: int, chunks: int) -> Iterator[str]:
    x = left
    names = [(_COLOURS[kind][0], _KINDS[kind]) for kind in _kinds(timeline)]
    for colour, name in [*names, (_EMPTY, "idle")]:
        edge = f" stroke='{_EDGE}'" if colour == _EMPTY else ""
        yield f"<rect x='{x}' y='52' width='18' height='18' fill='{colour}'{edge}/>"
        yield f"<text x='{x + 26}' y='66'>{name}</text>"
        x += 46 + 8 * len(name)
    if chunks > 1:
        yield f"<text x='{x + 10}' y='66' fill='#5c636a'>lighter: later chunk of the rank</text>"


def _axis(makespan: float, left: int, right: int, bottom: int, unit: str) -> list[str]:
    """Returns the labels of the time axis."""
    y = bottom + 14
    return [
        f"<text x='{left}' y='{y}' font-size='13'>0{unit}</text>",
        f"<text x='{(left + right) / 2}' y='{y}' font-size='13' text-anchor='middle'>time →</text>",
        f"<text x='{right}' y='{y}' font-size='13' text-anchor='end'>{makespan:.4g}{unit}</text>",
    ]
