"""Runs the commands that command_faults.py disturbs, each in a forked process and a folder of its
own.

A command is forked from a process that has run it before, so it needs no imports; Hydra composes
its words once (except in the scenario about composing). Calls fail below the command's folder,
which holds its files but not its output.
"""

from __future__ import annotations

import functools
import json
import os
import select
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hydra.core.hydra_config import HydraConfig

from parallel3d.checkpoint.manifest import CHECKPOINTS, step_folder
from parallel3d.cli import command_line
from parallel3d.cli.subcommands import Subcommand
from parallel3d.metrics import recorder
from parallel3d.metrics.provenance import provenance
from tests.tools.failing_files import FailingFiles, Fault, Point

STEPS, EVERY, KEEP, KILLED_AFTER = 6, 2, 2, 5
RUN = Path("runs/run")
HERE = provenance()  # read once, because it runs git
LIMIT_S = 60.0  # limit in seconds; with a blocking fault it is the watchdog's
SETTINGS = (
    *("model.num_layers=1", "model.hidden_size=16", "model.num_attention_heads=2"),
    *("model.seq_length=16", "micro_batch_size=2", "global_batch_size=2", "device=cpu"),
    *(f"train.steps={STEPS}", "train.eval_every=3", "train.eval_batches=1"),
    *("train.save_weights=true", "launch.peak_tflops=0.1", "logger=none"),
    *(f"checkpoint.every={EVERY}", f"checkpoint.keep={KEEP}"),
)


@dataclass(frozen=True)
class Case:
    """A command, and the folder in which it starts: a template, perhaps changed."""

    words: tuple[str, ...]
    template: str
    prepare: Callable[[Path], None] = lambda folder: None
    through_hydra: bool = False

    @property
    def trains(self) -> bool:
        return self.words[0] == "train"


@dataclass
class Ended:
    """The end of a command; `code` is None if it had to be killed after its limit."""

    code: int | None
    out: str
    err: str
    failed: int
    points: list[Point]
    seconds: float


def train_words(text: str, *more: str) -> tuple[str, ...]:
    where = ("run=run", "runs_dir=runs", "data=text", f"data.path={text}", "data.cache_dir=cache")
    return ("train", *where, *SETTINGS, *more)


class Calls(FailingFiles):
    """Reports through a pipe, at once, that the fault was met: a blocked command could not do it
    later."""

    def __init__(self, folder: Path, fault: Fault | None, point: Point | None, pipe: int) -> None:
        super().__init__(folder, fault, point)
        self.pipe = pipe

    def meets(self, kind: str) -> Fault | None:
        found = super().meets(kind)
        if found is not None and self.failed == 1:
            os.write(self.pipe, b"met\n")
        return found


@functools.cache
def composed(words: tuple[str, ...]) -> tuple[Any, Any]:
    """Returns the two configurations that Hydra composes from a command line: ours, and Hydra's
    own."""
    got: list[tuple[Any, Any]] = []

    def take(command: Subcommand, config: Any, *_: Any) -> int:
        got.append((config, HydraConfig.instance().cfg))
        return 0

    real = command_line._run_job
    command_line._run_job = take  # type: ignore[assignment]
    try:
        code = command_line.main(words)
    finally:
        command_line._run_job = real
    assert code == 0 and got, words
    return got[0]


def without_hydra(found: tuple[Any, Any]) -> Callable[[Subcommand, list[str]], None]:
    """Replaces `command_line._run_hydra`, without composing."""

    def run(command: Subcommand, words: list[str]) -> None:
        config, HydraConfig.instance().cfg = found
        prompt = next((w[7:] for w in words if w.startswith("prompt=")), None)
        if code := command_line._run_job(command, config, prompt):
            raise SystemExit(code)

    return run


@dataclass
class Stage:
    """The place where commands run, one at a time, in a folder with their output next to it."""

    home: Path
    limit_s: float = LIMIT_S
    before: Callable[[], None] = lambda: None  # called first in the command's process

    @property
    def folder(self) -> Path:
        return self.home / "disk"

    def give(
        self,
        case: Case,
        fault: Fault | None = None,
        point: Point | None = None,
        calls: type[Calls] = Calls,
        when_met: Callable[[int], None] = lambda pid: None,
    ) -> Ended:
        """Runs one command to its end, or to the limit. `when_met` gets its process at the
        fault."""
        if not case.through_hydra and case.words[0] != "checkpoint":
            composed(tuple(w for w in case.words if not w.startswith("prompt=")))
        started, (reading, writing) = time.monotonic(), os.pipe()
        pid = os.fork()
        if pid == 0:
            os.close(reading)
            self._live(case, calls(self.folder, fault, point, writing))
        os.close(writing)
        told, in_time = _all_of(reading, started + self.limit_s, lambda: when_met(pid))
        if not in_time:
            os.kill(pid, signal.SIGKILL)
        _, status = os.waitpid(pid, 0)
        lines = told.decode().splitlines()
        report = json.loads(lines[-1]) if lines and lines[-1].startswith("{") else {}
        return Ended(
            os.waitstatus_to_exitcode(status) if in_time else None,
            (self.home / "out").read_text(errors="replace"),
            (self.home / "err").read_text(errors="replace"),
            report.get("failed", lines.count("met")),
            [(kind, n) for kind, n in report.get("points", [])],
            time.monotonic() - started,
        )

    def _live(self, case: Case, files: Calls) -> None:
        """Runs in the command's process; does not return."""
        code = 1
        try:
            for name, number in (("out", 1), ("err", 2)):
                with open(self.home / name, "w") as file:
                    os.dup2(file.fileno(), number)
            os.chdir(self.folder)
            recorder.provenance = lambda: HERE
            tempfile.tempdir = str(self.home)
            self.before()
            if case.words[0] != "checkpoint" and not case.through_hydra:
                words = tuple(w for w in case.words if not w.startswith("prompt="))
                command_line._run_hydra = without_hydra(composed(words))  # type: ignore[assignment]
            with files:
                code = command_line.main(case.words)
        except BaseException:  # the interpreter prints these when it ends
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            report = {"failed": files.failed, "points": files.points()}
            os.write(files.pipe, f"{json.dumps(report)}\n".encode())
            os._exit(code)

    def lay(self, template: Path) -> None:
        """Replaces the folder by a fresh copy of a template, with its times and owners."""
        shutil.rmtree(self.folder, ignore_errors=True)
        shutil.copytree(template, self.folder, symlinks=True)


def _all_of(pipe: int, deadline: float, when_met: Callable[[], None]) -> tuple[bytes, bool]:
    """Reads the output of a process until it ends, and returns whether it does so in time."""
    said = b""
    with os.fdopen(pipe, "rb", buffering=0) as file:
        while (left := deadline - time.monotonic()) > 0:
            if select.select([file], [], [], left)[0]:
                piece = file.read(1 << 16)
                if not piece:
                    return said, True
                if piece.startswith(b"met"):
                    when_met()
                said += piece
    return said, False


def kill_after(step: int) -> Callable[[], None]:
    """Makes a command's process die after a step."""

    def prepare() -> None:
        from parallel3d.faults import health

        real = health.Health.after_step

        def after_step(self: Any, result: Any) -> None:
            real(self, result)
            if result.step == step:
                newest = RUN / CHECKPOINTS / step_folder(step - 1)
                while not newest.is_dir():  # written while the next steps run
                    time.sleep(0.01)
                os.kill(os.getpid(), signal.SIGKILL)

        health.Health.after_step = after_step  # type: ignore[method-assign]

    return prepare


def flip(path: Path, at: int) -> None:
    """Damages one byte of a file, in place."""
    with path.open("r+b") as file:
        file.seek(at, os.SEEK_SET if at >= 0 else os.SEEK_END)
        byte = file.read(1)[0]
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte ^ 4]))


def damage_newest(folder: Path) -> None:
    flip(folder / RUN / CHECKPOINTS / step_folder(KILLED_AFTER - 1) / "rank-00000.safetensors", -5)


def tear_cache(folder: Path) -> None:
    (tokens,) = (folder / "cache").glob("*.bin")
    os.truncate(tokens, tokens.stat().st_size // 2)
    (folder / "cache" / f"{tokens.stem}.left.tmp").write_bytes(b"half")


def leave_stray_files(folder: Path) -> None:
    """Adds leftovers of killed starts, and a torn configuration."""
    (folder / RUN / "config-2.yaml").write_bytes(b"")
    kept = folder / RUN / CHECKPOINTS
    for name in (".saving-00000009-old", ".removed-step-00000001-old"):
        (kept / name).mkdir()
        (kept / name / "rank-00000.safetensors").write_bytes(b"half")
    with (folder / RUN / "metrics.jsonl").open("ab") as file:
        file.write(b'{"step": 6, "lo')


def cases(text: str) -> dict[str, Case]:
    """Returns the scenarios; `text` is the training text, which is outside of the failing
    folder."""
    words = train_words(text)
    inside = train_words("book.txt")
    generate = ("generate", "run=run", "runs_dir=runs", "generate.max_tokens=4", "device=cpu")
    return {
        "a new run": Case(inside, "text"),
        "a new run, from Hydra on": Case(inside, "text", through_hydra=True),
        "a new run, with a cache": Case(words, "cache"),
        "a new run, with a torn cache": Case(words, "cache", tear_cache),
        "resumes": Case(words, "killed"),
        "resumes, settings changed": Case((*words, "launch.timeout_s=120"), "killed"),
        "resumes, saves synchronously": Case((*words, "checkpoint.async=false"), "killed"),
        "resumes, newest damaged": Case(words, "killed", damage_newest),
        "resumes, stray files": Case(words, "killed", leave_stray_files),
        "resumes, finished run": Case(words, "finished"),
        "generate": Case((*generate, "prompt=9 bottles"), "finished"),
        "checkpoint verify": Case(("checkpoint", "verify", "run=run", "runs_dir=runs"), "finished"),
        "checkpoint ls": Case(("checkpoint", "ls", "runs_dir=runs"), "finished"),
    }
