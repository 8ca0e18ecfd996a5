"""Groups of ranks, which this package made or which a user made with torch.distributed."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from parallel3d.errors import UserError
from parallel3d.private_names import root_of_mesh

if TYPE_CHECKING:
    from parallel3d.comm.operation_log import OperationLog
    from parallel3d.comm.shared_memory import SharedCollectives
    from parallel3d.comm.step_timer import StepTimer

EXTERNAL = "external"  # name of a group that this package did not make


@dataclass(frozen=True)
class Group:
    """A group of ranks that communicate with each other; `handle` is None for a single rank."""

    name: str
    ranks: tuple[int, ...]
    index: int  # this rank's index in `ranks`
    handle: dist.ProcessGroup | None
    shared: SharedCollectives | None = field(default=None, compare=False)  # for CPU ranks
    log: OperationLog | None = field(default=None, compare=False)  # read to diagnose a hang
    timer: StepTimer | None = field(default=None, compare=False)  # times the collectives

    @property
    def size(self) -> int:
        return len(self.ranks)

    def __deepcopy__(self, memo: dict) -> Group:
        """Returns the group itself, so that a module's copy communicates with the same ranks."""
        return self


# The group of layers that are not sharded; it needs no torch.distributed.
SINGLE = Group("single", (0,), 0, None)

GroupLike = Group | dist.ProcessGroup | DeviceMesh | None


def group_of(group: GroupLike) -> Group:
    """Returns the `Group` that belongs to a process group, a one-dimensional mesh or None.

    None stands for all ranks, or for this process alone if torch.distributed is not initialised.

    Raises UserError if `group` is something else or does not contain this rank.
    """
    if isinstance(group, Group):
        return group
    if isinstance(group, DeviceMesh):
        if group.ndim != 1:
            raise UserError(
                f"group={group!r} must be a mesh of one dimension; select one of them, such as "
                f"mesh[{(group.mesh_dim_names or ('tp',))[-1]!r}]"
            )
        return group_of_mesh(group) or group_of(group.get_group())
    if group is None and not dist.is_initialized():
        return SINGLE
    index = -1
    if group is None or isinstance(group, dist.ProcessGroup):
        index = dist.get_rank(group)
    if index < 0:
        raise UserError(
            f"group={group!r} must be a group that this rank is in: groups.tp, groups.pp or "
            "groups.dp of init, a group or a mesh of torch.distributed, or None for all ranks"
        )
    ranks = tuple(dist.get_process_group_ranks(group))
    handle = (dist.group.WORLD if group is None else group) if len(ranks) > 1 else None
    return Group(EXTERNAL, ranks, index, handle)


# This package attaches groups to its meshes, so that a mesh leads to the groups' shared memory.


def set_groups_of_mesh(mesh: DeviceMesh, by_dim: dict[str, Group]) -> None:
    mesh.parallel3d_groups = by_dim  # type: ignore[attr-defined]


def group_of_mesh(mesh: DeviceMesh) -> Group | None:
    """Returns the group of a one-dimensional mesh, or None if this package did not make it."""
    root = root_of_mesh(mesh)  # for a slice, the mesh from which it was sliced
    names = mesh.mesh_dim_names or ("",)
    by_dim: dict[str, Group] = getattr(root, "parallel3d_groups", {})
    return by_dim.get(names[0]) if len(names) == 1 else None


def mesh_of_group(group: Group, device_type: str) -> DeviceMesh:
    """Returns a one-dimensional mesh over a group of several ranks. The call is not collective."""
    assert group.handle is not None
    # PyTorch's caches outlive a group and confuse meshes with equal ranks and names. Therefore the
    # name includes the communicator's name.
    name = f"{group.name}_{group.handle.group_name}"
    return DeviceMesh.from_group(group.handle, device_type, mesh_dim_names=(name,))
