"""Ranks that are forked of a process which has imported torch: they start in no time."""

from __future__ import annotations

import json
import select
import socket
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.e2e.command import Shell


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

    def add(self, *words: str, slot: dict[str, str] | None = None, **environ: str) -> None:
        """One more process for the next start."""
        self.count += 1
        job = {"words": words, "slot": slot, "environ": self.shell.environment(**environ)}
        logs = {name: str(self.shell.scratch / f"{self.count}.{name}") for name in ("out", "err")}
        self.jobs.append(job | logs)

    def add_world(self, size: int, *words: str) -> None:
        """The ranks of one run on this host."""
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = str(probe.getsockname()[1])
        sizes = dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE"), str(size))
        meeting = {"MASTER_ADDR": "localhost", "MASTER_PORT": port}
        for rank in map(str, range(size)):
            self.add(*words, RANK=rank, LOCAL_RANK=rank, **sizes, **meeting)

    def start(self) -> None:
        """Starts what was added."""
        self.process.stdin.write(json.dumps(self.jobs) + "\n")
        self.process.stdin.flush()

    def finish(self, timeout_s: float = 120) -> list[tuple[str, str]]:
        """Waits for what was started; none may fail. What each said on stdout and stderr."""
        answered, _, _ = select.select([self.process.stdout], [], [], timeout_s)
        assert answered, f"still running after {timeout_s} s"
        codes = json.loads(self.process.stdout.readline())
        said = [(Path(job["out"]).read_text(), Path(job["err"]).read_text()) for job in self.jobs]
        self.jobs = []
        failed = [err for (_, err), code in zip(said, codes, strict=True) if code]
        assert not failed, "\n".join(failed)
        return said

    def end(self) -> None:
        self.process.stdin.close()
        self.process.wait(30)
