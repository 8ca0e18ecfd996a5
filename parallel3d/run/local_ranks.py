"""Processes of this host's ranks: forked of this one, watched, asked to stop, ended."""

from __future__ import annotations

import contextlib
import mmap
import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from multiprocessing.context import ForkProcess
from types import FrameType

from parallel3d.host.processes import show_as
from parallel3d.run.endings import END_SIGNAL
from parallel3d.run.stop_signals import ASKING, STOPPING, blocked_signals, is_nohup

# Ranks that do not end on END_SIGNAL within this (a stopped one never does) are killed.
GRACE_S = 3
LAST_WORDS_S = 2.0  # a rank that waits looks once a second whether its peer lives
POLL_S = 0.1
SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
FORK = multiprocessing.get_context("fork")


class Stopped(Exception):
    """A signal, by which all ranks end at once."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.signal = signal.Signals(number)


@dataclass
class LocalRanks:
    """The ranks of a run on this host, from their first start to their last end.

    Where they can stop at the end of a step (`grace_s` is given), a first signal is handed on to
    them; all others end them by END_SIGNAL.

    Args:
        live: rank and how many starts there were before → exit code; called in the rank's process.
        starts_again: given the exit codes of failed ranks, whether all shall be started again.
    """

    count: int
    live: Callable[[int, int], int]
    grace_s: float | None = None
    starts_again: Callable[[dict[int, int]], bool] = lambda exits: False
    ranks: list[ForkProcess] = field(default_factory=list)
    asked: signal.Signals | None = None
    asked_at: float = 0.0
    interrupted: bool = False
    # One byte that the ranks share: whether the signal that was handed on as SIGTERM was SIGHUP.
    hang_up: mmap.mmap = field(default_factory=lambda: mmap.mmap(-1, 1))

    def run(self, started: Callable[[], None] = lambda: None) -> dict[int, int]:
        """The exit codes of the ranks that failed of themselves, by rank; none: all did well.

        `started` is called once the first ranks are there. Raises Stopped.
        """
        starts = 0
        try:
            while True:
                self._start(starts)
                if starts == 0:
                    started()
                exits = self._watch()
                if not exits or self.asked is not None or not self.starts_again(exits):
                    return exits
                starts += 1
        finally:
            self._end()

    def _start(self, starts: int) -> None:
        """A signal waits until there are handlers: here, and in each rank."""
        with blocked_signals(SIGNALS) as before:
            inherited = set(before) | set(ASKING if self.grace_s is not None else ())
            for rank in range(self.count):
                process = FORK.Process(target=self._become, args=(rank, starts, inherited))
                process.start()
                self.ranks[rank:] = [process]
            for number in SIGNALS:
                if not is_nohup(number):
                    asks = self.grace_s is not None and number in STOPPING
                    signal.signal(number, self._ask_to_stop if asks else _stop)

    def _become(self, rank: int, starts: int, blocked: set[int]) -> None:
        os.setsid()  # Ctrl-C comes by way of the launcher
        show_as(f"p3d rank {rank}")
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
                if -signal.SIGABRT in failed.values():  # its peers may know why
                    time.sleep(LAST_WORDS_S)
                self._end()
                return failed
            if None not in exits:
                return {}
            if self.is_late():
                raise Stopped(self.asked)

    def _end(self) -> None:
        """Ends those that still run."""
        running = [process for process in self.ranks if process.exitcode is None]
        for process in running:
            _signal_session(process.pid, END_SIGNAL)
        until = time.monotonic() + GRACE_S
        for process in running:
            process.join(max(0.0, until - time.monotonic()))
            if process.exitcode is None:
                _signal_session(process.pid, signal.SIGKILL)
                process.join()

    def _ask_to_stop(self, number: int, frame: FrameType | None) -> None:
        """Hands a signal on; the second Ctrl-C ends everything at once."""
        if number == signal.SIGINT:
            if self.interrupted:
                raise Stopped(number)
            self.interrupted = True
        if self.asked is None:
            self.asked, self.asked_at = signal.Signals(number), time.monotonic()
        self.hang_up[0] = number == signal.SIGHUP
        # SIGHUP would end them at once (END_SIGNAL).
        self._hand_on(signal.SIGTERM if number == signal.SIGHUP else signal.Signals(number))

    def _hand_on(self, number: signal.Signals) -> None:
        for process in self.ranks:
            # Without asking whether it has ended, which reaps it: here in the midst of that.
            with contextlib.suppress(ProcessLookupError):
                os.kill(process.pid, number)

    def is_late(self) -> bool:
        """Whether the ranks were asked to stop and have not within `grace_s`."""
        if self.asked is None or self.grace_s is None:
            return False
        return time.monotonic() - self.asked_at > self.grace_s


def _stop(number: int, frame: FrameType | None) -> None:
    raise Stopped(number)


def _signal_session(pid: int, number: signal.Signals) -> None:
    """To a rank and what it has started; to it alone while it has no session of its own yet."""
    with contextlib.suppress(ProcessLookupError):
        try:
            os.killpg(pid, number)
        except ProcessLookupError:
            os.kill(pid, number)
