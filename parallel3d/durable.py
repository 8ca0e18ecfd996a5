"""Files that are whole or not there, also after a power cut; and whose a file or folder is."""

from __future__ import annotations

import os
import secrets
import tempfile
from pathlib import Path

OTHERS_WRITE = 0o022


def write_durably(path: Path, content: bytes) -> None:
    """Write a new private file and flush it to the disk."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


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
    descriptor = os.open(folder, os.O_RDONLY)
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
