"""Forks commands from a process that has imported torch, which saves each of them two seconds.

`ReadyPopen` is a `subprocess.Popen` for `python -m parallel3d WORDS`, or for `python WORDS` if they
begin with -c: its process has the same words, environment (also in /proc), folder, streams and
signals, and is used in the same way. It lacks the start itself, which other tests run.
"""

from __future__ import annotations

import functools
import inspect
import json
import os
import select
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

# Bytes reserved in /proc for the environment of a process that is forked from this one.
ROOM_BYTES = 1 << 15
ROOT = Path(__file__).resolve().parents[2]
# Code that runs the module of its first argument like `python -m`.
MODULE = "import runpy, sys; runpy.run_module(sys.argv.pop(1), run_name='__main__', alter_sys=1)"


class Ready:
    """The process that forks; it ends with this one."""

    def __init__(self) -> None:
        self.folder = tempfile.TemporaryDirectory(prefix="parallel3d-ready-")
        self.address = str(Path(self.folder.name) / "socket")
        listening = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        listening.bind(self.address)
        listening.listen(16)
        # No other process has its standard input: it is closed when this process is gone.
        self.process = subprocess.Popen(
            (sys.executable, "-m", "tests.e2e.ready_process", str(listening.fileno())),
            cwd=ROOT,
            env=os.environ | {"P3D_ROOM": " " * ROOM_BYTES},
            stdin=subprocess.PIPE,
            pass_fds=(listening.fileno(),),
        )
        listening.close()

    def fork(self, request: dict[str, Any], streams: tuple[int, int]) -> tuple[socket.socket, int]:
        """Starts a process; returns the connection that reports its end, and its pid."""
        told = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        told.connect(self.address)
        socket.send_fds(told, [json.dumps(request).encode()], streams)
        return told, int(told.recv(64))


_MAKING = threading.Lock()


@functools.cache
def _made() -> Ready:
    return Ready()


def ready() -> Ready:
    """Returns the only Ready of this session, which the first call makes."""
    with _MAKING:
        return _made()


class ReadyPopen(subprocess.Popen):
    """`words` follow `parallel3d`, or are -c, code and its arguments; `of_popen` has Popen's
    arguments for folder, environment and streams; `slot`: enters a slot of a rail network."""

    def __init__(
        self, words: Sequence[str], slot: dict[str, str] | None = None, **of_popen: Any
    ) -> None:
        self._slot = slot
        super().__init__(words, **of_popen)

    def _execute_child(self, *args: Any) -> None:
        """Overrides Popen's own hook, which is called after the pipes are made and must start the
        process."""
        of = inspect.signature(subprocess.Popen._execute_child).bind(self, *args).arguments
        request = {"words": list(of["args"]), "cwd": str(of["cwd"]), "environ": of["env"]}
        streams = of["c2pwrite"], of["errwrite"]
        self._told, self.pid = ready().fork(request | {"slot": self._slot}, streams)
        self._child_created = True
        for stream, kept in zip(streams, (of["c2pread"], of["errread"]), strict=True):
            if kept != -1:  # a pipe; a file is closed by its owner
                os.close(stream)
        os.close(self.__dict__.pop("_devnull"))  # its standard input

    def _try_wait(self, wait_flags: int) -> tuple[int, int]:
        """Does the same as `os.waitpid`, which only knows children."""
        if wait_flags and not select.select([self._told], [], [], 0)[0]:
            return 0, 0
        status, cpu_s = self._told.recv(64).split()
        self._told.close()
        self.cpu_s = float(cpu_s)
        return self.pid, int(status)

    def _internal_poll(self, _deadstate: int | None = None, **_: Any) -> int | None:
        if self.returncode is None and self._waitpid_lock.acquire(blocking=False):
            try:
                if self.returncode is None:
                    pid, status = self._try_wait(os.WNOHANG)
                    if pid == self.pid:
                        self._handle_exitstatus(status)
            finally:
                self._waitpid_lock.release()
        return self.returncode


def run_code(
    code: str, *words: str, cwd: Path = ROOT, **environ: str
) -> subprocess.CompletedProcess[str]:
    """Runs `python -c code words` to its end, for code that needs torch; `environ` is added to this
    process's."""
    process = ReadyPopen(
        ("-c", code, *words),
        cwd=cwd,
        env=os.environ | environ,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    out, err = process.communicate()
    return subprocess.CompletedProcess(words, process.returncode, out, err)


def run_module(
    module: str, *words: str, cwd: Path = ROOT, **environ: str
) -> subprocess.CompletedProcess[str]:
    """Runs `python -m module words` to its end, for modules that need torch; see `run_code`."""
    return run_code(MODULE, module, *words, cwd=cwd, **environ)


def run_command(*words: str) -> subprocess.CompletedProcess[str]:
    """Runs `python -m parallel3d words` to its end, from the checkout; see `run_code`."""
    return run_module("parallel3d", *words)
