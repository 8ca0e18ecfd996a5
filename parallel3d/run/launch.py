"""A process's place among the ranks, and the signals that ask it to stop."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Protocol, TypeVar

from parallel3d.comm.operation_log import OperationLog
from parallel3d.errors import print_line
from parallel3d.run.launcher_environment import Launcher, RankAssignment

if TYPE_CHECKING:
    from torch.distributed import Store

    from parallel3d.blueprint.rank_mapping import RankMapping


T = TypeVar("T")


def within(seconds: float, call: Callable[[], T], otherwise: T) -> T:
    """Returns the result of `call`, or `otherwise` if it fails or takes too long.

    If a store's process is stopped, its clients would wait for ever, whatever their time-out.
    """
    answers: list[T] = []

    def run() -> None:
        try:
            answers.append(call())
        except RuntimeError:
            return  # the store is gone
        except Exception as error:
            print_line(f"watchdog: {type(error).__name__}: {error}")

    started(run).join(seconds)
    return answers[0] if answers else otherwise


@contextmanager
def ending_on_signals(
    waiting: Callable[[], str],
    first: Callable[[], object] = lambda: None,
    noted: StopSignals | None = None,
) -> Iterator[None]:
    """Ends the process on a signal, with a sentence, while the block waits for other ranks.

    torch's C++ continues to wait after a signal, and prints its stack. So the signals stay pending,
    and a thread looks for them. There is nothing to save yet.

    Args:
        waiting: returns the activity to name in the sentence.
        first: called before the end.
        noted: signals received before the block.
    """
    numbers = {number for number in STOPPING if not is_nohup(number)}
    over = threading.Event()

    def watch() -> None:
        while not over.wait(0.05):
            came = numbers & signal.sigpending()
            if noted is not None and noted.number is not None:
                came |= {noted.number}
            for number in sorted(came):
                first()
                name = signal.Signals(number).name
                print_line(
                    f"{name} ended this process while {waiting()}; there was nothing to save."
                )
                os._exit(128 + number)

    with blocked_signals(tuple(numbers)):
        thread = started(watch)
        try:
            yield
        finally:
            over.set()
            thread.join()


@contextmanager
def or_end(seconds: float, sentence: str) -> Iterator[None]:
    """Ends the process with `sentence` and code 1 if the block hangs, as dead file systems do."""

    def end() -> None:
        print_line(sentence)
        os._exit(1)

    timer = threading.Timer(seconds, end)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def started(call: Callable[[], object]) -> threading.Thread:
    """Starts a daemon thread."""
    thread = threading.Thread(target=call, daemon=True)
    thread.start()
    return thread


def until(condition: Callable[[], bool], seconds: float) -> None:
    """Waits until `condition` holds or the time is over."""
    deadline = time.monotonic() + seconds
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.05)


# Signals that ask a run to stop after a step: preemption, time limit, Ctrl-C, a lost terminal.
#
# Ranks receive a signal at different moments, or one rank alone does, so none acts on its own. Each
# step's all-reduce over the world counts the ranks that were asked, and all ranks read the sum
# after the same step (`Trainer.train_step`). The loop then saves and ends.

# Sent by a scheduler before it takes the machine away (SIGUSR2 by LSF, SGE and submitit); users
# send SIGINT.
PREEMPTION = (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)
STOPPING = (*PREEMPTION, signal.SIGINT, signal.SIGHUP)  # SIGHUP: the terminal has gone


@dataclass
class StopSignals:
    """The signals that this process has received.

    Attributes:
        number: the received signal, or None; a preempting one replaces an interrupt.
        interrupted: a SIGINT was received.
        second_interrupts: a second SIGINT raises KeyboardInterrupt; else it is like the first.
    """

    number: signal.Signals | None = None
    interrupted: bool = False
    second_interrupts: bool = True

    def install(self) -> None:
        """Installs handlers that note these signals, and unblocks them; main thread only."""
        for number in STOPPING:
            if not is_nohup(number):
                signal.signal(number, self._note)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, STOPPING)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGINT:
            if self.interrupted and self.second_interrupts:
                raise KeyboardInterrupt
            self.interrupted = True
        if self.number is None or number in PREEMPTION:
            self.number = signal.Signals(number)

    @property
    def requeues(self) -> bool:
        """Returns whether the stopped run is to be requeued, which it is unless a user pressed
        Ctrl-C."""
        return self.number != signal.SIGINT

    @property
    def name(self) -> str:
        return "a signal to another rank" if self.number is None else self.number.name


def is_nohup(number: int) -> bool:
    """Returns whether `number` is SIGHUP and nohup makes this process ignore it."""
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
    """Blocks these signals, also in processes started inside; yields the previous mask."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, numbers)
    try:
        yield before
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


class ProgressWatch(Protocol):
    """Interface of `faults.watchdog.Watchdog` for the code that runs a rank."""

    @property
    def is_reporting(self) -> bool: ...

    def pause(self) -> None: ...

    def resume(self) -> None: ...

    def timed_out(self) -> None: ...

    def stop(self) -> None: ...


@dataclass
class Worker:
    """One rank of a run: its place, its device and its activity.

    Attributes:
        rank: place in the layout; the launcher's number of this process may differ.
        device: "cpu" or "<type>:<index>", already current; torch.distributed is initialised.
        phase: activity that a failure report names ("train step 12"); set it as work proceeds.
        placement: rank mapping of the whole run; None where the run did not need one.
        stop: the received signals.
        stopped: the run ended early because of a signal, on some rank.
        store: the ranks' store.
        log: operations that this rank communicates, which `watchdog`, if any, watches.
        taking_run: held while rank 0 makes its run directory, which must not be removed meanwhile.
    """

    rank: int
    local_rank: int
    world_size: int
    local_world_size: int
    run_dir: Path
    launcher: Launcher
    device: str = "cpu"
    phase: str = "start"
    placement: RankMapping | None = None
    stop: StopSignals = field(default_factory=StopSignals)
    stopped: bool = False
    store: Store | None = None
    watchdog: ProgressWatch | None = None
    log: OperationLog = field(default_factory=OperationLog)
    taking_run: threading.Lock = field(default_factory=threading.Lock)

    @classmethod
    def at(cls, place: RankAssignment, run_dir: Path, launcher: Launcher) -> Worker:
        sizes = place.world_size, place.local_world_size
        return cls(place.rank, place.local_rank, *sizes, run_dir, launcher)
