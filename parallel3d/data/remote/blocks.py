"""A file at any address of fsspec's (s3://, gs://, https://, memory://), read block by block.

Blocks that were fetched lie in a folder that the processes of a host share, each with a digest of
its bytes behind them: one that was cut short by a kill or a full disk is fetched again, never
taken. The folder holds a bounded number of bytes; what was not read for longest goes first.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import secrets
import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import fsspec

from parallel3d.data import cache
from parallel3d.errors import UserError
from parallel3d.files.durable import no_link

BLOCK = 256 << 10  # bytes
_DIGEST = 16  # bytes behind a block
_AT_ONCE = 8  # blocks that are fetched at the same time
_PAUSES_S = (0.5, 2.0, 5.0)  # before each further try
_TOUCHED_S = 60.0  # how exactly it is known when a block was read last
_LEFT_S = 3600.0  # after which an unfinished file is nobody's


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


class BlockFile:
    """One file elsewhere, as `Tokens` reads a file: by `pread`, and told ahead by `will_read`."""

    def __init__(self, address: str, cache: BlockCache, named: str) -> None:
        """Raises UserError if there is no such file, or it cannot be reached."""
        self.name, self._cache = address, cache
        try:
            self._files, self._path = fsspec.core.url_to_fs(address, skip_instance_cache=True)
            facts = self._files.info(self._path)
            self.size = int(facts["size"])
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
        # Another content under the same address is another file.
        marks = [str(facts.get(k)) for k in ("ETag", "etag", "mtime", "LastModified", "created")]
        key = json.dumps([address, self.size, BLOCK, *marks]).encode()
        self._folder = cache.folder / hashlib.blake2b(key, digest_size=16).hexdigest()
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

    def close(self) -> None:
        """Nothing is open."""

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
        at, size, problem = number * BLOCK, self._size(number), ""
        for pause in (0.0, *_PAUSES_S):
            time.sleep(pause)
            try:
                block = bytes(self._files.cat_file(self._path, start=at, end=at + size))
            except Exception as error:
                problem = _words(error)
                continue
            if len(block) == size:
                return block
            problem = f"{len(block):,} bytes of {size:,} came"
        raise OSError(f"{self.name} cannot be read at byte {at:,}: {problem}")

    def _file(self, number: int) -> Path:
        return self._folder / f"{number}.block"

    def _size(self, number: int) -> int:
        return min(BLOCK, self.size - number * BLOCK)


def _words(error: Exception) -> str:
    lines = str(error).splitlines()
    return lines[0] if lines else type(error).__name__


def _digest(block: bytes) -> bytes:
    return hashlib.blake2b(block, digest_size=_DIGEST).digest()
