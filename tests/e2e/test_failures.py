"""Tests a rank that raises or dies: all end in seconds, and the last line names who, where and
why."""

from __future__ import annotations

import json
import re
import signal
import socket
import subprocess
import time
from pathlib import Path

import pytest

from parallel3d.metrics.jsonl import rows_of
from tests.e2e.command import PARALLEL3D, TINY, TORCHRUN, Ended, Shell, wait_for
from tests.e2e.forked import run_forked
from tests.e2e.test_runs import slurm_environment
from tests.pace import PATIENCE, in_time
from tests.ports import free_port

SECONDS = 10
HOST = re.escape(socket.gethostname())
LONG = "train.steps=100000"
pytestmark = [pytest.mark.at_once(2), pytest.mark.nightly]


def words(shell: Shell, *more: str) -> tuple[str, ...]:
    return ("train", *TINY, *shell.text(), "run=mine", *more)


def by_hand(shell: Shell, *words: str) -> list[subprocess.Popen[str]]:
    """Starts two ranks like srun."""
    words = (*words, f"launch.master_port={free_port()}")
    return [shell.start(*PARALLEL3D, *words, **slurm_environment(rank)) for rank in (0, 1)]


def start_training(shell: Shell, *more: str, pp: int = 2) -> subprocess.Popen[str]:
    """Starts a run of two local ranks, or of `pp`, and waits until it trains."""
    process = shell.start(*PARALLEL3D, *words(shell, f"pp={pp}", LONG, *more))
    metrics = shell.cwd / "runs" / "mine" / "metrics.jsonl"
    wait_for(lambda: metrics.exists() and metrics.stat().st_size, 60, "the first step")
    return process


# Among three stages the first one stops, so that only SIGKILL ends it; then the second one raises,
# and the third, which waits for it, fails because of that.
@pytest.mark.parametrize(
    ("layout", "fault"),
    [
        (("tp=1",), "raise:0:3"),
        (("pp=3", "model.num_layers=3"), "stop:0:3,raise:1:3"),
    ],
)
def test_a_rank_that_raises_ends_all_and_is_named(
    shell: Shell, layout: tuple[str, ...], fault: str
) -> None:
    rank = len(layout) - 1
    ended = shell.run(*PARALLEL3D, *words(shell, *layout, LONG), **shell.failing(fault))
    assert in_time(shell.seconds_since_failure(), SECONDS)
    assert ended.code == 1
    assert re.fullmatch(
        rf"parallel3d: rank {rank} \(pp {rank}, dp 0, tp 0\) on {HOST} failed in train step 3 "
        rf"at parallel3d/loop/run_steps\.py:\d+: ValueError: planted "
        rf"\(traceback: runs/mine/rank-{rank}\.traceback\.txt\)",
        ended.errors[-1],
    )
    assert "Traceback" not in ended.err
    details = (shell.cwd / "runs" / "mine" / f"rank-{rank}.traceback.txt").read_text()
    assert "Traceback" in details
    assert "in two lines" in details


def test_interrupt_of_the_launcher_stops_all_at_a_step(shell: Shell) -> None:
    """test_listeners.py sends SIGTERM, to a run that was inspected before."""
    process = start_training(shell, "checkpoint.every=500")
    started = time.monotonic()
    process.send_signal(signal.SIGINT)
    ended = shell.finish(process, started, 30)
    assert in_time(ended.wall_s, SECONDS)
    assert ended.code == 130
    assert_stopped_and_saved(shell, ended, signal.SIGINT)
    assert not (shell.cwd / "runs" / "mine" / "requeue").exists()


def assert_stopped_and_saved(shell: Shell, ended: Ended, number: signal.Signals) -> None:
    """Asserts that the last reported step is in metrics.jsonl, and has a checkpoint."""
    last = (
        rf"parallel3d: stopped by {number.name} after step (\d+) of 100000; "
        "saved: run=mine resumes from there"
    )
    step = re.fullmatch(last, ended.errors[-1])
    assert step, ended.err
    run = shell.cwd / "runs" / "mine"
    assert [*rows_of(run / "metrics.jsonl")][-1]["step"] == int(step[1])
    assert (run / "checkpoints" / f"step-{int(step[1]):08d}").is_dir()


def test_second_interrupt_ends_all_at_once(shell: Shell) -> None:
    shell.environ = shell.failing("hang:0:3")
    process = start_training(shell)
    wait_for((shell.cwd / "failed_at").exists, 30, "the hang")
    started = time.monotonic()
    process.send_signal(signal.SIGINT)
    time.sleep(0.5)
    assert process.poll() is None  # no step can end, and launch.grace_s is a minute
    process.send_signal(signal.SIGINT)
    ended = shell.finish(process, started, 30)
    assert in_time(ended.wall_s, SECONDS)
    assert ended.code == 130
    assert ended.errors[-1] == "parallel3d: stopped by SIGINT; all 2 ranks have ended"


def test_ranks_that_do_not_stop_in_time_are_ended(shell: Shell) -> None:
    shell.environ = shell.failing("hang:0:3")
    process = start_training(shell, "launch.grace_s=1")
    wait_for((shell.cwd / "failed_at").exists, 30, "the hang")
    started = time.monotonic()
    process.send_signal(signal.SIGTERM)
    ended = shell.finish(process, started, 30)
    assert in_time(ended.wall_s, SECONDS)
    assert ended.code == 128 + signal.SIGTERM
    assert ended.errors[-1] == (
        "parallel3d: stopped by SIGTERM (launch.grace_s=1 had passed); all 2 ranks have ended"
    )


def test_killed_launcher_leaves_no_rank(shell: Shell) -> None:
    process = start_training(shell)
    process.kill()
    process.communicate()
    assert not shell.wait_until_none_is_left(SECONDS)


LINE_LOST = """
import os, pty, sys
METRICS = "runs/mine/metrics.jsonl"
pid, terminal = pty.fork()
if pid == 0:
    os.execv(sys.argv[1], sys.argv[1:])
while not os.path.exists(METRICS) or not os.path.getsize(METRICS):
    os.read(terminal, 4096)
os.close(terminal)  # as sshd does when the line drops
sys.exit(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
"""


@pytest.mark.parametrize("layout", ["pp=1", "pp=2"])
def test_a_lost_terminal_loses_nothing(shell: Shell, layout: str) -> None:
    train = words(shell, layout, LONG, "checkpoint.every=100000")
    ended = shell.run(PARALLEL3D[0], "-c", LINE_LOST, *PARALLEL3D, *train)
    assert ended.code == 0, ended
    run = shell.cwd / "runs" / "mine"
    step = [*rows_of(run / "metrics.jsonl")][-1]["step"]
    assert (run / "checkpoints" / f"step-{step:08d}").is_dir()
    assert json.loads((run / "requeue").read_text())["signal"] == "SIGHUP"
    assert not (run / "failures").exists()


@pytest.mark.parametrize("layout", ["pp=1", "pp=2"])
def test_a_run_outlives_the_reader_of_its_output(shell: Shell, layout: str) -> None:
    process = shell.start(*PARALLEL3D, *words(shell, layout, "checkpoint.every=2"))
    assert process.stdout is not None and process.stdout.readline()
    process.stdout.close()
    _, err = process.communicate(timeout=60 * PATIENCE)
    assert process.returncode == 0, err
    run = shell.cwd / "runs" / "mine"
    assert (run / "checkpoints" / "step-00000003").is_dir()


# Standard output as with a shell's `> /dev/full` and `>&-`.
UNWRITABLE = {
    "full disk": "os.dup2(os.open('/dev/full', os.O_WRONLY), 1)",
    "closed": "os.close(1); sys.stdout = sys.__stdout__ = None",
}


@pytest.mark.parametrize("output", UNWRITABLE)
def test_a_run_outlives_output_that_cannot_be_written(shell: Shell, output: str) -> None:
    starts = "from parallel3d.__main__ import main; sys.exit(main())"
    code = f"import os, sys; {UNWRITABLE[output]}; {starts}"
    ended = run_forked(shell, "-c", code, *words(shell, "pp=2", "checkpoint.every=2"))
    assert ended.code == 0, ended
    run = shell.cwd / "runs" / "mine"
    assert (run / "checkpoints" / "step-00000003").is_dir()
    assert not (run / "failures").exists()


def test_ranks_do_not_outlive_a_killed_agent(shell: Shell) -> None:
    train = words(shell, "tp=2", LONG)
    agent = shell.start(*TORCHRUN, "--nproc-per-node=2", "-m", "parallel3d", *train)
    metrics = shell.cwd / "runs" / "mine" / "metrics.jsonl"
    wait_for(lambda: metrics.exists() and metrics.stat().st_size, 90, "the first step")
    agent.kill()
    agent.wait()
    assert not shell.wait_until_none_is_left(SECONDS)
    agent.communicate()


@pytest.mark.parametrize(
    ("library", "layout"),
    [
        ("_multiarray_umath", "pp=1"),
        ("libtorch_cpu", "pp=2"),
    ],
)
def test_an_interrupt_during_the_start_is_one_line(shell: Shell, library: str, layout: str) -> None:
    """Interrupts while our own modules are imported, before anything is made, and within torch's
    C++."""
    shell.anew = True
    process = shell.start(*PARALLEL3D, *words(shell, layout, LONG))
    maps = Path(f"/proc/{process.pid}/maps")
    wait_for(lambda: library in maps.read_text(), 60, library)
    process.send_signal(signal.SIGINT)
    ended = shell.finish(process, time.monotonic(), 60)
    assert ended.code == 130, ended
    if ended.errors != ["parallel3d: interrupted"]:
        assert re.match("parallel3d: stopped by SIGINT after step 1 ", ended.errors[-1]), ended
    else:
        assert not list((shell.cwd / "runs").glob("*"))


def test_interrupt_of_a_single_process_without_checkpoints(shell: Shell) -> None:
    process = start_training(shell, "checkpoint.every=0", pp=1)
    started = time.monotonic()
    process.send_signal(signal.SIGINT)
    ended = shell.finish(process, started, 30)
    assert ended.code == 130
    assert re.fullmatch(
        r"parallel3d: stopped by SIGINT after step \d+ of 100000; "
        r"nothing is saved \(checkpoint.every=0\)",
        ended.errors[-1],
    )
    assert not (shell.cwd / "runs" / "mine" / "checkpoints").exists()
    assert "Traceback" not in ended.err


def failed_ranks(errors: list[str]) -> list[str]:
    found = (re.match(r"parallel3d: rank (\d) \(.*failed in train step 3", e) for e in errors)
    return [match[1] for match in found if match]


def test_failing_rank_says_so_under_torchrun(shell: Shell) -> None:
    ended = shell.run(
        *TORCHRUN,
        *("--nproc-per-node=2", "-m", "parallel3d", *words(shell, "tp=2", LONG)),
        **shell.failing("raise:1:3"),
    )
    assert in_time(shell.seconds_since_failure(), SECONDS)
    assert ended.code != 0
    assert failed_ranks(ended.errors)[0] == "1"
    assert failed_ranks(ended.errors) in (["1"], ["1", "0"])  # an echo may come before the end
    # torchrun's own summary, which comes last, has it, too.
    assert "train step 3" in ended.err[ended.err.index("Root Cause") :]


def test_failing_rank_takes_its_peers_down_under_slurm(shell: Shell) -> None:
    shell.environ = shell.failing("raise:1:3")
    first, second = by_hand(shell, *words(shell, "tp=2", LONG))
    started = time.monotonic()
    _, err = second.communicate(timeout=300)
    assert second.returncode == 1
    assert "rank 1 (pp 0, dp 0, tp 1)" in err
    ended = shell.finish(first, started, 30)
    assert in_time(shell.seconds_since_failure(), SECONDS)
    assert ended.code == 1
    assert failed_ranks(ended.errors) == ["0"]


def test_a_rank_with_other_arguments_ends_all_with_one_sentence(shell: Shell) -> None:
    port = f"launch.master_port={free_port()}"
    other = [words(shell, "tp=2", f"optim.lr=0.{rank + 1}", port) for rank in (0, 1)]
    started = time.monotonic()
    ranks = [shell.start(*PARALLEL3D, *other[n], **slurm_environment(n)) for n in (0, 1)]
    ended = [shell.finish(rank, started, 60) for rank in ranks]
    assert in_time(ended[0].wall_s, SECONDS)
    assert [rank.code for rank in ended] == [2, 2]
    said = [line for rank in ended for line in rank.errors]
    assert len(said) == 1, said
    assert said[0].startswith("parallel3d: optim.lr is 0.1 on rank 0 and 0.2 on rank 1, host ")
    assert not list((shell.cwd / "runs").iterdir())


def test_taken_run_is_refused_once_under_slurm(shell: Shell) -> None:
    taken = shell.cwd / "runs" / "mine"
    taken.mkdir(parents=True)
    processes = by_hand(shell, *words(shell, "tp=2"))
    results = [(*process.communicate(timeout=300), process.returncode) for process in processes]
    assert [code for *_, code in results] == [2, 2]
    lines = [line for _, err, _ in results for line in err.splitlines()]
    said = [line for line in lines if not line.startswith("parallel3d: device: ")]
    refusal = "run=mine: runs/mine exists and is not a run directory: choose another run=."
    assert said == [f"parallel3d: {refusal}"]
    assert list(Path(taken).iterdir()) == []
