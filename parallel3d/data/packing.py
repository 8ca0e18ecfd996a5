"""Packs documents into samples by best-fit decreasing, and keeps the plans in the token cache.

Documents are placed from the longest to the shortest, each into the pack with the least free space
that still suffices. Documents of one length are interchangeable, and so are packs of equal content,
so all of them are placed in one step. The work therefore grows with the number of lengths, not of
documents. The result has as many packs, equally full, as if documents were placed one by one.

Sources: D. S. Johnson, "Near-Optimal Bin Packing Algorithms", MIT 1973; H. Ding and others, "Fewer
Truncations Improve Language Modeling", ICML 2024 (best-fit packing of documents).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from parallel3d.data import cache
from parallel3d.data.sampler import Order, Sample
from parallel3d.data.tokens import Tokens, WatchedFile, size_of
from parallel3d.files import replace_durably

_log = logging.getLogger(__name__)


class Content(NamedTuple):
    """The content of a pack: `documents` documents of `length` tokens each, after `before`.

    `before` is the content that was placed earlier; None if there is none.
    """

    length: int
    documents: int
    before: Content | None


class Packs(NamedTuple):
    """Packs of documents: pack p holds the documents numbered items[first[p] : first[p + 1]]."""

    first: npt.NDArray[np.int64]
    items: npt.NDArray[np.int64]


def one_each(lengths: npt.NDArray[np.integer], capacity: int) -> Packs:
    """Puts each document into a pack of its own; no document may be longer than `capacity`."""
    return Packs(np.arange(len(lengths) + 1), np.arange(len(lengths)))


def best_fit(lengths: npt.NDArray[np.integer], capacity: int) -> Packs:
    """Packs documents of 1 to `capacity` tokens into packs of at most `capacity` tokens."""
    if lengths.size and not 0 < int(lengths.min()) <= int(lengths.max()) <= capacity:
        raise ValueError(
            f"documents must have 1 to {capacity} tokens, but have {lengths.min()} to "
            f"{lengths.max()}"
        )
    counts = np.bincount(lengths, minlength=capacity + 1)
    # The longest documents come first; documents of equal length keep their order.
    narrow = np.uint16 if capacity < 1 << 16 else np.uint32
    order = np.argsort((capacity - lengths).astype(narrow), kind="stable")
    place = order.size - np.cumsum(counts)  # index in `order` of each length's next document
    items: list[npt.NDArray[np.int64]] = []
    sizes: list[npt.NDArray[np.int64]] = []
    for packs, content in _groups(counts, capacity):
        columns = []
        layer: Content | None = content
        while layer is not None:
            taken = packs * layer.documents
            at = int(place[layer.length])
            columns.append(order[at : at + taken].reshape(packs, layer.documents))
            place[layer.length] += taken
            layer = layer.before
        rows = np.concatenate(columns[::-1], axis=1)
        items.append(rows.reshape(-1))
        sizes.append(np.full(packs, rows.shape[1]))
    firsts = np.concatenate([np.zeros(1, np.int64), *sizes]).cumsum()
    return Packs(firsts, np.concatenate([np.zeros(0, np.int64), *items]))


def _groups(counts: npt.NDArray[np.integer], capacity: int) -> Iterator[tuple[int, Content]]:
    """Yields groups of equal packs: the number of packs, and the content of each."""
    # Groups of equal packs, as (number of packs, content), by the free space in each pack.
    begun: dict[int, list[tuple[int, Content | None]]] = {}
    free_bits = 0  # a bit set of the keys of `begun`
    for length in np.flatnonzero(counts)[::-1].tolist():
        left = int(counts[length])
        while left:
            fitting = free_bits >> length
            if fitting:
                free = length + (fitting & -fitting).bit_length() - 1
                packs, content = begun[free].pop()
                if not begun[free]:
                    del begun[free]
                    free_bits &= ~(1 << free)
            else:
                free = capacity
                packs = left
                content = None
            each = free // length
            full, rest = divmod(left, each)
            filled = min(packs, full)
            made = [(filled, each)] if filled else []
            if filled < packs and rest:
                made.append((1, rest))
            if content is not None and (untouched := packs - sum(p for p, _ in made)):
                begun.setdefault(free, []).append((untouched, content))
                free_bits |= 1 << free
            for some, documents in made:
                left -= some * documents
                now = free - documents * length
                begun.setdefault(now, []).append((some, Content(length, documents, content)))
                free_bits |= 1 << now
    for free in sorted(begun):
        for packs, content in begun[free]:
            if content is not None:
                yield packs, content


# Samples from a plan: whole documents one after another, then padding with end-of-text


class PackSampler:
    """Makes samples from packs, epoch after epoch.

    Neither padding nor the first token of a piece counts as a label.
    """

    masks = True

    def __init__(
        self,
        tokens: npt.NDArray[np.integer] | Tokens,
        plan: PackingPlan,
        seed: int,
        shuffle: bool,
        eot: int,
        name: str = "",
    ) -> None:
        """Reads packs of `plan` from its stream `tokens`; other arguments are as in `Sampler`."""
        self.seq_length = plan.capacity - 1
        self.windows = plan.packs
        self._tokens = tokens
        self._plan = plan
        self._eot = eot
        self._order = Order(plan.packs, seed, shuffle, name)

    def will_read(self, i: int) -> None:
        """Prefetches the tokens of sample `i` if they are read from a file."""
        if isinstance(self._tokens, Tokens):
            for start, length in zip(*self._plan.pack(self._order.at(i)), strict=True):
                self._tokens.will_read(start, start + length)

    def sample(self, i: int) -> Sample:
        """Returns sample `i` >= 0 of the endless sequence of epochs.

        Raises OSError if the plan is damaged.
        """
        tokens = np.full(self.seq_length + 1, self._eot, np.int64)
        mask = np.zeros(self.seq_length, np.bool_)
        starts = np.zeros(self.seq_length, np.int32)
        number, at = self._order.at(i), 0
        for start, length in zip(*self._plan.pack(number), strict=True):
            end = at + length
            piece = self._tokens[start : start + length]
            if piece.size != length or end > tokens.size:
                raise OSError(
                    f"the plan of packs is damaged: pack {number} does not match the text"
                )
            tokens[at:end] = piece
            mask[at : end - 1] = True
            starts[at:end] = at
            at = end
        starts[at:] = at  # the padding is a document by itself
        return Sample(tokens, mask, starts, min(at, self.seq_length))


# The format of a packing plan, the little-endian file `<key>.packs` in the token cache:
#
#     i64 index of the first piece of each pack, then the number of pieces
#         | i64 index of the first token of each piece | i32 length of each piece


PLAN_VERSION = 2

Fit = Callable[[npt.NDArray[np.int64], int], Packs]  # lengths, capacity → packs


class StreamPieces(NamedTuple):
    """The starts and lengths, in tokens, of pieces of a stream, each of which fits into a pack."""

    starts: npt.NDArray[np.int64]
    lengths: npt.NDArray[np.int64]
    cut: int  # number of documents that are longer than a pack


class PackingPlan:
    """An open packing plan, which is read from its file on demand."""

    def __init__(
        self, files: Mapping[str, WatchedFile], facts: Mapping[str, Any], capacity: int
    ) -> None:
        """Opens a plan from its files and builder's facts. Raises ValueError if it is damaged."""
        self.watched = files[".packs"]
        self.capacity = capacity
        self.packs = int(facts["packs"])
        self.digest = self.watched.digest
        file, starts_at = self.watched.file, 8 * (self.packs + 1)
        pieces, rest = divmod(size_of(file) - starts_at, 12)
        self._firsts = Tokens(file, 0, self.packs + 1, np.dtype("<i8"))
        self._starts = Tokens(file, starts_at, pieces, np.dtype("<i8"))
        self._lengths = Tokens(file, starts_at + 8 * pieces, pieces, np.dtype("<i4"))
        if rest or pieces < 0 or self._firsts[self.packs :].tolist() != [pieces]:
            raise ValueError(f"{self.packs} packs")

    def pack(self, number: int) -> tuple[list[int], list[int]]:
        """Returns the starts and lengths of a pack's pieces. Raises OSError."""
        first, last = self._firsts[number : number + 2].tolist()
        return self._starts[first:last].tolist(), self._lengths[first:last].tolist()


def pieces_of(begins: npt.NDArray[np.int64], tokens: int, capacity: int) -> StreamPieces:
    """Cuts the documents of a stream into pieces of at most `capacity` tokens.

    Each further piece of a document starts with the last token of the previous piece, so every
    token except a document's first is a label once. A document of one token has no label and is
    left out.

    Args:
        begins: the first token of each document; begins[0] is 0.
        tokens: the number of tokens of the stream.
    """
    lengths = np.diff(begins, append=tokens)
    step = capacity - 1
    count = np.maximum(1, -(-(lengths - 1) // step))
    place = np.arange(int(count.sum())) - np.repeat(np.cumsum(count) - count, count)
    starts = np.repeat(begins, count) + place * step
    sizes = np.minimum(capacity, np.repeat(lengths, count) - place * step)
    kept = sizes > 1
    return StreamPieces(starts[kept], sizes[kept], int((lengths > capacity).sum()))


def kept_plan(
    folder: Path,
    key: str,
    make: Callable[[], StreamPieces],
    capacity: int,
    fit: Fit = best_fit,
) -> PackingPlan:
    """Returns the plan `key` in `folder`, after packing the pieces of `make` if necessary.

    Raises UserError if the folder cannot be used.
    """

    def build(prefix: Path) -> dict[str, int]:
        pieces = make()
        _log.info(f"packing {pieces.starts.size:,} pieces of documents into samples")
        packs = fit(pieces.lengths, capacity)
        parts = (
            packs.first.astype("<i8"),
            pieces.starts[packs.items].astype("<i8"),
            pieces.lengths[packs.items].astype("<i4"),
        )
        replace_durably(Path(f"{prefix}.packs"), b"".join(part.data for part in parts))
        return {"packs": packs.first.size - 1}

    opened = partial(PackingPlan, capacity=capacity)
    return cache.kept(folder, key, (".packs",), build, opened)
