"""Reads streams of tokens from local and remote files, and watches the files for changes."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterable, Mapping
from copy import copy
from enum import Enum
from io import FileIO, IOBase
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from parallel3d.errors import UserError
from parallel3d.files import plain


class LocalFile(FileIO):
    """A file open for reading that can be pickled: another process opens it again by its name.

    Where torch must not be forked, DataLoader spawns its workers and pickles the source for them.
    """

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        return _opened_again, (os.path.abspath(os.fsdecode(self.name)), mark_of(self))


def _opened_again(path: str, mark: str) -> LocalFile:
    """Opens a file that another process has open. Raises UserError if the file has changed."""
    try:
        file = LocalFile(path)
    except OSError as error:
        raise UserError(f"{path} cannot be opened again ({error.strerror})") from None
    # The third fact, the time of change, is not compared, as a new link or a rename changes it.
    facts, now = mark.split(":"), mark_of(file).split(":")
    if facts[:2] + facts[3:] != now[:2] + now[3:]:
        file.close()
        raise UserError(f"{path} was changed since it was opened: open the corpus again")
    return file


class RemoteFile(Protocol):
    """A file that is not on this host's disks, such as `remote.BlockFile`."""

    name: str
    size: int
    mark: str

    def pread(self, size: int, at: int) -> bytes: ...

    def will_read(self, size: int, at: int) -> None: ...

    def check(self) -> None: ...


File = FileIO | RemoteFile


def pread(file: File, size: int, at: int) -> bytes:
    """Reads up to `size` bytes of a file from byte `at` on."""
    if isinstance(file, IOBase):
        return os.pread(file.fileno(), size, at)
    return file.pread(size, at)


def size_of(file: File) -> int:
    """Returns the present size of a file in bytes."""
    return os.fstat(file.fileno()).st_size if isinstance(file, IOBase) else file.size


def mark_of(file: File) -> str:
    """Returns a string that changes if the file may have changed; it begins with the size and ":".

    The string holds the present times and inode of a local file, or the opened version of a remote
    file.
    """
    if not isinstance(file, IOBase):
        return file.mark
    status = os.fstat(file.fileno())
    # The device is left out, because its number may change with each mount.
    facts = (status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino)
    return ":".join(map(str, facts))


def whole_digest(file: File) -> str:
    """Returns the 16-byte blake2b digest of a whole file, in hex. Raises OSError."""
    digest, at = hashlib.blake2b(digest_size=16), 0
    while content := pread(file, 1 << 20, at):
        digest.update(content)
        at += len(content)
    return digest.hexdigest()


# Keys of a file's version, and of its modification time, in the `info` of fsspec's file systems.
VERSIONS = ("md5Hash", "Content-MD5", "blob_id", "generation", "ETag", "etag", "version_id")
TIMES = (
    *("Last-Modified", "LastModified", "last_modified", "last_commit", "mtime", "updated"),
    *("modify", "created"),
)


def version_of(info: Mapping[str, Any]) -> dict[str, str]:
    """Returns the facts of fsspec's `info` that identify a remote file's version, {} if unknown.

    A weak ETag is ignored, since different contents have the same one if the server calls them
    equivalent. Times are left out if there is an exact version, since they may differ between the
    servers of an address.
    """
    known = {key: str(info[key]) for key in (*VERSIONS, *TIMES) if info.get(key)}
    exact = [key for key in VERSIONS if not known.get(key, "W/").startswith("W/")][:1]
    told = exact or [key for key in TIMES if key in known]
    return {key: known[key] for key in told}


class Tokens:
    """A part of a file as a read-only array of integers; slices (of step 1) are read on demand.

    The file is not mapped into memory, because a truncated file or a bad sector would then end the
    process by SIGBUS.
    """

    def __init__(self, file: File, first: int, count: int, dtype: np.dtype) -> None:
        """Presents `count` tokens that begin at byte `first` of `file`, which must stay open."""
        self.file = file
        self._first = first
        self._count = count
        self.dtype = dtype
        self._limit = 0
        self._named = ""
        self._texts: Mapping[int, str] = {}

    def part(self, begin: int, end: int) -> Tokens:
        """Returns the tokens from `begin` up to `end`, without reading them. Raises IndexError."""
        if not 0 <= begin <= end <= self._count:
            raise IndexError(f"tokens {begin} to {end} of {self._count}")
        part = copy(self)
        part._first = self._first + begin * self.dtype.itemsize
        part._count = end - begin
        return part

    def below(self, limit: int, named: str, texts: Mapping[int, str] | None = None) -> Tokens:
        """Returns the same tokens, but with a check of each slice that is read.

        Reading a token that is negative or not below `limit` raises UserError; the error calls the
        text `named`. `texts` are the texts of tokens that are not below `limit`.
        """
        bounded = copy(self)
        if self.dtype.kind != "u" or np.iinfo(self.dtype).max >= limit:
            bounded._limit = limit
            bounded._named = named
            bounded._texts = texts or {}
        return bounded

    def will_read(self, begin: int, end: int) -> None:
        """Prefetches the tokens from `begin` up to `end`."""
        at, size = self._first + begin * self.dtype.itemsize, (end - begin) * self.dtype.itemsize
        if isinstance(self.file, IOBase):
            os.posix_fadvise(self.file.fileno(), at, size, os.POSIX_FADV_WILLNEED)
        else:
            self.file.will_read(size, at)

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
        token = self._spelled(int(tokens[at]))
        raise UserError(
            f"{self._named} holds the token {token} at position {place:,}, but its tokens must be "
            f"from 0 to model.vocab_size - 1 = {self._limit - 1}: give a model with "
            "this text's tokenizer, or another text"
        )

    def _spelled(self, token: int) -> str:
        return f"{plain(self._texts[token])} ({token})" if token in self._texts else str(token)

    def __array__(
        self, dtype: npt.DTypeLike | None = None, copy: bool | None = None
    ) -> npt.NDArray:
        return self[:].astype(dtype or self.dtype, copy=False)


# Changes to the files that a run reads, after it opened them


REBUILD = "remove it and start again: it will be rebuilt"
# limit in bytes; larger files are not reread in full, because every rank would do so
PROVED = 256 << 20


class Proof(Enum):
    """The result of checking a file again: unchanged, unchanged where sampled, or changed."""

    SAME = 1
    SAMPLED = 2
    CHANGED = 3


class WatchedFile:
    """An open file and its mark when it was last checked."""

    def __init__(
        self, file: File, prove: Callable[[], Proof], remedy: str, digest: str = ""
    ) -> None:
        """Records the file's present mark.

        Args:
            prove: compares the content with that at the time of opening.
            remedy: advice to the user after a change.
            digest: digest of the whole file; "" if it is not known.
        """
        self.file = file
        self.prove = prove
        self._remedy = remedy
        self.digest = digest
        self.mark = mark_of(file)

    def look(self) -> str | None:
        """Checks the file for changes since the last look.

        Returns a sentence if it may have changed; raises UserError if it has.
        """
        before, now = self.mark, mark_of(self.file)
        if now == before:
            return None
        sizes = [int(mark.partition(":")[0]) for mark in (before, now)]
        if sizes[0] != sizes[1]:
            raise self.changed(f"during the run, from {sizes[0]:,} bytes to {sizes[1]:,}")
        proof = self.prove()
        if proof is Proof.CHANGED:
            raise self.changed("during the run, at the same size")
        self.mark = now
        if isinstance(self.file, IOBase) and os.fstat(self.file.fileno()).st_nlink == 0:
            return (
                f"{self.file.name} was replaced or removed: this run continues with the file that "
                "it opened, but a later start would read another"
            )
        if proof is Proof.SAME:
            return None
        return (
            f"{self.file.name} was written to or touched during the run: its size and samples of "
            "its content are unchanged, but the rest is unknown"
        )

    def changed(self, how: str) -> UserError:
        return UserError(f"{self.file.name} was changed {how}: {self._remedy}")


def prove(file: File, digest: str | None) -> Proof:
    """Compares a file with its digest, unless that is None or the file is larger than PROVED."""
    if digest is None or size_of(file) > PROVED:
        return Proof.SAMPLED
    return Proof.SAME if whole_digest(file) == digest else Proof.CHANGED


class TextComparison(NamedTuple):
    """The result of comparing files with an earlier start; at most one field is set.

    Attributes:
        refusal: why the run must not continue.
        note: a sentence about files that may have changed.
    """

    refusal: str | None = None
    note: str | None = None


def look_at(files: Iterable[WatchedFile]) -> list[str]:
    """Returns sentences on files that may have changed since the last look.

    Raises UserError for a file that has changed.
    """
    return [sentence for file in files if (sentence := file.look()) is not None]


def marks_of(watched: Mapping[str, WatchedFile]) -> str:
    """Returns the marks of files as `key=mark …`, for `compare` at a later start."""
    return " ".join(f"{key}={file.mark}" for key, file in watched.items())


def compare(watched: Mapping[str, WatchedFile], marks: str) -> TextComparison:
    """Compares files with their `marks` of an earlier start that had the same fingerprints."""
    there = dict(mark.partition("=")[::2] for mark in marks.split())
    odd = [file for key, file in watched.items() if there.get(key, file.mark) != file.mark]
    unknown = []
    for file in odd:
        try:
            proof = file.prove()
        except UserError as error:
            return TextComparison(refusal=str(error))
        if proof is Proof.CHANGED:
            return TextComparison(refusal=str(file.changed("since the last checkpoint")))
        if proof is Proof.SAMPLED:
            unknown.append(file.file.name)
    if not unknown:
        return TextComparison()
    more = f" and {len(unknown) - 1:,} more" if unknown[1:] else ""
    return TextComparison(
        note=f"{unknown[0]}{more} may have changed since the last checkpoint, by time of change, "
        "inode or version: sizes and samples of the content are unchanged, but the rest is unknown"
    )
