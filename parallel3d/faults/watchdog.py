"""Watches a rank: detects a hang, writes the hang report, and ends the run."""

from __future__ import annotations

import contextlib
import faulthandler
import os
import socket
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, NoReturn

import torch

from parallel3d.blueprint.layout import Layout
from parallel3d.comm.operation_log import OperationLog
from parallel3d.comm.store import get, get_all, put
from parallel3d.device.accelerator import is_accelerator
from parallel3d.errors import print_line
from parallel3d.faults import hang
from parallel3d.faults.keys import RecoveryConfig
from parallel3d.files import no_link, replace_durably
from parallel3d.host.processes import born, kill, node_name, of_this_job, why_silent
from parallel3d.private_names import BACKWARD_FRAME
from parallel3d.run import failure
from parallel3d.run.failure import EXIT_ALREADY_REPORTED, place_in
from parallel3d.run.launch import Worker, started, until, within

if TYPE_CHECKING:
    from torch.distributed import Store


Stack = list[tuple[str, int, str]]  # (file, line, function), outermost first


def dump_stacks(path: Path) -> None:
    with os.fdopen(no_link(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), "w") as file:
        faulthandler.dump_traceback(file, all_threads=True)


def work_stack() -> Stack:
    """Returns the main thread's stack, continued by autograd's thread during a backward."""
    frames = sys._current_frames()
    main = _stack(frames.get(threading.main_thread().ident or 0))
    if not main or main[-1][2] != BACKWARD_FRAME:
        return main
    # A dummy thread represents a thread of another library that has called Python.
    dummy = threading._DummyThread
    known = {t.ident for t in threading.enumerate() if not isinstance(t, dummy)}
    others = (_stack(frame) for ident, frame in frames.items() if ident not in known)
    return main + next((stack for stack in others if place_in(stack)), [])


def _stack(frame: FrameType | None) -> Stack:
    found = []
    while frame is not None:
        code = frame.f_code
        found.append((code.co_filename, frame.f_lineno, code.co_name))
        frame = frame.f_back
    return found[::-1]


def in_torch_distributed(stack: Stack) -> str:
    """Returns the torch.distributed function in which the stack ends, or "" if there is none."""
    name = ""
    for file, _, function in reversed(stack):
        if "/torch/distributed/" not in Path(file).as_posix():
            break
        name = function if function != "wrapper" else name
    return name


KEY = "parallel3d/hang"
LOOK_S = 1.0  # seconds between checks, or a quarter of the time-out if that is shorter
RECORD_S = 1.0  # a flight recorder that takes longer is blocked by the hang itself
STORE_S = 3.0  # a store that takes longer counts as unreachable
ANSWER_S = 3.5  # ranks that have not answered after this count as silent
RECORD_FILE_S = 3.0  # a file system that takes longer for a small file counts as dead
DUMP_S = 3.0  # extra time after the diagnosis for files that are still being written
# After this time, the other ranks end even if the first rank has sent no diagnosis.
DIAGNOSIS_S = ANSWER_S + DUMP_S + RECORD_FILE_S + 1.0
PAUSED_TIMEOUTS = 3.0  # a paused rank counts as hanging after this many time-outs without work
END_S = 30.0  # more than all of the above; then the process ends without a report

# The diagnosis (None on ranks that do not log it), and the processes (pid, start time) of this host
# that must be killed.
HangFindings = tuple[hang.Diagnosis | None, list[tuple[int, int]]]


@dataclass
class Watchdog:
    """Watches one rank in a thread, from `start` to `stop`.

    The thread checks that the rank's operation log grows; as long as it does, nothing is written or
    sent. After `timeout_s` without progress, all ranks send their states through the store and dump
    their stacks into the run directory, and the first rank to do so logs the diagnosis
    (`hang.diagnose`). If a rank does not answer, the diagnosing rank looks up that rank's process
    in /proc, provided that both are on the same host.

    If the launcher holds the store (our own launcher, torchrun), the store outlives a stopped rank.
    Under srun, rank 0 holds the store; if the store does not answer, rank 0 is at fault.

    Attributes:
        store: the store of the world; None in a world of one rank.
        timeout_s: seconds without progress that count as a hang.
        collective_s: time-out of the run's collectives in seconds.
    """

    layout: Layout
    worker: Worker
    store: Store | None
    timeout_s: float
    collective_s: float
    _stopped: threading.Event = field(default_factory=threading.Event)
    _paused: bool = False
    _reporting: threading.Lock = field(default_factory=threading.Lock)
    _thread: threading.Thread | None = None
    _idle_s: float = 0.0
    _code: int = 1
    _keeper: dict[str, Any] | None = None  # process of rank 0, which may hold the store
    _silent: list[int] | None = None  # None except on the diagnosing rank

    @property
    def log(self) -> OperationLog:
        return self.worker.log

    def start(self) -> None:
        """Sends this process's identity to the other ranks, and begins to watch.

        It waits for the identity of rank 0, which may hold the store: once rank 0 has stopped,
        nobody can ask the store for it.
        """
        if self.store is not None:
            theirs: Any = self.store  # Any: some type stubs of torch lack `clone`
            self.store = theirs.clone()  # calls of the main thread may block its connection
            self.store.set_timeout(timedelta(seconds=STORE_S))
            pid, host = os.getpid(), socket.gethostname()
            me = {"pid": pid, "born": born(pid), "host": host, "node": node_name()}
            put(self.store, f"{KEY}/process/{self.worker.rank}", me)
            patience = timedelta(seconds=self.collective_s)
            self.store.wait([f"{KEY}/process/0"], patience)
            self._keeper = self._process(0)
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        self._stopped.set()
        if self._thread is not None:
            self._thread.join()

    def pause(self) -> None:
        """Allows the rank to spend time without collectives; it still answers other ranks.

        A hang, for example of a file system, is still detected when this process has not computed
        for `PAUSED_TIMEOUTS` time-outs, or for launch.timeout_s if that is longer.
        """
        self._paused = True
        if self.worker.progress_file is not None:
            self.worker.progress_file.pause()

    def resume(self) -> None:
        self._paused = False
        if self.worker.progress_file is not None:
            self.worker.progress_file.resume()

    def timed_out(self) -> None:
        """Reports a hang, because a wait of the main thread has timed out. It never returns."""
        self._idle_s = max(self._idle_s, self.timeout_s)
        self._report()

    @property
    def _paused_limit_s(self) -> float:
        """Returns the seconds without work after which a paused rank counts as hanging."""
        return max(PAUSED_TIMEOUTS * self.timeout_s, self.collective_s)

    @property
    def is_reporting(self) -> bool:
        """Returns whether a hang is being reported; later errors are its consequences."""
        return self._reporting.locked()

    def _watch(self) -> None:
        interval = min(LOOK_S, self.timeout_s / 4)
        seen: tuple[int, str, float] | None = None
        moved = looked = time.monotonic()
        while not self._stopped.wait(interval):
            now = time.monotonic()
            paused = self._paused
            state = (self.log.progress, self.worker.phase, computed() if paused else 0.0)
            # A gap between checks means that this process itself was stopped, not that a rank
            # hangs.
            if state != seen or now - looked > 5 * interval + 1:
                seen, moved = state, now
            self._idle_s = now - moved
            late = self._idle_s >= (self._paused_limit_s if paused else self.timeout_s)
            looks_up = paused or self._idle_s >= self.timeout_s / 2
            if late or (looks_up and self._is_asked()):
                self._report()
            looked = time.monotonic()

    def _is_asked(self) -> bool:
        """Returns whether another rank, which has waited longer, asks for all states."""
        store = self.store
        if store is None:
            return False
        # If the store does not answer, this rank reports at its own time-out.
        return within(STORE_S, lambda: store.check([f"{KEY}/asked"]), False)

    def _report(self) -> NoReturn:
        """Writes the hang report and ends the process, whatever happens."""
        with self._reporting:
            try:
                # faulthandler's thread ends the process even if the flight recorder blocks while
                # holding the GIL. It prints the stacks first, but not to stderr, which may hang
                # too.
                nowhere = os.open(os.devnull, os.O_WRONLY)
                faulthandler.dump_traceback_later(END_S, exit=True, file=nowhere)
                self._write_report()
                sys.stdout.flush()
                sys.stderr.flush()
            except Exception as error:
                with contextlib.suppress(Exception):
                    print_line(f"watchdog: {type(error).__name__}: {error}")
            finally:
                os._exit(self._code)

    def _write_report(self) -> None:
        record = None
        if is_accelerator(torch.device(self.worker.device)):
            record = within(RECORD_S, hang.take_flight_record, None)
        dumps = started(lambda: self._dump(record))
        state = self._state(record)
        found = None
        if self._store_answers():
            found = within(DIAGNOSIS_S + STORE_S, lambda: self._agree(state), None)
        diagnosis, pids = found or self._without_store(state)
        dumps.join(DUMP_S)
        if diagnosis is not None:
            stacks = self.worker.run_dir / "rank-*.stacks.txt"
            error = f"hang: {diagnosis.sentence} (stacks: {stacks})"
            rank, phase, host = diagnosis.ranks[0], self.worker.phase, diagnosis.host
            self._log_failure(failure.of_rank(self.layout, rank, error, "hang", phase, host))
        within(STORE_S, self._release, None)
        for process in pids:  # last, because a kill may make this rank's main thread fail
            kill(*process)

    def _dump(self, record: str | None) -> None:
        """Writes the stacks, and the flight record if there is one, to the run directory."""
        run, rank = self.worker.run_dir, self.worker.rank
        writes: dict[Path, Callable[[Path], object]] = {}
        writes[run / f"rank-{rank}.stacks.txt"] = dump_stacks
        if record is not None:
            writes[run / f"rank-{rank}.nccl.json"] = lambda p: replace_durably(p, record.encode())
        for path, write in writes.items():
            try:
                write(path)
            except Exception as error:  # for example, the disk is full; the diagnosis needs no file
                print_line(f"{path} could not be written ({error})")

    def _log_failure(self, failed: failure.RankFailure) -> None:
        """Records the failure, and logs it unless our own launcher will log it at the end."""
        by_launcher = self.worker.launcher == "local" and self.worker.world_size > 1

        def is_recorded() -> bool:
            failure.write_record(failed, "", self.worker.run_dir)
            return True

        is_left = within(RECORD_FILE_S, is_recorded, False)
        if not (by_launcher and is_left):
            print_line(failed.sentence())
            self._code = EXIT_ALREADY_REPORTED if by_launcher else 1

    def _state(self, record: str | None) -> hang.RankState:
        stack, ranks = work_stack(), dict(self.log.ranks)
        queue = None
        if record is not None:
            try:
                read = hang.read_flight_record(record, ranks)
                queue, ranks = read.queue or None, read.ranks
            except (KeyError, ValueError, TypeError, IndexError) as error:
                print_line(f"the flight recorder cannot be read ({type(error).__name__}: {error})")
        return hang.RankState(
            rank=self.worker.rank,
            who=failure.who(self.layout, self.worker.rank),
            phase=self.worker.phase,
            place=failure.place_in(stack),
            blocked=in_torch_distributed(stack),
            waited_s=self._idle_s,
            ranks=ranks,
            divergence=self.log.divergence(),
            queue=hang.of_host(self.log),
            device_queue=queue,
        )

    def _agree(self, state: hang.RankState) -> HangFindings:
        """Sends this rank's state; the first rank to do so collects all states and diagnoses them.

        The other ranks wait for its `_release`, because launchers end all ranks when one ends.
        """
        if self.store is None:
            return hang.diagnose({state.rank: state}, {}), []
        store, world = self.store, range(self.worker.world_size)
        put(store, f"{KEY}/state/{state.rank}", hang.to_json(state))
        store.set(f"{KEY}/asked", "1")
        first = store.add(f"{KEY}/first", 1) == 1
        if not first:
            key = f"{KEY}/diagnosis"
            until(lambda: store.check([key]), DIAGNOSIS_S)
            return None, self._to_kill(get(store, key) if store.check([key]) else [])
        keys = [f"{KEY}/state/{rank}" for rank in world]
        until(lambda: store.check(keys), ANSWER_S)
        answered = [rank for rank in world if store.check([keys[rank]])]
        answers = map(hang.from_json, get_all(store, [keys[rank] for rank in answered]))
        states = {answer.rank: answer for answer in answers}
        silent = {
            rank: self._inspect(rank, self._process(rank)) for rank in world if rank not in answered
        }
        diagnosis = hang.diagnose(states, silent)
        self._silent = sorted(silent)
        return diagnosis, self._to_kill(self._silent)

    def _release(self) -> None:
        """Lets the other ranks end; it is called after the diagnosis is logged."""
        if self.store is not None and self._silent is not None:
            put(self.store, f"{KEY}/diagnosis", self._silent)

    def _process(self, rank: int) -> dict[str, Any] | None:
        key = f"{KEY}/process/{rank}"
        assert self.store is not None
        return get(self.store, key) if self.store.check([key]) else None

    def _inspect(self, rank: int, process: dict[str, Any] | None) -> tuple[str, str]:
        """Returns a silent rank's name, and why it does not answer.

        The reason comes from /proc if the rank ran on this host.
        """
        if process is None:
            return failure.who(self.layout, rank), "has not started to train"
        return failure.who(self.layout, rank, process["node"]), why_silent(process)

    def _to_kill(self, silent: list[int]) -> list[tuple[int, int]]:
        """Returns this job's silent processes on this host; stopped ones would outlive the job."""
        return of_this_job([self._process(rank) for rank in silent])

    def _without_store(self, state: hang.RankState) -> HangFindings:
        """Diagnoses the hang from this rank's state alone if the store does not answer.

        On each host, only the first rank that can log does so.
        """
        who, why = self._inspect(0, self._keeper)
        here = of_this_job([self._keeper])
        is_here = self._keeper is not None and self._keeper["host"] == socket.gethostname()
        if self.worker.local_rank != int(is_here):
            time.sleep(DUMP_S + RECORD_FILE_S)  # meanwhile, the first rank logs the hang
            return None, here
        why += ", and the store that it hosts does not answer"
        return hang.diagnose({state.rank: state}, {0: (who, why)}), here

    def _store_answers(self) -> bool:
        store = self.store
        return store is None or within(STORE_S, lambda: store.check([KEY]) or True, False)


def computed() -> float:
    """Returns the CPU seconds of this process's other threads, rounded to tenths."""
    return round(time.process_time() - time.thread_time(), 1)


def start_watchdog(
    layout: Layout, worker: Worker, recovery: RecoveryConfig, collective_s: float
) -> Watchdog:
    """Starts this rank's watchdog, paused; its default time-out is shorter than a collective's."""
    timeout_s = recovery.watchdog_s or 0.9 * collective_s
    watchdog = Watchdog(layout, worker, worker.store, timeout_s, collective_s)
    watchdog.pause()
    watchdog.start()
    return watchdog
