"""Judges from the guards' last beats which nodes are dead and which ranks are gone.

A node is dead only if two things hold: no beat came from it for long, and no step ended anywhere
for long. Silence alone may be a lost link of the service network, over which no gradient travels;
steps that stand still alone are the watchdog's business. A rank is gone if its process is away
although it has not said that it would leave.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import NamedTuple

from parallel3d.faults.progress import STATES, State

GONE_LETTERS = ("", "Z", "X")  # as in `host.processes.state_letter`


@dataclass(frozen=True)
class BeatLimits:
    """Holds how long guards and collector wait, in seconds.

    Attributes:
        look: time between looks at the ranks of a host.
        silent, paused: silence after which a node may be dead; `paused` counts while a rank is
            paused or has no pace yet (it compiles, evaluates, loads), or if no node speaks.
        step_least, step_more: besides, no step must have ended for the larger one of `step_least`
            and `step_factor` times the median step plus `step_more`.
        lonely: a guard without ranks and without a collector leaves after this.
        reconnect: silence of a collector after which its guard connects anew.
        connect: limit of an attempt to connect, and of a connection's first message.
        alive: a step that ends so much later than a node was cut off shows that the node lives.
        cut: at the end of a start, nobody waits longer for a node whose connection is closed.
        records: patience for ranks that a guard ends by its own decision.
        self_test: limit of a self-test.
    """

    look: float = 0.5
    silent: float = 30.0
    paused: float = 120.0
    step_least: float = 30.0
    step_factor: float = 1.5
    step_more: float = 10.0
    lonely: float = 10.0
    reconnect: float = 15.0
    connect: float = 5.0
    alive: float = 1.0
    cut: float = 3.0
    records: float = 2.0
    self_test: float = 120.0

    def faster(self, times: float) -> BeatLimits:
        """Returns limits of which the seconds that judge are `times` shorter, for trials."""
        kept = ("step_factor", "connect", "self_test")
        return replace(
            self,
            **{f.name: getattr(self, f.name) / times for f in fields(self) if f.name not in kept},
        )

    def without_step(self, median: float) -> float:
        """Returns how long no step may end at this pace."""
        return max(self.step_least, self.step_factor * median + self.step_more)


class RankReport(NamedTuple):
    """Holds what a guard says of a rank of its host.

    Attributes:
        letter: the state of its process as in ps; "" if it is away.
        age: seconds since its last step ended or its last pause; `median` as in `progress.Seen`.
    """

    rank: int
    letter: str
    state: State
    steps: int
    age: float
    median: float

    @property
    def is_away(self) -> bool:
        return self.letter in GONE_LETTERS


@dataclass(frozen=True)
class LastBeat:
    """Holds what matters of a node's last beat, by the collector's clock.

    Attributes:
        heard: when it came.
        stepped: when a rank of the node last ended a step, or a pause; None if it has no ranks yet.
        median: the longest median step of its ranks.
        steps: number of steps that all its ranks had ended.
        may_be_slow: whether a rank is paused or has no pace yet, or the node has no ranks yet.
        is_done: whether its ranks have all left as they should, or are about to.
        gone: its ranks that are gone.
    """

    heard: float
    stepped: float | None = None
    median: float = 0.0
    steps: int = 0
    may_be_slow: bool = True
    is_done: bool = False
    gone: tuple[int, ...] = ()

    @classmethod
    def of(cls, heard: float, ranks: Sequence[RankReport]) -> LastBeat:
        """Sums up what a guard says of its ranks, in one pass: a collector hears hundreds of them.

        Values that are no report's raise ValueError or TypeError.
        """
        if not ranks:
            return cls(heard)
        youngest, median, done, may_be_slow, is_done = math.inf, 0.0, None, False, True
        gone = []
        for rank, letter, state, steps, age, pace in ranks:
            youngest, median = min(youngest, age), max(median, pace)
            done = steps if done is None else min(done, steps)
            if state != "done":
                is_done = False
                if state not in STATES:
                    raise ValueError(f"{state} is no state of a rank")
                if pace == 0 or state == "paused":
                    may_be_slow = True
                if letter in GONE_LETTERS:
                    gone.append(int(rank))
        return cls(
            heard, heard - youngest, median, int(done or 0), may_be_slow, is_done, tuple(gone)
        )


@dataclass(frozen=True)
class Verdict:
    """Says why a start must end: dead nodes, or ranks that are gone, as (node, rank).

    Attributes:
        failed_at: when it happened, by the clock of the beats: the last step's end for a dead node.
    """

    dead: tuple[str, ...] = ()
    gone: tuple[tuple[str, int], ...] = ()
    failed_at: float = 0.0
    silent_s: float = 0.0
    still_s: float = 0.0

    def sentence(self) -> str:
        if self.dead:
            which = "node" if len(self.dead) == 1 else "nodes"
            return (
                f"{which} {', '.join(self.dead)}: no word for {self.silent_s:.0f} s, and no step "
                f"ended anywhere for {self.still_s:.0f} s"
            )
        which = ", ".join(f"rank {rank} on {node}" for node, rank in self.gone)
        return f"{which}: the process is gone"


def verdict(
    now: float,
    beats: Mapping[str, LastBeat],
    used: Collection[str],
    since: float,
    limits: BeatLimits,
) -> Verdict | None:
    """Returns why the start must end at `now`, or None if it need not.

    Args:
        beats: the last beat of each node that has sent one.
        used: the nodes on which ranks run, since `since`.
    """
    last = {node: beats.get(node) or LastBeat(since) for node in used}
    gone = tuple((node, rank) for node in used for rank in last[node].gone)
    if gone:
        return Verdict(gone=gone, failed_at=now)
    stepped = max([since, *(beat.stepped for beat in last.values() if beat.stepped is not None)])
    median = max((beat.median for beat in last.values()), default=0.0)
    quiet = {node: now - max(beat.heard, since) for node, beat in last.items()}
    # Ranks step together, so a node's pause was over when others have ended two steps more.
    steps = max((beat.steps for beat in last.values()), default=0)
    slow = any(beat.may_be_slow and beat.steps + 2 > steps for beat in last.values())
    silent = limits.paused if slow else limits.silent
    # Nobody knows of steps that ended after the last word of any node. If nobody speaks at all, the
    # link of this host may be cut.
    known = now - min(quiet.values(), default=0.0)
    if now - known >= limits.paused:
        known = now
    if known - stepped < limits.without_step(median):
        return None
    dead = tuple(node for node in used if not last[node].is_done and quiet[node] >= silent)
    if not dead:
        return None
    least = min(quiet[node] for node in dead)
    return Verdict(dead, failed_at=stepped, silent_s=least, still_s=now - stepped)


def silent_nodes(
    now: float, beats: Mapping[str, LastBeat], nodes: Collection[str], limits: BeatLimits
) -> frozenset[str]:
    """Returns the nodes without ranks that were heard once and have been silent for too long."""
    heard = {node: beats[node].heard for node in nodes if node in beats}
    return frozenset(node for node, at in heard.items() if now - at >= limits.silent)
