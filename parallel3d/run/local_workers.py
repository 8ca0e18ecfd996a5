"""Starts a process for each rank on this host, and watches, stops and restarts these processes.

This process, the local launcher, imports torch and then forks the ranks, which takes milliseconds;
a new interpreter with its imports would take two seconds of a core per rank. A forked process lacks
the threads of its parent. Therefore this process computes nothing, because computing would start
torch's thread pools, and it creates its store, which has a thread, only after the forks.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import math
import multiprocessing
import os
import secrets
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from multiprocessing.context import ForkProcess
from pathlib import Path
from types import FrameType

from parallel3d.blueprint.layout import Layout
from parallel3d.checkpoint.manifest import list_checkpoints, reason, step_of
from parallel3d.comm.store import LOCALHOST, SECRET, listen_at, one_host_environment, serve
from parallel3d.errors import UserError, print_line
from parallel3d.host.devices import DeviceChoice, gpu_environment
from parallel3d.host.memory import nothing_collected
from parallel3d.host.processes import drop_failed_output, set_process_name
from parallel3d.host.quotas import available_cores
from parallel3d.metrics import recovery_log
from parallel3d.metrics.recovery_log import Cause, RecoveryLine
from parallel3d.metrics.starts import STARTS
from parallel3d.resolve import layout_of
from parallel3d.run import failure
from parallel3d.run.directory import PLACEMENT_FILE, discard_unused, keep_failures
from parallel3d.run.failure import (
    END_SIGNAL,
    EXIT_ALREADY_REPORTED,
    EXIT_COMMAND_RESULT,
    RankFailure,
    code_of_stop,
    has_steps,
    report_end,
)
from parallel3d.run.launch import STOPPING, blocked_signals, is_nohup, kept_handlers, within
from parallel3d.run.worker import APPS, Work, local_worker_main, run_alone
from parallel3d.run_config import Config
from parallel3d.topology.placed_ranks import rank_of_launch


@dataclass
class Restarts:
    """Decides whether a launcher restarts its ranks after a failure.

    A restart needs a checkpoint and a failure that may not recur. User errors, decisions of the
    run, and an error that has already occurred in the same step rule out a restart. The death of a
    rank by a signal always allows a restart, as the signal comes from outside.

    The decisions about a run that has begun are appended to its `recovery.jsonl`.

    Attributes:
        limit: maximum number of restarts.
        say: logs a sentence for the user.
        count: number of restarts so far.
        last: phase and error of the last failure that led to a restart; None before the first one.
    """

    run_dir: Path
    limit: int
    say: Callable[[str], None]
    count: int = 0
    last: tuple[str, str] | None = None

    def decide(self, cause: RankFailure, noticed: float | None = None) -> bool:
        """Returns whether to restart; if so, logs it and moves the failure's records aside.

        `noticed` is the Unix time at which the failure was noticed, or None for now.
        """
        noticed = time.time() if noticed is None else noticed
        if self.count >= self.limit or not self._may_succeed(cause):
            return self._stop(cause, noticed)
        try:
            saved = list_checkpoints(self.run_dir)
            if not saved:
                return self._stop(cause, noticed)
            keep_failures(self.run_dir)
        except OSError as error:
            self.say(f"no restart, as {self.run_dir} cannot be used ({reason(error)})")
            return False
        self.count += 1
        self.last = (cause.phase, cause.error)
        step = step_of(saved[0])
        restart = f"restart {self.count} of {self.limit} from step {step}"
        sentence = f"{cause.sentence().rstrip('.')}; {restart}"
        self.say(sentence)
        self._record("same", sentence, cause, noticed)
        return True

    def _stop(self, cause: RankFailure, noticed: float) -> bool:
        self._record("stop", cause.sentence(), cause, noticed)
        return False

    def _record(self, decision: str, sentence: str, failed: RankFailure, noticed: float) -> None:
        """Appends the decision, unless the run has not begun: its folder may yet be removed."""
        if not os.path.isfile(self.run_dir / STARTS):
            return
        failed_at, now = min(failed.time, noticed), time.time()
        line = RecoveryLine(
            at=now,
            start=self.count + 1 if decision == "same" else self.count + 2,
            decision=decision,
            sentence=sentence,
            cause=Cause(failed.kind, failed.host, failed.rank, failed.error),
            nodes=(socket.gethostname(),) if decision == "same" else (),
            failed_at=failed_at,
            seconds={"detect": noticed - failed_at, "end": max(0.0, now - noticed)},
        )
        recovery_log.append(self.run_dir, line, self.say)

    def _may_succeed(self, cause: RankFailure) -> bool:
        if cause.kind in ("user", "decided"):
            return False
        return cause.kind == "killed" or self.last != (cause.phase, cause.error)


# Processes of the ranks

# Seconds between END_SIGNAL and the kill of ranks that have not ended, such as stopped ones.
GRACE_S = 3
LAST_WORDS_S = 2.0  # waiting ranks check once a second whether their peers are alive
POLL_S = 0.1
FORK_TRIAL_S = 10.0  # a computation of milliseconds
SIGNALS = (*STOPPING, signal.SIGQUIT)
FORK = multiprocessing.get_context("fork")


class StopSignal(Exception):
    """Raised on a signal that ends all ranks at once."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.signal = signal.Signals(number)


@dataclass
class LocalRanks:
    """The ranks of a run on this host, from their first start to their last end.

    If the ranks can stop at the end of a step (`grace_s` is given), the signals in STOPPING are
    forwarded to them. On any other signal, or a second Ctrl-C, all ranks are ended with END_SIGNAL.

    Args:
        count: number of ranks.
        live: runs a rank in its own process, given the rank and the number of earlier starts, and
            returns the exit code.
        grace_s: seconds that the ranks have after a signal; None if signals are not forwarded.
        should_restart: returns whether to restart all ranks, given the exit codes of failed ranks
            and the Unix time at which they were noticed.
    """

    count: int
    live: Callable[[int, int], int]
    grace_s: float | None = None
    should_restart: Callable[[dict[int, int], float], bool] = lambda exits, noticed: False
    ranks: list[ForkProcess] = field(default_factory=list)
    asked: signal.Signals | None = None
    asked_at: float = math.inf
    interrupted: bool = False
    noticed: float = 0.0  # Unix time at which the last failure was noticed

    def run(self, started: Callable[[], object] = lambda: None) -> dict[int, int]:
        """Runs the ranks, and returns the nonzero exit codes by rank.

        `started` is called after the first forks.
        """
        starts = 0
        try:
            while True:
                self._start(starts)
                if starts == 0:
                    started()
                exits = self._watch()
                if not exits or self.asked is not None:
                    return exits
                if not self.should_restart(exits, self.noticed):
                    return exits
                starts += 1
        finally:
            self._end()

    def _start(self, starts: int) -> None:
        """Forks the ranks; signals stay blocked until this process and each rank have handlers."""
        with blocked_signals(SIGNALS) as before:
            inherited = set(before) | set(STOPPING if self.grace_s is not None else ())
            for rank in range(self.count):
                process = FORK.Process(target=self._become, args=(rank, starts, inherited))
                process.start()
                self.ranks[rank:] = [process]
            for number in SIGNALS:
                if not is_nohup(number):
                    asks = self.grace_s is not None and number in STOPPING
                    signal.signal(number, self._ask_to_stop if asks else _stop)

    def _become(self, rank: int, starts: int, blocked: set[int]) -> None:
        os.setsid()  # the launcher forwards Ctrl-C
        set_process_name(f"p3d rank {rank}")
        for number in SIGNALS:
            if not is_nohup(number):
                signal.signal(number, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
        sys.exit(self.live(rank, starts))

    def _watch(self) -> dict[int, int]:
        while True:
            time.sleep(POLL_S)
            exits = [process.exitcode for process in self.ranks]
            failed = {rank: code for rank, code in enumerate(exits) if code}
            if failed:
                self.noticed = time.time()
                if -signal.SIGABRT in failed.values():  # peers may know why a rank aborted
                    time.sleep(LAST_WORDS_S)
                self._end()
                return failed
            if None not in exits:
                return {}
            if self.asked is not None and self.is_late():
                raise StopSignal(self.asked)

    def _end(self) -> None:
        running = [process for process in self.ranks if process.exitcode is None]
        for process in running:
            _signal_session(_pid(process), END_SIGNAL)
        until = time.monotonic() + GRACE_S
        for process in running:
            process.join(max(0.0, until - time.monotonic()))
            if process.exitcode is None:
                _signal_session(_pid(process), signal.SIGKILL)
                process.join()

    def _ask_to_stop(self, number: int, frame: FrameType | None) -> None:
        """Forwards a signal to the ranks; a second Ctrl-C ends all of them at once."""
        if number == signal.SIGINT:
            if self.interrupted:
                raise StopSignal(number)
            self.interrupted = True
        if self.asked is None:
            self.asked, self.asked_at = signal.Signals(number), time.monotonic()
        self._forward(signal.Signals(number))

    def _forward(self, number: signal.Signals) -> None:
        for process in self.ranks:
            # `process.exitcode` is avoided: it reaps the process, and this handler may interrupt a
            # reap.
            with contextlib.suppress(ProcessLookupError):
                os.kill(_pid(process), number)

    def is_late(self) -> bool:
        """Returns whether more than `grace_s` have passed since the ranks were asked to stop."""
        return time.monotonic() - self.asked_at > (self.grace_s or 0.0)


def _stop(number: int, frame: FrameType | None) -> None:
    raise StopSignal(number)


def _pid(process: ForkProcess) -> int:
    assert process.pid is not None  # the process was started
    return process.pid


def _signal_session(pid: int, number: signal.Signals) -> None:
    """Signals a rank and its children, or the rank alone before it has its own session."""
    with contextlib.suppress(ProcessLookupError):
        try:
            os.killpg(pid, number)
        except ProcessLookupError:
            os.kill(pid, number)


# The launcher


DISK_S = 5.0  # a disk that takes longer for a few small files counts as dead


def listen_here(port: int) -> socket.socket:
    """Returns a socket that listens on the rendezvous port. Raises UserError if it is taken."""
    try:
        listening = listen_at(LOCALHOST, port)
    except OSError as error:
        raise UserError(
            f"launch.master_port={port} cannot be opened ({error.strerror}): choose "
            "another, or 0 for a free one"
        ) from None
    if listening is None:
        raise UserError(f"this host has no address {LOCALHOST}, at which its ranks would meet")
    return listening


def run_here(
    app: str,
    config: Config,
    run_dir: Path,
    device: DeviceChoice,
    *,
    in_sweep: bool = False,
    work: Work | None = None,
) -> int:
    """Runs all ranks of a run on this host, logs failures, and returns the exit code.

    Several ranks get a process each, and a single rank runs in this process. With `in_sweep`, more
    runs follow in this process, so even a single rank is forked: a process that has used torch
    cannot be forked safely. `work` is as in `run_alone`.
    """
    drop_failed_output()
    print_line(device.line)
    try:
        if config.world_size == 1 and not in_sweep:
            return run_alone(app, config, run_dir, device.kind, work)
        return run_local_workers(app, config, run_dir, device.kind, work)
    except (KeyboardInterrupt, UserError):
        discard_unused(run_dir)
        raise


def run_local_workers(
    app: str, config: Config, run_dir: Path, kind: str, work: Work | None = None
) -> int:
    """Starts the ranks of `app` on this host, on devices of type `kind`, and waits for them.

    Returns the exit code. If a rank fails, all ranks end within seconds, and the last line on
    stderr names the failure that caused the others.
    """
    world_size = config.world_size
    gpus = gpu_environment(kind, os.environ, config.cluster, tp=config.tp, zero=config.zero)
    wanted = _defaults_for_workers(world_size, gpus)
    with _environment(wanted), kept_handlers(SIGNALS):
        listening = listen_here(config.launch.master_port)
        port, stores = listening.getsockname()[1], []
        # Signals are blocked until torch's C++ is imported.
        with blocked_signals(), nothing_collected():
            importlib.import_module(APPS[app][0])
            from parallel3d.models.architecture import architecture_of

            architecture_of(config.model)  # whose modules each rank would import
        if work is not None:  # a script's own code has run in this process
            check_can_fork(kind, wanted)
        gc.freeze()  # collections would write to pages that are shared with the ranks
        launcher = os.getpid()

        def live(rank: int, starts: int) -> int:
            listening.close()  # closes this process's copy only
            os.environ.update(_rank_environment(port, rank, world_size, starts))
            _set_threads(wanted)
            return local_worker_main(app, config, run_dir, launcher, kind, work)

        ranks = LocalRanks(world_size, live)
        if has_steps(app, config.train):
            again = _restart_decision(layout_of(config), run_dir, config.recovery.max_restarts)
            ranks = LocalRanks(world_size, live, config.launch.grace_s, again)
        try:
            exits = ranks.run(lambda: stores.append(serve(LOCALHOST, listening)))
        except StopSignal as stop:
            late = f" (launch.grace_s={ranks.grace_s:g} had passed)" if ranks.is_late() else ""
            print_line(f"stopped by {stop.signal.name}{late}; all {world_size} ranks have ended")
            return 128 + stop.signal
    if exits:
        return _report(layout_of(config), run_dir, exits)
    if ranks.asked is not None:  # SystemExit also ends a sweep
        raise SystemExit(code_of_stop(ranks.asked != signal.SIGINT))
    return 0


def check_can_fork(kind: str, wanted: dict[str, str]) -> None:
    """Raises UserError if ranks that are forked from this process could not compute.

    A forked process has neither the GPU's context of its parent nor the threads of its pools. A
    child tries a computation, since no library tells whether its pool has threads; without them it
    would wait for ever.
    """
    import torch

    from parallel3d.device.accelerator import is_accelerator, module

    fork_remedy = "do this in a hook's before_run, or start the script by torchrun"
    device = torch.device(kind)
    if is_accelerator(device) and module(device).is_initialized():
        raise UserError(
            f"the script has used {kind} before fit(), so its ranks could not be forked; "
            f"{fork_remedy}"
        )

    def compute() -> None:
        _set_threads(wanted)
        torch.ones(1 << 18).exp_()
        os._exit(0)

    child = FORK.Process(target=compute, daemon=True)
    child.start()
    child.join(FORK_TRIAL_S)
    if child.exitcode is None:
        child.kill()
        child.join()
        raise UserError(
            "the script has computed with large tensors before fit(), so its ranks could not be "
            f"forked; {fork_remedy}"
        )


def _rank_environment(port: int, rank: int, world_size: int, starts: int) -> dict[str, str]:
    size = str(world_size)
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": size,
        "LOCAL_WORLD_SIZE": size,
        "MASTER_ADDR": LOCALHOST,
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RESTART_COUNT": str(starts),
        "TORCHELASTIC_ERROR_FILE": "",
    }


def _set_threads(wanted: dict[str, str]) -> None:
    """Sets torch's number of threads, as an earlier job of a sweep may have changed it."""
    import torch

    threads = int(wanted.get("OMP_NUM_THREADS", torch.get_num_threads()))
    if threads != torch.get_num_threads():
        torch.set_num_threads(threads)


def _restart_decision(
    layout: Layout, run_dir: Path, max_restarts: int
) -> Callable[[dict[int, int], float], bool]:
    """Returns a function that decides on a restart, as `LocalRanks.should_restart` is called."""
    restarts = Restarts(run_dir, max_restarts, print_line)

    def decide(exits: dict[int, int], noticed: float) -> bool:
        is_over = any(_is_answer(code) or code == EXIT_ALREADY_REPORTED for code in exits.values())
        if is_over or not _disk_answers(run_dir):
            return False
        return restarts.decide(_cause(layout, run_dir, exits), noticed)

    return decide


def _report(layout: Layout, run_dir: Path, exits: dict[int, int]) -> int:
    """Logs the failure behind exit codes (by launch rank); returns the launcher's exit code."""
    answers = [code - EXIT_COMMAND_RESULT for code in exits.values() if _is_answer(code)]
    if answers:
        return max(answers)
    if EXIT_ALREADY_REPORTED in exits.values():
        return 1
    cause = _cause(layout, run_dir, exits)
    if sys.stderr.isatty():
        # Show the cursor again, which a killed rank's progress bar may have hidden.
        sys.stderr.write("\x1b[?25h\n")
    return report_end(cause, run_dir)


def _cause(layout: Layout, run_dir: Path, exits: dict[int, int]) -> failure.RankFailure:
    """Finds the failure that caused the others, from the ranks' records and exit codes."""
    records, placed = [], exits
    if _disk_answers(run_dir):
        records = failure.read_all(run_dir)
        placed = {rank_of_launch(run_dir / PLACEMENT_FILE, n): c for n, c in exits.items()}
    known = {record.rank for record in records}
    silent = [
        failure.from_exit(layout, rank, code) for rank, code in placed.items() if rank not in known
    ]
    return failure.root_cause(records + silent)


def _disk_answers(run_dir: Path) -> bool:
    """Returns whether `run_dir` can be read; a dead file system blocks its readers forever."""
    return within(DISK_S, lambda: bool(failure.read_all(run_dir)) or True, False)


def _is_answer(code: int) -> bool:
    return EXIT_COMMAND_RESULT <= code < 2 * EXIT_COMMAND_RESULT


def _defaults_for_workers(world_size: int, of_gpus: dict[str, str]) -> dict[str, str]:
    """Returns the ranks' environment variables: required ones, and defaults for unset ones."""
    wanted = {"OMP_NUM_THREADS": str(max(1, available_cores() // world_size))} | of_gpus
    unset = {name: value for name, value in wanted.items() if name not in os.environ}
    return unset | one_host_environment(os.environ) | {SECRET: secrets.token_hex()}


@contextlib.contextmanager
def _environment(variables: dict[str, str]) -> Iterator[None]:
    before = dict(os.environ)
    os.environ.update(variables)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)
