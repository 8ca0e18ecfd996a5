"""Processes of this host, known by pid and start: a pid alone may have a new owner."""

from __future__ import annotations

import contextlib
import ctypes
import io
import os
import signal
import socket
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TextIO

LINUX_SET_PARENT_DEATH_SIGNAL = 1
LINUX_SET_NAME = 15
# Of the environment of a rank: what names the job among all of this host.
JOB = (
    *(b"MASTER_ADDR", b"MASTER_PORT", b"WORLD_SIZE", b"TORCHELASTIC_RUN_ID"),
    *(b"SLURM_JOB_ID", b"SLURM_STEP_ID", b"PARALLEL3D_SECRET"),
)


def _stat(pid: int) -> list[str]:
    """Fields of /proc/<pid>/stat from the state on; empty if there is none."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []


def born(pid: int) -> int:
    """When a process started, in ticks since boot: pid and this name it for good. 0: unknown."""
    fields = _stat(pid)
    return int(fields[19]) if fields else 0


def state_letter(pid: int, born: int) -> str:
    """R, S, D, T, Z … as in ps; "" if that process is gone."""
    fields = _stat(pid)
    return fields[0] if fields and int(fields[19]) == born else ""


def why_silent(process: dict[str, Any]) -> str:
    """What can be seen of the process {pid, born, host} of a rank that gives no answer."""
    if process["host"] != socket.gethostname():
        return "gives no answer: its process or its host is stopped or gone"
    letter = state_letter(process["pid"], process["born"])
    if letter in ("T", "t"):
        return "is stopped (SIGSTOP)"
    return "is gone" if letter == "" else f"gives no answer (its process is in state {letter})"


def die_with_parent() -> None:
    """The kernel ends this process together with the one that started it."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(LINUX_SET_PARENT_DEATH_SIGNAL, signal.SIGKILL)


def show_as(name: str) -> None:
    """What top and ps -e call this process; 15 bytes of it count."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(LINUX_SET_NAME, name.encode())


def kill(pid: int, born: int) -> None:
    """SIGKILL, if that very process is there and may be killed."""
    if state_letter(pid, born):
        with contextlib.suppress(OSError):
            os.kill(pid, signal.SIGKILL)


def of_this_job(processes: Sequence[dict[str, Any] | None]) -> list[tuple[int, int]]:
    """(pid, born) of those records {pid, born, host} that name a process of this host and job.

    The records come from a store that others may write to: what a process is, the kernel says. It
    must belong to the same user and have got the same job from its launcher.
    """
    here, me = socket.gethostname(), os.getpid()
    mine = _job(me)
    # Our launcher's ranks are forked: the kernel shows its environment as theirs.
    forked = "MASTER_PORT" in os.environ and b"MASTER_PORT" not in mine
    found = []
    for record in processes:
        if record is None or record["host"] != here or not (mine or forked):
            continue
        pid = int(record["pid"])
        if _owner(pid) != os.getuid() or _job(pid) != mine:
            continue
        if not forked or _parent(pid) == _parent(me):
            found.append((pid, int(record["born"])))
    return found


def _owner(pid: int) -> int:
    """The user whose process it is; -1 if there is none."""
    try:
        return os.stat(f"/proc/{pid}").st_uid
    except OSError:
        return -1


def _job(pid: int) -> dict[bytes, bytes]:
    """What a launcher told a process of its job when it started it; empty if nothing can be read.

    The same for all ranks of a job, and for nobody else.
    """
    try:
        variables = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return {}
    said = dict(v.split(b"=", 1) for v in variables if b"=" in v)
    return {name: said[name] for name in JOB if name in said}


def _parent(pid: int) -> tuple[int, int]:
    """(pid, born) of the process that started it; (0, 0) if there is none."""
    fields = _stat(pid)
    parent = int(fields[1]) if fields else 0
    return parent, born(parent)


# Standard output and error of a run: what they refuse is dropped, and the run goes on.
#
# A reader that has gone (`| head`), a full disk under a log, a lost terminal and a closed
# descriptor cost the output, never the training. `train` tells at its end how much was lost
# (`Recorder.finish`).


class _Dropping(io.FileIO):
    """A file whose failed writes are counted as lost instead of raised."""

    lost_bytes = 0
    reason: str | None = None

    def write(self, data: bytes | memoryview) -> int | None:
        try:
            return super().write(data)
        except OSError as error:
            size = memoryview(data).nbytes
            self.lost_bytes += size
            self.reason = self.reason or error.strerror
            return size


def open_closed_streams() -> None:
    """Open /dev/null in place of a standard descriptor that was closed (`>&-`, some daemons).

    Otherwise the next file that this process opens, a checkpoint perhaps, would get the number of
    standard output, and everything that prints would write into it.
    """
    for descriptor, name, mode in ((0, "stdin", "r"), (1, "stdout", "w"), (2, "stderr", "w")):
        try:
            os.fstat(descriptor)
        except OSError:
            found = os.open(os.devnull, os.O_RDWR)
            if found != descriptor:
                os.dup2(found, descriptor)
                os.close(found)
        if getattr(sys, name) is None:
            setattr(sys, name, os.fdopen(descriptor, mode, encoding="utf-8", closefd=False))


def drop_failed_output() -> None:
    """From here on a write to `sys.stdout` or `sys.stderr` that fails is dropped, not raised."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if _file_of(stream) is not None:
            continue  # an earlier job of a sweep has done it
        try:
            descriptor = stream.fileno()
        except io.UnsupportedOperation:
            continue  # replaced by a test or a notebook: memory, which takes everything
        _flush(stream)
        kept = io.BufferedWriter(_Dropping(descriptor, "w", closefd=False))
        how = {"encoding": stream.encoding, "errors": stream.errors}
        how |= {"line_buffering": stream.line_buffering, "write_through": stream.write_through}
        setattr(sys, name, io.TextIOWrapper(kept, **how))


def lost_output() -> dict[str, str | int] | None:
    """What standard output has refused so far: bytes and the first reason; None: nothing."""
    file = _file_of(sys.stdout)
    if file is None or not file.lost_bytes:
        return None
    return {"bytes": file.lost_bytes, "reason": file.reason or "unknown"}


def _file_of(stream: TextIO) -> _Dropping | None:
    raw = getattr(getattr(stream, "buffer", None), "raw", None)
    return raw if isinstance(raw, _Dropping) else None


def _flush(stream: TextIO) -> None:
    """Flush what was written before; what cannot be is given up, or the interpreter's own end would
    fail of it."""
    try:
        stream.flush()
    except OSError:
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, stream.fileno())
        os.close(null)
        stream.flush()
