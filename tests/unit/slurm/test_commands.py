"""Tests the command lines of steps: on which nodes they run, with how many tasks."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from parallel3d.comm.store import SECRET
from parallel3d.errors import UserError
from parallel3d.slurm.collector import Collector
from parallel3d.slurm.commands import (
    TIMED_OUT,
    Allocation,
    call,
    can_avoid,
    environment_beside,
    environment_on_some,
    gpus_of_each_node,
    missed_after,
    of_ranks,
    on_node,
    places_of,
)
from parallel3d.slurm.guards import Guards
from parallel3d.slurm.train_keys import plain_name

FOUR = {
    "SLURM_JOB_ID": "7",
    "SLURM_JOB_NAME": "big",
    "SLURMD_NODENAME": "n1",
    "SLURM_JOB_NODELIST": "n[1-4]",
    "SLURM_NTASKS_PER_NODE": "8",
}


def options(words: list[str]) -> list[str]:
    return words[: words.index("bash")]


def test_a_batch_script_knows_its_job_and_its_nodes() -> None:
    job = Allocation.of(FOUR)
    assert (job.job, job.number, job.host, job.nodes) == ("7", "7", "n1", ("n1", "n2", "n3", "n4"))
    assert job.tasks == dict.fromkeys(job.nodes, 8)
    with pytest.raises(UserError, match="SLURM_JOB_ID is not set: sbatch"):
        Allocation.of({})


def test_the_last_element_of_an_array_is_not_the_whole_array() -> None:
    """It has the array's number as SLURM_JOB_ID, and a requeue of that would be one of all."""
    array = {"SLURM_JOB_ID": "12", "SLURM_ARRAY_JOB_ID": "12", "SLURM_ARRAY_TASK_ID": "3"}
    assert Allocation.of(array).job == "12_3"


@pytest.mark.parametrize(
    ("given", "tasks"),
    [
        ({"SLURM_NTASKS": "6", "SLURM_TASKS_PER_NODE": "2(x2),1(x2)"}, [2, 2, 1, 1]),
        ({"SLURM_TASKS_PER_NODE": "64(x4)"}, [1, 1, 1, 1]),  # CPUs, as nobody has asked for tasks
        ({}, [1, 1, 1, 1]),
    ],
)
def test_tasks_of_each_node_are_those_that_the_user_asked_for(
    given: dict[str, str], tasks: list[int]
) -> None:
    environ = {key: value for key, value in FOUR.items() if key != "SLURM_NTASKS_PER_NODE"}
    assert list(Allocation.of(environ | given).tasks.values()) == tasks


def test_ranks_run_on_the_chosen_nodes_and_no_others() -> None:
    job = Allocation.of(FOUR)
    words = options(of_ranks(job, ("n1", "n2", "n4"), "logs", ["parallel3d"], beside=True))
    assert {"--nodelist=n1,n2,n4", "--nodes=3", "--ntasks=24", "--ntasks-per-node=8"} <= set(words)
    assert "--overlap" in words  # beside the lost part of the last step


def test_a_whole_job_leaves_its_tasks_to_slurm() -> None:
    job = Allocation.of(FOUR)
    words = of_ranks(job, job.nodes, "logs", ["parallel3d", "train"], beside=False)
    assert options(words) == ["srun", "--kill-on-bad-exit=0", "--wait=30"]
    assert words[-3:] == ["logs", "parallel3d", "train"]
    # After it has given up a node, its variables speak of more nodes than it has.
    words = of_ranks(job.without(["n3"]), ("n1", "n2", "n4"), "logs", ["parallel3d"], beside=True)
    assert "--nodelist=n1,n2,n4" in words


def test_a_node_has_a_step_of_its_own() -> None:
    words = on_node({}, "n2", "true")
    assert words[-1] == "true"
    assert {"--overlap", "--nodelist=n2", "--nodes=1", "--ntasks=1", "--mem=0"} <= set(words)


def test_a_guard_outlives_signals_that_ask_ranks_to_stop_while_it_starts() -> None:
    ask = "kill -USR1 $$; kill -USR2 $$; kill -TERM $$; echo alive"
    command = on_node({}, "n2", "bash", "-c", ask)
    words = command[command.index("bash") :]
    assert subprocess.run(words, capture_output=True, text=True, check=False).stdout == "alive\n"


GPUS = {**FOUR, "SLURM_NNODES": "4", "SLURM_GPUS_ON_NODE": "8"}


@pytest.mark.parametrize(
    "asked",
    [
        {"SLURM_GPUS_PER_NODE": "h100:8"},
        {"SLURM_GPUS_PER_TASK": "1"},  # a step of one task would see one GPU
        {"SLURM_GPUS": "h100:32"},  # no node has so many
        {"SLURM_NTASKS_PER_GPU": "1", "SLURM_GPUS_PER_NODE": "8"},  # not with --ntasks-per-node
        {"SLURM_MEM_PER_GPU": "1000", "SLURM_GPU_BIND": "single:1", "SLURM_CPUS_PER_GPU": "2"},
    ],
)
def test_a_step_beside_the_ranks_sees_all_gpus_of_its_node(asked: dict[str, str]) -> None:
    """Whatever sbatch was asked for the ranks: srun would take that for any step."""
    environ = GPUS | asked
    left = environment_beside(environ)
    assert not asked.keys() & left.keys()
    assert {"SLURM_JOB_ID", "SLURMD_NODENAME", "SLURM_JOB_NODELIST"} <= left.keys()
    assert "--gpus-per-node=8" in on_node(environ, "n2", "true")


def test_nodes_may_have_different_numbers_of_gpus() -> None:
    environ = GPUS | {"SLURM_GPUS": "20"}
    assert gpus_of_each_node(environ) is None
    assert "--gres=none" in on_node(environ, "n2", "true")
    assert gpus_of_each_node(FOUR) is None
    assert not [word for word in on_node(FOUR, "n2", "true") if "gpu" in word or "gres" in word]


def test_ranks_on_some_nodes_do_not_ask_for_the_gpus_of_all() -> None:
    found = environment_on_some(GPUS | {"SLURM_GPUS": "32", "SLURM_NTASKS_PER_GPU": "1"})
    assert found == GPUS | {"SLURM_GPUS_PER_NODE": "8"}


@pytest.fixture
def slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Returns a function that sets what commands of Slurm print."""

    def prints(**said: str) -> None:
        for name, text in said.items():
            path = tmp_path / name
            path.write_text(f"#!/bin/sh\ncat <<'END'\n{text}\nEND\n")
            path.chmod(0o700)
        monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")

    return prints


FIVE = "n1 mix\nn2 down*\nn3 idle~\nn4 drng\nn5 alloc"


def test_a_node_is_only_avoided_if_there_are_others(slurm: Callable[..., None]) -> None:
    """Otherwise the job would be queued for ever, even once the node is repaired."""
    slurm(squeue="gpu|", sinfo=FIVE)
    assert can_avoid("7", ["n1"], 2)
    assert not can_avoid("7", ["n1"], 3), "two are down or drain"
    assert can_avoid("7", ["n2", "n4"], 3)
    slurm(squeue="gpu|n[1-2]")
    assert not can_avoid("7", ["n1"], 2), "--nodelist of sbatch names it"
    assert can_avoid("7", ["n5"], 2)


def test_a_node_is_avoided_if_slurm_does_not_say_what_there_is(
    slurm: Callable[..., None],
) -> None:
    slurm(squeue="", sinfo=FIVE)
    assert can_avoid("7", ["n1"], 3)
    slurm(squeue="gpu|", sinfo="")
    assert can_avoid("7", ["n1"], 3)


def test_places_are_those_of_slurms_topology(slurm: Callable[..., None]) -> None:
    tree = (
        "SwitchName=core Level=1 LinkSpeed=1 Nodes=n[1-4] Switches=leaf[1-2]\n"
        "SwitchName=leaf1 Level=0 LinkSpeed=1 Nodes=n[1-2]\n"
        "SwitchName=leaf2 Level=0 LinkSpeed=1 Nodes=n[3-4]"
    )
    slurm(scontrol=tree)
    assert places_of(["n2", "n3", "n9"]) == {"n2": "leaf1", "n3": "leaf2"}
    slurm(scontrol="")
    assert places_of(["n2"]) == {}


def test_a_command_that_does_not_answer_is_left() -> None:
    assert call("sleep", "30", limit_s=0.05).code == TIMED_OUT
    missing = call("no-such-command-of-slurm")
    assert missing.code == 127 and "no-such-command-of-slurm" in missing.reason


def test_a_name_of_a_job_becomes_a_folder_of_at_most_100_characters() -> None:
    assert plain_name("a(1) é/b" + "x" * 200) == ("a_1____b" + "x" * 200)[:100]


@pytest.mark.slow
def test_the_batch_process_imports_no_torch() -> None:
    code = "import parallel3d.slurm.job, sys; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


def test_nobody_waits_for_longer_than_slurm_needs_to_miss_a_node(
    slurm: Callable[..., None],
) -> None:
    slurm(scontrol="SlurmdPort              = 6818\nSlurmdTimeout           = 120 sec\nX = 1")
    assert missed_after() == 300
    slurm(scontrol="slurm_load_ctl_conf error")
    assert missed_after() == 660


def test_guards_start_although_their_logs_cannot_be_written(
    slurm: Callable[..., None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    slurm(srun="")
    monkeypatch.setenv(SECRET, "secret")
    job = Allocation.of(FOUR)
    guards = Guards(job, 1, 5.0, ["true"], tmp_path / "missing", print)
    assert guards.steps.keys() == set(job.nodes)
    assert guards.end(0.0) == frozenset(job.nodes)


def test_a_guard_that_has_ended_is_started_again_a_few_times(
    slurm: Callable[..., None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    slurm(srun="")
    monkeypatch.setenv(SECRET, "secret")
    monkeypatch.setattr(Collector, "unguarded", frozenset({"n3"}))
    said: list[str] = []
    guards = Guards(Allocation.of(FOUR), 1, 5.0, ["true"], tmp_path, said.append)
    first = dict(guards.steps)
    for _ in range(5):
        guards.steps["n3"].wait()
        guards.replace_ended()
    assert said == ["the guard of n3 has ended, and is started again"] * 3
    assert {node for node in first if guards.steps[node] is not first[node]} == {"n3"}
    guards.end(0.0)


def test_a_job_goes_on_if_the_host_cannot_start_a_guard_for_each_node(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))  # there is no srun
    monkeypatch.setenv(SECRET, "secret")
    said: list[str] = []
    guards = Guards(Allocation.of(FOUR), 1, 5.0, ["true"], tmp_path, said.append)
    assert len(said) == 1
    assert guards.answers(frozenset(), 60.0, lambda: False) == {}
    assert guards.end(0.0) == {"n1", "n2", "n3", "n4"}
