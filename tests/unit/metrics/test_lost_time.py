"""Tests what interruptions of a run cost by cause, on histories of starts whose truth is known."""

from __future__ import annotations

import json
import random
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from parallel3d.metrics.lost_time import CAUSES, interruption
from parallel3d.metrics.recovery_log import Cause, RecoveryLine
from parallel3d.metrics.starts import Account, Goodput, goodput, seconds_of, starts_of

BEGAN = 1_700_000_000.0
OF_KIND = {"killed": "killed", "node": "node", "hang": "hang", "error": "error", "decided": "error"}
NEW = ("loaded", "ahead_s", "decided", "cause", "cause_host", "decision", "costs")


class History:
    """A run of several starts on hosts whose clocks differ, and the truth about its time.

    Attributes:
        clocks: seconds by which the clocks of rank 0's host and of the decider are ahead, drawn
            anew for each start; 0 for right ones.
        truth: seconds by (cause, phase).
    """

    def __init__(self, path: Path, seed: int, clocks: float = 0.0) -> None:
        self.path = path
        path.unlink(missing_ok=True)
        self.draw = random.Random(seed)
        self.clocks = clocks
        self.now = BEGAN
        self.truth: Counter[tuple[str, str]] = Counter()
        self.times: Counter[str] = Counter()
        self.decisions: list[RecoveryLine] = []
        self.rows: list[dict[str, Any]] = []  # of metrics.jsonl
        self.saved = 0  # the step of the newest checkpoint
        self.heard_of = 0.0  # the true time of the last sign of life
        self.first: float | None = None

    def takes(self, low: float, high: float) -> float:
        seconds = self.draw.uniform(low, high)
        self.now += seconds
        return seconds

    def begin(self, cause: str = "") -> None:
        """Begins a start; its time until the first step is due to `cause`."""
        self.ahead = self.draw.uniform(0, self.clocks)
        begun = self.now + self.ahead
        load, ready = self.takes(2, 20), self.takes(1, 5)
        earlier = starts_of(self.path)
        self.account = Account(earlier, begun, begun + load, tuple(self.decisions))
        for row in self.rows:
            (self.account.kept if row["step"] <= self.saved else self.account.dropped)(row)
        self.rows = [row for row in self.rows if row["step"] <= self.saved]
        line = {"first_step": self.saved + 1, "started": "2026-11-29T00:00:00+00:00"}
        self.append(self.account.begin(self.now + self.ahead, line))
        if self.first is None:
            self.first = begun
        else:
            self.truth[cause, "load"] += load
            self.truth[cause, "ready"] += ready
        self.heard_of = self.now

    def append(self, row: dict[str, Any]) -> None:
        with self.path.open("a") as file:
            file.write(json.dumps(row) + "\n")

    def steps(self, count: int) -> None:
        for _ in range(count):
            seconds = self.takes(0.5, 3)
            row = {"step": self.saved + 1 + self.unsaved, "step_time_s": seconds}
            self.rows.append(row)
            self.account.step(row)
            self.heard_of += seconds

    @property
    def unsaved(self) -> int:
        return len(self.rows) - self.saved

    def save(self) -> None:
        self.account.saves()
        self.append(self.account.line(self.now + self.ahead))
        self.saved, self.heard_of = len(self.rows), self.now
        self.account.spent("checkpoint", self.takes(0.1, 1))

    def finish(self, status: str) -> None:
        self.append(self.account.line(self.now + self.ahead, status))
        self.heard_of = self.now

    def loses(self, cause: str) -> None:
        """Counts the steps since the last checkpoint, which the next start repeats, as lost."""
        repeated = sum(row["step_time_s"] for row in self.rows if row["step"] > self.saved)
        self.truth[cause, "lost"] += repeated

    def decides(self, decision: str, kind: str | None = None, **seconds: float) -> None:
        cause = None if kind is None else Cause(kind, "node3", 1, "it ended")
        at = self.now + self.draw.uniform(0, self.clocks)
        number = len(self.decisions) + 1
        line = RecoveryLine(at, number, decision, "", cause, failed_at=at, seconds=seconds)
        self.decisions.append(line)

    def fails(self, kind: str, decision: str) -> str:
        """Fails, and is decided upon; returns the cause."""
        cause = OF_KIND[kind]
        self.times[cause] += 1
        self.takes(0, 40)
        detected = self.now - self.heard_of
        phases = {name: self.takes(0, 10) for name in ("end", "probe", "decide")}
        self.decides(decision, kind, detect=detected, **phases)
        for phase, seconds in {"detect": detected, **phases}.items():
            self.truth[cause, phase] += seconds
        self.heard_of = self.now
        return cause

    def waits(self, cause: str, phase: str, low: float = 2, high: float = 30) -> None:
        """Waits until the next process of rank 0; what nobody has told of was before."""
        self.takes(low, high)
        self.truth[cause, phase] += self.now - self.heard_of
        self.heard_of = self.now

    def interrupt(self, how: str) -> str:
        """Interrupts the run after a step; returns the cause of the start that follows."""
        kind = self.draw.choice([*OF_KIND])
        if how == "again":
            self.loses(OF_KIND[kind])
            cause = self.fails(kind, self.draw.choice(["same", "replace", "smaller"]))
        elif how == "twice":  # the start that follows fails before its first step
            self.loses(OF_KIND[kind])
            self.fails(kind, "same")
            cause = self.fails(self.draw.choice([*OF_KIND]), "replace")
        elif how == "queue":
            self.loses(OF_KIND[kind])
            cause = self.fails(kind, "requeue")
            self.waits(cause, "queue", 60, 600)
            self.truth[cause, "probe"] += (probe := self.takes(0, 20))
            self.heard_of = self.now
            self.decides("first", probe=probe)
        elif how == "stop":  # somebody looks at it in the morning
            self.loses(OF_KIND[kind])
            cause = self.fails(kind, "stop")
            self.waits("user", "queue", 60, 600)
            return cause
        elif how == "preempted":
            self.save()
            self.finish("stopped")
            cause = "requeue"
            self.times[cause] += 1
            self.takes(1, 5)
            self.decides("requeue")
            self.truth[cause, "gap"] += self.now - self.heard_of
            self.heard_of = self.now
            self.waits(cause, "queue", 60, 600)
            self.decides("first")
        elif how == "Ctrl-C":  # under a launcher that records nothing
            self.save()
            self.finish("interrupted")
            self.times["user"] += 1
            self.waits("user", "queue")
            return "user"
        else:  # nobody knows why
            self.loses("unknown")
            self.times["unknown"] += 1
            self.waits("unknown", "gap")
            return "unknown"
        self.waits(cause, "start")
        return cause

    def live(self, starts: int) -> Goodput:
        """Lives through so many starts, the last one up to its end; returns what the file says."""
        hows = ("again", "twice", "queue", "stop", "preempted", "Ctrl-C", "unknown")
        cause = ""
        for number in range(starts):
            self.begin(cause)
            for _ in range(self.draw.randint(1, 3)):
                self.steps(self.draw.randint(1, 6))
                if self.draw.random() < 0.6:
                    self.save()
            if number < starts - 1:
                cause = self.interrupt(self.draw.choice(hows))
        self.finish("finished")
        return self.found()

    def found(self) -> Goodput:
        found = goodput(starts_of(self.path), sum(map(seconds_of, self.rows)))
        assert found is not None
        return found

    def by_cause(self) -> Counter[str]:
        sums: Counter[str] = Counter()
        for (cause, _), seconds in self.truth.items():
            sums[cause] += seconds
        return sums


def check_sums(found: Goodput) -> None:
    """Checks that all parts together are the wall time, and all causes together those parts."""
    assert sum(found.seconds.values()) == pytest.approx(found.wall_s, abs=0.01)
    between = sum(cost.sum(["detect", "end", "probe", "decide", "queue", "start", "gap"])
                  for cost in found.costs.values())  # fmt: skip
    lost = sum(cost.sum(["lost"]) for cost in found.costs.values())
    assert between == pytest.approx(found.seconds["between"], abs=0.05)
    assert lost == pytest.approx(found.seconds["lost"], abs=0.05)
    assert sum(c.sum() for c in found.costs.values()) <= found.wall_s + 0.05


@pytest.mark.parametrize("seed", range(40))
def test_every_second_of_a_history_has_its_cause_and_phase(seed: int, tmp_path: Path) -> None:
    history = History(tmp_path / "starts.jsonl", seed)
    found = history.live(2 + seed % 6)
    check_sums(found)
    assert found.wall_s == pytest.approx(history.now - BEGAN, abs=0.05)
    expected = {key: seconds for key, seconds in history.truth.items() if seconds > 0.001}
    got = {(c, p): s for c, cost in found.costs.items() for p, s in cost.seconds.items()}
    assert got == pytest.approx(expected, abs=0.05)
    assert {c: cost.times for c, cost in found.costs.items() if cost.times} == history.times
    row = found.row()
    assert set(row["causes"]) == set(found.costs) <= set(CAUSES)
    assert json.loads(json.dumps(row)) == row


@pytest.mark.parametrize("seed", range(40))
def test_clocks_that_are_off_by_a_second_move_seconds_only(seed: int, tmp_path: Path) -> None:
    history = History(tmp_path / "starts.jsonl", seed, clocks=1.0)
    count = 2 + seed % 12
    found = history.live(count)
    check_sums(found)
    assert found.wall_s == pytest.approx(history.now - BEGAN, abs=1.0)
    got = {cause: cost.sum() for cause, cost in found.costs.items()}
    assert got == pytest.approx(history.by_cause(), abs=2.0 * count)


def test_starts_that_follow_at_once_on_hosts_behind_do_not_add_up(tmp_path: Path) -> None:
    """Each second start seems to begin before the one before it has ended."""
    history = History(tmp_path / "starts.jsonl", 0)
    for number in range(20):
        history.begin("user")
        history.ahead = 0.0
        if number % 2 == 0:
            history.now += 1.0  # by this host's clock; the next one's has not come so far
        history.steps(3)
        history.save()
        history.finish("interrupted")
        history.now -= number % 2 == 0
    found = history.found()
    check_sums(found)
    assert found.wall_s == pytest.approx(history.now - BEGAN, abs=1.01)


def test_damaged_and_older_lines_leave_the_sums_right(tmp_path: Path) -> None:
    path = tmp_path / "starts.jsonl"
    for seed in range(60):
        history = History(path, seed, clocks=1.0)
        whole = history.live(2 + seed % 6)
        draw = random.Random(seed)
        lines = path.read_text().splitlines()
        kept = [json.loads(line) for line in lines]
        for _ in range(3):
            lines.insert(draw.randrange(len(lines) + 1), draw.choice(["", "[]", '{"acc', "\0"]))
        path.write_text("\n".join(lines) + "\n")
        assert history.found() == whole
        for row in draw.sample(kept, 2):  # older versions
            for name in NEW:
                row.pop(name, None)
        path.write_text("\n".join(json.dumps(row) for row in kept) + "\n")
        found = history.found()
        check_sums(found)
        assert found.wall_s == pytest.approx(whole.wall_s, abs=1.0)
        for _ in range(2):  # any line may be lost
            del kept[draw.randrange(len(kept))]
        path.write_text("\n".join(json.dumps(row) for row in kept) + "\n")
        if starts_of(path):
            check = history.found()
            assert sum(check.seconds.values()) == pytest.approx(check.wall_s, abs=0.01)


def test_an_exit_code_names_a_killed_rank_that_left_no_record() -> None:
    """Its peers only know that it is gone, and its recorder may have failed with them."""
    peer = Cause("unknown", "node1", 0, "RuntimeError: Connection closed by peer")
    for cause, code, found in (
        (None, 137, "killed"),
        (peer, 139, "killed"),
        (peer, 1, "unknown"),
        (None, 1, "unknown"),
        (Cause("error", "node1", 0, "ValueError: odd"), 137, "error"),
    ):
        inputs = {"ended": {"code": code}}
        line = RecoveryLine(20.0, 2, "same", "", cause, seconds={"end": 1.0}, inputs=inputs)
        got = interruption(5.0, 10.0, 30.0, [line], "failed", {})
        assert got.cause == found and got.costs[found].sum() == 25.0
    (line,) = (RecoveryLine(20.0, 2, "first", "", inputs={"ended": None}),)
    got = interruption(5.0, 10.0, 30.0, [line], "failed", {})  # the batch process died too
    assert got.cause == "unknown" and got.costs["unknown"].seconds["queue"] == 10.0
