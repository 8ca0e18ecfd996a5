"""Exit codes of ranks, the last lines that they log, and their exit."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from parallel3d.config.schema import Config
from parallel3d.errors import USER_ERROR, print_line
from parallel3d.run import failure
from parallel3d.run.directory import discard_unused
from parallel3d.run.launch import Worker
from parallel3d.run.rendezvous import RankZerosError

if TYPE_CHECKING:
    from torch.distributed import Store


# Subcommands that a signal stops at the end of a step; it ends the others at once.
STOPPABLE = ("train",)
# Counts ranks with a user error: the first one logs it.
USER_ERRORS_KEY = "parallel3d/user_errors"
# Our launcher's signal to end ranks at once. SIGTERM would ask them to save and stop.
END_SIGNAL = signal.SIGHUP
# Exit code of a local worker that has logged the cause itself, as no file could be written.
EXIT_ALREADY_REPORTED = 63
# A local worker's exit codes from here on are the subcommand's own result: it ran to its end.
EXIT_COMMAND_RESULT = 64


def code_of_stop(requeues: bool) -> int:
    """Returns 0 for a scheduler's stop, after which the run is requeued; 130 for Ctrl-C."""
    return 0 if requeues else 128 + signal.SIGINT


def report_end(cause: failure.RankFailure, run_dir: Path) -> int:
    """Logs why a run ended and returns the exit code; after a user error its directory goes."""
    print_line(cause.sentence())
    if cause.kind != "user":
        return 1
    discard_unused(run_dir)
    return USER_ERROR


def report_hang(worker: Worker, error: Exception) -> None:
    """Starts the watchdogs' diagnosis if a wait timed out, which is a hang; they end all ranks."""
    timed_out = isinstance(error, TimeoutError) or failure.TIMED_OUT.search(str(error))
    if worker.watchdog is not None and timed_out:
        worker.watchdog.timed_out()


def report_failure(config: Config, worker: Worker, error: Exception, store: Store | None) -> None:
    """Logs this rank's failure; a UserError that several ranks share is logged by one."""
    failed = failure.from_exception(config, worker, error)
    if worker.run_dir != Path() and failed.kind != "user":
        # Rank 0 removes the directory of a run that never began, which makes its peers fail.
        if os.path.isdir(worker.run_dir):
            failed = failure.write(failed, error, worker.run_dir)
    elif worker.run_dir != Path() and worker.rank == 0:
        discard_unused(worker.run_dir)
    if failed.kind != "user" or _is_first_to_log(worker, error, store):
        print_line(failed.sentence())


def _is_first_to_log(worker: Worker, error: Exception, store: Store | None) -> bool:
    if store is None or isinstance(error, RankZerosError):
        return worker.rank == 0
    try:
        return store.add(USER_ERRORS_KEY, 1) == 1
    except RuntimeError:
        return False  # the store ended with rank 0, which has logged it


def leave(code: int, worker: Worker | None = None) -> NoReturn:
    """Ends this process now: destructors of groups with a dead peer may wait for it for minutes.

    A diagnosis that the watchdog is about to log comes first: it may have killed the peer.
    """
    if worker is not None and worker.watchdog is not None and worker.watchdog.is_reporting:
        worker.watchdog.timed_out()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
