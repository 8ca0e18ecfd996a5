"""Real guards, ranks and a collector on this machine, with all limits shortened.

Each node is a guard and its ranks, told apart by the variables that Slurm gives to tasks. A wire
between guards and collector can be cut.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import selectors
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from parallel3d.faults.progress import PROGRESS
from parallel3d.host.processes import born, state_letter
from parallel3d.slurm.collector import Collector
from parallel3d.slurm.verdict import BeatLimits
from tests.pace import PATIENCE

FASTER = 15.0  # silent 2 s, paused 8 s, no step 2 s
LIMITS = BeatLimits().faster(FASTER)
INTERVAL_S = 0.2
SECRET = "a-secret"
START = 3
JOBS = itertools.count(1)
ROOT = Path(__file__).parents[3]

# A rank: its words are its number, code that it runs after three steps, and code before these.
# `step` ends a step.
RANK = """
import ctypes, os, subprocess, sys, time
from parallel3d.faults.progress import ProgressFile
progress = ProgressFile.opened(int(sys.argv[1]), os.environ)
progress.resume()
def step(seconds=0.05):
    time.sleep(seconds)
    progress.step_ended()
def sleeper(**more):
    return subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], **more)
exec(sys.argv[3])
for _ in range(3):
    step()
exec(sys.argv[2])
time.sleep(600)
"""
STEPS = "while True: step()"
STILL = ""
# A guard, into which a test may plant a bug first.
GUARD = """
import sys
from parallel3d.slurm import guard, messages, verdict
exec(sys.argv[1])
sys.exit(guard.main(sys.argv[2:]))
"""
PLANTED = [""]  # the code of the planted bug; `planted` sets it


@contextlib.contextmanager
def planted(code: str) -> Iterator[None]:
    """Plants a bug in the guards of this block."""
    PLANTED[0] = code
    try:
        yield
    finally:
        PLANTED[0] = ""


def until(condition: Callable[[], object], seconds: float = 10.0) -> None:
    """Waits until the condition holds; fails after `seconds` on a quiet machine."""
    limit = time.monotonic() + PATIENCE * seconds
    while not condition():
        assert time.monotonic() < limit, "it did not come to that"
        time.sleep(0.01)


def is_alive(pid: int) -> bool:
    return state_letter(pid, born(pid)) not in ("", "Z", "X")


class Wire:
    """Passes connections on to a port, until it is cut: then no byte passes, and nothing closes."""

    def __init__(self, port: int) -> None:
        self._target, self.is_cut, self._is_over = port, False, False
        self._listening = socket.create_server(("127.0.0.1", 0))
        self.port = self._listening.getsockname()[1]
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listening, selectors.EVENT_READ)
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._is_over:
            if self.is_cut:
                time.sleep(0.01)
                continue
            for key, _ in self._selector.select(0.02):
                if key.fileobj is self._listening:
                    here, _ = self._listening.accept()
                    try:
                        there = socket.create_connection(("127.0.0.1", self._target))
                    except OSError:
                        here.close()
                        continue
                    self._selector.register(here, selectors.EVENT_READ, there)
                    self._selector.register(there, selectors.EVENT_READ, here)
                elif not self.is_cut:
                    self._pass(key.fileobj, key.data)  # type: ignore[arg-type]

    def _pass(self, source: socket.socket, target: socket.socket) -> None:
        try:
            data = source.recv(1 << 16)
            if data:
                target.sendall(data)
                return
        except OSError:
            pass
        for each in (source, target):
            with contextlib.suppress(KeyError, ValueError):
                self._selector.unregister(each)
            each.close()

    def close(self) -> None:
        self._is_over = True
        self._thread.join()
        for key in list(self._selector.get_map().values()):
            key.fileobj.close()  # type: ignore[union-attr]
        self._selector.close()


@dataclass
class Node:
    """One node of a cluster: its guard, and its ranks."""

    name: str
    folder: str
    job: str
    guard: subprocess.Popen[str]
    ranks: list[subprocess.Popen[str]] = field(default_factory=list)

    def environ(self, **more: str) -> dict[str, str]:
        """Returns the environment of a task of Slurm on this node."""
        of_step = {"SLURM_JOB_ID": self.job, "SLURM_STEP_ID": "1", "SLURMD_NODENAME": self.name}
        return os.environ | of_step | {"PARALLEL3D_START": str(START), PROGRESS: self.folder} | more

    def rank(self, number: int, code: str = STEPS, before: str = "") -> subprocess.Popen[str]:
        """Starts a rank."""
        command = (sys.executable, "-c", RANK, str(number), code, before)
        rank = subprocess.Popen(
            command, env=self.environ(), cwd=ROOT, stdout=subprocess.PIPE, text=True
        )
        self.ranks.append(rank)
        return rank

    def stop(self) -> None:
        """Stops all its processes, as a node that has died is silent."""
        for process in (self.guard, *self.ranks):
            process.send_signal(signal.SIGSTOP)


class Cluster:
    """Starts a collector and nodes; ends all of it at the end of its block."""

    def __init__(
        self,
        folder: Path,
        names: str = "a",
        self_tests: Mapping[str, Sequence[str]] | None = None,
        wired: bool = False,
        limits: BeatLimits = LIMITS,
    ) -> None:
        self.said: list[str] = []
        # Clusters of other tests must not end each other's ranks.
        self.job = f"{os.getpid()}-{next(JOBS)}"
        self.collector = Collector(SECRET, START, names, self.said.append, limits=limits)
        self.wires = {name: Wire(self.collector.port) for name in names if wired}
        self._folder, self._self_tests = folder, self_tests or {}
        self.nodes = {name: self._node(name) for name in names}

    def _node(self, name: str) -> Node:
        folder = str(self._folder / name)
        port = self.wires[name].port if self.wires else self.collector.port
        test = ("--", *self._self_tests.get(name, ()))
        words = guard_words(port, name, folder, *test, job=self.job)
        return Node(name, folder, self.job, started_guard(words))

    def __getitem__(self, name: str) -> Node:
        return self.nodes[name]

    def __enter__(self) -> Cluster:
        self.collector.wait_for_answers(PATIENCE * 10)
        return self

    def __exit__(self, *_: object) -> None:
        for node in self.nodes.values():
            for process in (node.guard, *node.ranks):
                process.kill()
                process.wait()
                for stream in (process.stdout, process.stderr):
                    if stream is not None:
                        stream.close()
        for wire in self.wires.values():
            wire.close()
        self.collector.close()

    def watch(self, code: str = STEPS) -> None:
        """Starts a rank on each node, and begins to judge."""
        self.collector.watch(list(self.nodes))
        for number, node in enumerate(self.nodes.values()):
            node.rank(number, code)
        until(lambda: all(r and r[0].steps >= 3 for r in self.collector.reports.values()))

    def cut(self, names: str, is_cut: bool = True) -> None:
        """Cuts the service links of some nodes, or mends them."""
        for name in names:
            self.wires[name].is_cut = is_cut

    def undisturbed(self, seconds: float) -> bool:
        """Returns whether no verdict is given for so long."""
        limit = time.monotonic() + seconds
        while time.monotonic() < limit:
            if self.collector.wait(limit - time.monotonic()) is not None:
                return False
        return self.collector.verdict is None


def guard_words(port: int, name: str, folder: str, *more: str, job: str = "0") -> list[str]:
    words = ["--collector", f"127.0.0.1:{port}", "--start", str(START), "--job", job]
    words += ["--interval", str(INTERVAL_S), "--progress", folder, "--node", name]
    return [*words, "--faster", str(FASTER), *more]


def started_guard(words: Sequence[str], **environ: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        (sys.executable, "-c", GUARD, PLANTED[0], *words),
        env=os.environ | {"PARALLEL3D_SECRET": SECRET} | environ,
        cwd=ROOT,
        stderr=subprocess.PIPE,
        text=True,
    )
