"""Starts ranks like a launcher, each forked from a process that has imported torch (ready.py)."""

from __future__ import annotations

import signal
import subprocess
import time
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

from tests.e2e.command import Ended, Shell, without_replaced
from tests.e2e.ready import ReadyPopen
from tests.pace import PATIENCE
from tests.ports import free_port

AFTER_FAILURE_S = 20 * PATIENCE


@dataclass(frozen=True)
class Job:
    """A process to start: its arguments and its environment."""

    words: tuple[str, ...]
    shell: Shell
    environ: dict[str, str]
    slot: dict[str, str] | None
    number: int

    def log(self, stream: str) -> Path:
        return self.shell.scratch / f"{self.number}.{stream}"

    def start(self) -> ReadyPopen:
        with self.log("out").open("w") as out, self.log("err").open("w") as err:
            return ReadyPopen(
                self.words,
                self.slot,
                cwd=self.shell.cwd,
                env=self.shell.environment(**self.environ),
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
            )

    def ended(self, code: int) -> Ended:
        logs = [self.log(stream) for stream in ("out", "err")]
        said = [log.read_text() for log in logs]
        for log in logs:
            log.unlink()
        return Ended(code, *said, 0.0, 0.0)


@dataclass
class Forked:
    """Processes that are added, started together and waited for, in the shell's directory."""

    shell: Shell
    jobs: list[Job] = field(default_factory=list)
    running: list[ReadyPopen] = field(default_factory=list)
    count: int = 0

    def add(self, *words: str, slot: dict[str, str] | None = None, **environ: str) -> None:
        """Adds one process to the next start; `slot`: enters a slot of a rail network, like
        `railnet exec` ({"host", "netns", "etc"})."""
        self.count += 1
        self.jobs.append(Job(without_replaced(words), self.shell, environ, slot, self.count))

    def add_world(self, size: int, *words: str) -> None:
        """Adds the ranks of one run on this host."""
        port = str(free_port())
        sizes = dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE"), str(size))
        rendezvous = {"MASTER_ADDR": "localhost", "MASTER_PORT": port}
        for rank in map(str, range(size)):
            self.add(*words, RANK=rank, LOCAL_RANK=rank, **sizes, **rendezvous)

    def start(self) -> None:
        """Starts the added processes that do not run yet."""
        self.running += [job.start() for job in self.jobs[len(self.running) :]]

    def finish(self, timeout_s: float = 120) -> list[Ended]:
        """Waits for the started processes; none may fail."""
        ended = self.ends(timeout_s)
        failed = [each.err for each in ended if each.code]
        assert not failed, "\n".join(failed)
        return ended

    def ends(self, timeout_s: float = 120) -> list[Ended]:
        """Waits for the started processes.

        If one still runs long after another one has failed, or at `timeout_s` of a quiet machine,
        the test fails with the stacks and output of all.
        """
        deadline, late = time.monotonic() + timeout_s * PATIENCE, []
        while running := [process for process in self.running if process.poll() is None]:
            if any(process.returncode for process in self.running):
                deadline = min(deadline, time.monotonic() + AFTER_FAILURE_S)
            if time.monotonic() > deadline:
                late = running
                break
            with suppress(subprocess.TimeoutExpired):
                running[0].wait(1)
        for process in late:
            process.send_signal(signal.SIGABRT)  # makes faulthandler write its stacks
        codes = [process.wait() for process in self.running]
        ended = [job.ended(code) for job, code in zip(self.jobs, codes, strict=True)]
        self.jobs, self.running = [], []
        assert not late, "\n".join(f"{e.code}: {e.out[-2000:]}\n{e.err[-8000:]}" for e in ended)
        return ended


def run_forked(shell: Shell, *words: str, ranks: int = 1) -> Ended:
    """Runs `parallel3d WORDS` in the shell's directory, for tests that are not about its start.

    With several ranks it returns the first one's output and the worst exit code.
    """
    forked = Forked(shell)
    if ranks == 1:
        forked.add(*words)
    else:
        forked.add_world(ranks, *words)
    forked.start()
    first, *others = forked.ends()
    return replace(first, code=max([first.code, *(each.code for each in others)], key=abs))
