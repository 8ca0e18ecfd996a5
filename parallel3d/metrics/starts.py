"""Writes `starts.jsonl`, which has the times of each start of a run, and computes the goodput.

Each start that reached its first step has a line with `first_step`, `last_step`, `started`, `host`,
`layout`, `config` (the name of its configuration), and these times:

- `begun`: Unix time at which the process of rank 0 began.
- `at`: Unix time of the first step.
- `loaded`: Unix time at which the checkpoint was loaded, or the new model built.
- `lost_s`: seconds of the steps of earlier starts that this start repeats.
- `between_s`: seconds since the last sign of life of the preceding start.
- `ahead_s`: seconds by which that sign is in this start's future, as its host's clock was ahead.
- `decided`: Unix time of the last decision in `recovery.jsonl`.

Each start but the first also has what is known of the interruption before it (`lost_time`):
`cause`, `cause_host`, `decision`, and `costs`, which has for each cause `times` and the seconds by
phase.

At each checkpoint and at the end, the start adds a line with `account` (the Unix time), `step`, and
its sums so far: `evaluation_s`, `checkpoint_s`, `skipped_s` (of steps that changed nothing) and
`rolled_back_s` (of steps that were rolled back), `saves` (the number of checkpoints) and
`first_step_s`. The line at its end also has its `status`. Older versions wrote less.
"""

from __future__ import annotations

import dataclasses
import datetime
import itertools
import json
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from parallel3d.metrics import lost_time
from parallel3d.metrics.lost_time import Cost, Costs, interruption
from parallel3d.metrics.recovery_log import RecoveryLine

STARTS = "starts.jsonl"
# a damaged line raises one of these
DAMAGED = (KeyError, TypeError, ValueError, AttributeError, OverflowError, RecursionError)
MOST_AHEAD_S = 5.0  # a clock that is more ahead is wrong, and its gaps are unknown
# seconds of one start, by activity
SUMS = ("evaluation_s", "checkpoint_s", "skipped_s", "rolled_back_s")
PARTS = ("steps", "lost", "start_up", "evaluation", "checkpoint", "between", "other")


class Goodput(NamedTuple):
    """Wall time of a run over all its starts, in seconds by activity.

    The activity `steps` counts only steps that are in metrics.jsonl, and that were neither skipped
    nor rolled back. `costs` divides `lost` (without skipped steps and those that were rolled back),
    `between` and the `start_up` of all starts but the first by what interrupted the run.
    """

    starts: int
    wall_s: float
    seconds: Mapping[str, float]  # by activity, as in PARTS
    costs: Costs

    @property
    def value(self) -> float | None:
        """Returns the share of the wall time that made progress, or None if no time has passed."""
        return self.seconds["steps"] / self.wall_s if self.wall_s > 0 else None

    @property
    def shares(self) -> dict[str, float]:
        """Returns the share of the wall time that each cause has cost, without what users chose."""
        lost = {cause: cost.sum() for cause, cost in self.costs.items() if cause != "user"}
        return {cause: seconds / self.wall_s for cause, seconds in lost.items() if self.wall_s > 0}

    def row(self) -> dict[str, Any]:
        """Returns the figures for summary.json; without an interruption it has no `causes`."""
        rounded = {f"{part}_s": round(self.seconds[part], 3) for part in PARTS}
        causes = {cause: cost.row() for cause, cost in self.costs.items()}
        row = {"value": self.value, "wall_s": round(self.wall_s, 3), **rounded}
        row["starts"] = self.starts
        return row | {"causes": causes} if causes else row


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
    loaded: float | None = None  # Unix time
    ahead_s: float = 0.0
    decided: float | None = None  # Unix time
    costs: Costs = field(default_factory=dict)
    saves: int = 0
    first_step_s: float | None = None
    status: str | None = None  # how it ended


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
                account, step = float(row["account"]), int(row["step"])
                sums = {name: float(row[name]) for name in SUMS}
                start.account, start.step, start.sums = account, step, sums
                start.saves, start.first_step_s = (
                    int(row.get("saves", 0)),
                    _number(row, "first_step_s"),
                )
                start.status = str(row["status"]) if "status" in row else None
            else:
                found.append(_start(row))
        except (*DAMAGED, IndexError):
            continue
    return found


def _start(row: Mapping[str, Any]) -> Start:
    first, started = int(row["first_step"]), datetime.datetime.fromisoformat(str(row["started"]))
    at = float(row.get("at", started.timestamp()))
    begun = float(row.get("begun", at))
    lost, between = float(row.get("lost_s", 0.0)), float(row.get("between_s", 0.0))
    loaded, decided = _number(row, "loaded"), _number(row, "decided")
    if "costs" in row:
        costs = lost_time.costs_of(row["costs"])
    else:  # an older version
        gap = {"lost": lost, "gap": between, "start_up": max(0.0, at - begun)}
        costs = {"unknown": Cost(1, {phase: one for phase, one in gap.items() if one})}
    start = Start(row, begun, at, lost, between, account=at, step=first - 1)
    start.loaded, start.decided, start.costs = loaded, decided, costs
    start.ahead_s = float(row.get("ahead_s", 0.0))
    return start


def _number(row: Mapping[str, Any], name: str) -> float | None:
    return None if row.get(name) is None else float(row[name])


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
    later = starts[1:]  # of the time before the first one nothing is known
    rolled_back = sum(start.sums["rolled_back_s"] for start in starts)
    skipped = sum(start.sums["skipped_s"] for start in starts)
    seconds = {
        "steps": max(0.0, steps_s - rolled_back),
        "lost": rolled_back + skipped + sum(start.lost_s for start in later),
        "start_up": sum(max(0.0, start.at - start.begun) for start in starts),
        "evaluation": sum(start.sums["evaluation_s"] for start in starts),
        "checkpoint": sum(start.sums["checkpoint_s"] for start in starts),
        "between": sum(start.between_s for start in later),
    }
    # The clock of the last host may be behind that of the first one.
    wall = max(now - starts[0].begun, sum(seconds.values()))
    seconds["other"] = wall - sum(seconds.values())
    costs = lost_time.sum_of(start.costs for start in later)
    return Goodput(len(starts), wall, seconds, costs)


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


def _after(before: Start, decisions: Sequence[RecoveryLine]) -> Sequence[RecoveryLine]:
    """Returns the decisions that were made after a start began.

    The start has named the last one before it, as its host's clock is not that of the decisions.
    """
    for place in range(len(decisions), 0, -1):
        if before.decided is not None and abs(decisions[place - 1].at - before.decided) < 1e-3:
            return decisions[place:]
    return [line for line in decisions if line.at > before.at]


class Account:
    """Accounts for the wall-clock seconds of one start, on rank 0.

    Args:
        earlier: the preceding starts, oldest first.
        begun: Unix time at which the process of rank 0 began.
        loaded: Unix time at which it had its checkpoint; None if that is unknown.
        decisions: all lines of the run's `recovery.jsonl`.
    """

    def __init__(
        self,
        earlier: list[Start],
        begun: float,
        loaded: float | None = None,
        decisions: Sequence[RecoveryLine] = (),
    ) -> None:
        self._earlier = earlier
        self._begun = begun
        self._loaded = loaded
        self._decisions = decisions
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
        self._saves = 0
        self._first_step_s: float | None = None
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
        times = {"begun": self._begun, "at": now, "lost_s": self._again_s, "between_s": 0.0}
        if self._loaded is not None:
            times["loaded"] = self._loaded
        if self._decisions:
            times["decided"] = self._decisions[-1].at
        known: dict[str, Any] = {}
        if self._earlier:
            before = self._earlier[-1]
            heard_of = before.account + self._late_s + before.ahead_s
            times["between_s"] = max(0.0, self._begun - heard_of)
            # The next gap makes up for it, so that all gaps together stay those of the wall clock.
            if 0 < heard_of - self._begun <= MOST_AHEAD_S:
                times["ahead_s"] = heard_of - self._begun
            found = interruption(
                self._again_s,
                self._begun - times["between_s"],
                self._begun,
                _after(before, self._decisions),
                before.status if not self._late_s else None,
                self._start_up(now),
            )
            known = {"cause": found.cause, "cause_host": found.host, "decision": found.decision}
            known["costs"] = {cause: cost.row() for cause, cost in found.costs.items()}
        rounded = {name: round(value, 3) for name, value in times.items()}
        whole = {**line, **rounded, **{name: one for name, one in known.items() if one}}
        self._start = _start(whole)
        self._before = self._step = self._start.step
        return whole

    def _start_up(self, now: float) -> dict[str, float]:
        """Returns the seconds of this start until its first step, at `now`, by phase."""
        if self._loaded is None:
            return {"start_up": max(0.0, now - self._begun)}
        loaded = min(max(self._loaded, self._begun), max(now, self._begun))
        return {"load": loaded - self._begun, "ready": max(0.0, now - loaded)}

    def step(self, row: Mapping[str, Any]) -> None:
        """Adds a step of this start; `row` is its line in metrics.jsonl."""
        seconds = float(row["step_time_s"])
        if self._first_step_s is None:
            self._first_step_s = seconds
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

    def saves(self) -> None:
        """Counts a checkpoint."""
        self._saves += 1

    def line(self, now: float, status: str | None = None) -> dict[str, Any]:
        """Returns the `account` line of `starts.jsonl`, with the sums so far."""
        sums = {name: round(seconds, 3) for name, seconds in self._sums.items()}
        row = {"account": round(now, 3), "step": self._step, **sums, "saves": self._saves}
        if self._first_step_s is not None:
            row["first_step_s"] = round(self._first_step_s, 3)
        return row if status is None else row | {"status": status}

    def goodput(self, now: float) -> Goodput | None:
        """Returns the goodput of all starts up to now, or None before this start's first step."""
        if self._start is None:
            return None
        own = dataclasses.replace(self._start, sums=self._sums)
        return goodput([*self._earlier, own], self._kept_s + self._steps_s, now)
