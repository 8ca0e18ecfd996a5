"""Durable files, file ownership, and bounded reading of files that are not trusted."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import secrets
import shutil
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

OTHERS_WRITE = 0o022
_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)


def write_durably(path: Path, content: bytes) -> None:
    with new_file(path) as descriptor:
        write_all(descriptor, memoryview(content))
        os.fsync(descriptor)


@contextmanager
def new_file(path: Path) -> Iterator[int]:
    """Opens a new file, private to the user, and follows no link. Raises OSError."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def write_all(descriptor: int, view: memoryview, at: int | None = None) -> None:
    """Writes all of `view`, at the file's position or at byte `at`."""
    done = 0
    while done < len(view):
        part = view[done:]
        wrote = os.write(descriptor, part) if at is None else os.pwrite(descriptor, part, at + done)
        if wrote == 0:  # no file should, and this loop would never end
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        done += wrote


def replace_durably(path: Path, content: bytes) -> None:
    """Replaces the file `path` with `content` atomically and flushes it.

    A link of that name is replaced, not followed. If it raises OSError, nothing is left behind.
    """
    partial = path.with_name(f".{path.name}.{secrets.token_hex(4)}.partial")
    try:
        write_durably(partial, content)
        os.replace(partial, path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise
    flush_folder(path.parent)


@contextmanager
def new_folder(folder: Path) -> Iterator[Path]:
    """Yields an empty folder that replaces `folder`, which must be empty or missing.

    It is flushed and renamed at the end of the block, or removed if the block raises: `folder`
    appears whole or not at all. Raises OSError.
    """
    partial = folder.parent / f".{folder.name[:100]}.{secrets.token_hex(4)}.partial"
    partial.mkdir(parents=True)
    try:
        yield partial
        for path in (*partial.iterdir(), partial):
            flush(path)
        os.rename(partial, folder)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    flush_folder(folder.parent)


def flush_folder(folder: Path) -> None:
    """Flushes a folder's entries (new names, renames) to the disk."""
    flush(folder)


def flush(path: Path) -> None:
    """Flushes the contents of a file or folder to the disk, whoever wrote them."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def no_link(path: str | Path, flags: int) -> int:
    """Opens the file at `path`, private if it is new; refuses a link (ELOOP)."""
    return os.open(path, flags | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)


def is_ours(status: os.stat_result, folder: Path) -> bool:
    """Returns whether a file with this status belongs to this user, even if owners are mapped."""
    if status.st_uid == os.geteuid():
        return True
    made = status_of_new_file(folder)
    return made is not None and made.st_uid == status.st_uid


def others_may_write(status: os.stat_result, folder: Path) -> bool:
    """Returns whether a file's mode lets others write; False on file systems without modes
    (CIFS)."""
    if not status.st_mode & OTHERS_WRITE:
        return False
    made = status_of_new_file(folder)
    return made is None or not made.st_mode & OTHERS_WRITE


def status_of_new_file(folder: Path) -> os.stat_result | None:
    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            return os.fstat(file.fileno())
    except OSError:
        return None


# Files that are not trusted

MAX_DEPTH = 50  # maximum depth of nested lists and objects; our own files have four levels
MAX_SENTENCE = 400


def lock(descriptor: int, *, shared: bool = False) -> bool:
    """Locks an open file for this process, until it is closed; `shared`: others may lock it too.

    Returns False on a file system without locks (some NFS and Lustre mounts). Raises
    BlockingIOError if another process has it.
    """
    try:
        fcntl.flock(descriptor, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise
        return False
    return True


@contextmanager
def open_regular(path: Path) -> Iterator[int]:
    """Opens `path` for reading without blocking; ValueError for a pipe, device or folder."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise ValueError(f"{path.name} is not a regular file")
        yield descriptor
    finally:
        os.close(descriptor)


def read_into(descriptor: int, view: memoryview, at: int) -> int:
    """Fills `view` from byte `at` of the file. Returns the number of bytes read, fewer only at the
    end of the file."""
    done = 0
    while done < len(view) and (got := os.preadv(descriptor, [view[done:]], at + done)):
        done += got
    return done


def read_bounded(path: Path, most: int) -> bytes:
    """Reads a regular file. Raises OSError, and ValueError if it has more than `most` bytes."""
    with open_regular(path) as descriptor:
        size = os.fstat(descriptor).st_size
        if size > most:
            raise ValueError(f"{path.name} has {size:,} bytes, more than {most:,}")
        content = bytearray(size)
        done = read_into(descriptor, memoryview(content), 0)
    return bytes(content[:done])


def parse_json(text: bytes) -> Any:
    """Parses JSON. Raises ValueError for invalid or too deeply nested text."""
    try:
        content = json.loads(text)
    except RecursionError:
        raise ValueError("nested too deep") from None
    check_depth(content)
    return content


def check_depth(content: Any) -> None:
    """Raises ValueError for lists and objects that are nested too deep."""
    level = [content]
    for _ in range(MAX_DEPTH):
        level = [value for item in level for value in _items(item)]
    if level:
        raise ValueError(f"nested deeper than {MAX_DEPTH}")


def _items(value: Any) -> list[Any]:
    if isinstance(value, dict):
        return list(value.values())
    return value if isinstance(value, list) else []


def plain(text: str) -> str:
    """Escapes characters that would move a terminal's cursor, and truncates long text."""
    shown = "".join(c if c.isprintable() else repr(c)[1:-1] for c in text[: MAX_SENTENCE + 1])
    return shown if len(text) <= MAX_SENTENCE else f"{shown[:MAX_SENTENCE]}…"
