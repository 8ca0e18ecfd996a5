"""How a rank ends, and who says why: exit codes, the last words, and the way out."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from parallel3d.config.schema import Config
from parallel3d.errors import USER_ERROR, print_line
from parallel3d.run import failure
from parallel3d.run.directory import discard_unused
from parallel3d.run.launch import Worker
from parallel3d.run.rendezvous import RankZerosError

if TYPE_CHECKING:
    from torch.distributed import Store


# Those that a signal stops at the end of a step; the others it ends at once.
STOPPABLE = ("train",)
# How many ranks have met a user error: one of them says it.
USER_ERRORS_KEY = "parallel3d/user_errors"
# By it our launcher ends ranks at once. SIGTERM would ask them to save and stop.
END_SIGNAL = signal.SIGHUP
# The exit code of a local worker that has said itself why all end, as no file took it.
EXIT_ALREADY_REPORTED = 63
# A local worker's exit codes from here on are the subcommand's own answer: it ran to its end.
EXIT_COMMAND_RESULT = 64


def code_of_stop(requeues: bool) -> int:
    """A run that a scheduler stopped has saved and done well; Ctrl-C is told to the shell."""
    return 0 if requeues else 128 + signal.SIGINT


def report_end(cause: failure.RankFailure, run_dir: Path) -> int:
    """Say why a run ended. A run that a user error stopped leaves no directory behind.

    Returns the exit code.
    """
    print_line(cause.sentence())
    if cause.kind != "user":
        return 1
    discard_unused(run_dir)
    return USER_ERROR


def report_hang(worker: Worker, error: Exception) -> None:
    """A wait that timed out is a hang: the watchdogs of all ranks find out whose, and end them."""
    timed_out = isinstance(error, TimeoutError) or failure.TIMED_OUT.search(str(error))
    if worker.watchdog is not None and timed_out:
        worker.watchdog.timed_out()


def report_failure(config: Config, worker: Worker, error: Exception, store: Store | None) -> None:
    """Say this rank's failure; of a UserError that several ranks share, only one speaks."""
    failed = failure.from_exception(config, worker, error)
    if worker.run_dir != Path() and failed.kind != "user":
        # Rank 0 removes the directory of a run that never began, and its peers die of that.
        if os.path.isdir(worker.run_dir):
            failed = failure.write(failed, error, worker.run_dir)
    elif worker.run_dir != Path() and worker.rank == 0:
        discard_unused(worker.run_dir)
    if failed.kind != "user" or _is_first_to_speak(worker, error, store):
        print_line(failed.sentence())


def _is_first_to_speak(worker: Worker, error: Exception, store: Store | None) -> bool:
    if store is None or isinstance(error, RankZerosError):
        return worker.rank == 0
    try:
        return store.add(USER_ERRORS_KEY, 1) == 1
    except RuntimeError:
        return False  # the store went with rank 0, which has spoken


def leave(code: int, worker: Worker | None = None) -> None:
    """End this process now: destructors of groups with a dead peer may wait for it for minutes.

    A verdict on a hang that its watchdog is about to give comes first: it may have killed the peer.
    """
    if worker is not None and worker.watchdog is not None and worker.watchdog.is_reporting:
        worker.watchdog.timed_out()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
