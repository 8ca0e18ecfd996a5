"""Ranks of one process that has imported torch once: run by tests/e2e/rails.py, one a test module.

    python -m tests.e2e.rail_ranks

Each line on stdin is a run: {"words": [...], "ranks": [{"host", "netns", "etc", "environ", "out",
"err"}]}. Every rank is forked, enters its slot as `railnet exec` does and answers the words.
Once all have ended, a line on stdout has their exit codes.
"""

from __future__ import annotations

import ctypes
import gc
import importlib
import json
import os
import socket
import sys
from typing import Any

LIBC = ctypes.CDLL(None, use_errno=True)
NEW_NET, NEW_MOUNTS, NEW_HOSTNAME = 0x40000000, 0x00020000, 0x04000000
BIND, RECURSIVE, PRIVATE = 0x1000, 0x4000, 0x40000
OF_THE_HOST = ("hosts", "nsswitch.conf")
NEEDED = (
    "parallel3d.cli",
    "parallel3d.train",
    "torch.distributed.distributed_c10d",
    "torch.distributed.elastic.agent.server.local_elastic_agent",
)


def call(name: str, *arguments: Any) -> None:
    """One of libc's functions; raises what it says."""
    if getattr(LIBC, name)(*arguments):
        number = ctypes.get_errno()
        raise OSError(number, f"{name}{arguments}: {os.strerror(number)}")


def enter(rank: dict[str, Any]) -> None:
    """The slot's network, under its host's name, with the host's files and devices."""
    with open(rank["netns"]) as netns:
        call("setns", netns.fileno(), NEW_NET)
    call("unshare", NEW_MOUNTS | NEW_HOSTNAME)
    socket.sethostname(rank["host"])
    call("mount", b"none", b"/", None, RECURSIVE | PRIVATE, None)
    for name in OF_THE_HOST:
        call("mount", f"{rank['etc']}/{name}".encode(), f"/etc/{name}".encode(), None, BIND, None)
    call("mount", b"sysfs", b"/sys", b"sysfs", 0, None)


def live(rank: dict[str, Any], words: list[str]) -> int:
    """What `python -m parallel3d WORDS` does in the slot. Returns the exit code."""
    for name, number in (("out", 1), ("err", 2)):
        with open(rank[name], "w") as file:
            os.dup2(file.fileno(), number)
    enter(rank)
    os.environ.clear()
    os.environ.update(rank["environ"])
    from parallel3d.cli import main

    return main(words)


def start(rank: dict[str, Any], words: list[str]) -> int:
    """Forks a rank; its process."""
    pid = os.fork()
    if pid == 0:
        sys.exit(live(rank, words))
    return pid


def serve() -> None:
    for name in NEEDED:
        importlib.import_module(name)
    gc.freeze()  # what is shared is not written to by collections
    for line in sys.stdin:
        run = json.loads(line)
        pids = [start(rank, run["words"]) for rank in run["ranks"]]
        codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]
        print(json.dumps(codes), flush=True)


if __name__ == "__main__":
    serve()
