"""One process a rank on this host, forked of this one, which imports torch once for all of them.

A fork costs milliseconds where a start and its imports cost a rank two seconds of a core. What is
forked must not have computed: a pool of threads does not come along. So this process imports, and
leaves the rest to its ranks; its store, which has a thread, is made when they are there.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import os
import secrets
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from parallel3d.comm.job_store import LOCALHOST, SECRET, listen_at, one_host_environment, serve
from parallel3d.config.schema import Config
from parallel3d.errors import UserError, print_line
from parallel3d.host.devices import cores
from parallel3d.host.gpu_environment import gpu_environment
from parallel3d.host.host_memory import nothing_collected
from parallel3d.run import failure
from parallel3d.run.directory import PLACEMENT_FILE
from parallel3d.run.endings import (
    EXIT_ALREADY_REPORTED,
    EXIT_COMMAND_RESULT,
    STOPPABLE,
    code_of_stop,
    report_end,
)
from parallel3d.run.local_ranks import SIGNALS, LocalRanks, Stopped
from parallel3d.run.restarts import Restarts
from parallel3d.run.stop_signals import blocked_signals, kept_handlers
from parallel3d.run.time_limits import within
from parallel3d.topology.placement.placed_ranks import rank_of_launch

if TYPE_CHECKING:
    from torch.distributed import TCPStore

DISK_S = 5.0  # a disk that takes longer for a few small files is dead


class OneHost:
    """Where ranks of this host meet: a port of the loopback, and a store behind it.

    Raises:
        UserError: the port, of `launch.master_port`, is taken.
    """

    def __init__(self, port: int) -> None:
        try:
            listening = listen_at(LOCALHOST, port)
        except OSError as error:
            raise UserError(
                f"launch.master_port={port} cannot be listened on ({error.strerror}): choose "
                "another, or 0 for a free one"
            ) from None
        if listening is None:
            raise UserError(f"this host has no {LOCALHOST}, by which its ranks meet")
        self.listening, self.port = listening, listening.getsockname()[1]
        self.store: TCPStore | None = None

    def open(self) -> None:
        """Answers those that have come meanwhile, and all later ones."""
        self.store = serve(LOCALHOST, self.listening)

    def leave(self) -> None:
        """In a process that was forked: the port is not its own."""
        if self.store is None:
            self.listening.close()


def run_local_workers(
    app: str,
    config: Config,
    run_dir: Path,
    world_size: int,
    kind: str,
    module: str,
    be_rank: Callable[[int, Callable[[], bool]], int],
) -> int:
    """Start `world_size` ranks of `app` on this host, on devices of type `kind`, and wait.

    Returns the exit code. If a rank fails, all end within seconds, and the last line on stderr is
    the failure that caused the others.

    Args:
        module: what the ranks will import: it is imported here, for all.
        be_rank: this process's id, and what tells whether its terminal was lost → exit code; called
            in each rank's process, which has its environment.
    """
    wanted = _defaults_for_workers(config, world_size, kind)
    with _environment(wanted), kept_handlers(SIGNALS):
        host = OneHost(config.launch.master_port)
        # Signals come when torch is there, not in the midst of its C++.
        with blocked_signals(), nothing_collected():
            importlib.import_module(module)
        gc.freeze()  # what is shared is not written to by collections
        launcher = os.getpid()

        def live(rank: int, starts: int) -> int:
            host.leave()
            os.environ.update(_place(host, rank, world_size, starts))
            _take_threads(wanted)
            return be_rank(launcher, lambda: bool(ranks.hang_up[0]))

        ranks = _local_ranks(app, config, run_dir, world_size, live)
        try:
            exits = ranks.run(host.open)
        except Stopped as stop:
            late = f" (launch.grace_s={ranks.grace_s:g} was over)" if ranks.is_late() else ""
            print_line(f"stopped by {stop.signal.name}{late}; all {world_size} ranks have ended")
            return 128 + stop.signal
    if exits:
        return _report(config, run_dir, exits)
    if ranks.asked is not None:  # the end of a sweep as well
        raise SystemExit(code_of_stop(ranks.asked != signal.SIGINT))
    return 0


def _place(host: OneHost, rank: int, world_size: int, starts: int) -> dict[str, str]:
    """What torchrun's agent would tell a rank."""
    size = str(world_size)
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": size,
        "LOCAL_WORLD_SIZE": size,
        "MASTER_ADDR": LOCALHOST,
        "MASTER_PORT": str(host.port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RESTART_COUNT": str(starts),
        "TORCHELASTIC_ERROR_FILE": "",
    }


def _take_threads(wanted: dict[str, str]) -> None:
    """In a sweep torch may have read OMP_NUM_THREADS for another job."""
    import torch

    threads = int(wanted.get("OMP_NUM_THREADS", torch.get_num_threads()))
    if threads != torch.get_num_threads():
        torch.set_num_threads(threads)


def _local_ranks(
    app: str, config: Config, run_dir: Path, count: int, live: Callable[[int, int], int]
) -> LocalRanks:
    if app not in STOPPABLE:
        return LocalRanks(count, live)
    restarts = Restarts(run_dir, config.recovery.max_restarts, print_line)

    def starts_again(exits: dict[int, int]) -> bool:
        is_over = any(_is_answer(code) or code == EXIT_ALREADY_REPORTED for code in exits.values())
        if is_over or not _disk_answers(run_dir):
            return False
        return restarts.decide(_cause(config, run_dir, exits))

    return LocalRanks(count, live, config.launch.grace_s, starts_again)


def _report(config: Config, run_dir: Path, exits: dict[int, int]) -> int:
    """Say the failure behind these exit codes by launch rank. Returns the launcher's exit code."""
    answers = [code - EXIT_COMMAND_RESULT for code in exits.values() if _is_answer(code)]
    if answers:
        return max(answers)
    if EXIT_ALREADY_REPORTED in exits.values():
        return 1
    cause = _cause(config, run_dir, exits)
    if sys.stderr.isatty():
        # A rank that was killed while it drew its progress bar could not show the cursor again.
        sys.stderr.write("\x1b[?25h\n")
    return report_end(cause, run_dir)


def _cause(config: Config, run_dir: Path, exits: dict[int, int]) -> failure.RankFailure:
    """The failure that brought the others about, of those that ranks recorded or died of."""
    records, placed = [], exits
    if _disk_answers(run_dir):
        records = failure.read_all(run_dir)
        placed = {rank_of_launch(run_dir / PLACEMENT_FILE, n): c for n, c in exits.items()}
    known = {record.rank for record in records}
    silent = [
        failure.from_exit(config, rank, code) for rank, code in placed.items() if rank not in known
    ]
    return failure.root_cause(records + silent)


def _disk_answers(run_dir: Path) -> bool:
    """Whether the ranks' records can be read: a dead file system keeps its readers for ever."""
    return within(DISK_S, lambda: bool(failure.read_all(run_dir)) or True, False)


def _is_answer(code: int) -> bool:
    return EXIT_COMMAND_RESULT <= code < 2 * EXIT_COMMAND_RESULT


def _defaults_for_workers(config: Config, world_size: int, kind: str) -> dict[str, str]:
    """Variables of the workers: those that they need, and those that the user has not set."""
    wanted = {"OMP_NUM_THREADS": str(max(1, cores() // world_size))}
    wanted |= gpu_environment(config, kind, os.environ)
    unset = {name: value for name, value in wanted.items() if name not in os.environ}
    return unset | one_host_environment(os.environ) | {SECRET: secrets.token_hex()}


@contextlib.contextmanager
def _environment(variables: dict[str, str]) -> Iterator[None]:
    """Set variables for the length of the block."""
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
