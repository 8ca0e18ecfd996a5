"""Copies srun's errors to the job's output, and tells which ranks have ended by a signal.

srun's own exit code is that of one task only. Its errors name each task that has failed:

    srun: error: node3: task 2: Segmentation fault (core dumped)
    srun: error: node[4-5]: tasks 3-4: Exited with exit code 1
"""

from __future__ import annotations

import os
import re
import signal
import threading
from collections.abc import Mapping
from contextlib import suppress
from typing import IO, NamedTuple

from parallel3d.errors import UserError
from parallel3d.files import write_all
from parallel3d.slurm.verdict import Verdict
from parallel3d.topology.cluster.slurm import expand_hostlist

STDERR = 2
LINE_BYTES = 4096  # of a line that has not ended
TASKS = re.compile(rb"srun: error: (\S+): tasks? ([0-9,-]+): ([^()\r]+?)(?: \(core dumped\))?\r?")
ENDS = (signal.SIGKILL, signal.SIGTERM)  # with which guards and srun end ranks
EXITED = re.compile(r"Exited with exit code [0-9]+")
SIGNALS = {signal.strsignal(number): number for number in signal.Signals}


class EndedTask(NamedTuple):
    """A rank's task that has failed.

    Attributes:
        nodes: its node; if srun names several tasks at once, all their nodes, as srun writes them.
        signal: the signal that has ended it; None if it has exited, or if that is not known.
    """

    nodes: str
    signal: signal.Signals | None


class StepErrors:
    """Reads the errors of one srun in a thread, until srun has ended.

    Attributes:
        ended: the tasks that have failed, by the launcher's number of the rank, in srun's order.
    """

    def __init__(self, pipe: IO[bytes]) -> None:
        self.ended: dict[int, EndedTask] = {}
        self._pipe = pipe
        self._thread = threading.Thread(target=self._copy, name="srun's errors", daemon=True)
        self._thread.start()

    def join(self, seconds: float) -> Mapping[int, EndedTask]:
        """Waits until all is read, but not for long: a lost srun's child may hold the pipe."""
        self._thread.join(seconds)
        return dict(self.ended)

    def _copy(self) -> None:
        rest = b""
        with self._pipe:
            while data := os.read(self._pipe.fileno(), 1 << 16):
                # A full disk under the output must not keep srun from writing.
                with suppress(OSError):
                    write_all(STDERR, memoryview(data))
                *lines, rest = (rest + data).split(b"\n")
                rest = rest[-LINE_BYTES:]
                for line in lines:
                    self.ended |= ended_tasks(line)


def ended_tasks(line: bytes) -> dict[int, EndedTask]:
    """Returns the tasks that a line of srun's errors says have failed."""
    found = TASKS.fullmatch(line)
    if found is None:
        return {}
    end = found[3].decode("ascii", "replace")
    number = SIGNALS.get(end)
    if number is None and EXITED.fullmatch(end) is None:
        return {}
    task = EndedTask(found[1].decode("ascii", "replace"), number)
    try:
        return dict.fromkeys(map(int, expand_hostlist(f"[{found[2].decode()}]")), task)
    except (UserError, ValueError):
        return {}


def ended_tasks_of(said: Mapping[int, EndedTask], verdict: Verdict | None) -> dict[int, EndedTask]:
    """Returns the tasks that have ended without leave, first those that may have ended others.

    If a rank dies, its peers notice at once, and srun may end before a guard has looked. So each
    signal counts that srun has named, except those with which guards end ranks after a verdict.
    A rank that aborts may have lost a peer: NCCL and gloo abort ranks for a fault of another one.

    Args:
        said: what srun has said.
        verdict: the collector's verdict that ended the start; None without one.
    """
    gone: dict[int, EndedTask] = {}
    found = {n: task for n, task in said.items() if task.signal is not None}
    places = {n: place for place, n in enumerate(said)}
    before = 0
    if verdict is not None:
        for node, launched in verdict.gone:
            gone[launched] = EndedTask(node, said[launched].signal if launched in said else None)
        # Guards end nobody before a rank is gone, and srun names tasks in the order of their ends.
        before = min((place for n, place in places.items() if n in gone), default=0)
        found = {
            n: task for n, task in found.items() if places[n] < before or task.signal not in ENDS
        }
    found |= gone

    def order(launched: int) -> tuple[int, int]:
        place, number = places.get(launched, -1), found[launched].signal
        if number == signal.SIGABRT:
            return 2, place
        if launched in gone or 0 <= place < before:
            return 0, place
        return (2 if number in ENDS else 1), place

    return {launched: found[launched] for launched in sorted(found, key=order)}
