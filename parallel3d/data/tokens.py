"""Streams of tokens in files, local or remote, read slice by slice."""

from __future__ import annotations

import hashlib
import os
from copy import copy
from io import BufferedReader, FileIO, IOBase
from typing import Protocol

import numpy as np
import numpy.typing as npt

from parallel3d.errors import UserError

_TYPE = np.dtype("<u2")


class RemoteFile(Protocol):
    """A file that is not on this host's disks; `is_marked`: its server gives a version."""

    name: str
    size: int
    mark: str
    is_marked: bool

    def pread(self, size: int, at: int) -> bytes:
        """Reads up to `size` bytes from byte `at` on, fewer only at the end. Raises OSError."""
        ...

    def will_read(self, size: int, at: int) -> None:
        """Starts to fetch these bytes."""
        ...

    def check(self) -> None:
        """Raises UserError if the file is another one by now."""
        ...

    def close(self) -> None: ...


File = FileIO | BufferedReader | RemoteFile


def pread(file: File, size: int, at: int) -> bytes:
    """Reads up to `size` bytes of a file from byte `at` on."""
    if isinstance(file, IOBase):
        return os.pread(file.fileno(), size, at)
    return file.pread(size, at)


def size_of(file: File) -> int:
    """Returns the bytes of a file now."""
    return os.fstat(file.fileno()).st_size if isinstance(file, IOBase) else file.size


def mark_of(file: File) -> str:
    """Returns a string that changes once a file may have changed; it begins with the size and ":".

    For a local file times and inode now; for a remote one its opened version.
    """
    if not isinstance(file, IOBase):
        return file.mark
    status = os.fstat(file.fileno())
    # Not the device, whose number changes with each mount.
    facts = (status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino)
    return ":".join(map(str, facts))


def is_unlinked(file: File) -> bool:
    """Returns whether an open local file has no name any more."""
    return isinstance(file, IOBase) and os.fstat(file.fileno()).st_nlink == 0


def whole_digest(file: File) -> str:
    """Returns blake2b-16 of all bytes of a file, in hex. Raises OSError."""
    digest, at = hashlib.blake2b(digest_size=16), 0
    while content := pread(file, 1 << 20, at):
        digest.update(content)
        at += len(content)
    return digest.hexdigest()


class Tokens:
    """A part of a file as a read-only array of integers; slices (of step 1) are read on demand.

    Not mapped: a file cut short or a bad sector would end the process by SIGBUS.
    """

    def __init__(self, file: File, first: int, count: int, dtype: np.dtype = _TYPE) -> None:
        """Takes tokens from byte `first` of the open `file`, which must stay open."""
        self.file, self._first, self._count = file, first, count
        self.dtype = dtype
        self._limit, self._named = 0, ""

    def part(self, begin: int, end: int) -> Tokens:
        """Returns tokens `begin` … `end` - 1, 0 <= begin <= end <= their number; reads nothing."""
        if not 0 <= begin <= end <= self._count:
            raise IndexError(f"tokens {begin} to {end} of {self._count}")
        part = copy(self)
        part._first, part._count = self._first + begin * self.dtype.itemsize, end - begin
        return part

    def below(self, limit: int, named: str) -> Tokens:
        """Returns the same tokens, for which reading one of `limit` or more, or a negative one, is
        a UserError about `named`."""
        bounded = copy(self)
        if self.dtype.kind != "u" or np.iinfo(self.dtype).max >= limit:
            bounded._limit, bounded._named = limit, named
        return bounded

    def will_read(self, begin: int, end: int) -> None:
        """Prefetches a slice."""
        at, size = self._first + begin * self.dtype.itemsize, (end - begin) * self.dtype.itemsize
        if isinstance(self.file, IOBase):
            os.posix_fadvise(self.file.fileno(), at, size, os.POSIX_FADV_WILLNEED)
        else:
            self.file.will_read(size, at)

    def file_size(self) -> int:
        """Bytes of the whole file, now."""
        return size_of(self.file)

    def close(self) -> None:
        self.file.close()

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, piece: slice) -> npt.NDArray[np.integer]:
        """Returns the tokens of a slice, shape (n,). Raises OSError if the file is too short."""
        begin, end, _ = piece.indices(self._count)
        size = max(0, end - begin) * self.dtype.itemsize
        content = b""
        while len(content) < size:
            at = self._first + begin * self.dtype.itemsize + len(content)
            read = pread(self.file, size - len(content), at)
            if not read:
                raise OSError(f"{self.file.name} was cut short while it was in use")
            content = content + read if content else read
        tokens = np.frombuffer(content, dtype=self.dtype)
        if self._limit and tokens.size:
            self._check(tokens, begin)
        return tokens

    def _check(self, tokens: npt.NDArray[np.integer], begin: int) -> None:
        if int(tokens.max()) < self._limit and (self.dtype.kind == "u" or int(tokens.min()) >= 0):
            return
        at = int(np.flatnonzero((tokens < 0) | (tokens >= self._limit))[0])
        place = self._first // self.dtype.itemsize + begin + at
        raise UserError(
            f"{self._named} holds the token {int(tokens[at])} (at {place:,}), and must hold tokens "
            f"below model.vocab_size={self._limit}: give the tokenizer's own model, or another text"
        )

    def __array__(
        self, dtype: npt.DTypeLike | None = None, copy: bool | None = None
    ) -> npt.NDArray:
        return self[:].astype(dtype or self.dtype, copy=False)
