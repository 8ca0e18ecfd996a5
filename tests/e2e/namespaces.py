"""Enters Linux namespaces, by libc's own functions."""

from __future__ import annotations

import ctypes
import os
import socket
from typing import Any

LIBC = ctypes.CDLL(None, use_errno=True)
NEW_NET, NEW_MOUNTS, NEW_HOSTNAME = 0x40000000, 0x00020000, 0x04000000
BIND, RECURSIVE, PRIVATE = 0x1000, 0x4000, 0x40000
OF_THE_HOST = ("hosts", "nsswitch.conf")


def call(name: str, *arguments: Any) -> None:
    """Calls one of libc's functions; raises its error."""
    if getattr(LIBC, name)(*arguments):
        number = ctypes.get_errno()
        raise OSError(number, f"{name}{arguments}: {os.strerror(number)}")


def enter(slot: dict[str, str]) -> None:
    """Enters the slot's network, under its host's name, with the host's files and devices."""
    with open(slot["netns"]) as netns:
        call("setns", netns.fileno(), NEW_NET)
    call("unshare", NEW_MOUNTS | NEW_HOSTNAME)
    socket.sethostname(slot["host"])
    call("mount", b"none", b"/", None, RECURSIVE | PRIVATE, None)
    for name in OF_THE_HOST:
        call("mount", f"{slot['etc']}/{name}".encode(), f"/etc/{name}".encode(), None, BIND, None)
    call("mount", b"sysfs", b"/sys", b"sysfs", 0, None)
