"""Which devices this host offers, asked without importing torch.

A wrong `device` must be answered within two seconds, and torch alone takes one to import.
"""

from __future__ import annotations

import ctypes
import importlib.util
import os
import runpy
import socket
from pathlib import Path
from typing import Any

from parallel3d.errors import UserError


class HostError(UserError):
    """A user error that may be true on this host alone: every host says its own."""


def choose_device(requested: str, ranks_here: int, *, one_gpu_each: bool = False) -> str:
    """ "cuda" or "cpu" for the `ranks_here` ranks of this host, as `device=requested` asks.

    `one_gpu_each` says that the launcher shows every rank its own GPU only (Slurm's GPU binding),
    so that seeing one is enough. Raises HostError if CUDA is asked for and absent, or if there are
    fewer GPUs than ranks.
    """
    if requested == "cpu":
        return "cpu"
    gpus = gpu_count()
    if gpus == 0:
        if requested == "cuda":
            raise HostError(f"device=cuda, but {_why_no_gpu()}; use device=cpu or device=auto")
        return "cpu"
    if gpus < ranks_here and not (one_gpu_each and gpus == 1):
        raise HostError(
            f"{ranks_here} ranks need {ranks_here} GPUs, but host {socket.gethostname()} shows "
            f"{gpus}: use a smaller tp × pp × dp, more hosts, or device=cpu"
        )
    return "cuda"


def check_precision_of(device: str, precision: str) -> None:
    """Raises UserError for a precision that `device` ("cpu", "cuda" or "cuda:1") does not have."""
    if precision == "tf32" and device == "cpu":
        raise UserError(
            "precision=tf32 is a mode of a GPU's tensor cores, and this run computes on the CPU; "
            "the nearest is precision=fp32."
        )


def gpu_count() -> int:
    """GPUs that torch can use here: CUDA_VISIBLE_DEVICES and the kind of torch build count."""
    build = _torch_build()
    if build.get("hip"):
        import torch  # a ROCm build has no driver library that we could ask more cheaply

        return torch.cuda.device_count()
    if not build.get("cuda"):
        return 0
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return 0
    count = ctypes.c_int(0)
    if driver.cuInit(0) != 0 or driver.cuDeviceGetCount(ctypes.byref(count)) != 0:
        return 0
    return count.value


def cores() -> int:
    """CPU cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _why_no_gpu() -> str:
    build = _torch_build()
    if not (build.get("cuda") or build.get("hip")):
        return f"the installed torch {build.get('__version__')} is a build without CUDA"
    return f"host {socket.gethostname()} shows no GPU"


def _torch_build() -> dict[str, Any]:
    """The constants of torch/version.py (`cuda`, `hip`, `__version__`), read without torch."""
    spec = importlib.util.find_spec("torch")
    if spec is None or not spec.submodule_search_locations:
        raise UserError("torch is not installed: run launch/setup.sh or pip install torch")
    return runpy.run_path(str(Path(spec.submodule_search_locations[0]) / "version.py"))
