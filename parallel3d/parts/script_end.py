"""Closes the world of a script of the user's own when the interpreter ends."""

from __future__ import annotations

import atexit
import signal
import sys
from types import TracebackType
from typing import NoReturn

import torch.distributed as dist

from parallel3d.comm.process_groups import ProcessGroups
from parallel3d.device.accelerator import is_accelerator
from parallel3d.run.endings import leave


class ScriptEnd:
    """Closes what the script has not: the dying interpreter would abort on threads of groups.

    NCCL destroys a communicator in a collective. A rank that has failed must not call it: its peers
    may wait in another collective for this rank, which would wait for them and never end.

    A script fails by an exception that nothing catches, or by `sys.exit` with another code than 0.
    `raise SystemExit` leaves no trace and counts as a good end.
    """

    def __init__(self, groups: ProcessGroups) -> None:
        self.groups = groups
        self.code: int | None = None  # of a script that raised
        self.is_refused = False  # it called `sys.exit` with a code
        self.excepthook, self.exit = sys.excepthook, sys.exit
        sys.excepthook, sys.exit = self._raised, self._exited
        atexit.register(self.close)

    def _raised(
        self, kind: type[BaseException], error: BaseException, trace: TracebackType | None
    ) -> None:
        self.excepthook(kind, error, trace)
        if not hasattr(sys, "ps1"):  # in an interactive session the next line may go on
            interrupted = issubclass(kind, KeyboardInterrupt)
            self.code = 128 + signal.SIGINT if interrupted else 1

    def _exited(self, status: object = None) -> NoReturn:
        self.is_refused = bool(status)
        self.exit(status)

    def close(self) -> None:
        """Destroys the groups and the world, with all ranks, unless the script has failed."""
        if not dist.is_initialized():
            return
        if self.code is not None:
            leave(self.code)
        if self.is_refused and is_accelerator(self.groups.device):
            # The exit may have been caught: the interpreter knows the code.
            dist.distributed_c10d._abort_process_group()
            return
        self.groups.close()
        dist.destroy_process_group()
