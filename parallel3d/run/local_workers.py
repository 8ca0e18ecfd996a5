"""One process a rank on this host, under torchrun's elastic agent."""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType

from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup, WorkerSpec
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import SignalException

from parallel3d.comm.job_store import LOCALHOST, SECRET, one_host_environment
from parallel3d.config.schema import Config
from parallel3d.errors import say
from parallel3d.host.devices import cores
from parallel3d.host.gpu_environment import gpu_environment
from parallel3d.run import failure
from parallel3d.run.directory import PLACEMENT_FILE
from parallel3d.run.endings import ANSWER, END_SIGNAL, SAID, STOPPABLE, close_books, code_of_stop
from parallel3d.run.one_host import NoLogs, OneHost
from parallel3d.run.restarts import Restarts
from parallel3d.run.stop_signals import STOPPING, blocked_signals, is_nohup, kept_handlers
from parallel3d.run.time_limits import within
from parallel3d.topology.placement.placed_ranks import rank_of_launch

# Ranks that do not end on END_SIGNAL within this (a stopped one never does) are killed.
GRACE_S = 3
LAST_WORDS_S = 2.0  # a rank that waits looks once a second whether its peer lives
POLL_S = 0.1
DISK_S = 5.0  # a disk that takes longer for a few small files is dead
SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)


class Agent(LocalElasticAgent):
    """torchrun's agent, with two differences.

    It ends workers by END_SIGNAL and gives them GRACE_S for it, not half a minute: its own time-out
    reaches only the way out by a signal, not the one by a failed rank. And where the workers can
    stop at the end of a step (`grace_s` is given), a first signal is handed on to them. Whether
    failed workers are started again is asked of `starts_again`, given their exit codes by rank.
    """

    grace_s: float | None = None
    starts_again: Callable[[dict[int, int]], bool] | None = None
    asked: signal.Signals | None = None
    asked_at: float = 0.0
    interrupted = False

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, int]:
        nohup = is_nohup(signal.SIGHUP)
        with blocked_signals() if self.grace_s is not None else contextlib.nullcontext():
            pids = super()._start_workers(worker_group)
            context = self._pcontext
            assert context is not None  # set by the call above
            close = context.close
            context.close = lambda death_sig=None, timeout=GRACE_S: self._close(close)
            if nohup:
                signal.signal(signal.SIGHUP, signal.SIG_IGN)
            if self.grace_s is not None:
                for number in STOPPING:
                    if not is_nohup(number):
                        signal.signal(number, self._ask_to_stop)
        return pids

    def _close(self, close: Callable[[signal.Signals, int], None]) -> None:
        """Ends the ranks. Where one aborted, its peers have a moment first: they may know why."""
        exits = [failed.exitcode for failed in self._pcontext._failures.values()]
        if -signal.SIGABRT in exits:
            time.sleep(LAST_WORDS_S)
        close(END_SIGNAL, GRACE_S)

    def _ask_to_stop(self, number: int, frame: FrameType | None) -> None:
        """Hands a signal on; the second Ctrl-C ends everything at once."""
        if number == signal.SIGINT:
            if self.interrupted:
                raise SignalException("second SIGINT", signal.SIGINT)
            self.interrupted = True
        if self.asked is None:
            self.asked, self.asked_at = signal.Signals(number), time.monotonic()
        # SIGHUP would end them at once (END_SIGNAL).
        self._hand_on(signal.SIGTERM if number == signal.SIGHUP else signal.Signals(number))

    def _hand_on(self, number: signal.Signals) -> None:
        pids = self._pcontext.pids().values() if self._pcontext is not None else ()
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):  # it has ended
                os.kill(pid, number)

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        result = super()._monitor_workers(worker_group)
        if result.is_failed():
            exits = {rank: ended.exitcode for rank, ended in result.failures.items()}
            again = self.asked is None and self.starts_again is not None
            if not (again and self.starts_again(exits)):
                self._remaining_restarts = 0
        if self.is_late():
            raise SignalException("the ranks did not stop in time", self.asked)
        return result

    def is_late(self) -> bool:
        """Whether the ranks were asked to stop and have not within `grace_s`."""
        if self.asked is None or self.grace_s is None:
            return False
        return time.monotonic() - self.asked_at > self.grace_s


def run_local_workers(app: str, config: Config, run_dir: Path, world_size: int, kind: str) -> int:
    """Start `world_size` ranks of `app` on this host, on devices of type `kind`, and wait.

    Returns the exit code.

    If a rank fails, all end within seconds, and the last line on stderr is the failure that
    caused the others.
    """
    wanted = _defaults_for_workers(config, world_size, kind)
    with _environment(wanted), kept_handlers(SIGNALS):
        agent = _agent(app, config, run_dir, world_size, kind)
        _silence_elastic()
        try:
            result = agent.run()
        except SignalException as stop:
            late = f" (launch.grace_s={agent.grace_s:g} was over)" if agent.is_late() else ""
            say(f"stopped by {stop.sigval.name}{late}; all {world_size} ranks have ended")
            return 128 + stop.sigval
    if not result.is_failed():
        if agent.asked is not None:  # the end of a sweep as well
            raise SystemExit(code_of_stop(agent.asked != signal.SIGINT))
        return 0
    exits = {rank: ended.exitcode for rank, ended in result.failures.items()}
    return _report(config, run_dir, exits)


def _report(config: Config, run_dir: Path, exits: dict[int, int]) -> int:
    """Say the failure behind these exit codes by launch rank. Returns the launcher's exit code."""
    answers = [code - ANSWER for code in exits.values() if _is_answer(code)]
    if answers:
        return max(answers)
    if SAID in exits.values():
        return 1
    cause = _cause(config, run_dir, exits)
    if sys.stderr.isatty():
        # A rank that was killed while it drew its progress bar could not show the cursor again.
        sys.stderr.write("\x1b[?25h\n")
    return close_books(cause, run_dir)


def _cause(config: Config, run_dir: Path, exits: dict[int, int]) -> failure.Failure:
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
    return ANSWER <= code < 2 * ANSWER


def _agent(app: str, config: Config, run_dir: Path, world_size: int, kind: str) -> Agent:
    max_restarts = config.recovery.max_restarts if app in STOPPABLE else 0
    spec = WorkerSpec(
        role="rank",
        local_world_size=world_size,
        entrypoint=sys.executable,
        args=(
            *_import_flags(),
            *("-m", "parallel3d", "_worker", app, str(run_dir), str(os.getpid()), kind),
        ),
        rdzv_handler=OneHost(config.launch.master_port),
        max_restarts=max_restarts,
        monitor_interval=POLL_S,
        local_addr=LOCALHOST,
    )
    agent = Agent(spec, NoLogs(), shutdown_timeout=GRACE_S)
    if app in STOPPABLE:
        restarts = Restarts(run_dir, max_restarts, say)

        def starts_again(exits: dict[int, int]) -> bool:
            is_over = any(_is_answer(code) or code == SAID for code in exits.values())
            if is_over or not _disk_answers(run_dir):
                return False
            return restarts.decide(_cause(config, run_dir, exits))

        agent.grace_s, agent.starts_again = config.launch.grace_s, starts_again
    return agent


def _import_flags() -> tuple[str, ...]:
    """Keep the workers from importing out of the current directory, unless this process does."""
    return () if {"", os.getcwd()} & set(sys.path) else ("-P",)


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


def _silence_elastic() -> None:
    """What the agent's loggers say of a failure, we say ourselves, shorter and last."""
    if "LOGLEVEL" in os.environ:
        return
    for name in list(logging.root.manager.loggerDict):
        if name.startswith("torch.distributed.elastic"):
            logging.getLogger(name).setLevel(logging.CRITICAL + 1)
