"""Records failures of ranks, finds the one that caused the others, and sets exit codes."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import signal
import sys
import time
import traceback
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, NoReturn

from parallel3d.blueprint.layout import Layout
from parallel3d.errors import USER_ERROR, TrainingFailure, UserError, first_line, print_line
from parallel3d.files import read_bounded, replace_durably
from parallel3d.host.processes import node_name
from parallel3d.loop.keys import TrainConfig
from parallel3d.metrics import recovery_log
from parallel3d.metrics.recovery_log import Cause, RecoveryLine
from parallel3d.metrics.starts import STARTS, starts_of
from parallel3d.models.repeats import spelled
from parallel3d.resolve import layout_of
from parallel3d.run.directory import FAILURES, discard_unused
from parallel3d.run.launch import Worker
from parallel3d.run.rendezvous import OtherStart, RankZerosError
from parallel3d.run_config import Config

if TYPE_CHECKING:
    from torch.distributed import Store


# The signal with which our launcher ends ranks at once. No scheduler or terminal sends it: their
# signals ask ranks to save and stop.
END_SIGNAL = signal.SIGALRM
SLACK_S = 2.0  # by which the clocks of a rank and of its launcher may differ
RECORD_BYTES = 1 << 20  # maximum size of a failure's record
PACKAGE = Path(__file__).parents[1]  # spelled like the file names in stack frames

# Errors of a rank whose peer has ended. Such an error is never the root cause.
PEER_GONE = re.compile(
    r"connection (closed|reset|refused|aborted)|broken pipe|closed by peer|reset by peer"
    r"|remote process exited|remote rank|socket (closed|timeout)|peer (has )?(gone|closed|exited)"
    r"|connection was likely closed|failed to (recv|send)|stop_waiting"
    r"|member \d+ of the group has ended",  # `comm.shared_memory`
    re.IGNORECASE,
)
# Parts of gloo's messages that are left out: the position in gloo's source, and general advice.
NOISE = re.compile(r"\[/\S+:\d+\] ?| This is typically caused by .*")
# The line of an error of NCCL that has its reason; the first line only has its kind.
LAST_ERROR = re.compile(r"Last error:\s*(\S.*)")
OUT_OF_MEMORY = "OutOfMemoryError"  # a class of torch, which is not imported here
TIMED_OUT = re.compile(r"time(d)?[ -]?out", re.IGNORECASE)


Kind = Literal["error", "user", "decided", "hang", "killed", "node"]
NO_RANK = -1  # the rank in a verdict about a node


@dataclass(frozen=True)
class RankFailure:
    """The failure of one rank, or of a node with all its ranks.

    Attributes:
        rank, coordinates, host: the rank, its coordinates in the layout, and its host.
        phase: the rank's activity when it failed, such as "train step 12".
        error: the reason; for a UserError or a hang, the complete sentence.
        time: Unix time in seconds.
        kind: "user" for a UserError, "decided" for a TrainingFailure of all ranks, "hang" for a
            watchdog's diagnosis, "killed" for a rank that the launcher saw end by a signal or
            without a record, "node" for a node that was called dead (`of_node`), and "error" for
            any other exception.
        where: place in the code, such as " at parallel3d/trainer.py:123"; "" if unknown.
        traceback_file: path of the file with the traceback; None if there is none.
        diverged: whether the rank's operations differed from those of its last step
            (`operation_log.Divergence`).
    """

    rank: int
    coordinates: str
    host: str
    phase: str
    error: str
    time: float
    kind: Kind = "error"
    where: str = ""
    traceback_file: str | None = None
    diverged: bool = False

    def sentence(self) -> str:
        """Returns the failure as one line; a user error or a hang is given by `error` alone."""
        if self.kind == "user":
            return full_stop(self.error)
        if self.kind == "hang":
            return self.error
        if self.kind == "node":
            return f"{self.host} {self.error}"
        who = f"rank {self.rank} ({self.coordinates}) on {self.host}"
        if self.kind == "killed":
            return f"{who} {self.error}"
        details = f" (traceback: {self.traceback_file})" if self.traceback_file else ""
        echo = "; another rank ended first" if self.is_echo else ""
        return f"{who} failed in {self.phase}{self.where}: {self.error.rstrip('.')}{echo}{details}"

    @property
    def is_echo(self) -> bool:
        """Returns whether this rank only noticed that another rank had ended."""
        gone = PEER_GONE.search(self.error) is not None
        return self.kind == "error" and gone and not self.diverged

    @property
    def peer_may_be_at_fault(self) -> bool:
        """Returns whether another rank may have caused this failure.

        For example, gloo aborts a rank whose peer sends a message of the wrong size.
        """
        if self.kind == "killed":
            return "SIGABRT" in self.error
        return self.kind == "error" and not self.diverged


def full_stop(sentence: str) -> str:
    """Adds a full stop if the sentence has none."""
    return sentence if sentence.endswith(".") else f"{sentence}."


def coordinates_of(layout: Layout, rank: int) -> str:
    """Returns the coordinates of `rank` in the layout, such as "pp 1, dp 0, tp 3"."""
    return layout.named(rank) if rank < layout.world_size else "outside the layout"


def who(layout: Layout, rank: int, host: str | None = None) -> str:
    """Describes a rank as "rank 3 (pp 1, dp 0, tp 1) on host"; by default, `host` is this host."""
    return f"rank {rank} ({coordinates_of(layout, rank)}) on {host or node_name()}"


def of_rank(
    layout: Layout,
    rank: int,
    error: str,
    kind: Kind,
    phase: str = "",
    host: str | None = None,
    **more: Any,
) -> RankFailure:
    """Returns a failure of a rank on this host, with the current time; `more` sets other fields."""
    place = coordinates_of(layout, rank)
    return RankFailure(rank, place, host or node_name(), phase, error, time.time(), kind, **more)


def of_node(host: str, error: str, time: float, phase: str = "") -> RankFailure:
    """Returns the verdict that a node is dead, which the node itself cannot record.

    `error` is the end of a sentence about the node, such as "has sent no beat for 31 s".
    """
    return RankFailure(NO_RANK, "", host, phase, error, time, "node")


def from_exception(config: Config, worker: Worker, error: BaseException) -> RankFailure:
    """Returns the failure for an exception that this rank did not handle."""
    name, said = type(error).__name__, NOISE.sub("", first_line(error)).strip()
    text = name if said in ("", name) else f"{name}: {said[:500]}"
    if (cause := LAST_ERROR.search(str(error))) is not None:
        text = f"{text} ({cause[1].strip()[:300]})"
    if name == OUT_OF_MEMORY and worker.phase.startswith(("train", "verifying")):
        advice = _needs_less_memory(config.micro_batch_size, config.recompute, config.tp)
        text = f"{text} {advice}"
    awaited, divergence = worker.log.waiting, worker.log.divergence()
    kind: Kind = "error"
    if isinstance(error, UserError):
        text, kind, awaited, divergence = str(error), "user", None, None
    elif isinstance(error, TrainingFailure):
        # The decision may have used collectives that no earlier step had; this is no divergence.
        kind, awaited, divergence = "decided", None, None
    if awaited is not None:
        text = f"in {awaited}: {text}"
    if divergence is not None:
        text = f"{divergence}; {text}"
    for note in getattr(error, "__notes__", ()):  # where in the user's code it was raised
        text = f"{text.rstrip('.')}. {note.rstrip('.')}"
    text = text.encode("utf-8", "backslashreplace").decode()  # file names may not be UTF-8
    where, diverged = innermost_place(error.__traceback__), divergence is not None
    layout, phase = layout_of(config), worker.phase
    return of_rank(layout, worker.rank, text, kind, phase, where=where, diverged=diverged)


def _needs_less_memory(micro_batch_size: int, recompute: Any, tp: int) -> str:
    """Returns advice for a GPU whose memory was too small for a step."""
    divisors = (n for n in range(1, micro_batch_size) if micro_batch_size % n == 0)
    smaller = max(divisors, default=None)
    otherwise = "recompute=full" if spelled(recompute) != "full" else f"tp={2 * tp}"
    nearest = f"micro_batch_size={smaller}" if smaller else otherwise
    return (
        f"The nearest setting that needs less is {nearest}; recompute, a larger tp or pp, zero and "
        "offload_layers also save memory: parallel3d dryrun shows how much"
    )


def from_exit(layout: Layout, rank: int, exitcode: int) -> RankFailure:
    """Returns the failure of a rank without a record; a negative exit code means a signal."""
    error = f"exited with code {exitcode}"
    if exitcode < 0:
        error = f"was killed by {signal.Signals(-exitcode).name}"
    if exitcode == -signal.SIGKILL:
        error += " (by a user, or by the kernel for lack of memory)"
    return of_rank(layout, rank, error, "killed")


def innermost_place(trace: TracebackType | None) -> str:
    """Returns the innermost frame in this package, as " at parallel3d/trainer.py:123", or ""."""
    return place_in([(f.filename, f.lineno or 0, f.name) for f in traceback.extract_tb(trace)])


def place_in(stack: Iterable[tuple[str, int, str]]) -> str:
    """Returns `innermost_place` for frames given as (file, line, function); it reads no file."""
    place = ""
    for file, line, _ in stack:
        path = Path(file)
        if path.is_relative_to(PACKAGE):
            place = f" at {path.relative_to(PACKAGE.parent)}:{line}"
    return place


def write(failure: RankFailure, error: BaseException, run_dir: Path) -> RankFailure:
    """Writes the failure's record and traceback to the run directory, and torchrun's error file.

    Returns the failure with the path of its traceback. This function never raises, because the disk
    may have failed. It does not recreate a missing run directory, which would belong to no run and
    block the next start.
    """
    details = "".join(traceback.format_exception(error))
    if failure.kind != "user":
        file = run_dir / f"rank-{failure.rank}.traceback.txt"
        with suppress(OSError):
            replace_durably(file, details.encode(errors="backslashreplace"))
            failure = dataclasses.replace(failure, traceback_file=str(file))
    try:
        write_record(failure, details, run_dir)
    except OSError as error:  # without a record, no other process can log the failure
        print_line(f"{failure.sentence()} (not recorded: {error.strerror})")
    return failure


def write_record(failure: RankFailure, details: str, run_dir: Path) -> None:
    """Writes the failure's record and torchrun's error file. Raises OSError."""
    with suppress(OSError):
        write_elastic_file(failure, details, os.environ)
    folder = run_dir / FAILURES
    folder.mkdir(mode=0o700, exist_ok=True)
    record = json.dumps(dataclasses.asdict(failure))
    replace_durably(folder / f"rank-{failure.rank}.json", record.encode())


def write_elastic_file(failure: RankFailure, details: str, environ: Mapping[str, str]) -> None:
    """Writes torchrun's error file, so that torchrun's summary shows our sentence."""
    if path := environ.get("TORCHELASTIC_ERROR_FILE"):
        extra = {"py_callstack": f"{failure.sentence()}\n{details}", "timestamp": int(failure.time)}
        message = {"message": failure.sentence(), "extraInfo": extra}
        Path(path).write_text(json.dumps({"message": message}), encoding="utf-8")


def read_all(run_dir: Path) -> list[RankFailure]:
    """Returns the readable records that ranks left in the run directory, oldest first."""
    failures, paths = [], []
    with suppress(OSError):
        paths = [*(run_dir / FAILURES).glob("rank-*.json")]
    for path in paths:
        with suppress(OSError, ValueError, TypeError):
            failures.append(RankFailure(**json.loads(read_bounded(path, RECORD_BYTES))))
    return sorted(failures, key=lambda failure: failure.time)


def note_earlier(run_dir: Path) -> None:
    """Appends what the records of an earlier start's failure say to `recovery.jsonl`.

    A launcher that has decided on this start has done so itself. It knows more: a rank that was
    killed has left no record, and its peers only know that it is gone.
    """
    failures = read_all(run_dir)
    if not failures or not os.path.isfile(run_dir / STARTS):
        return
    cause = root_cause(failures)
    if any(line.at >= cause.time - SLACK_S for line in recovery_log.read(run_dir)):
        return
    known = Cause(cause.kind, cause.host, cause.rank, cause.error)
    if cause.is_echo:
        known = Cause("unknown", "", None, "a rank ended and left no record")
    line = RecoveryLine(
        at=time.time(),
        start=len(starts_of(run_dir / STARTS)) + 1,
        decision="same",
        sentence=f"{cause.sentence().rstrip('.')}; the run was started again",
        cause=known,
        failed_at=cause.time,
    )
    recovery_log.append(run_dir, line, print_line)


def note_end(failed: RankFailure, run_dir: Path) -> None:
    """Appends to `recovery.jsonl` that nobody starts a run again that has begun."""
    starts, now = run_dir / STARTS, time.time()
    if not os.path.isfile(starts):
        return
    line = RecoveryLine(
        at=now,
        start=len(starts_of(starts)) + 1,
        decision="stop",
        sentence=failed.sentence(),
        cause=Cause(failed.kind, failed.host, failed.rank, failed.error),
        failed_at=failed.time,
        seconds={"detect": max(0.0, now - failed.time)},
    )
    recovery_log.append(run_dir, line, print_line)


def root_cause(failures: Iterable[RankFailure]) -> RankFailure:
    """Returns the failure that caused the others; `failures` must not be empty."""
    found = list(failures)
    # If only some ranks diverged, their calls made the others fail. If all ranks diverged, as in a
    # skipped step, this does not point to a cause.
    diverged = [f for f in found if f.diverged]
    if any(f.peer_may_be_at_fault for f in found) and diverged:
        others = [f for f in found if f.kind != "error" and not f.peer_may_be_at_fault]
        found = [*diverged, *others]
    return min(found, key=_rank_of_cause)


def _rank_of_cause(failure: RankFailure) -> tuple[int, float]:
    if failure.kind in ("hang", "decided"):  # these end all ranks, so they caused the others
        return -1, failure.time
    if failure.kind == "killed":
        # The time is when the launcher noticed the death, so an error recorded at the same moment
        # came first. Launchers end the surviving ranks with SIGTERM or END_SIGNAL.
        by_launcher = failure.error.endswith(("SIGTERM", END_SIGNAL.name))
        return (3, 0.0) if by_launcher else (0, failure.time)
    if failure.is_echo:
        return 2, failure.time
    # A verdict about a node, which takes half a minute, ends all ranks. Only an error before it can
    # have caused it: if a rank takes all memory of its node, the node becomes silent.
    if failure.kind == "error" and TIMED_OUT.search(failure.error):
        return 1, failure.time
    # A rank that has lost a peer while its calls differed, as in a step that all ranks skip, is the
    # cause only if nothing else ended by itself.
    if failure.diverged and PEER_GONE.search(failure.error):
        return 1, failure.time
    return 0, failure.time


def has_steps(app: str, train: TrainConfig) -> bool:
    """Returns whether a signal stops this run at the end of a step, which holds if the run trains.

    A signal ends any other run at once.
    """
    return app == "train" and not train.eval_only


# The store's key that counts the ranks with a user error; the first of these ranks logs the error.
USER_ERRORS_KEY = "parallel3d/user_errors"
# Exit code of a local worker that has logged the cause itself because no file could be written.
EXIT_ALREADY_REPORTED = 63
# A local worker that ran to its end but must report a nonzero exit code of its subcommand adds that
# code to this one.
EXIT_COMMAND_RESULT = 64


def code_of_stop(requeues: bool) -> int:
    """Returns the exit code of a stopped run: 0 if it is to be requeued, or 130 after Ctrl-C."""
    return 0 if requeues else 128 + signal.SIGINT


def report_end(cause: RankFailure, run_dir: Path) -> int:
    """Logs why a run ended, and returns the exit code.

    After a user error, it also removes a run directory in which nothing was computed.
    """
    print_line(cause.sentence())
    if cause.kind != "user":
        return 1
    discard_unused(run_dir)
    return USER_ERROR


def report_hang(worker: Worker, error: Exception) -> None:
    """Starts the watchdogs' diagnosis, which ends all ranks, if `error` is a time-out (a hang)."""
    timed_out = isinstance(error, TimeoutError) or TIMED_OUT.search(str(error))
    if worker.watchdog is not None and timed_out:
        worker.watchdog.timed_out()


def report_failure(
    failed: RankFailure, worker: Worker, error: Exception, store: Store | None
) -> None:
    """Records and logs this rank's failure; one rank alone logs a UserError of several ranks."""
    if worker.run_dir != Path() and failed.kind != "user":
        # Rank 0 may have removed the directory of a run that never began.
        if os.path.isdir(worker.run_dir):
            failed = write(failed, error, worker.run_dir)
    elif worker.run_dir != Path() and worker.rank == 0:
        discard_unused(worker.run_dir)
    if failed.kind != "user" or _is_first_to_log(worker, error, store):
        print_line(failed.sentence())


def _is_first_to_log(worker: Worker, error: Exception, store: Store | None) -> bool:
    if isinstance(error, OtherStart):  # a UserError that no peer knows of
        return True
    if store is None or isinstance(error, RankZerosError):
        return worker.rank == 0
    try:
        return store.add(USER_ERRORS_KEY, 1) == 1
    except RuntimeError:
        return False  # the store ended with rank 0, which has logged the error


def leave(code: int, worker: Worker | None = None) -> NoReturn:
    """Ends this process at once, as destructors of process groups may wait minutes for a dead peer.

    If the watchdog is about to log a diagnosis, the process waits for it first, because the
    watchdogs may be the ones that ended the peer.
    """
    if worker is not None and worker.watchdog is not None and worker.watchdog.is_reporting:
        worker.watchdog.timed_out()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
