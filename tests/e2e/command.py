"""Runs command lines and records their effects."""

from __future__ import annotations

import hashlib
import os
import resource
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tests.e2e.ready import ReadyPopen
from tests.pace import PATIENCE, in_time

ROOT = Path(__file__).resolve().parents[2]
PARALLEL3D = (sys.executable, "-m", "parallel3d")
TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--standalone")
COMPUTING = {"train", "verify", "generate", "eval", "bench"}
DEVICE = "parallel3d: device: "  # beginning of the line about the device
HOOKS = Path(__file__).parent / "hooks"
# Variables of another launcher around the tests, or of the user, are removed; a test sets the ones
# it needs.
FOREIGN = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
FOREIGN += ("PYTHONDONTWRITEBYTECODE",)  # otherwise every process would compile the package again
FOREIGN_PREFIXES = ("SLURM_", "TORCHELASTIC_", "HYDRA_", "WANDB_")
TINY = (
    "model.num_layers=2",
    "model.hidden_size=32",
    "model.num_attention_heads=4",
    "model.seq_length=32",
    "micro_batch_size=2",
    "global_batch_size=4",
    "train.steps=3",
    "train.eval_every=0",
    "train.eval_batches=1",
    "checkpoint.every=0",
    "launch.peak_tflops=0.1",  # given so that the start need not measure it
    "launch.timeout_s=60",
    "device=cpu",
)


def without_replaced(words: Sequence[str]) -> tuple[str, ...]:
    """Returns a line in which each key of TINY is given once: a word for it replaces TINY's."""
    given = {word.partition("=")[0] for word in words if word not in TINY}
    kept = []
    for word in words:
        if word not in TINY or (word.partition("=")[0] not in given and word not in kept):
            kept.append(word)
    return tuple(kept)


@dataclass(frozen=True)
class Ended:
    """A command that has ended: exit code, both streams, wall and CPU seconds (with children)."""

    code: int
    out: str
    err: str
    wall_s: float
    cpu_s: float

    @property
    def errors(self) -> list[str]:
        """The lines on stderr, without the line about the device, which every start has."""
        lines = [line for line in self.err.splitlines() if line.strip()]
        return [line for line in lines if not line.startswith("parallel3d: device: ")]


@dataclass
class Shell:
    """A directory in which command lines run, with text to train on; `scratch` is their TMPDIR.

    Ranks are forked from a process that has imported torch (see ready.py); with `anew` they are
    not. Every process has a mark in its environment, by which leftover ones are found.
    """

    cwd: Path
    scratch: Path
    environ: dict[str, str] = field(default_factory=dict)
    anew: bool = False
    mark: str = field(default_factory=lambda: f"P3D_TEST_MARK={uuid.uuid4().hex}")

    def environment(self, **more: str) -> dict[str, str]:
        kept = {
            name: value
            for name, value in os.environ.items()
            if name not in FOREIGN and not name.startswith(FOREIGN_PREFIXES)
        }
        path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
        name, _, value = self.mark.partition("=")
        return (
            kept
            | {"PYTHONPATH": path, "TMPDIR": str(self.scratch), name: value}
            | self.environ
            | more
        )

    def text(self) -> tuple[str, ...]:
        """Returns overrides for a small text of the test's own, made once."""
        book = self.cwd / "book.txt"
        if not book.exists():
            book.write_text("".join(f"{n} bottles of beer on the wall.\n" for n in range(300)))
        return "data=text", f"data.path={book}", f"data.cache_dir={self.cwd / 'cache'}"

    def start(self, *words: str, **environ: str) -> subprocess.Popen[str]:
        words = without_replaced(words)
        computes = words[:3] == PARALLEL3D and set(words[3:4]) & COMPUTING
        forked = computes and not self.anew
        return (ReadyPopen if forked else subprocess.Popen)(
            words[3:] if forked else words,
            cwd=self.cwd,
            env=self.environment(**environ),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def run(self, *words: str, timeout_s: float = 120, **environ: str) -> Ended:
        """Runs one command line to its end; none of its processes may be left running."""
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        started = time.monotonic()
        process = self.start(*words, **environ)
        ended = self.finish(process, started, timeout_s)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
        if isinstance(process, ReadyPopen):
            cpu = process.cpu_s
        return Ended(ended.code, ended.out, ended.err, ended.wall_s, cpu)

    def finish(
        self, process: subprocess.Popen[str], started: float, timeout_s: float = 120
    ) -> Ended:
        """Waits for a started command; fails if it hangs or leaves a process behind."""
        try:
            out, err = process.communicate(timeout=timeout_s * PATIENCE)
        except subprocess.TimeoutExpired:
            self.end_all()
            out, err = process.communicate()
            raise AssertionError(f"still running after {timeout_s} s\n{out}\n{err}") from None
        wall = time.monotonic() - started
        left = self.wait_until_none_is_left(2)
        self.end_all()
        assert not left, f"left running: {left}\n{out}\n{err}"
        return Ended(process.returncode, out, err, wall, 0.0)

    def processes(self) -> dict[int, dict[str, str]]:
        """Returns the live processes of this test: pid -> environment at their start."""
        found = {}
        for folder in Path("/proc").glob("[0-9]*"):
            try:
                variables = (folder / "environ").read_bytes().decode(errors="replace").split("\0")
            except OSError:
                continue  # the process has ended, or is not ours
            if self.mark in variables:
                found[int(folder.name)] = dict(v.split("=", 1) for v in variables if "=" in v)
        return found

    def rank_pid(self, rank: int) -> int:
        """Returns the process of a local rank, by its name in top."""
        names = {pid: Path(f"/proc/{pid}/comm").read_text().strip() for pid in self.processes()}
        return next(pid for pid, name in names.items() if name == f"p3d rank {rank}")

    def wait_until_none_is_left(self, seconds: float) -> dict[int, dict[str, str]]:
        started = time.monotonic()
        while (left := self.processes()) and in_time(time.monotonic() - started, seconds):
            time.sleep(0.05)
        return left

    def end_all(self) -> None:
        for pid in self.processes():
            os.kill(pid, signal.SIGKILL)

    def snapshot(self) -> dict[str, str]:
        """Returns every file and folder below the directory, with the content's hash."""
        return {
            str(path.relative_to(self.cwd)): (
                hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else "folder"
            )
            for path in sorted(self.cwd.rglob("*"))
        }

    def failing(self, how: str) -> dict[str, str]:
        """Returns variables that plant a failure (see hooks/sitecustomize.py)."""
        path = os.pathsep.join((str(HOOKS), self.environment()["PYTHONPATH"]))
        return {"PYTHONPATH": path, "FAIL": how, "FAILED_AT": str(self.cwd / "failed_at")}

    def seconds_since_failure(self) -> float:
        return time.time() - float((self.cwd / "failed_at").read_text())


def wait_for(condition, seconds: float, what: str) -> None:
    """Polls until `condition()` holds."""
    deadline = time.monotonic() + seconds * PATIENCE
    while not condition():
        assert time.monotonic() < deadline, f"waited {seconds} s for {what}"
        time.sleep(0.05)
