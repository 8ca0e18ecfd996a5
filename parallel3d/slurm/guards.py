"""Starts a guard on every node of a job, for one start, and gathers the nodes' answers."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
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
        self.collector = Collector(os.environ[SECRET], start, self.nodes, say)
        self.began = time.monotonic()
        places = dict.fromkeys((allocation.host, socket.gethostname(), socket.getfqdn()))
        self.folder = progress.folder(allocation.number, start)
        words = [
            *(sys.executable, "-m", "parallel3d.slurm.guard"),
            *("--collector", ",".join(f"{place}:{self.collector.port}" for place in places)),
            *("--start", str(start), "--job", allocation.number, "--interval", f"{beat_s:g}"),
            *("--progress", self.folder),
        ]
        self.steps: dict[str, subprocess.Popen[bytes]] = {}
        for node in self.nodes:
            command = commands.on_node(os.environ, node, *words, "--node", node, "--", *self_test)
            try:
                with _log(logs / f"guard-{node}.log") as log:
                    self.steps[node] = subprocess.Popen(
                        command,
                        stdin=subprocess.DEVNULL,
                        stdout=log,
                        stderr=subprocess.STDOUT,
                        env=commands.environment_beside(os.environ),
                    )
            except OSError as error:  # as with too many processes
                say(f"no guard can be started for {node} ({error.strerror})")
                break

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
        return open(path, "wb")
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
