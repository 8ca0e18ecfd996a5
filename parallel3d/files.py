"""Files that are whole or not there, also after a power cut; and whose a file or folder is."""

from __future__ import annotations

import errno
import json
import os
import secrets
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

OTHERS_WRITE = 0o022


def write_durably(path: Path, content: bytes) -> None:
    """Write a new private file and flush it to the disk."""
    with new_file(path) as descriptor:
        write_all(descriptor, memoryview(content))
        os.fsync(descriptor)


@contextmanager
def new_file(path: Path) -> Iterator[int]:
    """The descriptor of a new file, private to the user, that is no link. Raises OSError."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def write_all(descriptor: int, view: memoryview, at: int | None = None) -> None:
    """All of `view`, at the file's position or at byte `at`; the system may take it in parts."""
    done = 0
    while done < len(view):
        part = view[done:]
        wrote = os.write(descriptor, part) if at is None else os.pwrite(descriptor, part, at + done)
        if wrote == 0:  # which no file should do, and which would go on for ever
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        done += wrote


def replace_durably(path: Path, content: bytes) -> None:
    """Put `content` in the place of `path` in one step, and flush it: old, new, never half of it.

    A link of that name is replaced, not followed. Raises OSError; then nothing is left behind.
    """
    partial = path.with_name(f".{path.name}.{secrets.token_hex(4)}.partial")
    try:
        write_durably(partial, content)
        os.replace(partial, path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise
    flush_folder(path.parent)


def flush_folder(folder: Path) -> None:
    """Flush a folder's entries (new names, renames) to the disk."""
    flush(folder)


def flush(path: Path) -> None:
    """Flush to the disk what a file or folder holds, whoever wrote it."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def no_link(path: str | Path, flags: int) -> int:
    """Opens the file at `path`, private if it is new; a link there is refused (ELOOP)."""
    return os.open(path, flags | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)


def is_ours(status: os.stat_result, folder: Path) -> bool:
    """Whether what has this status, in `folder`, is this user's.

    Some file systems (NFS for root, CIFS) give our own files another owner: then one that is made
    in `folder` tells which.
    """
    if status.st_uid == os.geteuid():
        return True
    made = _status_of_new_file(folder)
    return made is not None and made.st_uid == status.st_uid


def others_may_write(status: os.stat_result, folder: Path) -> bool:
    """Whether its mode lets others write; a file system without modes (CIFS) says so of all."""
    if not status.st_mode & OTHERS_WRITE:
        return False
    made = _status_of_new_file(folder)
    return made is None or not made.st_mode & OTHERS_WRITE


def _status_of_new_file(folder: Path) -> os.stat_result | None:
    """The status of a new private file in `folder`, which is gone at once; None if none can be."""
    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            return os.fstat(file.fileno())
    except OSError:
        return None


# Files whose contents are not ours to trust: opened without waiting, read and parsed in bounds.
#
# Nothing here knows what a checkpoint is, and nothing needs torch.


DEEPEST = 50  # nested lists and objects; what we write has four
LONGEST_SENTENCE = 400


@contextmanager
def open_regular(path: Path) -> Iterator[int]:
    """A descriptor to read `path` from, which may be any file but a pipe, a device or a folder.

    Raises OSError, and ValueError for what is no regular file: opening a pipe does not wait.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise ValueError(f"{path.name} is no regular file")
        yield descriptor
    finally:
        os.close(descriptor)


def read_into(descriptor: int, view: memoryview, at: int) -> int:
    """Fill `view` from byte `at` of the file. Returns the bytes read: fewer only at its end."""
    done = 0
    while done < len(view) and (got := os.preadv(descriptor, [view[done:]], at + done)):
        done += got
    return done


def read_bounded(path: Path, most: int) -> bytes:
    """The whole of a regular file. Raises OSError, and ValueError if it has more than `most`."""
    with open_regular(path) as descriptor:
        size = os.fstat(descriptor).st_size
        if size > most:
            raise ValueError(f"{path.name} has {size:,} bytes, more than {most:,}")
        content = bytearray(size)
        done = read_into(descriptor, memoryview(content), 0)
    return bytes(content[:done])


def parse_json(text: bytes) -> Any:
    """Raises ValueError for what is no JSON, and for what is nested too deep to be ours."""
    try:
        content = json.loads(text)
    except RecursionError:
        raise ValueError("nested too deep") from None
    level = [content]
    for _ in range(DEEPEST):
        level = [value for item in level for value in _items(item)]
    if level:
        raise ValueError(f"nested deeper than {DEEPEST}")
    return content


def _items(value: Any) -> list[Any]:
    if isinstance(value, dict):
        return list(value.values())
    return value if isinstance(value, list) else []


def plain(text: str) -> str:
    """`text` as it can be shown on any terminal: what would move its cursor is spelled out."""
    shown = "".join(c if c.isprintable() else repr(c)[1:-1] for c in text[: LONGEST_SENTENCE + 1])
    return shown if len(text) <= LONGEST_SENTENCE else f"{shown[:LONGEST_SENTENCE]}…"
