"""Runs a Slurm cluster of virtual nodes on this machine (tests/tools/minislurm), and jobs on it."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

from tests.e2e.command import ROOT, Shell
from tests.e2e.rails import Rails

MINISLURM = ROOT / "tests" / "tools" / "minislurm"
TOOLS = ("slurmctld", "slurmd", "sbatch", "srun", "munged", "unshare", "nsenter")
SBIN = ("/usr/sbin", "/sbin")
OVER = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "OUT_OF_MEMORY")


def why_not() -> str | None:
    """Returns why no cluster can be made here, as a sentence; None if one can."""
    if sys.platform != "linux":
        return f"nodes are made of Linux namespaces, and this is {sys.platform}"
    if os.geteuid() != 0:
        return "nodes are made of namespaces, which needs root"
    path = os.pathsep.join((os.environ.get("PATH", ""), *SBIN))
    missing = [tool for tool in TOOLS if shutil.which(tool, path=path) is None]
    if missing:
        return f"Slurm needs {', '.join(missing)}: install slurm-wlm, munge and util-linux"
    return None


@dataclass(frozen=True)
class Job:
    """The report of squeue about a job, or about one element of an array (`12_1`)."""

    number: str
    name: str
    state: str
    nodes: tuple[str, ...]
    restarts: int


@dataclass
class Slurm:
    """A cluster that is up. Jobs are submitted in `shell`, and take its environment.

    Attributes:
        inside: what Slurm's commands are started with, so that they reach a cluster on a railnet.
    """

    state: Path
    shell: Shell
    inside: tuple[str, ...] = ()
    known: dict[str, tuple[str, ...]] = field(default_factory=lambda: {"": ()})

    @classmethod
    def start(
        cls, shell: Shell, *, nodes: int, rails: Rails | None = None, node_timeout_s: int = 10
    ) -> Slurm:
        """With `rails`, the nodes are its hosts, whose links may be cut.

        Slurm calls a node down that it has not heard for `node_timeout_s` (by default it is 300).
        """
        # The test's own folder is unsuitable, because a socket's path must be short.
        state = Path(tempfile.mkdtemp(prefix="p3d-slurm-"))
        slurm = cls(state, shell)
        words = ["--nodes", str(nodes), "--gpus", "0", "--node-timeout", str(node_timeout_s)]
        if rails is not None:
            words += ["--railnet", str(rails.state), "--wait", "60"]
            spaces = json.loads((rails.state / "railnet.json").read_text())["spaces"]
            slurm.inside = ("nsenter", f"--net={spaces['login']['netns_path']}")
        # A preempted job has time to save, on a busy machine, too.
        slurm._minislurm("start", *words, "--grace-time", "60")
        return slurm

    @property
    def conf(self) -> Path:
        return self.state / "etc" / "slurm.conf"

    def stop(self, logs: Path) -> None:
        """Ends every job and daemon; the daemons' output is kept in `logs`."""
        self._minislurm("stop", "--keep-logs", str(logs))

    def crash(self, node: str) -> None:
        """Kills every process of the node at once; Slurm is not informed (by itself it takes 30
        s)."""
        self._minislurm("crash", node)

    def down(self, node: str) -> None:
        """Informs Slurm that a node is dead, which it would detect later by itself."""
        self.call("scontrol", "update", f"nodename={node}", "state=down", "reason=crash")

    def boot(self, node: str) -> None:
        """Starts a crashed node again; returns when it waits for jobs."""
        self._minislurm("boot", node)

    def call(self, *words: str, **environ: str) -> str:
        """Runs one of Slurm's commands; returns its output."""
        done = subprocess.run(
            (*self.inside, *words),
            cwd=self.shell.cwd,
            env=self.shell.environment(SLURM_CONF=str(self.conf), **environ),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, f"{' '.join(words)}: {done.stderr}"
        return done.stdout

    def submit(self, *words: str, **environ: str) -> str:
        """Submits by sbatch; returns the job's number."""
        return self.call("sbatch", "--parsable", *words, **environ).strip()

    def jobs(self) -> dict[str, Job]:
        """Returns all past and present jobs, the elements of arrays one by one, by number."""
        form = "--Format=JobArrayID:20,Name:20,State:20,RestartCnt:10,NodeList:60"
        found = {}
        for line in self.call("squeue", "-h", "-a", "-r", "-t", "all", form).splitlines():
            number, name, state, restarts, *nodes = line.split()
            listed = ",".join(nodes)
            found[number] = Job(number, name, state, self._names(listed), int(restarts))
        return found

    def _names(self, listed: str) -> tuple[str, ...]:
        """Returns `node[1-2]` as node1, node2; cached, because jobs are listed several times a
        second."""
        if listed not in self.known:
            self.known[listed] = tuple(self.call("scontrol", "show", "hostnames", listed).split())
        return self.known[listed]

    def _minislurm(self, verb: str, *words: str) -> None:
        command = (sys.executable, str(MINISLURM), verb, "--state", str(self.state), *words)
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
