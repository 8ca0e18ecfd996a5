"""A file at any address of fsspec's (s3://, gs://, https://, memory://), read block by block.

Blocks that were fetched lie in a folder that the processes of a host share, each with a digest of
its bytes behind them: one that was cut short by a kill or a full disk is fetched again, never
taken. The folder holds a bounded number of bytes; what was not read for longest goes first.

A file is the version that was opened. A block is kept only if its file store still has that version
after the block came; else the run ends. Versions are told by ETags and the like. Times are coarse,
and a server may give neither: then some places of the file, read at its opening, are read again
with each block, and without even a time no block is left to another process.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import secrets
import shutil
import threading
import time
import weakref
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import fsspec

from parallel3d.data import cache
from parallel3d.data.cache import unusable
from parallel3d.errors import UserError
from parallel3d.files import no_link

T = TypeVar("T")

BLOCK = 256 << 10  # bytes
_DIGEST = 16  # bytes behind a block
_AT_ONCE = 8  # blocks that are fetched at the same time
_PAUSES_S = (0.5, 2.0, 5.0)  # before each further try
_TOUCHED_S = 60.0  # how exactly it is known when a block was read last
_LEFT_S = 3600.0  # after which an unfinished file is nobody's
_KEY = 2  # another one where blocks of older versions of this program are not to be taken
# What the file systems of fsspec call what is another one for each content, and times of change.
_VERSIONS = ("md5Hash", "Content-MD5", "blob_id", "generation", "ETag", "etag", "version_id")
_TIMES = ("Last-Modified", "LastModified", "last_modified", "mtime", "updated", "modify", "created")
_PLACES, _PLACE = 3, 1 << 10  # of a file without a version that are read again, bytes of each


class BlockCache:
    """The folder of blocks; those of one file lie in a folder of their own in it."""

    def __init__(self, folder: Path, most: int) -> None:
        """`most` bytes are kept, by each process as it sees the folder. Raises OSError, and
        UserError for a folder of another user, who could put any text in it."""
        cache.check_owner(folder)
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self.folder, self._most = folder, most
        self._lock = threading.Lock()
        self._held = sum(size for _, size, _ in self._blocks())
        self.pool = ThreadPoolExecutor(_AT_ONCE, "fetch")

    def read(self, path: Path, size: int) -> bytes | None:
        """The block of `size` bytes at `path`, or None if there is none that is whole."""
        try:
            with open(path, "rb", buffering=0, opener=no_link) as file:
                status = os.fstat(file.fileno())
                if not cache.is_trusted(status, path.parent):
                    return None
                content = file.read(size + _DIGEST + 1)
                if time.time() - status.st_mtime > _TOUCHED_S:
                    os.utime(file.fileno())
        except FileNotFoundError:
            return None
        block, digest = content[:size], content[size:]
        return block if len(block) == size and _digest(block) == digest else None

    def keep(self, path: Path, block: bytes) -> None:
        """Puts a block there whole; where there is no room for it, nothing is."""
        partial = path.with_name(f"{path.name}.{secrets.token_hex(4)}.partial")
        try:
            path.parent.mkdir(mode=0o700, exist_ok=True)
            with open(partial, "xb", opener=no_link) as file:
                file.write(block + _digest(block))
            os.replace(partial, path)
        except OSError:
            with contextlib.suppress(OSError):
                partial.unlink(missing_ok=True)
            return
        with self._lock:
            self._held += len(block) + _DIGEST
            if self._held > self._most:
                self._make_room()

    def _make_room(self) -> None:
        """Removes what was read longest ago until a tenth is free; others may do so as well."""
        blocks = sorted(self._blocks())
        self._held = sum(size for _, size, _ in blocks)
        for _, size, path in blocks:
            if self._held <= 0.9 * self._most:
                break
            with contextlib.suppress(OSError):
                path.unlink(missing_ok=True)
            self._held -= size

    def _blocks(self) -> list[tuple[float, int, Path]]:
        """When each was read last, its bytes, its path. Removes unfinished ones that are old."""
        found = []
        for path in self.folder.glob("*/*"):
            with contextlib.suppress(OSError):
                status = path.stat()
                if path.suffix != ".partial":
                    found.append((status.st_mtime, status.st_size, path))
                elif time.time() - status.st_mtime > _LEFT_S:
                    path.unlink(missing_ok=True)
        return found


class _Version(NamedTuple):
    """What a file system tells of a file. is_exact: another content has another version. etag: of
    HTTP, to ask for this version by."""

    size: int
    marks: list[str]
    is_exact: bool
    etag: str | None

    @classmethod
    def of(cls, info: dict[str, Any]) -> _Version:
        size, known = int(info["size"]), {key: str(info[key]) for key in info if info[key]}
        # A weak ETag stands for contents that are alike, whatever that is to its server.
        exact = [k for k in _VERSIONS if k in known and not known[k].startswith("W/")]
        # One that is exact is enough: times may differ between the servers of one address.
        keys = exact[:1] or [k for k in (*_VERSIONS, *_TIMES) if k in known]
        etag = known["ETag"] if "ETag" in exact else None
        return cls(size, [f"{k}={known[k]}" for k in keys], bool(exact), etag)


class BlockFile:
    """One file elsewhere, as `Tokens` reads a file: by `pread`, and told ahead by `will_read`.

    Attributes:
        mark: the size, and a digest of the version that was opened.
        is_marked: its server tells one state of it from another.
    """

    def __init__(self, address: str, cache: BlockCache, named: str) -> None:
        """Raises UserError if there is no such file, or it cannot be reached."""
        self.name, self._cache = address, cache
        try:
            self._files, self._path = fsspec.core.url_to_fs(address, skip_instance_cache=True)
            self._version = self._ask()
            self.size = self._version.size
            at = [k * max(0, self.size - _PLACE) // (_PLACES - 1) for k in range(_PLACES)]
            kept = [] if self._version.is_exact else sorted({*at})
            self._places = {at: _retried(lambda at=at: self._place(at)) for at in kept}
        except FileNotFoundError:
            raise UserError(
                f"{named} does not exist, there is no {address}: give the prefix of a pair, its "
                "name without .bin and .idx"
            ) from None
        except Exception as error:  # each of fsspec's file systems raises its own kinds
            raise UserError(
                f"{named} cannot be read, {address}: {_words(error)}; give a pair that this host "
                "can reach"
            ) from error
        places = [digest.hex() for digest in self._places.values()]
        facts = json.dumps([*self._version, places]).encode()
        self.mark = f"{self.size}:{hashlib.blake2b(facts, digest_size=16).hexdigest()}"
        key = json.dumps([_KEY, address, BLOCK, self.mark]).encode()
        self._folder = cache.folder / hashlib.blake2b(key, digest_size=16).hexdigest()
        self.is_marked = bool(self._version.marks)
        if not self.is_marked:
            self._folder = self._folder.with_name(f"{self._folder.name}-{secrets.token_hex(8)}")
            weakref.finalize(self, shutil.rmtree, self._folder, ignore_errors=True)
        self._is_over = False  # another version was seen
        self._seen: dict[int, bytes] = {}  # digests of blocks, of a file without a version
        self._lock = threading.Lock()
        self._under_way: dict[int, Future[bytes]] = {}

    def pread(self, size: int, at: int) -> bytes:
        """Up to `size` bytes from byte `at` on, fewer only at the end. Raises OSError."""
        end = min(at + size, self.size)
        if end <= at:
            return b""
        first, last = at // BLOCK, (end - 1) // BLOCK
        if last > first:
            self.will_read(size, at)
        content = b"".join(self._block(number) for number in range(first, last + 1))
        return content[at - first * BLOCK : end - first * BLOCK]

    def will_read(self, size: int, at: int) -> None:
        """Begins to fetch what is not here of these bytes, without waiting for it."""
        for number in range(at // BLOCK, (min(at + size, self.size) - 1) // BLOCK + 1):
            if not self._file(number).exists():
                self._fetched(number)

    def check(self) -> None:
        """Raises UserError if the version that was opened is there no more, OSError if that cannot
        be known."""
        self._patiently("checked", self._check)

    def close(self) -> None:
        """Nothing is open."""

    def _check(self) -> None:
        is_same = self._ask() == self._version
        is_same = is_same and all(self._place(at) == was for at, was in self._places.items())
        # Once it was another one, blocks that are on their way may be that one's, also if the
        # first is back by now.
        if self._is_over or not is_same:
            raise self._changed()

    def _changed(self) -> UserError:
        self._is_over = True
        return UserError(
            f"{self.name} was changed while the run was reading it: put back the one that the run "
            "began with and start again, or choose another run="
        )

    def _ask(self) -> _Version:
        self._files.invalidate_cache(self._path)
        return _Version.of(self._files.info(self._path))

    def _cat(self, begin: int, end: int) -> bytes:
        more: dict[str, Any] = {}
        if "http" in self._files.protocol and (etag := self._version.etag):
            headers = self._files.kwargs.get("headers", {})
            more = {"headers": {**headers, "If-Match": etag}}
        content = bytes(self._files.cat_file(self._path, start=begin, end=end, **more))
        if len(content) != end - begin:
            raise OSError(f"{len(content):,} bytes of {end - begin:,} came")
        return content

    def _place(self, at: int) -> bytes:
        return _digest(self._cat(at, min(at + _PLACE, self.size)))

    def _block(self, number: int) -> bytes:
        block = self._cache.read(self._file(number), self._size(number))
        return self._fetched(number).result() if block is None else block

    def _fetched(self, number: int) -> Future[bytes]:
        with self._lock:
            future = self._under_way.get(number)
            if future is None:
                future = self._under_way[number] = self._cache.pool.submit(self._fetch, number)
        return future

    def _fetch(self, number: int) -> bytes:
        try:
            # A fetch may have ended between its caller's look and this one's start.
            block = self._cache.read(self._file(number), self._size(number))
            if block is None:
                block = self._download(number)
                self._cache.keep(self._file(number), block)
            return block
        finally:
            with self._lock:
                del self._under_way[number]

    def _download(self, number: int) -> bytes:
        at = number * BLOCK

        def once() -> bytes:
            try:
                return self._cat(at, at + self._size(number))
            finally:
                self._check()

        block = self._patiently(f"read at byte {at:,}", once)
        digest = _digest(block)
        if not self._version.is_exact and self._seen.setdefault(number, digest) != digest:
            raise self._changed()
        return block

    def _patiently(self, verb: str, call: Callable[[], T]) -> T:
        try:
            return _retried(call)
        except UserError:
            raise
        except Exception as error:
            raise OSError(f"{self.name} cannot be {verb}: {_words(error)}") from error

    def _file(self, number: int) -> Path:
        return self._folder / f"{number}.block"

    def _size(self, number: int) -> int:
        return min(BLOCK, self.size - number * BLOCK)


def _retried(call: Callable[[], T]) -> T:
    """What `call` returns at the first try that does not fail; a UserError is not tried again."""
    for pause in _PAUSES_S:
        try:
            return call()
        except UserError:
            raise
        except Exception:
            time.sleep(pause)
    return call()


def _words(error: Exception) -> str:
    lines = str(error).splitlines()
    return lines[0] if lines else type(error).__name__


def _digest(block: bytes) -> bytes:
    return hashlib.blake2b(block, digest_size=_DIGEST).digest()


# The files of a pair at an address, through one cache for all of them.


_LARGEST = 1 << 20  # bytes of a file that is read whole


class Remote:
    """Opens files elsewhere; their blocks are kept in `folder`, at most `most` bytes of them."""

    def __init__(self, folder: Path, most: int) -> None:
        """Raises UserError for a folder that cannot hold them."""
        try:
            self._cache = BlockCache(folder, most)
        except OSError as error:
            raise unusable(folder, error.strerror or str(error)) from error

    def opened(self, address: str, named: str) -> BlockFile:
        """The file at `address`; `named` is what errors call it. Raises UserError."""
        return BlockFile(address, self._cache, named)

    def read(self, address: str) -> bytes:
        """A small file's content. Raises FileNotFoundError, and OSError or ValueError."""
        try:
            file = self.opened(address, address)
        except UserError as error:
            if isinstance(error.__context__, FileNotFoundError):
                raise FileNotFoundError(address) from None
            raise OSError(str(error)) from error
        if file.size > _LARGEST:
            raise ValueError(f"{address} has {file.size:,} bytes, more than {_LARGEST:,}")
        return file.pread(file.size, 0)
