"""Signals that ask a run to stop at the end of a step: preemption, a time limit, Ctrl-C, a lost
terminal.

A handler only notes the signal. Ranks get it at different moments, or one of them alone, so no rank
acts on its own: each step's sum over the world carries whether a rank was asked, and all find the
same answer in it after the same step (`Trainer.train_step`). The loop then saves and ends.
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType

# What a scheduler sends before it takes the machine away; SIGINT is what a user types.
PREEMPTION = (signal.SIGTERM, signal.SIGUSR1)
ASKING = (*PREEMPTION, signal.SIGINT)
# SIGHUP: the terminal has gone. Ranks of our own launcher do not get it from there, but from it,
# and then it ends them (`endings.END_SIGNAL`).
STOPPING = (*ASKING, signal.SIGHUP)


@dataclass
class StopSignals:
    """What signals have asked of this process.

    Attributes:
        number: the signal that came, a preempting one before an interrupt; None: none came.
        interrupted: a SIGINT came.
        tell: called by the handler, if set; at once if a signal has come already (`listen`).
        second_interrupts: a second SIGINT raises KeyboardInterrupt; else it is like the first.
        lost_terminal: whether the SIGTERM of our launcher stands for its SIGHUP.
    """

    number: signal.Signals | None = None
    interrupted: bool = False
    tell: Callable[[], None] | None = None
    second_interrupts: bool = True
    lost_terminal: Callable[[], bool] = lambda: False

    def install(self, numbers: Sequence[signal.Signals] = STOPPING) -> None:
        """From here on these signals are noted; main thread only.

        Signals that were blocked until now (by the local launcher, while this process started) are
        let through.
        """
        for number in numbers:
            if not is_nohup(number):
                signal.signal(number, self._note)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, numbers)

    def listen(self, tell: Callable[[], None]) -> None:
        """Calls `tell` as soon as a signal comes, or now if one has come."""
        self.tell = tell
        if self.number is not None:
            tell()

    def _note(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGINT:
            if self.interrupted and self.second_interrupts:
                raise KeyboardInterrupt
            self.interrupted = True
        if self.number is None or number in PREEMPTION:
            self.number = signal.Signals(number)
        if self.tell is not None:
            self.tell()

    @property
    def requeues(self) -> bool:
        """Whether the run, which stops, shall go on: not if a user typed Ctrl-C.

        True on a rank that got no signal itself: schedulers alone signal a single rank.
        """
        return self.number != signal.SIGINT

    @property
    def name(self) -> str:
        if self.number == signal.SIGTERM and self.lost_terminal():
            return signal.SIGHUP.name
        return "a signal to another rank" if self.number is None else self.number.name


def is_nohup(number: int) -> bool:
    """Whether it is the SIGHUP that nohup has this process ignore: the run shall outlive it."""
    return number == signal.SIGHUP and signal.getsignal(number) == signal.SIG_IGN


@contextmanager
def kept_handlers(numbers: Sequence[signal.Signals] = STOPPING) -> Iterator[None]:
    """Puts the handlers back as they were; a sweep's next job wants them so."""
    before = {number: signal.getsignal(number) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def blocked_signals(
    numbers: Sequence[signal.Signals] = ASKING,
) -> Iterator[set[int | signal.Signals]]:
    """Holds these signals back: a process started meanwhile inherits that. Gives the mask before.

    One that comes before the new process has its handlers waits for them and is not lost.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, numbers)
    try:
        yield before
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
