"""The token cache: one file per text, built by one process and read by all others.

    header (64 bytes) | tokens, little-endian uint16 | CRC-32 of every 4 MiB block of tokens

A build writes a temporary file in the same folder, flushes it and renames it, so a name never
stands for half a file. The kernel drops a builder's lock when the builder dies.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import json
import os
import stat
import struct
import tempfile
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from io import FileIO
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, TypeVar

import numpy as np

from parallel3d.data.sources import Document
from parallel3d.data.tokenizer import ByteTokenizer, Tokenizer
from parallel3d.data.tokens import MAKE_ANEW, Proof, Tokens, WatchedFile
from parallel3d.errors import UserError
from parallel3d.files import flush_folder, is_ours, no_link, others_may_write, read_into

Report = Callable[[str], None]
T = TypeVar("T")

_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)
_PAUSE_S = 0.02


@contextlib.contextmanager
def build_lock(path: Path, report: Report) -> Iterator[bool]:
    """Holds the lock file; yields False on a file system without locks (some network ones).

    Without a lock two runs may both build; the rename still keeps the file whole.
    """
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            report("another run is building the token cache: waiting for it")
            # Polled: a watchdog takes a process blocked in a system call for one with a dead disk.
            while not _locks(descriptor):
                time.sleep(_PAUSE_S)
        except OSError as error:
            if error.errno not in _NO_LOCKS:
                raise
            report(f"{path.parent} is on a file system without locks: another run may build too")
            yield False
            return
        yield True
    finally:
        os.close(descriptor)  # unlocks; removing the file would race with other processes


def _locks(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


_MAGIC = b"P3DTOKEN"
_VERSION = 1
# magic, version, bytes a token, tokens, digest of the tokens
_HEADER = struct.Struct("<8sIIQ16s")
_HEADER_CRC = struct.Struct("<I")  # of the fields above, right after them
_TOKENS_AT = 64
_BLOCK = 4 << 20  # bytes
_CHECKED_BLOCKS = 64


class Cached(NamedTuple):
    """Tokens on disk; `digest` is of the tokens alone."""

    tokens: Tokens
    digest: str
    files: tuple[WatchedFile, ...]


def default_folder() -> Path:
    """Returns `$XDG_CACHE_HOME/parallel3d` or `~/.cache/parallel3d`. Raises UserError without a
    home folder."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    if not os.path.isabs(base):  # the XDG specification ignores relative paths
        base = os.path.expanduser("~/.cache")
    if not os.path.isabs(base):
        raise UserError("data.cache_dir is null and this user has no home folder: give a folder")
    return Path(base) / "parallel3d"


def cache_key(documents: Sequence[Document], tokenizer: Tokenizer) -> str:
    """Returns the cache's name, which changes with any file's path, size, times or inode.

    Absolute paths count, since container images with normalised times hold different text under
    the same names; inodes and change times count, since a copy cannot set them.
    """
    listing = [_VERSION, tokenizer.digest]
    listing += [(os.path.realpath(d.path), *d._replace(path="")) for d in documents]
    return digest_of(listing)


def digest_of(facts: list[Any]) -> str:
    """Returns a digest of `facts`, which JSON can represent."""
    return hashlib.blake2b(json.dumps(facts).encode(), digest_size=16).hexdigest()


def token_count(documents: Sequence[Document]) -> int:
    """Returns the length of the byte stream: all bytes, and an end-of-text after each document."""
    return sum(d.size for d in documents) + len(documents)


def check_folder(folder: Path, documents: Sequence[Document], tokenizer: Tokenizer) -> None:
    """Raises UserError if there is no cache yet and `folder` cannot hold one. Writes nothing."""
    end = "tokens" if isinstance(tokenizer, ByteTokenizer) else "bin"
    check_can_store(folder / f"{cache_key(documents, tokenizer)}.{end}")


def check_can_store(path: Path) -> None:
    """Raises UserError if there is no file of ours at `path` and its folder cannot hold one."""
    existing = folder = path.parent
    while not os.path.lexists(existing):
        existing = existing.parent
    try:
        if not existing.is_dir():
            raise unusable(folder, f"{existing} is not a folder")
        check_owner(folder)
        if os.path.isfile(path) and is_trusted(path.lstat(), folder):
            return
    except OSError as error:
        raise unusable(folder, error.strerror or str(error)) from error
    if not os.access(existing, os.W_OK | os.X_OK):
        raise unusable(folder, f"{existing} is not writable")


def cached_tokens(
    folder: Path, documents: Sequence[Document], tokenizer: ByteTokenizer, report: Report
) -> Cached:
    """Returns the packed tokens of `documents`, from `folder`'s cache, which is built if missing.

    `report` receives a sentence when there is something to wait for. Raises UserError if the
    folder or a document cannot be used.
    """
    path = folder / f"{cache_key(documents, tokenizer)}.tokens"
    count = token_count(documents)

    def build() -> None:
        with new_file(path) as file:
            size = f"{len(documents)} documents, {sum(d.size for d in documents) / 1e6:.1f} MB"
            report(f"building the token cache: {size} of text")
            _write(file, documents, tokenizer)

    return load_or_build(path, lambda: _load(path, count, report), build, report)


def load_or_build(
    path: Path,
    load: Callable[[], T | None],
    build: Callable[[], None],
    report: Report,
    leftovers: str = "{}.*.tmp",
    written: str = "what",
) -> T:
    """Returns what `load` finds at `path`, after `build` if it finds None.

    One process builds while others wait. `leftovers`: a glob of temporary files of builders that
    died. Raises UserError if the folder cannot be used.
    """
    folder = path.parent
    try:
        check_owner(folder)
        found = load()
        if found is None:
            # Private, as the text may be. An existing folder keeps the permissions its user chose.
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            with build_lock(path.with_suffix(".lock"), report) as locked:
                found = load()  # another process may just have built it
                if found is None:
                    if locked:  # without a lock they may belong to a live builder
                        for leftover in folder.glob(leftovers.format(path.stem)):
                            leftover.unlink(missing_ok=True)
                    build()
                    found = load()
    except OSError as error:
        raise unusable(folder, error.strerror or str(error)) from error
    if found is None:
        raise unusable(folder, f"{written} was written there reads back damaged")
    return found


@contextlib.contextmanager
def new_file(path: Path) -> Iterator[BinaryIO]:
    """Opens a temporary file; flushes and renames it to `path` after the block, or removes it."""
    descriptor, temporary = tempfile.mkstemp(".tmp", f"{path.stem}.", path.parent)
    try:
        with os.fdopen(descriptor, "wb", buffering=_BLOCK) as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:  # an interrupt must not leave gigabytes behind either
        Path(temporary).unlink(missing_ok=True)
        raise
    flush_folder(path.parent)


def unusable(folder: Path, reason: str) -> UserError:
    other = Path(tempfile.gettempdir()) / f"parallel3d-cache-{os.geteuid()}"
    example = "" if other == folder else f", such as data.cache_dir={other}"
    return UserError(
        f"data.cache_dir={folder} cannot hold the token cache, {reason}: give a folder that you "
        f"may write{example}"
    )


def check_owner(folder: Path) -> None:
    """Raises UserError if the folder is another user's, who could put any text in it."""
    try:
        status = folder.stat()
    except (FileNotFoundError, NotADirectoryError):
        return
    if status.st_uid != 0 and not is_ours(status, folder):
        raise unusable(folder, f"it belongs to another user (uid {status.st_uid})")


def is_trusted(status: os.stat_result, folder: Path) -> bool:
    """Returns whether a file is this user's or root's, and nobody else can write to it."""
    ours = status.st_uid == 0 or is_ours(status, folder)
    return stat.S_ISREG(status.st_mode) and ours and not others_may_write(status, folder)


def _load(path: Path, count: int, report: Report) -> Cached | None:
    """Opens the cache at `path`; None without one of ours that is intact and has `count` tokens."""
    try:
        file = open(path, "rb", opener=no_link)  # noqa: SIM115  open as long as its tokens
    except (FileNotFoundError, NotADirectoryError):
        return None
    digest, problem = None, "is damaged"
    if not is_trusted(os.fstat(file.fileno()), path.parent):
        problem = "is not taken: others than you may write it"
    else:
        digest = _verify(file, count)
    if digest is None:
        file.close()
        report(f"the token cache {path} {problem}")
        return None
    whole = -(-2 * count // _BLOCK) <= _CHECKED_BLOCKS

    def prove() -> Proof:
        if _verify(file, count) != digest:
            return Proof.CHANGED
        return Proof.SAME if whole else Proof.SAMPLED

    return Cached(Tokens(file, _TOKENS_AT, count), digest, (WatchedFile(file, prove, MAKE_ANEW),))


def _verify(file: BinaryIO, count: int) -> str | None:
    """Returns the tokens' digest if the file is intact, else None.

    Checks every byte up to 256 MiB; of a larger file evenly spaced blocks with the first and the
    last, as each rank of a job pays for this at its start.
    """
    header = _read_at(file, _TOKENS_AT, 0)
    if len(header) < _TOKENS_AT:
        return None
    magic, version, width, stored, digest = _HEADER.unpack_from(header)
    (header_crc,) = _HEADER_CRC.unpack_from(header, _HEADER.size)
    blocks = -(-2 * count // _BLOCK)
    size = _TOKENS_AT + 2 * count + 4 * blocks
    if zlib.crc32(header[: _HEADER.size]) != header_crc or os.fstat(file.fileno()).st_size != size:
        return None
    if (magic, version, width, stored) != (_MAGIC, _VERSION, 2, count):
        return None
    crcs = np.frombuffer(_read_at(file, 4 * blocks, _TOKENS_AT + 2 * count), dtype="<u4")
    checked = min(blocks, _CHECKED_BLOCKS)
    for block in sorted({i * (blocks - 1) // max(1, checked - 1) for i in range(checked)}):
        start = block * _BLOCK
        size = min(_BLOCK, 2 * count - start)
        if zlib.crc32(_read_at(file, size, _TOKENS_AT + start)) != crcs[block]:
            return None
    return digest.hex()


def _read_at(file: BinaryIO, size: int, at: int) -> bytes:
    """Reads bytes past the file object's buffer, as they are on disk now; fewer only at the end."""
    content = bytearray(size)
    return bytes(content[: read_into(file.fileno(), memoryview(content), at)])


def _write(file: BinaryIO, documents: Sequence[Document], tokenizer: ByteTokenizer) -> None:
    digest = hashlib.blake2b(digest_size=16)
    crcs: list[int] = []
    crc = filled = count = 0
    end = np.array([tokenizer.eot], dtype="<u2")
    file.write(bytes(_TOKENS_AT))
    for document in documents:
        for text in blocks_of(document):
            tokens = end if text is None else tokenizer.encode(text)
            count += tokens.size
            view = tokens.data.cast("B")
            file.write(view)
            digest.update(view)
            while view:
                part, view = view[: _BLOCK - filled], view[_BLOCK - filled :]
                crc, filled = zlib.crc32(part, crc), filled + len(part)
                if filled == _BLOCK:
                    crcs.append(crc)
                    crc = filled = 0
    if filled:
        crcs.append(crc)
    file.write(np.array(crcs, dtype="<u4").tobytes())
    header = _HEADER.pack(_MAGIC, _VERSION, 2, count, digest.digest())
    file.seek(0)
    file.write(header + _HEADER_CRC.pack(zlib.crc32(header)))


@contextlib.contextmanager
def _opened(path: str) -> Iterator[FileIO]:
    """Opens a file to read, and ignores an error of its close, which says nothing about the bytes
    read and could not be caught by a caller that already failed."""
    file = open(path, "rb", buffering=0)  # noqa: SIM115  closed below
    try:
        yield file
    finally:
        with contextlib.suppress(OSError):
            file.close()


def blocks_of(document: Document) -> Iterator[bytes | None]:
    """Yields the document's bytes block by block, then None for its end. Raises UserError."""
    try:
        with _opened(document.path) as file:
            left = document.size
            while left and (text := file.read(min(left, _BLOCK))):
                left -= len(text)
                yield text
            status = os.fstat(file.fileno())
    except OSError as error:
        raise UserError(
            f"data file {document.path} cannot be read ({error.strerror}): give text that you may "
            f"read in data.path"
        ) from error
    check_unchanged(document, status, complete=not left)
    yield None


def check_unchanged(document: Document, status: os.stat_result, complete: bool = True) -> None:
    """Raises UserError for a document that was not read whole, or changed since it was listed."""
    if not complete or Document.of(document.name, document.path, status) != document:
        raise UserError(
            f"data file {document.path} changed while it was being read: start again when it is "
            f"complete, or give another data.path"
        )
