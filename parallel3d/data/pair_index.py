"""The index of one of Megatron's pairs: `<prefix>.bin` holds tokens, `<prefix>.idx` says where
documents begin.

    .idx, little-endian: "MMIDIDX\\0\\0" | u64 version 1 | u8 type code | u64 sequences
        | u64 documents + 1 | i32 length of each sequence, tokens | i64 byte in .bin of each
        | i64 first sequence of each document, and the number of sequences
    .bin: the tokens of the sequences

Source: Megatron-Core, core/datasets/indexed_dataset.py.
"""

from __future__ import annotations

import mmap
import os
import stat
import struct
from typing import BinaryIO

import numpy as np
import numpy.typing as npt

from parallel3d.errors import UserError

MAGIC = b"MMIDIDX\0\0"
VERSION = 1
HEADER = struct.Struct("<9sQBQQ")
# By Megatron's type code; those of its floating-point numbers are no tokens.
TYPES = {
    code: np.dtype(name)
    for code, name in {1: "u1", 2: "i1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2"}.items()
}
_FLOATS = {6: "float64", 7: "float32"}

_SAMPLED = 4  # places of an index that are looked at when it is opened,
_RUN = 256  # documents at each of them
_FEW = 4096  # that are all looked at
_AT_A_TIME = 1 << 20
_INT64 = struct.Struct("<q")


class PairIndex:
    """An index, mapped and never resident, whose sequences lie one after another in the .bin.

    Its arrays are at no aligned address: numpy copies the whole of one where it needs that, as
    `searchsorted` does, hence the search by hand.
    """

    def __init__(self, file: BinaryIO, named: str) -> None:
        """The index in the open `file`, which may be closed then. Raises UserError.

        Reads the header, proves the size of the file by it, and looks at all documents of a small
        index, at some evenly chosen ones of another.
        """
        self._named, self._path = named, file.name
        self.dtype, self.sequences, self.documents = _header(file, named)
        self._pointers_at = HEADER.size + 4 * self.sequences
        self._documents_at = self._pointers_at + 8 * self.sequences
        self._prove_size(os.fstat(file.fileno()).st_size)
        self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        self.lengths = np.frombuffer(self._map, "<i4", self.sequences, HEADER.size)
        self._pointers = np.frombuffer(self._map, "<i8", self.sequences, self._pointers_at)
        self._firsts = np.frombuffer(self._map, "<i8", self.documents + 1, self._documents_at)
        self.tokens = int(self._pointers[-1]) // self.dtype.itemsize + int(self.lengths[-1])
        ends = int(self._firsts[0]), int(self._firsts[-1])
        if ends != (0, self.sequences):
            raise self.damaged(f"its documents are sequences {ends[0]} to {ends[1]}")
        if self._pointers[0] != 0:
            raise self.damaged(f"its first sequence begins at byte {int(self._pointers[0]):,}")
        for first, last in _runs(self.documents):
            self.begins(first, last)

    def document_from(self, token: int, first: int = 0) -> int:
        """The first document from `first` on that begins at `token` or after it, else `documents`.

        Searched for from `first` on in growing steps: cheap for one that is near.
        """
        low, step = first, 1
        while (high := low + step) < self.documents and self._begin(high) < token:
            low, step = high, 2 * step
        high = min(high, self.documents)
        while low < high:
            middle = (low + high) // 2
            if self._begin(middle) < token:
                low = middle + 1
            else:
                high = middle
        return low

    def begins(self, first: int, last: int) -> npt.NDArray[np.int64]:
        """The token at which each of the documents `first` … `last` - 1 begins.

        Raises UserError where their sequences do not lie one after another.
        """
        if first >= last:
            return np.zeros(0, np.int64)
        sequences = self._firsts[first : last + 1].astype(np.int64)
        begin, end = int(sequences[0]), int(sequences[-1])
        steps = sequences[1:] - sequences[:-1]
        if steps.min() < 0 or not 0 <= begin <= end <= self.sequences:
            raise self.damaged(f"documents {first:,} to {last:,} are not in the order of sequences")
        pointers = self._checked_pointers(begin, end)
        if end - begin == last - first and steps.max() == 1:  # each document is one sequence
            return pointers[: last - first] // self.dtype.itemsize
        return pointers[sequences[:-1] - begin] // self.dtype.itemsize

    def check_all(self) -> None:
        """Raises UserError if any sequence lies elsewhere than after the one before it."""
        for begin in range(0, self.sequences, _AT_A_TIME):
            self._checked_pointers(begin, min(begin + _AT_A_TIME, self.sequences))
        for first in range(0, self.documents, _AT_A_TIME):
            self.begins(first, min(first + _AT_A_TIME, self.documents))

    def _begin(self, document: int) -> int:
        """The token at which a document begins, `tokens` for those after the last token."""
        (sequence,) = _INT64.unpack_from(self._map, self._documents_at + 8 * document)
        if not 0 <= sequence < self.sequences:
            if sequence == self.sequences:
                return self.tokens
            raise self.damaged(f"document {document} begins at sequence {sequence:,}")
        (byte,) = _INT64.unpack_from(self._map, self._pointers_at + 8 * sequence)
        return byte // self.dtype.itemsize

    def _checked_pointers(self, begin: int, end: int) -> npt.NDArray[np.int64]:
        """The bytes at which sequences `begin` … `end` begin, which lie one after another.

        That number `end` may be the end of the .bin.
        """
        pointers = self._pointers[begin : end + 1].astype(np.int64)
        if end == self.sequences:  # behind it nothing begins
            pointers = np.concatenate((pointers, [self.tokens * self.dtype.itemsize]))
        lengths = self.lengths[begin:end].astype(np.int64)
        ends = pointers[:-1] + lengths * self.dtype.itemsize
        wrong = (ends != pointers[1:]) | (lengths < 0)
        if wrong.any():
            odd = int(wrong.argmax())
            raise self.damaged(
                f"sequence {begin + odd:,} has {int(lengths[odd]):,} tokens and ends at byte "
                f"{int(ends[odd]):,}, the next begins at byte {int(pointers[odd + 1]):,}"
            )
        return pointers

    def damaged(self, what: str) -> UserError:
        return UserError(
            f"{self._named} cannot be read, {self._path} does not fit its .bin: {what}; make the "
            "pair again"
        )

    def _prove_size(self, size: int) -> None:
        needed = self._documents_at + 8 * (self.documents + 1)
        if size < needed:
            raise UserError(
                f"{self._named} is cut short: {self._path} has {size:,} bytes, {self.sequences:,} "
                f"sequences and {self.documents:,} documents need {needed:,}; copy the pair again"
            )
        if size > needed:
            raise UserError(
                f"{self._named} cannot be read, {self._path} has {size - needed:,} bytes more than "
                "an index of text: pairs with modes (images) are not taken"
            )


def opened(path: str, named: str) -> BinaryIO:
    """The regular file at `path`, to read without a buffer. Raises UserError."""
    try:
        file = open(path, "rb", buffering=0, opener=_no_wait)  # noqa: SIM115  the caller closes it
    except (FileNotFoundError, NotADirectoryError):
        raise UserError(
            f"{named} does not exist, there is no {path}: give the prefix of a pair, its name "
            "without .bin and .idx"
        ) from None
    except OSError as error:
        raise UserError(
            f"{named} cannot be read, {path}: {error.strerror}; give a pair that you may read"
        ) from error
    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        file.close()
        raise UserError(f"{named} cannot be read, {path} is not a regular file: give a pair")
    return file


def _no_wait(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NONBLOCK | os.O_CLOEXEC)


def _header(file: BinaryIO, named: str) -> tuple[np.dtype, int, int]:
    """Type of the tokens, sequences and documents. Raises UserError."""
    head = os.pread(file.fileno(), HEADER.size, 0)
    if not head.startswith(MAGIC):
        raise UserError(f"{named} is no pair of Megatron's: {file.name} does not begin as an index")
    if len(head) < HEADER.size:
        raise UserError(f"{named} is cut short: {file.name} has {len(head)} bytes; copy it again")
    _, version, code, sequences, ends = HEADER.unpack(head)
    if version != VERSION:
        raise UserError(f"{named} has an index of version {version}: it must be {VERSION}")
    if code not in TYPES:
        what = _FLOATS.get(code, f"of the unknown type {code}")
        raise UserError(f"{named} holds numbers that are no tokens, {what}: it must hold integers")
    if not sequences or ends < 2:
        raise UserError(f"{named} holds no documents: give a pair that holds text")
    return TYPES[code], sequences, ends - 1


def _runs(count: int) -> list[tuple[int, int]]:
    """Begin and end of evenly chosen runs of `count` things: all of them if they are few."""
    if count <= _FEW:
        return [(0, count)]
    begins = [i * (count - _RUN) // (_SAMPLED - 1) for i in range(_SAMPLED)]
    return [(begin, begin + _RUN) for begin in begins]
