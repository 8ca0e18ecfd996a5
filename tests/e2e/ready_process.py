"""Forks commands that find torch already imported; tests/e2e/ready.py starts it.

    python -m tests.e2e.ready_process FD

Each connection that the socket FD takes has one request, {"words", "cwd", "environ", "slot"}, with
the streams of a new process. The reply has the pid and, once the process has ended, its status and
its CPU seconds, with those of the processes that it waited for.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import importlib
import json
import os
import select
import signal
import socket
import sys
import tempfile
from pathlib import Path
from typing import Any

from parallel3d.cli.overrides import compose
from parallel3d.run.directory import typed_config
from tests.e2e.namespaces import LIBC, enter
from tests.garbage import collect_seldom

NEEDED = (
    "parallel3d.cli.command_line",
    "parallel3d.commands.train",
    "parallel3d.models.transformer_architecture",
    "parallel3d.checkpoint.storage",
    "torch.distributed.distributed_c10d",
    # These are needed with zero=3, and for tensors on the simulated device; importing them takes
    # 1.7 s.
    "torch.distributed.fsdp",
    "numpy.random",  # a run's first sample imports it
)
OWN_FDS = 3  # a new process has its own three streams, and no descriptor of this one


class Forks:
    """The running processes, and the connections that are informed when they end."""

    def __init__(self, listening: socket.socket) -> None:
        self.listening = listening
        self.running: dict[int, socket.socket] = {}
        LIBC.getenv.restype = ctypes.c_void_p
        # Where the kernel reads this process's environment, in which one variable reserves room.
        self.room, self.size = LIBC.getenv(b"P3D_ROOM"), len(os.environ["P3D_ROOM"])

    def serve(self) -> None:
        """Forks a process for each request, and returns in that process; ends when its parent is
        gone."""
        woken, wakes = os.pipe()
        os.set_blocking(wakes, False)
        signal.set_wakeup_fd(wakes)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        while True:
            readable, _, _ = select.select([self.listening, woken, sys.stdin], [], [])
            if sys.stdin in readable:
                os._exit(0)
            if woken in readable:
                os.read(woken, 4096)
                self.reap()
            if self.listening in readable and self.fork():
                return

    def fork(self) -> bool:
        """Returns whether this is the new process."""
        asking, _ = self.listening.accept()
        message, streams, _, _ = socket.recv_fds(asking, 1 << 18, 2)
        pid = os.fork()
        if pid == 0:
            for ours in (self.listening, asking, *self.running.values()):
                # Otherwise it would later close an unrelated descriptor of the same number.
                ours.detach()
            become(json.loads(message), streams)
            self.show(os.environ)
            return True
        for stream in streams:
            os.close(stream)
        self.running[pid] = asking
        asking.send(str(pid).encode())
        return False

    def reap(self) -> None:
        """Reports the processes that have ended."""
        with contextlib.suppress(ChildProcessError):
            while (ended := os.wait4(-1, os.WNOHANG))[0]:
                pid, status, used = ended
                with self.running.pop(pid) as asking, contextlib.suppress(OSError):
                    asking.send(f"{status} {used.ru_utime + used.ru_stime}".encode())

    def show(self, environ: dict[str, str]) -> None:
        """Writes an environment where /proc looks for this process's."""
        said = b"\0" + b"".join(os.fsencode(f"{k}={v}\0") for k, v in environ.items())
        assert len(said) < self.size
        ctypes.memmove(self.room, said, len(said))


def become(request: dict[str, Any], streams: list[int]) -> None:
    """Gives a started process its own folder, environment and streams."""
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    for number, stream in enumerate((os.open(os.devnull, os.O_RDONLY), *streams)):
        os.dup2(stream, number)
    os.closerange(OWN_FDS, os.sysconf("SC_OPEN_MAX"))
    # like Python's own streams, which test once whether they can seek
    sys.stdout = sys.__stdout__ = open(1, "w", closefd=False)  # noqa: SIM115
    sys.stderr = sys.__stderr__ = open(  # noqa: SIM115
        2, "w", 1, errors="backslashreplace", closefd=False
    )
    faulthandler.enable(2)
    if request["slot"]:
        enter(request["slot"])
    os.chdir(request["cwd"])
    os.environ.clear()
    os.environ.update(request["environ"])
    tempfile.tempdir = None  # the cached folder was for another TMPDIR
    sys.argv = request["words"] if is_code(request["words"]) else ["parallel3d", *request["words"]]
    for folder in request["environ"].get("PYTHONPATH", "").split(os.pathsep):
        hook = Path(folder) / "sitecustomize.py"
        if hook.exists():  # Python does the same when it starts
            exec(compile(hook.read_text(), hook, "exec"), {"__name__": "sitecustomize"})


def is_code(words: list[str]) -> bool:
    """Returns whether the words are arguments of `python`: -c CODE and its arguments."""
    return words[:1] == ["-c"]


def main() -> int:
    for name in NEEDED:
        importlib.import_module(name)
    compose()  # Hydra's parser learns its grammar while it reads: a third of a refusal's time
    typed_config({})  # the typed schema is made once: a seventh of a short run's time
    forks = Forks(socket.socket(fileno=int(sys.argv[1])))
    collect_seldom()  # collections would write to shared pages
    forks.serve()
    if is_code(sys.argv):
        exec(compile(sys.argv.pop(1), "<string>", "exec"), {"__name__": "__main__"})
        return 0
    from parallel3d.__main__ import main as command

    return command()


if __name__ == "__main__":
    sys.exit(main())
