"""Tests the same run under each launcher: one run directory, the same files, the same weights."""

from __future__ import annotations

import json
import stat
import subprocess
import time
from contextlib import ExitStack
from pathlib import Path

import pytest
from safetensors import safe_open

from tests.e2e.command import PARALLEL3D, TINY, Ended, Shell
from tests.e2e.watched import Watched
from tests.ports import free_port

FILES = {
    "config.yaml",
    "metrics.jsonl",
    "starts.jsonl",
    "summary.json",
    "weights-initial.safetensors",
    "weights-final.safetensors",
}


def local(shell: Shell, *words: str) -> list[subprocess.Popen[str]]:
    # Variables of a machine with several hosts do not apply to a run on one.
    words = (*words, "launch.shared_memory=false")
    return [shell.start(*PARALLEL3D, "train", *words, GLOO_SOCKET_IFNAME="eth0")]


def torchrun(shell: Shell, *words: str) -> list[subprocess.Popen[str]]:
    """Ranks of torchrun, with the variables of its agent; test_failures.py types torchrun
    itself."""
    words, port = (*words, "preflight=true"), str(free_port())
    size = dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE", "ROLE_WORLD_SIZE"), "2")
    agent = {"MASTER_ADDR": "localhost", "MASTER_PORT": port, "TORCHELASTIC_RUN_ID": "none"}
    agent |= {"GROUP_RANK": "0", "GROUP_WORLD_SIZE": "1", "TORCHELASTIC_RESTART_COUNT": "0"}
    ranks = [dict.fromkeys(("RANK", "LOCAL_RANK", "ROLE_RANK"), str(rank)) for rank in (0, 1)]
    return [shell.start(*PARALLEL3D, "train", *words, **size, **agent, **rank) for rank in ranks]


def slurm_environment(rank: int) -> dict[str, str]:
    """Returns the variables of srun -n 2 that are read, for each task."""
    return {
        "SLURM_JOB_ID": "4711",
        "SLURM_STEP_ID": "0",
        "SLURM_NTASKS": "2",
        "SLURM_STEP_NUM_TASKS": "2",
        "SLURM_STEP_TASKS_PER_NODE": "2",
        "SLURM_STEP_NODELIST": "localhost",
        "SLURM_PROCID": str(rank),
        "SLURM_LOCALID": str(rank),
        "SLURM_NODEID": "0",
    }


def slurm(shell: Shell, *words: str) -> list[subprocess.Popen[str]]:
    words = (*words, f"launch.master_port={free_port()}")
    return [shell.start(*PARALLEL3D, "train", *words, **slurm_environment(r)) for r in (1, 0)]


def weights(path: Path) -> dict[str, bytes]:
    with safe_open(path, framework="numpy") as file:
        return {name: file.get_tensor(name).tobytes() for name in file.keys()}  # noqa: SIM118


def left_by(name: str, shell: Shell) -> Path:
    """Returns the only run directory; nothing else is left."""
    assert {path.name for path in shell.cwd.iterdir()} == {"book.txt", "cache", "runs"}
    left = {path.name.split("_")[0] for path in shell.scratch.iterdir()}
    assert left <= {"torchinductor"}  # torch's own cache
    (folder,) = (shell.cwd / "runs").iterdir()
    return folder


class Folders(dict[str, Path]):
    """Returns the run directory of one configuration under each launcher, and in one process."""

    watched: dict[str, Watched]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Folders:
    """Runs all of them; the processes of our own launcher are watched."""
    folders = Folders()
    folders.watched = {}
    for together in (
        (("alone", local, 1), ("local", local, 2)),
        (("torchrun", torchrun, 2), ("slurm", slurm, 2)),
    ):
        shells = {
            name: Shell(tmp_path_factory.mktemp(name), tmp_path_factory.mktemp("scratch"))
            for name, _, _ in together
        }
        started = time.monotonic()
        with ExitStack() as stack:
            for shell in shells.values():
                stack.callback(shell.end_all)
            processes = {}
            for name, launch, tp in together:
                if launch is local:
                    folders.watched[name] = stack.enter_context(Watched(shells[name]))
                words = (f"tp={tp}", *TINY, *shells[name].text(), "train.save_weights=true")
                processes[name] = launch(shells[name], *words)
            for name, shell in shells.items():
                for process in processes[name]:
                    ended = shell.finish(process, started)
                    assert ended.code == 0, ended
        folders |= {name: left_by(name, shell) for name, shell in shells.items()}
    return folders


def test_every_launcher_leaves_one_private_directory_with_the_same_files(
    runs: Folders,
) -> None:
    for name, folder in runs.items():
        # A single rank has no peer to send to.
        more = set() if name == "alone" else {"placement.json"}
        if name == "torchrun":  # only this run asked for it
            more.add("preflight.json")
        assert {path.name for path in folder.iterdir()} == FILES | more
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700


def test_a_local_run_listens_on_the_loopback_only(runs: Folders) -> None:
    assert runs.watched["local"].seen
    assert [watched.elsewhere for watched in runs.watched.values()] == [[], []]


def test_preflight_writes_its_file(runs: Folders) -> None:
    report = json.loads((runs["torchrun"] / "preflight.json").read_text())
    assert [group["ranks"] for group in report["groups"]] == [[0, 1]]


def test_generated_run_names_have_model_layout_and_job(runs: Folders) -> None:
    assert runs["alone"].name.endswith("-gpt_tiny-tp1pp1dp1")
    assert runs["torchrun"].name.endswith("-gpt_tiny-tp2pp1dp1")
    assert runs["slurm"].name.endswith("-gpt_tiny-tp2pp1dp1-job4711")


def test_initial_weights_are_bit_identical_over_launchers_and_layouts(
    runs: Folders,
) -> None:
    expected = weights(runs["alone"] / "weights-initial.safetensors")
    assert len(expected) > 10
    for folder in runs.values():
        assert weights(folder / "weights-initial.safetensors") == expected


def test_launchers_train_to_the_same_bits(runs: Folders) -> None:
    """Tests that results over gloo equal those over shared memory, and those after a preflight."""
    expected = weights(runs["local"] / "weights-final.safetensors")
    assert expected != weights(runs["local"] / "weights-initial.safetensors")
    for name in ("torchrun", "slurm"):
        assert weights(runs[name] / "weights-final.safetensors") == expected


def test_every_step_is_written_once(runs: Folders) -> None:
    for folder in runs.values():
        lines = (folder / "metrics.jsonl").read_text().splitlines()
        steps = [record["step"] for record in map(json.loads, lines) if "loss" in record]
        assert steps == [1, 2, 3]


def test_a_saved_config_can_be_run_again_with_only_another_name(runs: Folders) -> None:
    texts = {name: (folder / "config.yaml").read_text() for name, folder in runs.items()}
    assert "dp: 1" in texts["torchrun"]  # derived from the world size
    assert f"run: {runs['torchrun'].name}" in texts["torchrun"]
    assert "???" not in texts["torchrun"]
    assert "${" not in texts["torchrun"]


SWEEP = ("run=sweep", "train.steps=1")
COMMANDS = {
    "sweep": ("train", "--multirun", "tp=1,2", *SWEEP),
    "failing sweep": ("train", "-m", "tp=3,1", *SWEEP),
}


@pytest.fixture(scope="module")
def commands(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Ended, Path]]:
    """Returns how each command ended, and where; they run at the same time."""
    shells = {
        name: Shell(tmp_path_factory.mktemp("command"), tmp_path_factory.mktemp("scratch"))
        for name in COMMANDS
    }
    started = time.monotonic()
    try:
        processes = {
            name: shell.start(
                *PARALLEL3D, COMMANDS[name][0], *TINY, *shell.text(), *COMMANDS[name][1:]
            )
            for name, shell in shells.items()
        }
        return {
            name: (shell.finish(processes[name], started), shell.cwd)
            for name, shell in shells.items()
        }
    finally:
        for shell in shells.values():
            shell.end_all()


@pytest.mark.nightly
def test_sweep_runs_every_job_in_its_own_directory(
    commands: dict[str, tuple[Ended, Path]],
) -> None:
    ended, cwd = commands["sweep"]
    assert ended.code == 0, ended
    assert {p.name for p in cwd.iterdir()} == {"book.txt", "cache", "runs"}
    for number, tp in enumerate((1, 2)):
        folder = cwd / "runs" / f"sweep-{number}"
        assert f"tp: {tp}\n" in (folder / "config.yaml").read_text()
        assert (folder / "summary.json").exists()


@pytest.mark.nightly
def test_sweep_stops_at_the_job_that_fails(commands: dict[str, tuple[Ended, Path]]) -> None:
    ended, cwd = commands["failing sweep"]
    assert ended.code == 2
    assert "parallel3d: tp=3" in ended.errors[-1]
    assert list((cwd / "runs").glob("sweep-*")) == []
