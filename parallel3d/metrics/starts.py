"""Writes `starts.jsonl`, which has the times of each start of a run, and computes the goodput.

Each start that reached its first step has a line with `first_step`, `last_step`, `started`, `host`,
`layout`, `config` (the name of its configuration), and these times:

- `begun`: Unix time at which the process of rank 0 began.
- `at`: Unix time of the first step.
- `lost_s`: seconds of the steps of earlier starts that this start repeats.
- `between_s`: seconds since the last sign of life of the preceding start.

At each checkpoint and at the end, the start adds a line with `account` (the Unix time), `step`, and
its sums so far: `evaluation_s`, `checkpoint_s`, `skipped_s` (of steps that changed nothing) and
`rolled_back_s` (of steps that were rolled back). Older versions did not write these lines.
"""

from __future__ import annotations

import dataclasses
import datetime
import itertools
import json
from array import array
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

STARTS = "starts.jsonl"
# a damaged line raises one of these
DAMAGED = (KeyError, TypeError, ValueError, AttributeError)
# seconds of one start, by activity
SUMS = ("evaluation_s", "checkpoint_s", "skipped_s", "rolled_back_s")
PARTS = ("steps", "lost", "start_up", "evaluation", "checkpoint", "between", "other")


class Goodput(NamedTuple):
    """Wall time of a run over all its starts, in seconds by activity.

    The activity `steps` counts only steps that are in metrics.jsonl, and that were neither skipped
    nor rolled back.
    """

    starts: int
    wall_s: float
    seconds: Mapping[str, float]  # by activity, as in PARTS

    @property
    def value(self) -> float | None:
        """Returns the share of the wall time that made progress, or None if no time has passed."""
        return self.seconds["steps"] / self.wall_s if self.wall_s > 0 else None

    def row(self) -> dict[str, Any]:
        """Returns the figures for summary.json."""
        rounded = {f"{part}_s": round(self.seconds[part], 3) for part in PARTS}
        return {"value": self.value, "wall_s": round(self.wall_s, 3), **rounded} | {
            "starts": self.starts
        }


@dataclass
class Start:
    """One start, as its lines in `starts.jsonl` describe it."""

    line: Mapping[str, Any]  # the first line of the start
    begun: float
    at: float  # Unix time of its first step
    lost_s: float = 0.0
    between_s: float = 0.0
    account: float = 0.0  # Unix time of its last line, when `step` was its last step
    step: int = 0
    sums: dict[str, float] = field(default_factory=lambda: dict.fromkeys(SUMS, 0.0))


def starts_of(path: Path) -> list[Start]:
    """Returns the starts in a file, oldest first; damaged lines are left out."""
    try:
        lines = path.read_text("utf-8", "replace").splitlines()
    except OSError:
        return []
    found: list[Start] = []
    for line in lines:
        try:
            row = json.loads(line)
            if "account" in row:
                start = found[-1]
                start.account, start.step = float(row["account"]), int(row["step"])
                start.sums = {name: float(row[name]) for name in SUMS}
            else:
                found.append(_start(row))
        except (*DAMAGED, IndexError, RecursionError):
            continue
    return found


def _start(row: Mapping[str, Any]) -> Start:
    first, started = int(row["first_step"]), datetime.datetime.fromisoformat(str(row["started"]))
    at = float(row.get("at", started.timestamp()))
    begun = float(row.get("begun", at))
    lost, between = float(row.get("lost_s", 0.0)), float(row.get("between_s", 0.0))
    return Start(row, begun, at, lost, between, account=at, step=first - 1)


def goodput(starts: list[Start], steps_s: float, now: float | None = None) -> Goodput | None:
    """Returns the goodput of a run, or None if it has no start.

    Args:
        starts: the starts of the run, oldest first.
        steps_s: seconds of the steps in metrics.jsonl that were not skipped.
        now: Unix time up to which the run is counted, or None for the last time in starts.jsonl.
    """
    if not starts:
        return None
    now = starts[-1].account if now is None else now
    wall = max(0.0, now - starts[0].begun)
    rolled_back = sum(start.sums["rolled_back_s"] for start in starts)
    skipped = sum(start.sums["skipped_s"] for start in starts)
    seconds = {
        "steps": max(0.0, steps_s - rolled_back),
        "lost": rolled_back + skipped + sum(start.lost_s for start in starts),
        "start_up": sum(max(0.0, start.at - start.begun) for start in starts),
        "evaluation": sum(start.sums["evaluation_s"] for start in starts),
        "checkpoint": sum(start.sums["checkpoint_s"] for start in starts),
        "between": sum(start.between_s for start in starts),
    }
    seconds["other"] = max(0.0, wall - sum(seconds.values()))
    return Goodput(len(starts), wall, seconds)


class Failures(NamedTuple):
    """The failures of a run over all its starts.

    Attributes:
        failed: number of starts that had to repeat steps, because an earlier one had failed.
        rank_s: seconds in which the starts trained, times their numbers of ranks.
    """

    failed: int
    rank_s: float


def failures_of(starts: list[Start]) -> Failures:
    """Returns the failures of a run; a start that a signal stopped has saved, and is none."""
    rank_s = 0.0
    for start, after in itertools.zip_longest(starts, starts[1:]):
        end = start.account if after is None else after.begun - after.between_s
        layout = start.line.get("layout")
        ranks = layout.get("world_size") if isinstance(layout, Mapping) else None
        rank_s += max(0.0, end - start.at) * (ranks if isinstance(ranks, int) else 1)
    return Failures(sum(start.lost_s > 0 for start in starts[1:]), rank_s)


def seconds_of(row: Mapping[str, Any]) -> float:
    """Returns the seconds of a step by its line, or 0 for other lines and skipped steps."""
    seconds = row.get("step_time_s")
    is_time = isinstance(seconds, (int, float)) and not row.get("skipped")
    return float(seconds or 0.0) if is_time else 0.0


class Account:
    """Accounts for the wall-clock seconds of one start, on rank 0.

    Args:
        earlier: the preceding starts, oldest first.
        begun: Unix time at which the process of rank 0 began.
    """

    def __init__(self, earlier: list[Start], begun: float) -> None:
        self._earlier = earlier
        self._begun = begun
        # Seconds of earlier starts' steps: those that stay, those that this start repeats, and
        # those after the last `account` line.
        self._kept_s = 0.0
        self._again_s = 0.0
        self._late_s = 0.0
        self._before = 0  # number of steps before this start
        self._step = 0  # number of the last step
        # seconds of each step of this start; 0 for skipped and rolled-back steps
        self._seconds: array[float] = array("d")
        self._steps_s = 0.0
        self._sums = dict.fromkeys(SUMS, 0.0)
        self._start: Start | None = None

    def kept(self, row: Mapping[str, Any]) -> None:
        """Adds a step of an earlier start whose line stays in metrics.jsonl."""
        self._kept_s += seconds_of(row)

    def dropped(self, row: Mapping[str, Any]) -> None:
        """Adds a step of an earlier start that this start repeats."""
        self._again_s += seconds_of(row)
        if self._earlier and row["step"] > self._earlier[-1].step:
            # The start's last `account` line is older than this step.
            self._late_s += float(row.get("step_time_s") or 0.0)

    def begin(self, now: float, line: Mapping[str, Any]) -> dict[str, Any]:
        """Marks the start of the first step; returns `line` with the times, for `starts.jsonl`."""
        between = 0.0
        if self._earlier:
            heard_of = self._earlier[-1].account + self._late_s
            between = max(0.0, self._begun - heard_of)
        times = {"begun": self._begun, "at": now}
        times |= {"lost_s": self._again_s, "between_s": between}
        whole = {**line, **{name: round(value, 3) for name, value in times.items()}}
        self._start = _start(whole)
        self._before = self._step = self._start.step
        return whole

    def step(self, row: Mapping[str, Any]) -> None:
        """Adds a step of this start; `row` is its line in metrics.jsonl."""
        seconds = float(row["step_time_s"])
        skipped = bool(row.get("skipped"))
        if skipped:
            self._sums["skipped_s"] += seconds
        self._seconds.append(0.0 if skipped else seconds)
        self._steps_s += self._seconds[-1]
        self._step = row["step"]

    def spent(self, part: str, seconds: float) -> None:
        """Adds seconds that were spent on `part`: "evaluation" or "checkpoint"."""
        self._sums[f"{part}_s"] += seconds

    def rolled_back(self, step: int) -> None:
        """Counts the steps after `step` as rolled back."""
        first = max(0, step - self._before)
        self._sums["rolled_back_s"] += sum(self._seconds[first:])
        self._seconds[first:] = array("d", [0.0] * (len(self._seconds) - first))

    def line(self, now: float) -> dict[str, Any]:
        """Returns the `account` line of `starts.jsonl`, with the sums so far."""
        sums = {name: round(seconds, 3) for name, seconds in self._sums.items()}
        return {"account": round(now, 3), "step": self._step, **sums}

    def goodput(self, now: float) -> Goodput | None:
        """Returns the goodput of all starts up to now, or None before this start's first step."""
        if self._start is None:
            return None
        own = dataclasses.replace(self._start, sums=self._sums)
        return goodput([*self._earlier, own], self._kept_s + self._steps_s, now)
