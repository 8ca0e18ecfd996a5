"""Runs ranks on the simulated accelerator: in a pool of their own, each with its own device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from tests.distributed.pool import Pool

DEVICE = "simulated"


def here() -> torch.device:
    """Returns this rank's device: simulated if its world is."""
    if dist.is_initialized() and dist.get_backend() == "simulated_nccl":
        return torch.device(DEVICE, torch.get_device_module(DEVICE).current_device())
    return torch.device("cpu")


def on_device(function: Callable[..., Any], *args: Any) -> Any:
    """Calls `function(*args)` on a rank whose world uses the simulated backend.

    Autograd counts the devices when it first runs, so a worker that does this does nothing else.
    """
    from parallel3d.simulated_device import enable

    machine = enable()
    machine.forget()  # forgets blocks of memory that an earlier run has left
    machine.touched.clear()
    rank, size = dist.get_rank(), dist.get_world_size()
    store = dist.PrefixStore("simulated", dist.distributed_c10d._get_default_store())
    dist.barrier()
    dist.destroy_process_group()
    device = torch.device(DEVICE, rank)
    torch.get_device_module(DEVICE).set_device(device)
    dist.init_process_group(
        "simulated_nccl", store=store, rank=rank, world_size=size, device_id=device
    )
    return function(*args)


class SimulatedPool:
    """Does the same as `run` for a pool whose ranks each have a simulated accelerator."""

    def __init__(self, pool: Pool) -> None:
        self.pool = pool

    def run(
        self, world_size: int, function: Callable[..., Any], *args: Any, timeout_s: float = 120.0
    ) -> list[Any]:
        return self.pool.run(world_size, on_device, function, *args, timeout_s=timeout_s)
