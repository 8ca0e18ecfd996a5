"""Draws the pictures of docs/long_context.md from the splits that training uses.

python docs/context_parallel.py    # writes context_split.svg and context_attention.svg
"""

from __future__ import annotations

import textwrap
from itertools import pairwise
from pathlib import Path

import numpy as np

from parallel3d.context_parallel.split import Ints, SequenceSplit, work_of_ranks
from parallel3d.svg import GREY, INK, PALETTE, Canvas

HERE = Path(__file__).resolve().parent
RANKS = 4
WIDTH = 768.0  # width of a sequence in a drawing
DOCUMENTS = (130, 26, 64, 9, 40, 111)  # lengths in tokens, 380 in all; four of padding follow
GREYS = ("#e9ecef", "#ced4da")


def starts_of(lengths: tuple[int, ...], split: SequenceSplit) -> Ints:
    edges = np.cumsum([0, *lengths])
    return split.pad_starts(np.repeat(edges[:-1], lengths).astype(np.int32)[None])


def runs_of(ranks: Ints) -> list[tuple[int, int, int]]:
    """Returns (rank, first, end) of consecutive positions of one rank."""
    cuts = [0, *(np.flatnonzero(np.diff(ranks)) + 1).tolist(), len(ranks)]
    return [(int(ranks[a]), a, b) for a, b in pairwise(cuts)]


def rank_of_positions(held: Ints) -> Ints:
    """Returns the rank that holds each position of the first sequence."""
    ranks = np.empty(held[:, 0].size, dtype=np.int32)
    for rank, positions in enumerate(held[:, 0]):
        ranks[positions] = rank
    return ranks


def split_svg() -> str:
    """Draws a sequence of documents, split into halves and into balanced blocks, with the work."""
    canvas, split = Canvas(), SequenceSplit(sum(DOCUMENTS), RANKS)
    starts, scale = starts_of(DOCUMENTS, split), WIDTH / split.padded
    canvas.text(24, 38, "A sequence over four context-parallel ranks", size=20, weight=600)
    canvas.text(24, 62, f"{split.length} tokens, padded to {split.padded}", size=13, fill=GREY)
    top = 92.0
    canvas.text(24, top, "documents", size=13)
    for i, (a, b) in enumerate(pairwise(np.cumsum([0, *DOCUMENTS]).tolist())):
        canvas.rect(24 + a * scale, top + 8, (b - a) * scale, 24, GREYS[i % 2], GREY)
        if b - a > 20:
            middle = 24 + (a + b) / 2 * scale
            canvas.text(middle, top + 25, f"{b - a}", size=12, anchor="middle")
    end = 24 + split.length * scale
    pad = (split.padded - split.length) * scale
    canvas.rect(end, top + 8, pad, 24, "#ffffff", GREY, dash="3 3", tip="padding")
    for title, balanced in (
        ("halves: rank r has pieces r and 7 − r", False),
        ("balanced: as many blocks each, by the work of their attention", True),
    ):
        top += 64
        held = SequenceSplit(split.length, RANKS, balanced=balanced).held(starts)
        work = work_of_ranks(held, starts)
        canvas.text(24, top, title, size=13)
        for rank, a, b in runs_of(rank_of_positions(held)):
            fill, ink = PALETTE[rank]
            x, width = 24 + a * scale, (b - a) * scale
            canvas.rect(x, top + 8, width, 24, fill, "#ffffff", tip=f"rank {rank}: {a} to {b - 1}")
            if width > 14:
                canvas.text(x + width / 2, top + 25, str(rank), size=12, anchor="middle", fill=ink)
        _loads(canvas, work, 24 + WIDTH + 28, top - 8)
    return canvas.svg("Splits of a sequence")


def _loads(canvas: Canvas, work: np.ndarray, left: float, top: float) -> None:
    """Draws the pairs of query and key of each rank."""
    canvas.text(left, top + 2, f"work; slowest {work.max() / work.mean():.2f} × mean", size=11)
    for rank, pairs in enumerate(work.tolist()):
        width = 130 * pairs / (1.6 * work.mean())
        canvas.rect(left, top + 9 + 9 * rank, width, 7, PALETTE[rank][0], tip=f"{pairs:,} pairs")


def attention_svg() -> str:
    """Draws which keys each query reads, by the ranks that hold both."""
    canvas, split = Canvas(), SequenceSplit(sum(DOCUMENTS), RANKS)
    starts, side = starts_of(DOCUMENTS, split), 480.0
    held, scale = split.held(starts), side / split.padded
    left, top = 96.0, 118.0
    canvas.text(24, 38, "Who attends to what", size=20, weight=600)
    subtitle = "rows: queries, by the rank that holds them; columns: keys, gathered from all ranks"
    canvas.text(24, 62, subtitle, size=13, fill=GREY)
    runs = runs_of(rank_of_positions(held))
    for rank, a, b in runs:
        fill, ink = PALETTE[rank]
        middle, width = (a + b) / 2 * scale, (b - a) * scale
        canvas.rect(left + a * scale, top - 26, width, 20, fill, "#ffffff")
        canvas.text(left + middle, top - 11, str(rank), size=12, anchor="middle", fill=ink)
        canvas.rect(left - 26, top + a * scale, 20, width, fill, "#ffffff")
        canvas.text(left - 16, top + middle + 4, str(rank), size=12, anchor="middle", fill=ink)
    canvas.rect(left, top, side, side, "#f8f9fa", GREY)
    edges = np.cumsum([0, *DOCUMENTS]).tolist()
    for rank, a, b in runs:
        for begin, end in pairwise(edges):
            first, last = max(a, begin), min(b, end)
            if first >= last:
                continue
            x, y = left + begin * scale, top + first * scale
            corners = [
                (x, y),
                (left + first * scale, y),
                (left + last * scale, top + last * scale),
                (x, top + last * scale),
            ]
            path = "M" + " L".join(f"{cx:g},{cy:g}" for cx, cy in corners) + " Z"
            canvas.path(path, PALETTE[rank][0], 0)
    for edge in edges[1:]:
        at = edge * scale
        canvas.line(left, top + at, left + side, top + at, GREY, 0.6)
        canvas.line(left + at, top, left + at, top + side, GREY, 0.6)
    words = (
        "A coloured shape is a segment: consecutive queries of one document on one rank. It reads "
        "the keys from the start of its document up to each query. A document's keys may lie on "
        "all ranks; its length need not divide by anything. The padding at the end attends to "
        "itself and counts in no loss."
    )
    for i, line in enumerate(textwrap.wrap(words, 32)):
        canvas.text(left + side + 28, top + 14 + 20 * i, line, size=13, fill=INK)
    return canvas.svg("Attention over context-parallel ranks")


PICTURES = {"context_split.svg": split_svg, "context_attention.svg": attention_svg}

if __name__ == "__main__":
    for name, draw in PICTURES.items():
        (HERE / name).write_text(draw(), encoding="utf-8")
