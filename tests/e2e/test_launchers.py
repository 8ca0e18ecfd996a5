"""Tests ranks of launchers by their variables, as real processes: how they meet, wait and are
refused."""

from __future__ import annotations

import os
import signal
import socket
import time
from pathlib import Path
from subprocess import Popen

import pytest

from parallel3d.run.launcher_environment import detect
from tests.e2e.command import PARALLEL3D, TINY, Ended, Shell
from tests.pace import PATIENCE, in_time
from tests.ports import free_port

STEP = {
    "SLURM_JOB_ID": "7",
    "SLURM_NTASKS": "2",
    "SLURM_STEP_NUM_TASKS": "2",
    "SLURM_STEP_NODELIST": "localhost",
    "SLURM_STEP_TASKS_PER_NODE": "2",
    "SLURM_NODEID": "0",
}


def task(rank: int, step: int = 0) -> dict[str, str]:
    """Returns the variables of a task of srun."""
    return STEP | {
        "SLURM_STEP_ID": str(step),
        "SLURM_PROCID": str(rank),
        "SLURM_LOCALID": str(rank),
    }


def by_hand(rank: int, port: int) -> dict[str, str]:
    """Returns the variables that an operator sets, without the ranks of a host."""
    place = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2"}
    return place | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}


def start(shell: Shell, environ: dict[str, str], *words: str) -> Popen[str]:
    return shell.start(*PARALLEL3D, "train", *TINY, *shell.text(), "dp=2", *words, **environ)


def ended(process: Popen[str]) -> Ended:
    out, err = process.communicate(timeout=60 * PATIENCE)
    return Ended(process.returncode, out, err, 0.0, 0.0)


def wait_until(condition: object, seconds: float = 60.0) -> None:
    deadline = time.monotonic() + seconds * PATIENCE
    assert callable(condition)
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.1)


def listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_waits_ends_on_a_signal(shell: Shell, rank: int) -> None:
    port = free_port()
    number = signal.SIGTERM if rank else signal.SIGINT
    process = start(shell, by_hand(rank, port), "run=w")
    if rank == 0:
        wait_until(lambda: listens(port))
    else:
        status = Path(f"/proc/{process.pid}/status")
        bit = 1 << (number - 1)  # blocked, so that a thread waits for the signal
        wait_until(lambda: int(status.read_text().split("SigBlk:")[1].split()[0], 16) & bit)
    os.kill(process.pid, number)
    sent = time.monotonic()
    end = ended(process)
    assert in_time(time.monotonic() - sent, 5)
    assert end.code == 128 + number
    assert len([line for line in end.errors if "device: CPU" not in line]) == 1
    assert end.errors[-1].startswith(f"parallel3d: {number.name} ended this process while ")
    assert not (shell.cwd / "runs" / "w").exists()


@pytest.mark.nightly
def test_only_a_rank_of_another_step_is_refused(shell: Shell) -> None:
    """Both runs use one port, as if their job numbers had led to it."""
    port = f"launch.master_port={free_port()}"
    first = start(shell, task(0), "run=a", port)
    wait_until(lambda: listens(int(port.partition("=")[2])))
    other = ended(start(shell, task(1, step=1), "run=a", port))
    assert other.code == 2
    assert "(step 0 of Slurm job 7 with 2 ranks), but this rank belongs to step 1" in other.err
    second = ended(start(shell, task(1), "run=a", port))
    assert (ended(first).code, second.code) == (0, 0)


@pytest.mark.nightly
def test_only_ranks_of_another_run_are_refused(shell: Shell) -> None:
    port = free_port()
    first = start(shell, by_hand(0, port), "run=a")
    wait_until(lambda: listens(port))
    other = ended(start(shell, by_hand(1, port), "run=b"))
    assert other.code == 2 and "which have run=a, but this rank has run=b" in other.err
    second = ended(start(shell, by_hand(1, port), "run=a"))
    assert (ended(first).code, second.code) == (0, 0)
    assert not (shell.cwd / "runs" / "b").exists()


@pytest.mark.nightly
def test_a_step_of_several_runs_is_refused_as_a_whole(shell: Shell) -> None:
    place = detect(task(0, step=2))
    assert place is not None
    ranks = [start(shell, task(rank, step=2), f"run={rank}") for rank in range(2)]
    ends = [ended(rank) for rank in ranks]
    assert [end.code for end in ends] == [2, 2]
    assert "run is 0 on rank 0 and 1 on rank 1" in ends[0].err


def test_ranks_of_mpirun_are_one_run(shell: Shell) -> None:
    world = {"OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_LOCAL_SIZE": "2"}
    world["PMIX_NAMESPACE"] = f"prterun-vm-{os.getpid()}@1"
    names = ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_LOCAL_RANK", "PMIX_RANK")
    ranks = [start(shell, world | dict.fromkeys(names, str(rank))) for rank in range(2)]
    assert [ended(rank).code for rank in ranks] == [0, 0]
    assert len(list((shell.cwd / "runs").iterdir())) == 1


@pytest.mark.nightly
def test_a_batch_script_of_many_tasks_is_refused_with_srun_as_the_remedy(shell: Shell) -> None:
    batch = {"SLURM_JOB_ID": "7", "SLURM_NNODES": "2", "SLURM_NTASKS": "16"}
    end = ended(start(shell, batch))
    assert end.code == 2 and "16 tasks" in end.err and "put srun before the command" in end.err
    plan = shell.run(*PARALLEL3D, "schedule", "pp=2", **batch)
    assert plan.code == 0
