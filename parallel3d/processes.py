"""Processes of this host, known by pid and start: a pid alone may have a new owner."""

from __future__ import annotations

import os
import signal
import socket
from pathlib import Path
from typing import Any


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


def kill(pid: int, born: int) -> None:
    """SIGKILL, if that very process is there."""
    if state_letter(pid, born):
        os.kill(pid, signal.SIGKILL)


def on_this_host(processes: list[dict[str, Any] | None]) -> list[tuple[int, int]]:
    """(pid, born) of those records {pid, born, host} that are of this host."""
    here = socket.gethostname()
    return [(p["pid"], p["born"]) for p in processes if p is not None and p["host"] == here]
