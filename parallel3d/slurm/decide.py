"""Decides how a job goes on: on which nodes its ranks start again, or why it ends.

The process of the batch script asks before the first start, and after the end of each. A decision
depends on its inputs alone, and both are kept in `recovery.jsonl`, so that each decision can be
repeated and explained.
"""

from __future__ import annotations

import dataclasses
import re
import signal
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, Self

from parallel3d.errors import USER_ERROR
from parallel3d.files import plain
from parallel3d.metrics.recovery_log import Cause, RecoveryLine
from parallel3d.run.failure import NO_RANK, RankFailure
from parallel3d.slurm.evidence import NodeFinding, evidence_of
from parallel3d.text import count

Action = Literal["run", "requeue", "stop", "done"]
How = Literal["first", "same", "replace", "smaller"]


# Inputs


@dataclass(frozen=True)
class ProbeAnswer:
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
class SmallerLayout:
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
    smaller: tuple[SmallerLayout, ...] = ()
    may_release: bool = True


@dataclass(frozen=True)
class StartEnd:
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
        previous: the root cause of the start before the last one, even of another allocation; None
            without one.
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
    ended: StartEnd | None = None
    previous: RankFailure | None = None
    answers: Mapping[str, ProbeAnswer] | None = None
    states: Mapping[str, str] = field(default_factory=dict)
    history: History = field(default_factory=dict)
    starts_in_row: int = 0
    replaced_in_row: int = 0
    requeued_for: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """Returns the inputs as a JSON object, from which `from_json` makes them again."""
        return _plain(self)

    @classmethod
    def from_json(cls, found: Mapping[str, Any]) -> Self:
        """Returns the inputs in a JSON object. Raises ValueError, KeyError or TypeError."""
        ended, previous, answers = found["ended"], found["previous"], found["answers"]
        limits = dict(found["limits"])
        limits["smaller"] = tuple(
            SmallerLayout(each["nodes"], tuple(each["words"])) for each in limits["smaller"]
        )
        if ended is not None:
            cause = ended["cause"] and RankFailure(**ended["cause"])
            ended = StartEnd(**{**ended, "cause": cause, "dead": tuple(ended["dead"])})
        if answers is not None:
            answers = {node: ProbeAnswer(**answer) for node, answer in answers.items()}
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
        return _plain(self)

    @classmethod
    def from_json(cls, found: Mapping[str, Any]) -> Self:
        """Returns the decision in a JSON object. Raises ValueError, KeyError or TypeError."""
        made = {name: tuple(found[name]) for name in ("nodes", "words", "release", "exclude")}
        return cls(**{**found, **made, "history": history_from_json(found["history"])})


def history_from_json(found: Mapping[str, Any]) -> dict[str, tuple[Evidence, ...]]:
    """Returns a history that JSON holds. Raises ValueError, KeyError or TypeError."""
    return {node: tuple(Evidence(**entry) for entry in entries) for node, entries in found.items()}


def _plain(value: Any) -> Any:
    """Returns data classes as dicts and tuples as lists, as JSON reads them back."""
    if dataclasses.is_dataclass(value):
        return {name: _plain(item) for name, item in vars(value).items()}
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, list | tuple) else value


# The decision

STRIKES = 2  # this many exclude a node if there is a spare
DAY_S = 86_400.0
# Words in the state of a node that Slurm no longer uses, as in "DOWN*" or "MIXED+DRAIN". One that
# will be powered down after its jobs, as in "MIXED+CLOUD+POWER_DOWN", is in use.
LOST_STATE = re.compile(r"\b(DOWN|DRAIN(ED|ING)?|DRNG|FAIL(ING)?)\b")
DOWN = re.compile(r"\bDOWN\b")
ASKING_CODES = (128 + signal.SIGUSR1, 128 + signal.SIGUSR2)
PLURAL = {"does": "do", "is": "are", "was": "were"}
SHOWN = 3  # nodes that a sentence names


def decide(inputs: Inputs) -> Decision:
    """Returns how the job goes on."""
    return of_end(inputs) or _with_nodes(inputs, _Standing.of(inputs))


def of_end(inputs: Inputs) -> Decision | None:
    """Returns the decision if it does not depend on the nodes, which nobody needs to ask then."""
    ended = inputs.ended
    if ended is None:
        return None
    if ended.saved_and_asked:
        return _requeue(inputs, {}, "a signal stopped the run and it has saved", 0)
    if ended.code == 0:
        return _end(inputs, "done", 0, "the run has ended")
    # Ranks that refuse their input before they have met leave no record.
    is_mistake = ended.first or ended.cause is None or ended.cause.kind == "user"
    if ended.code == USER_ERROR and is_mistake:
        return _end(inputs, "stop", USER_ERROR, f"{_cause(ended)}: the input cannot work")
    if ended.asked is not None or ended.code in ASKING_CODES:
        came = f"{ended.asked or 'a signal'} came and the ranks ended with code {ended.code}"
        return _requeue(inputs, {}, came, ended.code)
    if ended.cause is not None and ended.cause.kind == "decided":
        return _end(inputs, "stop", ended.code, _cause(ended))
    return None


@dataclass(frozen=True)
class _Standing:
    """The nodes after the evidence of this decision.

    Attributes:
        history: entries that have not expired, with the new ones.
        new: the new entries.
        lost: nodes that cannot be used now, and why; nodes that Slurm took away are among them.
        known: lost nodes that no rank used, and of which the same was known before.
        out: nodes that this decision excludes, in order, and which were in order before.
        sound: number of nodes that were in order before.
        recurs: whether the run would fail again in the same way.
    """

    history: History
    new: History
    lost: Mapping[str, str]
    known: frozenset[str]
    out: tuple[str, ...]
    sound: int
    recurs: bool

    @classmethod
    def of(cls, inputs: Inputs) -> Self:
        old = unexpired(inputs.history, inputs.now, inputs.limits.exclude_days)
        members = [*inputs.nodes, *(node for node in inputs.used if node not in inputs.nodes)]
        lost = {node: why for node in members if (why := _loss(inputs, node))}
        new = {
            node: (Evidence(why, inputs.now, inputs.start, decisive=True),)
            for node, why in lost.items()
        }
        known = {
            node
            for node, why in lost.items()
            if node not in inputs.used
            and any(entry.decisive and entry.evidence == why for entry in old.get(node, ()))
        }
        found = _finding(inputs)
        for node, why in _strikes(inputs, found, lost).items():
            new[node] = (Evidence(why, inputs.now, inputs.start, decisive=False),)
        history = merged(old, new)
        sound = [node for node in members if not is_out(old.get(node, ()))]
        out = tuple(node for node in sound if node in new and is_out(history[node]))
        return cls(history, new, lost, frozenset(known), out, len(sound), found.recurs)

    def is_excluded(self, node: str) -> bool:
        """Returns whether decisive evidence excludes a node."""
        return any(entry.decisive for entry in self.history.get(node, ()))

    def excluded(self) -> tuple[str, ...]:
        """Returns all nodes that decisive evidence or strikes exclude, in order of their names."""
        return tuple(sorted(node for node, found in self.history.items() if is_out(found)))


def unexpired(history: History, now: float, days: float) -> dict[str, tuple[Evidence, ...]]:
    """Returns the entries of the last `days`; a clock that was set back lets entries expire too."""
    kept = {
        node: tuple(entry for entry in entries if abs(now - entry.time) < days * DAY_S)
        for node, entries in history.items()
    }
    return {node: entries for node, entries in kept.items() if entries}


def merged(history: History, new: History) -> dict[str, tuple[Evidence, ...]]:
    """Returns a history with new entries; of equal decisive ones, the newest stays."""
    names = [*history, *(node for node in new if node not in history)]
    return {node: _newest(history.get(node, ()), new.get(node, ())) for node in names}


def _newest(old: tuple[Evidence, ...], new: tuple[Evidence, ...]) -> tuple[Evidence, ...]:
    again = {entry.evidence for entry in new if entry.decisive}
    return (*(one for one in old if not (one.decisive and one.evidence in again)), *new)


def is_out(entries: Iterable[Evidence]) -> bool:
    """Returns whether the entries of a node exclude it."""
    found = list(entries)
    return any(entry.decisive for entry in found) or len(found) >= STRIKES


def _loss(inputs: Inputs, node: str) -> str:
    """Returns why a node cannot be used now, as the end of a sentence, or "" if it can."""
    if node not in inputs.nodes:
        return "was taken out of the job by Slurm"
    state = inputs.states.get(node, "").upper()
    if LOST_STATE.search(state):
        return f"is {plain(state)} in Slurm"
    if inputs.answers is None:
        return ""
    answer = inputs.answers.get(node)
    if answer is None:
        return "does not answer"
    return "" if answer.ok else f"failed its self-test ({plain(answer.why)})"


def _finding(inputs: Inputs) -> NodeFinding:
    """Returns what the root cause says."""
    cause = inputs.ended.cause if inputs.ended is not None else None
    if cause is None:
        return NodeFinding("never")
    previous = inputs.previous
    if inputs.starts_in_row == 0 and previous is not None and not previous.phase:
        previous = None  # a checkpoint was made since, so it was not the same step
    return evidence_of(cause, inputs.used, previous)


def _strikes(inputs: Inputs, found: NodeFinding, lost: Mapping[str, str]) -> dict[str, str]:
    """Returns the nodes that the root cause speaks against, and its words."""
    ended = inputs.ended
    if ended is None:
        return {}
    cause, struck = ended.cause, {}
    # Peers of a node that has died may fail in a collective before the node is called dead.
    explained = found.is_collective and any(node in lost for node in inputs.used)
    if cause is not None and found.weight == "strike" and found.node is not None and not explained:
        struck[found.node] = _observed(cause, found)
    if cause is None or cause.kind == "node" or cause.is_echo:
        struck |= {node: "was called dead" for node in ended.dead if node not in struck}
    return {node: struck[node] for node in inputs.nodes if node in struck and node not in lost}


def _observed(cause: RankFailure, found: NodeFinding) -> str:
    """Returns a failure as the end of a sentence about its node."""
    if cause.kind == "node":
        return plain(cause.error)
    if cause.kind == "killed":
        return f"had rank {cause.rank}, which {plain(cause.error)}"
    return plain(f"had {found.what} ({cause.error})")


def _with_nodes(inputs: Inputs, standing: _Standing) -> Decision:
    """Decides by what is left of the nodes."""
    ended, limits = inputs.ended, inputs.limits
    code = ended.code if ended is not None and ended.code else 1
    seen = _seen(inputs, standing)
    run = _run(inputs, standing, seen)
    # A node with strikes is only left out if another takes its place.
    stays = run.nodes if run is not None else inputs.nodes
    out = [node for node in standing.out if node in standing.lost or node not in stays]
    # Those that Slurm itself takes away, as before a maintenance, are not misjudged.
    out = [node for node in out if not LOST_STATE.search(inputs.states.get(node, "").upper())]
    if len(out) * 2 > standing.sound:
        number = f"{len(out)} of {count(standing.sound, 'node')}"
        if ended is None and inputs.answers is not None:
            return _unasked(inputs, number)
        said = _join(*seen, f"{number} would be left out at once: it is not the nodes")
        return _end(inputs, "stop", code, said)
    if standing.recurs:
        again = "the same error at the same step as in the start before, so it would come again"
        user = ended is not None and ended.cause is not None and ended.cause.kind == "user"
        return _end(inputs, "stop", USER_ERROR if user else code, _join(*seen, again), standing)
    replaced = inputs.replaced_in_row if run is None else run.replaced_in_row
    in_row = inputs.starts_in_row - min(replaced, limits.spares)
    if in_row > limits.max_restarts:
        told = f"{count(inputs.starts_in_row, 'start')} in a row came to no new checkpoint"
        return _end(inputs, "stop", code, _join(*seen, f"{told}; not started again"), standing)
    if run is None:
        return _too_few(inputs, standing, seen, code)
    if (silent := _silent(inputs)) and not limits.may_release:
        # Slurm would end the job within minutes, and queue it again with the same nodes.
        kept = f"Slurm does not let the job give up {_names(silent)}"
        if ended is not None or _new_to_slurm(inputs, standing):
            return _requeue(inputs, standing.new, _join(*seen, kept), code, standing.excluded())
    return run


def _unasked(inputs: Inputs, number: str) -> Decision:
    """Decides as if nobody had asked the nodes, of which most do not answer or fail their test.

    Nothing has failed yet. A disk from which all nodes read may be slow, or the question wrong, and
    a job that has waited in the queue must not end by that.
    """
    inputs = dataclasses.replace(inputs, answers=None)
    found = _with_nodes(inputs, _Standing.of(inputs))
    said = f"{number} do not answer or fail their self-test, and nothing has failed yet"
    return dataclasses.replace(found, sentence=_join(said, found.sentence))


def _too_few(inputs: Inputs, standing: _Standing, seen: list[str], code: int) -> Decision:
    """Decides if no layout fits the nodes that are left."""
    left = [node for node in inputs.nodes if node not in standing.lost]
    left = [node for node in left if not standing.is_excluded(node)]
    few = f"{len(left)} of the {count(inputs.needed, 'node')} that the layout needs can be used"
    # Slurm has given the same nodes again, and no start came between.
    if inputs.ended is None and not _new_to_slurm(inputs, standing):
        said = f"{few}, although the job was queued again without the others"
        return _end(inputs, "stop", code, _join(*seen, said), standing)
    return _requeue(inputs, standing.new, _join(*seen, few), code, standing.excluded())


def _new_to_slurm(inputs: Inputs, standing: _Standing) -> bool:
    """Returns whether a requeue can ask for something that no requeue has asked for yet."""
    return bool(set(standing.excluded()) - set(inputs.requeued_for))


def _run(inputs: Inputs, standing: _Standing, seen: list[str]) -> Decision | None:
    """Returns the next start, or None if no layout fits the nodes that are left."""
    usable = [node for node in inputs.nodes if node not in standing.lost]
    barred = [node for node in usable if standing.is_excluded(node)]
    others = [node for node in usable if node not in barred]
    good = [node for node in others if not is_out(standing.history.get(node, ()))]
    # Strikes leave a node out only if there are others.
    struck = sorted(
        (node for node in others if node not in good),
        key=lambda node: (len(standing.history[node]), node not in inputs.used),
    )
    layouts = (SmallerLayout(inputs.needed, ()), *inputs.limits.smaller)
    fits = next((each for each in layouts if each.nodes <= len(others)), None)
    if fits is None and not _new_to_slurm(inputs, standing):
        # A requeue has asked for other nodes in vain.
        fits = next((each for each in layouts if each.nodes <= len(usable)), None)
    if fits is None:
        return None
    forced = [*struck, *barred][: max(0, fits.nodes - len(good))]
    chosen = _chosen(inputs, [*good, *forced], fits.nodes)
    spoken = []
    if extra := [node for node in forced if node in barred]:
        were = "is used although it was" if len(extra) == 1 else "are used although they were"
        spoken.append(f"{_names(extra)} {were} left out, as there is no other")
    if again := [node for node in forced if node in struck]:
        spoken.append(f"no spare is left for {_names(again)}")
    how = _how(inputs, chosen, fits)
    hardware = any(node in standing.out for node in inputs.used)
    counts = how == "replace" and hardware and inputs.replaced_in_row < inputs.limits.spares
    return Decision(
        "run",
        _join(*seen, *spoken, _next_start(inputs, chosen, fits, how)),
        starts_in_row=inputs.starts_in_row + 1,
        replaced_in_row=inputs.replaced_in_row + counts,
        how=how,
        nodes=chosen,
        words=fits.words,
        release=_silent(inputs) if inputs.limits.may_release else (),
        history=standing.new,
    )


def _silent(inputs: Inputs) -> tuple[str, ...]:
    """Returns the nodes that the job must give up before Slurm misses them and ends the job."""
    answers = inputs.nodes if inputs.answers is None else inputs.answers
    return tuple(
        node
        for node in inputs.nodes
        if node != inputs.batch_host
        and (node not in answers or DOWN.search(inputs.states.get(node, "").upper()))
    )


def _how(inputs: Inputs, chosen: tuple[str, ...], layout: SmallerLayout) -> How:
    if set(chosen) == set(inputs.used) and inputs.ended is not None:
        return "same"
    if layout.nodes < inputs.needed:
        return "smaller"
    return "first" if inputs.ended is None else "replace"


def _chosen(inputs: Inputs, pool: list[str], number: int) -> tuple[str, ...]:
    """Returns `number` nodes of the pool in Slurm's order, as many of the last start as possible.

    A node that is left out is replaced by the nearest one.
    """
    kept = [node for node in inputs.used if node in pool][:number]
    spares = [node for node in pool if node not in kept]
    for lost in (node for node in inputs.used if node not in kept):
        if len(kept) < number and spares:
            # The first of the nearest: `max` keeps the order.
            kept.append(max(spares, key=lambda spare: _nearness(inputs.places, lost, spare)))
            spares.remove(kept[-1])
    kept += spares[: number - len(kept)]
    return tuple(node for node in inputs.nodes if node in kept)


def _nearness(places: Mapping[str, str], node: str, other: str) -> int:
    """Returns how many switches above two nodes are the same, from the top of the network."""
    pairs = zip(places.get(node, "").split("."), places.get(other, "").split("."), strict=False)
    number = 0
    for mine, theirs in pairs:
        if mine != theirs or not mine:
            break
        number += 1
    return number


# Decisions without a start


def _end(
    inputs: Inputs,
    action: Action,
    code: int,
    sentence: str,
    standing: _Standing | None = None,
) -> Decision:
    history = standing.new if standing is not None else {}
    in_row, replaced = inputs.starts_in_row, inputs.replaced_in_row
    return Decision(action, sentence, in_row, replaced, code=code, history=history)


def _requeue(
    inputs: Inputs,
    history: History,
    reason: str,
    code: int,
    exclude: tuple[str, ...] | None = None,
) -> Decision:
    if exclude is None:
        old = unexpired(inputs.history, inputs.now, inputs.limits.exclude_days)
        exclude = tuple(sorted(node for node, entries in old.items() if is_out(entries)))
    without = f" without {_names(exclude)}" if exclude else ""
    return Decision(
        "requeue",
        f"{reason}; the job is queued again{without}",
        inputs.starts_in_row,
        inputs.replaced_in_row,
        code=code,
        exclude=exclude,
        history=history,
    )


# Sentences


def _join(*parts: str) -> str:
    return "; ".join(part.rstrip(".") for part in parts if part)


def _names(nodes: Iterable[str]) -> str:
    """Names nodes, as in "node1, node2 and node3"; shortens a long list."""
    names = list(nodes)
    if len(names) > SHOWN:
        names = [*names[: SHOWN - 1], f"{len(names) - SHOWN + 1} more"]
    return " and ".join(filter(None, (", ".join(names[:-1]), names[-1])))


def _plural(predicate: str) -> str:
    verb, _, rest = predicate.partition(" ")
    return f"{PLURAL.get(verb, verb)} {rest}"


def _cause(ended: StartEnd) -> str:
    if ended.cause is None:
        return f"the ranks ended with code {ended.code}"
    return plain(ended.cause.sentence()).rstrip(".")


def _seen(inputs: Inputs, standing: _Standing) -> list[str]:
    """Returns what has happened: the root cause, then the evidence against each node."""
    said = [] if inputs.ended is None else [_cause(inputs.ended)]
    by_evidence: dict[str, list[str]] = {}
    for node, entries in standing.new.items():
        for entry in entries:
            if entry.decisive and node not in standing.known:
                by_evidence.setdefault(entry.evidence, []).append(node)
            elif not entry.decisive:
                strikes = sum(not found.decisive for found in standing.history[node])
                said.append(f"this is strike {strikes} against {node}")
    said += [
        f"{_names(nodes)} {why if len(nodes) == 1 else _plural(why)}"
        for why, nodes in by_evidence.items()
    ]
    return said


def _next_start(inputs: Inputs, chosen: tuple[str, ...], layout: SmallerLayout, how: How) -> str:
    number = count(len(chosen), "node")
    if how == "same":
        again = "starting again" if len(chosen) == 1 else f"starting again on the same {number}"
        return f"{again} with {' '.join(layout.words)}" if layout.words else again
    if how == "smaller":
        return (
            f"starting on {number} with {' '.join(layout.words)} until the job is queued again, "
            "with the same samples, and losses that are equal to rounding"
        )
    if how == "first":
        return f"starting on {number}"
    came = [node for node in chosen if node not in inputs.used]
    went = [node for node in inputs.used if node not in chosen]
    if not came or not went:  # the last start had another number of nodes
        return f"starting on {number}"
    verb = "takes the place" if len(came) == 1 else "take the places"
    return f"{_names(came)} {verb} of {_names(went)}"


# Lines of `recovery.jsonl`


def line_of(
    inputs: Inputs,
    decision: Decision,
    *,
    failed_at: float | None = None,
    seconds: Mapping[str, float] | None = None,
) -> RecoveryLine:
    """Returns the line of a decision, with its inputs."""
    return RecoveryLine(
        at=inputs.now,
        start=inputs.start,
        decision=decision.name,
        sentence=decision.sentence,
        cause=_cause_of_line(inputs),
        nodes=decision.nodes,
        failed_at=failed_at,
        seconds=seconds or {},
        inputs=inputs.to_json(),
    )


def _cause_of_line(inputs: Inputs) -> Cause | None:
    """Returns the cause of the end; None if there was none, or if nobody knows it."""
    ended = inputs.ended
    if ended is None or not (ended.code or ended.dead or ended.cause):
        return None
    failed, answers = ended.cause, inputs.answers
    lost = [
        node
        for node in inputs.used
        if node in ended.dead or (answers is not None and node not in answers)
    ]
    if lost and (failed is None or failed.kind not in ("user", "decided", "node")):
        return Cause("node", lost[0], None, "does not answer")  # whatever its peers have seen
    if failed is None:
        return None
    rank = None if failed.rank == NO_RANK else failed.rank
    # A rank that only noticed that another one had ended does not know why.
    kind = "unknown" if failed.is_echo else failed.kind
    return Cause(kind, failed.host, rank, failed.error)


@dataclass(frozen=True)
class Replay:
    """A decision under Slurm that was made again.

    Attributes:
        line: the decision as it was.
        now: the decision from the same inputs; None if they are of another version.
    """

    line: RecoveryLine
    now: Decision | None

    @property
    def differs(self) -> bool:
        """Returns whether the job would go on in another way."""
        then = self.line.decision, self.line.nodes
        return self.now is None or (self.now.name, self.now.nodes) != then

    def sentence(self) -> str:
        said = f"start {self.line.start}: {self.line.decision}: {self.line.sentence}"
        if self.now is None:
            return f"{said}; its inputs are of another version"
        return f"{said}; now: {self.now.name}: {self.now.sentence}" if self.differs else said


def replayed(lines: Iterable[RecoveryLine]) -> list[Replay]:
    """Makes the decisions of `recovery.jsonl` again that have inputs."""
    return [Replay(line, _again(line.inputs)) for line in lines if line.inputs is not None]


def _again(inputs: Mapping[str, Any]) -> Decision | None:
    try:
        return decide(Inputs.from_json(inputs))
    except (ValueError, KeyError, TypeError, AttributeError):
        return None
