"""Tests how a host's GPUs are detected: they are used, absent, or refused in a sentence, the same
for every caller."""

from __future__ import annotations

import os
import re
import signal
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from parallel3d.cli import command_line
from parallel3d.cli.subcommands import SUBCOMMANDS
from parallel3d.commands import best_layout, from_run
from parallel3d.commands.calibrate import calibrate_config
from parallel3d.commands.options import CommandConfig
from parallel3d.errors import UserError
from parallel3d.host import gpus
from parallel3d.host.devices import (
    check_numerics,
    choose_device,
    compute_capability,
    device_name,
    gpu_of_rank,
    shared_gpu,
)
from parallel3d.host.gpus import Answer, VisibleGpu
from parallel3d.library import init
from parallel3d.run.launch import RankAssignment
from parallel3d.run_config import Config
from tests.tools.played_gpus import Card, Driver, Host, cards, played

NVIDIA0 = ("dev/nvidia0",)
LISTED = (0, "GPU 0: NVIDIA H100 80GB HBM3 (UUID: GPU-4b)\n")
NO_DRIVER = (9, "NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver.")
CARD = "sys/bus/pci/devices/0000:1b:00.0"
NVIDIAS = {f"{CARD}/vendor": "0x10de\n", f"{CARD}/class": "0x030200\n"}
TWO = tuple(VisibleGpu(f"GPU-{i}", "AMD Instinct MI300X", units=304) for i in range(2))
MAKES = "device=auto finds no GPU"


def none(**more: object) -> Host:
    """Returns a host whose driver reports no device."""
    return Host(driver=Driver(100, ()), **more)  # type: ignore[arg-type]


# Each row: the host, its ranks, and the result of device=auto: cpu, cuda, or a part of the
# sentence.
HOSTS: dict[str, tuple[Host, int, str]] = {
    # GPUs exist.
    "eight cards": (Host(driver=Driver()), 1, "cuda"),
    "a rank for each": (Host(driver=Driver()), 8, "cuda"),
    "by a mask": (Host(driver=Driver(), environ={"CUDA_VISIBLE_DEVICES": "3,5"}), 2, "cuda"),
    "ranks outnumber them": (Host(driver=Driver()), 16, "16 ranks need 16 GPUs, but host"),
    "one for four": (Host(driver=Driver(cards=cards(1))), 4, "4 ranks need 4 GPUs"),
    "a driver of a later CUDA": (Host(driver=Driver(version=14000)), 1, "cuda"),
    "ROCm": (Host("hip", rocm=Answer(TWO)), 2, "cuda"),
    # The driver's errors are not "no GPU", even without any other sign of one.
    "802": (Host(driver=Driver(802)), 1, r"802 CUDA_ERROR_SYSTEM_NOT_READY\): start the fabric"),
    "803": (Host(driver=Driver(803)), 1, "803 CUDA_ERROR_SYSTEM_DRIVER_MISMATCH"),
    "999": (Host(driver=Driver(999)), 1, "999 CUDA_ERROR_UNKNOWN"),
    "2": (Host(driver=Driver(2)), 1, r"2 CUDA_ERROR_OUT_OF_MEMORY\): a GPU's memory is full"),
    "34": (Host(driver=Driver(34)), 1, "34 CUDA_ERROR_STUB_LIBRARY"),
    "46": (Host(driver=Driver(46)), 1, "46 CUDA_ERROR_DEVICE_UNAVAILABLE"),
    "805": (Host(driver=Driver(805)), 1, "805 CUDA_ERROR_MPS_CONNECTION_FAILED"),
    "a code of a later driver": (Host(driver=Driver(871)), 1, r"does not start \(cuInit: 871\)"),
    "802 of many ranks": (Host(driver=Driver(802)), 8, "802 CUDA_ERROR_SYSTEM_NOT_READY"),
    "an old driver": (Host(driver=Driver(version=12080)), 1, r"is for CUDA 12\.8, .* for CUDA 13"),
    # No device, and no sign that one is intended.
    "a laptop": (Host(), 1, "cpu"),
    "a laptop, four ranks": (Host(), 4, "cpu"),
    "a laptop with the driver's library": (none(), 1, "cpu"),
    "an old library without a GPU": (Host(driver=Driver(100, (), 12080)), 1, "cpu"),
    "a CPU wheel": (Host("cpu"), 1, "cpu"),
    "a CUDA image on a laptop": (Host(environ={"NVIDIA_VISIBLE_DEVICES": "all"}), 1, "cpu"),
    "a CPU node of a GPU image": (none(smi=NO_DRIVER), 1, "cpu"),
    "nvidia-smi without devices": (none(smi=(0, "No devices were found")), 1, "cpu"),
    "a CPU job of Slurm": (Host("cpu", environ={"SLURM_JOB_ID": "7"}), 1, "cpu"),
    "Slurm that gave none": (
        none(environ={"SLURM_JOB_ID": "7", "CUDA_VISIBLE_DEVICES": "NoDevFiles"}),
        1,
        "cpu",
    ),
    "a count of none": (Host("cpu", environ={"SLURM_GPUS_ON_NODE": "0"}), 1, "cpu"),
    # A user hides the GPUs.
    "an empty mask": (
        Host(driver=Driver(), files=NVIDIA0, environ={"CUDA_VISIBLE_DEVICES": ""}),
        1,
        "cpu",
    ),
    "a mask of -1": (
        Host(driver=Driver(), files=NVIDIA0, environ={"CUDA_VISIBLE_DEVICES": "-1"}),
        4,
        "cpu",
    ),
    "an empty mask, a CPU wheel": (
        Host("cpu", files=NVIDIA0, environ={"CUDA_VISIBLE_DEVICES": ""}),
        1,
        "cpu",
    ),
    # A GPU is intended, but there is none.
    "a CPU wheel beside a card": (
        Host("cpu", files=NVIDIA0),
        1,
        f"{MAKES}.*is a build without CUDA, but a GPU is expected because of /dev/nvidia0: install",
    ),
    "a CPU wheel beside AMD's": (Host("cpu", files=("dev/kfd",)), 1, "because of /dev/kfd"),
    "a CPU wheel and nvidia-smi": (Host("cpu", smi=LISTED), 1, "'GPU 0: NVIDIA H100 80GB HBM3'"),
    "a CPU wheel in a job": (
        Host("cpu", environ={"SLURM_GPUS_ON_NODE": "8"}),
        8,
        "because of SLURM_GPUS_ON_NODE=8",
    ),
    "no library beside a card": (Host(files=NVIDIA0), 1, r"no driver library \(libcuda.so.1\)"),
    "no device beside a card": (none(files=NVIDIA0), 1, "the driver shows no GPU.*/dev/nvidia0"),
    "a job whose step has none": (
        none(environ={"SLURM_JOB_GPUS": "0"}),
        1,
        "because of SLURM_JOB_GPUS=0",
    ),
    "an empty mask in a job": (
        none(environ={"SLURM_GPUS": "a100:4", "CUDA_VISIBLE_DEVICES": ""}),
        1,
        "CUDA_VISIBLE_DEVICES='' hides all GPUs, but a GPU is expected because of SLURM_GPUS=a100",
    ),
    "Slurm without --gres beside a card": (
        none(files=NVIDIA0, environ={"SLURM_JOB_ID": "7", "CUDA_VISIBLE_DEVICES": "NoDevFiles"}),
        1,
        "CUDA_VISIBLE_DEVICES=NoDevFiles hides all GPUs, but a GPU is expected because of /dev/nv",
    ),
    "PBS": (none(environ={"PBS_NGPUS": "2"}), 1, "because of PBS_NGPUS=2"),
    "tres": (none(environ={"SLURM_TRES_PER_TASK": "cpu=4,gres/gpu=1"}), 1, "SLURM_TRES_PER_TASK"),
    "SkyPilot": (
        none(environ={"SKYPILOT_NUM_GPUS_PER_NODE": "8"}),
        1,
        "because of SKYPILOT_NUM_GPUS",
    ),
    "SageMaker": (Host("cpu", environ={"SM_NUM_GPUS": "8"}), 1, "because of SM_NUM_GPUS=8"),
    "SageMaker on CPUs": (Host("cpu", environ={"SM_NUM_GPUS": "0"}), 1, "cpu"),
    "a mask of a GPU that is not there": (
        Host(environ={"CUDA_VISIBLE_DEVICES": "0"}),
        1,
        "because of CUDA_VISIBLE_DEVICES=0",
    ),
    "a module that was not loaded": (
        Host(driver=Driver(100, ()), smi=NO_DRIVER, texts=NVIDIAS),
        1,
        "an NVIDIA card is at 0000:1b:00.0",
    ),
    # Masks that contradict the devices, or each other.
    "a mask of more than there are": (
        Host(driver=Driver(cards=cards(2)), environ={"CUDA_VISIBLE_DEVICES": "0,1,9"}),
        1,
        "names 3 GPUs, but the driver shows 2",
    ),
    "a mask that ends early on purpose": (
        Host(driver=Driver(), environ={"CUDA_VISIBLE_DEVICES": "0,-1,1"}),
        1,
        "cuda",
    ),
    "a mask that names one twice": (
        Host(driver=Driver(), files=NVIDIA0, environ={"CUDA_VISIBLE_DEVICES": "0,0"}),
        1,
        "the driver shows no GPU",
    ),
    "ROCR and HIP": (
        Host("hip", environ={"ROCR_VISIBLE_DEVICES": "1", "HIP_VISIBLE_DEVICES": "1"}),
        1,
        "ROCR_VISIBLE_DEVICES=1 leaves 1 GPU, numbered from 0, but HIP_VISIBLE_DEVICES=1 names",
    ),
    "ROCR and CUDA": (
        Host("hip", environ={"ROCR_VISIBLE_DEVICES": "4,5", "CUDA_VISIBLE_DEVICES": "4,5"}),
        2,
        "leaves 2 GPUs, numbered from 0, but CUDA_VISIBLE_DEVICES=4,5 names others",
    ),
    "HIP takes two of the three that ROCR leaves": (
        Host(
            "hip",
            rocm=Answer(TWO),
            environ={"ROCR_VISIBLE_DEVICES": "4,5,6", "HIP_VISIBLE_DEVICES": "0,1"},
        ),
        2,
        "cuda",
    ),
    "HIP names more than there are": (
        Host("hip", rocm=Answer(TWO), environ={"HIP_VISIBLE_DEVICES": "0,1,9"}),
        1,
        "HIP_VISIBLE_DEVICES=0,1,9 names 3 GPUs, but the driver shows 2",
    ),
    "HIP and CUDA": (
        Host("hip", environ={"HIP_VISIBLE_DEVICES": "0", "CUDA_VISIBLE_DEVICES": "1"}),
        1,
        "HIP_VISIBLE_DEVICES=0 contradicts CUDA_VISIBLE_DEVICES=1",
    ),
    "masks of ROCm that agree": (
        Host(
            "hip",
            rocm=Answer(TWO),
            environ={"ROCR_VISIBLE_DEVICES": "4,5", "HIP_VISIBLE_DEVICES": "0,1"},
        ),
        2,
        "cuda",
    ),
    "ROCm that cannot be imported": (
        Host("hip", rocm=ImportError("libamdhip64.so.7: cannot open shared object file")),
        1,
        "cannot count its GPUs: ImportError: libamdhip64.so.7",
    ),
    "ROCm in a group without rights": (Host("hip", files=("dev/kfd",)), 1, "ROCm shows no GPU"),
}
CALLERS = ("train", "train of a launcher", "eval", "calibrate", "layout=auto", "p3d.init")


class Begun(Exception):
    """Raised when the device is chosen and work would begin."""


def asked(caller: str, ranks: int, monkeypatch: pytest.MonkeyPatch) -> str:
    """Returns the device type with which `caller` begins; UserError passes."""
    kinds: list[str] = []

    def begin(app: str, config: Config, folder: Path, device: SimpleNamespace, **_: object) -> int:
        kinds.append(device.kind)
        return 0

    def join(backend: str, **_: object) -> None:
        raise Begun

    monkeypatch.setattr(command_line, "run_here", begin)
    monkeypatch.setattr(from_run, "run_here", begin)
    config = CommandConfig(dp=ranks)
    if caller == "train":
        for name in ("check_run", "take_run", "listen_here"):
            monkeypatch.setattr(command_line, name, lambda *_, **__: SimpleNamespace(close=dict))
        monkeypatch.setattr(command_line, "is_sweep", lambda: False)
        make = lambda config, *_, **__: (config, Path())  # noqa: E731
        monkeypatch.setattr(command_line, "make_run_directory", make)
        command_line._start(SUBCOMMANDS["bench comm"], config, [])
    elif caller == "train of a launcher":
        place = RankAssignment("torchrun", 0, 0, ranks, ranks, "h", 29500)
        return command_line._checked_here(SUBCOMMANDS["bench comm"], config, place)
    elif caller == "eval":
        from_run.run_on_checkpoint("eval", config)
    elif caller == "calibrate":
        return "cuda" if calibrate_config(config, [], None).dp in (1, 2) else "cpu"
    elif caller == "layout=auto":
        monkeypatch.setattr(best_layout, "available_cores", lambda: 64)
        return "cpu" if best_layout._ranks_here(config.device, 1) == 64 else "cuda"
    else:
        monkeypatch.setattr(dist, "init_process_group", join)
        monkeypatch.setattr(init, "begin_on", kinds.append)
        monkeypatch.setattr(init, "device_of_rank", lambda kind, local: "cpu")
        with pytest.raises(Begun):
            init.init()
    return kinds[0]


@pytest.mark.parametrize("name", HOSTS)
def test_each_host_has_the_right_device_or_sentence(name: str, tmp_path: Path) -> None:
    host, ranks, answer = HOSTS[name]
    with played(host, tmp_path):
        if answer in ("cpu", "cuda"):
            choice = choose_device("auto", ranks)
            assert choice.kind == answer
            assert choice.line.startswith("device: ")
        else:
            with pytest.raises(UserError, match=answer) as refused:
                choose_device("auto", ranks)
            assert "device=cpu" in str(refused.value)
        assert choose_device("cpu", ranks).kind == "cpu", "what is typed is always fine"
        if answer != "cuda":
            with pytest.raises(UserError, match="device=cpu"):
                choose_device("cuda", ranks)


@pytest.mark.parametrize("name", [n for n, (_, ranks, _) in HOSTS.items() if ranks == 1])
def test_all_callers_get_the_same_answer(name: str, tmp_path: Path) -> None:
    for caller in CALLERS:
        host, _, answer = HOSTS[name]
        if answer == "cuda" and caller == "calibrate":
            host = Host(host.build, Driver(cards=cards(2)) if host.driver else None, host.rocm)
        with played(host, tmp_path / caller), pytest.MonkeyPatch.context() as patch:
            if answer in ("cpu", "cuda"):
                assert asked(caller, 1, patch) == answer, caller
                continue
            try:
                found = asked(caller, 1, patch)
            except UserError as refused:
                assert re.search(answer, str(refused)), caller
            else:
                pytest.fail(f"{caller} begins on {found}")


def test_ranks_of_a_launcher_may_each_see_their_own(tmp_path: Path) -> None:
    """Tests `CUDA_VISIBLE_DEVICES=$LOCAL_RANK` in a wrapper, Slurm's binding, flux, jsrun."""
    seen = []
    for rank in range(4):
        with played(Host(driver=Driver(), environ={"CUDA_VISIBLE_DEVICES": str(rank)}), tmp_path):
            choice = choose_device("auto", 4, launched=True)
            assert choice.kind == "cuda"
            assert choice.line.startswith("device: 4 of 4 GPUs of this host, NVIDIA H100")
            seen.append(("h", gpu_of_rank("cuda:0", os.environ)))
    assert shared_gpu(seen) is None
    assert "ranks 0 and 4 of host h use the same GPU" in str(shared_gpu([*seen, seen[0]]))


def test_ranks_share_a_gpu_if_nccls_variable_allows_it(tmp_path: Path) -> None:
    given = {"NCCL_MULTI_RANK_GPU_ENABLE": "1"}
    with played(Host(driver=Driver(cards=cards(1)), environ=given), tmp_path):
        assert choose_device("auto", 4).kind == "cuda"
        assert gpu_of_rank("cuda:0", os.environ) == ""


@pytest.mark.parametrize(
    ("host", "ranks", "line"),
    [
        (Host(driver=Driver()), 1, "device: 1 of 8 GPUs of this host, NVIDIA H100 80GB HBM3"),
        (
            Host(
                driver=Driver(),
                files=tuple(f"dev/nvidia{i}" for i in range(8)),
                environ={"CUDA_VISIBLE_DEVICES": "6,7"},
            ),
            2,
            "device: 2 of 8 GPUs of this host, NVIDIA H100 80GB HBM3",
        ),
        (Host(), 1, r"device: CPU, \d+ of \d+ cores: there is no driver library"),
        (
            Host(environ={"NVIDIA_VISIBLE_DEVICES": "all"}),
            1,
            "NVIDIA_VISIBLE_DEVICES=all comes from an image for GPUs",
        ),
        (
            Host("cpu", files=("proc/driver/nvidia/gpus/0000:1b:00.0",)),
            1,
            "the host's driver has 1 GPU; a container gets them with docker run --gpus all",
        ),
    ],
)
def test_a_line_compares_used_devices_with_those_present(
    host: Host, ranks: int, line: str, tmp_path: Path
) -> None:
    with played(host, tmp_path):
        assert re.search(line, choose_device("auto", ranks).line)


def test_the_line_describes_the_card_that_is_used(tmp_path: Path) -> None:
    """Devices have CUDA's own numbers: NVML's first card is another one here."""
    mixed = (Card(0, "NVIDIA GeForce RTX 3090", capability=8), Card(1, "NVIDIA H200"))
    given = {"CUDA_VISIBLE_DEVICES": "1"}
    with played(Host(driver=Driver(cards=mixed), environ=given), tmp_path):
        assert (device_name("cuda"), compute_capability()) == ("NVIDIA H200", 9)


def test_an_integrated_graphics_unit_does_not_count_as_a_gpu(tmp_path: Path) -> None:
    bank = tmp_path / "sys/class/kfd/kfd/topology/nodes/1/mem_banks/0/properties"
    bank.parent.mkdir(parents=True)
    bank.write_text("heap_type 1\nsize_in_bytes 536870912\n")
    with played(Host("cpu", files=("dev/kfd",)), tmp_path):
        assert choose_device("auto", 1).kind == "cpu"
        bank.write_text("heap_type 1\nsize_in_bytes 206141652992\n")
        with pytest.raises(UserError, match="/dev/kfd"):
            choose_device("auto", 1)


# The process that queries the driver


@pytest.mark.slow
def test_the_driver_is_asked_in_another_process_which_passes_errors_and_crashes() -> None:
    """Otherwise no rank that is forked from it could start CUDA."""
    driver = Driver()
    answer = gpus.in_subprocess(lambda: gpus.ask_cuda(driver))  # type: ignore[arg-type]
    assert [gpu.name for gpu in answer.gpus] == ["NVIDIA H100 80GB HBM3"] * 8
    assert driver.started == []
    assert gpus.in_subprocess(lambda: Answer(code=802)).code == 802
    failed = gpus.in_subprocess(lambda: (_ for _ in ()).throw(ImportError("no libamdhip64.so")))
    assert failed.error == "ImportError: no libamdhip64.so"
    crashed = gpus.in_subprocess(lambda: os.kill(os.getpid(), signal.SIGKILL))  # type: ignore
    assert crashed.error == "the process that asked for GPUs ended with SIGKILL"


def test_a_process_that_has_used_cuda_asks_the_driver_itself(tmp_path: Path) -> None:
    """A script may call torch.cuda.set_device before p3d.init: a child could not start CUDA."""
    driver = Driver()
    with played(Host(driver=driver), tmp_path), pytest.MonkeyPatch.context() as patch:
        patch.setattr(gpus, "in_subprocess", lambda ask: Answer(code=3))
        assert choose_device("auto", 8).kind == "cuda"
        assert driver.started == [os.getpid()]


# Variables that take precedence over every program


@pytest.mark.parametrize(
    ("value", "precision", "said"),
    [
        ("1", "fp32", "NVIDIA_TF32_OVERRIDE=1 makes cuBLAS compute in tf32 .* precision=tf32"),
        ("2", "fp32", "NVIDIA_TF32_OVERRIDE=2"),
        ("0", "tf32", "NVIDIA_TF32_OVERRIDE=0 makes cuBLAS compute in fp32 .* precision=fp32"),
        ("1", "tf32", None),
        ("0", "fp32", None),
        ("1", "bf16", None),
        ("", "fp32", None),
        (None, "fp32", None),
    ],
)
def test_variables_that_change_numerics_are_checked(
    value: str | None, precision: str, said: str | None, tmp_path: Path
) -> None:
    given = {} if value is None else {"NVIDIA_TF32_OVERRIDE": value}
    with played(Host(driver=Driver()), tmp_path):
        check_numerics("cpu", precision, given)
        if said is None:
            check_numerics("cuda", precision, given)
        else:
            with pytest.raises(UserError, match=said):
                check_numerics("cuda", precision, given)


# A world that the script has initialised itself

GPU_HOST, LAPTOP = Host(driver=Driver()), Host("cpu")
BOTH, UNTYPED = "cpu:gloo,cuda:nccl", "undefined"
# Each row: the host, the script's request, the world's backends, p3d.init's device, and the answer.
WORLDS = [
    (GPU_HOST, UNTYPED, BOTH, "auto", "cuda:0"),
    (GPU_HOST, BOTH, BOTH, "auto", "cuda:0"),
    (GPU_HOST, "nccl", "cuda:nccl", "auto", "cuda:0"),
    (GPU_HOST, "nccl", "cuda:nccl", "cuda", "cuda:0"),
    (GPU_HOST, BOTH, BOTH, "cpu", "cpu"),
    (GPU_HOST, "gloo", "cpu:gloo,cuda:gloo", "auto", "cpu"),
    (GPU_HOST, "gloo", "cpu:gloo,cuda:gloo", "cuda", "no backend for it"),
    (GPU_HOST, "nccl", "cuda:nccl", "cpu", "no backend for it"),
    (LAPTOP, "gloo", "cpu:gloo", "auto", "cpu"),
    (LAPTOP, UNTYPED, "cpu:gloo", "auto", "cpu"),
    (LAPTOP, UNTYPED, "cpu:gloo", "cuda", "no GPU|no backend"),
    (Host(driver=Driver(802)), UNTYPED, BOTH, "auto", "802"),
    (Host("cpu", files=NVIDIA0), UNTYPED, "cpu:gloo", "auto", "a GPU is expected"),
    (Host("cpu", files=NVIDIA0), "gloo", "cpu:gloo", "auto", "cpu"),
    (Host(), UNTYPED, BOTH, "auto", "cpu"),
]


@pytest.mark.parametrize(("host", "typed", "world", "requested", "answer"), WORLDS)
def test_init_in_an_initialised_world(
    host: Host,
    typed: str,
    world: str,
    requested: str,
    answer: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    works = host.driver is not None and host.driver.code == 0
    found = torch.device("cuda") if works else None
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda **_: found)
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_backend", lambda: typed)
    monkeypatch.setattr(dist, "get_backend_config", lambda: world)
    monkeypatch.setattr(dist, "get_rank", lambda: 0)
    module = SimpleNamespace(
        is_initialized=lambda: True, current_device=lambda: 0, set_device=lambda device: None
    )
    monkeypatch.setattr(torch, "get_device_module", lambda device: module)
    with played(host, tmp_path):
        if answer in ("cpu", "cuda:0"):
            assert str(init._device_in_world(requested)) == answer
        else:
            with pytest.raises(UserError, match=answer):
                init._device_in_world(requested)


@pytest.mark.parametrize(
    ("bound", "initialised", "environ", "index"),
    [
        (torch.device("cuda:5"), False, {"LOCAL_RANK": "3"}, 5),
        (None, True, {"LOCAL_RANK": "3"}, 2),  # the script made its own device current
        (None, False, {"LOCAL_RANK": "3"}, 3),
        (None, False, {}, 0),
    ],
)
def test_the_device_in_an_initialised_world(
    bound: torch.device | None,
    initialised: bool,
    environ: dict[str, str],
    index: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made = []
    module = SimpleNamespace(
        is_initialized=lambda: initialised,
        current_device=lambda: 2,
        set_device=made.append,
        device_count=lambda: 8,
    )
    monkeypatch.setattr(torch, "get_device_module", lambda device: module)
    monkeypatch.setattr(init, "accelerator_of_world", lambda: torch.device("cuda"))
    monkeypatch.setattr(dist, "get_backend", lambda: UNTYPED)
    monkeypatch.setattr(dist, "get_backend_config", lambda: BOTH)
    monkeypatch.setattr(dist, "get_rank", lambda: 0)
    monkeypatch.setattr(
        dist, "group", SimpleNamespace(WORLD=SimpleNamespace(bound_device_id=bound))
    )
    with played(Host(driver=Driver(), environ=environ), tmp_path):
        assert init._device_in_world("auto") == torch.device("cuda", index)
    assert made == [torch.device("cuda", index)]
