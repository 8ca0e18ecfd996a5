"""The group that a user names, and what it allows."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

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
    return group.size > 1 and (group.shared is not None or group.name == groups.FOREIGN)


def timeout_of(group: Group) -> float:
    """Seconds after which a rank that does not come is given up."""
    if group.shared is not None:
        return group.shared.memory.timeout_s
    options = getattr(group.handle._get_backend(torch.device("cpu")), "options", None)
    timeout = getattr(options, "_timeout", None)
    return timeout.total_seconds() if timeout else DEFAULT_TIMEOUT_S


def own_device(
    device_ids: Sequence[int | torch.device] | None, device: torch.device
) -> torch.device | None:
    """The device for inputs. Raises ValueError for another one than the module's."""
    if not device_ids:
        return None
    named = device_ids[0]
    wanted = torch.device(device.type, named) if isinstance(named, int) else torch.device(named)
    if len(device_ids) > 1 or wanted != device:
        raise ValueError(
            f"device_ids={list(device_ids)} must name the one device of the module, {device}, or "
            "be None"
        )
    return device
