"""Writes SVG pictures: provides a canvas for shapes and text, and a palette of colours."""

from __future__ import annotations

from collections.abc import Mapping
from html import escape

BACKGROUND = "#ffffff"
INK = "#212529"
DARK = "#495057"
GREY = "#868e96"
# Colours that are easy to tell apart, each with the colour for text on top of it.
PALETTE = (
    *(("#4e79a7", "#ffffff"), ("#f28e2b", INK), ("#59a14f", "#ffffff"), ("#e15759", "#ffffff")),
    *(("#3aa6a0", "#ffffff"), ("#d9b520", INK), ("#b07aa1", "#ffffff"), ("#9c755f", "#ffffff")),
)
FONT = "system-ui, -apple-system, 'Segoe UI', Helvetica, Arial, 'DejaVu Sans', sans-serif"
MARGIN = 24
# Characters narrower and wider than others, to estimate the width of a text.
NARROW, WIDE = "ijlt.,:;'|!()[] ", "mwMW@—…"


class Canvas:
    """Collects the elements of a picture.

    Attributes:
        parts: the elements in SVG.
        right, bottom: the right and bottom edges of everything drawn so far.
    """

    def __init__(self) -> None:
        self.parts: list[str] = []
        self.right = 0.0
        self.bottom = 0.0

    @staticmethod
    def measure(text: str, size: float) -> float:
        """Estimates the width of `text` in pixels, large enough for any common font."""
        widths = (0.36 if c in NARROW else 0.95 if c in WIDE else 0.64 for c in text)
        return size * sum(widths)

    def _grow(self, right: float, bottom: float) -> None:
        self.right = max(self.right, right)
        self.bottom = max(self.bottom, bottom)

    def text(
        self,
        x: float,
        y: float,
        words: str,
        *,
        size: float,
        anchor: str = "start",
        fill: str = INK,
        weight: int = 400,
    ) -> None:
        """Draws text on the baseline y; its `anchor` (start, middle or end) is at x."""
        wide = self.measure(words, size) * (1.06 if weight > 400 else 1)
        self._grow(x + wide * {"start": 1, "middle": 0.5, "end": 0}[anchor], y + 0.3 * size)
        align = "" if anchor == "start" else f" text-anchor='{anchor}'"
        bold = "" if weight == 400 else f" font-weight='{weight}'"
        self.parts.append(
            f"<text x='{x:g}' y='{y:g}' font-size='{size:g}' fill='{fill}'{align}{bold}>"
            f"{escape(words, quote=False)}</text>"
        )

    def rect(
        self,
        x: float,
        y: float,
        width: float,
        height: float,
        fill: str,
        stroke: str = "",
        *,
        radius: float = 0,
        dash: str = "",
        tip: str = "",
        **marks: object,
    ) -> None:
        """Draws a rectangle.

        `tip` is the tooltip's text. `marks` are attributes: `cls` becomes the class, and any other
        name gets the prefix data-.
        """
        self._grow(x + width, y + height)
        edge = f" stroke='{stroke}' stroke-width='1.2'" if stroke else ""
        edge += f" stroke-dasharray='{dash}'" if dash else ""
        edge += f" rx='{radius:g}'" if radius else ""
        head = (
            f"<rect x='{x:g}' y='{y:g}' width='{width:g}' height='{height:g}' fill='{fill}'{edge}"
            f"{_attributes(marks)}"
        )
        self.parts.append(f"{head}><title>{escape(tip)}</title></rect>" if tip else f"{head}/>")

    def line(
        self, x1: float, y1: float, x2: float, y2: float, colour: str, width: float, **marks: object
    ) -> None:
        """Draws a straight line, dashed if its width is below 1; `marks` are those of `rect`."""
        self._grow(max(x1, x2) + width / 2, max(y1, y2) + width / 2)
        dash = " stroke-dasharray='2 2'" if width < 1 else ""
        self.parts.append(
            f"<line x1='{x1:g}' y1='{y1:g}' x2='{x2:g}' y2='{y2:g}' stroke='{colour}' "
            f"stroke-width='{width:.3g}'{dash}{_attributes(marks)}/>"
        )

    def path(self, commands: str, colour: str, width: float, **marks: object) -> None:
        """Draws the outline of a path, or fills it if `width` is 0; `marks` are those of `rect`.

        A path does not enlarge the picture, so it must be within the area of other elements.
        """
        ink = f"fill='{colour}'"
        if width:
            ink = f"fill='none' stroke='{colour}' stroke-width='{width:g}'"
        self.parts.append(f"<path d='{commands}' {ink}{_attributes(marks)}/>")

    def svg(self, title: str, made_by: str = "parallel3d") -> str:
        """Returns the picture as an SVG document, with a background and a margin."""
        width, height = round(self.right) + MARGIN, round(self.bottom) + MARGIN
        head = (
            f"<svg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 {width} {height}' "
            f"width='{width}' height='{height}' font-family=\"{FONT}\" data-by='{made_by}'>"
        )
        tip = f"<title>{escape(title)}</title>"
        # Text ignores the pointer, so that the tooltip of the shape below it appears.
        style = "<style>text{pointer-events:none}</style>"
        back = f"<rect width='{width}' height='{height}' fill='{BACKGROUND}'/>"
        return "\n".join([head, tip, style, back, *self.parts, "</svg>"]) + "\n"


def _attributes(marks: Mapping[str, object]) -> str:
    words = {"class" if name == "cls" else f"data-{name}": mark for name, mark in marks.items()}
    return "".join(f" {name}='{escape(str(mark))}'" for name, mark in words.items())
