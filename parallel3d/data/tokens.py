"""A stream of tokens on the disk, read piece by piece when it is asked for."""

from __future__ import annotations

import os
from typing import BinaryIO

import numpy as np
import numpy.typing as npt

_TYPE = np.dtype("<u2")


class Tokens:
    """A part of a file as one read-only array of integers that is never all in memory.

    By reading, not by a map: where the file is cut short or a sector is bad, a map ends the process
    by SIGBUS, without a word. A slice (of step 1) is an array, and what `part` gives is `Tokens`.
    """

    def __init__(self, file: BinaryIO, first: int, count: int, dtype: np.dtype = _TYPE) -> None:
        """Tokens from byte `first` of the open `file` on, which stays open as long as they live."""
        self._file, self._first, self._count = file, first, count
        self.dtype = dtype

    def part(self, begin: int, end: int) -> Tokens:
        """Tokens `begin` … `end` - 1, 0 <= begin <= end <= their number; reads nothing."""
        if not 0 <= begin <= end <= self._count:
            raise IndexError(f"tokens {begin} to {end} of {self._count}")
        first = self._first + begin * self.dtype.itemsize
        return Tokens(self._file, first, end - begin, self.dtype)

    def file_size(self) -> int:
        """Bytes of the whole file, now."""
        return os.fstat(self._file.fileno()).st_size

    def close(self) -> None:
        self._file.close()

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, piece: slice) -> npt.NDArray[np.integer]:
        """The tokens of a slice, shape (their number,). Raises OSError if the file has not all."""
        begin, end, _ = piece.indices(self._count)
        size = max(0, end - begin) * self.dtype.itemsize
        content = b""
        while len(content) < size:
            at = self._first + begin * self.dtype.itemsize + len(content)
            read = os.pread(self._file.fileno(), size - len(content), at)
            if not read:
                raise OSError(f"{self._file.name} was cut short while it was in use")
            content = content + read if content else read
        return np.frombuffer(content, dtype=self.dtype)

    def __array__(self, dtype: npt.DTypeLike = None, copy: bool | None = None) -> npt.NDArray:
        return self[:].astype(dtype or self.dtype, copy=False)
