"""A process as its launcher sees it: its rank by torchrun or Slurm, signals that ask it to stop."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Literal, Protocol, TypeVar

from parallel3d.comm.operation_log import OperationLog
from parallel3d.errors import UserError, print_line
from parallel3d.topology.cluster.slurm import (
    FIRST_SPECIAL_STEP,
    expand_hostlist,
    expand_tasks_per_node,
)

if TYPE_CHECKING:
    from torch.distributed import Store

    from parallel3d.topology.tiling import RankMapping


T = TypeVar("T")


def within(seconds: float, call: Callable[[], T], otherwise: T) -> T:
    """Returns the result of `call`, or `otherwise` if it fails or takes too long.

    The client of a store whose process is stopped would wait for ever, whatever its time-out.
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
# Ranks get a signal at different moments, or one rank alone, so none acts on its own: each step's
# all-reduce over the world carries whether a rank was asked, and all ranks see it after the same
# step (`Trainer.train_step`). The loop then saves and ends.

# Sent by a scheduler before it takes the machine away; users send SIGINT.
PREEMPTION = (signal.SIGTERM, signal.SIGUSR1)
STOPPING = (*PREEMPTION, signal.SIGINT, signal.SIGHUP)  # SIGHUP: the terminal has gone


@dataclass
class StopSignals:
    """The signals that came to this process.

    Attributes:
        number: the signal that came, a preempting one before an interrupt, or None.
        interrupted: a SIGINT came.
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


# The rank of this process. Contradicting variables of a launcher are a UserError that names the
# variable, never a hang. No torch.


Launcher = Literal["local", "torchrun", "slurm"]


class ProgressWatch(Protocol):
    """Interface of `faults.watchdog.Watchdog` for the code that runs a rank."""

    @property
    def is_reporting(self) -> bool: ...

    def rest(self) -> None: ...

    def go_on(self) -> None: ...

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
        stop: signals that came.
        stopped: the run ended early because of a signal, on some rank.
        store: the ranks' store.
        log: operations that this rank communicates, which `watchdog`, if any, watches.
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

    @classmethod
    def at(cls, place: RankAssignment, run_dir: Path, launcher: Launcher) -> Worker:
        sizes = place.world_size, place.local_world_size
        return cls(place.rank, place.local_rank, *sizes, run_dir, launcher)


@dataclass(frozen=True)
class RankAssignment:
    """The rank that a launcher assigned to this process, and the address of rank 0."""

    launcher: Launcher
    rank: int
    local_rank: int
    world_size: int
    local_world_size: int
    master_addr: str
    master_port: int
    job_id: str | None = None

    def with_port(self, chosen: int) -> RankAssignment:
        """Returns it with `launch.master_port`, unless that is 0 or torchrun has its own port."""
        if self.launcher != "slurm" or chosen == 0:
            return self
        return replace(self, master_port=chosen)


def detect(environ: Mapping[str, str]) -> RankAssignment | None:
    """Returns this process's rank by torchrun's or Slurm's variables; None without them.

    torchrun comes first, since it may itself run inside a Slurm step. Raises UserError if a
    variable is missing, is no number or contradicts another.
    """
    # MASTER_ADDR or LOCAL_RANK alone do not count: some platforms set them for any process.
    if "RANK" in environ or "WORLD_SIZE" in environ:
        return _from_torchrun(environ)
    if _in_slurm_step(environ):
        return _from_slurm(environ)
    return None


def _from_torchrun(environ: Mapping[str, str]) -> RankAssignment:
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
    if missing := [name for name in names if not environ.get(name)]:
        there = "RANK" if "RANK" in environ and missing[0] != "RANK" else "WORLD_SIZE"
        raise UserError(
            f"{there}={environ.get(there)} is set but {missing[0]} is not: start with torchrun, "
            f"set all of {', '.join(names)}, or unset {there}."
        )
    world_size = _number(environ, "WORLD_SIZE", 1)
    world = f"WORLD_SIZE={world_size}"
    here = world_size
    if "LOCAL_WORLD_SIZE" in environ:
        here = _number(environ, "LOCAL_WORLD_SIZE", 1, world_size, world)
    return RankAssignment(
        "torchrun",
        _number(environ, "RANK", 0, world_size - 1, world),
        _number(environ, "LOCAL_RANK", 0, here - 1, f"LOCAL_WORLD_SIZE={here}"),
        world_size,
        here,
        environ["MASTER_ADDR"],
        _number(environ, "MASTER_PORT", 1, 65535, "the range of ports"),
    )


def _in_slurm_step(environ: Mapping[str, str]) -> bool:
    """Returns whether srun started this process as one of several tasks (no batch script)."""
    if not environ.get("SLURM_STEP_ID") or "SLURM_PROCID" not in environ:
        return False
    if _number(environ, "SLURM_STEP_ID") >= FIRST_SPECIAL_STEP:
        return False
    return _number(environ, _slurm_tasks(environ), 1) > 1


def _slurm_tasks(environ: Mapping[str, str]) -> str:
    return "SLURM_STEP_NUM_TASKS" if "SLURM_STEP_NUM_TASKS" in environ else "SLURM_NTASKS"


def _from_slurm(environ: Mapping[str, str]) -> RankAssignment:
    tasks = _slurm_tasks(environ)
    world_size = _number(environ, tasks, 1)
    job = _number(environ, "SLURM_JOB_ID")
    nodes = environ.get("SLURM_STEP_NODELIST") or environ.get("SLURM_JOB_NODELIST")
    if not nodes:
        raise UserError("SLURM_PROCID is set but SLURM_STEP_NODELIST is not: start with srun")
    per_node = "SLURM_STEP_TASKS_PER_NODE"
    if not environ.get(per_node):
        per_node = "SLURM_TASKS_PER_NODE"
    here = world_size
    if given := environ.get(per_node):
        counts = expand_tasks_per_node(given, per_node)
        here = counts[_number(environ, "SLURM_NODEID", 0, len(counts) - 1, f"{per_node}={given}")]
    return RankAssignment(
        "slurm",
        _number(environ, "SLURM_PROCID", 0, world_size - 1, f"{tasks}={world_size}"),
        _number(environ, "SLURM_LOCALID", 0, here - 1, f"{here} tasks of its node"),
        world_size,
        here,
        expand_hostlist(nodes)[0],
        20000 + job % 20000,  # two jobs that share a node need different ports
        str(job),
    )


def _number(
    environ: Mapping[str, str], name: str, least: int = 0, most: int | None = None, of: str = ""
) -> int:
    """Parses the whole number in variable `name`, from `least` to `most`, which follows from `of`.

    Raises UserError.
    """
    text = environ.get(name)
    if text is None:
        raise UserError(f"{name} is not set, but the other variables of its launcher are")
    try:
        value = int(text)
    except ValueError:
        raise UserError(f"{name}={text!r} is no number: it must be a whole number") from None
    if value < least:
        raise UserError(f"{name}={value} is too small: it must be at least {least}")
    if most is not None and value > most:
        raise UserError(f"{name}={value} contradicts {of}: it must be in {least} … {most}")
    return value
