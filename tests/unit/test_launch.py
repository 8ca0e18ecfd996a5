"""Who am I, by the environment alone; and the run directory's and failures' own logic."""

from __future__ import annotations

from dataclasses import replace

import pytest

from parallel3d.errors import UserError
from parallel3d.run.launch import RankAssignment, detect

TORCHRUN = {
    "RANK": "5",
    "LOCAL_RANK": "1",
    "WORLD_SIZE": "8",
    "LOCAL_WORLD_SIZE": "4",
    "MASTER_ADDR": "host0",
    "MASTER_PORT": "29500",
}
SRUN = {
    "SLURM_JOB_ID": "123456",
    "SLURM_STEP_ID": "0",
    "SLURM_NTASKS": "6",
    "SLURM_STEP_NUM_TASKS": "6",
    "SLURM_STEP_TASKS_PER_NODE": "4,2",
    "SLURM_STEP_NODELIST": "node[08-09]",
    "SLURM_JOB_NODELIST": "node[07-09]",
    "SLURM_PROCID": "5",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "1",
}


def without(environ: dict[str, str], *names: str) -> dict[str, str]:
    return {name: value for name, value in environ.items() if name not in names}


def test_torchrun_gives_the_place() -> None:
    assert detect(TORCHRUN) == RankAssignment("torchrun", 5, 1, 8, 4, "host0", 29500)


def test_srun_gives_the_place_its_first_host_and_a_port_of_the_job() -> None:
    place = RankAssignment("slurm", 5, 1, 6, 2, "node08", 20000 + 123456 % 20000, "123456")
    assert detect(SRUN) == place
    assert place.with_port(0) == place
    assert place.with_port(29600) == replace(place, master_port=29600)


def test_torchruns_port_is_not_ours_to_choose() -> None:
    place = detect(TORCHRUN)
    assert place is not None
    assert place.with_port(29600).master_port == 29500


def test_torchrun_inside_srun_comes_first() -> None:
    assert detect(SRUN | TORCHRUN) == detect(TORCHRUN)


@pytest.mark.parametrize(
    "environ",
    [
        {},
        {"MASTER_ADDR": "host0", "LOCAL_RANK": "0"},
        without(SRUN, "SLURM_STEP_ID"),  # a batch script
        SRUN | {"SLURM_STEP_ID": str(0xFFFFFFFB)},  # the batch script's own step
        SRUN | {"SLURM_NTASKS": "1", "SLURM_STEP_NUM_TASKS": "1"},  # srun of a launcher a node
    ],
)
def test_nobody_gave_a_place(environ: dict[str, str]) -> None:
    assert detect(environ) is None


@pytest.mark.parametrize("missing", ["RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR"])
def test_missing_variable_of_torchrun_is_named(missing: str) -> None:
    with pytest.raises(UserError, match=rf"\b{missing} is not"):
        detect(without(TORCHRUN, missing))


@pytest.mark.parametrize(
    ("wrong", "named"),
    [
        ({"RANK": "8"}, "RANK=8 contradicts WORLD_SIZE=8"),
        ({"RANK": "-1"}, "RANK=-1"),
        ({"LOCAL_WORLD_SIZE": "9"}, "LOCAL_WORLD_SIZE=9 contradicts WORLD_SIZE=8"),
        ({"LOCAL_RANK": "4"}, "LOCAL_RANK=4 contradicts LOCAL_WORLD_SIZE=4"),
        ({"MASTER_PORT": "http"}, "MASTER_PORT='http'"),
    ],
)
def test_contradiction_under_torchrun_is_named(wrong: dict[str, str], named: str) -> None:
    with pytest.raises(UserError, match=named):
        detect(TORCHRUN | wrong)


@pytest.mark.parametrize(
    ("wrong", "named"),
    [
        ({"SLURM_PROCID": "6"}, "SLURM_PROCID=6 contradicts SLURM_STEP_NUM_TASKS=6"),
        ({"SLURM_NODEID": "2"}, "SLURM_NODEID=2 contradicts"),
        ({"SLURM_JOB_ID": "x"}, "SLURM_JOB_ID='x'"),
        ({"SLURM_STEP_NODELIST": "node[1-"}, r"node list 'node\[1-'"),
    ],
)
def test_contradiction_under_slurm_is_named(wrong: dict[str, str], named: str) -> None:
    with pytest.raises(UserError, match=named):
        detect(SRUN | wrong)
