"""Copies srun's errors to the job's output, and notes which signals have ended its tasks.

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
from typing import IO

from parallel3d.errors import UserError
from parallel3d.files import write_all
from parallel3d.topology.cluster.slurm import expand_hostlist

STDERR = 2
LINE_BYTES = 4096  # of a line that has not ended
TASKS = re.compile(rb"srun: error: \S+: tasks? ([0-9,-]+): ([^()\r]+?)(?: \(core dumped\))?\r?")
SIGNALS = {signal.strsignal(number): number for number in signal.Signals}


class StepErrors:
    """Reads the errors of one srun in a thread, until srun has ended.

    Attributes:
        signals: the signals that have ended tasks, by the launcher's number of the rank.
    """

    def __init__(self, pipe: IO[bytes]) -> None:
        self.signals: dict[int, signal.Signals] = {}
        self._pipe = pipe
        self._thread = threading.Thread(target=self._copy, name="srun's errors", daemon=True)
        self._thread.start()

    def join(self, seconds: float) -> Mapping[int, signal.Signals]:
        """Waits until all is read, but not for long: a lost srun's child may hold the pipe."""
        self._thread.join(seconds)
        return dict(self.signals)

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
                    self.signals |= signals_of(line)


def signals_of(line: bytes) -> dict[int, signal.Signals]:
    """Returns the tasks that a line of srun's errors says were ended by a signal."""
    found = TASKS.fullmatch(line)
    number = SIGNALS.get(found[2].decode("ascii", "replace")) if found is not None else None
    if found is None or number is None:
        return {}
    try:
        return {int(task): number for task in expand_hostlist(f"[{found[1].decode()}]")}
    except (UserError, ValueError):
        return {}
