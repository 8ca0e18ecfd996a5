"""What went wrong, where, said once: records of failed ranks and the one that caused the rest."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import signal
import socket
import sys
import time
import traceback
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Literal

from parallel3d.config.schema import Config
from parallel3d.errors import TrainingFailure, UserError
from parallel3d.files import read_bounded, replace_durably
from parallel3d.run.directory import FAILURES
from parallel3d.run.launch import Worker
from parallel3d.topology.layout import Layout

RECORD_BYTES = 1 << 20  # of a failure's record, at most
PACKAGE = Path(__file__).parents[1]  # as frames name its files

# A peer that has gone shows up as these on the ranks that talk to it; it is never the cause.
PEER_GONE = re.compile(
    r"connection (closed|reset|refused|aborted)|broken pipe|closed by peer|reset by peer"
    r"|remote process exited|remote rank|socket (closed|timeout)|peer (has )?(gone|closed|exited)"
    r"|connection was likely closed|failed to (recv|send)|stop_waiting",
    re.IGNORECASE,
)
# gloo says in which of its own files it noticed, and wishes good luck: none of it helps here.
NOISE = re.compile(r"\[/\S+:\d+\] ?| This is typically caused by .*")
TIMED_OUT = re.compile(r"time(d)?[ -]?out", re.IGNORECASE)


Kind = Literal["error", "user", "decided", "hang", "killed"]


@dataclass(frozen=True)
class RankFailure:
    """One rank's end: who (rank, coordinates, host), doing what, where in the code, and why.

    `kind` "user" is a UserError and `error` its sentence; "decided" is a TrainingFailure, to which
    all ranks came together; "hang" is a watchdog's verdict, all of it in `error`; "killed" is a
    death by signal or a bare exit, of which nobody but the launcher can tell. `diverged`: the rank
    had left the way of its last step (`operation_log.Divergence`). `time`: seconds, epoch.
    """

    rank: int
    coordinates: str
    host: str
    phase: str
    where: str
    error: str
    time: float
    kind: Kind = "error"
    traceback_file: str | None = None
    diverged: bool = False

    def sentence(self) -> str:
        """The failure as one line; for a user error only what the user needs."""
        if self.kind == "user":
            return full_stop(self.error)
        if self.kind == "hang":
            return self.error
        who = f"rank {self.rank} ({self.coordinates}) on {self.host}"
        if self.kind == "killed":
            return f"{who} {self.error}"
        details = f" (traceback: {self.traceback_file})" if self.traceback_file else ""
        echo = "; another rank went first" if self.is_echo else ""
        return f"{who} failed in {self.phase}{self.where}: {self.error.rstrip('.')}{echo}{details}"

    @property
    def is_echo(self) -> bool:
        """Whether this rank only noticed that another had gone."""
        gone = PEER_GONE.search(self.error) is not None
        return self.kind == "error" and gone and not self.diverged

    @property
    def did_as_always(self) -> bool:
        """Whether it failed for another rank's call: gloo aborts on a tensor of the wrong size."""
        if self.kind == "killed":
            return "SIGABRT" in self.error
        return self.kind == "error" and not self.diverged


def full_stop(sentence: str) -> str:
    """The sentence with the full stop that messages of libraries, and some of ours, lack."""
    return sentence if sentence.endswith(".") else f"{sentence}."


def coordinates_of(config: Config, rank: int) -> str:
    """ "pp 1, dp 0, tp 3": where `rank` stands in the configured layout."""
    layout = Layout(tp=config.tp, pp=config.pp, dp=config.dp or 1, cp=config.cp)
    return str(layout.coordinates(rank)) if rank < layout.world_size else "outside the layout"


def who(config: Config, rank: int, host: str | None = None) -> str:
    """ "rank 3 (pp 1, dp 0, tp 1) on host", this host if none is given."""
    return f"rank {rank} ({coordinates_of(config, rank)}) on {host or socket.gethostname()}"


def from_exception(config: Config, worker: Worker, error: BaseException) -> RankFailure:
    """Describe an exception that reached this rank's top."""
    lines = NOISE.sub("", str(error)).strip().splitlines()
    text = f"{type(error).__name__}: {lines[0][:500]}" if lines else type(error).__name__
    awaited, divergence = worker.log.awaited(), worker.log.divergence()
    kind: Kind = "error"
    if isinstance(error, UserError):
        text, kind, awaited, divergence = str(error), "user", None, None
    elif isinstance(error, TrainingFailure):
        # How they came to it may be collectives that no earlier step had: that is no divergence.
        kind, awaited, divergence = "decided", None, None
    if awaited is not None:
        text = f"in {awaited}: {text}"
    if divergence is not None:
        text = f"{divergence}; {text}"
    text = text.encode("utf-8", "backslashreplace").decode()  # names of files may be no UTF-8
    return RankFailure(
        rank=worker.rank,
        coordinates=coordinates_of(config, worker.rank),
        host=socket.gethostname(),
        phase=worker.phase,
        where=innermost_place(error.__traceback__),
        error=text,
        time=time.time(),
        kind=kind,
        diverged=divergence is not None,
    )


def from_exit(config: Config, rank: int, exitcode: int) -> RankFailure:
    """Describe a rank that ended without a word: by a signal (negative code) or a bare exit."""
    if exitcode < 0:
        try:
            name = signal.Signals(-exitcode).name
        except ValueError:
            name = f"signal {-exitcode}"
        error = f"was killed by {name}"
        if name == "SIGKILL":
            error += " (by hand, or by the kernel for want of memory)"
    else:
        error = f"exited with code {exitcode}"
    return RankFailure(
        rank=rank,
        coordinates=coordinates_of(config, rank),
        host=socket.gethostname(),
        phase="",
        where="",
        error=error,
        time=time.time(),
        kind="killed",
    )


def innermost_place(trace: TracebackType | None) -> str:
    """ " at parallel3d/trainer.py:123": the deepest frame of this package; "" without one."""
    return place_in([(f.filename, f.lineno or 0, f.name) for f in traceback.extract_tb(trace)])


def place_in(stack: Iterable[tuple[str, int, str]]) -> str:
    """The same for frames (file, line, function), outermost first.

    No file system is asked: that of the working directory may be what does not answer.
    """
    place = ""
    for file, line, _ in stack:
        path = Path(file)
        if path.is_relative_to(PACKAGE):
            place = f" at {path.relative_to(PACKAGE.parent)}:{line}"
    return place


def write(failure: RankFailure, error: BaseException, run_dir: Path) -> RankFailure:
    """Leave the record and the traceback in the run directory, and where torchrun looks for it.

    Returns the failure with its traceback file. Never raises: the disk may be what has failed. A
    directory that is gone is not made again: it would be no run's, and in the way of a next start.
    """
    details = "".join(traceback.format_exception(error))
    if failure.kind != "user":
        file = run_dir / f"rank-{failure.rank}.traceback.txt"
        with suppress(OSError):
            replace_durably(file, details.encode(errors="backslashreplace"))
            failure = dataclasses.replace(failure, traceback_file=str(file))
    try:
        write_record(failure, details, run_dir)
    except OSError as error:  # nobody else could say it
        said = f"{failure.sentence()} (not recorded: {error.strerror})"
        print(f"parallel3d: {said}", file=sys.stderr, flush=True)
    return failure


def write_record(failure: RankFailure, details: str, run_dir: Path) -> None:
    """Leave the record alone: in the run directory, and where torchrun looks for it.

    Raises OSError.
    """
    with suppress(OSError):
        write_elastic_file(failure, details, os.environ)
    folder = run_dir / FAILURES
    folder.mkdir(mode=0o700, exist_ok=True)
    record = json.dumps(dataclasses.asdict(failure))
    replace_durably(folder / f"rank-{failure.rank}.json", record.encode())


def write_elastic_file(failure: RankFailure, details: str, environ: Mapping[str, str]) -> None:
    """Tell torchrun's agent, in its own format, so that its summary shows our sentence."""
    if path := environ.get("TORCHELASTIC_ERROR_FILE"):
        extra = {"py_callstack": f"{failure.sentence()}\n{details}", "timestamp": int(failure.time)}
        message = {"message": failure.sentence(), "extraInfo": extra}
        Path(path).write_text(json.dumps({"message": message}), encoding="utf-8")


def read_all(run_dir: Path) -> list[RankFailure]:
    """The records that ranks left in the run directory, oldest first.

    Without those that cannot be read: a rank may be ended, or its disk full, while it writes.
    """
    failures, paths = [], []
    with suppress(OSError):
        paths = [*(run_dir / FAILURES).glob("rank-*.json")]
    for path in paths:
        with suppress(OSError, ValueError, TypeError):
            failures.append(RankFailure(**json.loads(read_bounded(path, RECORD_BYTES))))
    return sorted(failures, key=lambda failure: failure.time)


def root_cause(failures: Iterable[RankFailure]) -> RankFailure:
    """The failure that brought the others about: the first that is no echo of another.

    Ties in kind keep the given order. `failures` must not be empty.
    """
    found = list(failures)
    # A rank that diverged met calls that were not its own; unless all did, as at a skipped step.
    diverged = [f for f in found if f.diverged]
    if any(f.did_as_always for f in found) and diverged:
        found = [*diverged, *(f for f in found if f.kind in ("hang", "decided"))]
    return min(found, key=_rank_of_cause)


def _rank_of_cause(failure: RankFailure) -> tuple[int, float]:
    if failure.kind in ("hang", "decided"):  # of all ranks; what some died of then is its doing
        return -1, failure.time
    if failure.kind == "killed":
        # Its time is only when the launcher saw it: an error of the same moment came first.
        # SIGTERM and SIGHUP are what launchers send to the survivors.
        by_launcher = failure.error.endswith(("SIGTERM", "SIGHUP"))
        return (3, 0.0) if by_launcher else (0, failure.time)
    if failure.is_echo:
        return 2, failure.time
    if failure.kind == "error" and TIMED_OUT.search(failure.error):
        return 1, failure.time
    return 0, failure.time
