"""Ports for servers that a test starts a moment later, perhaps in another process."""

from __future__ import annotations

import errno
import random
import socket

# Below the range that the kernel gives to outgoing connections (32768 and up on Linux): a port of
# that range, free a moment ago, may belong to any connection by the time the server binds it.
LOWEST, HIGHEST = 15_000, 32_000


def free_port() -> int:
    """A port on which nobody listens and that no outgoing connection will take.

    The choice is not seeded: tests running side by side must not choose alike.
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
            return port
