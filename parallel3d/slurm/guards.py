"""Starts a guard on every node of a job, for one start, and gathers the nodes' answers."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import BinaryIO

from parallel3d.comm.store import SECRET
from parallel3d.faults import progress
from parallel3d.slurm import commands
from parallel3d.slurm.collector import Collector, NodeAnswer
from parallel3d.slurm.commands import Allocation
from parallel3d.slurm.verdict import Verdict

FIRST_ANSWER_S = 120.0  # a cold file cache, and every node imports torch from one file system
ANSWER_S = 75.0  # the ranks that have ended may hold a GPU's memory for a while
# A node that is thought lost gets so many seconds, and so many times those of the slowest other.
LOST_S, LOST_FACTOR = 5.0, 2.0
LEAVE_S = 3.0  # for steps whose tasks have ended
REPLACED = 3  # new guards of a node that has lost its guard, in one start
RECORDS_S, RECORDS_OF_DEAD_S = 10.0, 2.0  # in which ranks may write their records


class Guards:
    """The guards of one start, from construction to `end`.

    A node has a step of its own: a step over several nodes is aborted if one of them is dead.
    """

    def __init__(
        self,
        allocation: Allocation,
        start: int,
        beat_s: float,
        self_test: Sequence[str],
        logs: Path,
        say: Callable[[str], None],
    ) -> None:
        self.nodes = allocation.nodes
        self.say = say
        self.collector = Collector(os.environ[SECRET], start, self.nodes, say)
        self.began = time.monotonic()
        places = dict.fromkeys((allocation.host, socket.gethostname(), socket.getfqdn()))
        self.folder = progress.folder(allocation.number, start)
        self.words = [
            *(sys.executable, "-m", "parallel3d.slurm.guard"),
            *("--collector", ",".join(f"{place}:{self.collector.port}" for place in places)),
            *("--start", str(start), "--job", allocation.number, "--interval", f"{beat_s:g}"),
            *("--progress", self.folder),
        ]
        self.logs = logs
        self.steps: dict[str, subprocess.Popen[bytes]] = {}
        self.replaced: Counter[str] = Counter()
        for node in self.nodes:
            if not self._start(node, self_test):
                break

    def _start(self, node: str, self_test: Sequence[str] = ()) -> bool:
        """Starts a node's guard; returns whether this host could."""
        words = (*self.words, "--node", node, "--", *self_test)
        try:
            with _log(self.logs / f"guard-{node}.log") as log:
                self.steps[node] = subprocess.Popen(
                    commands.on_node(os.environ, node, *words),
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    env=commands.environment_beside(os.environ),
                )
        except OSError as error:  # as with too many processes
            self.say(f"no guard can be started for {node} ({error.strerror})")
            return False
        return True

    def replace_ended(self) -> None:
        """Starts guards again that have ended while their nodes train on.

        Such a node would count as dead in the next long pause, such as an evaluation.
        """
        for node in sorted(self.collector.unguarded):
            if self._has_ended(node) and self.replaced[node] < REPLACED:
                self.replaced[node] += 1
                self.say(f"the guard of {node} has ended, and is started again")
                self._start(node)

    def answers(
        self, lost: frozenset[str], limit_s: float, hurries: Callable[[], bool]
    ) -> Mapping[str, NodeAnswer]:
        """Returns the nodes' answers; a node that is missing did not answer in time.

        Args:
            lost: nodes that are thought lost, for which nobody waits for long.
            limit_s: limit for the others.
            hurries: returns whether to stop waiting.
        """
        slowest = 0.0
        while True:
            found = self.collector.wait_for_answers(0.25)
            waited = time.monotonic() - self.began
            missing = set(self.nodes) - found.keys()
            failed = {node for node in missing if self._has_ended(node)}
            if not missing or missing <= failed or waited > limit_s or hurries():
                return found
            if missing - failed - lost:
                slowest = waited
            elif waited > max(LOST_S, LOST_FACTOR * slowest):
                return found

    def _has_ended(self, node: str) -> bool:
        step = self.steps.get(node)
        return step is None or step.poll() is not None

    def wait(self, seconds: float) -> Verdict | None:
        return self.collector.wait(seconds)

    def end(self, patience: float) -> frozenset[str]:
        """Ends all processes of the start, and the guards; returns the nodes that said nothing."""
        ended = self.collector.end(patience, patience + LEAVE_S)
        self.collector.close()
        lost = [self.steps.pop(node) for node in ended.silent if node in self.steps]
        end_steps(self.steps.values(), LEAVE_S)
        end_steps(lost, 0.0)
        return ended.silent


def _log(path: Path) -> BinaryIO:
    """Opens a guard's log; a full disk keeps no guard from starting."""
    try:
        return open(path, "ab")
    except OSError:
        return open(os.devnull, "wb")


def end_steps(steps: Iterable[subprocess.Popen[bytes]], seconds: float) -> None:
    """Waits for sruns to end by themselves, and kills those that wait for lost nodes."""
    deadline = time.monotonic() + seconds
    for step in steps:
        with contextlib.suppress(subprocess.TimeoutExpired):
            step.wait(max(0.0, deadline - time.monotonic()))
        if step.poll() is None:
            step.send_signal(signal.SIGKILL)
            step.wait()
