"""Ranks that are forked of a process which has imported torch: they start in no time."""

from __future__ import annotations

import functools
import itertools
import json
import select
import socket
import subprocess
import sys
import tempfile
import threading
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from tests.e2e.command import Ended, Shell
from tests.pace import PATIENCE


@dataclass
class Forked:
    """The process; its ranks are started as torchrun would, in the shell's directory."""

    shell: Shell
    process: subprocess.Popen[str]
    jobs: list[dict[str, Any]] = field(default_factory=list)
    count: int = 0

    @classmethod
    def begin(cls, shell: Shell) -> Forked:
        """Returns at once: what is started meanwhile waits for the imports."""
        process = subprocess.Popen(
            (sys.executable, "-m", "tests.e2e.fork_ranks"),
            cwd=shell.cwd,
            env=shell.environment(),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        return cls(shell, process)

    def add(
        self,
        *words: str,
        slot: dict[str, str] | None = None,
        shell: Shell | None = None,
        **environ: str,
    ) -> None:
        """One more process for the next start, in the directory of `shell`."""
        self.count += 1
        of = shell or self.shell
        job = {"words": words, "slot": slot, "cwd": str(of.cwd)}
        logs = {name: str(of.scratch / f"{self.count}.{name}") for name in ("out", "err")}
        self.jobs.append(job | {"environ": of.environment(**environ)} | logs)

    def add_world(self, size: int, *words: str, shell: Shell | None = None) -> None:
        """The ranks of one run on this host."""
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = str(probe.getsockname()[1])
        sizes = dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE"), str(size))
        meeting = {"MASTER_ADDR": "localhost", "MASTER_PORT": port}
        for rank in map(str, range(size)):
            self.add(*words, shell=shell, RANK=rank, LOCAL_RANK=rank, **sizes, **meeting)

    def start(self) -> None:
        """Starts what was added."""
        self.process.stdin.write(json.dumps(self.jobs) + "\n")
        self.process.stdin.flush()

    def finish(self, timeout_s: float = 120) -> list[Ended]:
        """Waits for what was started; none may fail."""
        ended = self.ends(timeout_s)
        failed = [each.err for each in ended if each.code]
        assert not failed, "\n".join(failed)
        return ended

    def ends(self, timeout_s: float = 120) -> list[Ended]:
        """Waits for what was started."""
        answered, _, _ = select.select([self.process.stdout], [], [], timeout_s)
        assert answered, f"still running after {timeout_s} s"
        codes = json.loads(self.process.stdout.readline())
        logs = [[Path(job[name]) for name in ("out", "err")] for job in self.jobs]
        said = [[log.read_text() for log in of_one] for of_one in logs]
        for log in itertools.chain(*logs):
            log.unlink()
        self.jobs = []
        return [Ended(code, *text, 0.0, 0.0) for code, text in zip(codes, said, strict=True)]

    def end(self) -> None:
        self.process.stdin.close()
        self.process.wait(30)


_ONE_AT_A_TIME = threading.Lock()


@functools.cache
def _of_the_session() -> Forked:
    """A process for all tests, with a mark of its own: it ends with this one."""
    return Forked.begin(Shell(Path("/"), Path(tempfile.gettempdir())))


def run_forked(shell: Shell, *words: str, ranks: int = 1) -> Ended:
    """What `parallel3d WORDS` does in the shell's directory, where starting it is not what is
    tested: with more ranks than one what the first says, and the worst exit code."""
    with _ONE_AT_A_TIME:
        forked = _of_the_session()
        if ranks == 1:
            forked.add(*words, shell=shell)
        else:
            forked.add_world(ranks, *words, shell=shell)
        forked.start()
        first, *others = forked.ends(120 * PATIENCE)
    return replace(first, code=max([first.code, *(each.code for each in others)], key=abs))
