"""Divides what the interruptions of a run cost by their causes, and by what the time went into.

An interruption is the end of a start that another one follows. Its cause comes from the lines of
`recovery.jsonl` between the two; without any, the way in which the earlier start ended may tell it.

| cause     | the earlier start                                                                 |
|-----------|-----------------------------------------------------------------------------------|
| `killed`  | lost a rank to a signal, such as SIGKILL                                          |
| `node`    | lost a node                                                                       |
| `hang`    | was ended by the watchdog                                                         |
| `error`   | ended with an error, or decided to end                                            |
| `requeue` | was asked by a signal to save: preemption, a time limit, Ctrl-C                   |
| `user`    | was finished or refused; also the time after the launcher has given up            |
| `unknown` | ended without a trace                                                             |

| phase      | seconds of                                                                       |
|------------|----------------------------------------------------------------------------------|
| `lost`     | steps that are repeated                                                          |
| `detect`   | the end of the last step until the failure was noticed                           |
| `end`      | ending all processes                                                             |
| `probe`    | the test of the nodes                                                            |
| `decide`   | the decision                                                                     |
| `queue`    | waiting for somebody, such as Slurm, to begin again                              |
| `start`    | the decision until the process of rank 0                                         |
| `gap`      | the end of the last step until the process of rank 0, if nobody knows more       |
| `load`     | that process until the checkpoint is loaded                                      |
| `ready`    | then until the first step begins                                                 |
| `start_up` | both, in a start of an older version                                             |
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from parallel3d.metrics.recovery_log import RecoveryLine

CAUSES = ("killed", "node", "hang", "error", "requeue", "user", "unknown")
NAMES_OF_CAUSES = {cause: cause for cause in CAUSES}
NAMES_OF_CAUSES |= {"killed": "killed rank", "unknown": "unknown cause"}
BETWEEN = ("detect", "end", "probe", "decide", "queue", "start", "gap")
START_UP = ("load", "ready", "start_up")
PHASES = ("lost", *BETWEEN, *START_UP)
# Causes by the kinds of `run.failure.RankFailure`, and by a start's last status.
_OF_KINDS = {kind: kind for kind in ("killed", "node", "hang", "error", "user")}
_OF_KINDS["decided"] = "error"
_OF_STATUS = {"stopped": "requeue", "finished": "user", "interrupted": "user"}
SIGNALLED = 128  # exit codes above it are those of processes that a signal ended
_OVER = ("requeue", "stop", "done")  # decisions after which others begin the next start


class Cost(NamedTuple):
    """What one cause has cost: the number of interruptions, and the seconds by phase."""

    times: int
    seconds: Mapping[str, float]

    def sum(self, phases: Iterable[str] = PHASES) -> float:
        return sum(self.seconds.get(phase, 0.0) for phase in phases)

    def is_failure(self, cause: str) -> bool:
        """Returns whether this is the cost of failures; one without a trace has lost steps."""
        if cause in ("requeue", "unknown"):
            return self.seconds.get("lost", 0.0) > 0
        return cause != "user"

    def row(self) -> dict[str, Any]:
        """Returns plain data for JSON: phases that took no time are left out."""
        rounded = {f"{phase}_s": round(one, 3) for phase, one in self.seconds.items()}
        return {"times": self.times} | {phase: one for phase, one in rounded.items() if one}

    @classmethod
    def of_row(cls, row: Mapping[str, Any]) -> Cost:
        """Returns the cost that a `row` describes. May raise one of `starts.DAMAGED`."""
        seconds = {phase: float(row[f"{phase}_s"]) for phase in PHASES if f"{phase}_s" in row}
        return cls(int(row["times"]), seconds)


Costs = Mapping[str, Cost]  # by cause


def costs_of(rows: Mapping[str, Mapping[str, Any]]) -> Costs:
    """Returns the costs that rows describe by cause. May raise one of `starts.DAMAGED`."""
    return {str(cause): Cost.of_row(row) for cause, row in rows.items()}


def total(costs: Iterable[Cost]) -> Cost:
    """Adds costs; phases keep their order, and those that took no time are left out."""
    costs = list(costs)
    seconds = {phase: sum(one.seconds.get(phase, 0.0) for one in costs) for phase in PHASES}
    used = {phase: one for phase, one in seconds.items() if one}
    return Cost(sum(one.times for one in costs), used)


def sum_of(costs: Iterable[Costs]) -> Costs:
    """Adds the costs of several interruptions for each cause; causes keep their order."""
    costs = list(costs)
    return {
        cause: total(each[cause] for each in costs if cause in each)
        for cause in CAUSES
        if any(cause in each for each in costs)
    }


class Interruption(NamedTuple):
    """An interruption, as the start after it knows it.

    Attributes:
        cause: why the earlier start ended; if further starts failed in between, it is not theirs.
        host: the host of the failure; "" if it is unknown.
        decision: the last decision in between; "" if there is no record of one.
        costs: what it cost, for each cause.
    """

    cause: str
    host: str
    decision: str
    costs: Costs


def interruption(
    lost_s: float,
    heard_of: float,
    begun: float,
    lines: Sequence[RecoveryLine],
    status: str | None,
    start_up: Mapping[str, float],
) -> Interruption:
    """Returns the interruption between two starts; all its seconds together are those of the call.

    Args:
        lost_s: seconds of steps that are repeated.
        heard_of: Unix time of the last sign of the earlier start.
        begun: Unix time at which the process of rank 0 of the later one began; not earlier.
        lines: the decisions in between. Their clock may be off, so none is taken for earlier than
            `heard_of` or later than `begun`.
        status: how the earlier start ended; None if it could not say so.
        start_up: seconds of the later one's start by phase.
    """
    times = dict.fromkeys(CAUSES, 0)
    seconds = {cause: dict.fromkeys(PHASES, 0.0) for cause in CAUSES}
    cause, first, host, before, at = _OF_STATUS.get(status or "", "unknown"), "", "", "", heard_of
    for line in lines:
        took = min(max(line.at, at), begun) - at
        waiting = _waiting(cause, before)
        known = _cause_of(line)
        if known is not None:
            cause = known
            times[cause] += 1
            first, host = first or cause, host or (line.cause.host if line.cause else "")
        is_queued = before in _OVER
        for phase, one in _divided(took, line, is_queued or line.decision == "first").items():
            seconds[waiting if is_queued else cause][phase] += one
        at, before = at + took, line.decision
    if not first:
        times[cause] += 1
    first = first or cause
    is_waiting = before in _OVER or (not lines and cause in ("requeue", "user"))
    last = "queue" if is_waiting else "start" if lines else "gap"
    seconds[_waiting(cause, before)][last] += begun - at
    seconds[first]["lost"] += lost_s
    for phase, one in start_up.items():
        seconds[cause][phase] += one
    costs = {name: Cost(times[name], seconds[name]) for name in CAUSES}
    used = sum_of([{name: one for name, one in costs.items() if one.times or one.sum()}])
    return Interruption(first, host, before, used)


def _cause_of(line: RecoveryLine) -> str | None:
    """Returns the cause of the end that a decision follows; None if it names no new one."""
    known = None if line.cause is None else _OF_KINDS.get(line.cause.kind, "unknown")
    is_again = line.decision not in ("first", "requeue", "done")
    if is_again and known in (None, "unknown") and _code(line) > SIGNALLED:
        return "killed"  # it left no record
    if known is None and is_again:
        return "unknown"
    return known or {"requeue": "requeue", "done": "user"}.get(line.decision)


def _code(line: RecoveryLine) -> int:
    """Returns the exit code of the start that has ended, or 0 if it is unknown."""
    ended = (line.inputs or {}).get("ended")
    code = ended.get("code") if isinstance(ended, dict) else None
    return code if isinstance(code, int) else 0


def _waiting(cause: str, decision: str) -> str:
    """Returns the cause of the time that passes after a decision, until others begin again."""
    return "user" if decision in ("stop", "done") else cause


def _divided(took: float, line: RecoveryLine, is_queued: bool) -> dict[str, float]:
    """Divides the seconds before a decision; those that it does not name were the detection's.

    In a job that Slurm or somebody else begins again, they were the queue's.
    """
    if not line.seconds and not is_queued:
        return {"gap": took}
    found, left = {}, took
    for phase in ("decide", "probe", "end"):
        found[phase] = min(max(0.0, line.seconds.get(phase, 0.0)), left)
        left -= found[phase]
    return found | {"queue" if is_queued else "detect": left}
