"""Ranks of one process that has imported torch once: started by tests/e2e/forked.py.

    python -m tests.e2e.fork_ranks

Each line on stdin has ranks that run at once: [{"words", "cwd", "environ", "out", "err", "slot"}].
Each is forked, enters its slot as `railnet exec` does, where it has one ({"host", "netns", "etc"}),
and answers the words. Once all have ended, a line on stdout has their exit codes.
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
    "parallel3d.cli.command_line",
    "parallel3d.commands.train",
    "parallel3d.checkpoint.storage",
    "torch.distributed.distributed_c10d",
    "torch.distributed.elastic.agent.server.local_elastic_agent",
)


def call(name: str, *arguments: Any) -> None:
    """One of libc's functions; raises what it says."""
    if getattr(LIBC, name)(*arguments):
        number = ctypes.get_errno()
        raise OSError(number, f"{name}{arguments}: {os.strerror(number)}")


def enter(slot: dict[str, str]) -> None:
    """The slot's network, under its host's name, with the host's files and devices."""
    with open(slot["netns"]) as netns:
        call("setns", netns.fileno(), NEW_NET)
    call("unshare", NEW_MOUNTS | NEW_HOSTNAME)
    socket.sethostname(slot["host"])
    call("mount", b"none", b"/", None, RECURSIVE | PRIVATE, None)
    for name in OF_THE_HOST:
        call("mount", f"{slot['etc']}/{name}".encode(), f"/etc/{name}".encode(), None, BIND, None)
    call("mount", b"sysfs", b"/sys", b"sysfs", 0, None)


def live(rank: dict[str, Any]) -> int:
    """What `python -m parallel3d WORDS` does. Returns the exit code."""
    for name, number in (("out", 1), ("err", 2)):
        with open(rank[name], "w") as file:
            os.dup2(file.fileno(), number)
    if rank["slot"]:
        enter(rank["slot"])
    os.chdir(rank["cwd"])
    os.environ.clear()
    os.environ.update(rank["environ"])
    from parallel3d.cli.command_line import main

    return main(rank["words"])


def start(rank: dict[str, Any]) -> int:
    """Forks a rank; its process."""
    pid = os.fork()
    if pid == 0:
        sys.exit(live(rank))
    return pid


def serve() -> None:
    for name in NEEDED:
        importlib.import_module(name)
    gc.freeze()  # what is shared is not written to by collections
    for line in sys.stdin:
        pids = [start(rank) for rank in json.loads(line)]
        codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]
        print(json.dumps(codes), flush=True)


if __name__ == "__main__":
    serve()
