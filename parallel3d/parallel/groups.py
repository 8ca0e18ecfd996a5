"""Makes the process groups of a user's own script: `p3d.init(tp=2)`."""

from __future__ import annotations

import atexit
import functools
import os
import signal
import sys
from datetime import timedelta
from types import TracebackType
from typing import NoReturn

import torch
import torch.distributed as dist

from parallel3d.comm.exchange import check_agreement
from parallel3d.comm.process_groups import ProcessGroups
from parallel3d.config.fields import check_value
from parallel3d.config.schema import Config, LaunchConfig
from parallel3d.device.accelerator import backend_of, device_of_world, is_accelerator, make_current
from parallel3d.errors import UserError, closest, print_line
from parallel3d.host.devices import NEW_NCCL, choose_device, device_of_rank
from parallel3d.run.failure import leave
from parallel3d.run.launcher_environment import detect
from parallel3d.run.rendezvous import counted, rendezvous
from parallel3d.run.worker import begin_on
from parallel3d.topology.layout import DEFAULT_ORDER, Layout
from parallel3d.versions import OF_A_SCRIPT, check_versions, newer


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
    """Returns this process's groups in the grid tp × cp × pp × dp, under torchrun, srun or alone.

    Uses the default process group if torch.distributed is initialised already. Otherwise runs the
    launcher's rendezvous, and closes the groups when the script ends. On a host with GPUs each
    rank's GPU becomes its current device, `groups.device`, where modules and inputs must be.
    Collective over the world.

    Args:
        tp, pp, dp, cp: sizes; one of them may be None: the rest of the world.
        device: cpu, cuda or auto: GPUs if there is one for each rank of the host.
        order: the dimensions, from the one whose ranks are adjacent on.
        timeout_s: of a collective.
        shared_memory: CPU ranks of one host communicate through shared memory.

    Raises:
        UserError: on every rank alike, sizes that do not make up the world or differ between ranks;
            a launcher's variables that contradict each other; no such device.
    """
    own = not dist.is_initialized()
    check_versions(OF_A_SCRIPT)
    here = _join_world(device, timeout_s) if own else device_of_world()
    layout = _agreed_layout({"pp": pp, "tp": tp, "cp": cp, "dp": dp}, order, here)
    launch = LaunchConfig(timeout_s=timeout_s, shared_memory=shared_memory)
    groups = ProcessGroups.create(layout, here.type, timeout_s, launch)
    if groups.rank == 0 and (sentence := newer(OF_A_SCRIPT)):
        print_line(sentence)
    if own:
        ScriptEnd(groups)
    return groups


def _join_world(requested: str, timeout_s: float) -> torch.device:
    """Runs the rendezvous, initialises torch.distributed and returns this rank's device."""
    check_value("device", requested)
    place = detect(os.environ)
    config = Config(launch=LaunchConfig(timeout_s=timeout_s))
    store: dist.Store | None = None
    if place is None:
        store = dist.HashStore()
    elif not place.local_world_size:
        store = rendezvous(config, place)
        place = counted(store, place)
    ranks_here = 1 if place is None else place.local_world_size
    bound = place is not None and place.may_bind_gpus
    kind = choose_device(requested, ranks_here, one_gpu_each=bound).kind
    begin_on(kind)
    device = torch.device(device_of_rank(kind, 0 if place is None else place.local_rank))
    make_current(device)
    if is_accelerator(device):
        os.environ.setdefault(NEW_NCCL, "0")
    dist.init_process_group(
        backend_of(device),
        store=rendezvous(config, place) if store is None and place is not None else store,
        rank=0 if place is None else place.rank,
        world_size=1 if place is None else place.world_size,
        timeout=timedelta(seconds=timeout_s),
        device_id=device if is_accelerator(device) else None,
    )
    return device


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


class ScriptEnd:
    """Closes the groups when the script ends; otherwise their threads abort the dying interpreter.

    NCCL destroys a communicator in a collective. A failed rank must not enter it: its peers may
    wait for this rank in another collective, so that both sides would hang.

    A script fails by an exception that nothing catches, or by `sys.exit` with another code than 0.
    `raise SystemExit` cannot be noticed and counts as success.
    """

    def __init__(self, groups: ProcessGroups) -> None:
        self.groups = groups
        self.code: int | None = None  # exit code of a script that raised
        self.has_exited = False  # it called `sys.exit` with another code than 0
        self.excepthook, self.exit = sys.excepthook, sys.exit
        sys.excepthook, sys.exit = self._raised, self._exited
        atexit.register(self.close)

    def _raised(
        self, kind: type[BaseException], error: BaseException, trace: TracebackType | None
    ) -> None:
        self.excepthook(kind, error, trace)
        if not hasattr(sys, "ps1"):  # an interactive session goes on
            interrupted = issubclass(kind, KeyboardInterrupt)
            self.code = 128 + signal.SIGINT if interrupted else 1

    def _exited(self, status: str | int | None = None) -> NoReturn:
        self.has_exited = bool(status)
        self.exit(status)

    def close(self) -> None:
        """Destroys the groups and the world, with all ranks, unless the script has failed."""
        if not dist.is_initialized():
            return
        if self.code is not None:
            leave(self.code)
        if self.has_exited and is_accelerator(self.groups.device):
            # The exit may have been caught, so the exit code is left to the interpreter.
            from parallel3d.private_names import abort_process_group

            abort_process_group()
            return
        self.groups.close()
        dist.destroy_process_group()
