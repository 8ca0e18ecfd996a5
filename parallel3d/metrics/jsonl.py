"""`metrics.jsonl`: one JSON object a line, each flushed, so that a killed run keeps every line.

A step's line: `step loss grad_norm lr tokens tokens_per_s mfu step_time_s`, where `tokens` counts
all tokens of the run so far (an x axis that survives a change of batch size); `times`, rank 0's
seconds by kind (`comm.step_timer`; on an accelerator those of the step before, in some lines);
`memory`, on an accelerator rank 0's peak bytes so far (`metrics.peak`); `skipped: true` where
gradients were not finite, or, with a null `loss`, where no token of the global batch was to be
learned; `profiled: true` under `profile.steps`; `loss_scale` with fp16; `noise`, with
`train.noise_scale`, the `scale` in sequences, and the step's `trace` and `signal`
(`data_parallel.noise_scale`); `imbalance` with context parallelism: by how much the attention of
the slowest rank of rank 0's group is more work than the mean, as a fraction.

An evaluation's line: `step eval_loss tokens`, the loss null without a token to predict, and
`eval_losses` of a blend's parts by name, `valid` the figures of `Score.row` of each set of
`data.valid` by name. A blend also has `step tokens parts`: the `tokens` read of
each part so far and its `epochs`. JSON has no NaN: a value that is not finite is null, and the line
then has `"nonfinite": {"loss": "nan"}` (or "inf", "-inf").
"""

from __future__ import annotations

import json
import math
import os
import secrets
import shutil
import statistics
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, NamedTuple, Self

from parallel3d.comm.step_timer import WARMUP_STEPS
from parallel3d.files import flush_folder, no_link, replace_durably

if TYPE_CHECKING:
    from parallel3d.metrics.peak import PeakMemory


class StepRecord(NamedTuple):
    """One optimizer step, as written to `metrics.jsonl` (same names, same order)."""

    step: int  # counts from 1
    loss: float | None  # nats per token, mean over the unmasked tokens; None without any
    grad_norm: float  # before clipping
    lr: float
    tokens: int  # of the whole run so far
    tokens_per_s: float
    mfu: float  # fraction
    step_time_s: float
    skipped: bool = False  # no loss or gradients not finite: the parameters stay as they were
    loss_scale: float | None = None  # of fp16, after the step
    times: Mapping[str, float] | None = None  # seconds by kind, see `comm.step_timer`
    memory: PeakMemory | None = None  # of rank 0's accelerator so far
    noise: Mapping[str, float | None] | None = None  # see `data_parallel.noise_scale`
    imbalance: float | None = None  # of attention over cp, see `context_parallel.documents`
    profiled: bool = False  # slower than others, and excluded from the run's throughput

    @property
    def noise_scale(self) -> float | None:
        """Returns the noise scale in sequences; None where it is not measured or not yet known."""
        return None if self.noise is None else self.noise["scale"]

    def row(self) -> dict[str, Any]:
        """Returns the line of metrics.jsonl, without absent entries."""
        row = self._asdict()
        for mark in ("skipped", "profiled"):
            if not row[mark]:
                del row[mark]
        if self.times is not None:
            row["times"] = {kind: round(seconds, 6) for kind, seconds in self.times.items()}
        if self.memory is not None:
            row["memory"] = self.memory._asdict()
        if self.noise is not None:
            row["noise"] = {part: v for part, v in self.noise.items() if v is not None}
        if self.imbalance is not None:
            row["imbalance"] = round(self.imbalance, 4)
        return {key: value for key, value in row.items() if value is not None or key == "loss"}


class Throughput:
    """Step times and tokens of one session, without its first `WARMUP_STEPS` if it has more."""

    def __init__(self) -> None:
        self._seconds = array("d")
        self._tokens = array("d")

    def add(self, tokens: int, seconds: float) -> None:
        self._tokens.append(tokens)
        self._seconds.append(seconds)

    @property
    def excluded(self) -> int:
        return WARMUP_STEPS if len(self._seconds) > WARMUP_STEPS else 0

    @property
    def mean(self) -> float:
        """Returns all tokens / all step time, a second. NaN without steps."""
        seconds = sum(self._seconds[self.excluded :])
        return sum(self._tokens[self.excluded :]) / seconds if seconds else math.nan

    @property
    def median(self) -> float:
        """Returns the median over steps of tokens per second. NaN without steps."""
        pairs = zip(self._tokens, self._seconds, strict=True)
        rates = [tokens / seconds for tokens, seconds in pairs][self.excluded :]
        return statistics.median(rates) if rates else math.nan

    def summary(self) -> dict[str, float | None]:
        """Returns both, null without steps, and the number of excluded steps."""
        rates = {"mean": self.mean, "median": self.median}
        usable = {k: v if math.isfinite(v) else None for k, v in rates.items()}
        return usable | {"warmup_steps_excluded": self.excluded}


class Evaluation(NamedTuple):
    """A held-out loss (nats per token) after `step` steps; None without a token to predict."""

    step: int
    loss: float | None


def is_whole(row: Mapping[str, Any]) -> bool:
    """Returns whether a line of metrics.jsonl has all entries of a step or an evaluation."""
    keys = ("eval_loss", "tokens") if "eval_loss" in row else StepRecord._fields[1:8]
    may_lack = "eval_loss" if "eval_loss" in row else "loss" if row.get("skipped") else None
    try:
        return all(value(row, key) is not None or key == may_lack for key in keys)
    except (KeyError, TypeError, ValueError, AttributeError):
        return False


def best_evaluation(evaluations: Sequence[Evaluation]) -> Evaluation | None:
    """Returns the lowest finite held-out loss, the earliest of equals; None without one."""
    usable = [e for e in evaluations if e.loss is not None and math.isfinite(e.loss)]
    return min(usable, key=lambda e: math.inf if e.loss is None else e.loss, default=None)


COPY_BYTES = 1 << 20  # copied at a time


def finite(row: Mapping[str, Any]) -> dict[str, Any]:
    """Returns `row` with NaN and infinities as null and named under `nonfinite`; valid JSON."""
    odd = {k: repr(v) for k, v in row.items() if isinstance(v, float) and not math.isfinite(v)}
    if not odd:
        return dict(row)
    return {k: None if k in odd else v for k, v in row.items()} | {"nonfinite": odd}


def value(row: Mapping[str, Any], key: str) -> float | None:
    """Returns the entry of a `finite` row, NaN and infinities restored. KeyError without it."""
    found = row.get("nonfinite", {}).get(key, row[key])
    return None if found is None else float(found)


class MetricsFile:
    """Appends lines to a `metrics.jsonl`; on resume, first drops the steps that will run again.

    These are lines of `first_step` and later, and a last line torn by a crash. The file before is
    kept as `metrics.jsonl.1`, `.2`, … Damaged lines are dropped too, and logged; so are steps
    without a line, left by a run that died before they were on disk.

    A line that cannot be written, to a full disk, is logged once and kept for the next try; no line
    is ever torn. Lines that still wait (`waiting`) are saved in a checkpoint and come back as
    `waited`, so that a resumed run has the lines of all earlier steps.
    """

    def __init__(
        self,
        path: Path,
        first_step: int = 1,
        seen: Callable[[dict[str, Any]], None] = lambda row: None,
        say: Callable[[str], None] = lambda sentence: None,
        waited: Sequence[str] = (),
    ) -> None:
        """Opens the file; `seen` takes each line that stays, in order. Raises OSError."""
        self.path, self._say = path, say
        late = _keep_before(path, first_step, seen, say, waited)
        appending = os.O_WRONLY | os.O_APPEND | os.O_CREAT
        self._file = os.fdopen(no_link(path, appending), "ab", buffering=0)
        flush_folder(path.parent)
        self._size = os.fstat(self._file.fileno()).st_size
        self._unsure = False  # whether bytes of a failed write may be in the file
        self._begun = b""  # part in the file of a line whose rest waits
        self._waiting = bytearray().join(late)  # from the first byte that is not in the file
        self._said = False
        self._try(self._drain)

    def waiting(self) -> tuple[str, ...]:
        """Returns the lines that are not, or not completely, in the file."""
        return tuple((self._begun + self._waiting).decode().splitlines(keepends=True))

    def write(self, row: Mapping[str, Any]) -> None:
        """Appends one line and hands it to the operating system: it survives SIGKILL."""
        self._waiting += (json.dumps(finite(row), allow_nan=False) + "\n").encode()
        self._try(self._drain)

    def flush(self) -> None:
        """Flushes to the disk itself: the lines survive a power cut."""
        self._try(self._drain)
        self._try(lambda: os.fsync(self._file.fileno()))

    def close(self) -> None:
        """Flushes to the disk itself and closes; may be called twice."""
        if self._file.closed:
            return
        self.flush()
        self._try(self._file.close)  # it is closed even if this fails
        if lost := self._waiting.count(b"\n"):
            self._say(f"{lost} lines of {self.path} could not be written")

    def _drain(self) -> None:
        if self._unsure:  # a write that raised may still have been done
            self._took(os.fstat(self._file.fileno()).st_size - self._size)
            self._unsure = False
        while self._waiting:
            try:
                self._took(self._file.write(self._waiting))
            except OSError:
                self._unsure = True
                raise

    def _took(self, count: int) -> None:
        """Moves `count` bytes from the waiting ones to those in the file."""
        self._size += count
        self._begun = (self._begun + self._waiting[:count]).rpartition(b"\n")[2]
        del self._waiting[:count]

    def _try(self, action: Callable[[], None]) -> None:
        try:
            action()
        except OSError as error:
            if not self._said:
                self._say(
                    f"{self.path} cannot be written ({error.strerror}): training goes on, and "
                    "the lines are kept until they can"
                )
            self._said = True

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *raised: object) -> None:
        self.close()


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """Returns all rows of a metrics file, without torn and damaged lines."""
    return list(rows_of(path))


def rows_of(path: Path) -> Iterator[dict[str, Any]]:
    """Yields the rows of a metrics file: a long run's is large."""
    with path.open("rb") as file:
        for line in file:
            row = _row(line)
            if row is not None:
                yield row


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Replaces `path` by `content` atomically."""
    text = json.dumps(content, indent=2, allow_nan=False, ensure_ascii=False)
    replace_durably(path, f"{text}\n".encode())


def _row(line: bytes) -> dict[str, Any] | None:
    """Returns the row in a line; None if it is torn or damaged."""
    if not line.endswith(b"\n"):
        return None
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return row if isinstance(row, dict) and isinstance(row.get("step"), int) else None


def _keep_before(
    path: Path,
    first_step: int,
    seen: Callable[[dict[str, Any]], None],
    say: Callable[[str], None],
    waited: Sequence[str],
) -> list[bytes]:
    """Drops the lines from `first_step` on, keeping a copy of the old file if there were any.

    Returns those of `waited` that the file lacks: the last ones before the checkpoint.
    """
    rows = {line.encode(): row for line in waited if (row := _row(line.encode()))}
    late = [line.encode() for line in waited if line.encode() in rows]
    last, gaps = 0, []  # steps without a line

    def stays(row: dict[str, Any]) -> None:
        nonlocal last, gaps
        seen(row)
        gaps += _between(last, row["step"])
        last = max(last, row["step"])

    try:
        file = os.fdopen(no_link(path, os.O_RDONLY), "rb")
    except FileNotFoundError:
        return late
    with file:
        kept: list[list[int]] = []  # begin and end of the kept parts, in bytes
        damaged = end = 0
        for line in file:
            begin, end = end, end + len(line)
            row = _row(line)
            damaged += row is None and line.endswith(b"\n") and not line.isspace()
            # A fresh start repeats an evaluation at step 0, too.
            if row is None or first_step == 1 or row["step"] >= first_step:
                continue
            stays(row)
            if line in late:
                late.remove(line)
            if kept and kept[-1][1] == begin:
                kept[-1][1] = end
            else:
                kept.append([begin, end])
        for line in late:
            stays(rows[line])
        gaps += _between(last, first_step)
        if gaps:
            lost = "an earlier start could not write it"
            say(f"{path} has no line of step {', '.join(gaps)}: {lost}")
        if kept == [[0, end]] or end == 0:
            return late
        old = _put_aside(file, kept, path)
    if damaged:
        say(f"{path} had {damaged} damaged lines: they are left out, {old.name} has all of it")
    return late


def _between(last: int, step: int) -> list[str]:
    """Returns the steps after `last` and before `step`, as text."""
    if step <= last + 1:
        return []
    return [f"{last + 1}" if step == last + 2 else f"{last + 1} to {step - 1}"]


def _put_aside(file: BinaryIO, kept: list[list[int]], path: Path) -> Path:
    """Reduces `path` to the `kept` parts of `file`; returns the copy of the whole file.

    Whenever this is interrupted, even by a power cut, `path` is the old file or the new one.
    """
    number = 1
    while (old := path.with_name(f"{path.name}.{number}")).exists():
        number += 1
    partial = path.with_name(f".{path.name}.{secrets.token_hex(4)}.partial")
    try:
        with os.fdopen(no_link(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL), "wb") as new:
            for begin, end in kept:
                file.seek(begin)
                while begin < end and (part := file.read(min(end - begin, COPY_BYTES))):
                    new.write(part)
                    begin += len(part)
            new.flush()
            os.fsync(new.fileno())
        try:
            os.link(path, old)
        except OSError:  # a file system without hard links
            shutil.copyfile(path, old)
        os.replace(partial, path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise
    return old


class Score(NamedTuple):
    """Σ cross-entropies of a set in nats, its tokens with a loss, and the bytes of their text, None
    where the tokenizer is not known."""

    nats: float
    tokens: int
    bytes: int | None = None

    @property
    def loss(self) -> float | None:
        """Nats per token; None without a token to predict."""
        return self.nats / self.tokens if self.tokens else None

    def row(self) -> dict[str, float | None]:
        """Returns the figures that are recorded: loss, perplexity, bits_per_byte, tokens."""
        perplexity = None if self.loss is None else exponential(self.loss)
        bits = self.nats / math.log(2) / self.bytes if self.bytes else None
        figures = {"loss": self.loss, "perplexity": perplexity, "bits_per_byte": bits}
        return figures | {"tokens": self.tokens}


def exponential(x: float) -> float:
    """Returns e^x, infinite where a float does not hold it."""
    return math.exp(x) if x < 709 else math.inf if x == x else x
