"""Plants bugs of heartbeats: for each, a test that is named here fails.

A bug in a guard is code that runs in its process before it begins; one in the collector or in the
verdict replaces a function here.
"""

from __future__ import annotations

import dataclasses
import inspect
import json
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from parallel3d.slurm import collector as collector_module
from parallel3d.slurm import messages
from parallel3d.slurm.collector import Collector
from parallel3d.slurm.messages import Refusal
from parallel3d.slurm.verdict import LastBeat, Verdict
from tests.unit.slurm import hosts, test_collector, test_guard, test_guard_alone, test_verdict

pytestmark = pytest.mark.nightly

# In a guard: code, and the test that must fail.
GUARDS: dict[str, tuple[str, Callable[..., None]]] = {
    "a thread of the rank beats": (
        # The rank's interpreter is held, so a thread of it would say nothing.
        """
step = guard.Guard._step
def only_while_ranks_step(self, link, test):
    if all(report.age < 2 for report in self._look()):
        step(self, link, test)
guard.Guard._step = only_while_ranks_step
""",
        test_guard.test_beats_go_on_while_a_rank_holds_the_interpreter,
    ),
    "old ranks are left beside the new ones": (
        "guard.kill = lambda *_: None",
        test_guard.test_no_process_of_the_start_is_left_and_no_other_is_touched,
    ),
    "only the ranks themselves are killed": (
        "guard.of_start = lambda job, start, node, ranks: [r for r in ranks if "
        "guard.state_letter(*r) not in guard.GONE_LETTERS]",
        test_guard.test_no_process_of_the_start_is_left_and_no_other_is_touched,
    ),
    "ranks are asked with SIGTERM": (
        "import os, signal\nguard.kill = lambda pid, born: os.kill(pid, signal.SIGTERM)",
        test_guard.test_no_process_of_the_start_is_left_and_no_other_is_touched,
    ),
    "processes of another start are killed": (
        "guard.START = 'SLURM_JOB_ID'\n"
        "of_start = guard.of_start\n"
        "guard.of_start = lambda job, start, *more: of_start(job, job, *more)",
        test_guard.test_no_process_of_the_start_is_left_and_no_other_is_touched,
    ),
    "srun's own process is killed": (
        "environment = guard.environment\n"
        "guard.environment = lambda pid: environment(pid) | {b'SLURM_STEP_ID': b'1'}",
        test_guard.test_no_process_of_the_start_is_left_and_no_other_is_touched,
    ),
    "a pid alone names a process": (
        "guard.born = lambda pid: guard_ranks.get(pid, 0)\n"
        "real_read = guard.read\n"
        "guard_ranks = {}\n"
        "def read(path):\n"
        "    seen = real_read(path)\n"
        "    if seen is not None: guard_ranks[seen.pid] = seen.born\n"
        "    return seen\n"
        "guard.read = read\n"
        "guard.state_letter = lambda pid, born: 'S'\n"
        "import os, signal\n"
        "guard.kill = lambda pid, born: os.kill(pid, signal.SIGKILL)",
        test_guard.test_a_pid_that_another_process_has_got_is_not_killed,
    ),
    "there is no patience": (
        "obey = guard.Guard._obey\n"
        "guard.Guard._obey = lambda self, word: obey(self, word | "
        "({'end': 0} if word.get('end') is not None else {}))",
        test_guard.test_ranks_have_time_for_their_records,
    ),
    "a guard believes the ranks' files alone": (
        "guard.state_letter = lambda *_: 'S'",
        test_guard.test_a_killed_rank_is_told_within_a_second,
    ),
    "a guard that is cut off leaves its ranks": (
        "guard.Guard._decide_alone = lambda *_: None",
        test_guard_alone.test_ranks_that_stand_still_without_a_collector_are_ended,
    ),
    "silence alone makes a guard end its ranks": (
        "verdict.BeatLimits.without_step = lambda *_: 0.0",
        test_guard_alone.test_ranks_that_step_outlive_a_cut_of_the_service_link,
    ),
    "a guard ends with the ranks' signals": (
        "guard.FOR_THE_RANKS = ()",
        test_guard_alone.test_signals_for_the_ranks_leave_the_guard_alone,
    ),
    "files of earlier jobs are ranks": (
        "guard.Guard._forget_dead_files = lambda _: None",
        test_guard_alone.test_files_of_an_earlier_job_with_the_same_numbers_are_no_ranks,
    ),
}


def call(test: Callable[..., None], folder: Path) -> None:
    """Calls a test; of a parametrized one, its first case."""
    given: dict[str, Any] = {"tmp_path": folder}
    for mark in getattr(test, "pytestmark", []):
        if mark.name == "parametrize":
            names, values = mark.args[0], mark.args[1][0]
            many = names if not isinstance(names, str) else names.split(", ")
            given |= dict(zip(many, values if len(many) > 1 else [values], strict=True))
    wanted = inspect.signature(test).parameters
    test(**{name: value for name, value in given.items() if name in wanted})


@pytest.mark.parametrize("bug", GUARDS)
def test_a_bug_in_a_guard_is_caught(
    bug: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    code, test = GUARDS[bug]
    for module in (hosts, test_guard, test_guard_alone):
        monkeypatch.setattr(module, "PATIENCE", 0.5)
    caught = AssertionError, OSError, subprocess.TimeoutExpired
    with hosts.planted(code), pytest.raises(caught):
        call(test, tmp_path)


# --- the verdict ------------------------------------------------------------------------------


def dead_if(condition: Callable[[float, float], bool]) -> Callable[..., Verdict | None]:
    """Returns a verdict that calls a node dead by its own silence and the time without a step."""

    def judge(
        now: float, beats: dict[str, LastBeat], used: list[str], since: float, limits: Any
    ) -> Verdict | None:
        stepped = max([since, *(b.stepped for b in beats.values() if b.stepped is not None)])
        dead = tuple(
            n for n in used if n in beats and condition(now - beats[n].heard, now - stepped)
        )
        return Verdict(dead) if dead else None

    return judge


VERDICTS: dict[str, tuple[Callable[..., Any], Callable[..., None]]] = {
    "silence alone": (
        dead_if(lambda silent, still: silent >= 30),
        test_verdict.test_silence_alone_is_no_verdict,
    ),
    "steps that stand still alone": (
        dead_if(lambda silent, still: still >= 30),
        test_verdict.test_steps_that_stand_still_alone_are_no_verdict,
    ),
    "the median step does not count": (
        dead_if(lambda silent, still: silent >= 30 and still >= 30),
        test_verdict.test_a_step_may_take_half_more_than_the_median_and_ten_seconds,
    ),
    "the last words of all are taken for the present": (
        dead_if(lambda silent, still: silent >= 30 and still >= 30),
        test_verdict.test_if_nobody_speaks_the_own_link_may_be_cut,
    ),
}


@pytest.mark.parametrize("bug", VERDICTS)
def test_a_wrong_verdict_is_caught(bug: str, monkeypatch: pytest.MonkeyPatch) -> None:
    judge, test = VERDICTS[bug]
    monkeypatch.setattr(test_verdict, "verdict", judge)
    with pytest.raises(AssertionError):
        test()


def summed_up(**more: Any) -> Any:
    """Returns `LastBeat.of` with fields that a bug has changed."""
    sound = LastBeat.of
    return classmethod(lambda _, heard, ranks: dataclasses.replace(sound(heard, ranks), **more))


def test_a_pause_that_does_not_count_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LastBeat, "of", summed_up(may_be_slow=False))
    for slow in ({"state": "paused"}, {"median": 0.0}):
        with pytest.raises(AssertionError):
            test_verdict.test_a_paused_rank_or_one_without_a_pace_has_two_minutes(slow, True)


def test_a_done_rank_that_counts_as_gone_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LastBeat, "of", summed_up(gone=(0, 1)))
    with pytest.raises(AssertionError):
        test_verdict.test_a_rank_without_a_process_is_gone_unless_it_is_done("Z")


# --- the collector ----------------------------------------------------------------------------


def believed(
    check: Callable[[str, int, int, bytes], bool],
) -> Callable[..., tuple[int, dict[str, Any]]]:
    """Returns `opened` that asks only some of its questions; a bug passes what it does not ask."""

    def opened(secret: bytes, speaker: Any, start: int, line: bytes) -> tuple[int, dict[str, Any]]:
        body = line.partition(b" ")[2]
        try:
            theirs, number, payload = json.loads(body)
        except ValueError:
            raise Refusal("its signature is wrong") from None
        if not check(speaker, start, theirs, line):
            raise Refusal("its signature is wrong")
        return number, payload

    return opened


def is_signed(speaker: Any, start: int, theirs: int, line: bytes) -> bool:
    signed, _, body = line.partition(b" ")
    return signed == messages.signature(test_collector.SECRET, speaker, body)


def fresh(said: list[str]) -> Collector:
    return Collector(test_collector.SECRET.decode(), test_collector.START, ["a", "b"], said.append)


@pytest.mark.parametrize(
    ("check", "data"),
    [
        (  # a beat of an earlier start is accepted
            is_signed,
            messages.message(
                test_collector.SECRET, "guard", test_collector.START - 1, 1,
                {"node": "a", "ranks": []},
            ),
        ),
        (  # signatures are not checked
            lambda speaker, start, theirs, line: theirs == start,
            messages.message(
                b"guess", "guard", test_collector.START, 1, {"node": "a", "ranks": []}
            ),
        ),
    ],
    ids=["a beat of an earlier start is accepted", "signatures are not checked"],
)  # fmt: skip
def test_a_collector_that_believes_too_much_is_caught(
    check: Callable[..., bool], data: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(collector_module, "opened", believed(check))
    monkeypatch.setattr(test_collector, "PATIENCE", 0.05)
    said: list[str] = []
    collector = fresh(said)
    try:
        with pytest.raises((AssertionError, TimeoutError)):
            test_collector.test_what_no_guard_of_this_start_says_is_refused_in_a_line(
                data, "", collector, said
            )
    finally:
        collector.close()


def test_a_beat_that_is_believed_twice_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    take = Collector._take

    def forgets(self: Collector, peer: Any, number: int, payload: dict[str, Any]) -> None:
        self._numbers.clear()
        take(self, peer, number, payload)

    monkeypatch.setattr(Collector, "_take", forgets)
    monkeypatch.setattr(test_collector, "PATIENCE", 0.05)
    said: list[str] = []
    collector = fresh(said)
    try:
        with pytest.raises((AssertionError, TimeoutError)):
            test_collector.test_a_beat_that_is_sent_again_is_refused(collector, said)
    finally:
        collector.close()


def test_a_closed_connection_that_is_a_verdict_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    drop = Collector._drop

    def judges(self: Collector, peer: Any) -> None:
        if peer.node is not None and self._of_node.get(peer.node) is peer:
            self._verdict = Verdict((peer.node,))
        drop(self, peer)

    monkeypatch.setattr(Collector, "_drop", judges)
    said: list[str] = []
    collector = fresh(said)
    try:
        with pytest.raises(AssertionError):
            test_collector.test_a_closed_connection_alone_is_no_verdict(collector)
    finally:
        collector.close()


def test_a_collector_that_counts_its_own_stop_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(collector_module, "LOOK_AWAKE_S", 1e9)
    with pytest.raises(AssertionError):
        test_collector.test_a_collector_that_was_stopped_itself_calls_nobody_dead([], monkeypatch)
