"""Decides who may write a run's checkpoints, which of them stay, and removes leftovers."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import shutil
import socket
import uuid
from collections.abc import Iterable
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

from parallel3d.checkpoint.manifest import (
    CHECKPOINTS,
    CLAIM,
    DAMAGED,
    LATEST,
    REMOVED,
    REPLACED,
    UNFINISHED,
    list_checkpoints,
    reason,
)
from parallel3d.files import parse_json, plain, read_bounded, write_durably

if TYPE_CHECKING:
    from parallel3d.config.schema import CheckpointConfig


_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)
_LARGEST = 1 << 16  # bytes


class Overtaken(Exception):
    """Is raised with a sentence when another start has taken over this run."""


class Lease:
    """Claims a run's checkpoints for one start, on rank 0, on file systems without locks.

    Where the file system has locks, one keeps a second start out (`run.directory.take_run`).
    Elsewhere two starts would remove each other's files: so each start writes its name into the
    folder, and a start whose name was replaced writes nothing and ends.

    Args:
        session: unique for each start.
    """

    def __init__(self, run_dir: Path, session: str) -> None:
        self.run_dir, self.session = run_dir, session
        self.path = run_dir / CHECKPOINTS / CLAIM
        self.tried = self.taken = False

    def take(self) -> list[str]:
        """Claims the folder, also before the first save; returns sentences to log."""
        if self.taken:
            return []
        self.tried, before = True, self._current()
        try:
            self.path.parent.mkdir(mode=0o700, exist_ok=True)
            self._write()
            if before is None or _has_locks(self.path):
                return []
        except OSError as error:
            return [
                f"{self.path} cannot be written ({reason(error)}): see that no other start runs"
            ]
        return [
            f"{self.run_dir} is on a file system without locks: if the start of {_who(before)} "
            "is still running, it ends at its next save"
        ]

    def check(self) -> None:
        """Raises Overtaken if another start has the folder; an unreadable file proves nothing."""
        current = None if self.tried and not self.taken else self._current()
        if current is not None and current.get("session") != self.session:
            raise Overtaken(f"{self.run_dir} was taken over by the start of {_who(current)}")
        self.take()

    def _write(self) -> None:
        new = self.path.with_name(f"{CLAIM}-{self.session}")
        new.unlink(missing_ok=True)
        since = datetime.now(UTC).isoformat(timespec="seconds")
        facts = {"session": self.session, "host": socket.gethostname()}
        content = json.dumps(facts | {"pid": os.getpid(), "since": since})
        write_durably(new, f"{content}\n".encode())
        os.replace(new, self.path)
        self.taken = True

    def _current(self) -> dict[str, object] | None:
        try:
            found = parse_json(read_bounded(self.path, _LARGEST))
        except (OSError, ValueError):
            return None
        return found if isinstance(found, dict) else None


def _who(claim: dict[str, object]) -> str:
    return plain(f"{claim.get('since')} on {claim.get('host')} (process {claim.get('pid')})")


def _has_locks(path: Path) -> bool:
    descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        return error.errno not in _NO_LOCKS
    finally:
        os.close(descriptor)
    return True


_LEFTOVERS = (UNFINISHED, REMOVED, REPLACED, f".{LATEST}-", f"{CLAIM}-")


def expired(newest_first: Iterable[Path], settings: CheckpointConfig) -> list[Path]:
    """Returns the checkpoints beyond the last `keep` whose step is no multiple of `keep_every`."""
    old = list(newest_first)[settings.keep :]
    every = settings.keep_every
    return [p for p in old if not (every and int(p.name.rpartition("-")[2]) % every == 0)]


def discard(folder: Path) -> None:
    """Renames, so that it is no checkpoint any more, and removes a folder. Raises OSError."""
    shutil.rmtree(_renamed(folder, REMOVED))


def move_replaced(folder: Path) -> Path:
    """Renames a checkpoint that another will replace, to the returned path. Raises OSError."""
    return _renamed(folder, REPLACED)


def _renamed(folder: Path, prefix: str) -> Path:
    new = folder.with_name(f"{prefix}{folder.name}-{uuid.uuid4().hex[:8]}")
    os.rename(folder, new)
    return new


def restore_replaced(run_dir: Path) -> None:
    """Gives checkpoints their names again whose replacements were not completed. Raises OSError."""
    try:
        for path in (run_dir / CHECKPOINTS).iterdir():
            if path.name.startswith(REPLACED) and not _original_path(path).exists():
                os.rename(path, _original_path(path))
    except (FileNotFoundError, NotADirectoryError):
        return  # there are no checkpoints


def _original_path(replaced: Path) -> Path:
    return replaced.with_name(replaced.name.removeprefix(REPLACED).rpartition("-")[0])


def remove_leftovers(run_dir: Path) -> list[str]:
    """Removes what killed saves and removals left; returns a sentence for each that stays."""
    folder = run_dir / CHECKPOINTS
    notes = []
    try:
        left = [p for p in folder.iterdir() if p.name.startswith(_LEFTOVERS)]
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:
        return [f"{folder} cannot be looked through for leftovers ({reason(error)})"]
    for path in left:
        if path.name.startswith(REPLACED) and not os.path.isdir(_original_path(path)):
            continue  # perhaps the only one of its step
        try:
            if path.is_dir():
                shutil.rmtree(path)
            else:
                path.unlink()
        except OSError as error:
            notes.append(not_removed(path, error))
    return notes


def not_removed(path: Path, error: OSError) -> str:
    return plain(f"{path.name} could not be removed ({reason(error)})")


def describe_newest(run_dir: Path) -> str:
    """Returns half a sentence on the checkpoint that a run has left when a save failed."""
    try:
        old = list_checkpoints(run_dir)
    except OSError as error:
        return f"the others cannot be listed ({reason(error)})"
    return f"{old[0].name} stays the newest" if old else "there is none yet"


def set_aside(folder: Path) -> Path:
    """Renames a damaged checkpoint, so that it is ignored but can be inspected. Raises OSError."""
    number, aside = 1, folder.with_name(DAMAGED + folder.name)
    while aside.exists():
        number += 1
        aside = folder.with_name(f"{DAMAGED}{folder.name}.{number}")
    os.rename(folder, aside)
    return aside
