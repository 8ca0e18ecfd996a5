"""Starts the runs of faults.py under each launcher, and finds the processes that can be killed."""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar

from benchmarks.failures.random_files import HOOK, Failing
from parallel3d.metrics.jsonl import rows_of
from parallel3d.topology.cluster.slurm import FIRST_SPECIAL_STEP
from tests.e2e.command import PARALLEL3D, ROOT, TORCHRUN
from tests.e2e.private_slurm import OVER, Job, Slurm
from tests.e2e.ready import ReadyPopen

STARTS = 40  # maximum number of restarts, because each of several faults may end a run
SMALL = ("--nodes=2", "--ntasks-per-node=1", "--gpus-per-node=0", "--cpus-per-task=1")


@dataclass(frozen=True)
class Campaign:
    """The parts that all runs of a campaign share. Calls only fail below `disk`."""

    folder: Path
    words: tuple[str, ...]
    seed: int
    slurm: Slurm | None = None
    started: list[subprocess.Popen[bytes]] = field(default_factory=list)

    def end(self) -> None:
        """Ends all processes that are left: a launcher that ends also ends its ranks."""
        for process in self.started:
            process.kill()
            process.wait()

    @property
    def disk(self) -> Path:
        return self.folder / "disk"

    @property
    def book(self) -> Path:
        return self.folder / "book.txt"


@dataclass
class Command:
    """A training run that our launcher starts, again and again."""

    campaign: Campaign
    name: str
    layout: tuple[str, ...]
    failing: float = 0.0  # share of its processes that get a fault
    process: subprocess.Popen[bytes] | None = None
    starts: int = 0

    launcher = "ours"
    popen: ClassVar[Callable[..., subprocess.Popen[bytes]]] = subprocess.Popen
    targets: tuple[str, ...] = ("a rank", "all ranks", "the launcher")

    @property
    def folder(self) -> Path:
        return self.campaign.folder

    @property
    def run_dir(self) -> Path:
        return self.campaign.disk / "runs" / self.name

    @property
    def faults(self) -> Path:
        """Returns a line for each fault that a process met."""
        return self.folder / f"{self.name}.faults"

    def words(self) -> tuple[str, ...]:
        """Returns the command's arguments, from `train` on."""
        where = (
            f"runs_dir={self.run_dir.parent}",
            f"data.path={self.campaign.book}",
            f"data.valid={{book:{self.campaign.book}}}",
            f"data.cache_dir={self.campaign.disk / 'cache' / self.name}",
        )
        return ("train", f"run={self.name}", *self.campaign.words, *self.layout, *where)

    def command(self) -> tuple[str, ...]:
        return (*PARALLEL3D, *self.words())

    def environment(self) -> dict[str, str]:
        """Returns variables that a start has in addition to this process's."""
        path = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
        # Without a common cache, each start would compile again.
        more = {"OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": ""}
        if self.failing:
            path.insert(0, str(HOOK))
            seed = f"{self.campaign.seed}/{self.name}/{self.starts}"
            more |= Failing(
                str(self.campaign.disk), seed, self.failing, str(self.faults)
            ).environment()
        return more | {"PYTHONPATH": os.pathsep.join(path)}

    def start(self) -> None:
        if self.starts == STARTS:
            raise RuntimeError(f"{self.name} does not end: {self.log()[-2000:]}")
        with (self.folder / f"{self.name}.log").open("ab") as log:
            self.process = self.popen(
                self.command(),
                cwd=self.folder,
                env=os.environ | self.environment(),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=log,
            )
        self.campaign.started.append(self.process)
        self.starts += 1

    def code(self) -> int | None:
        """Returns how the last start ended; None while it runs."""
        assert self.process is not None
        return self.process.poll()

    def ranks(self) -> list[int]:
        """Returns processes of the live ranks: the launcher's children."""
        assert self.process is not None
        pid = self.process.pid
        try:
            return [int(p) for p in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
        except OSError:
            return []

    def kill(self, target: str, chosen: float) -> None:
        """Kills, with SIGKILL; `chosen` in [0, 1) selects one of several."""
        ranks = self.ranks()
        if target == "the launcher":
            assert self.process is not None
            self.process.kill()
            self.process.wait()
            self._wait_for_orphans(ranks)
            return
        kill_all([ranks[int(chosen * len(ranks))]] if target == "a rank" else ranks)
        time.sleep(0.3)  # the launcher polls ten times a second

    def close(self) -> None:
        """Cleans up after the run."""

    def restarts(self) -> int:
        """Returns the number of times that the launcher itself restarted the ranks."""
        return self.log().count("; restart ")

    def log(self) -> str:
        """Returns the output of all starts of the run."""
        return (self.folder / f"{self.name}.log").read_text(errors="replace")

    def last_step(self) -> int:
        path = self.run_dir / "metrics.jsonl"
        rows = [*rows_of(path)] if path.exists() else []
        return rows[-1]["step"] if rows else 0

    def is_saving(self) -> bool:
        return any((self.run_dir / "checkpoints").glob(".saving-*"))

    def _wait_for_orphans(self, ranks: list[int]) -> None:
        """Waits until the run is free: ranks whose launcher was killed take a moment to die."""
        deadline = time.monotonic() + 10
        while time.monotonic() < deadline and any(lives(p) for p in ranks):
            time.sleep(0.05)


class ForkedCommand(Command):
    """Starts the run without the seconds in which each start imports torch."""

    launcher = "forked"
    popen = ReadyPopen

    def command(self) -> tuple[str, ...]:
        return self.words()


class TorchrunCommand(Command):
    """Starts the run under torchrun, which restarts ranks by itself."""

    launcher = "torchrun"

    def command(self) -> tuple[str, ...]:
        # The ranks' output is in separate files: the agent ends with a traceback of its own.
        logs = ("--redirects=3", f"--log-dir={self.logs}")
        given = ("--nproc-per-node=2", "--max-restarts=10", "--monitor-interval=0.1", *logs)
        return (*TORCHRUN, *given, "-m", "parallel3d", *self.words())

    @property
    def logs(self) -> Path:
        return self.folder / f"{self.name}.logs"

    def restarts(self) -> int:
        counts = (int(p.name.removeprefix("attempt_")) for p in self.logs.glob("*/attempt_*"))
        return sum(count > 0 for count in counts)

    def log(self) -> str:
        """Returns the ranks' output; the agent's own messages are not ours."""
        found = sorted(self.logs.glob("*/attempt_*/*/stderr.log"), key=os.path.getmtime)
        return "".join(path.read_text(errors="replace") for path in found)


@dataclass
class SlurmCommand(Command):
    """Starts the run as a job of slurm/train.sbatch on two nodes, which resumes by itself."""

    launcher = "slurm"
    targets = ("a rank", "all ranks", "the step", "a node", "the job, by a requeue")
    numbers: list[str] = field(default_factory=list)  # ids of its jobs, one per start
    crashed: set[str] = field(default_factory=set)
    job: Job | None = None
    asked_at: float = 0.0

    @property
    def slurm(self) -> Slurm:
        assert self.campaign.slurm is not None
        return self.campaign.slurm

    def start(self) -> None:
        if self.starts == STARTS:
            raise RuntimeError(f"{self.name} does not end: {self.log()[-2000:]}")
        output = self.folder / f"{self.name}.log"
        given = (*SMALL, "--exclusive", f"--job-name={self.name}", f"--output={output}")
        script = str(ROOT / "slurm" / "train.sbatch")
        environ = self.environment() | {
            "PARALLEL3D": shlex.join(PARALLEL3D),
            "GLOO_SOCKET_IFNAME": "lo",
        }
        self.numbers.append(self.slurm.submit(*given, script, *self.words()[1:], **environ))
        self.job, self.asked_at = None, 0.0
        self.starts += 1

    def code(self) -> int | None:
        job = self._look()
        if job is None or job.state not in OVER:
            return None
        return 0 if job.state == "COMPLETED" else 1

    def _look(self) -> Job | None:
        if time.monotonic() > self.asked_at + 0.5:
            self.job = self.slurm.jobs().get(self.numbers[-1])
            self.asked_at = time.monotonic()
        return self.job

    def ranks(self) -> list[int]:
        found = []
        for folder in Path("/proc").glob("[0-9]*"):
            try:
                words = (folder / "cmdline").read_bytes().split(b"\0")
                pairs = (folder / "environ").read_bytes().decode(errors="replace").split("\0")
            except OSError:
                continue  # it has just ended
            environ = dict(pair.split("=", 1) for pair in pairs if "=" in pair)
            step = environ.get("SLURM_STEP_ID", "")
            in_step = step.isdigit() and int(step) < FIRST_SPECIAL_STEP
            ours = environ.get("SLURM_JOB_ID") == self.numbers[-1] and b"parallel3d" in words
            if ours and in_step and b"train" in words and b"bash" not in words[0]:
                found.append(int(folder.name))
        return found

    def kill(self, target: str, chosen: float) -> None:
        if target in ("a rank", "all ranks"):
            super().kill(target, chosen)
        elif target == "the step":
            step = self.slurm.call("squeue", "-h", "-s", "-j", self.numbers[-1], "-o", "%i").split()
            numbers = [s for s in step if s.rpartition(".")[2].isdigit()]
            if numbers:
                self.slurm.call("scancel", "--signal=KILL", numbers[0])
        elif target == "a node":
            self._crash(chosen)
        else:
            self.slurm.call("scontrol", "requeue", self.numbers[-1])
        self.asked_at = 0.0

    def _crash(self, chosen: float) -> None:
        job = self._look()
        if job is None or not job.nodes:
            return
        node = job.nodes[int(chosen * len(job.nodes))]
        self.slurm.crash(node)
        self.slurm.down(node)  # Slurm would notice this by itself within half a minute
        self.crashed.add(node)

    def restarts(self) -> int:
        said = self.log()
        return said.count("; starting again") + said.count("DUE TO NODE FAILURE")

    def log(self) -> str:
        main = self.folder / f"{self.name}.log"
        logs = [p for n in self.numbers for p in (self.folder / "logs" / n).glob("*/rank-*.log")]
        found = sorted((p for p in (main, *logs) if p.exists()), key=os.path.getmtime)
        return "".join(path.read_text(errors="replace") for path in found)

    def close(self) -> None:
        while self.crashed:
            self.slurm.boot(self.crashed.pop())


def lives(pid: int) -> bool:
    try:
        return bool(Path(f"/proc/{pid}/cmdline").read_bytes())  # a zombie's is empty
    except OSError:
        return False


def kill_all(pids: list[int]) -> None:
    for pid in pids:
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            continue  # it has just ended
