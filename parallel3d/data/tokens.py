"""A stream of tokens on the disk, read piece by piece when it is asked for."""

from __future__ import annotations

import os
from typing import BinaryIO

import numpy as np
import numpy.typing as npt

_TYPE = np.dtype("<u2")


class Tokens:
    """A part of a file as one read-only array of uint16 that is never all in memory.

    By reading, not by a map: where the file is cut short or a sector is bad, a map ends the process
    by SIGBUS, without a word. A slice (of step 1) is an array, and what `part` gives is `Tokens`.
    """

    dtype = _TYPE

    def __init__(self, file: BinaryIO, first: int, count: int) -> None:
        """Tokens from byte `first` of the open `file` on, which stays open as long as they live."""
        self._file, self._first, self._count = file, first, count

    def part(self, begin: int, end: int) -> Tokens:
        """Tokens `begin` … `end` - 1, 0 <= begin <= end <= their number; reads nothing."""
        if not 0 <= begin <= end <= self._count:
            raise IndexError(f"tokens {begin} to {end} of {self._count}")
        return Tokens(self._file, self._first + begin * _TYPE.itemsize, end - begin)

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, piece: slice) -> npt.NDArray[np.uint16]:
        """The tokens of a slice, shape (their number,). Raises OSError if the file has not all."""
        begin, end, _ = piece.indices(self._count)
        size = max(0, end - begin) * _TYPE.itemsize
        content = bytearray()
        while len(content) < size:
            at = self._first + begin * _TYPE.itemsize + len(content)
            read = os.pread(self._file.fileno(), size - len(content), at)
            if not read:
                raise OSError(f"{self._file.name} was cut short while it was in use")
            content += read
        return np.frombuffer(bytes(content), dtype=_TYPE)

    def __array__(self, dtype: npt.DTypeLike = None, copy: bool | None = None) -> npt.NDArray:
        return self[:].astype(dtype or _TYPE, copy=False)
