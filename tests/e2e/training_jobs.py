"""Submits small training jobs to a Slurm of virtual nodes, takes nodes from them, and waits.

The nodes are hosts of a network (tests/tools/railnet), so they may crash, or only fall silent. A
job's story is a generator: it yields while it waits, and all stories of a cluster are told at once.
"""

from __future__ import annotations

import json
import os
import shlex
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.e2e.command import ROOT, TINY, Shell, without_replaced
from tests.e2e.forked import Forked
from tests.e2e.private_slurm import OVER, Job, Slurm
from tests.e2e.rails import Rails
from tests.pace import PATIENCE

TRAIN = ROOT / "slurm" / "train.sbatch"
SLOW_STEPS = Path(__file__).parent / "slow_steps"
STEPS = 40
SLOW_FROM = 12  # from this step on, a step takes longer (slow_steps)
WORDS = (
    f"train.steps={STEPS}",
    "train.save_weights=true",
    "checkpoint.every=5",
    "micro_batch_size=1",
    "train.progress=false",
)

Story = Callable[["TrainingJob"], Iterator[None]]


@dataclass
class Cluster:
    """A Slurm whose nodes may be lost, and the jobs on it."""

    slurm: Slurm
    net: Rails
    shell: Shell
    jobs: dict[str, TrainingJob] = field(default_factory=dict)
    seen: dict[str, Job] = field(default_factory=dict)  # what squeue said last, by number
    cut: set[str] = field(default_factory=set)
    crashed: set[str] = field(default_factory=set)
    drained: set[str] = field(default_factory=set)

    @classmethod
    @contextmanager
    def up(cls, cwd: Path, scratch: Path, nodes: int) -> Iterator[Cluster]:
        environ = {"GLOO_SOCKET_IFNAME": "eth0"}
        shell = Shell(cwd, scratch, environ, anew=True)
        net = Path(tempfile.mkdtemp(prefix="p3d-net-"))
        net.rmdir()
        rails = Rails.start(net, hosts=nodes, gpus=1)
        slurm = None
        try:
            # A silent node is noticed after half a minute, before Slurm notices it.
            slurm = Slurm.start(shell, nodes=nodes, rails=rails, node_timeout_s=120)
            yield cls(slurm, rails, shell)
        finally:
            if slurm is not None:
                slurm.stop(cwd / "slurm-logs")
            rails.stop()
            shell.end_all()

    def submit(
        self, name: str, ranks: int, spares: int, *words: str, slow_s: float = 0.5
    ) -> TrainingJob:
        """Submits a job with one rank a node."""
        nodes = ranks + spares
        options = ("--gpus-per-node=0", "--cpus-per-task=1", f"--nodes={nodes}", "--exclusive")
        path = self.shell.environment()["PYTHONPATH"]
        environ = {
            "PARALLEL3D": shlex.join((sys.executable, "-m", "parallel3d")),
            "PYTHONPATH": os.pathsep.join((str(SLOW_STEPS), path)),
            "LET_GO": str(self.shell.cwd),
            "SLOW_STEP_S": str(slow_s),
        }
        own = without_replaced((*TINY, *self.shell.text(), *WORDS, *words))
        number = self.slurm.submit(
            *options,
            "--ntasks-per-node=1",
            f"--job-name={name}",
            f"--output={name}.out",
            str(TRAIN),
            *own,
            f"run={name}",
            f"dp={ranks}",
            f"launch.spares={spares}",
            **environ,
        )
        job = self.jobs[name] = TrainingJob(self, name, number)
        return job

    def crash(self, node: str) -> None:
        self.crashed.add(node)
        self.slurm.crash(node)

    def silence(self, node: str) -> None:
        self.cut.add(node)
        self.net.set_link(node, up=False)

    def repair(self, node: str) -> None:
        """Makes a lost node usable again."""
        if node in self.cut:
            self.net.set_link(node, up=True)
            self.cut.discard(node)
        if node in self.crashed:
            self.slurm.boot(node)
            self.crashed.discard(node)

    def repair_all(self) -> None:
        """Makes all nodes usable again, once no job is left."""
        for node in (*self.cut, *self.crashed):
            self.repair(node)
        for node in self.drained:
            # A node that was called down, too, is usable since it has booted.
            if "drain" in self.slurm.call("sinfo", "-h", "-n", node, "-o", "%T"):
                self.slurm.call("scontrol", "update", f"nodename={node}", "state=resume")
        self.drained.clear()

    def drain(self, node: str) -> None:
        self.drained.add(node)
        words = (f"nodename={node}", "state=drain", "reason=test")
        self.slurm.call("scontrol", "update", *words)

    def look(self) -> None:
        self.seen = self.slurm.jobs()

    def tell(self, stories: Mapping[str, Story], seconds: float) -> None:
        """Tells all stories to their ends, and waits until their jobs are over."""
        told = {name: story(self.jobs[name]) for name, story in stories.items()}
        deadline = time.monotonic() + seconds * PATIENCE
        while True:
            self.look()
            for name, story in list(told.items()):
                if next(story, self) is self:
                    del told[name]
            for name in stories:
                self.jobs[name].let_slurm_miss()
            if not told and all(self.jobs[name].is_over for name in stories):
                return
            if time.monotonic() > deadline:
                left = {name: self.seen.get(self.jobs[name].number) for name in stories}
                outputs = "\n".join(self.jobs[name].output()[-3000:] for name in told or stories)
                raise AssertionError(f"not told: {set(told)}; {left}\n{outputs}")
            time.sleep(0.2)


@dataclass
class TrainingJob:
    """One job of a cluster.

    Attributes:
        lost: when something was done to the job, by a name for it.
        gone: nodes that were taken from it.
        missed: how often it has said that it waits until Slurm misses a node.
    """

    cluster: Cluster
    name: str
    number: str
    lost: Mapping[str, float] = field(default_factory=dict)
    gone: list[str] = field(default_factory=list)
    missed: int = 0

    @property
    def folder(self) -> Path:
        return self.cluster.shell.cwd

    @property
    def run_dir(self) -> Path:
        return self.folder / "runs" / self.name

    @property
    def now(self) -> Job | None:
        return self.cluster.seen.get(self.number)

    @property
    def is_over(self) -> bool:
        return self.now is not None and self.now.state in OVER

    @property
    def nodes(self) -> tuple[str, ...]:
        return self.now.nodes if self.now is not None else ()

    def output(self) -> str:
        path = self.folder / f"{self.name}.out"
        return path.read_text(errors="replace") if path.exists() else ""

    def cancel(self) -> None:
        self.cluster.slurm.call("scancel", self.number)

    def release(self) -> None:
        """Lets steps be fast again."""
        (self.folder / f"{self.name}.go").touch()

    @property
    def steps(self) -> int:
        """Returns the last step in metrics.jsonl."""
        rows = self.rows()
        return rows[-1][0] if rows else 0

    def rows(self) -> list[tuple[int, float, float]]:
        """Returns (step, loss, gradient norm) of each row."""
        path = self.run_dir / "metrics.jsonl"
        lines = path.read_text().splitlines() if path.exists() else []
        found = []
        for line in lines:
            try:
                row = json.loads(line)
            except ValueError:
                continue  # it is being written
            if "loss" in row:
                found.append((row["step"], row["loss"], row["grad_norm"]))
        return found

    def weights(self) -> bytes:
        return (self.run_dir / "weights-final.safetensors").read_bytes()

    @property
    def decisions(self) -> list[dict[str, Any]]:
        path = self.run_dir / "recovery.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    @property
    def kinds(self) -> list[str]:
        return [line["decision"] for line in self.decisions]

    def first_steps(self) -> list[float]:
        """Returns when each start has reached its first step."""
        path = self.run_dir / "starts.jsonl"
        lines = path.read_text().splitlines() if path.exists() else []
        return [row["at"] for row in map(json.loads, lines) if "at" in row]

    def back_after(self, what: str) -> float | None:
        """Returns the seconds from what was done to the first new step."""
        later = [at for at in self.first_steps() if at > self.lost[what]]
        return min(later) - self.lost[what] if later else None

    def rank_on(self, node: str) -> int | None:
        """Returns the process of the rank on a node."""
        return next(iter(self.processes(node, "train")), None)

    def processes(self, node: str, word: str) -> list[int]:
        """Returns the job's processes on a node that have this word in their command line."""
        found = []
        for folder in Path("/proc").glob("[0-9]*"):
            try:
                words = (folder / "cmdline").read_bytes().split(b"\0")
                pairs = (folder / "environ").read_bytes().split(b"\0")
            except OSError:
                continue  # it has just ended
            wanted = {
                f"SLURM_JOB_ID={self.number}".encode(),
                f"SLURMD_NODENAME={node}".encode(),
            }
            in_step = any(pair.startswith(b"PARALLEL3D_START=") for pair in pairs)
            is_python = b"python" in os.path.basename(words[0])
            if in_step and is_python and word.encode() in words and wanted <= set(pairs):
                found.append(int(folder.name))
        return sorted(found)

    def guard_on(self, node: str) -> int | None:
        """Returns the process of the job's guard on a node, of the newest start."""
        end = f"\0--node\0{node}\0--\0".encode()
        own = f"\0--job\0{self.number}\0".encode()
        found = []
        for folder in Path("/proc").glob("[0-9]*"):
            try:
                words = (folder / "cmdline").read_bytes()
            except OSError:
                continue  # it has just ended
            is_guard = words.split(b"\0")[1:3] == [b"-m", b"parallel3d.slurm.guard"]
            if is_guard and own in words and end in words:
                found.append(int(folder.name))
        return max(found, default=None)

    def sizes(self) -> list[int]:
        """Returns the dp of each start, as starts.jsonl has it."""
        lines = (self.run_dir / "starts.jsonl").read_text().splitlines()
        return [row["layout"]["dp"] for row in map(json.loads, lines) if "layout" in row]

    # What stories do

    def trains(self) -> bool:
        """Returns whether the job has a checkpoint and is at its slow steps."""
        return self.steps >= SLOW_FROM and self.now is not None and self.now.state == "RUNNING"

    def note(self, what: str) -> None:
        self.lost[what] = time.time()

    def kill_rank(self, node: str, what: str = "", number: signal.Signals = signal.SIGKILL) -> None:
        pid = self.rank_on(node)
        assert pid is not None, f"no rank of {self.name} on {node}"
        self.note(what or node)
        os.kill(pid, number)

    def crash(self, node: str, what: str = "") -> None:
        self.note(what or node)
        self.gone.append(node)
        self.cluster.crash(node)

    def ask_to_stop(self) -> None:
        """Sends the signal that precedes a time limit."""
        self.cluster.slurm.call("scancel", "--signal=USR1", "--batch", self.number)

    def silence(self, node: str, what: str = "") -> None:
        self.note(what or node)
        self.gone.append(node)
        self.cluster.silence(node)

    def let_slurm_miss(self) -> None:
        """Tells Slurm of the lost nodes for which the job waits until Slurm misses them."""
        said = self.output()
        waits = said.count("until Slurm misses") + said.count("when it misses")
        if waits > self.missed:
            self.missed = waits
            for node in self.gone:
                self.cluster.slurm.down(node)


def undisturbed(cluster: Cluster, ranks: int, *more: str) -> TrainingJob:
    """Trains without Slurm as the jobs do, in a run to compare with."""
    alone = Shell(cluster.shell.cwd, cluster.shell.scratch)
    words = without_replaced((*TINY, *alone.text(), *WORDS, *more))
    forked = Forked(alone)
    forked.add_world(ranks, "train", *words, f"dp={ranks}", "run=undisturbed")
    forked.start()
    forked.finish()
    alone.end_all()
    return TrainingJob(cluster, "undisturbed", "")
