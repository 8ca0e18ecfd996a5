"""Pictures of a pipeline schedule: ranks downwards, time to the right; as text and as SVG."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from parallel3d.schedules.actions import Kind, Step
from parallel3d.schedules.simulate import Span, Timeline, simulate

_FILL = {Kind.F: "─", Kind.B: "━"}
_IDLE = "·"
_CUT = " … "

_FONT = "font-family='system-ui, Helvetica, Arial, sans-serif'"
# Blue and orange differ in lightness too: they stay apart in grey print and for colour-blind eyes.
_COLOURS = {Kind.F: ("#2f6db3", "#ffffff"), Kind.B: ("#f5b041", "#222222")}  # box, its text
_IDLE_COLOUR = "#e6e6e6"
_LEGEND = (
    (_COLOURS[Kind.F][0], "forward"),
    (_COLOURS[Kind.B][0], "backward"),
    (_IDLE_COLOUR, "idle"),
)


def render_text(picture: Timeline | Sequence[Sequence[Step]], width: int | None = None) -> str:
    """A fixed-width picture, one line per rank: `F3─` forward, `B3━━━` backward, `·` idle.

    A plan is timed first, with a backward twice as long as a forward. Boxes are drawn to scale, the
    shortest just wide enough for its name. Pictures wider than `width` columns lose the middle of
    the step, the same columns on every rank, and a box that is cut there loses its name.
    """
    timeline = picture if isinstance(picture, Timeline) else simulate(picture, 1.0, 2.0)
    boxes = [span for spans in timeline.spans for span in spans]
    scale = max((len(str(s.action)) + 1) / (s.end - s.start) for s in boxes)
    digits = len(str(len(timeline.spans) - 1))
    margin = len("rank ") + digits + len(" || 100.0%")
    columns = _column(timeline.makespan, scale)
    cut = _cut(columns, columns if width is None else width - margin)
    heading = (
        " " * (len("rank ") + digits + 2)
        + f"F forward, B backward, · idle; bubble {timeline.bubble_fraction:.1%}, of each rank:"
    )
    rows = [
        f"rank {rank:>{digits}} |{_text_line(spans, scale, columns, cut)}| {bubble:6.1%}"
        for rank, (spans, bubble) in enumerate(zip(timeline.spans, timeline.bubble, strict=True))
    ]
    return "\n".join([heading, *rows])


def _text_line(spans: Sequence[Span], scale: float, columns: int, cut: range) -> str:
    line = [_IDLE] * columns
    for span in spans:
        start, end = _column(span.start, scale), _column(span.end, scale)
        # Half a name would be another micro-batch's.
        name = "" if start < cut.stop and end > cut.start else str(span.action)
        # The last column of a box stays blank, so that neighbours do not run together.
        box = name.ljust(end - start - 1, _FILL[span.action.kind]) + " "
        line[start:end] = box[: end - start]
    return "".join(line[: cut.start]) + (_CUT if cut else "") + "".join(line[cut.stop :])


def _column(seconds: float, scale: float) -> int:
    return int(seconds * scale + 0.5)


def _cut(columns: int, room: int) -> range:
    """The columns to leave out of the middle so that the rest and the cut's mark fit in `room`."""
    if columns <= room:
        return range(columns, columns)
    kept = max(room - len(_CUT), 2)
    return range((kept + 1) // 2, columns - kept // 2)


def render_svg(timeline: Timeline, title: str = "Pipeline schedule", width: int = 1200) -> str:
    """The classic pipeline diagram as a stand-alone SVG document, `width` pixels wide.

    Boxes carry their micro-batch's number where it fits; every box names its action and times
    (seconds) in a tooltip. The title ends with the bubble: the idle share of all ranks' time.
    """
    row, gap, top, left, right = 34, 6, 92, 76, 76
    stages = len(timeline.spans)
    bottom = top + stages * (row + gap)
    height = bottom + 40
    scale = (width - left - right) / timeline.makespan
    digits = max(len(str(s.action.microbatch)) for spans in timeline.spans for s in spans)
    heading = f"{escape(title)}: {timeline.bubble_fraction:.1%} bubble"
    parts = [
        f"<svg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 {width} {height}' {_FONT}",
        f"width='{width}' height='{height}' font-size='14' fill='#222222'>",
        f"<rect width='{width}' height='{height}' fill='#ffffff'/>",
        f"<text x='{left}' y='34' font-size='20' font-weight='600'>{heading}</text>",
        *_legend(left),
        f"<text x='{width - right + 10}' y='{top - 10}' font-size='13'>idle</text>",
    ]
    for rank, (spans, bubble) in enumerate(zip(timeline.spans, timeline.bubble, strict=True)):
        y = top + rank * (row + gap)
        middle = y + row / 2 + 5
        parts.append(f"<text x='{left - 10}' y='{middle}' text-anchor='end'>stage {rank}</text>")
        parts.append(
            f"<rect x='{left}' y='{y}' width='{width - left - right}' height='{row}' "
            f"fill='{_IDLE_COLOUR}'/>"
        )
        parts += [_box(span, digits, left, y, row, scale) for span in spans]
        parts.append(f"<text x='{width - right + 10}' y='{middle}'>{bubble:.1%}</text>")
    parts += _axis(timeline.makespan, left, width - right, bottom)
    return "\n".join([*parts, "</svg>"]) + "\n"


def _box(span: Span, digits: int, left: int, y: int, row: int, scale: float) -> str:
    colour, ink = _COLOURS[span.action.kind]
    x, w = left + span.start * scale, (span.end - span.start) * scale
    number = str(span.action.microbatch)
    tip = f"<title>{span.action}: {span.start:.6g} s to {span.end:.6g} s</title>"
    edge = "stroke='#ffffff' stroke-width='1'" if w > 4 else ""
    box = (
        f"<g>{tip}<rect x='{x:.2f}' y='{y}' width='{w:.2f}' height='{row}' fill='{colour}' {edge}/>"
    )
    # A digit is about 0.6 em wide. Room for the longest number, so that not only 0 to 9 are shown.
    size = min(15.0, (w - 3) / (0.6 * digits))
    if size >= 9:
        box += (
            f"<text x='{x + w / 2:.2f}' y='{y + row / 2 + 0.36 * size:.2f}' text-anchor='middle' "
            f"font-size='{size:.1f}' fill='{ink}'>{number}</text>"
        )
    return box + "</g>"


def _legend(left: int) -> list[str]:
    parts = []
    for index, (colour, name) in enumerate(_LEGEND):
        x = left + index * 120
        parts.append(f"<rect x='{x}' y='52' width='18' height='18' fill='{colour}'/>")
        parts.append(f"<text x='{x + 26}' y='66'>{name}</text>")
    return parts


def _axis(makespan: float, left: int, right: int, bottom: int) -> list[str]:
    """The two ends of time, in seconds, under the rows."""
    y = bottom + 14
    return [
        f"<text x='{left}' y='{y}' font-size='13'>0 s</text>",
        f"<text x='{(left + right) / 2}' y='{y}' font-size='13' text-anchor='middle'>time →</text>",
        f"<text x='{right}' y='{y}' font-size='13' text-anchor='end'>{makespan:.4g} s</text>",
    ]
