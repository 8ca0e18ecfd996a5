"""Tells the guard of this host how far a rank is, through a small file in memory.

Under `parallel3d slurm run` each rank keeps one file, which the host's guard (`slurm.guard`) reads.
A rank that holds the GIL or sits in a driver's call cannot answer anybody, but its file can still
be read. Without the variable `PROGRESS` no file is made, and the calls below cost nothing.
"""

from __future__ import annotations

import mmap
import os
import stat
import struct
import tempfile
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Literal, get_args

from parallel3d.host.processes import born

PROGRESS = "PARALLEL3D_PROGRESS"  # the folder of the ranks' files on each host
START = "PARALLEL3D_START"  # the number of the start to which a process belongs
SHARED_MEMORY = Path("/dev/shm")

State = Literal["paused", "stepping", "done"]
STATES: tuple[State, ...] = get_args(State)
RECENT = 15  # the median is that of so many steps

# The file: a mark of its format, the process (pid and start time), then what changes: steps done,
# time, median and state. A reader may see some of a change before the rest; each field alone is
# always whole, and the next look sees all.
FORMAT = struct.Struct("<8sqqqddq8x")
CHANGING = struct.Struct("<qddq")
CHANGING_AT = 24
# At the end: the namespace of the process's number. In a container a pid may be another process's.
SPACE = struct.Struct("<q")
SPACE_AT = 56
MARK = b"p3d step"


def folder(job: str, start: int) -> str:
    """Returns the folder of a start's files: in shared memory, or else a temporary folder."""
    root = SHARED_MEMORY if SHARED_MEMORY.is_dir() else Path(tempfile.gettempdir())
    return str(root / f"parallel3d-{os.getuid()}-{job}-{start}")


def make_folder(path: str) -> None:
    """Makes the folder of the files. Raises OSError if another user owns it or may write to it."""
    try:
        os.mkdir(path, 0o700)
    except FileExistsError:
        found = os.lstat(path)
        is_ours = stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid()
        if not is_ours or found.st_mode & 0o077:
            raise PermissionError(f"{path} is not a folder that belongs to you alone") from None


@dataclass(frozen=True)
class Seen:
    """Holds what a rank's file says.

    Attributes:
        rank: the rank's number in the layout.
        pid, born: the rank's process, as in `host.processes`.
        steps: number of steps that this start has done.
        since: CLOCK_MONOTONIC at the end of the last step, or of the last pause if that was later.
        median: median seconds of the last steps; 0 before there are two.
    """

    rank: int
    pid: int
    born: int
    steps: int
    since: float
    median: float
    state: State


def read(path: str) -> Seen | None:
    """Returns what the file of a rank says; None if the file is not one of a rank.

    Nothing is known of a rank of another namespace of pids, whose process cannot be looked up.
    """
    name = os.path.basename(path).removeprefix("rank-")
    try:
        with open(path, "rb") as file:
            content = file.read(FORMAT.size)
        mark, pid, begun, steps, since, median, state = FORMAT.unpack(content)
        (space,) = SPACE.unpack_from(content, SPACE_AT)
        if mark != MARK or not name.isdecimal() or space not in (0, _pid_space()):
            return None
        return Seen(int(name), pid, begun, steps, since, median, STATES[state])
    except (OSError, struct.error, IndexError):
        return None


@cache
def _pid_space() -> int:
    """Returns the number of this process's namespace of pids; 0 if the kernel does not tell it."""
    try:
        return os.stat("/proc/self/ns/pid").st_ino
    except OSError:
        return 0


class ProgressFile:
    """Keeps the file of this rank up to date."""

    def __init__(self, path: str) -> None:
        """Makes the file, which says that the rank is paused. Raises OSError."""
        self._steps, self._since, self._median = 0, time.monotonic(), 0.0
        self._state = STATES.index("paused")
        self._last: float | None = None  # the end of the step before, without a pause in between
        self._recent: deque[float] = deque(maxlen=RECENT)
        me = os.getpid()
        whole = bytearray(FORMAT.pack(MARK, me, born(me), *self._values()))
        SPACE.pack_into(whole, SPACE_AT, _pid_space())
        # The guard must not see a file without a process: it gets its name when it is whole.
        part = f"{path}.{me}"
        descriptor = os.open(part, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, 0o600)
        try:
            os.write(descriptor, whole)
            self._memory = mmap.mmap(descriptor, FORMAT.size)
        finally:
            os.close(descriptor)
        os.replace(part, path)

    @classmethod
    def opened(cls, rank: int, environ: Mapping[str, str]) -> ProgressFile | None:
        """Makes the file of a rank in the folder that `PROGRESS` names.

        Returns None without the variable. Raises OSError.
        """
        path = environ.get(PROGRESS)
        if not path:
            return None
        make_folder(path)
        return cls(os.path.join(path, f"rank-{rank}"))

    def step_ended(self) -> None:
        """Counts a step that has just ended."""
        now = time.monotonic()
        if self._last is not None:
            self._recent.append(now - self._last)
            self._median = sorted(self._recent)[len(self._recent) // 2]
        self._last = self._since = now
        self._steps += 1
        self._write()

    def pause(self) -> None:
        """Notes that this rank may be busy for long without a step, as in an evaluation."""
        self._set("paused")

    def resume(self) -> None:
        """Ends `pause`; the time until the next step counts from now."""
        self._last, self._since = None, time.monotonic()
        self._set("stepping")

    def done(self) -> None:
        """Notes that this rank is about to leave as it should."""
        self._set("done")

    def _set(self, state: State) -> None:
        self._state = STATES.index(state)
        self._write()

    def _values(self) -> tuple[int, float, float, int]:
        return self._steps, self._since, self._median, self._state

    def _write(self) -> None:
        CHANGING.pack_into(self._memory, CHANGING_AT, *self._values())
