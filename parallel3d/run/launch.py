"""Holds a process's place among the ranks, and the signals that ask it to stop."""

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
from parallel3d.host.devices import SIMULATED
from parallel3d.run.launcher_environment import Launcher, RankAssignment

if TYPE_CHECKING:
    from torch.distributed import Store

    from parallel3d.blueprint.rank_mapping import RankMapping
    from parallel3d.faults.progress import ProgressFile


T = TypeVar("T")


def within(seconds: float, call: Callable[[], T], otherwise: T) -> T:
    """Returns the result of `call`, or `otherwise` if it fails or takes too long.

    A request to a store whose process is stopped would wait forever, whatever the time-out.
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
    """Logs a sentence and ends the process if a signal arrives while the block awaits other ranks.

    On a signal, torch's C++ code would print its stack and keep waiting. The signals are therefore
    blocked, and a thread looks for pending ones. At this stage there is nothing to save.

    Args:
        waiting: returns the activity to name in the sentence.
        first: called before the process ends.
        noted: the signals that this process has received so far; None if they were not noted.
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
    """Logs `sentence` and exits with code 1 if the block takes longer than `seconds`.

    For example, a dead file system blocks its users forever.
    """

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
    """Starts a daemon thread that calls `call`, and returns it."""
    thread = threading.Thread(target=call, daemon=True)
    thread.start()
    return thread


def until(condition: Callable[[], bool], seconds: float) -> None:
    """Waits until `condition` holds or `seconds` have passed."""
    deadline = time.monotonic() + seconds
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.05)


# These signals ask a run to stop after a step. They announce preemption or the end of the time
# limit, or come from Ctrl-C or a lost terminal.
#
# A signal reaches the ranks at different moments, or reaches only one of them, so no rank acts on
# its own. An all-reduce in each step counts the ranks that have received a signal, and all ranks
# read the sum after the same step (`Trainer.train_step`). The training loop then saves and ends.

# Signals that a scheduler sends before it takes the machine away (LSF, SGE and submitit send
# SIGUSR2); users send SIGINT.
PREEMPTION = (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)
STOPPING = (*PREEMPTION, signal.SIGINT, signal.SIGHUP)  # SIGHUP means that the terminal is lost


@dataclass
class StopSignals:
    """Notes the signals in STOPPING that this process receives.

    Attributes:
        number: the first signal, or the latest one in PREEMPTION, which takes precedence; None if
            there was none.
        interrupted: whether a SIGINT was received.
        second_interrupts: whether a second SIGINT raises KeyboardInterrupt; if not, it has no
            further effect.
    """

    number: signal.Signals | None = None
    interrupted: bool = False
    second_interrupts: bool = True

    def install(self) -> None:
        """Installs handlers for the signals in STOPPING, and unblocks these; main thread only."""
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
        """Returns whether the stopped run is to be requeued: true unless a user pressed Ctrl-C."""
        return self.number != signal.SIGINT

    @property
    def name(self) -> str:
        return "a signal to another rank" if self.number is None else self.number.name


def is_nohup(number: int) -> bool:
    """Returns whether `number` is SIGHUP and this process ignores it, as under nohup."""
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
    """Blocks signals here and in processes started in the block; yields the previous mask."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, numbers)
    try:
        yield before
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


class ProgressWatch(Protocol):
    """The methods of `faults.watchdog.Watchdog` that this package calls."""

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
        rank: rank in the layout, which may differ from the number that the launcher gave.
        device: "cpu" or "<type>:<index>". When the subcommand begins, the device is current and
            torch.distributed is initialised.
        phase: activity that a failure report names, such as "train step 12"; the rank updates it.
        placement: rank mapping of the whole run; None if the run does not need one.
        stop: the received signals.
        stopped: whether the run ended early because some rank received a signal.
        store: the store in which the ranks meet; None for a single rank.
        watchdog: watches `log` for hangs; None if there is no watchdog.
        log: this rank's log of its communication.
        progress_file: the file that tells this host's guard how far the rank is; None without a
            guard.
        taking_run: lock held while rank 0 makes the run directory, which must not be removed
            meanwhile.
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
    progress_file: ProgressFile | None = None
    taking_run: threading.Lock = field(default_factory=threading.Lock)

    @classmethod
    def at(cls, place: RankAssignment, run_dir: Path, launcher: Launcher) -> Worker:
        sizes = place.world_size, place.local_world_size
        return cls(place.rank, place.local_rank, *sizes, run_dir, launcher)


def begin_on(kind: str) -> None:
    """Prepares this process for a device of type `kind`, before anything uses torch."""
    if kind == SIMULATED:
        from parallel3d.simulated_device import enable

        enable()
