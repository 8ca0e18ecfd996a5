"""Writes and reads `recovery.jsonl`, the decisions about the starts of a run.

Whoever decides whether and where the ranks start next appends a line: the batch process of a Slurm
job, or the local launcher. Under other launchers rank 0 of the next start appends what the records
of the failure say. A line has these entries:

- `at`: Unix time of the decision.
- `start`: the number of the start that follows, counted by whoever decides.
- `decision`: one of DECISIONS.
- `sentence`: the decision and its reason, for the user.
- `cause`: `kind`, `host`, `rank` and `error` of the failure that ended the last start; null if none
  did, or if nobody knows it.
- `nodes`: the nodes of the start that follows.
- `failed_at`: Unix time of the failure; null if there was none, or if it is unknown.
- `seconds`: the time of `detect` (from the failure until it was noticed), `end` (of all processes),
  `probe` (of the nodes) and `decide`; those that are unknown are missing.
- `inputs`: everything that a decision under Slurm was made from, so that it can be made again.

This module imports no torch.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from parallel3d.files import check_depth, no_link, open_regular, read_into, write_all

RECOVERY = "recovery.jsonl"
DECISIONS = ("first", "same", "replace", "smaller", "requeue", "stop", "done")
PHASES = ("detect", "end", "probe", "decide")
# A longer file is read from here before its end. A line of 128 nodes has less than 100,000 bytes.
MOST_BYTES = 64 << 20


@dataclass(frozen=True)
class Cause:
    """The failure that caused the others.

    Attributes:
        kind: that of `run.failure.RankFailure`, or "node" for a node that died.
        host: its host.
        rank: its rank; None if it is not that of one rank.
        error: the reason.
    """

    kind: str
    host: str
    rank: int | None = None
    error: str = ""


@dataclass(frozen=True)
class RecoveryLine:
    """A line of `recovery.jsonl`; the entries are explained in this module's docstring."""

    at: float
    start: int
    decision: str
    sentence: str
    cause: Cause | None = None
    nodes: tuple[str, ...] = ()
    failed_at: float | None = None
    seconds: Mapping[str, float] = field(default_factory=dict)
    inputs: Mapping[str, Any] | None = None

    def row(self) -> dict[str, Any]:
        """Returns the line as plain data for JSON; seconds that are not finite are left out."""
        known = {name: one for name, one in self.seconds.items() if math.isfinite(one)}
        row: dict[str, Any] = {
            "at": round(self.at, 3),
            "start": self.start,
            "decision": self.decision,
            "sentence": self.sentence,
            "cause": None if self.cause is None else vars(self.cause),
            "nodes": list(self.nodes),
            "failed_at": None if self.failed_at is None else round(self.failed_at, 3),
            "seconds": {name: round(one, 3) for name, one in known.items()},
        }
        return row if self.inputs is None else {**row, "inputs": self.inputs}


def append(run_dir: Path, line: RecoveryLine, say: Callable[[str], None]) -> bool:
    """Appends a line and flushes it to the disk; returns whether that worked.

    If not, `say` gets a sentence: a full disk keeps nobody from starting again. A line that a crash
    or a full disk has cut off stays alone, as the next one begins on a line of its own.
    """
    path = run_dir / RECOVERY
    try:
        text = json.dumps(line.row(), allow_nan=False)
        descriptor = no_link(path, os.O_RDWR | os.O_APPEND | os.O_CREAT)
        try:
            size = os.fstat(descriptor).st_size
            is_cut = size > 0 and os.pread(descriptor, 1, size - 1) != b"\n"
            write_all(descriptor, memoryview((is_cut * "\n" + text + "\n").encode()))
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
    except OSError as error:
        say(f"{path} cannot be written ({error.strerror}), so this decision is not in it")
        return False
    except (TypeError, ValueError) as error:  # `inputs` is not plain data
        say(f"{path} cannot hold the decision ({error})")
        return False
    return True


def read(run_dir: Path) -> list[RecoveryLine]:
    """Returns the lines of a run, oldest first; damaged lines and a missing file give none."""
    try:
        with open_regular(run_dir / RECOVERY) as descriptor:
            size = os.fstat(descriptor).st_size
            content = bytearray(min(size, MOST_BYTES))
            done = read_into(descriptor, memoryview(content), size - len(content))
    except (OSError, ValueError):
        return []
    found = map(_line_of, bytes(content[:done]).split(b"\n"))
    return [line for line in found if line is not None]


def _line_of(text: bytes) -> RecoveryLine | None:
    try:
        row = json.loads(text)
        check_depth(row)
        cause, failed_at = row["cause"], row["failed_at"]
        line = RecoveryLine(
            at=_time(row["at"]),
            start=int(row["start"]),
            decision=str(row["decision"]),
            sentence=str(row["sentence"]),
            cause=None if cause is None else _cause_of(cause),
            nodes=tuple(map(str, row["nodes"])),
            failed_at=None if failed_at is None else _time(failed_at),
            seconds={str(name): _time(one) for name, one in row["seconds"].items()},
            inputs=row.get("inputs"),
        )
    except (KeyError, TypeError, ValueError, AttributeError, RecursionError, OverflowError):
        return None
    is_known = line.decision in DECISIONS and isinstance(line.inputs, dict | None)
    return line if is_known else None


def _cause_of(row: Mapping[str, Any]) -> Cause:
    rank = row["rank"]
    return Cause(
        str(row["kind"]), str(row["host"]), None if rank is None else int(rank), str(row["error"])
    )


def _time(value: Any) -> float:
    """Returns a finite number. Raises ValueError for others, such as the NaN of a strange file."""
    number = float(value)
    if not math.isfinite(number):
        raise ValueError(f"{value} is not a time")
    return number
