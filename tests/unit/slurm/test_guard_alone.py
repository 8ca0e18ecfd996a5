"""Tests guards that meet a bad start, a silent node or a lost collector, as processes."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path

import pytest

from parallel3d.faults.progress import FORMAT, MARK
from tests.pace import PATIENCE, in_time
from tests.unit.slurm.hosts import (
    LIMITS,
    SECRET,
    STILL,
    Cluster,
    guard_words,
    started_guard,
    until,
)

pytestmark = pytest.mark.nightly


def test_the_secret_comes_from_the_environment_alone(tmp_path: Path) -> None:
    words = guard_words(1, "a", str(tmp_path / "a"))
    with started_guard(words, PARALLEL3D_SECRET="") as guard:
        said = guard.communicate()[1]
    assert guard.returncode == 2 and "PARALLEL3D_SECRET" in said and len(said.splitlines()) == 1
    with Cluster(tmp_path) as cluster:
        line = Path(f"/proc/{cluster['a'].guard.pid}/cmdline").read_bytes()
    assert SECRET.encode() not in line


def test_a_folder_that_others_may_write_to_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a").chmod(0o777)
    with started_guard(guard_words(1, "a", str(tmp_path / "a"))) as guard:
        said = guard.communicate()[1]
    assert guard.returncode == 2 and "belongs to you alone" in said


def test_files_of_an_earlier_job_with_the_same_numbers_are_no_ranks(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir(mode=0o700)
    content = FORMAT.pack(MARK, 2**22 + 1, 7, 5, time.monotonic(), 0.1, 1)
    (tmp_path / "a" / "rank-0").write_bytes(content)
    with Cluster(tmp_path) as cluster:
        cluster.collector.watch("a")
        assert cluster.undisturbed(0.5)
        assert cluster.collector.reports["a"] == []


# --- self-tests -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("command", "ok", "why"),
    [
        (("echo", json.dumps({"ok": True, "why": "", "gpus": 8})), True, ""),
        (("echo", json.dumps({"ok": False, "why": "GPU 3 is gone"})), False, "GPU 3 is gone"),
        (("sh", "-c", "echo a word; exit 3"), False, "ended with code 3 and without an answer"),
        (("no-such-command",), False, "no-such-command cannot be started"),
        ((), True, ""),
    ],
)
def test_the_last_line_of_the_self_test_is_the_answer(
    command: tuple[str, ...], ok: bool, why: str, tmp_path: Path
) -> None:
    with Cluster(tmp_path, self_tests={"a": command}) as cluster:
        answer = cluster.collector.wait_for_answers(1)["a"]
    assert answer.ok is ok and why in answer.why
    assert answer.facts.get("gpus", 8) == 8


def test_a_node_that_does_not_answer_is_one_answer_less(tmp_path: Path) -> None:
    cluster = Cluster(tmp_path, "abc", self_tests={"b": ("sleep", "600")})
    try:
        until(lambda: cluster.collector.wait_for_answers(0.2).keys() == {"a", "c"})
        assert cluster.collector.end(0).clean == {"a", "b", "c"}  # its self-test goes with it
    finally:
        cluster.__exit__()


# --- ranks ------------------------------------------------------------------------------------


def test_signals_for_the_ranks_leave_the_guard_alone(tmp_path: Path) -> None:
    with Cluster(tmp_path) as cluster:
        cluster.watch()
        for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGINT):
            cluster["a"].guard.send_signal(number)
        steps = cluster.collector.reports["a"][0].steps
        until(lambda: cluster.collector.reports["a"][0].steps > steps + 5)


# --- the end ----------------------------------------------------------------------------------


def test_an_end_does_not_wait_longer_than_the_ranks_do(tmp_path: Path) -> None:
    with Cluster(tmp_path) as cluster:
        cluster.watch("step(); os._exit(1)")
        cluster["a"].ranks[0].wait()
        assert cluster.collector.end(60.0, wait=PATIENCE * 10).clean == {"a"}


# --- without the collector --------------------------------------------------------------------


def test_ranks_that_stand_still_without_a_collector_are_ended(tmp_path: Path) -> None:
    with Cluster(tmp_path, wired=True) as cluster:
        cluster.watch(STILL)
        cluster.cut("a")
        begin = time.monotonic()
        assert cluster["a"].guard.wait(PATIENCE * 20) == 1
        assert time.monotonic() - begin >= LIMITS.silent
        assert cluster["a"].ranks[0].wait() == -signal.SIGKILL
        assert cluster["a"].guard.stderr is not None
        assert "the ranks of this host are ended" in cluster["a"].guard.stderr.read()


@pytest.mark.parametrize("names", ["b", "ab"])
def test_ranks_that_step_outlive_a_cut_of_the_service_link(names: str, tmp_path: Path) -> None:
    with Cluster(tmp_path, "ab", wired=True) as cluster:
        cluster.watch()
        cluster.cut(names)
        assert cluster.undisturbed(2 * LIMITS.silent)
        steps = cluster.collector.reports["b"][0].steps
        cluster.cut(names, is_cut=False)
        until(lambda: cluster.collector.reports["b"][0].steps > steps + 20)
        assert cluster.collector.verdict is None
        assert [node.guard.poll() for node in cluster.nodes.values()] == [None, None]


@pytest.mark.parametrize("code", [None, "progress.done(); os._exit(0)"])
def test_a_guard_without_ranks_leaves_when_its_collector_is_gone(
    code: str | None, tmp_path: Path
) -> None:
    with Cluster(tmp_path) as cluster:
        if code is not None:
            cluster.watch(code)
            cluster["a"].ranks[0].wait()
        cluster.collector.close()
        begin = time.monotonic()
        assert cluster["a"].guard.wait(PATIENCE * 10) == 0
        assert in_time(time.monotonic() - begin, 3 * LIMITS.lonely)
        assert not os.path.exists(cluster["a"].folder)


def test_a_stopped_node_is_dead_when_the_others_stand_still(tmp_path: Path) -> None:
    with Cluster(tmp_path, "ab") as cluster:
        cluster.watch()
        for rank in cluster["a"].ranks:  # it waits for the other in a collective
            rank.send_signal(signal.SIGSTOP)
        cluster["b"].stop()
        found = cluster.collector.wait(PATIENCE * 10)
        assert found is not None and found.dead == ("b",) and not found.gone
        ended = cluster.collector.end(0.1, wait=PATIENCE * 3)
        assert ended.clean == {"a"} and ended.silent == {"b"}


def test_a_spare_that_falls_silent_is_told_and_training_goes_on(tmp_path: Path) -> None:
    with Cluster(tmp_path, "ab") as cluster:
        cluster.collector.watch("a")
        cluster["a"].rank(0)
        cluster["b"].stop()
        until(lambda: cluster.collector.wait(1.0) is None and cluster.collector.dead_spares)
        assert cluster.collector.dead_spares == {"b"} and cluster.collector.verdict is None


def test_a_guard_that_is_started_again_is_believed(tmp_path: Path) -> None:
    with Cluster(tmp_path) as cluster:
        cluster.watch()
        node = cluster["a"]
        node.guard.kill()
        node.guard.wait()
        node.guard = started_guard(
            guard_words(cluster.collector.port, "a", node.folder, job=node.job)
        )
        steps = cluster.collector.reports["a"][0].steps
        until(lambda: cluster.collector.reports["a"][0].steps > steps + 5)
        assert cluster.said == []
