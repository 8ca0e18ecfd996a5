"""The group that a user names, and what it allows."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from parallel3d.comm.group import Group
from parallel3d.parts import groups

DEFAULT_TIMEOUT_S = 1800.0  # of torch.distributed


def group_of(given: dist.ProcessGroup | Group | None) -> Group:
    """The group of parallel3d's own, of PyTorch's, or for None PyTorch's default one.

    Raises TypeError for another thing, ValueError where torch.distributed is not initialised or
    this rank is not in the group.
    """
    if isinstance(given, Group):
        return given
    if given is not None and not isinstance(given, dist.ProcessGroup):
        raise TypeError(
            f"process_group must be a ProcessGroup, a group as groups.dp, or None; it is a "
            f"{type(given).__name__}"
        )
    if not dist.is_initialized():
        raise ValueError(
            "torch.distributed is not initialised; call parallel3d.init() or "
            "torch.distributed.init_process_group() before the module is wrapped"
        )
    handle = dist.group.WORLD if given is None else given
    if handle == dist.GroupMember.NON_GROUP_MEMBER:
        raise ValueError(f"rank {dist.get_rank()} is not in the process group")
    return groups.group_of(handle)


def may_share(group: Group) -> bool:
    """Whether shared memory is tried: parallel3d's groups say whether they want it."""
    return group.size > 1 and (group.shared is not None or group.name == groups.EXTERNAL)


def timeout_of(group: Group) -> float:
    """Seconds after which a rank that does not come is given up."""
    if group.shared is not None:
        return group.shared.memory.timeout_s
    options = getattr(group.handle._get_backend(torch.device("cpu")), "options", None)
    timeout = getattr(options, "_timeout", None)
    return timeout.total_seconds() if timeout else DEFAULT_TIMEOUT_S


def sorted_out(
    device_ids: Sequence[int | torch.device] | dist.ProcessGroup | Group | None,
    process_group: dist.ProcessGroup | Group | None,
    device_mesh: DeviceMesh | None,
) -> tuple[dist.ProcessGroup | Group | None, Sequence[int | torch.device] | None]:
    """The group, which may stand in the place of the devices or be that of a mesh, and the devices.

    Raises RuntimeError, as PyTorch's class, for two of them and for a mesh of several dimensions;
    TypeError for something else in the second place.
    """
    if isinstance(device_ids, (Group, dist.ProcessGroup)):
        if process_group is not None:
            raise RuntimeError("process_group and a group as the second argument; give one of them")
        device_ids, process_group = None, device_ids
    elif device_ids is not None and not isinstance(device_ids, (list, tuple)):
        raise TypeError(
            "the second argument must be device_ids, a list of the module's own device, or a group "
            f"as groups.dp; it is a {type(device_ids).__name__}"
        )
    if device_mesh is not None:
        if process_group is not None:
            raise RuntimeError(
                "Cannot specify both process_group and device_mesh arguments. Give one of them"
            )
        if device_mesh.ndim != 1:
            raise RuntimeError(
                f"Only 1D device mesh is supported, but got {device_mesh}; give one dimension of it"
            )
        process_group = device_mesh.get_group(mesh_dim=0)
    return process_group, device_ids


def own_device(
    device_ids: Sequence[int | torch.device] | None, device: torch.device, key: str = "device_ids"
) -> torch.device | None:
    """The device for inputs. Raises ValueError for another one than the module's."""
    if not device_ids:
        return None
    named = device_ids[0]
    wanted = torch.device(device.type, named) if isinstance(named, int) else torch.device(named)
    if len(device_ids) > 1 or wanted != device:
        raise ValueError(
            f"{key}={list(device_ids)} must name the one device of the module, {device}, or be None"
        )
    return device
