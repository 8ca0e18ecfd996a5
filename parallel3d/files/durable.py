"""Files that are whole or not there, also after a power cut; and whose a file or folder is."""

from __future__ import annotations

import errno
import os
import secrets
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

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
