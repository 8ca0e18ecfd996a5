"""Tests what a collector believes and keeps, by sockets that play guards."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from parallel3d.slurm import collector as collector_module
from parallel3d.slurm.collector import Collector
from parallel3d.slurm.messages import LONGEST, message, opened
from parallel3d.slurm.verdict import BeatLimits
from tests.pace import PATIENCE

SECRET, START = b"a-secret", 3
NUMBERS = itertools.count(1)


class Played:
    """A guard by hand."""

    def __init__(self, collector: Collector) -> None:
        self.socket = socket.create_connection(("127.0.0.1", collector.port))
        self.socket.settimeout(10 * PATIENCE)

    def send(self, node: str = "a", number: int | None = None, **more: Any) -> bytes:
        number = next(NUMBERS) if number is None else number
        line = message(SECRET, "guard", START, number, {"node": node, "ranks": [], **more})
        self.socket.sendall(line)
        return line

    def heard(self) -> dict[str, Any]:
        """Returns the collector's next word; {} if it has closed the connection."""
        line = b""
        with contextlib.suppress(ConnectionError):
            while not line.endswith(b"\n"):
                if not (byte := self.socket.recv(1)):
                    return {}
                line += byte
            return opened(SECRET, "collector", START, line[:-1])[1]
        return {}


@pytest.fixture
def said() -> list[str]:
    return []


@pytest.fixture
def collector(said: list[str]) -> Iterator[Collector]:
    collector = Collector(SECRET.decode(), START, ["a", "b"], said.append)
    yield collector
    collector.close()


def rank(letter: str = "S") -> list[Any]:
    return [0, letter, "stepping", 3, 0.1, 0.5]


def test_each_beat_is_acknowledged(collector: Collector) -> None:
    guard = Played(collector)
    for number in (5_000_001, 5_000_002):
        guard.send(number=number)
        assert guard.heard() == {"ack": number}


def refused(collector: Collector, said: list[str], data: bytes) -> str:
    """Sends bytes; returns why they were refused."""
    guard = Played(collector)
    with contextlib.suppress(ConnectionError):
        guard.socket.sendall(data)
    assert guard.heard() == {}
    (line,) = said
    assert line.startswith("a message from ::ffff:127.0.0.1 is refused: ")
    return line.partition("refused: ")[2]


def forged(node: Any = "a", **more: Any) -> bytes:
    payload = {"node": node, "ranks": [], **more}
    return message(SECRET, "guard", START, 9_000_000, payload)


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (message(b"guess", "guard", START, 1, {"node": "a", "ranks": []}), "signature"),
        (message(SECRET, "guard", START - 1, 1, {"node": "a", "ranks": []}), "start 2"),
        (message(SECRET, "collector", START, 1, {"ack": 1}), "signature"),
        (b"GET / HTTP/1.1\r\n\r\n", "signature"),
        (b"x" * (LONGEST + 2), "longer"),
        (forged("c"), "c is not one of the nodes"),
        (forged(["a"]), "not one of the nodes"),
        (forged(ranks=[[1, 2]]), "not a message"),
        (forged(ranks=[[0, "S", "asleep", 3, 0.1, 0.5]]), "not a message"),
        (forged(ranks=[[0, "S", "paused", 3, "0.1", 0.5]]), "not a message"),
        (forged(ranks=7), "not a message"),
        (forged(left="many"), "not a message"),
        (forged(answer={"why": ""}), "not a message"),
    ],
)
def test_what_no_guard_of_this_start_says_is_refused_in_a_line(
    data: bytes, why: str, collector: Collector, said: list[str]
) -> None:
    assert why in refused(collector, said, data)
    assert collector.reports == {} and collector.verdict is None


def test_a_beat_that_is_sent_again_is_refused(collector: Collector, said: list[str]) -> None:
    guard = Played(collector)
    line = guard.send(ranks=[rank()])
    assert guard.heard()
    guard.send(ranks=[])
    assert guard.heard()
    assert "old" in refused(collector, said, line)
    assert collector.reports == {"a": []}


def test_strangers_fill_neither_memory_nor_the_log(collector: Collector, said: list[str]) -> None:
    limit = 2 * 2 + collector_module.MORE_CONNECTIONS
    strangers = [Played(collector) for _ in range(2 * limit)]
    guard = Played(collector)
    guard.send()
    assert guard.heard()
    for stranger in strangers:
        with contextlib.suppress(ConnectionError):
            stranger.socket.sendall(b"nonsense\n")
    guard.send()
    assert guard.heard()
    assert len(said) <= collector_module.TOLD
    mine = sum(os.path.realpath(f"/proc/self/fd/{n}").count("socket:") for n in range(4096))
    for stranger in strangers:
        stranger.socket.close()
    assert mine <= 2 * limit + limit + 40


def test_one_that_says_nothing_is_cut_off(said: list[str]) -> None:
    collector = Collector(
        SECRET.decode(), START, ["a"], said.append, limits=BeatLimits(connect=0.1)
    )
    try:
        assert Played(collector).heard() == {}
    finally:
        collector.close()


def test_a_closed_connection_alone_is_no_verdict(collector: Collector) -> None:
    for node in "ab":
        guard = Played(collector)
        guard.send(node, ranks=[rank()])
        guard.heard()
        guard.socket.close()
    collector.watch(["a", "b"])
    assert collector.wait(0.5) is None


def test_a_gone_rank_wakes_the_wait(collector: Collector) -> None:
    guard = Played(collector)
    collector.watch(["a"])
    guard.send(ranks=[rank("")])
    found = collector.wait(PATIENCE * 60)
    assert found is not None and found.gone == (("a", 0),)
    assert abs(time.time() - found.failed_at) < PATIENCE * 60
    guard.send(ranks=[rank("S")])
    guard.heard(), guard.heard()
    assert collector.verdict is found


def test_without_ranks_to_watch_nothing_is_judged(collector: Collector) -> None:
    guard = Played(collector)
    guard.send(ranks=[rank("")])
    guard.heard()
    assert collector.wait(0.4) is None


@pytest.mark.parametrize("age", [0.0, 9.0], ids=["they go on", "they stand still"])
def test_a_node_without_a_connection_needs_a_guard_if_steps_go_on(age: float) -> None:
    limits = BeatLimits(reconnect=0.2, alive=0.1)
    with contextlib.closing(Collector(SECRET.decode(), START, ["a", "b"], limits=limits)) as found:
        found.watch(["a", "b"])
        guards = {node: Played(found) for node in ("a", "b")}
        for node, guard in guards.items():
            guard.send(node, ranks=[rank()])
            guard.heard()
        assert found.unguarded == frozenset()
        guards["a"].socket.close()
        for _ in range(10):
            time.sleep(0.05)
            guards["b"].send("b", ranks=[[1, "S", "stepping", 3, age, 0.5]])
            guards["b"].heard()
        assert found.unguarded == (frozenset() if age else {"a"})
        again = Played(found)
        again.send("a", ranks=[rank()])
        again.heard()
        assert found.unguarded == frozenset()


def test_waits_end_by_a_signal_handlers_word(collector: Collector) -> None:
    for wait in (collector.wait, collector.wait_for_answers):
        threading.Timer(0.1, collector.wake).start()
        begin = time.monotonic()
        wait(PATIENCE * 60)
        assert time.monotonic() - begin < PATIENCE * 30


def test_answers_are_taken_once(collector: Collector) -> None:
    for node, ok in (("a", True), ("b", False)):
        guard = Played(collector)
        guard.send(node, answer={"ok": ok, "why": "w", "gpus": 8})
        guard.send(node, answer={"ok": not ok, "why": "later"})
    answers = collector.wait_for_answers(PATIENCE * 60)
    assert {node: (each.ok, each.why) for node, each in answers.items()} == {
        "a": (True, "w"),
        "b": (False, "w"),
    }
    assert json.loads(json.dumps(dict(answers["a"].facts)))["gpus"] == 8


def test_an_order_reaches_guards_at_once_and_those_that_connect_later(
    collector: Collector,
) -> None:
    early = Played(collector)
    early.send("a", ranks=[rank()])
    assert early.heard().keys() == {"ack"}
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.append(collector.end(2.5, PATIENCE * 60)))
    thread.start()
    assert early.heard() == {"ack": 0, "end": 2.5}
    late = Played(collector)
    late.send("b", left=[])
    assert late.heard()["end"] == 2.5
    early.send("a", left=[11, 12])
    assert early.heard()["end"] == 2.5
    assert thread.is_alive()
    early.send("a", left=[])
    thread.join()
    assert found[0].clean == {"a", "b"} and not found[0].left and not found[0].silent


def test_an_end_says_which_processes_are_left(collector: Collector) -> None:
    guard = Played(collector)
    guard.send("a", left=[11])
    guard.heard()
    ended = collector.end(0.0, 0.3)
    assert ended.left == {"a": (11,)} and ended.silent == {"b"} and not ended.clean


def test_a_collector_that_was_stopped_itself_calls_nobody_dead(
    said: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A suspended job goes on: the silence while it was stopped is nobody's."""
    passed = [0.0]
    real = time.monotonic
    monkeypatch.setattr(collector_module.time, "monotonic", lambda: real() + passed[0])
    collector = Collector(SECRET.decode(), START, ["a", "b"], said.append)
    try:
        guards = {node: Played(collector) for node in "ab"}
        for node, guard in guards.items():
            guard.send(node, ranks=[rank()])
            guard.heard()
        collector.watch(["a", "b"])
        passed[0] = 3600.0
        assert collector.wait(3 * collector_module.LOOK_S) is None
        assert collector.verdict is None and not collector.dead_spares
    finally:
        collector.close()
