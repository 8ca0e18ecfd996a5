"""Of several processes that want the same token cache one builds it, and the others wait."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path

Report = Callable[[str], None]

_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)
_PAUSE_S = 0.02


@contextlib.contextmanager
def build_lock(path: Path, report: Report) -> Iterator[bool]:
    """Holds the lock file; yields False where the file system (some network ones) has no locks.

    Without a lock two runs may both build: that costs time, the rename still keeps the file whole.
    """
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            report("another run is building the token cache: waiting for it")
            # Asked again and again, for hours if need be: a process that is held in a call would
            # look to its watchdog like one whose disk is dead.
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
        os.close(descriptor)  # which unlocks; the file stays, to remove it would race


def _locks(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
