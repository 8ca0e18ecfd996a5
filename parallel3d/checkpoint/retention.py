"""Whose a run's checkpoints are: the newest start's, on file systems without locks as well.

A lock keeps a second start of a run out (`run.directory.take_run`), where the file system has
locks. Where it has none, two starts would remove each other's files: so each start leaves its name
in the folder, and one whose name is there no more writes nothing and ends.
"""

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
    """Another start has this run now: one sentence."""


class Claim:
    """One start's claim to a run's checkpoints; rank 0's alone.

    Args:
        session: a word that no other start has.
    """

    def __init__(self, run_dir: Path, session: str) -> None:
        self.run_dir, self.session = run_dir, session
        self.path = run_dir / CHECKPOINTS / CLAIM
        self.tried = self.taken = False

    def take(self) -> list[str]:
        """Claim the folder, also before a first save makes it; returns what is to be said."""
        if self.taken:
            return []
        self.tried, before = True, self._there()
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
        """Before rank 0 changes anything in the folder. Raises Overtaken; what cannot be read or
        written proves nothing."""
        there = None if self.tried and not self.taken else self._there()
        if there is not None and there.get("session") != self.session:
            raise Overtaken(f"{self.run_dir} was taken over by the start of {_who(there)}")
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

    def _there(self) -> dict[str, object] | None:
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


# Which checkpoints of a run stay, and how the others go; and what a killed save left.


_LEFTOVERS = (UNFINISHED, REMOVED, REPLACED, f".{LATEST}-", f"{CLAIM}-")


def too_many(newest_first: Iterable[Path], settings: CheckpointConfig) -> list[Path]:
    """The checkpoints that are neither among the last `keep` nor of a multiple of `keep_every`."""
    old = list(newest_first)[settings.keep :]
    every = settings.keep_every
    return [p for p in old if not (every and int(p.name.rpartition("-")[2]) % every == 0)]


def discard(folder: Path) -> None:
    """Remove a checkpoint; half removed, it has no checkpoint's name any more. Raises OSError."""
    shutil.rmtree(_renamed(folder, REMOVED))


def make_way(folder: Path) -> Path:
    """Rename a checkpoint that another of its step is to replace: its new path. Raises OSError.

    Should the other not come, `bring_back` gives it its name again.
    """
    return _renamed(folder, REPLACED)


def _renamed(folder: Path, prefix: str) -> Path:
    new = folder.with_name(f"{prefix}{folder.name}-{uuid.uuid4().hex[:8]}")
    os.rename(folder, new)
    return new


def bring_back(run_dir: Path) -> None:
    """Give checkpoints their names again that made way for others which never came.

    Raises OSError.
    """
    try:
        for path in (run_dir / CHECKPOINTS).iterdir():
            if path.name.startswith(REPLACED) and not _named(path).exists():
                os.rename(path, _named(path))
    except (FileNotFoundError, NotADirectoryError):
        pass  # there are no checkpoints


def _named(replaced: Path) -> Path:
    """Where a checkpoint was before it made way."""
    return replaced.with_name(replaced.name.removeprefix(REPLACED).rpartition("-")[0])


def remove_leftovers(run_dir: Path) -> list[str]:
    """Remove what saves and removals left that were killed on the way.

    Returns what could not be removed, a sentence each: it is in nobody's way.
    """
    folder = run_dir / CHECKPOINTS
    notes = []
    try:
        left = [p for p in folder.iterdir() if p.name.startswith(_LEFTOVERS)]
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:
        return [f"{folder} cannot be looked through for leftovers ({reason(error)})"]
    for path in left:
        if path.name.startswith(REPLACED) and not os.path.isdir(_named(path)):
            continue  # it may be the only one of its step
        try:
            if path.is_dir():
                shutil.rmtree(path)
            else:
                path.unlink()
        except OSError as error:
            notes.append(not_removed(path, error))
    return notes


def not_removed(path: Path, error: OSError) -> str:
    """The sentence for what stays, though it should go."""
    return plain(f"{path.name} could not be removed ({reason(error)})")


def newest_word(run_dir: Path) -> str:
    """What a run has left when a save failed, as half a sentence."""
    try:
        old = list_checkpoints(run_dir)
    except OSError as error:
        return f"the others cannot be listed ({reason(error)})"
    return f"{old[0].name} stays the newest" if old else "there is none yet"


def set_aside(folder: Path) -> Path:
    """Rename a damaged checkpoint, so that it counts as none and can still be looked at.

    Raises OSError.
    """
    number, aside = 1, folder.with_name(DAMAGED + folder.name)
    while aside.exists():
        number += 1
        aside = folder.with_name(f"{DAMAGED}{folder.name}.{number}")
    os.rename(folder, aside)
    return aside
