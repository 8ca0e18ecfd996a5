"""Chooses the device of this host's ranks and their environment variables, without torch.

`choose_device` alone decides on `device=`, for every subcommand and for the library.
"""

from __future__ import annotations

import os
import platform
import socket
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from parallel3d.blueprint.keys import ClusterConfig
from parallel3d.config.nccl import parse_nccl_env
from parallel3d.device.datasheets import BLACKWELL
from parallel3d.errors import UserError
from parallel3d.host.gpus import GpuFindings, VisibleGpu, find, is_nvidia_build
from parallel3d.host.quotas import available_cores
from parallel3d.text import count

# torch ≥ 2.9 reads the first name; the others are older and still work.
ALLOCATOR = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
RECORDER = ("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE")
# Number of collectives and messages that NCCL's flight recorder keeps, each in about a kilobyte of
# host memory. A step of 32 layers with tp and 16 micro-batches has some 5,000; torch's default is
# 2,000.
RECORDED = 20_000
# From torch 2.15 on, "nccl" names another class of groups, unless this variable is 0 when the first
# group is made. parallel3d's groups, diagnosis of hangs and ways to end a run were only tested with
# the old class.
NEW_NCCL = "TORCH_DIST_USE_NCCL2"
CONNECTIONS = "CUDA_DEVICE_MAX_CONNECTIONS"
TF32 = "NVIDIA_TF32_OVERRIDE"


def gpu_environment(
    device: str, environ: Mapping[str, str], cluster: ClusterConfig, *, tp: int, zero: int
) -> dict[str, str]:
    """Returns environment variables for ranks on `device`, without those that the user has set."""
    if device in (CPU, SIMULATED) or not is_nvidia_build():
        return {}
    given = {*environ, *parse_nccl_env(cluster.nccl_env)}
    wanted = {}
    if not given.intersection(ALLOCATOR):
        # Segments can grow, unlike blocks of fixed sizes, so freed memory fits tensors of other
        # sizes when micro-batches, buckets and gathered layers alternate.
        wanted[ALLOCATOR[0]] = "expandable_segments:True"
    if not given.intersection(RECORDER):
        wanted[RECORDER[0]] = str(RECORDED)
    if NEW_NCCL not in given:
        wanted[NEW_NCCL] = "0"
    if CONNECTIONS not in given and _needs_order(tp, zero):
        wanted[CONNECTIONS] = "1"
    return wanted


def _needs_order(tp: int, zero: int) -> bool:
    """Returns whether kernels must start in the order in which they are queued.

    The backward of a tensor-parallel linear layer queues the all-reduce of the input's gradient and
    then computes the weight gradient, which hides the all-reduce if the all-reduce gets its
    multiprocessors first. With several hardware queues, a GPU older than Blackwell may start the
    larger kernel first, which leaves no multiprocessors for the all-reduce. With zero ≥ 2 whole
    layers are gathered and scattered on concurrent streams, which a single queue would serialise.
    """
    if tp == 1 or zero >= 2:
        return False
    capability = compute_capability()
    return capability is None or capability < BLACKWELL


# NCCL from 2.30 on lets several ranks share a GPU. This is slow, but it is enough to try a layout.
SHARED_GPUS = "NCCL_MULTI_RANK_GPU_ENABLE"
CPU = "cpu"
CUDA = "cuda"
SIMULATED = "simulated"  # parallel3d.simulated_device, an accelerator simulated on the CPU
SIMULATED_DEVICES = 8
OR_CPU = "; or give device=cpu to compute on the CPU"


class HostError(UserError):
    """A user error that may concern only this host, so every host prints its own error."""


class DeviceChoice(NamedTuple):
    """The device type of a host's ranks, a line that names the devices in use, and the GPUs."""

    kind: str
    line: str = ""
    gpus: tuple[VisibleGpu, ...] = ()


def choose_device(requested: str, ranks_here: int, *, launched: bool = False) -> DeviceChoice:
    """Returns the device type for the `ranks_here` ranks of this host, from `device=requested`.

    device=auto takes the CPU only if the driver reports no GPU or there is no driver, and if
    nothing indicates that a GPU is intended.

    Args:
        launched: whether a launcher started the ranks. It may show each rank only the rank's own
            GPU, as Slurm's binding does, so the GPUs of all ranks are compared later
            (`shared_gpu`).

    Raises:
        HostError: if the GPUs cannot be used or are fewer than the ranks, or if there is no GPU
            although device=cuda asks for one, or hints show that one is intended.
    """
    if requested in (CPU, SIMULATED):
        return DeviceChoice(requested, _line_of_cpu(requested))
    found, host = find(os.environ), socket.gethostname()
    if found.fault:
        raise HostError(f"device={requested}, but host {host} gives no GPU: {found.fault}{OR_CPU}")
    if found.gpus:
        few = len(found.gpus) < ranks_here and os.environ.get(SHARED_GPUS) != "1"
        if few and not launched:
            raise HostError(
                f"{ranks_here} ranks need {ranks_here} GPUs, but host {host} shows "
                f"{len(found.gpus)}: use a smaller tp × pp × dp, more hosts, or device=cpu"
            )
        return DeviceChoice(CUDA, _line_of_gpus(found, ranks_here, few), found.gpus)
    if requested == CUDA:
        raise HostError(f"device=cuda, but host {host} gives no GPU: {found.lack}{OR_CPU}")
    if found.hints:
        raise HostError(
            f"device=auto finds no GPU on host {host}, since {found.lack}, but a GPU is expected "
            f"because of {', '.join(found.hints)}: {_remedy(found)}{OR_CPU}"
        )
    more = f"; {found.remark}" if found.remark else ""
    return DeviceChoice(CPU, f"{_line_of_cpu(CPU)}: {found.lack}{more}")


def _remedy(found: GpuFindings) -> str:
    if "build without CUDA" in found.lack:
        return "install a torch that is built for it"
    if "hides all" in found.lack:
        return "unset that mask, or ask the scheduler for GPUs (srun --gpus-per-node=…)"
    return (
        "load its driver, or give this step or container its GPUs (srun --gpus-per-node=…, docker "
        "run --gpus all, apptainer exec --nv)"
    )


def _line_of_cpu(kind: str) -> str:
    here = "CPU" if kind == CPU else "an accelerator simulated on the CPU"
    return f"device: {here}, {available_cores()} of {os.cpu_count() or 1} cores"


def _line_of_gpus(found: GpuFindings, ranks_here: int, one_each: bool) -> str:
    used = ranks_here if one_each else min(ranks_here, len(found.gpus))
    there = max(used, found.on_host)
    names = " and ".join(dict.fromkeys(gpu.name for gpu in found.gpus[:used] if gpu.name))
    line = f"device: {used} of {count(there, 'GPU')} of this host"
    return f"{line}, {names}" if names else line


def shared_gpu(of_ranks: Sequence[tuple[str, str]]) -> str | None:
    """Returns an error if two ranks compute on one GPU without NCCL's permission; else None.

    Args:
        of_ranks: each rank's host and its GPU's identity (see `gpu_of_rank`).
    """
    first: dict[str, int] = {}
    for rank, (host, gpu) in enumerate(of_ranks):
        if gpu and (other := first.setdefault(gpu, rank)) != rank:
            return (
                f"ranks {other} and {rank} of host {host} use the same GPU ({gpu}): start no more "
                "ranks on a host than it has GPUs, and show each rank its own GPU or all of them; "
                f"otherwise set {SHARED_GPUS}=1, which makes NCCL let ranks share a GPU, or give "
                "device=cpu"
            )
    return None


def gpu_of_rank(device: str, environ: Mapping[str, str]) -> str:
    """Returns the identity of a GPU such as "cuda:0"; "" for a CPU, or if ranks may share GPUs."""
    kind, _, index = device.partition(":")
    if kind != CUDA or environ.get(SHARED_GPUS) == "1":
        return ""
    gpus = find(environ).gpus
    return gpus[int(index)].identity if int(index) < len(gpus) else ""


def check_numerics(kind: str, precision: str, environ: Mapping[str, str]) -> None:
    """Raises UserError if NVIDIA_TF32_OVERRIDE, which overrides programs, contradicts `precision`.

    cuBLAS never computes in tf32 if NVIDIA_TF32_OVERRIDE is 0; any other value forces it.
    """
    value = environ.get(TF32, "").strip()
    other = "fp32" if value == "0" else "tf32"
    wins = value and precision in ("fp32", "tf32") and precision != other
    if wins and kind == CUDA and is_nvidia_build():
        raise UserError(
            f"{TF32}={value} makes cuBLAS compute in {other} in spite of precision={precision}; "
            f"unset it, or give precision={other}"
        )


def device_of_rank(kind: str, local_rank: int) -> str:
    """Returns a rank's device, "cpu" or "<type>:<index>". Raises HostError if there is none."""
    if kind == CPU:
        return kind
    count = SIMULATED_DEVICES if kind == SIMULATED else _torch_count(kind)
    if count == 0:
        raise HostError(
            f"torch finds no device of type {kind} on host {socket.gethostname()}; give device=cpu"
        )
    return f"{kind}:{local_rank % count}"  # Slurm may show each rank only its own GPU


def _torch_count(kind: str) -> int:
    import torch

    return torch.get_device_module(kind).device_count()


def compute_capability() -> int | None:
    """Returns the major compute capability of this process's first GPU (9 for Hopper), or None."""
    gpus = find(os.environ).gpus
    return (gpus[0].capability or None) if gpus else None


def device_name(kind: str) -> str | None:
    """Returns the name of the processor or of the first GPU; None if it is unknown."""
    if kind == CUDA:
        gpus = find(os.environ).gpus
        return (gpus[0].name or None) if gpus else None
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as lines:
            found = [line.partition(":")[2].strip() for line in lines if "model name" in line]
    except OSError:
        found = []
    return found[0] if found and found[0] else platform.machine() or None
