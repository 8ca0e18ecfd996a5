"""Receives the beats of all guards of a start, and says when the start must end.

It runs in a thread of the batch script's process, which waits for srun and for signals meanwhile.
Whatever comes in, it holds no more than one line a connection, a limited number of connections, and
the last beat of each node.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import os
import resource
import selectors
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from parallel3d.comm.store import listen_everywhere
from parallel3d.errors import print_line, readable
from parallel3d.slurm.messages import Lines, Refusal, message, opened, unsent
from parallel3d.slurm.verdict import (
    BeatLimits,
    LastBeat,
    RankReport,
    Verdict,
    silent_nodes,
    verdict,
)

LOOK_S = 0.25  # between judgements
LOOK_AWAKE_S = 1.0  # a longer gap means that this process itself was stopped, not that nodes died
MORE_CONNECTIONS = 64  # beside two a node: of guards that connect anew, and of strangers
UNREAD_BYTES = 1 << 14  # a guard that leaves more unread is cut off
TOLD = 8  # refused messages of a start that are printed


@dataclass(frozen=True)
class NodeAnswer:
    """Holds a node's answer to the self-test; `facts` is all that the self-test has said."""

    ok: bool
    why: str
    facts: Mapping[str, Any]


@dataclass(frozen=True)
class Leftovers:
    """Says what became of the processes of a start.

    Attributes:
        clean: the nodes whose guards have said that no process is left.
        left: the processes (pids) of other nodes that outlived SIGKILL so far.
        silent: the other nodes that have not answered.
    """

    clean: frozenset[str]
    left: Mapping[str, tuple[int, ...]]
    silent: frozenset[str]


@dataclass(eq=False)
class _Peer:
    """One connection; `node` is None until a message has proved who it is."""

    socket: socket.socket
    address: str
    since: float
    node: str | None = None
    lines: Lines = field(default_factory=Lines)
    out: bytes = b""
    is_behind: bool = False  # whether it has not taken all of `out` yet


class Collector:
    """Collects the beats of one start, from construction to `close`."""

    def __init__(
        self,
        secret: str,
        start: int,
        nodes: Sequence[str],
        say: Callable[[str], None] = print_line,
        *,
        limits: BeatLimits | None = None,
        port: int = 0,
    ) -> None:
        """Listens on all addresses of this host; `nodes` are those whose guards may speak."""
        if not secret:
            raise ValueError("a collector needs a secret")
        self._secret, self._start, self._nodes = secret.encode(), start, frozenset(nodes)
        self._say, self._limits = say, limits or BeatLimits()
        self._changed = threading.Condition()
        self._clock = 0.0  # seconds for which this process was not stopped
        self._beats: dict[str, LastBeat] = {}
        self._reports: dict[str, list[Any]] = {}  # as they came, in the order of `RankReport`
        self._numbers: dict[str, int] = {}  # sequence number of each node's last message
        self._answers: dict[str, NodeAnswer] = {}
        self._left: dict[str, tuple[int, ...]] = {}
        self._used: tuple[str, ...] | None = None
        self._since = 0.0
        self._verdict: Verdict | None = None
        self._dead_spares: frozenset[str] = frozenset()
        self._patience: float | None = None
        self._number, self._refused = time.time_ns() // 1000, 0
        self._has_news = self._is_closed = self._is_urgent = False
        self._peers: dict[int, _Peer] = {}
        self._of_node: dict[str, _Peer] = {}
        self._closed: dict[str, float] = {}  # when the only connection of a node was closed
        _allow_files(2 * len(self._nodes) + 2 * MORE_CONNECTIONS)
        self._listening = listen_everywhere(port)
        self._listening.listen(socket.SOMAXCONN)
        self._listening.setblocking(False)
        self._bell, self._ringer = socket.socketpair()
        self._bell.setblocking(False)
        self._ringer.setblocking(False)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listening, selectors.EVENT_READ)
        self._selector.register(self._bell, selectors.EVENT_READ)
        self._thread = threading.Thread(target=self._run, name="collector", daemon=True)
        self._thread.start()

    # --- for the batch script's loop ----------------------------------------------------------

    @property
    def port(self) -> int:
        return int(self._listening.getsockname()[1])

    @property
    def verdict(self) -> Verdict | None:
        """Returns why the start must end; once given, a verdict stays."""
        return self._verdict

    @property
    def dead_spares(self) -> frozenset[str]:
        """Returns the nodes without ranks that have fallen silent."""
        return self._dead_spares

    @property
    def reports(self) -> Mapping[str, Sequence[RankReport]]:
        """Returns what each node's guard last said of its ranks."""
        with self._changed:
            return {node: [RankReport(*r) for r in ranks] for node, ranks in self._reports.items()}

    @property
    def unguarded(self) -> frozenset[str]:
        """Returns the nodes that live but have no connection, so that they need a new guard.

        Ranks step together: a step that ends after a node was cut off shows that it lives.
        """
        with self._changed:
            used = self._used or ()
            beats = [self._beats[node] for node in used if node in self._beats]
            stepped = max((b.stepped for b in beats if b.stepped is not None), default=-math.inf)
            since = min(stepped - self._limits.alive, self._clock - self._limits.reconnect)
            return frozenset(node for node in used if self._closed.get(node, math.inf) < since)

    def wait_for_answers(self, seconds: float) -> dict[str, NodeAnswer]:
        """Returns the nodes' answers when all have come, or after `seconds`."""
        self._wait(seconds, lambda: self._answers.keys() >= self._nodes)
        with self._changed:
            return dict(self._answers)

    def watch(self, used: Sequence[str]) -> None:
        """Begins to judge, because ranks are about to start on the nodes `used`."""
        with self._changed:
            self._used, self._since = tuple(used), self._clock

    def wait(self, seconds: float) -> Verdict | None:
        """Waits for a verdict, a spare that falls silent, or `wake`; returns the verdict."""
        self._wait(seconds, lambda: self._verdict is not None)
        return self._verdict

    def wake(self) -> None:
        """Makes a wait return; a signal handler may call it."""
        with contextlib.suppress(OSError):
            self._ringer.send(b"w")

    def end(self, patience: float, wait: float | None = None) -> Leftovers:
        """Makes all guards end their ranks after `patience` seconds, and themselves.

        Returns when all nodes that are not silent are clean, or after `wait` seconds, by default
        ten more than the patience.
        """
        with self._changed:
            self._patience = patience
        self._ring()
        limit = time.monotonic() + (patience + 10.0 if wait is None else wait)
        while (rest := limit - time.monotonic()) > 0:
            self._wait(min(rest, LOOK_S), self._all_clean)  # the silence of a node grows unseen
            if self._all_clean():
                break
        with self._changed:
            clean = frozenset(node for node, left in self._left.items() if not left)
            left = {node: left for node, left in self._left.items() if left}
        return Leftovers(clean, left, self._nodes - clean - left.keys())

    def close(self) -> None:
        """Stops listening, and closes all connections."""
        with self._changed:
            self._is_closed = True
        self._ring()
        self._thread.join()

    def _wait(self, seconds: float, is_there: Callable[[], bool]) -> None:
        limit = time.monotonic() + seconds
        with self._changed:
            while not is_there() and not self._has_news:
                rest = limit - time.monotonic()
                if rest <= 0:
                    break
                self._changed.wait(rest)
            self._has_news = False

    def _all_clean(self) -> bool:
        """Returns whether every node that still speaks has no process left."""
        spoke = (n for n, beat in self._beats.items() if self._is_awaited(n, beat))
        return all(self._left.get(node) == () for node in spoke)

    def _is_awaited(self, node: str, beat: LastBeat) -> bool:
        is_dead = self._verdict is not None and node in self._verdict.dead
        is_silent = self._clock - beat.heard >= self._limits.silent
        closed = self._closed.get(node)
        is_cut = closed is not None and self._clock - closed >= self._limits.cut
        return not (is_silent or is_dead or is_cut or node in self._dead_spares)

    def _ring(self) -> None:
        with contextlib.suppress(OSError):
            self._ringer.send(b".")

    # --- in the thread ------------------------------------------------------------------------

    def _run(self) -> None:
        last = judged = time.monotonic()
        look = min(LOOK_S, self._limits.look)
        told: float | None = None  # the patience that all guards have been told
        while not self._is_closed:
            events = self._selector.select(look)
            now = time.monotonic()
            with self._changed:
                self._clock += min(now - last, LOOK_AWAKE_S)
                last = now
                for key, mask in events:
                    self._handle(key, mask)
                if self._patience != told:
                    told = self._patience
                    for peer in list(self._of_node.values()):
                        self._answer(peer, 0)
                # The beats of many nodes come one by one: only a rank that is gone is urgent.
                if self._is_urgent or now - judged >= look:
                    self._is_urgent, judged = False, now
                    self._judge()
        for peer in list(self._peers.values()):
            self._drop(peer)
        self._selector.close()
        for each in (self._listening, self._bell, self._ringer):
            each.close()

    def _handle(self, key: selectors.SelectorKey, mask: int) -> None:
        if key.fileobj is self._listening:
            self._accept()
        elif key.fileobj is self._bell:
            with contextlib.suppress(OSError):
                if b"w" in self._bell.recv(4096):
                    self._tell()
        else:
            peer: _Peer = key.data
            if mask & selectors.EVENT_READ:
                self._read(peer)
            if mask & selectors.EVENT_WRITE:
                self._flush(peer)

    def _tell(self) -> None:
        self._has_news = True
        self._changed.notify_all()

    def _accept(self) -> None:
        for _ in range(MORE_CONNECTIONS):
            try:
                connection, address = self._listening.accept()
            except OSError:
                return
            if len(self._peers) >= 2 * len(self._nodes) + MORE_CONNECTIONS:
                # Strangers cannot keep guards out: the oldest that has proved nothing goes.
                strangers = [peer for peer in self._peers.values() if peer.node is None]
                if not strangers:
                    connection.close()
                    continue
                self._drop(min(strangers, key=lambda peer: peer.since))
            connection.setblocking(False)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            peer = _Peer(connection, str(address[0]), self._clock)
            self._peers[connection.fileno()] = peer
            self._selector.register(connection, selectors.EVENT_READ, peer)

    def _read(self, peer: _Peer) -> None:
        try:
            data = peer.socket.recv(1 << 16)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:  # a closed connection alone means nothing: the guard may connect anew
            self._drop(peer)
            return
        try:
            for line in peer.lines.of(data):
                number, payload = opened(self._secret, "guard", self._start, line)
                self._take(peer, number, payload)
                self._answer(peer, number)
        except Refusal as refused:
            self._refused += 1
            if self._refused <= TOLD:
                more = "; more are not shown" if self._refused == TOLD else ""
                self._say(readable(f"a message from {peer.address} is refused: {refused}{more}"))
            self._drop(peer)

    def _take(self, peer: _Peer, number: int, payload: dict[str, Any]) -> None:
        """Takes in a message. Raises Refusal."""
        node = payload.get("node")
        if not isinstance(node, str) or node not in self._nodes or peer.node not in (None, node):
            raise Refusal(f"{node} is not one of the nodes of this start")
        if number <= self._numbers.get(node, 0):
            raise Refusal("it is old")
        try:
            ranks = payload["ranks"]
            beat = LastBeat.of(self._clock, ranks)
            left = tuple(map(int, payload["left"])) if "left" in payload else None
            answer = payload.get("answer")
            if answer is not None:
                answer = NodeAnswer(answer["ok"] is True, str(answer["why"]), answer)
        except (KeyError, ValueError, TypeError, IndexError, OverflowError):
            raise Refusal("it is not a message") from None
        self._numbers[node] = number
        if peer.node is None:
            if (older := self._of_node.get(node)) is not None:
                self._drop(older)
            peer.node, self._of_node[node] = node, peer
            self._closed.pop(node, None)
        self._beats[node] = beat
        self._is_urgent = self._is_urgent or bool(beat.gone)
        self._reports[node] = ranks
        if left is not None and self._left.get(node) != left:
            self._left[node] = left
            self._changed.notify_all()
        if answer is not None and node not in self._answers:
            self._answers[node] = answer
            self._changed.notify_all()

    def _answer(self, peer: _Peer, number: int) -> None:
        """Acknowledges a message, and repeats the order to end if there is one."""
        self._number += 1
        word: dict[str, Any] = {"ack": number}
        if self._patience is not None:
            word["end"] = self._patience
        peer.out += message(self._secret, "collector", self._start, self._number, word)
        self._flush(peer)

    def _flush(self, peer: _Peer) -> None:
        if peer.socket.fileno() < 0:
            return
        rest = unsent(peer.socket, peer.out)
        if rest is None:
            self._drop(peer)
            return
        peer.out = rest
        if len(peer.out) > UNREAD_BYTES:
            self._drop(peer)
        elif peer.is_behind != bool(peer.out):
            peer.is_behind = bool(peer.out)
            wanted = selectors.EVENT_READ | (selectors.EVENT_WRITE if peer.is_behind else 0)
            self._selector.modify(peer.socket, wanted, peer)

    def _drop(self, peer: _Peer) -> None:
        if self._peers.pop(peer.socket.fileno(), None) is None:
            return
        if peer.node is not None and self._of_node.get(peer.node) is peer:
            del self._of_node[peer.node]
            self._closed[peer.node] = self._clock
        self._selector.unregister(peer.socket)
        peer.socket.close()

    def _judge(self) -> None:
        for peer in [peer for peer in self._peers.values() if peer.node is None]:
            if self._clock - peer.since > self._limits.connect:
                self._drop(peer)
        spares = self._nodes.difference(self._used or ())
        silent = silent_nodes(self._clock, self._beats, spares, self._limits)
        if not silent <= self._dead_spares:
            self._dead_spares |= silent
            self._tell()
        if self._used is None or self._verdict is not None or self._patience is not None:
            return
        found = verdict(self._clock, self._beats, self._used, self._since, self._limits)
        if found is not None:
            failed_at = time.time() - (self._clock - found.failed_at)
            self._verdict = dataclasses.replace(found, failed_at=failed_at)
            self._tell()


def _allow_files(more: int) -> None:
    """Raises the soft limit of open files, which is often 1,024, towards the hard one."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = len(os.listdir("/proc/self/fd")) + more + 256
    if soft != resource.RLIM_INFINITY and wanted > soft:
        allowed = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, allowed), hard))
