"""Records the addresses on which a test's processes listen, while they run."""

from __future__ import annotations

import os
import threading
from dataclasses import dataclass, field
from pathlib import Path

from tests.e2e.command import Shell

LISTENS = "0A"
LOOPBACK = ("7F", "00000000000000000000000001000000", "0000000000000000FFFF00000100007F")


@dataclass
class Watched:
    """Listeners (address, port) of a shell's processes, looked up while they run."""

    shell: Shell
    seen: set[tuple[str, int]] = field(default_factory=set)
    _over: threading.Event = field(default_factory=threading.Event)

    def __enter__(self) -> Watched:
        self._thread = threading.Thread(target=self._look, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def _look(self) -> None:
        while not self._over.wait(0.1):
            self.seen |= listeners(list(self.shell.processes()))

    @property
    def elsewhere(self) -> list[tuple[str, int]]:
        return [(address, port) for address, port in self.seen if not is_loopback(address)]


def is_loopback(address: str) -> bool:
    """Parses an address as the kernel writes it: words of four bytes, each in this machine's byte
    order."""
    return address.endswith(LOOPBACK[0]) if len(address) == 8 else address in LOOPBACK


def listeners(pids: list[int]) -> set[tuple[str, int]]:
    """Returns the addresses on which these processes listen."""
    inodes = set()
    for pid in pids:
        for link in Path(f"/proc/{pid}/fd").glob("*"):
            try:
                name = os.readlink(link)
            except OSError:
                continue  # it has been closed, or the process has ended
            if name.startswith("socket:["):
                inodes.add(name[8:-1])
    found = set()
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == LISTENS and fields[9] in inodes:
                address, _, port = fields[1].partition(":")
                found.add((address, int(port, 16)))
    return found
