"""Simulates jobs on a cluster whose nodes fail, and checks each decision by what must hold.

A job lives through allocations, starts, failures and requeues by a seeded schedule; `decide` is
asked as the batch script's process asks it. The checks know the truth of the schedule (which node
is broken, what a failure says about a node), and share no code with the decision.
"""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from parallel3d.run.failure import RankFailure, of_node
from parallel3d.slurm.decide import (
    Decision,
    Evidence,
    Inputs,
    Limits,
    ProbeAnswer,
    SmallerLayout,
    StartEnd,
    merged,
)

Decide = Callable[[Inputs], Decision]
DAY = 86_400.0
MOST_DECISIONS = 60

# Kinds and errors of root causes: those that speak against the node of their rank, and those
# (`NEVER`) that any node would have had.
STRIKES = (
    ("killed", "was killed by SIGSEGV"),
    ("killed", "was killed by SIGILL"),
    ("error", "AcceleratorError: CUDA error: an illegal memory access was encountered"),
    ("error", "RuntimeError: CUDA error: uncorrectable ECC error encountered"),
    ("error", "RuntimeError: CUDA error: unspecified launch failure"),
    ("hang", "hang: rank 3 (pp 0, dp 1, tp 1) on {} is stopped (SIGSTOP): rank 0 waits"),
)
COLLECTIVE = (
    "error",
    "DistBackendError: NCCL error in: /pytorch/NCCLUtils.cpp:77, unhandled system error (run with "
    "NCCL_DEBUG=INFO for details), NCCL version 2.27.5",
)
NEVER = (
    ("killed", "was killed by SIGKILL (by a user, or by the kernel for lack of memory)"),
    ("killed", "was killed by SIGBUS"),
    ("killed", "was killed by SIGABRT"),
    ("killed", "was killed by SIGTERM"),
    ("killed", "was killed by SIGALRM"),
    ("killed", "exited with code 1"),
    ("user", "data.path=corpora/web does not exist"),
    ("error", "OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB"),
    ("error", "AcceleratorError: CUDA error: out of memory"),
    ("error", "OSError: [Errno 28] No space left on device"),
    ("error", "OSError: [Errno 122] Disk quota exceeded: 'runs/a'"),
    ("error", "OSError: [Errno 5] Input/output error"),
    ("error", "RuntimeError: NCCL error: unhandled system error: No space left on device"),
    ("error", "JSONDecodeError: Expecting value: line 1 column 1"),
    ("error", "AcceleratorError: CUDA error: device-side assert triggered"),
    ("error", "RuntimeError: Connection closed by peer [10.0.0.3]:7"),
    ("error", "DistBackendError: NCCL error: remote process exited or there was a network error"),
    ("error", "RuntimeError: Timed out waiting 1000ms for recv operation to complete"),
    ("error", "KeyError: 'an error that no list has'"),
    ("hang", "hang: rank 1 (pp 0, dp 0, tp 1) on {} left out all_reduce of world"),
)
BAD_STATES = ("DOWN", "DOWN*", "MIXED+DRAIN", "draining", "FAIL", "FAILING", "IDLE+DRAIN", "DRNG@")
GOOD_STATES = ("", "MIXED", "ALLOCATED", "allocated", "IDLE", "MIXED+PLANNED")


@dataclass
class Node:
    """The truth about a node: how often it breaks, and how it is at the moment."""

    name: str
    place: str
    risk: float  # the probability that it is the root cause of a start's end
    dead: bool = False
    wrong: bool = False  # fails its self-test
    state: str = "MIXED"


@dataclass
class Ledger:
    """Holds what the job has seen of its nodes, kept by the simulation itself."""

    decisive: dict[str, float] = field(default_factory=dict)  # when a node was last lost
    strikes: dict[str, list[float]] = field(default_factory=dict)

    def is_barred(self, node: str, now: float, days: float) -> bool:
        return node in self.decisive and now - self.decisive[node] < days * DAY

    def count(self, node: str, now: float, days: float) -> int:
        return sum(now - at < days * DAY for at in self.strikes.get(node, []))

    def is_out(self, node: str, now: float, days: float) -> bool:
        return self.is_barred(node, now, days) or self.count(node, now, days) >= 2


@dataclass
class Truth:
    """Holds what really happened before a decision.

    Attributes:
        struck: nodes that deserve a strike, unless they cannot be used at all.
        by_loss: whether the loss of a node would explain the failure.
        recurs: whether the failure is the last one again.
        lost: nodes that cannot be used.
        silent: nodes that do not answer, or are down: Slurm will miss them.
    """

    struck: tuple[str, ...] = ()
    by_loss: bool = False
    recurs: bool = False
    lost: frozenset[str] = frozenset()
    silent: frozenset[str] = frozenset()


class Job:
    """A job on a cluster, until it ends; with `replays`, each decision is made again from JSON."""

    def __init__(self, seed: int, decide: Decide, replays: bool = True) -> None:
        self.random = roll = random.Random(seed)
        self.decide, self.replays = decide, replays
        self.seed = seed
        needed, spares = roll.randint(1, 8), roll.choice((0, 0, 1, 2, 3))
        self.spares = spares = min(spares, max(0, needed - 1)) if roll.random() < 0.8 else spares
        self.needed = needed
        size = needed + spares + roll.randint(0, 4)
        lemons = roll.choice((0.0, 0.0, 0.2, 0.5))
        self.nodes = [
            Node(
                f"n{number}",
                roll.choice(("", f"top.leaf{number // 3}.n{number}")),
                risk=0.6 if roll.random() < lemons else 0.05,
            )
            for number in range(size)
        ]
        self.by_name = {node.name: node for node in self.nodes}
        self.smaller = self._smaller()
        self.limits = Limits(
            max_restarts=roll.randint(0, 4),
            spares=spares,
            exclude_days=roll.choice((0.02, 1.0, 7.0)),
            smaller=self.smaller,
        )
        self.may_release = roll.random() < 0.8
        self.heeds_exclusions = roll.random() < 0.7
        self.asks = needed + spares > 1 or roll.random() < 0.5  # a job of one node has no probe
        self.now = 1_800_000_000.0
        self.history: dict[str, tuple[Evidence, ...]] = {}
        self.ledger = Ledger()
        self.cause: RankFailure | None = None
        self.start, self.in_row, self.replaced = 1, 0, 0
        self.starts_without_progress = 0
        self.requeued_for: tuple[str, ...] = ()
        self.reached_a_step = False
        self.decisions: Counter[str] = Counter()
        self.previous_truth: tuple[Any, ...] | None = None

    def _smaller(self) -> tuple[SmallerLayout, ...]:
        if self.random.random() < 0.6:
            return ()
        sizes = [n for n in range(self.needed - 1, 0, -1) if self.random.random() < 0.5]
        return tuple(SmallerLayout(n, (f"dp={n}",)) for n in sizes)

    def run(self) -> None:
        """Runs the job to its end; raises AssertionError with the seed at a wrong decision."""
        exclude: tuple[str, ...] = ()
        requeues = 0
        while sum(self.decisions.values()) < MOST_DECISIONS:
            allocated = self._allocate(exclude)
            if allocated is None:
                return  # the job waits for ever for nodes that there are not
            before = self.start
            exclude_or_end = self._allocation(allocated)
            if exclude_or_end is None:
                return
            exclude = exclude_or_end
            requeues = requeues + 1 if self.start == before else 0
            assert requeues <= len(self.nodes) + 1, self._told("requeued without an end")

    def _allocate(self, exclude: tuple[str, ...]) -> list[str] | None:
        self.now += self.random.uniform(60, 20_000)
        for node in self.nodes:  # the site repairs
            if self.random.random() < 0.3:
                node.dead = node.wrong = False
                node.state = self.random.choice(GOOD_STATES)
        idle = [node.name for node in self.nodes if node.state not in BAD_STATES and not node.dead]
        if self.heeds_exclusions:
            idle = [name for name in idle if name not in exclude]
        wanted = self.needed + self.spares
        if len(idle) < wanted:
            return None
        found = self.random.sample(idle, wanted)
        return [node.name for node in self.nodes if node.name in found]

    def _allocation(self, nodes: list[str]) -> tuple[str, ...] | None:
        """Runs the job in one allocation; returns the nodes to exclude next, or None at its end."""
        used: tuple[str, ...] = ()
        ended: StartEnd | None = None
        truth = Truth()
        for name in nodes:
            if self.random.random() < 0.05:
                self.by_name[name].wrong = True
        while True:
            self.now += self.random.uniform(20, 200)
            truth = self._probed(truth, nodes, used)
            inputs = self._inputs(nodes, used, ended)
            decision = self._decide(inputs, truth)
            if decision.action == "requeue":
                self.requeued_for = tuple({*self.requeued_for, *decision.exclude})
                return decision.exclude
            if decision.action != "run":
                return None
            self.start += 1
            self.in_row, self.replaced = decision.starts_in_row, decision.replaced_in_row
            self.starts_without_progress += 1
            nodes = [name for name in nodes if name not in decision.release]
            if any(self.by_name[name].dead for name in nodes):
                return decision.exclude  # Slurm misses the node, ends the job and queues it again
            used = decision.nodes
            ended, truth = self._live(nodes, used)
            if self.random.random() < 0.03 and len(nodes) > 1:
                taken = self.random.choice(nodes[1:])
                nodes = [name for name in nodes if name != taken]

    def _probed(self, truth: Truth, nodes: list[str], used: tuple[str, ...]) -> Truth:
        found = [self.by_name[name] for name in nodes]
        lost = {
            node.name
            for node in found
            if node.state in BAD_STATES or (self.asks and (node.dead or node.wrong))
        }
        lost |= {name for name in used if name not in nodes}
        silent = {node.name for node in found if (self.asks and node.dead) or "DOWN" in node.state}
        return replace(truth, lost=frozenset(lost), silent=frozenset(silent))

    def _inputs(self, nodes: list[str], used: tuple[str, ...], ended: StartEnd | None) -> Inputs:
        found = [self.by_name[name] for name in nodes]
        answers = {
            node.name: ProbeAnswer(not node.wrong, "GPU 3: a wrong product" if node.wrong else "")
            for node in found
            if not node.dead
        }
        return Inputs(
            start=self.start,
            now=self.now,
            batch_host=nodes[0],
            nodes=tuple(nodes),
            needed=self.needed,
            limits=replace(self.limits, may_release=self.may_release),
            used=used,
            places={node.name: node.place for node in found},
            ended=ended,
            previous=self.cause,
            answers=answers if self.asks else None,
            states={node.name: node.state for node in found},
            history=self.history,
            starts_in_row=self.in_row,
            replaced_in_row=self.replaced,
            requeued_for=self.requeued_for,
        )

    # The life of a start

    def _live(self, nodes: list[str], used: tuple[str, ...]) -> tuple[StartEnd, Truth]:
        """Lets a start live and end; returns its end, and what it really was."""
        roll = self.random
        self.now += roll.uniform(60, 40_000)
        first = not self.reached_a_step
        self.reached_a_step |= roll.random() < 0.9
        if roll.random() < 0.6:  # a newer checkpoint
            self.in_row = self.replaced = self.starts_without_progress = 0
        step = roll.choice((12, roll.randint(1, 10_000)))
        for name in nodes:
            if name not in used and roll.random() < 0.05:
                self._break(self.by_name[name])
        host = next((n for n in used if roll.random() < self.by_name[n].risk), roll.choice(used))
        event = roll.choices(
            ("never", "strike", "collective", "silent", "crash", "alive", "code", "rack"),
            (5, 6, 2, 3, 2, 2, 1, 0.5),
        )[0]
        if roll.random() < 0.06:
            return self._told_to_end(first), Truth()
        ended = StartEnd(1, first=first)
        if event == "code":
            code = roll.choice((1, 2, 137, 138, 140))
            return replace(ended, code=code), Truth()
        if event == "rack":  # a switch is gone
            for name in roll.sample(used, (len(used) + 1) // 2):
                self._break(self.by_name[name])
            return replace(ended, cause=self._dead(host)), Truth((host,))
        if event == "silent":
            if host != nodes[0]:
                self._break(self.by_name[host])
            return replace(ended, cause=self._dead(host), dead=(host,)), Truth((host,))
        if event == "alive":  # called dead, but it answers
            others = tuple({host, roll.choice(used)}) if roll.random() < 0.3 else (host,)
            cause = roll.choice((self._dead(host), None))
            return replace(ended, cause=cause, dead=others), Truth(others)
        if event == "crash":  # peers fail in NCCL at once
            peers = [name for name in used if name != host] or [host]
            peer = roll.choice(peers)
            cause, truth = self._failed(*COLLECTIVE, peer, step)
            if host != nodes[0] and peer != host:
                self._break(self.by_name[host])
            return replace(ended, cause=cause), replace(truth, by_loss=True)
        kind, error = COLLECTIVE
        if event != "collective":
            kind, error = roll.choice(STRIKES if event == "strike" else NEVER)
        cause, truth = self._failed(kind, error, host, step)
        if kind == "user":
            ended = replace(ended, code=2)
        if event == "never":
            truth = replace(truth, struck=())
        truth = replace(truth, by_loss=event == "collective")
        is_gone = "Connection closed" in error or "remote process exited" in error
        if is_gone and roll.random() < 0.5:  # an echo, whose cause the collector has seen
            alive = roll.choice(used)
            return replace(ended, cause=cause, dead=(alive,)), replace(truth, struck=(alive,))
        if event != "never" and roll.random() < 0.3:  # it happened after the failure
            ended = replace(ended, dead=(roll.choice(used),))
        return replace(ended, cause=cause), truth

    def _told_to_end(self, first: bool) -> StartEnd:
        roll = self.random
        return roll.choice(
            (
                StartEnd(0, first=first),
                StartEnd(0, saved_and_asked=True, asked="SIGUSR1", first=first),
                StartEnd(0, saved_and_asked=True, first=first),
                StartEnd(138, asked="SIGTERM", first=first),
                StartEnd(
                    1,
                    cause=RankFailure(0, "pp 0", "n0", "train step 9", "diverged", 1.0, "decided"),
                    first=first,
                ),
            )
        )

    def _failed(self, kind: Any, error: str, host: str, step: int) -> tuple[RankFailure, Truth]:
        phase = "" if kind == "killed" else f"train step {step}"
        witness = self.random.choice((host, self.by_name[host].name))
        cause = RankFailure(3, "pp 0", witness, phase, error.format(host), self.now, kind)
        now = (kind, error, step if phase else None)
        truth = Truth((host,))
        earlier, self.previous_truth = self.previous_truth, (*now, host)
        if earlier is not None and kind in ("error", "user", "killed") and earlier[:3] == now:
            passing = "Connection closed" in error or "Timed out" in error or "NCCL" in error[:30]
            recurs = kind in ("error", "user") and not passing
            elsewhere = earlier[3] != host and (phase != "" or self.in_row > 0)
            truth = Truth(() if elsewhere else (host,), recurs=recurs)
        return cause, truth

    def _dead(self, host: str) -> RankFailure:
        self.previous_truth = None
        return of_node(host, "has sent no beat for 31 s", self.now)

    def _break(self, node: Node) -> None:
        how = self.random.random()
        if how < 0.7:
            node.dead = True
        elif how < 0.85:
            node.wrong = True
        else:
            node.state = self.random.choice(BAD_STATES)

    # Checks

    def _decide(self, inputs: Inputs, truth: Truth) -> Decision:
        if inputs.ended is not None and inputs.ended.cause is None:
            self.previous_truth = None
        kept = json.dumps(inputs.to_json()) if self.replays else ""
        decision = self.decide(inputs)
        self.decisions[decision.name] += 1
        if self.replays:
            text = json.dumps(decision.to_json())
            again = self.decide(self._shuffled(Inputs.from_json(json.loads(kept))))
            assert json.dumps(again.to_json()) == text, self._told("differs when repeated")
            assert Decision.from_json(json.loads(text)) == decision, self._told("JSON")
        try:
            check(self, inputs, truth, decision)
        except AssertionError as error:
            raise AssertionError(self._told(f"{error}\n{inputs}\n{truth}\n{decision}")) from None
        if inputs.ended is not None:
            self.cause = inputs.ended.cause
        self.history = merged(self.history, decision.history)
        return decision

    def _shuffled(self, inputs: Inputs) -> Inputs:
        roll = random.Random(self.seed)  # of its own, as a job is the same without it

        def mixed(found: Any) -> Any:
            items = list(found.items())
            roll.shuffle(items)
            return dict(items)

        answers = inputs.answers if inputs.answers is None else mixed(inputs.answers)
        return replace(
            inputs,
            places=mixed(inputs.places),
            states=mixed(inputs.states),
            history=mixed(inputs.history),
            answers=answers,
        )

    def _told(self, what: str) -> str:
        return f"seed {self.seed}, start {self.start}: {what}"


def check(job: Job, inputs: Inputs, truth: Truth, decision: Decision) -> None:
    """Raises AssertionError if a decision is wrong; then writes down what it has seen."""
    ended, now, days = inputs.ended, inputs.now, inputs.limits.exclude_days
    ledger, nodes, used = job.ledger, inputs.nodes, inputs.used
    assert decision.sentence and "\n" not in decision.sentence and "None" not in decision.sentence
    assert (decision.how is not None) == (decision.action == "run"), "how"
    if ended is not None and _ends(inputs, ended, decision):
        out = sorted(name for name in _known(ledger) if ledger.is_out(name, now, days))
        if decision.action == "requeue":
            assert list(decision.exclude) == out, "a requeue does not exclude what is out"
        assert decision.history == {}
        return
    # The evidence
    members = [*nodes, *(name for name in used if name not in nodes)]
    outs = {name for name in members if ledger.is_out(name, now, days)}
    taken = {name for name in nodes if inputs.states.get(name) in BAD_STATES}  # by Slurm
    if "nothing has failed yet" in decision.sentence:
        assert ended is None
        new = [name for name in members if name not in outs | taken and name in truth.lost]
        assert len(new) * 2 > len(members) - len(outs), "bad nodes are used although few are"
        down = {name for name in taken if "DOWN" in inputs.states[name]}
        truth = replace(truth, lost=frozenset(taken), silent=frozenset(down))
    struck = {name for name in truth.struck if name not in truth.lost and name in nodes}
    if truth.by_loss and truth.lost & set(used):
        struck = set()
    refused = decision.action == "stop" and "it is not the nodes" in decision.sentence
    strikes = {n for n, found in decision.history.items() if any(not e.decisive for e in found)}
    excluded = {n for n, found in decision.history.items() if any(e.decisive for e in found)}
    if not refused:
        assert strikes == struck, "strikes are those of the root cause alone"
        assert excluded == truth.lost, "each lost node is excluded"
        for name in truth.lost:
            ledger.decisive[name] = now
        for name in struck:
            ledger.strikes.setdefault(name, []).append(now)
    else:
        assert decision.history == {}, "it is not the nodes"
        new = [name for name in members if name not in outs | taken and name in truth.lost | struck]
        assert len(new) * 2 > len(members) - len(outs), "stopped although few nodes were lost"
        return
    barred = {name for name in nodes if ledger.is_barred(name, now, days)}
    twice = {name for name in nodes if ledger.count(name, now, days) >= 2} - barred
    usable = [name for name in nodes if name not in truth.lost]
    good = [name for name in usable if name not in barred | twice]
    unbarred = [name for name in usable if name not in barred]
    left = set(members) - set(decision.nodes if decision.action == "run" else unbarred)
    new = {name for name in left - outs - taken if name in truth.lost | twice}
    assert len(new) * 2 <= len(members) - len(outs), "over half of the nodes are left out at once"
    # The counts
    in_row = job.starts_without_progress
    assert inputs.starts_in_row == in_row, "a start was not counted"
    most = inputs.limits.max_restarts + inputs.limits.spares + 1
    if decision.action == "run":
        assert in_row + 1 <= most, "more starts than spares + max_restarts + 1"
        assert decision.starts_in_row == in_row + 1, "a start is not counted"
        added = decision.replaced_in_row - inputs.replaced_in_row
        assert added in (0, 1)
        hardware = set(used) & (truth.lost | (twice - outs))
        assert added <= (decision.how == "replace" and bool(hardware)), "counted as hardware"
    else:
        assert decision.starts_in_row == inputs.starts_in_row
    if truth.recurs and not truth.struck:
        assert decision.action == "stop", "the same error at the same step"
        return
    spent = in_row - inputs.limits.max_restarts - min(inputs.replaced_in_row, inputs.limits.spares)
    if decision.action == "stop":
        alone = ended is None and "although the job was queued again" in decision.sentence
        assert spent > 0 or alone, "stopped without a reason"
        return
    # The nodes
    asked = set(inputs.requeued_for)
    out = sorted(name for name in _known(ledger) if ledger.is_out(name, now, days))
    sizes = [inputs.needed, *(each.nodes for each in inputs.limits.smaller)]
    silent = [name for name in nodes if name in truth.silent and name != inputs.batch_host]
    stuck = bool(silent) and not inputs.limits.may_release  # Slurm will end the job
    if decision.action == "requeue":
        assert stuck or all(size > len(unbarred) for size in sizes), "a layout would have fitted"
        assert list(decision.exclude) == out, "a requeue does not exclude what is out"
        if set(out) <= asked:
            assert ended is not None, "asked twice for the same nodes"
            assert stuck or all(size > len(usable) for size in sizes)
        return
    chosen = decision.nodes
    assert [name for name in nodes if name in chosen] == list(chosen), "in Slurm's order, once"
    assert not set(chosen) & truth.lost, "a dead node is listed"
    forced = set(chosen) & barred
    if forced:
        assert set(out) <= asked, "an excluded node is listed"
        assert " left out, as there is no other" in decision.sentence
    fits = [size for size in sizes if size <= (len(usable) if forced else len(unbarred))]
    assert len(chosen) == fits[0], "the largest layout that fits"
    assert (len(chosen) < inputs.needed) == bool(decision.words)
    if len(good) >= len(chosen):
        assert not set(chosen) & twice, "two strikes, although there is a spare"
        kept = len(set(chosen) & set(used))
        assert kept == min(len(chosen), len(set(good) & set(used))), (
            "a node of the last start was not kept"
        )
    same = ended is not None and set(chosen) == set(used)
    name = "same" if same else "smaller" if decision.words else "replace" if ended else "first"
    assert decision.how == name
    # Nodes that the job gives up
    assert not stuck or (ended is None and set(out) <= asked), "a job that Slurm will end"
    assert inputs.batch_host not in decision.release, "the batch host is given up"
    assert list(decision.release) == (silent if inputs.limits.may_release else []), (
        "a dead node is not given up at once"
    )
    for name in set(used) & truth.lost:
        assert name in decision.sentence or "more" in decision.sentence, "lost in silence"


def _ends(inputs: Inputs, ended: StartEnd, decision: Decision) -> bool:
    """Checks decisions that do not depend on nodes; returns whether this is one."""
    if ended.saved_and_asked:
        assert (decision.action, decision.code) == ("requeue", 0)
    elif ended.code == 0:
        assert (decision.action, decision.code) == ("done", 0)
    elif ended.code == 2 and (ended.first or not ended.cause or ended.cause.kind == "user"):
        assert (decision.action, decision.code) == ("stop", 2)
    elif ended.asked or ended.code in (138, 140):
        assert (decision.action, decision.code) == ("requeue", ended.code)
    elif ended.cause is not None and ended.cause.kind == "decided":
        assert (decision.action, decision.code) == ("stop", 1)
    else:
        return False
    return True


def _known(ledger: Ledger) -> set[str]:
    return {*ledger.decisive, *ledger.strikes}
