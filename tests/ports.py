"""Ports for servers that a test starts a moment later, perhaps in another process."""

from __future__ import annotations

import contextlib
import errno
import random
import socket
import tempfile
from pathlib import Path

# Below the range that the kernel gives to outgoing connections (32768 and up on Linux): a port of
# that range, free a moment ago, may belong to any connection by the time the server binds it.
LOWEST, HIGHEST = 15_000, 32_000


def free_port() -> int:
    """Returns a port on which nobody listens, no outgoing connection will, nor another test.

    The choice is not seeded: sessions side by side must not choose alike. Within one, all of whose
    processes have one folder for what is temporary, no port is given twice.
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
