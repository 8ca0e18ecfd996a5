"""Identifies this host's processes by pid and start time, and guards the standard streams."""

from __future__ import annotations

import contextlib
import ctypes
import io
import os
import signal
import socket
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer

LINUX_SET_PARENT_DEATH_SIGNAL = 1
LINUX_SET_NAME = 15
# Variables of a rank's environment that identify its job on this host.
JOB = (
    *(b"MASTER_ADDR", b"MASTER_PORT", b"WORLD_SIZE", b"TORCHELASTIC_RUN_ID"),
    *(b"SLURM_JOB_ID", b"SLURM_STEP_ID", b"PARALLEL3D_SECRET"),
)


def _stat(pid: int) -> list[str]:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []


def born(pid: int) -> int:
    """Returns the start time of a process in ticks since boot; 0 if it is unknown.

    Pids recur, but a pid and a start time together identify a process.
    """
    fields = _stat(pid)
    return int(fields[19]) if fields else 0


def process_begun() -> float:
    """Returns the Unix time at which this process began; the current time if that is unknown."""
    now = time.time()
    if sys.platform != "linux" or not (ticks := born(os.getpid())):
        return now
    age = time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
    return now - max(0.0, age)


def state_letter(pid: int, born: int) -> str:
    """Returns the state of a process as in ps (R, S, D, T, Z …); "" if it is gone."""
    fields = _stat(pid)
    return fields[0] if fields and int(fields[19]) == born else ""


def node_name() -> str:
    """Returns the name of this host, under Slurm the one that Slurm's commands use."""
    return os.environ.get("SLURMD_NODENAME") or socket.gethostname()


def why_silent(process: dict[str, Any]) -> str:
    """Explains why a rank's process, given as {pid, born, host}, does not respond."""
    if process["host"] != socket.gethostname():
        return "does not answer: its process or its host is stopped or gone"
    letter = state_letter(process["pid"], process["born"])
    if letter in ("T", "t"):
        return "is stopped (SIGSTOP)"
    return "is gone" if letter == "" else f"does not answer (its process is in state {letter})"


def die_with_parent() -> None:
    """Makes the kernel kill this process when its parent ends."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(LINUX_SET_PARENT_DEATH_SIGNAL, signal.SIGKILL)


def set_process_name(name: str) -> None:
    """Sets the name (15 bytes) of this process in top and ps -e."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(LINUX_SET_NAME, name.encode())


def kill(pid: int, born: int) -> None:
    """Sends SIGKILL to the process, if it still exists and this user may kill it."""
    if state_letter(pid, born):
        with contextlib.suppress(OSError):
            os.kill(pid, signal.SIGKILL)


def of_this_job(processes: Sequence[dict[str, Any] | None]) -> list[tuple[int, int]]:
    """Returns (pid, born) of the records {pid, born, host} that belong to this host and job.

    The records come from a store to which other users may write, so the kernel must confirm them:
    the process must belong to the same user, and its launcher must have set the same job variables.
    Our own launcher sets them after the fork, so that the kernel does not show them; it ends its
    ranks itself.
    """
    mine, found = _job(os.getpid()), []
    for record in processes:
        if record is None or record["host"] != socket.gethostname() or not mine:
            continue
        pid = int(record["pid"])
        if _owner(pid) == os.getuid() and _job(pid) == mine:
            found.append((pid, int(record["born"])))
    return found


def _owner(pid: int) -> int:
    try:
        return os.stat(f"/proc/{pid}").st_uid
    except OSError:
        return -1


def _job(pid: int) -> dict[bytes, bytes]:
    """Returns the job variables that a process's launcher set, or {} if they cannot be read."""
    try:
        variables = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return {}
    found = dict(v.split(b"=", 1) for v in variables if b"=" in v)
    return {name: found[name] for name in JOB if name in found}


# Standard output and error. If their reader has gone (`| head`), a log's disk is full, the terminal
# is lost or a descriptor is closed, output is lost, but training continues.


class _Dropping(io.FileIO):
    """A file that loses the data of failed writes instead of raising."""

    def write(self, data: ReadableBuffer, /) -> int:
        try:
            return super().write(data)
        except OSError:
            return memoryview(data).nbytes


def prepare_streams() -> None:
    """Makes standard streams print question marks for characters that they cannot encode.

    It also opens /dev/null for closed descriptors, which a later file would otherwise get.
    """
    while (spare := os.open(os.devnull, os.O_RDWR)) <= 2:
        pass
    os.close(spare)
    for descriptor, name, mode in ((0, "stdin", "r"), (1, "stdout", "w"), (2, "stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, os.fdopen(descriptor, mode, encoding="utf-8", closefd=False))
    for stream in (sys.stdout, sys.stderr):
        # The stream of a test or a notebook is in memory and cannot be configured.
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")


def drop_failed_output() -> None:
    """Makes failed writes to `sys.stdout` and `sys.stderr` lose their data instead of raising."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if isinstance(getattr(getattr(stream, "buffer", None), "raw", None), _Dropping):
            continue  # an earlier job of a sweep has replaced the stream
        try:
            descriptor = stream.fileno()
        except io.UnsupportedOperation:
            continue  # a test or a notebook has replaced it with a stream in memory
        _flush(stream)
        kept = io.BufferedWriter(_Dropping(descriptor, "w", closefd=False))
        how = {"encoding": stream.encoding, "errors": stream.errors}
        how |= {"line_buffering": stream.line_buffering, "write_through": stream.write_through}
        setattr(sys, name, io.TextIOWrapper(kept, **how))


def _flush(stream: TextIO) -> None:
    """Flushes earlier output; discards it on failure, since a flush at exit would fail too."""
    try:
        stream.flush()
    except OSError:
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, stream.fileno())
        os.close(null)
        stream.flush()
