"""Draws schedules as text and as SVG."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from parallel3d.schedules.actions import Kind
from parallel3d.schedules.orders import StageAssignment
from parallel3d.schedules.walk import Span, Timeline
from parallel3d.svg import INK, Canvas

_FILL = {Kind.F: "─", Kind.B: "━", Kind.I: "━", Kind.W: "─"}
_IDLE = "·"
_KINDS = {
    Kind.F: "forward",
    Kind.B: "backward",
    Kind.I: "input gradient",
    Kind.W: "weight gradient",
}

# Blue, orange and green also differ in lightness, for grey prints and colour-blind readers. The
# first chunk has the first colour, the last chunk has the second one, and the chunks between them
# have shades in between.
_COLOURS = {
    Kind.F: ("#1f5a99", "#74a9dd"),
    Kind.B: ("#f2a33a", "#f8cd8d"),
    Kind.I: ("#f2a33a", "#f8cd8d"),
    Kind.W: ("#a3d69b", "#cdeac8"),
}
_EMPTY = "#ffffff"
_EDGE = "#d5dae0"
_WAY = "#5c636a"
_MOST_BOXES = 8000  # more boxes are drawn as one path per colour and rank, without tooltips
_MOST_WAYS = 1500  # more messages are not drawn at all


def render_text(timeline: Timeline, width: int | None = None) -> str:
    """Draws a picture for a fixed-width font, with one line per rank.

    `F3─` is the forward of micro-batch 3, `B3━━━` its backward and `·` idle time. I and W are the
    halves of a split backward, and `F3.1` belongs to chunk 1. Boxes are to scale; the scale is the
    smallest at which every name fits into its box. If the picture would be wider than `width`
    columns, each column instead has the letter of the kind that takes most of the column's time.
    A `width` of None allows any width.
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
        # The last column of a box stays blank, to separate it from the next box.
        line[start:end] = str(span.action).ljust(end - start - 1, _FILL[span.action.kind]) + " "
    return "".join(line)


def _overview_line(spans: Sequence[Span], makespan: float, columns: int) -> str:
    """Draws the whole step in `columns` letters.

    Each letter stands for the kind that takes most of the column's time.
    """
    line = []
    step = makespan / columns
    first = 0
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
    """Returns the kinds that occur in a timeline, in the order of _KINDS."""
    found = {span.action.kind for spans in timeline.spans for span in spans}
    return [kind for kind in _KINDS if kind in found]


def _column(seconds: float, scale: float) -> int:
    return int(seconds * scale + 0.5)


def render_svg(
    timeline: Timeline,
    title: str = "Pipeline schedule",
    width: int = 1200,
    assignment: StageAssignment | None = None,
    hop: float = 0.0,
    unit: str = " s",
) -> str:
    """Draws the usual pipeline diagram as a stand-alone SVG, about `width` pixels wide.

    A box has a tooltip with its action and times, and shows the micro-batch if there is room;
    diagrams of more than _MOST_BOXES boxes have neither. The title ends with the bubble, which is
    the idle share of all ranks' time. With an `assignment` and a `hop` above 0 thin lines show the
    messages, if there are at most _MOST_WAYS.
    """
    picture = TimelinePicture(Canvas(), timeline, width, timeline.makespan, unit)
    picture.draw(title)
    if assignment is not None and hop > 0:
        picture.draw_messages(assignment, hop)
    return picture.canvas.svg(title, "parallel3d schedule")


class TimelinePicture:
    """Draws a timeline below the present contents of a canvas; the time axis ends at `until`."""

    def __init__(
        self, canvas: Canvas, timeline: Timeline, width: int, until: float, unit: str
    ) -> None:
        self.canvas = canvas
        self.timeline = timeline
        self.until = until
        self.unit = unit
        ranks = len(timeline.spans)
        self.row, self.gap = (34, 6) if ranks <= 16 else (max(12, 560 // ranks), 2)
        self.top = canvas.bottom + 92
        self.left = 76
        self.right = width - 76
        self.scale = (self.right - self.left) / until
        self.chunks = 1 + max(span.action.chunk for spans in timeline.spans for span in spans)

    def x(self, seconds: float) -> float:
        return round(self.left + seconds * self.scale, 2)

    def y(self, rank: int) -> float:
        return self.top + rank * (self.row + self.gap)

    def draw(self, title: str) -> None:
        canvas, timeline = self.canvas, self.timeline
        heading = f"{title}: {timeline.bubble_fraction:.1%} bubble"
        large = 20 if len(title) < 60 else 16
        canvas.text(self.left, self.top - 58, heading, size=large, weight=600)
        self._draw_legend()
        label, size = "stage" if self.chunks == 1 else "rank", 14 if self.row >= 20 else 10
        canvas.text(self.right + 10, self.top - 10, "idle", size=13)
        few = sum(map(len, timeline.spans)) <= _MOST_BOXES
        for rank, (spans, bubble) in enumerate(zip(timeline.spans, timeline.bubble, strict=True)):
            y, middle = self.y(rank), self.y(rank) + self.row / 2 + 0.36 * size
            canvas.text(self.left - 10, middle, f"{label} {rank}", size=size, anchor="end")
            canvas.rect(self.left, y, self.right - self.left, self.row, _EMPTY, _EDGE)
            if few:
                self._draw_boxes(spans, y)
            else:
                self._draw_outlines(spans, y)
            canvas.text(self.right + 10, middle, f"{bubble:.1%}", size=size)
        below = self.y(len(timeline.spans)) + 14
        canvas.text(self.left, below, f"0{self.unit}", size=13)
        canvas.text((self.left + self.right) / 2, below, "time →", size=13, anchor="middle")
        canvas.text(self.right, below, f"{self.until:.4g}{self.unit}", size=13, anchor="end")

    def _draw_legend(self) -> None:
        x, y = self.left, self.top - 40
        names = [(_COLOURS[kind][0], _KINDS[kind], "") for kind in _kinds(self.timeline)]
        for colour, name, edge in [*names, (_EMPTY, "idle", _EDGE)]:
            self.canvas.rect(x, y, 18, 18, colour, edge)
            self.canvas.text(x + 26, y + 14, name, size=14)
            x += 46 + 8 * len(name)
        if self.chunks > 1:
            words = "lighter: later chunk of the rank"
            self.canvas.text(x + 10, y + 14, words, size=14, fill=_WAY)

    def _draw_boxes(self, spans: Sequence[Span], y: float) -> None:
        digits = max(len(str(span.action.microbatch)) for span in spans)
        for span in spans:
            kind, unit = span.action.kind, self.unit
            x, wide = self.x(span.start), round((span.end - span.start) * self.scale, 2)
            tip = f"{span.action}: {span.start:.6g}{unit} to {span.end:.6g}{unit}"
            edge = "#ffffff" if wide > 4 else ""
            self.canvas.rect(x, y, wide, self.row, self._shade(span), edge, tip=tip)
            # A digit is about 0.6 em wide. The size fits the longest number, so that all numbers
            # have the same size.
            size = min(15.0, 0.8 * self.row, (wide - 3) / (0.6 * digits))
            if size >= 9:
                dark = kind == Kind.F and span.action.chunk * 2 < self.chunks
                self.canvas.text(
                    x + wide / 2,
                    y + self.row / 2 + 0.36 * size,
                    str(span.action.microbatch),
                    size=size,
                    anchor="middle",
                    fill="#ffffff" if dark else INK,
                )

    def _draw_outlines(self, spans: Sequence[Span], y: float) -> None:
        """Draws boxes without text as one path per colour, which takes a tenth of the bytes."""
        paths: dict[str, list[str]] = defaultdict(list)
        for span in spans:
            wide = (span.end - span.start) * self.scale
            outline = f"M{self.x(span.start):.1f} {y:g}h{wide:.1f}v{self.row}h-{wide:.1f}z"
            paths[self._shade(span)].append(outline)
        for colour, outlines in paths.items():
            self.canvas.path("".join(outlines), colour, 0)

    def _shade(self, span: Span) -> str:
        """Returns the colour of an action's kind, in a lighter shade for a later chunk."""
        share = span.action.chunk / (self.chunks - 1) if self.chunks > 1 else 0.0
        ends = _COLOURS[span.action.kind]
        first, last = ([int(colour[i : i + 2], 16) for i in (1, 3, 5)] for colour in ends)
        mixed = (round(a + (b - a) * share) for a, b in zip(first, last, strict=True))
        return "#" + "".join(f"{part:02x}" for part in mixed)

    def draw_messages(self, assignment: StageAssignment, hop: float) -> None:
        """Draws thin lines from the end of an action to the arrival of its message."""
        lines = []
        for rank, spans in enumerate(self.timeline.spans):
            for span in spans:
                if span.action.kind == Kind.W:
                    continue
                offset = 1 if span.action.kind == Kind.F else -1
                reader = assignment.neighbour(rank, span.action.chunk, offset)
                if reader is None or reader[0] == rank:
                    continue
                y1, y2 = (self.y(r) + self.row / 2 for r in (rank, reader[0]))
                lines.append(f"M{self.x(span.end)} {y1:g}L{self.x(span.end + hop)} {y2:g}")
        if len(lines) <= _MOST_WAYS:
            self.canvas.path("".join(lines), _WAY, 0.5)
