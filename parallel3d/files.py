"""Writes files durably, checks their owners, and reads files that are not trusted."""

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


def text_of_file(path: str | Path) -> str:
    """Returns the text of a file that a user wrote, in UTF-8, on whatever system.

    Line ends are "\\n", and a byte order mark is dropped: editors on Windows write both. Raises
    OSError, and UnicodeDecodeError if the file is not UTF-8.
    """
    return Path(path).read_text(encoding="utf-8-sig")


def write_durably(path: Path, content: bytes) -> None:
    with new_file(path) as descriptor:
        write_all(descriptor, memoryview(content))
        os.fsync(descriptor)


@contextmanager
def new_file(path: Path) -> Iterator[int]:
    """Opens a new file that is private to the user. Raises OSError if `path` exists."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def write_all(descriptor: int, view: memoryview, at: int | None = None) -> None:
    """Writes all of `view` at byte `at` of the file, or at the current position if it is None."""
    done = 0
    while done < len(view):
        part = view[done:]
        wrote = os.write(descriptor, part) if at is None else os.pwrite(descriptor, part, at + done)
        if wrote == 0:  # otherwise the loop would never end
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        done += wrote


def replace_durably(path: Path, content: bytes) -> None:
    """Replaces the file `path` atomically with `content`, and flushes it to the disk.

    If `path` is a link, the link itself is replaced. If OSError is raised, no partial file remains.
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
    """Yields a temporary folder that becomes `folder`, which must be empty or missing.

    At the end of the block, the temporary folder is flushed and renamed, or removed if the block
    raised, so that `folder` appears whole or not at all. Raises OSError.
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
    """Flushes the entries of a folder, such as new and changed names, to the disk."""
    flush(folder)


def flush(path: Path) -> None:
    """Flushes a file or folder to the disk, even if another process wrote it."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def no_link(path: str | Path, flags: int) -> int:
    """Opens the file at `path`; a new one is private. Raises OSError (ELOOP) for a link."""
    return os.open(path, flags | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)


def is_ours(status: os.stat_result, folder: Path) -> bool:
    """Returns whether a file in `folder` is this user's, even where the mount maps owners."""
    if status.st_uid == os.geteuid():
        return True
    made = status_of_new_file(folder)
    return made is not None and made.st_uid == status.st_uid


def others_may_write(status: os.stat_result, folder: Path) -> bool:
    """Returns whether the mode of a file in `folder` lets other users write to it.

    Returns False on a file system without modes, such as CIFS.
    """
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

MAX_DEPTH = 50  # maximum nesting of lists and objects; parallel3d's own files have four levels
MAX_SENTENCE = 400


def lock(descriptor: int, *, shared: bool = False) -> bool:
    """Locks an open file until it is closed; with `shared`, other processes may share the lock.

    Returns False on a file system without locks (some NFS and Lustre mounts). Raises
    BlockingIOError if another process holds a conflicting lock.
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
    """Opens `path` for reading without blocking. Raises ValueError unless it is a regular file."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise ValueError(f"{path.name} is not a regular file")
        yield descriptor
    finally:
        os.close(descriptor)


def read_into(descriptor: int, view: memoryview, at: int) -> int:
    """Fills `view` with the bytes of the file from byte `at` on.

    Returns the number of bytes read, which is only smaller than `view` at the end of the file.
    """
    done = 0
    while done < len(view) and (got := os.preadv(descriptor, [view[done:]], at + done)):
        done += got
    return done


def read_bounded(path: Path, most: int) -> bytes:
    """Returns the content of a regular file. Raises ValueError if it exceeds `most` bytes."""
    with open_regular(path) as descriptor:
        size = os.fstat(descriptor).st_size
        if size > most:
            raise ValueError(f"{path.name} has {size:,} bytes, more than {most:,}")
        content = bytearray(size)
        done = read_into(descriptor, memoryview(content), 0)
    return bytes(content[:done])


def parse_json(text: bytes) -> Any:
    """Parses JSON. Raises ValueError if the text is invalid or nested too deeply."""
    try:
        content = json.loads(text)
    except RecursionError:
        raise ValueError("nested too deeply") from None
    check_depth(content)
    return content


def check_depth(content: Any) -> None:
    """Raises ValueError if lists and objects are nested more than `MAX_DEPTH` levels deep."""
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
    """Returns text in which unprintable characters are escaped, truncated if it is long."""
    shown = "".join(c if c.isprintable() else repr(c)[1:-1] for c in text[: MAX_SENTENCE + 1])
    return shown if len(text) <= MAX_SENTENCE else f"{shown[:MAX_SENTENCE]}…"
