"""Signals that ask a run to stop after a step: preemption, time limit, Ctrl-C, a lost terminal.

Ranks get a signal at different moments, or one rank alone, so none acts on its own: each step's
all-reduce over the world carries whether a rank was asked, and all ranks see it after the same step
(`Trainer.train_step`). The loop then saves and ends.
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType

# Sent by a scheduler before it takes the machine away; users send SIGINT.
PREEMPTION = (signal.SIGTERM, signal.SIGUSR1)
STOPPING = (*PREEMPTION, signal.SIGINT, signal.SIGHUP)  # SIGHUP: the terminal has gone


@dataclass
class StopSignals:
    """The signals that came to this process.

    Attributes:
        number: the signal that came, a preempting one before an interrupt, or None.
        interrupted: a SIGINT came.
        tell: called by the handler, if set; at once if a signal has come already (`listen`).
        second_interrupts: a second SIGINT raises KeyboardInterrupt; else it is like the first.
    """

    number: signal.Signals | None = None
    interrupted: bool = False
    tell: Callable[[], None] | None = None
    second_interrupts: bool = True

    def install(self) -> None:
        """Installs handlers that note these signals, and unblocks them; main thread only."""
        for number in STOPPING:
            if not is_nohup(number):
                signal.signal(number, self._note)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, STOPPING)

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
        """Returns whether the stopped run is to be requeued: not if a user typed Ctrl-C here."""
        return self.number != signal.SIGINT

    @property
    def name(self) -> str:
        return "a signal to another rank" if self.number is None else self.number.name


def is_nohup(number: int) -> bool:
    """Returns whether it is a SIGHUP that nohup makes this process ignore."""
    return number == signal.SIGHUP and signal.getsignal(number) == signal.SIG_IGN


@contextmanager
def kept_handlers(numbers: Sequence[signal.Signals] = STOPPING) -> Iterator[None]:
    """Restores the signal handlers after the block, for the next job of a sweep."""
    before = {number: signal.getsignal(number) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def blocked_signals(
    numbers: Sequence[signal.Signals] = STOPPING,
) -> Iterator[set[int | signal.Signals]]:
    """Blocks these signals, also in processes started meanwhile; yields the mask before."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, numbers)
    try:
        yield before
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
