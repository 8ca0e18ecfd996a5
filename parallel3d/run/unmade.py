"""A run's folder until it is one: made under another name, and removed if its start was killed."""

from __future__ import annotations

import os
import re
import shutil
import socket
import stat
import tempfile
import time
from contextlib import suppress
from pathlib import Path

from parallel3d.files.durable import is_ours
from parallel3d.host.processes import born

BEING_MADE = ".new-"
_NAME = re.compile(rf"{re.escape(BEING_MADE)}(.+)-(\d+)-[^-]+")  # its maker's host and process
HERE_S, ELSEWHERE_S = 3600.0, 86400.0  # old enough to go, made on this host and on another


def new_folder(runs: Path) -> Path:
    """A new private folder in `runs_dir`, to be renamed when all of it is there. Raises OSError."""
    prefix = f"{BEING_MADE}{socket.gethostname()}-{os.getpid()}-"
    return Path(tempfile.mkdtemp(prefix=prefix, dir=runs))


def remove_unmade(runs: Path) -> None:
    """Remove such folders of this user's starts that were killed on the way.

    None whose maker may be alive: on this host the kernel says so, of another a day has to do.
    """
    with suppress(OSError):  # what stays is in nobody's way
        for path in runs.iterdir():
            if maker := _NAME.fullmatch(path.name):
                _remove_if_old(path, maker[1] == socket.gethostname(), int(maker[2]))


def _remove_if_old(path: Path, is_here: bool, maker: int) -> None:
    status = path.lstat()
    is_young = time.time() - status.st_mtime < (HERE_S if is_here else ELSEWHERE_S)
    if is_young or (is_here and born(maker)):
        return
    if stat.S_ISDIR(status.st_mode) and is_ours(status, path.parent):
        shutil.rmtree(path, ignore_errors=True)
