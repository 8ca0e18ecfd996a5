"""Devices of this host, and environment variables of its GPU ranks, without importing torch.

A wrong `device` must be refused within two seconds, and torch alone takes one to import.
"""

from __future__ import annotations

import ctypes
import importlib.util
import os
import platform
import runpy
import socket
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from parallel3d.config.checks import parse_nccl_env
from parallel3d.config.schema import Config
from parallel3d.errors import UserError

# The first name is the one that torch ≥ 2.9 reads; the others are older and still work.
ALLOCATOR = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
RECORDER = ("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE")
# Collectives and messages that NCCL's flight recorder keeps, at about a kilobyte of host memory
# each. A step of 32 layers with tp and 16 micro-batches has some 5,000, torch's default is 2,000.
RECORDED = 20_000
# From 2.15 on torch's "nccl" is another class of groups, unless this is 0 when the first is made.
# parallel3d's groups, diagnosis of hangs and ends of runs were tried with the old class alone.
NEW_NCCL = "TORCH_DIST_USE_NCCL2"
CONNECTIONS = "CUDA_DEVICE_MAX_CONNECTIONS"
BLACKWELL = 10  # compute capability


def gpu_environment(config: Config, device: str, environ: Mapping[str, str]) -> dict[str, str]:
    """Returns environment variables for ranks on `device`, unless the user has set them."""
    if device in (CPU, SIMULATED) or not is_nvidia_build():
        return {}
    given = {*environ, *parse_nccl_env(config.cluster.nccl_env)}
    wanted = {}
    if not given.intersection(ALLOCATOR):
        # Growing segments instead of blocks of fixed sizes: freed memory can be used in another
        # shape, where micro-batches, buckets and gathered layers alternate.
        wanted[ALLOCATOR[0]] = "expandable_segments:True"
    if not given.intersection(RECORDER):
        wanted[RECORDER[0]] = str(RECORDED)
    if NEW_NCCL not in given:
        wanted[NEW_NCCL] = "0"
    if CONNECTIONS not in given and _needs_order(config):
        wanted[CONNECTIONS] = "1"
    return wanted


def _needs_order(config: Config) -> bool:
    """Returns whether kernels must start in the order in which they were queued.

    The backward of a tensor-parallel linear layer queues the all-reduce of the input's gradient
    and then computes the weight gradient, which hides it if the all-reduce gets its multiprocessors
    first. With several hardware queues a GPU before Blackwell may start the larger kernel first and
    leave none. With zero ≥ 2 whole layers are gathered and scattered on concurrent streams, which
    a single queue would serialise.
    """
    if config.tp == 1 or config.zero >= 2:
        return False
    capability = compute_capability()
    return capability is None or capability < BLACKWELL


# Several ranks on one GPU, by NCCL from 2.30 on: slow, for trying a layout where there is one GPU.
SHARED_GPUS = "NCCL_MULTI_RANK_GPU_ENABLE"
CPU = "cpu"
SIMULATED = "simulated"  # parallel3d.simulated_device, an accelerator simulated on the CPU
SIMULATED_DEVICES = 8


class HostError(UserError):
    """A user error that may be true on this host alone: every host prints its own."""


class DeviceChoice(NamedTuple):
    """The device type of a host's ranks; `note`: why device=auto ignores its GPUs, logged once."""

    kind: str
    note: str = ""


def choose_device(requested: str, ranks_here: int, *, one_gpu_each: bool = False) -> DeviceChoice:
    """Returns the device type for the `ranks_here` ranks of this host, from `device=requested`.

    `one_gpu_each`: the launcher shows every rank its own GPU only (Slurm's GPU binding), so seeing
    one is enough. Raises HostError if CUDA is requested but absent, too old, or has fewer GPUs than
    ranks, unless NCCL is told that ranks may share one; device=auto takes the CPU then.
    """
    if requested in (CPU, SIMULATED):
        return DeviceChoice(requested)
    try:
        gpus = gpu_count()
        if gpus == 0 and requested == "cuda":
            raise HostError(f"device=cuda, but {_why_no_gpu()}; give device=cpu or device=auto")
        enough = (one_gpu_each and gpus == 1) or os.environ.get(SHARED_GPUS) == "1"
        if 0 < gpus < ranks_here and not enough:
            raise HostError(
                f"{ranks_here} ranks need {ranks_here} GPUs, but host {socket.gethostname()} shows "
                f"{gpus}: use a smaller tp × pp × dp, more hosts, or device=cpu"
            )
    except HostError as lack:
        if requested == "cuda":
            raise
        return DeviceChoice(CPU, f"device=auto computes on the CPU: {lack}.")
    return DeviceChoice("cuda" if gpus else CPU)


def device_of_rank(kind: str, local_rank: int) -> str:
    """Returns one rank's device: "cpu" or "<type>:<index>". Raises HostError without any."""
    if kind == CPU:
        return kind
    count = SIMULATED_DEVICES if kind == SIMULATED else _torch_count(kind)
    if count == 0:
        raise HostError(
            f"torch finds no device of type {kind} on host {socket.gethostname()}; give device=cpu"
        )
    return f"{kind}:{local_rank % count}"  # Slurm may show each rank its own GPU alone


def _torch_count(kind: str) -> int:
    import torch

    return torch.get_device_module(kind).device_count()


def gpu_count() -> int:
    """Returns the number of GPUs that torch can use. Raises HostError if the driver is too old."""
    build = _torch_build()
    if build.get("hip"):
        return _in_subprocess(_rocm_count)
    if not build.get("cuda"):
        return 0
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return 0
    _check_driver(driver, build)
    return _in_subprocess(lambda: _cuda_count(driver))


def _in_subprocess(count: Callable[[], int]) -> int:
    """Returns the result of `count` in a process of its own, 0 if that fails.

    Counting initialises the driver, and a process forked afterwards, as local ranks are, could not
    initialise it again.
    """
    pid = os.fork()
    if pid == 0:
        found = 0
        try:
            found = min(count(), 255)
        finally:
            os._exit(found)
    _, status = os.waitpid(pid, 0)
    return max(0, os.waitstatus_to_exitcode(status))


def _rocm_count() -> int:
    import torch  # a ROCm build has no driver library to ask at less cost

    return torch.cuda.device_count()


def _cuda_count(driver: ctypes.CDLL) -> int:
    count = ctypes.c_int(0)
    if driver.cuInit(0) != 0 or driver.cuDeviceGetCount(ctypes.byref(count)) != 0:
        return 0
    return count.value


def _check_driver(driver: ctypes.CDLL, build: dict[str, Any]) -> None:
    """Raises HostError if the driver is for an older CUDA than torch's major version."""
    found = ctypes.c_int(0)
    if driver.cuDriverGetVersion(ctypes.byref(found)) != 0:
        return
    major, minor = found.value // 1000, found.value % 1000 // 10
    wanted = str(build["cuda"])
    if major < int(wanted.partition(".")[0]):
        raise HostError(
            f"host {socket.gethostname()} has a driver for CUDA {major}.{minor}, but the installed "
            f"torch {build.get('__version__')} is built for CUDA {wanted}: update the driver, "
            f"install a torch for CUDA {major}, or give device=cpu"
        )


def is_nvidia_build() -> bool:
    return bool(_torch_build().get("cuda"))


def compute_capability() -> int | None:
    """Returns the major compute capability of the host's first GPU (9: Hopper), or None."""
    gpu = _first_gpu()
    if gpu is None:
        return None
    nvml, handle = gpu
    major, minor = ctypes.c_int(0), ctypes.c_int(0)
    failed = nvml.nvmlDeviceGetCudaComputeCapability(
        handle, ctypes.byref(major), ctypes.byref(minor)
    )
    return None if failed else major.value


def device_name(kind: str) -> str | None:
    """Returns the name of the processor or of the first GPU, constant over time; None: unknown."""
    if kind == "cuda":
        return _gpu_name()
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as lines:
            found = [line.partition(":")[2].strip() for line in lines if "model name" in line]
    except OSError:
        found = []
    return found[0] if found and found[0] else platform.machine() or None


def _gpu_name() -> str | None:
    """Returns the name of the first GPU by NVML, which torch shows too; None if not known."""
    gpu = _first_gpu()
    if gpu is None:
        return None
    nvml, handle = gpu
    name = ctypes.create_string_buffer(96)
    failed = nvml.nvmlDeviceGetName(handle, name, len(name))
    return None if failed else name.value.decode(errors="replace")


def _first_gpu() -> tuple[ctypes.CDLL, ctypes.c_void_p] | None:
    """Returns NVML, which leaves CUDA uninitialised, and its handle of the first GPU, or None."""
    try:
        nvml = ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        return None
    gpu = ctypes.c_void_p()
    if nvml.nvmlInit_v2() != 0 or nvml.nvmlDeviceGetHandleByIndex_v2(0, ctypes.byref(gpu)) != 0:
        return None
    return nvml, gpu


def _why_no_gpu() -> str:
    build = _torch_build()
    if not (build.get("cuda") or build.get("hip")):
        return f"the installed torch {build.get('__version__')} is a build without CUDA"
    return f"host {socket.gethostname()} shows no GPU"


def _torch_build() -> dict[str, Any]:
    """Returns the constants of torch/version.py (`cuda`, `hip`, `__version__`), without torch."""
    spec = importlib.util.find_spec("torch")
    if spec is None or not spec.submodule_search_locations:
        raise UserError("torch is not installed: run launch/setup.sh or pip install torch")
    return runpy.run_path(str(Path(spec.submodule_search_locations[0]) / "version.py"))
