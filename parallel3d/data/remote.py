"""Reads files at fsspec addresses (s3://, gs://, https://, memory://) block by block.

Fetched blocks are stored in a folder shared by the processes of a host. Each block is followed by
its digest, so that a block cut short by a kill or a full disk is fetched again. The folder's size
is bounded, and the least recently read blocks are removed first. fsspec's own `blockcache` reads as
zeros after a failed fetch, and has no bound.

A run reads the version of a file that it opened. A block is kept only if the store still has that
version after the block arrived; otherwise the run ends. A version is an ETag or the like. If
only a modification time is known, which is coarse, samples of the content are compared as well.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import secrets
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import fsspec

from parallel3d.data.cache import check_owner, digest_of, is_trusted, unusable
from parallel3d.data.tokens import TIMES, version_of
from parallel3d.errors import UserError, first_line
from parallel3d.files import no_link

T = TypeVar("T")

BLOCK = 256 << 10  # bytes
_DIGEST = 16  # number of bytes after a block
_AT_ONCE = 8  # maximum number of concurrent fetches
PAUSES_S: tuple[float, ...] = (0.5, 2.0, 5.0)  # pauses before each retry, in seconds
_TOUCHED_S = 60.0  # resolution, in seconds, of a block's time of last read
_LEFT_S = 3600.0  # age in seconds at which an unfinished file counts as abandoned
_KEY = 3  # to be increased when blocks of older versions of this program become invalid
_PLACES = 3  # number of samples of the content that are compared if only a time is known
_PLACE = 1 << 10  # size of a sample in bytes
_LARGEST = 1 << 20  # size in bytes of the largest file that `BlockCache.read` reads


class BlockCache:
    """The folder of blocks, with a subfolder for each file."""

    def __init__(self, folder: Path, most: int) -> None:
        """Opens `folder`, limited to about `most` bytes; each process counts separately.

        Raises UserError for a folder that cannot be used, or that belongs to another user, who
        could put any text in it.
        """
        check_owner(folder)
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as error:
            raise unusable(folder, error.strerror or str(error)) from error
        self.folder = folder
        self._most = most
        self._lock = threading.Lock()
        self._held = sum(size for _, size, _ in self._blocks())
        self.pool = ThreadPoolExecutor(_AT_ONCE, "fetch")

    def __reduce__(self) -> tuple[Any, ...]:
        return BlockCache, (self.folder, self._most)

    def opened(self, address: str, named: str) -> BlockFile:
        """Opens the file at `address`, called `named` in errors. Raises UserError."""
        return BlockFile(address, self, named)

    def read(self, address: str) -> bytes:
        """Reads a small file. Raises FileNotFoundError, OSError or ValueError."""
        try:
            file = self.opened(address, address)
        except UserError as error:
            if isinstance(error.__context__, FileNotFoundError):
                raise FileNotFoundError(address) from None
            raise OSError(str(error)) from error
        if file.size > _LARGEST:
            raise ValueError(f"{address} has {file.size:,} bytes, more than {_LARGEST:,}")
        return file.pread(file.size, 0)

    def block(self, path: Path, size: int) -> bytes | None:
        """Returns the block of `size` bytes at `path`, or None if it is missing or unusable."""
        try:
            with open(path, "rb", buffering=0, opener=no_link) as file:
                status = os.fstat(file.fileno())
                if not is_trusted(status, path.parent):
                    return None
                content = file.read(size + _DIGEST + 1)
                if time.time() - status.st_mtime > _TOUCHED_S:
                    os.utime(file.fileno())
        except FileNotFoundError:
            return None
        block, digest = content[:size], content[size:]
        return block if len(block) == size and _digest(block) == digest else None

    def keep(self, path: Path, block: bytes) -> None:
        """Stores a whole block; does nothing if it cannot be written."""
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
                self._evict()

    def _evict(self) -> None:
        """Removes the least recently read blocks until a tenth of the limit is free.

        Other processes may remove blocks at the same time.
        """
        blocks = sorted(self._blocks())
        self._held = sum(size for _, size, _ in blocks)
        for _, size, path in blocks:
            if self._held <= 0.9 * self._most:
                break
            with contextlib.suppress(OSError):
                path.unlink(missing_ok=True)
            self._held -= size

    def _blocks(self) -> list[tuple[float, int, Path]]:
        """Returns (time of last read, bytes, path) of each block; removes abandoned files."""
        found = []
        for path in self.folder.glob("*/*"):
            with contextlib.suppress(OSError):
                status = path.stat()
                if path.suffix != ".partial":
                    found.append((status.st_mtime, status.st_size, path))
                elif time.time() - status.st_mtime > _LEFT_S:
                    path.unlink(missing_ok=True)
        return found


class BlockFile:
    """A remote file with the interface that `Tokens` needs: `pread` and `will_read`.

    `mark` holds the file's size and a digest of the version that was opened.
    """

    def __init__(self, address: str, cache: BlockCache, named: str) -> None:
        """Opens a file. Raises UserError if it is missing, unreachable or without a version."""
        self.name = address
        self._cache = cache
        try:
            self._files, self._path = fsspec.core.url_to_fs(address, skip_instance_cache=True)
            self._version = self._ask()
            self.size = int(self._version["size"])
            count = _PLACES if self._version.keys() & {*TIMES} else 0
            starts = {k * max(0, self.size - _PLACE) // (_PLACES - 1) for k in range(count)}
            self._places = {
                at: self._patiently("read", partial(self._place, at)) for at in sorted(starts)
            }
        except FileNotFoundError:
            raise UserError(
                f"{named} does not exist: no file at {address}; give the prefix of an indexed "
                "dataset, its name without .bin and .idx"
            ) from None
        except Exception as error:  # each file system of fsspec raises errors of its own
            raise UserError(
                f"{named}: {address} cannot be read ({first_line(error)}); give a dataset that "
                "this host can reach"
            ) from error
        if len(self._version) == 1:
            raise UserError(
                f"{named}: {address} cannot be read safely: its server gives neither an ETag "
                "nor a modification time, so a change would go unnoticed; copy the dataset to this "
                "host"
            )
        self.mark = (
            f"{self.size}:{digest_of([self._version, [p.hex() for p in self._places.values()]])}"
        )
        self._folder = cache.folder / digest_of([_KEY, address, BLOCK, self.mark])
        self._is_over = False  # set when another version was seen
        self._lock = threading.Lock()
        self._under_way: dict[int, Future[bytes]] = {}

    def __reduce__(self) -> tuple[Any, ...]:
        """Makes another process reopen the file, which must still have the same version."""
        return _opened_again, (self.name, self._cache, self.mark)

    def pread(self, size: int, at: int) -> bytes:
        """Reads `size` bytes from byte `at` on, fewer only at the end. Raises OSError."""
        end = min(at + size, self.size)
        if end <= at:
            return b""
        first, last = at // BLOCK, (end - 1) // BLOCK
        if last > first:
            self.will_read(size, at)
        content = b"".join(self._block(number) for number in range(first, last + 1))
        return content[at - first * BLOCK : end - first * BLOCK]

    def will_read(self, size: int, at: int) -> None:
        """Starts fetching the missing blocks among `size` bytes from byte `at` on."""
        for number in range(at // BLOCK, (min(at + size, self.size) - 1) // BLOCK + 1):
            if not self._file(number).exists():
                self._fetched(number)

    def check(self) -> None:
        """Raises UserError if the opened version is gone, OSError if the store cannot be asked."""
        self._patiently("checked", self._check)

    def _check(self) -> None:
        is_same = self._ask() == self._version
        is_same = is_same and all(self._place(at) == was for at, was in self._places.items())
        # Once another version was seen, a block in flight may be of that version, even if
        # the first version is back.
        if self._is_over or not is_same:
            self._is_over = True
            raise UserError(
                f"{self.name} was changed while the run was reading it: restore the version that "
                "the run began with and start again, or choose another run="
            )

    def _ask(self) -> dict[str, str]:
        """Returns the file's size and the facts that identify its version."""
        self._files.invalidate_cache(self._path)
        info = self._files.info(self._path)
        return {"size": str(info["size"])} | version_of(info)

    def _cat(self, begin: int, end: int) -> bytes:
        more: dict[str, Any] = {}
        if "http" in self._files.protocol and (etag := self._version.get("ETag")):
            headers = self._files.kwargs.get("headers", {})
            more = {"headers": {**headers, "If-Match": etag}}
        content = bytes(self._files.cat_file(self._path, start=begin, end=end, **more))
        if len(content) != end - begin:
            raise OSError(f"only {len(content):,} of {end - begin:,} bytes arrived")
        return content

    def _place(self, at: int) -> bytes:
        return _digest(self._cat(at, min(at + _PLACE, self.size)))

    def _block(self, number: int) -> bytes:
        block = self._cache.block(self._file(number), self._size(number))
        return self._fetched(number).result() if block is None else block

    def _fetched(self, number: int) -> Future[bytes]:
        with self._lock:
            if number not in self._under_way:
                self._under_way[number] = self._cache.pool.submit(self._fetch, number)
            return self._under_way[number]

    def _fetch(self, number: int) -> bytes:
        try:
            # The block may have been stored since the caller looked for it.
            block = self._cache.block(self._file(number), self._size(number))
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

        return self._patiently(f"read at byte {at:,}", once)

    def _patiently(self, verb: str, call: Callable[[], T]) -> T:
        """Repeats `call`, with pauses, until it succeeds.

        Raises OSError after the last try, and passes on a UserError at once.
        """
        for pause in (*PAUSES_S, None):
            try:
                return call()
            except UserError:
                raise
            except Exception as error:
                if pause is None:
                    raise OSError(f"{self.name} cannot be {verb}: {first_line(error)}") from error
                time.sleep(pause)
        raise AssertionError("the last try returns or raises")

    def _file(self, number: int) -> Path:
        return self._folder / f"{number}.block"

    def _size(self, number: int) -> int:
        return min(BLOCK, self.size - number * BLOCK)


def _opened_again(address: str, cache: BlockCache, mark: str) -> BlockFile:
    file = BlockFile(address, cache, address)
    if file.mark != mark:
        raise UserError(f"{address} was changed since it was opened: open the corpus again")
    return file


def _digest(block: bytes) -> bytes:
    return hashlib.blake2b(block, digest_size=_DIGEST).digest()
