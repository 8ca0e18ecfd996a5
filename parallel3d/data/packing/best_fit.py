"""Best-fit decreasing: the longest document first, each into the pack with the least room for it.

Documents of a length are alike, and so are packs of one content: what is done once is done for all
of them, so that the work goes with the lengths there are and not with the documents. The packs are
as many, and as full, as document after document would make them.

Sources: D. S. Johnson, "Near-Optimal Bin Packing Algorithms", MIT 1973; H. Ding and others, "Fewer
Truncations Improve Language Modeling", ICML 2024 (packing documents so).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import numpy.typing as npt


class Content(NamedTuple):
    """What is in a pack: `documents` of `length` tokens, and what was put there before."""

    length: int
    documents: int
    before: Content | None


class Packs(NamedTuple):
    """Packs of which pack p has the items first[p] … first[p + 1] - 1, numbers of documents."""

    first: npt.NDArray[np.int64]
    items: npt.NDArray[np.int64]


def one_each(lengths: npt.NDArray[np.integer], room: int) -> Packs:
    """A pack for each document, filled up with nothing else; none is longer than `room`."""
    return Packs(np.arange(len(lengths) + 1), np.arange(len(lengths)))


def best_fit(lengths: npt.NDArray[np.integer], room: int) -> Packs:
    """Packs of at most `room` tokens of the documents of these lengths, 0 < length <= `room`."""
    if lengths.size and not 0 < int(lengths.min()) <= int(lengths.max()) <= room:
        raise ValueError(f"documents of {lengths.min()} to {lengths.max()} tokens for {room}")
    counts = np.bincount(lengths, minlength=room + 1)
    # Of one length in their own order, the longest first.
    narrow = np.uint16 if room < 1 << 16 else np.uint32
    order = np.argsort((room - lengths).astype(narrow), kind="stable")
    place = order.size - np.cumsum(counts)  # in `order`, of the next document of a length
    items, sizes = [], []
    for packs, content in _groups(counts, room):
        columns = []
        while content is not None:
            taken = packs * content.documents
            at = int(place[content.length])
            columns.append(order[at : at + taken].reshape(packs, content.documents))
            place[content.length] += taken
            content = content.before
        rows = np.concatenate(columns[::-1], axis=1)
        items.append(rows.reshape(-1))
        sizes.append(np.full(packs, rows.shape[1]))
    firsts = np.concatenate([np.zeros(1, np.int64), *sizes]).cumsum()
    return Packs(firsts, np.concatenate([np.zeros(0, np.int64), *items]))


def _groups(counts: npt.NDArray[np.integer], room: int) -> Iterator[tuple[int, Content]]:
    """Numbers of packs that are alike, and their content."""
    begun: dict[int, list[tuple[int, Content | None]]] = {}  # packs by the room that they have left
    rooms = 0  # the keys of `begun` as bits
    for length in np.flatnonzero(counts)[::-1].tolist():
        left = int(counts[length])
        while left:
            fitting = rooms >> length
            if fitting:
                free = length + (fitting & -fitting).bit_length() - 1
                packs, content = begun[free].pop()
                if not begun[free]:
                    del begun[free]
                    rooms &= ~(1 << free)
            else:
                free, packs, content = room, left, None
            each = free // length
            full, rest = divmod(left, each)
            filled = min(packs, full)
            made = [(filled, each)] if filled else []
            if filled < packs and rest:
                made.append((1, rest))
            if content is not None and (untouched := packs - sum(p for p, _ in made)):
                begun.setdefault(free, []).append((untouched, content))
                rooms |= 1 << free
            for some, documents in made:
                left -= some * documents
                now = free - documents * length
                begun.setdefault(now, []).append((some, Content(length, documents, content)))
                rooms |= 1 << now
    for free in sorted(begun):
        for packs, content in begun[free]:
            if content is not None:
                yield packs, content
