"""Creates the process groups of a user's script: `p3d.init(tp=2)`."""

from __future__ import annotations

import functools
import logging
import os
import socket
from dataclasses import replace
from datetime import timedelta

import torch
import torch.distributed as dist

from parallel3d.blueprint.layout import DEFAULT_ORDER, Layout
from parallel3d.comm.exchange import check_agreement
from parallel3d.comm.process_groups import ProcessGroups
from parallel3d.comm.store import get_all, put
from parallel3d.config.fields import check_value
from parallel3d.device.accelerator import (
    accelerator_of_world,
    backend_of,
    backends_of_world,
    current,
    is_accelerator,
    make_current,
    module,
)
from parallel3d.device.keys import DeviceKeys
from parallel3d.errors import UserError, closest
from parallel3d.host.devices import (
    CPU,
    CUDA,
    NEW_NCCL,
    choose_device,
    device_of_rank,
    gpu_of_rank,
    shared_gpu,
)
from parallel3d.host.gpus import find
from parallel3d.run.keys import LaunchConfig
from parallel3d.run.launch import begin_on
from parallel3d.run.launcher_environment import RankAssignment, detect
from parallel3d.run.rendezvous import from_rank_0, rendezvous, with_counted_ranks
from parallel3d.versions import OF_A_SCRIPT, check_versions, newer

LOG = logging.getLogger("parallel3d")
GPU_KEY = "parallel3d/gpu"
# A script that names one of these backends wants ranks on CPUs, even if there are GPUs.
HOST_BACKENDS = ("gloo", "mpi", "cpu:gloo", "cpu:mpi")


def init(
    tp: int | None = 1,
    pp: int | None = 1,
    dp: int | None = None,
    *,
    cp: int | None = 1,
    device: str = "auto",
    order: str = DEFAULT_ORDER,
    timeout_s: float = 600.0,
    shared_memory: bool = True,
) -> ProcessGroups:
    """Creates the process groups of the grid tp × cp × pp × dp, and returns this process's groups.

    It works under torchrun and srun, and in a single process. If torch.distributed is initialised
    already, it uses the default process group. Otherwise it runs the launcher's rendezvous and
    initialises torch.distributed. `with init(…) as groups:` closes the groups, and the world that
    it initialised, at the end of the block; without `with`, the script calls `groups.close()`. On a
    host with GPUs, each rank's GPU becomes its current device, `groups.device`; modules and inputs
    must be on it. The device is logged by `logging.getLogger("parallel3d")`. The call is collective
    over the world.

    Args:
        tp, pp, dp, cp: sizes of the dimensions; one of them may be None and gets the remaining
            ranks.
        device: cpu, cuda or auto. With auto, each rank takes a GPU if the host has GPUs, and takes
            the CPU if there is no GPU and nothing indicates that a GPU is intended.
        order: the dimensions, beginning with the one whose ranks are adjacent.
        timeout_s: timeout of a collective, in seconds.
        shared_memory: whether CPU ranks of one host communicate through shared memory.

    Raises:
        UserError: on every rank, if the sizes differ between ranks or do not multiply to the world
            size, if variables of the launcher contradict each other, or if two ranks share a GPU.
            On the ranks of a host, if the host lacks the device or its GPUs cannot be used.
    """
    own = not dist.is_initialized()
    check_versions(OF_A_SCRIPT)
    check_value("device", device, DeviceKeys)
    here = _join_world(device, timeout_s) if own else _device_in_world(device)
    layout = _agreed_layout({"pp": pp, "tp": tp, "cp": cp, "dp": dp}, order, here)
    launch = LaunchConfig(timeout_s=timeout_s, shared_memory=shared_memory)
    groups = ProcessGroups.create(layout, here.type, timeout_s, launch)
    if groups.rank == 0 and (sentence := newer(OF_A_SCRIPT)):
        LOG.info(sentence)
    return replace(groups, owns_world=own)


def _join_world(requested: str, timeout_s: float) -> torch.device:
    """Runs the rendezvous, initialises torch.distributed and returns this rank's device."""
    place = detect(os.environ)
    launch = LaunchConfig(timeout_s=timeout_s)
    store: dist.Store | None = None
    if place is None:
        store = dist.HashStore()
    elif not place.local_world_size:
        store = rendezvous(launch, None, place, LOG.warning)
        place = with_counted_ranks(store, place)
    ranks_here = 1 if place is None else place.local_world_size
    choice = choose_device(requested, ranks_here, launched=place is not None)
    if place is None or place.rank == 0:
        LOG.info(choice.line)
    begin_on(choice.kind)
    device = torch.device(device_of_rank(choice.kind, 0 if place is None else place.local_rank))
    if place is not None:
        store = rendezvous(launch, None, place, LOG.warning) if store is None else store
        _check_devices(store, place, device)
    make_current(device)
    if is_accelerator(device):
        os.environ.setdefault(NEW_NCCL, "0")
    dist.init_process_group(
        backend_of(device),
        store=store,
        rank=0 if place is None else place.rank,
        world_size=1 if place is None else place.world_size,
        timeout=timedelta(seconds=timeout_s),
        device_id=device if is_accelerator(device) else None,
    )
    return device


def _check_devices(store: dist.Store, place: RankAssignment, device: torch.device) -> None:
    """Raises UserError on every rank if the ranks' device types differ, or if ranks share a GPU.

    NCCL may permit sharing a GPU (see `shared_gpu`). The call is collective over the world, through
    its store.
    """
    mine = [socket.gethostname(), device.type, gpu_of_rank(str(device), os.environ)]
    put(store, f"{GPU_KEY}/{place.rank}", mine)

    def decide() -> None:
        found = get_all(store, [f"{GPU_KEY}/{rank}" for rank in range(place.world_size)])
        for rank, (host, kind, _) in enumerate(found):
            if kind != device.type:
                raise UserError(
                    f"rank 0 computes on {device.type}, rank {rank} on host {host} would on "
                    f"{kind}; give device='cpu' or device='cuda'"
                )
        if shared := shared_gpu([(host, gpu) for host, _, gpu in found]):
            raise UserError(shared)

    from_rank_0(store, GPU_KEY, place, decide)


def _device_in_world(requested: str) -> torch.device:
    """Returns this rank's device in a world that the script has initialised itself.

    It is the device to which the script bound the world. Without one, it is the current device if
    the script already uses a device, and otherwise the device with the number LOCAL_RANK, as in
    PyTorch's own meshes.

    Raises:
        UserError: the world has no backend for the device, or the GPUs that it needs are missing or
            cannot be used.
    """
    world, kind = dist.get_backend_config(), accelerator_of_world()
    typed = dist.get_backend()
    if requested == "auto" and kind is None and typed in HOST_BACKENDS:
        idle = f", and {count} GPUs are not used" if (count := len(find(os.environ).gpus)) else ""
        here = choose_device(CPU, 1).line
        return _cpu_of_world(f"{here}: torch.distributed was initialised with {typed}{idle}")
    if requested == CPU or (requested == "auto" and kind is None):
        choice = choose_device(requested, _local_ranks(), launched=True)
        if choice.kind == CPU and CPU in backends_of_world():
            return _cpu_of_world(choice.line)
        requested = choice.kind
    if kind is None or requested not in ("auto", kind.type):
        raise UserError(
            f"init(device={requested!r}), but torch.distributed was initialised with {world}, in "
            "which this process has no backend for it; call p3d.init in place of "
            "init_process_group, or name the backend there, as in 'cpu:gloo,cuda:nccl'"
        )
    if kind.type == CUDA:
        _tell(choose_device(CUDA, _local_ranks(), launched=True).line)
    bound = dist.group.WORLD.bound_device_id if dist.group.WORLD is not None else None
    if bound is not None and bound.type == kind.type and bound.index is not None:
        device = bound
    elif module(kind).is_initialized():
        device = current(kind)
    else:
        device = torch.device(device_of_rank(kind.type, _number_of("LOCAL_RANK", 0)))
    make_current(device)
    return device


def _cpu_of_world(line: str) -> torch.device:
    _tell(line)
    return torch.device(CPU)


def _tell(line: str) -> None:
    if dist.get_rank() == 0:
        LOG.info(line)


def _local_ranks() -> int:
    return max(1, _number_of("LOCAL_WORLD_SIZE", 1))


def _number_of(name: str, default: int) -> int:
    """Returns a number from a variable of the launcher, or `default` if the variable is not set.

    No launcher sets the variable if the script itself joined the ranks.
    """
    text = os.environ.get(name, "")
    return int(text) if text.isdecimal() else default


def _agreed_layout(sizes: dict[str, int | None], order: str, device: torch.device) -> Layout:
    check_agreement("init", {**sizes, "order": order}, dist.group.WORLD, device)
    return _layout(dist.get_world_size(), sizes, order)


def _layout(world: int, sizes: dict[str, int | None], order: str) -> Layout:
    for key, value in sizes.items():
        whole = isinstance(value, int) and not isinstance(value, bool)
        if value is not None and (not whole or value < 1):
            raise UserError(
                f"init({key}={value!r}) must be a whole number from 1 on; the nearest is {key}=1"
            )
    free = [key for key, value in sizes.items() if value is None]
    if len(free) > 1:
        raise UserError(
            f"init({'=None, '.join(free)}=None) must leave at most one size open; the nearest is "
            f"{free[0]}=1"
        )
    left = world
    others = "tp × pp" if sizes["cp"] == 1 else "tp × cp × pp"
    for key, size in sizes.items():
        if size is None:
            continue
        if not free and key == "dp" and size != left:
            raise UserError(
                f"init(dp={size}) must be {left}, since the world has {world} ranks and {others} "
                f"is {world // left}; the nearest is dp={left}"
            )
        if left % size:
            fit = closest(size, functools.partial(_divides, left), left)
            more = "" if left == world else f" of each of {world // left} parts"
            raise UserError(
                f"init({key}={size}) must divide the world's {left} ranks{more}; the nearest is "
                f"{key}={fit}"
            )
        left //= size
    known = {key: left if size is None else size for key, size in sizes.items()}
    try:
        return Layout(order=order, **known)
    except (AttributeError, ValueError):
        raise UserError(
            f"init(order={order!r}) must name each of tp, cp, dp and pp once, joined by dashes; "
            f"the nearest is order={DEFAULT_ORDER!r}"
        ) from None


def _divides(whole: int, size: int) -> bool:
    return whole % size == 0
