"""Ranks of one host listen on its loopback alone, and keep nothing in the store that is code."""

from __future__ import annotations

import base64
import os
import signal
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch.distributed as dist

from tests.e2e.command import PARALLEL3D, TINY, Shell
from tests.e2e.test_failures import SECONDS, assert_stopped_and_saved, start_training, words
from tests.pace import pace

pytestmark = pytest.mark.at_once(2)
LISTENS = "0A"
LOOPBACK = ("7F", "00000000000000000000000001000000", "0000000000000000FFFF00000100007F")


@dataclass
class Watched:
    """Every listener that processes of a shell had, looked for while they run: (address, port)."""

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
        while not self._over.wait(0.05):
            self.seen |= listeners(list(self.shell.processes()))

    @property
    def elsewhere(self) -> list[tuple[str, int]]:
        return [(address, port) for address, port in self.seen if not is_loopback(address)]


def is_loopback(address: str) -> bool:
    """Of an address as the kernel writes it: words of four bytes, each in this machine's order."""
    return address.endswith(LOOPBACK[0]) if len(address) == 8 else address in LOOPBACK


def listeners(pids: list[int]) -> set[tuple[str, int]]:
    """What these processes listen on."""
    inodes = set()
    for pid in pids:
        for link in Path(f"/proc/{pid}/fd").glob("*"):
            try:
                name = os.readlink(link)
            except OSError:
                continue  # closed, or ended, meanwhile
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


def commands(shell: Shell) -> dict[str, tuple[str, ...]]:
    network = "launch.shared_memory=false"
    text = shell.text()
    return {
        "train over gloo": ("train", *TINY, *text, "dp=2", network),
        "verify": ("verify", *TINY, *text, "tp=2", network, "verify.steps=2"),
        "bench": ("bench", "comm", "device=cpu", "dp=2", network, "bench.sizes=[4096]"),
    }


@pytest.mark.parametrize("name", ["train over gloo", "verify", "bench"])
def test_a1_no_listener_of_a_local_run_is_off_the_loopback(shell: Shell, name: str) -> None:
    with Watched(shell) as watched:
        # What a machine of several hosts has in its environment is not for a run of one.
        ended = shell.run(*PARALLEL3D, *commands(shell)[name], GLOO_SOCKET_IFNAME="eth0")
    assert ended.code == 0, ended.err
    assert watched.elsewhere == []
    assert watched.seen
    assert ("fp64" in ended.out) == (name == "verify")  # which answers by its exit code


def test_a1_one_process_and_generating_ranks_listen_on_the_loopback_alone(shell: Shell) -> None:
    shell.environ = {"GLOO_SOCKET_IFNAME": "eth0"}
    with Watched(shell) as watched:
        ended = shell.run(*PARALLEL3D, *words(shell, "checkpoint.every=3"))
    assert ended.code == 0, ended.err
    assert watched.elsewhere == []
    with Watched(shell) as watched:
        asked = ("run=mine", "tp=2", "generate.max_tokens=3", "prompt=12 b", "device=cpu")
        ended = shell.run(*PARALLEL3D, "generate", *asked)
    assert ended.code == 0, ended.err
    assert watched.elsewhere == []
    assert watched.seen


def test_a1_shared_memory_the_store_without_pickles_and_sigterm(shell: Shell) -> None:
    """One run that is looked at, asked for what its store holds, and then told to stop."""
    shell.environ = {"GLOO_SOCKET_IFNAME": "eth0"}
    with Watched(shell) as watched:
        process = start_training(shell, "pp=1", "tp=2", "checkpoint.every=500")
    assert watched.elsewhere == []
    assert watched.seen
    ports = {env["MASTER_PORT"] for env in shell.processes().values() if "MASTER_PORT" in env}
    store = dist.TCPStore("127.0.0.1", int(ports.pop()), wait_for_workers=False)
    keys = store.list_keys()
    values = {key: store.get(key) for key in keys}
    assert any("parallel3d/" in key for key in keys)
    assert not any("rendezvous" in key for key in keys)
    for key, value in values.items():
        assert not is_pickle(value), key
    started = time.monotonic()
    process.terminate()
    ended = shell.finish(process, started, 30)
    assert ended.wall_s < SECONDS * pace()
    assert ended.code == 0, ended.err
    assert_stopped_and_saved(shell, ended, signal.SIGTERM)
    assert (shell.cwd / "runs" / "mine" / "requeue").exists()


def is_pickle(value: bytes) -> bool:
    """Whether it begins as pickles of protocol 2 and later do, plainly or in base64."""
    try:
        decoded = base64.b64decode(value, validate=True)
    except ValueError:
        decoded = b""
    begins = tuple(b"\x80" + bytes([protocol]) for protocol in range(2, 6))
    return any(v.startswith(begins) and v.endswith(b".") for v in (value, decoded))
