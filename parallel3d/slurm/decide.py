"""Decides how a job goes on: on which nodes its ranks start again, or why it ends.

The process of the batch script asks before the first start, and after the end of each. A decision
depends on its inputs alone, and both are kept in `recovery.jsonl`, so that each decision can be
repeated and explained.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, Self

from parallel3d.run.failure import RankFailure

Action = Literal["run", "requeue", "stop", "done"]
How = Literal["first", "same", "replace", "smaller"]


# Inputs


@dataclass(frozen=True)
class Answer:
    """A node's answer to the probe; `why` says which part of its self-test failed."""

    ok: bool
    why: str = ""


@dataclass(frozen=True)
class Evidence:
    """An observation about a node, as `nodes.json` keeps it.

    Attributes:
        evidence: the observation, as the end of a sentence about the node: "does not answer".
        time: Unix time of the decision.
        start: number of the start that followed the decision.
        decisive: whether this alone excludes the node; otherwise it is a strike.
    """

    evidence: str
    time: float
    start: int
    decisive: bool


History = Mapping[str, tuple[Evidence, ...]]  # by node, oldest first


@dataclass(frozen=True)
class Smaller:
    """A layout for fewer nodes, with the overrides (`words`) that select it."""

    nodes: int
    words: tuple[str, ...]


@dataclass(frozen=True)
class Limits:
    """Limits that the configuration sets.

    Attributes:
        max_restarts, exclude_days: of `recovery`.
        spares: `launch.spares`.
        smaller: layouts that `recovery.shrink` allows, largest first; () if it is off.
        may_release: whether the job may give up nodes; False once Slurm has refused it.
    """

    max_restarts: int
    spares: int = 0
    exclude_days: float = 7.0
    smaller: tuple[Smaller, ...] = ()
    may_release: bool = True


@dataclass(frozen=True)
class Ended:
    """The end of a start.

    Attributes:
        code: exit code of the ranks' step.
        saved_and_asked: whether a signal stopped the ranks and they have saved (they left the
            file `requeue` in the run's folder).
        asked: name of a signal that asked the job to stop, such as "SIGUSR1"; None without one.
        cause: the failure that caused the others (`root_cause`); None if no rank left a record.
        dead: nodes that the collector of the heartbeats called dead.
        first: whether no start of this job has reached a step.
    """

    code: int
    saved_and_asked: bool = False
    asked: str | None = None
    cause: RankFailure | None = None
    dead: tuple[str, ...] = ()
    first: bool = False


@dataclass(frozen=True)
class Inputs:
    """Everything that a decision depends on.

    Attributes:
        start: number of the start that follows if the job goes on, from 1; requeues do not reset
            it.
        now: Unix time.
        batch_host: the node of the batch script, which the job can never give up.
        nodes: the nodes that are still in the job, in Slurm's order.
        needed: number of nodes that the layout needs.
        limits: limits that the configuration sets.
        used: the nodes of the last start, in its order; () before the first one.
        places: topology address of each node, such as "core.rack2.node7"; "" or missing if
            unknown.
        ended: the end of the last start; None before the first start of an allocation.
        previous: the root cause of the start before the last one in this job (`previous_cause`);
            None without one.
        answers: the answers of the nodes' self-tests; a node that is missing did not answer. None
            if nobody asked, as in a job of one node.
        states: Slurm's word for the state of each node, such as "MIXED+DRAIN".
        history: the content of `nodes.json`.
        starts_in_row, replaced_in_row: number of starts since the newest checkpoint changed, and
            how many of them had a spare in place of a bad node.
        requeued_for: nodes that a requeue of this job has already asked to leave out.
    """

    start: int
    now: float
    batch_host: str
    nodes: tuple[str, ...]
    needed: int
    limits: Limits
    used: tuple[str, ...] = ()
    places: Mapping[str, str] = field(default_factory=dict)
    ended: Ended | None = None
    previous: RankFailure | None = None
    answers: Mapping[str, Answer] | None = None
    states: Mapping[str, str] = field(default_factory=dict)
    history: History = field(default_factory=dict)
    starts_in_row: int = 0
    replaced_in_row: int = 0
    requeued_for: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """Returns the inputs as a JSON object, from which `from_json` makes them again."""
        return _lists(dataclasses.asdict(self))

    @classmethod
    def from_json(cls, found: Mapping[str, Any]) -> Self:
        """Returns the inputs in a JSON object. Raises ValueError, KeyError or TypeError."""
        ended, previous, answers = found["ended"], found["previous"], found["answers"]
        limits = dict(found["limits"])
        limits["smaller"] = tuple(
            Smaller(each["nodes"], tuple(each["words"])) for each in limits["smaller"]
        )
        if ended is not None:
            cause = ended["cause"] and RankFailure(**ended["cause"])
            ended = Ended(**{**ended, "cause": cause, "dead": tuple(ended["dead"])})
        if answers is not None:
            answers = {node: Answer(**answer) for node, answer in answers.items()}
        made = {
            "limits": Limits(**limits),
            "ended": ended,
            "previous": previous and RankFailure(**previous),
            "answers": answers,
            "history": history_from_json(found["history"]),
        }
        made |= {name: tuple(found[name]) for name in ("nodes", "used", "requeued_for")}
        return cls(**{**found, **made})


@dataclass(frozen=True)
class Decision:
    """How a job goes on.

    Attributes:
        action: "run" starts the ranks, "requeue" queues the job again, "stop" ends it after a
            failure, and "done" after success.
        sentence: the reason and the consequence, for the user.
        code: exit code of the job, unless its ranks start.
        how: for "run": "first", on the "same" nodes, with spares that "replace" nodes, or in a
            "smaller" layout; None for other actions.
        nodes: for "run": the nodes, in Slurm's order.
        words: for "run": overrides that this start needs beside the job's own.
        release: nodes that the job must give up before Slurm misses them.
        exclude: for "requeue": nodes that the next allocation should not have.
        history: new entries for `nodes.json`.
        starts_in_row, replaced_in_row: the counts of `Inputs`, with the start that follows.
    """

    action: Action
    sentence: str
    starts_in_row: int
    replaced_in_row: int
    code: int = 0
    how: How | None = None
    nodes: tuple[str, ...] = ()
    words: tuple[str, ...] = ()
    release: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()
    history: History = field(default_factory=dict)

    @property
    def name(self) -> str:
        """Returns the decision as one word, as `recovery.jsonl` has it."""
        return self.how or self.action

    def to_json(self) -> dict[str, Any]:
        """Returns the decision as a JSON object, from which `from_json` makes it again."""
        return _lists(dataclasses.asdict(self))

    @classmethod
    def from_json(cls, found: Mapping[str, Any]) -> Self:
        """Returns the decision in a JSON object. Raises ValueError, KeyError or TypeError."""
        made = {name: tuple(found[name]) for name in ("nodes", "words", "release", "exclude")}
        return cls(**{**found, **made, "history": history_from_json(found["history"])})


def history_from_json(found: Mapping[str, Any]) -> dict[str, tuple[Evidence, ...]]:
    """Returns a history that JSON holds. Raises ValueError, KeyError or TypeError."""
    return {node: tuple(Evidence(**entry) for entry in entries) for node, entries in found.items()}


def _lists(value: Any) -> Any:
    """Returns `value` with tuples replaced by lists, as JSON reads them back."""
    if isinstance(value, dict):
        return {key: _lists(item) for key, item in value.items()}
    return [_lists(item) for item in value] if isinstance(value, list | tuple) else value
