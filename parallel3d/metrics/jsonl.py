"""Reads and writes `metrics.jsonl`: one JSON object per line, each flushed to survive a kill.

The line of a step has the entries `step`, `loss`, `grad_norm`, `lr`, `tokens`, `tokens_per_s`,
`mfu` and `step_time_s`. `tokens` counts all tokens of the run so far, which makes an x axis that
survives a change of the batch size. A line may also have these entries:

- `times`: rank 0's seconds by kind (`comm.step_timer`). On an accelerator, only some lines have it,
  and it describes the previous step.
- `memory`: rank 0's peak bytes so far, on an accelerator (`metrics.peak`).
- `skipped: true`: the gradients were not finite, or, if `loss` is null, the global batch had no
  token to learn.
- `profiled: true`: the step was profiled (`profile.steps`).
- `loss_scale`: the loss scale, with fp16.
- `imbalance`: with context parallelism, the excess of attention work on the slowest rank of rank
  0's group over the group's mean, as a fraction.
- `experts`: in a mixture of experts, figures by layer: `load` (tokens of the fullest expert over
  the mean), the number of `unused` experts, the `entropy` of the scores in nats, the z-loss `z`,
  the `bias` (its highest value minus its lowest), and the auxiliary loss `aux` if it is used.
- `terms`: the means of the named terms of a user's own loss (`Loss.terms`).
- `hooks`: the figures of a script's hooks, by their names (`Run.log`); evaluations may have it too.
- `goodput`: the share of the wall time so far that made progress (`metrics.starts`).
- `lost_to`: once the run was interrupted, the shares that each cause has cost (`lost_time`).

The line of an evaluation has `step`, `eval_loss` (null if there is no token to predict) and
`tokens`. `eval_losses` maps the parts of a blend to their losses, `eval_terms` has the means of an
own loss's terms, and `valid` maps the sets of `data.valid` to the figures of `Score.row`.

A blend also has lines with `step`, `tokens` and `parts`, which maps each part to its `tokens` read
so far and its `epochs`. A mixture of experts also has lines with `step`, `tokens` and
`expert_counts`, which maps each layer to the tokens of each expert in the step.

JSON has no NaN: a value that is not finite is null, and the line then has `"nonfinite": {"loss":
"nan"}` (or "inf", "-inf").
"""

from __future__ import annotations

import json
import math
import os
import secrets
import shutil
import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

from parallel3d.comm.step_timer import WARMUP_STEPS
from parallel3d.files import flush_folder, new_file, no_link, replace_durably, write_all
from parallel3d.text import count

METRICS = "metrics.jsonl"  # the file in a run's directory
COUNTS = "expert_counts"
HOOKS = "hooks"
LOST_TO = "lost_to"
TERMS, EVAL_TERMS = "terms", "eval_terms"
# Entries that a step's line always has.
STEP = ("step", "loss", "grad_norm", "lr", "tokens", "tokens_per_s", "mfu", "step_time_s")


def throughput(tokens: Sequence[float], seconds: Sequence[float]) -> dict[str, float | None]:
    """Returns the mean and median throughput in tokens per second; both are None without steps.

    The first `WARMUP_STEPS` steps do not count if there are more steps.
    """
    excluded = WARMUP_STEPS if len(seconds) > WARMUP_STEPS else 0
    tokens, seconds = tokens[excluded:], seconds[excluded:]
    rates = [count / time for count, time in zip(tokens, seconds, strict=True)]
    return {
        "mean": sum(tokens) / sum(seconds) if rates else None,
        "median": statistics.median(rates) if rates else None,
        "warmup_steps_excluded": excluded,
    }


def is_whole(row: Mapping[str, Any]) -> bool:
    """Returns whether a line of metrics.jsonl has all entries of a step or evaluation."""
    keys = ("eval_loss", "tokens") if "eval_loss" in row else STEP
    may_lack = "eval_loss" if "eval_loss" in row else "loss" if row.get("skipped") else None
    try:
        return all(value(row, key) is not None or key == may_lack for key in keys)
    except (KeyError, TypeError, ValueError, AttributeError):
        return False


def finite(row: Mapping[str, Any]) -> dict[str, Any]:
    """Returns `row` with NaN and infinities replaced by null and listed under `nonfinite`."""
    odd = {k: repr(v) for k, v in row.items() if isinstance(v, float) and not math.isfinite(v)}
    if not odd:
        return dict(row)
    return {k: None if k in odd else v for k, v in row.items()} | {"nonfinite": odd}


def value(row: Mapping[str, Any], key: str) -> float | None:
    """Returns a number of a `finite` row, with NaN and infinities restored. May raise KeyError."""
    found = row.get("nonfinite", {}).get(key, row[key])
    return None if found is None else float(found)


class MetricsFile:
    """Appends lines to `metrics.jsonl`; on resume, first drops the steps that will run again.

    It drops lines of `first_step` and later, damaged lines, and a last line that a crash cut off,
    and keeps the previous file as `metrics.jsonl.1`, `.2`, … It logs how many lines were damaged,
    and how many steps have no line because a run died before writing it.

    If a line cannot be written, for example because the disk is full, it logs this once and keeps
    the line for the next try. Lines that still wait (`waiting`) are saved in a checkpoint and come
    back as `waited`, so that a resumed run has the lines of all earlier steps.
    """

    def __init__(
        self,
        path: Path,
        first_step: int = 1,
        seen: Callable[[dict[str, Any]], None] = lambda row: None,
        say: Callable[[str], None] = lambda sentence: None,
        waited: Sequence[str] = (),
        dropped: Callable[[dict[str, Any]], None] = lambda row: None,
    ) -> None:
        """Opens the file, and drops lines of steps that will run again. Raises OSError.

        `seen` is called with each line that stays, in order, and `dropped` with each undamaged line
        that is dropped. `say` logs a sentence.
        """
        self.path = path
        self._say = say
        self.waiting = _keep_before(path, first_step, seen, say, waited, dropped)
        self._file = os.fdopen(no_link(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT), "ab")
        flush_folder(path.parent)
        self._size = os.fstat(self._file.fileno()).st_size  # bytes of whole lines
        self._said = False
        self._try(self._drain)

    def write(self, row: Mapping[str, Any]) -> None:
        """Appends a line and hands it to the operating system, so that it survives SIGKILL."""
        self.waiting.append(json.dumps(finite(row), allow_nan=False) + "\n")
        self._try(self._drain)

    def flush(self) -> None:
        """Forces the lines to disk (fsync), so that they survive a power cut."""
        self._try(self._drain)
        self._try(lambda: os.fsync(self._file.fileno()))

    def close(self) -> None:
        """Forces the lines to disk and closes the file; a second call does nothing."""
        if self._file.closed:
            return
        self.flush()
        self._try(self._file.close)  # the file is closed even if this fails
        if self.waiting:
            self._say(f"{count(len(self.waiting), 'line')} of {self.path} could not be written")

    def _drain(self) -> None:
        descriptor = self._file.fileno()
        while self.waiting:
            line = self.waiting[0].encode()
            if os.fstat(descriptor).st_size != self._size:
                os.ftruncate(descriptor, self._size)  # a failed write may have left part of a line
            write_all(descriptor, memoryview(line))
            self._size += len(line)
            del self.waiting[0]

    def _try(self, action: Callable[[], None]) -> None:
        try:
            action()
        except OSError as error:
            if not self._said:
                self._say(
                    f"{self.path} cannot be written ({error.strerror}): training continues, and "
                    "the lines are kept until they can be written"
                )
            self._said = True

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *raised: object) -> None:
        self.close()


def rows_of(path: Path) -> Iterator[dict[str, Any]]:
    """Yields the rows of a metrics file, without incomplete and damaged lines."""
    with path.open("rb") as file:
        yield from filter(None, map(_row, file))


def append_line(path: Path, row: Mapping[str, Any]) -> None:
    """Appends a line to a file that is rarely written, such as starts.jsonl. Raises OSError."""
    line = json.dumps(finite(row), allow_nan=False) + "\n"
    with os.fdopen(no_link(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT), "ab") as file:
        file.write(line.encode())


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Atomically replaces the file `path` with `content` as JSON."""
    text = json.dumps(content, indent=2, allow_nan=False, ensure_ascii=False)
    replace_durably(path, f"{text}\n".encode())


def _row(line: bytes) -> dict[str, Any] | None:
    """Returns the row in a line, or None if the line is incomplete or damaged."""
    if not line.endswith(b"\n"):
        return None
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return row if isinstance(row, dict) and isinstance(row.get("step"), int) else None


def _row_before(line: bytes, first_step: int) -> dict[str, Any] | None:
    """Returns the row in a line that a start from `first_step` keeps, or None for other lines."""
    row = _row(line)
    # A start from step 1 keeps no line: it also repeats an evaluation at step 0.
    return row if row is not None and first_step > 1 and row["step"] < first_step else None


def _keep_before(
    path: Path,
    first_step: int,
    seen: Callable[[dict[str, Any]], None],
    say: Callable[[str], None],
    waited: Sequence[str],
    dropped: Callable[[dict[str, Any]], None],
) -> list[str]:
    """Drops the lines of `first_step` and later, and damaged ones, from the file.

    If it drops any, it keeps a copy of the old file. Returns the lines of `waited` that the file
    lacks: the last ones before the checkpoint.
    """
    late = list(waited)
    try:
        file = os.fdopen(no_link(path, os.O_RDONLY), "rb")
    except FileNotFoundError:
        return late
    last = missing = damaged = 0
    drops = False

    def stays(row: dict[str, Any]) -> None:
        nonlocal last, missing
        seen(row)
        missing += max(0, row["step"] - last - 1)
        last = max(last, row["step"])

    with file:
        for line in file:
            row = _row_before(line, first_step)
            if row is None:
                drops = True
                if (late_row := _row(line)) is not None:
                    dropped(late_row)
                damaged += late_row is None and line.endswith(b"\n") and not line.isspace()
                continue
            stays(row)
            if (text := line.decode()) in late:
                late.remove(text)
        for text in late:
            stays(json.loads(text))
        if missing := missing + max(0, first_step - 1 - last):
            say(
                f"{path} lacks {missing:,} of the steps before step {first_step}: an earlier start "
                "could not write them"
            )
        if not drops:
            return late
        file.seek(0)
        old = _replace_by(path, (line for line in file if _row_before(line, first_step)))
    if damaged:
        lines = count(damaged, "damaged line")
        say(f"{path} had {lines}, now removed; the unchanged file is kept as {old.name}")
    return late


def _replace_by(path: Path, lines: Iterable[bytes]) -> Path:
    """Rewrites the file at `path` with these lines; returns the path of a copy of the old file.

    After an interruption, even a power cut, `path` is either the old file or the new one.
    """
    number = 1
    while (old := path.with_name(f"{path.name}.{number}")).exists():
        number += 1
    partial = path.with_name(f".{path.name}.{secrets.token_hex(4)}.partial")
    try:
        with new_file(partial) as descriptor:
            with os.fdopen(descriptor, "wb", closefd=False) as new:
                new.writelines(lines)
            os.fsync(descriptor)
        try:
            os.link(path, old)
        except OSError:  # a file system without hard links
            shutil.copyfile(path, old)
        os.replace(partial, path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise
    return old
