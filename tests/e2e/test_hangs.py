"""Tests runs that hang: the rank at fault is reported, with its operation, and the job ends."""

from __future__ import annotations

import os
import re
import signal
import socket
import time

import pytest

from tests.e2e.command import PARALLEL3D, Shell, wait_for
from tests.e2e.test_failures import LONG, by_hand, words
from tests.pace import PATIENCE, in_time, pace

WATCHDOG_S = 2.0
pytestmark = [pytest.mark.at_once(2), pytest.mark.nightly]
HOST = re.escape(socket.gethostname())
WHO = rf"rank 1 \(pp 0, dp 1, tp 0\) on {HOST}"
WORLD = r"all_reduce \d+ of world \(float64\[4\]\)"
STOPPED = "stop:1:3"  # the rank cannot report itself, unlike in test_watchdog
AWAY = "away:1:3"  # in the middle of a step, with context parallelism
HANGS = {
    STOPPED: rf"hang: {WHO} is stopped \(SIGSTOP\): "
    r"rank 0 waits in all_reduce \d+ of dp \(float64\[\]\) in train step 3, for \d+ s",
    AWAY: rf"hang: rank 1 \(pp 0, dp 0, cp 1, tp 0\) on {HOST} has not begun all_gather "
    r"\d+ of cp \(float32\[\d+\]\) and is in train step 3 at "
    r"parallel3d/context_parallel/attention\.py:\d+, in no operation: "
    r"rank 0 waits in all_gather \d+ of cp \(float32\[\d+\]\) in train step 3, for \d+ s",
    "skip:1:3": rf"hang: {WHO} left out all_reduce of world \(float64\[4\]\) and waits in "
    r"all_reduce \d+ of dp \(float64\[\]\) in train step 4: "
    rf"rank 0 waits in {WORLD} in train step 3, for \d+ s",
    # gloo aborts a process that receives more than it asked for; its peer reports the cause,
    # whether it notices this in the same step or later.
    "shape:1:3": rf"{WHO} failed in train step [34] at \S+: called all_reduce \d+ of world "
    r"\(float64\[12\]\), where an earlier step had float64\[4\]; .*",
}


@pytest.mark.parametrize("fault", [fault for fault in HANGS if fault != STOPPED])
def test_hang_names_the_rank_at_fault(shell: Shell, fault: str) -> None:
    seconds = WATCHDOG_S * pace()  # a rank that is only slow must not be called a hang
    watchdog = f"recovery.watchdog_s={seconds:.1f}"
    layout = "cp=2" if fault == AWAY else "dp=2"
    ended = shell.run(
        *PARALLEL3D, *words(shell, layout, LONG, watchdog), **shell.failing(fault), timeout_s=90
    )
    assert in_time(shell.seconds_since_failure() - seconds, 10)
    assert ended.code == 1
    assert re.fullmatch(rf"parallel3d: {HANGS[fault]}( \(\w+: \S+\))?", ended.errors[-1])
    run = shell.cwd / "runs" / "mine"
    if fault == AWAY:
        assert "in _stay_away" not in (run / "rank-0.stacks.txt").read_text()
        assert "in _stay_away" in (run / "rank-1.stacks.txt").read_text()


def test_stopped_rank_that_keeps_the_store_is_named_by_its_peer(shell: Shell) -> None:
    shell.environ = shell.failing("stop:0:3")
    seconds = WATCHDOG_S * pace()  # a rank that is only slow must not be called a hang
    watchdog = f"recovery.watchdog_s={seconds:.1f}"
    first, second = by_hand(shell, *words(shell, "tp=2", LONG, watchdog))
    _, err = second.communicate(timeout=300)
    first.communicate(timeout=60 * PATIENCE)  # its peer has ended it
    assert in_time(shell.seconds_since_failure() - seconds, 10)
    assert (first.returncode, second.returncode) == (-signal.SIGKILL, 1)
    assert re.fullmatch(
        rf"parallel3d: hang: rank 0 \(pp 0, dp 0, tp 0\) on {HOST} is stopped \(SIGSTOP\), and the "
        r"store that it hosts does not answer: rank 1 waits in all_reduce \d+ of tp \S+ in train "
        r"step 3, for \d+ s \(stacks: \S+\)",
        err.splitlines()[-1],
    )


@pytest.mark.parametrize("way", ["launch.shared_memory=true", "launch.shared_memory=false"])
def test_a_hang_ends_even_if_the_run_folder_does_not_answer(shell: Shell, way: str) -> None:
    """Replaces files by FIFOs, on which processes wait for ever, as on a file system whose server
    is gone."""
    shell.environ = shell.failing(STOPPED)
    seconds = WATCHDOG_S * pace()  # a rank that is only slow must not be called a hang
    watchdog = f"recovery.watchdog_s={seconds:.1f}"
    process = shell.start(*PARALLEL3D, *words(shell, "dp=2", LONG, watchdog, way))
    wait_for((shell.cwd / "failed_at").exists, 90, "the hang")
    run = shell.cwd / "runs" / "mine"
    os.mkfifo(run / "rank-0.stacks.txt")
    (run / "failures").mkdir()
    os.mkfifo(run / "failures" / ".rank-1.json.partial")  # files of the rank at fault
    os.mkfifo(run / "failures" / "rank-7.json")
    ended = shell.finish(process, time.monotonic(), 60)
    assert in_time(shell.seconds_since_failure() - seconds, 35)
    assert ended.code == 1
    said = rf"parallel3d: {HANGS[STOPPED]}( \(\w+: \S+\))?"
    assert re.fullmatch(said, ended.errors[-1]), ended.err
