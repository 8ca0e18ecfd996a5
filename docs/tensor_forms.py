"""Compares the forms of tensor parallelism by their messages and prices, and draws two of them.

    python docs/tensor_forms.py    # tables and pictures of docs/tensor_parallel.md

tests/tools/tensor_forms.py computes them on real ranks, and tests/distributed/test_tensor_forms.py
compares their messages with the lists here.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

from parallel3d.blueprint.cluster import Link
from parallel3d.blueprint.collectives import bus_factor
from parallel3d.estimate.network import best_segments, collective_time

HERE = Path(__file__).resolve().parent
MIB = 1 << 20

# DGX H100 (conf/cluster/dgx_h100.yaml): inside a node, and from node to node.
WIRES = {"NVLink": Link(450, 3.4), "network": Link(50, 14)}


@dataclass(frozen=True)
class Sizes:
    """The sizes of one micro-batch: b samples of s tokens, hidden h, heads a; on n ranks, with e
    bytes per number."""

    b: int
    s: int
    h: int
    a: int
    n: int
    e: int = 2

    def elements(self, what: str) -> int:
        """Returns the number of elements of a whole buffer: `h` and its multiples per token,
        `scores` per pair."""
        if what == "scores":
            return self.b * self.a * self.s**2
        return self.b * self.s * self.h * int(what.removesuffix("h") or 1)


class Call(NamedTuple):
    """A collective; its whole buffer has `elements(what)` numbers."""

    op: str
    what: str


class Form(NamedTuple):
    """The messages of a layer's forward and backward, in order, and the part that each rank
    recomputes."""

    forward: list[Call]
    backward: list[Call]
    again: str = "nothing"


SUM, SUM_WIDE = Call("all_reduce", "h"), Call("all_reduce", "4h")
GATHER, SCATTER = Call("all_gather", "h"), Call("reduce_scatter", "h")
GATHER_WIDE, SCATTER_WIDE = Call("all_gather", "4h"), Call("reduce_scatter", "4h")
GATHER_SCORES, SCATTER_SCORES = Call("all_gather", "scores"), Call("reduce_scatter", "scores")

# Part of the model → form → its messages. The first form of each part is ours.
FORMS = {
    "MLP": {
        "columns, then rows": Form([SUM], [SUM]),
        "the same, sequence split": Form([GATHER, SCATTER], [GATHER, GATHER, SCATTER]),
        "hidden H gathered": Form([GATHER_WIDE, GATHER], [SCATTER_WIDE, SUM]),
        "rows first": Form([SUM_WIDE, SUM], [GATHER_WIDE, GATHER], "the activation"),
    },
    "self-attention": {
        "whole heads": Form([SUM], [SUM]),
        "the same, sequence split": Form([GATHER, SCATTER], [GATHER, GATHER, SCATTER]),
        "Q, K, V gathered": Form(
            [Call("all_gather", "3h"), SUM], [GATHER, SUM], "attention of all heads"
        ),
        "inside each head": Form(
            [SCATTER_SCORES, GATHER_SCORES, SUM], [SCATTER_SCORES, GATHER_SCORES, SUM]
        ),
    },
    "embedding": {
        "rows of the table split": Form([SUM], []),
        "one rank, broadcast": Form([Call("broadcast", "h")], []),
        "a table on every rank": Form([], [], "the lookup"),
    },
}

LAYERS = {
    "70B: b=1, s=4096, h=8192, a=64; tp=8": Sizes(1, 4096, 8192, 64, 8),
}


def sent(call: Call, sizes: Sizes) -> float:
    """Returns the bytes that the busiest rank sends."""
    return sizes.elements(call.what) * sizes.e * bus_factor(call.op, sizes.n)


def messages(call: Call, sizes: Sizes, link: Link) -> int:
    """Returns the number of messages that it sends in a ring; a broadcast goes along a chain, in
    the best number of pieces."""
    if call.op == "broadcast":
        return best_segments(sizes.n, sizes.elements(call.what) * sizes.e, link)
    return (2 if call.op == "all_reduce" else 1) * (sizes.n - 1)


def seconds(call: Call, sizes: Sizes, link: Link) -> float:
    return collective_time(call.op, sizes.n, sizes.elements(call.what) * sizes.e, link)


def table(sizes: Sizes) -> Iterator[str]:
    """Yields a Markdown table: a row per form, forward and backward together."""
    yield "| part | form | forward | backward | MiB a rank sends | messages | NVLink | network |"
    yield "|---|---|---|---|---|---|---|---|"
    for part, forms in FORMS.items():
        for name, form in forms.items():
            calls = [*form.forward, *form.backward]
            total = sum(sent(call, sizes) for call in calls) / MIB
            count = sum(messages(call, sizes, WIRES["NVLink"]) for call in calls)
            times = [
                f"{sum(seconds(c, sizes, link) for c in calls) * 1e3:.2f} ms"
                for link in WIRES.values()
            ]
            steps = (", ".join(map(spoken, way)) or "–" for way in (form.forward, form.backward))
            row = (part, name, *steps, f"{total:.0f}", str(count), *times)
            yield f"| {' | '.join(row)} |"


SHORT = {
    "all_reduce": "AR",
    "all_gather": "AG",
    "reduce_scatter": "RS",
    "broadcast": "BC",
}


def spoken(call: Call) -> str:
    """Returns a short name, such as "AR 4h"."""
    return f"{SHORT[call.op]} {'a·s' if call.what == 'scores' else call.what}"


STYLE = """
svg { --ground: #fff; --ink: #1f2328; --pale: #656d76; --one: #d0ebff; --two: #d3f9d8;
  --both: #f1f3f5; --comm: #d9480f }
@media (prefers-color-scheme: dark) { svg { --ground: #0d1117; --ink: #e6edf3; --pale: #9aa4b0;
  --one: #123a5c; --two: #1b4427; --both: #262c34; --comm: #ff922b } }
.ground { fill: var(--ground) } text { fill: var(--ink); font-size: 13px; text-anchor: middle }
.one { fill: var(--one) } .two { fill: var(--two) } .both { fill: var(--both) }
.box { stroke: var(--pale) } .line { stroke: var(--pale); fill: none }
.comm { fill: var(--comm) } text.comm { font-weight: 700; font-size: 15px }
text.on { fill: #fff; font-weight: 700; font-size: 16px } text.pale { fill: var(--pale) }
text.left { text-anchor: start } .small { font-size: 11px }
"""
WIDTH, HEIGHT = 940, 300
LANES = {"both": 140, "one": 85, "two": 195}
BOX = 46  # height


class Box(NamedTuple):
    """A result: the same on both ranks, or one part on each rank."""

    x: int
    width: int
    words: tuple[str, ...]  # one text for both ranks, or one for each
    shape: str = ""


# The boxes of each drawing, and between which of them the ranks communicate.
DRAWINGS = {
    "mlp": (
        "An MLP over two ranks: A by columns, B by rows",
        [
            Box(20, 70, ("X",), "b·s × h"),
            Box(190, 110, ("X·A₁", "X·A₂"), "b·s × 4h/2"),
            Box(345, 110, ("GeLU", "GeLU"), "b·s × 4h/2"),
            Box(500, 110, ("H₁·B₁", "H₂·B₂"), "b·s × h, a part of the sum"),
            Box(725, 70, ("Y",), "b·s × h"),
        ],
    ),
    "attention": (
        "Self-attention over two ranks: each has whole heads",
        [
            Box(20, 70, ("X",), "b·s × h"),
            Box(190, 130, ("Q₁ K₁ V₁", "Q₂ K₂ V₂"), "b·s × 3h/2"),
            Box(
                365, 170, ("softmax(Q₁K₁ᵀ)·V₁", "softmax(Q₂K₂ᵀ)·V₂"), "b·s × h/2, half of the heads"
            ),
            Box(580, 90, ("O₁·W₁", "O₂·W₂"), "a part of the sum"),
            Box(785, 70, ("Y",), "b·s × h"),
        ],
    ),
}


def drawing(title: str, boxes: list[Box]) -> str:
    """Draws boxes from left to right, and f and g where one rank's results become results of
    both."""
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" '
        f'font-family="system-ui, sans-serif"><style>{STYLE}</style>',
        f'<rect class="ground" width="{WIDTH}" height="{HEIGHT}"/>',
        f'<text class="left" x="20" y="26" font-weight="600">{title}</text>',
    ]
    for before, after in pairwise(boxes):
        parts += _between(before, after)
    for box in boxes:
        for lane, words in zip(_lanes(box), box.words, strict=True):
            y = LANES[lane] - BOX // 2
            middle = box.x + box.width // 2
            parts += [
                f'<rect class="box {lane}" x="{box.x}" y="{y}" width="{box.width}" '
                f'height="{BOX}" rx="6"/>',
                f'<text x="{middle}" y="{y + 28}">{words}</text>',
            ]
        bottom = max(LANES[lane] for lane in _lanes(box)) + BOX // 2 + 16
        middle = box.x + box.width // 2
        parts.append(f'<text class="pale small" x="{middle}" y="{bottom}">{box.shape}</text>')
    for y, words in (
        (264, "f: forward nothing, backward all-reduce of the gradient of X (b·s × h)"),
        (284, "g: forward all-reduce of the parts of Y (b·s × h), backward nothing"),
    ):
        parts.append(f'<text class="left comm" x="20" y="{y}">{words[0]}</text>')
        parts.append(f'<text class="left pale" x="32" y="{y}">{words[1:]}</text>')
    for lane, words in (("one", "rank 0"), ("two", "rank 1")):
        parts.append(
            f'<text class="pale small" x="{WIDTH - 40}" y="{LANES[lane] + 4}">{words}</text>'
        )
    return "\n".join([*parts, "</svg>\n"])


def _lanes(box: Box) -> tuple[str, ...]:
    return ("both",) if len(box.words) == 1 else ("one", "two")


def _between(before: Box, after: Box) -> Iterator[str]:
    """Draws lines from lane to lane, through f or g where they divide or join."""
    start, end = before.x + before.width, after.x
    if len(before.words) == len(after.words):
        for lane in _lanes(before):
            yield f'<path class="line" d="M{start} {LANES[lane]} H{end}"/>'
        return
    divides = len(before.words) == 1
    middle = (start + end) // 2
    for lane in ("one", "two"):
        a, b = (LANES["both"], LANES[lane]) if divides else (LANES[lane], LANES["both"])
        yield f'<path class="line" d="M{start} {a} H{middle} V{b} H{end}"/>'
    yield f'<circle class="comm" cx="{middle}" cy="{LANES["both"]}" r="16"/>'
    yield f'<text class="on" x="{middle}" y="{LANES["both"] + 5}">{"f" if divides else "g"}</text>'


def pictures() -> dict[str, str]:
    """Returns file name → SVG."""
    return {f"tensor_parallel_{name}.svg": drawing(*what) for name, what in DRAWINGS.items()}


def tables() -> str:
    parts = (f"{title}\n\n" + "\n".join(table(sizes)) for title, sizes in LAYERS.items())
    return "\n\n".join(parts)


if __name__ == "__main__":
    for name, picture in pictures().items():
        (HERE / name).write_text(picture, encoding="utf-8")
    print(tables())
