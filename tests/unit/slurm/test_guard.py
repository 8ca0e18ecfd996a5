"""Tests guards as processes: beats, whatever a rank does, and no process left behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from parallel3d.faults.progress import FORMAT, MARK
from parallel3d.host.processes import born
from tests.pace import PATIENCE, in_time
from tests.unit.slurm.hosts import (
    LIMITS,
    ROOT,
    START,
    STILL,
    Cluster,
    is_alive,
    until,
)

pytestmark = pytest.mark.slow

SLEEPER = (sys.executable, "-c", "import time; time.sleep(600)")


def test_a_guard_imports_the_standard_library_only() -> None:
    code = (
        "import sys\n"
        "before = set(sys.modules)\n"  # Debian's Python has a sitecustomize of its own
        "import parallel3d.slurm.guard\n"
        "new = {n.partition('.')[0] for n in set(sys.modules) - before}\n"
        "names = new - set(sys.stdlib_module_names)\n"
        "ours = sorted(n for n in sys.modules if n.startswith('parallel3d.'))\n"
        "print(sorted(n for n in names if not n.startswith('_')), ours)"
    )
    ran = subprocess.run((sys.executable, "-c", code), cwd=ROOT, capture_output=True, text=True)
    names, _, ours = ran.stdout.partition("] [")
    assert names == "['parallel3d'", ran.stderr
    assert "run" not in ours.replace("slurm", "") and "cli" not in ours and "config" not in ours


def test_the_command_starts_a_guard_without_the_command_lines_imports() -> None:
    command = (sys.executable, "-X", "importtime", "-m", "parallel3d", "slurm", "guard", "--help")
    ran = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert ran.returncode == 0 and "--collector" in ran.stdout
    assert "parallel3d.slurm.guard" in ran.stderr
    assert "parallel3d.cli" not in ran.stderr and "hydra" not in ran.stderr


def test_a_killed_rank_is_told_within_a_second(tmp_path: Path) -> None:
    with Cluster(tmp_path, "ab") as cluster:
        cluster.watch()
        begin = time.monotonic()
        cluster["b"].ranks[0].kill()
        found = cluster.collector.wait(PATIENCE * 10)
        assert found is not None and found.gone == (("b", 1),) and not found.dead
        assert in_time(time.monotonic() - begin, 1.0)
        assert found.sentence() == "rank 1 on b: the process is gone"


def test_a_rank_that_is_done_may_leave(tmp_path: Path) -> None:
    with Cluster(tmp_path) as cluster:
        cluster.watch("progress.done(); os._exit(0)")
        cluster["a"].ranks[0].wait()
        assert cluster.undisturbed(0.5)
        until(lambda: cluster.collector.reports["a"][0].is_away)
        assert cluster.collector.end(0).clean == {"a"}
        assert cluster["a"].guard.wait() == 0


def test_beats_go_on_while_a_rank_holds_the_interpreter(tmp_path: Path) -> None:
    with Cluster(tmp_path) as cluster:
        cluster.watch("ctypes.PyDLL(None).sleep(600)")
        assert cluster.undisturbed(1.5 * LIMITS.silent)
        # The last beat is news: it knows how long the rank has stood still.
        assert cluster.collector.reports["a"][0].age > 1.2 * LIMITS.silent


def test_no_process_of_the_start_is_left_and_no_other_is_touched(tmp_path: Path) -> None:
    """A stopped rank, its children and a data worker of its own session are killed."""
    with Cluster(tmp_path) as cluster:
        node = cluster["a"]
        node.rank(
            0,
            "print(sleeper().pid, sleeper(start_new_session=True, env={}).pid, flush=True)\n"
            "os.kill(os.getpid(), 19)",
        )
        node.rank(1, STILL)
        assert node.ranks[0].stdout is not None
        mine = [int(word) for word in node.ranks[0].stdout.readline().split()]
        mine += [rank.pid for rank in node.ranks]
        orphan = subprocess.Popen(SLEEPER, env=node.environ())  # its parent is no rank
        other = {
            "another start": node.environ(PARALLEL3D_START=str(START + 1)),
            "another job": node.environ(SLURM_JOB_ID="1"),
            "another node": node.environ(SLURMD_NODENAME="b"),
            "no step": {k: v for k, v in node.environ().items() if k != "SLURM_STEP_ID"},
        }
        others = {name: subprocess.Popen(SLEEPER, env=e) for name, e in other.items()}
        try:
            until(lambda: len(cluster.collector.reports["a"]) == 2)
            ended = cluster.collector.end(0.1)
            assert ended.clean == {"a"} and not ended.left and not ended.silent
            assert [pid for pid in (*mine, orphan.pid) if is_alive(pid)] == []
            assert [name for name, each in others.items() if each.poll() is not None] == []
            assert node.guard.wait() == 0
            assert not os.path.exists(node.folder)
        finally:
            for process in (orphan, *others.values()):
                process.kill()
                process.wait()


def test_ranks_have_time_for_their_records(tmp_path: Path) -> None:
    with Cluster(tmp_path) as cluster:
        cluster.watch()
        ended = cluster.collector.end(600.0, wait=2.0)
        assert not ended.clean and cluster["a"].ranks[0].poll() is None
        assert cluster.collector.end(0.1).clean == {"a"}  # a shorter patience counts
        assert cluster["a"].ranks[0].wait() == -signal.SIGKILL


def test_a_pid_that_another_process_has_got_is_not_killed(tmp_path: Path) -> None:
    stranger = subprocess.Popen(SLEEPER)
    try:
        with Cluster(tmp_path) as cluster:
            begun = born(stranger.pid)
            content = FORMAT.pack(MARK, stranger.pid, begun - 1, 5, time.monotonic(), 0.1, 1)
            (Path(cluster["a"].folder) / "rank-0").write_bytes(content)
            until(lambda: cluster.collector.reports["a"])
            ended = cluster.collector.end(0, wait=PATIENCE * 10)
            assert stranger.poll() is None
            assert ended.clean == {"a"}
    finally:
        stranger.kill()
        stranger.wait()
