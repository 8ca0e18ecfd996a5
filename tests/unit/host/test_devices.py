"""Tests which device a rank gets, on simulated hosts: no GPU is needed."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import create_autospec

import pytest
import torch
import torch.distributed as dist

from parallel3d.blueprint.keys import ClusterConfig
from parallel3d.cli import command_line
from parallel3d.cli.subcommands import SUBCOMMANDS
from parallel3d.comm.store import put
from parallel3d.errors import UserError
from parallel3d.host.devices import DeviceChoice, HostError, device_of_rank, gpu_of_rank
from parallel3d.library.init import init
from parallel3d.metrics import recovery_log
from parallel3d.run import agreement, local_workers, rendezvous, worker
from parallel3d.run.failure import note_earlier
from parallel3d.run.launch import Worker
from parallel3d.run.launcher_environment import RankAssignment
from parallel3d.run_config import Config, check_config
from parallel3d.topology.placed_ranks import Process
from tests.tools.played_gpus import Driver, Host, cards, played

HOST = socket.gethostname()


@pytest.fixture
def one_gpu(tmp_path: Path) -> Iterator[None]:
    """A workstation: one GPU, and a torch that can use it."""
    root = tmp_path / "root"
    root.mkdir()
    with played(Host(driver=Driver(cards=cards(1)), environ=dict(os.environ)), root):
        yield


def run_cli(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, code: int, *words: str) -> list[tuple]:
    """Records the arguments that the command line passes to the launcher, which is not started."""
    started: list[tuple] = []

    def record(app: str, config: Config, run_dir: Path, kind: str, work: object) -> int:
        started.append((app, config.world_size, kind))
        return 0

    monkeypatch.setattr(local_workers, "run_local_workers", record)
    monkeypatch.setattr(sys, "argv", list(sys.argv))
    monkeypatch.chdir(tmp_path)
    for name in ("RANK", "WORLD_SIZE", "SLURM_STEP_ID"):
        monkeypatch.delenv(name, raising=False)
    assert command_line.main(["train", *words]) == code
    return started


def test_a_sweep_forks_even_a_single_rank(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The ranks of a sweep are forked, because a process that has computed cannot fork."""
    monkeypatch.setattr(local_workers, "run_alone", lambda *_: 7)
    monkeypatch.setattr(local_workers, "run_local_workers", lambda *_: 0)
    cpu = DeviceChoice("cpu")
    assert local_workers.run_here("train", Config(), tmp_path, cpu) == 7
    assert local_workers.run_here("train", Config(), tmp_path, cpu, in_sweep=True) == 0


@pytest.mark.nightly
def test_more_ranks_than_gpus_are_refused_before_anything_starts(
    one_gpu: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    """device=auto would otherwise compute on the CPU for days while a GPU is idle."""
    assert run_cli(monkeypatch, tmp_path, 2, "tp=2", "pp=2") == []
    assert "4 ranks need 4 GPUs, but host" in capsys.readouterr().err
    assert run_cli(monkeypatch, tmp_path, 0, "tp=2", "pp=2", "device=cpu") == [("train", 4, "cpu")]
    assert capsys.readouterr().err.count("device: CPU, ") == 1


def place(rank: int, local_rank: int) -> RankAssignment:
    return RankAssignment("torchrun", rank, local_rank, 4, 2, "host0", 29500)


def test_under_torchrun_rank_0_prints_the_device_line(capsys: pytest.CaptureFixture) -> None:
    config = check_config(Config(device="cpu"), 4)
    kinds = [
        command_line._checked_here(SUBCOMMANDS["bench comm"], config, place(r, r % 2))
        for r in range(4)
    ]
    assert kinds == ["cpu"] * 4
    assert capsys.readouterr().err.count("device: CPU, ") == 1


def test_ranks_that_compute_on_one_gpu_are_refused_on_every_rank(
    one_gpu: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Each rank may see only one GPU: only all ranks together know that it is the same one."""
    store, sentences = dist.HashStore(), []
    monkeypatch.setattr(rendezvous, "READ_S", 0.0)
    config = check_config(Config(runs_dir=str(tmp_path)), 2)
    for rank in (1, 0):  # rank 0 decides
        here = Worker(rank, rank, 2, 2, tmp_path, "torchrun", "cuda:0")
        if rank == 1:
            mine = Process(HOST, 1, gpu=gpu_of_rank("cuda:0", os.environ))
            put(store, f"{agreement.PROCESS_KEY}/1", mine)
            continue
        with pytest.raises(UserError) as refused:
            agreement.assign_rank(config, here, store, {}, "bench comm")
        sentences.append(str(refused.value))
    assert f"ranks 0 and 1 of host {HOST} use the same GPU" in sentences[0]


def test_hosts_with_different_devices_are_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Rank 0's host has a GPU for each of its ranks; the other host does not."""
    played_cuda(2, monkeypatch)
    monkeypatch.setattr(agreement, "take_run", lambda *_: None)
    monkeypatch.setattr(rendezvous, "READ_S", 0.0)
    store = dist.PrefixStore("attempt0", dist.HashStore())
    config = check_config(Config(runs_dir=str(tmp_path)), 4)
    for rank in (0, 1):
        here = Worker(rank, rank, 4, 2, Path(), "torchrun")
        agreement.agree_on_run("bench comm", config, place(rank, rank), here, store, "cuda")
        assert here.device == f"cuda:{rank}"
    with pytest.raises(UserError, match="rank 0 computes on cuda, but rank 2 would compute on cpu"):
        here = Worker(2, 0, 4, 2, Path(), "torchrun")
        agreement.agree_on_run("bench comm", config, place(2, 0), here, store, "cpu")


# --- the rank -----------------------------------------------------------------------------------


@pytest.mark.nightly
def test_imports_for_local_ranks_do_not_touch_the_gpu() -> None:
    imports = "\n".join(f"import {module}" for module, _ in worker.APPS.values())
    planted = """
import torch
def refuse(*_, **__):
    raise AssertionError("a driver is asked")
for name in ("is_available", "device_count", "_lazy_init", "current_device"):
    setattr(torch.cuda, name, refuse)
"""
    asked = subprocess.run(
        [sys.executable, "-c", planted + imports], capture_output=True, text=True, timeout=300
    )
    assert asked.returncode == 0, asked.stderr


def played_cuda(count: int, monkeypatch: pytest.MonkeyPatch):
    """Has the names of `torch.cuda`, with nothing behind them; other names are refused."""
    module = create_autospec(torch.cuda)
    module.device_count.return_value = count
    module.get_device_properties.return_value = SimpleNamespace(
        pci_domain_id=0, pci_bus_id=0x1B, pci_device_id=0
    )
    monkeypatch.setattr(torch, "get_device_module", lambda device: module)
    return module


@pytest.mark.slow
def test_every_rank_has_a_device_with_an_index(monkeypatch: pytest.MonkeyPatch) -> None:
    assert device_of_rank("cpu", 3) == "cpu"
    assert device_of_rank("simulated", 9) == "simulated:1"
    played_cuda(8, monkeypatch)
    assert device_of_rank("cuda", 0) == "cuda:0"
    assert device_of_rank("cuda", 7) == "cuda:7"
    played_cuda(1, monkeypatch)
    assert device_of_rank("cuda", 7) == "cuda:0"  # srun shows each task its own GPU
    played_cuda(0, monkeypatch)
    with pytest.raises(HostError, match="torch finds no device of type cuda"):
        device_of_rank("cuda", 0)


class Started(Exception):
    """Raised in place of initialising torch.distributed."""


@pytest.fixture
def recorded_start(monkeypatch: pytest.MonkeyPatch) -> dict:
    """Records the arguments of `init_process_group`, after which nothing runs."""
    told: dict = {}

    def record(backend: str, **more: object) -> None:
        told.update(more, backend=backend)
        raise Started

    monkeypatch.setattr(dist, "init_process_group", record)
    monkeypatch.setattr(os, "environ", dict(os.environ))
    return told


def test_a_rank_on_a_gpu_makes_it_current_and_passes_it_to_nccl(
    recorded_start: dict, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    module = played_cuda(8, monkeypatch)
    bound = []
    monkeypatch.setattr(worker, "bind_near", bound.append)
    monkeypatch.setattr(worker, "assign_rank", lambda *_: None)
    rank = Worker(11, 3, 16, 8, tmp_path, "torchrun", device_of_rank("cuda", 3))
    config = Config(dp=16, cluster=ClusterConfig(nccl_env=["NCCL_CROSS_NIC:0"]))
    with pytest.raises(Started):
        worker._join("train", config, rank, dist.HashStore())
    module.set_device.assert_called_once_with(torch.device("cuda:3"))
    assert recorded_start["backend"] == "nccl"
    assert recorded_start["device_id"] == torch.device("cuda:3")
    assert (recorded_start["rank"], recorded_start["world_size"]) == (11, 16)
    assert os.environ["NCCL_CROSS_NIC"] == "0"
    assert bound == ["0000:1b:00.0"]


def test_world_of_one_on_a_gpu_has_an_index_too(
    recorded_start: dict, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    module = played_cuda(1, monkeypatch)
    monkeypatch.setattr(worker, "bind_near", lambda _: None)
    monkeypatch.setattr(worker, "report_end", lambda cause, run_dir: 1)
    assert worker.run_alone("bench comm", Config(dp=1), tmp_path, "cuda") == 1
    module.set_device.assert_called_once_with(torch.device("cuda:0"))
    assert recorded_start["device_id"] == torch.device("cuda:0")


def test_the_end_of_a_run_on_one_rank_is_recorded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody starts it again, so the time until the next start is the user's."""

    def fail(*_: object) -> str:
        raise OSError("odd")

    monkeypatch.setattr(worker, "device_of_rank", fail)
    monkeypatch.setattr(worker, "one_host_environment", lambda environ: {})
    (tmp_path / "starts.jsonl").touch()
    assert worker.run_alone("train", Config(), tmp_path, "cpu") == 1
    note_earlier(tmp_path)
    (line,) = recovery_log.read(tmp_path)
    assert (line.decision, line.cause and line.cause.error) == ("stop", "OSError: odd")


def test_rank_on_the_cpu_starts_gloo_without_a_device(
    recorded_start: dict, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(worker, "keep_freed_memory", lambda: None)
    with pytest.raises(Started):
        worker._join("train", Config(dp=1), Worker(0, 0, 1, 1, tmp_path, "local"), dist.HashStore())
    assert (recorded_start["backend"], recorded_start["device_id"]) == ("gloo", None)


def test_simulated_accelerator_is_enabled_before_anything_else(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Tests a world of one, and a local rank of several."""
    module = types.ModuleType("parallel3d.simulated_device")

    class Enabled(Exception):
        pass

    def enable() -> None:
        raise Enabled

    module.enable = enable
    monkeypatch.setitem(sys.modules, "parallel3d.simulated_device", module)
    monkeypatch.setattr(worker, "_die_with", lambda _: None)
    with pytest.raises(Enabled):
        worker.run_alone("train", Config(), tmp_path, "simulated")
    with pytest.raises(Enabled):
        worker.local_worker_main("train", Config(), tmp_path, 1, "simulated")
    with pytest.raises(Enabled):
        worker.run_joined("train", Config(), place(0, 0), "simulated")


def test_init_refuses_the_old_name_of_the_simulated_device_with_the_new_one() -> None:
    with pytest.raises(UserError, match="pretend is now simulated; use device=simulated"):
        init(device="pretend")
