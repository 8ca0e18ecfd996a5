"""Looks after the ranks of one host: sends beats, and leaves no process of a start behind.

A guard is a small process of its own, so it goes on while a rank holds the GIL or sits in a
driver's call. It imports the standard library only and has one thread; nothing in it waits for
long. `slurm.collector` receives its beats and tells it when the start is over.
"""

from __future__ import annotations

import argparse
import contextlib
import errno
import json
import os
import selectors
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from parallel3d.comm.store import SECRET
from parallel3d.faults.progress import START, Seen, make_folder, read
from parallel3d.host.processes import born, kill, state_letter
from parallel3d.slurm.messages import Lines, Refusal, message, opened, unsent
from parallel3d.slurm.verdict import GONE_LETTERS, BeatLimits, LastBeat, RankReport

LOOK_AWAKE_S = 1.0  # a longer gap between two looks means that the guard itself was stopped
ANSWER_BYTES = 8192  # of the self-test's answer
# These ask ranks to save and stop; the guard must outlive them.
FOR_THE_RANKS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP, signal.SIGINT)

Process = tuple[int, int]  # pid and start time


def say(sentence: str) -> None:
    with contextlib.suppress(OSError):
        print(f"parallel3d: {sentence}", file=sys.stderr, flush=True)


# --- processes of this host -------------------------------------------------------------------


def parents() -> dict[int, int]:
    """Returns each process of this host that is this user's, with its parent; without srun's own.

    A batch job that itself runs in a step would otherwise lose the srun that waits for the ranks.
    """
    found = {}
    for name in os.listdir("/proc"):
        if name.isdecimal():
            with contextlib.suppress(OSError, IndexError):
                if os.stat(f"/proc/{name}").st_uid != os.getuid():
                    continue
                with open(f"/proc/{name}/stat", "rb") as file:
                    before, _, after = file.read().rpartition(b")")
                if before.partition(b"(")[2] != b"srun":
                    found[int(name)] = int(after.split()[1])
    return found


def environment(pid: int) -> dict[bytes, bytes]:
    """Returns the environment with which a process was started; {} if it cannot be read."""
    try:
        with open(f"/proc/{pid}/environ", "rb") as file:
            words = file.read().split(b"\0")
    except OSError:
        return {}
    return dict(word.split(b"=", 1) for word in words if b"=" in word)


def of_start(job: str, start: int, node: str, ranks: Sequence[Process]) -> list[Process]:
    """Returns the processes of a start on this host: its ranks, and whatever they have started.

    They are found by the environment of Slurm's tasks, which the batch script and srun itself do
    not have, by the ranks' own files, and by descent. This process, its ancestors and its own
    children are never among them. Several nodes of a test's cluster may be one host; `node` tells
    their processes apart.
    """
    tree = parents()
    marks = {b"SLURM_JOB_ID": job.encode(), START.encode(): str(start).encode()}

    def is_marked(pid: int) -> bool:
        theirs = environment(pid)
        if b"SLURM_STEP_ID" not in theirs or not marks.items() <= theirs.items():
            return False
        return theirs.get(b"SLURMD_NODENAME", node.encode()) == node.encode()

    me, spared = os.getpid(), set()
    above = me
    while above > 0 and above not in spared:
        spared.add(above)
        above = tree.get(above, 0)
    found = {pid for pid, begun in ranks if pid in tree and born(pid) == begun}
    found |= {pid for pid in tree if is_marked(pid)}
    found -= spared
    children: dict[int, list[int]] = {}
    for pid, parent in tree.items():
        children.setdefault(parent, []).append(pid)
    mine = _descendants(children, me)
    found |= {pid for top in found for pid in _descendants(children, top)}
    alive = [(pid, born(pid)) for pid in sorted(found - spared - mine)]
    return [each for each in alive if state_letter(*each) not in GONE_LETTERS]


def _descendants(children: dict[int, list[int]], top: int) -> set[int]:
    found, rest = set(), list(children.get(top, ()))
    while rest:
        pid = rest.pop()
        if pid not in found:
            found.add(pid)
            rest += children.get(pid, ())
    return found


# --- the connection to the collector ----------------------------------------------------------


@dataclass
class CollectorConnection:
    """Keeps a connection to the first collector's address that answers; never waits.

    Attributes:
        places: addresses as "host:port".
        refused_since: since when the addresses refuse, by the guard's clock; None if they do not.
            A host that refuses is alive, but its collector is gone.
    """

    places: Sequence[str]
    secret: bytes
    start: int
    limits: BeatLimits
    selector: selectors.BaseSelector
    refused_since: float | None = None
    _socket: socket.socket | None = None
    _connected: bool = False
    _began: float = -1e9
    _turn: int = 0
    _resolved: dict[str, Any] = field(default_factory=dict)  # as `getaddrinfo` gives it
    _lines: Lines = field(default_factory=Lines)
    _out: bytes = b""
    _theirs: int = 0
    # The clock's time, so that a guard that is started again is believed.
    _number: int = field(default_factory=lambda: time.time_ns() // 1000)

    @property
    def is_up(self) -> bool:
        return self._connected

    def keep(self, now: float, quiet: float) -> None:
        """Connects if there is no connection, or if the one there is says nothing any more."""
        if self._socket is not None:
            too_long = self.limits.reconnect if self._connected else self.limits.connect
            if min(now - self._began, quiet) > too_long:
                self.drop()
            return
        if now - self._began < self.limits.look:
            return
        self._began = now
        place = self.places[self._turn % len(self.places)]
        self._turn += 1
        try:
            if place not in self._resolved:  # a name server that is slow later would stop the beats
                host, _, port = place.rpartition(":")
                found = socket.getaddrinfo(host.strip("[]"), port, type=socket.SOCK_STREAM)
                self._resolved[place] = min(found, key=lambda each: each[0] != socket.AF_INET)
            family, kind, protocol, _, address = self._resolved[place]
            self._socket = socket.socket(family, kind, protocol)
        except OSError:
            return
        self._socket.setblocking(False)
        self._lines, self._out = Lines(), b""
        code = self._socket.connect_ex(address)
        if code not in (0, errno.EINPROGRESS):
            self._failed(code, now)
            return
        self.selector.register(self._socket, selectors.EVENT_WRITE, self)

    def send(self, payload: dict[str, Any]) -> int:
        """Sends a message if the connection is up; returns its sequence number, or 0."""
        if not self._connected or len(self._out) > 4 * ANSWER_BYTES:
            return 0
        self._number += 1
        self._out += message(self.secret, "guard", self.start, self._number, payload)
        self._flush()
        return self._number

    def ready(self, mask: int, now: float) -> list[dict[str, Any]]:
        """Handles what the selector reports; returns the collector's messages."""
        if self._socket is None:
            return []
        if not self._connected:
            code = self._socket.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
            if code:
                self._failed(code, now)
                return []
            self._connected = True
            self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self.selector.modify(self._socket, selectors.EVENT_READ, self)
            return []
        if mask & selectors.EVENT_WRITE:
            self._flush()
        return self._received(now) if mask & selectors.EVENT_READ else []

    def _received(self, now: float) -> list[dict[str, Any]]:
        assert self._socket is not None
        try:
            data = self._socket.recv(1 << 16)
        except BlockingIOError:
            return []
        except OSError:
            data = b""
        if not data:
            self.drop()
            return []
        found = []
        try:
            for line in self._lines.of(data):
                number, payload = opened(self.secret, "collector", self.start, line)
                if number <= self._theirs:
                    raise Refusal("it is old")
                self._theirs = number
                found.append(payload)
        except Refusal as refused:
            say(f"a message of the collector's address was refused: {refused}")
            self.drop()
        if found:
            self.refused_since = None
        return found

    def _flush(self) -> None:
        if self._socket is None:
            return
        rest = unsent(self._socket, self._out)
        if rest is None:
            self.drop()
            return
        self._out = rest
        wanted = selectors.EVENT_READ | (selectors.EVENT_WRITE if self._out else 0)
        self.selector.modify(self._socket, wanted, self)

    def _failed(self, code: int, now: float) -> None:
        if code == errno.ECONNREFUSED and self.refused_since is None:
            self.refused_since = now
        self.drop()

    def drop(self) -> None:
        if self._socket is None:
            return
        with contextlib.suppress(KeyError, ValueError):
            self.selector.unregister(self._socket)
        self._socket.close()
        self._socket, self._connected = None, False


# --- the node's self-test ---------------------------------------------------------------------


class SelfTestChild:
    """Runs the command of a node's self-test as a child, and keeps its last line."""

    def __init__(self, command: Sequence[str], selector: selectors.BaseSelector) -> None:
        self.answer: dict[str, Any] | None = None
        self._selector, self._tail = selector, b""
        self._process: subprocess.Popen[bytes] | None = None
        if not command:
            self.answer = {"ok": True, "why": ""}
            return
        environ = {name: value for name, value in os.environ.items() if name != SECRET}
        try:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                env=environ,
                start_new_session=True,
            )
        except OSError as error:
            self._fail(f"{command[0]} cannot be started ({error.strerror})")
            return
        assert self._process.stdout is not None
        os.set_blocking(self._process.stdout.fileno(), False)
        selector.register(self._process.stdout, selectors.EVENT_READ, self)

    def _fail(self, why: str) -> None:
        self.answer = {"ok": False, "why": why}

    def ready(self) -> None:
        """Reads what the child has said."""
        assert self._process is not None and self._process.stdout is not None
        data = self._process.stdout.read(1 << 16)
        if data is None:
            return
        if data:
            self._tail = (self._tail + data)[-2 * ANSWER_BYTES :]
            return
        self._selector.unregister(self._process.stdout)
        self._process.stdout.close()

    def look(self, late: bool) -> None:
        """Takes the answer of a child that has ended, or of one that is too late."""
        if self._process is None or self.answer is not None:
            return
        code = self._process.poll()
        if code is None:
            if late:
                self.stop()
                self._fail("its self-test did not end in time")
            return
        assert self._process.stdout is not None
        if not self._process.stdout.closed:
            self.ready()
        lines = self._tail.split(b"\n")
        last = next((line for line in reversed(lines) if line.strip()), b"")
        try:
            found = json.loads(last)
            answer = found | {"ok": found["ok"] is True, "why": str(found.get("why") or "")}
            if len(json.dumps(answer)) > ANSWER_BYTES:
                answer = {"ok": answer["ok"], "why": answer["why"][: ANSWER_BYTES // 8]}
            self.answer = answer
        except (ValueError, TypeError, KeyError, AttributeError):
            self._fail(f"its self-test ended with code {code} and without an answer")

    def stop(self) -> None:
        if self._process is not None and self._process.poll() is None:
            with contextlib.suppress(OSError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()


# --- the guard --------------------------------------------------------------------------------


@dataclass
class Guard:
    """Runs until the start is over on this host.

    Attributes:
        node: this host's name, as Slurm knows it.
        interval: seconds between beats.
        folder: where the ranks keep their files of progress.
        command: the self-test.
    """

    places: Sequence[str]
    node: str
    secret: bytes
    start: int
    job: str
    interval: float
    folder: str
    command: Sequence[str] = ()
    limits: BeatLimits = field(default_factory=BeatLimits)
    _clock: float = 0.0  # seconds for which this process was not stopped
    _heard: float = 0.0  # the collector's last word, by this clock
    _ranks: dict[int, Seen] = field(default_factory=dict)
    _away: frozenset[int] = frozenset()
    _end_at: float | None = None
    _left: list[int] | None = None  # processes that the last sweep has found
    _is_clean_at: int | None = None  # number of the beat that said that no process is left
    _answered_at: int | None = None  # number of the last beat with the self-test's answer
    _acknowledged: int = 0
    _is_over: bool = False
    _beat_at: float = -1e9
    _is_alone: bool = False

    def run(self) -> int:
        """Guards the host; returns the exit code."""
        make_folder(self.folder)
        self._forget_dead_files()
        with selectors.DefaultSelector() as selector:
            link = CollectorConnection(self.places, self.secret, self.start, self.limits, selector)
            test = SelfTestChild(self.command, selector)
            last = time.monotonic()
            while not self._is_over:
                for key, mask in selector.select(self.limits.look):
                    if key.data is test:
                        test.ready()
                    else:
                        for word in link.ready(mask, self._clock):
                            self._obey(word)
                now = time.monotonic()
                self._clock += min(now - last, LOOK_AWAKE_S)
                last = now
                test.look(self._clock > self.limits.self_test)
                link.keep(self._clock, self._clock - self._heard)
                self._step(link, test)
            test.stop()
            link.drop()
        with contextlib.suppress(OSError):
            for name in os.listdir(self.folder):
                os.unlink(os.path.join(self.folder, name))
            os.rmdir(self.folder)
        return int(self._is_alone)

    def _forget_dead_files(self) -> None:
        """Removes the files that an earlier job with these numbers has left."""
        for entry in os.scandir(self.folder):
            seen = read(entry.path)
            if seen is None or not state_letter(seen.pid, seen.born):
                os.unlink(entry.path)

    def _step(self, link: CollectorConnection, test: SelfTestChild) -> None:
        reports = self._look()
        self._decide_alone(reports, link)
        if self._end_at is not None:
            test.stop()
            self._end(reports)
        away = frozenset(report.rank for report in reports if report.is_away)
        news = away != self._away or (
            test.answer is not None and self._answered_at is None and link.is_up
        )
        news = news or (self._left == [] and self._is_clean_at is None)
        if not link.is_up or not (news or self._clock - self._beat_at >= self.interval):
            return
        beat: dict[str, Any] = {"node": self.node, "ranks": reports}
        unread = self._answered_at is None or self._answered_at > self._acknowledged
        if test.answer is not None and unread:
            beat["answer"] = test.answer
        if self._left is not None:
            beat["left"] = self._left[:100]
        number = link.send(beat)
        if not number:
            return
        self._away, self._beat_at = away, self._clock
        if "answer" in beat:
            self._answered_at = self._answered_at or number
        if self._left == []:
            self._is_clean_at = self._is_clean_at or number

    def _look(self) -> list[RankReport]:
        """Returns how the ranks of this host are."""
        with contextlib.suppress(OSError):
            for entry in os.scandir(self.folder):
                seen = read(entry.path)
                if seen is not None:
                    self._ranks[seen.rank] = seen
        now, reports = time.monotonic(), []
        for rank, seen in sorted(self._ranks.items()):
            letter = state_letter(seen.pid, seen.born)
            age = round(max(0.0, now - seen.since), 3)
            reports.append(
                RankReport(rank, letter, seen.state, seen.steps, age, round(seen.median, 6))
            )
        return reports

    def _obey(self, word: dict[str, Any]) -> None:
        """Takes in a message of the collector."""
        self._heard = self._clock
        self._acknowledged = max(self._acknowledged, int(word.get("ack", 0)))
        patience = word.get("end")
        if patience is not None:
            at = self._clock + float(patience)
            self._end_at = at if self._end_at is None else min(at, self._end_at)
        if self._is_clean_at is not None and self._acknowledged >= self._is_clean_at:
            self._is_over = True

    def _decide_alone(self, reports: Sequence[RankReport], link: CollectorConnection) -> None:
        """Ends the ranks, or only itself, if nobody has told it anything for long."""
        quiet, limits = self._clock - self._heard, self.limits
        working = [report for report in reports if not report.is_away]
        if not working:
            refused = link.refused_since is not None
            refused = refused and self._clock - (link.refused_since or 0.0) >= limits.lonely
            had_ranks = bool(reports) and quiet >= limits.lonely
            if refused or had_ranks or quiet >= limits.silent:
                if not link.is_up and not reports:
                    say(f"guard on {self.node}: no collector answers at {', '.join(self.places)}")
                self._sweep()
                self._is_over = self._left == [] or quiet >= 2 * limits.silent
            return
        if self._end_at is not None:
            return
        found = LastBeat.of(0.0, working)
        still = -(found.stepped or 0.0)
        is_quiet = quiet >= (limits.paused if found.may_be_slow else limits.silent)
        if is_quiet and still >= limits.without_step(found.median):
            say(
                f"guard on {self.node}: no word from the collector for {quiet:.0f} s, and no "
                f"step ended for {still:.0f} s: the ranks of this host are ended"
            )
            self._is_alone, self._end_at = True, self._clock + limits.records

    def _end(self, reports: Sequence[RankReport]) -> None:
        """Kills what is left once the patience is over, or once all ranks have left."""
        assert self._end_at is not None
        if self._clock >= self._end_at or all(report.is_away for report in reports):
            self._sweep()

    def _sweep(self) -> None:
        """Kills every process of the start on this host, and notes which ones were there."""
        ranks = [(seen.pid, seen.born) for seen in self._ranks.values()]
        found = of_start(self.job, self.start, self.node, ranks)
        for process in found:
            kill(*process)
        self._left = [pid for pid, _ in found]
        if self._left:
            self._is_clean_at = None


def arguments(words: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser("parallel3d slurm guard", description=__doc__)
    parser.add_argument("--collector", required=True, help="host:port[,host:port]")
    parser.add_argument("--start", type=int, required=True, help="number of the start")
    parser.add_argument("--job", required=True, help="the job's id, as the ranks see it")
    parser.add_argument("--progress", required=True, help="folder of the ranks' files")
    parser.add_argument("--interval", type=float, default=5.0, help="seconds between beats")
    parser.add_argument("--node", default=os.environ.get("SLURMD_NODENAME", socket.gethostname()))
    parser.add_argument("--faster", type=float, default=1.0, help="shortens all limits, for tests")
    parser.add_argument("self_test", nargs="*", help="after --: the command of the self-test")
    return parser.parse_args(words)


def main(words: Sequence[str]) -> int:
    """Runs a guard by its command line; returns the exit code."""
    given = arguments(words)
    secret = os.environ.get(SECRET, "")
    if not secret:
        say(f"a guard needs the job's secret in {SECRET}")
        return 2
    for number in FOR_THE_RANKS:
        signal.signal(number, signal.SIG_IGN)
    guard = Guard(
        given.collector.split(","),
        given.node,
        secret.encode(),
        given.start,
        given.job,
        given.interval,
        given.progress,
        given.self_test,
        BeatLimits().faster(given.faster),
    )
    try:
        return guard.run()
    except OSError as error:
        say(f"guard on {given.node}: {error}")
        return 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
