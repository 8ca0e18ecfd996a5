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
import socket
from datetime import UTC, datetime
from pathlib import Path

from parallel3d.checkpoint.manifest import CHECKPOINTS, CLAIM, reason
from parallel3d.files.durable import write_durably
from parallel3d.files.reading import parse_json, plain, read_bounded

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
