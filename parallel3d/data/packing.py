"""Packs documents into samples: best-fit decreasing, and plans of packs in the token cache.

The longest document comes first, each into the pack with the least sufficient space. Documents of
one length are interchangeable, and so are packs of equal content: all of them are placed in one
step, so the work grows with the number of lengths instead of documents. The packs are as many, and
as full, as if documents were placed one by one.

Sources: D. S. Johnson, "Near-Optimal Bin Packing Algorithms", MIT 1973; H. Ding and others, "Fewer
Truncations Improve Language Modeling", ICML 2024 (packing documents so).
"""

from __future__ import annotations

import hashlib
import json
import os
import struct
import zlib
from collections.abc import Callable, Iterator
from io import FileIO
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from parallel3d.data import cache
from parallel3d.data.cache import Report
from parallel3d.data.sampler import Order, Sample
from parallel3d.data.tokens import MAKE_ANEW, Proof, Tokens, WatchedFile
from parallel3d.files import no_link


class Content(NamedTuple):
    """The content of a pack: `documents` of `length` tokens, and what was placed before them."""

    length: int
    documents: int
    before: Content | None


class Packs(NamedTuple):
    """Packs: pack p has the items first[p] … first[p + 1] - 1, which are numbers of documents."""

    first: npt.NDArray[np.int64]
    items: npt.NDArray[np.int64]


def one_each(lengths: npt.NDArray[np.integer], capacity: int) -> Packs:
    """Returns a pack for each document; none is longer than `capacity`."""
    return Packs(np.arange(len(lengths) + 1), np.arange(len(lengths)))


def best_fit(lengths: npt.NDArray[np.integer], capacity: int) -> Packs:
    """Packs documents with 0 < length <= `capacity` into packs of at most `capacity` tokens."""
    if lengths.size and not 0 < int(lengths.min()) <= int(lengths.max()) <= capacity:
        raise ValueError(f"documents of {lengths.min()} to {lengths.max()} tokens for {capacity}")
    counts = np.bincount(lengths, minlength=capacity + 1)
    # The longest first; equal lengths in their own order.
    narrow = np.uint16 if capacity < 1 << 16 else np.uint32
    order = np.argsort((capacity - lengths).astype(narrow), kind="stable")
    place = order.size - np.cumsum(counts)  # index in `order` of the next document of a length
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
    """Yields numbers of equal packs, and their content."""
    # Numbers of equal packs and their content, by free space.
    begun: dict[int, list[tuple[int, Content | None]]] = {}
    free_bits = 0  # the keys of `begun` as a bit set
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
                free, packs, content = capacity, left, None
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


# Samples by a plan: whole documents one after another, the rest padded with end-of-text


class PackSampler:
    """Packs, epoch after epoch; padding and the first tokens of documents are no labels."""

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
        """`tokens`: the stream of `plan`; the rest as for `Sampler`."""
        self.seq_length, self.windows = plan.capacity - 1, plan.packs
        self._tokens, self._plan, self._eot = tokens, plan, eot
        self._order = Order(plan.packs, seed, shuffle, name)

    def will_read(self, i: int) -> None:
        """Prefetches the tokens of sample `i` if they lie on a disk."""
        if isinstance(self._tokens, Tokens):
            for start, length in zip(*self._plan.pack(self._order.at(i)), strict=True):
                self._tokens.will_read(start, start + length)

    def sample(self, i: int) -> Sample:
        """Returns sample `i` >= 0 of the endless sequence of epochs. Raises OSError for a damaged
        plan."""
        tokens = np.full(self.seq_length + 1, self._eot, np.int64)
        mask = np.zeros(self.seq_length, np.bool_)
        starts = np.zeros(self.seq_length, np.int32)
        number, at = self._order.at(i), 0
        for start, length in zip(*self._plan.pack(number), strict=True):
            end = at + length
            piece = self._tokens[start : start + length]
            if piece.size != length or end > tokens.size:
                raise OSError(f"the plan of packs is damaged: pack {number} does not fit its text")
            tokens[at:end] = piece
            mask[at : end - 1] = True
            starts[at:end] = at
            at = end
        starts[at:] = at  # the padding is a document by itself
        return Sample(tokens, mask, starts)


# A plan of packs, one file in the token cache's folder:
#
#     header (128 bytes) | i64 first piece of each pack, and the number of pieces
#         | i64 token at which each piece begins | i32 its length
#
# Little-endian. The header has a digest of the rest, and its own CRC-32.


_MAGIC = b"P3DPACKS"
_VERSION = 1
# magic, version, tokens that fit a pack, packs, pieces, their tokens, documents cut, digest
_HEADER = struct.Struct("<8sIIQQQQ16s")
_HEADER_CRC = struct.Struct("<I")
_BODY_AT = 128
_PROVED = 4 << 20  # bytes of a plan up to which its digest is checked at each opening


Fit = Callable[[npt.NDArray[np.int64], int], Packs]  # lengths, capacity → packs


class Pieces(NamedTuple):
    """Pieces of a stream, each of which fits any pack: their begins and lengths in tokens."""

    starts: npt.NDArray[np.int64]
    lengths: npt.NDArray[np.int64]
    cut: int  # documents longer than a pack


class PackingPlan:
    """An open plan, read from its file on demand."""

    def __init__(self, file: FileIO, capacity: int, sizes: tuple[int, int, int, int], digest: str):
        self._file, self.capacity, self.digest = file, capacity, digest
        self.packs, self.pieces, self.tokens, self.cut = sizes
        whole = 8 * (self.packs + 1) + 12 * self.pieces <= _PROVED

        def prove() -> Proof:
            if _header_of(file, capacity) != (*sizes, digest):
                return Proof.CHANGED
            return Proof.SAME if whole else Proof.SAMPLED

        self.watched = WatchedFile(file, prove, MAKE_ANEW)

    def pack(self, number: int) -> tuple[list[int], list[int]]:
        """Returns the begins and lengths of a pack's pieces. Raises OSError."""
        first, last = np.frombuffer(self._read(16, _BODY_AT + 8 * number), "<i8").tolist()
        count, starts_at = last - first, _BODY_AT + 8 * (self.packs + 1)
        if not 0 <= first < last <= self.pieces:
            raise OSError(f"{self._file.name} is damaged: pack {number} has no pieces")
        starts = self._read(8 * count, starts_at + 8 * first)
        lengths = self._read(4 * count, starts_at + 8 * self.pieces + 4 * first)
        return np.frombuffer(starts, "<i8").tolist(), np.frombuffer(lengths, "<i4").tolist()

    def _read(self, size: int, at: int) -> bytes:
        content = os.pread(self._file.fileno(), size, at)
        if len(content) != size:
            raise OSError(f"{self._file.name} was cut short while it was in use")
        return content


def pieces_of(begins: npt.NDArray[np.int64], tokens: int, capacity: int) -> Pieces:
    """Cuts a stream of `tokens` with documents at `begins`, the first at 0, into pieces.

    A piece starts with the last token of the piece before, so every token but a document's first is
    a label once. A document of one token has no label and is left out.
    """
    lengths = np.diff(begins, append=tokens)
    step = capacity - 1
    count = np.maximum(1, -(-(lengths - 1) // step))
    place = np.arange(int(count.sum())) - np.repeat(np.cumsum(count) - count, count)
    starts = np.repeat(begins, count) + place * step
    sizes = np.minimum(capacity, np.repeat(lengths, count) - place * step)
    kept = sizes > 1
    return Pieces(starts[kept], sizes[kept], int((lengths > capacity).sum()))


def plan_file(folder: Path, stream: str, capacity: int) -> Path:
    """Returns the file name of a stream's plan; `stream` identifies the stream."""
    facts = json.dumps([_VERSION, stream, capacity]).encode()
    return folder / f"{hashlib.blake2b(facts, digest_size=16).hexdigest()}.packs"


def kept_plan(
    path: Path, make: Callable[[], Pieces], capacity: int, report: Report, fit: Fit = best_fit
) -> PackingPlan:
    """Returns the plan at `path`, built of `make`'s pieces if it is missing. Raises UserError."""
    return cache.load_or_build(
        path,
        lambda: _load(path, capacity, report),
        lambda: _build(path, make(), capacity, report, fit),
        report,
        written="the plan of packs that",
    )


def _build(path: Path, pieces: Pieces, capacity: int, report: Report, fit: Fit) -> None:
    report(f"packing {pieces.starts.size:,} pieces of documents into samples")
    packs = fit(pieces.lengths, capacity)
    body = (
        packs.first.astype("<i8"),
        pieces.starts[packs.items].astype("<i8"),
        pieces.lengths[packs.items].astype("<i4"),
    )
    digest = hashlib.blake2b(digest_size=16)
    with cache.new_file(path) as file:
        file.write(bytes(_BODY_AT))
        for part in body:
            file.write(part.data)
            digest.update(part.data)
        sizes = packs.first.size - 1, packs.items.size, int(pieces.lengths.sum()), pieces.cut
        header = _HEADER.pack(_MAGIC, _VERSION, capacity, *sizes, digest.digest())
        file.seek(0)
        file.write(header + _HEADER_CRC.pack(zlib.crc32(header)))


def _load(path: Path, capacity: int, report: Report) -> PackingPlan | None:
    """Opens the plan at `path`; None if there is none of ours that is intact."""
    try:
        file = open(path, "rb", buffering=0, opener=no_link)  # noqa: SIM115  as long as the plan
    except (FileNotFoundError, NotADirectoryError):
        return None
    if cache.is_trusted(os.fstat(file.fileno()), path.parent):
        plan = _proved(file, capacity)
        problem = "is damaged"
    else:
        plan, problem = None, "is not taken: others than you may write it"
    if plan is None:
        file.close()
        report(f"the plan of packs {path} {problem}")
    return plan


def _proved(file: FileIO, capacity: int) -> PackingPlan | None:
    found = _header_of(file, capacity)
    return None if found is None else PackingPlan(file, capacity, found[:4], found[4])


def _header_of(file: FileIO, capacity: int) -> tuple[int, int, int, int, str] | None:
    """Returns sizes and digest of an intact plan; checks the digest of a small one only."""
    header = os.pread(file.fileno(), _BODY_AT, 0)
    if len(header) < _BODY_AT:
        return None
    magic, version, stored_capacity, *sizes, digest = _HEADER.unpack_from(header)
    (crc,) = _HEADER_CRC.unpack_from(header, _HEADER.size)
    size = 8 * (sizes[0] + 1) + 12 * sizes[1]
    if zlib.crc32(header[: _HEADER.size]) != crc:
        return None
    if (magic, version, stored_capacity) != (_MAGIC, _VERSION, capacity):
        return None
    if os.fstat(file.fileno()).st_size != _BODY_AT + size:
        return None
    if size <= _PROVED:
        body = os.pread(file.fileno(), size, _BODY_AT)
        if hashlib.blake2b(body, digest_size=16).digest() != digest:
            return None
    return (*sizes, digest.hex())
