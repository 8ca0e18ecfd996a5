"""Finds ports for servers that a test starts a moment later, perhaps in another process."""

from __future__ import annotations

import contextlib
import errno
import random
import socket
import tempfile
from pathlib import Path

# Below the range that the kernel gives to outgoing connections (32768 and up on Linux): a port of
# that range that is free now may belong to any connection when the server binds it.
LOWEST, HIGHEST = 15_000, 32_000


def free_port() -> int:
    """Returns a port on which no process listens, and that no outgoing connection or other test
    will get.

    The choice is not seeded: parallel sessions must not choose the same. Within a session, whose
    processes share one temporary folder, no port is given twice.
    """
    choice = random.SystemRandom()
    while True:
        with socket.socket() as probe:
            try:
                probe.bind(("", port := choice.randrange(LOWEST, HIGHEST)))
            except OSError as error:
                if error.errno == errno.EADDRINUSE:
                    continue
                raise
        with contextlib.suppress(FileExistsError):
            Path(tempfile.gettempdir(), f"port-{port}").touch(exist_ok=False)
            return port
