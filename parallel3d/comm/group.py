"""Ranks that communicate with each other, made here or by a user of torch.distributed."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch.distributed as dist

from parallel3d.errors import UserError

if TYPE_CHECKING:
    from parallel3d.comm.operation_log import OperationLog
    from parallel3d.comm.shared_memory import SharedCollectives
    from parallel3d.comm.step_timer import StepTimer

EXTERNAL = "own"  # name of a group that was made elsewhere


@dataclass(frozen=True)
class Group:
    """Ranks that communicate along one dimension. `handle` is None for a group of one."""

    name: str
    ranks: tuple[int, ...]
    index: int  # this rank's place in `ranks`
    handle: dist.ProcessGroup | None
    shared: SharedCollectives | None = field(default=None, compare=False)  # CPU ranks of one host
    log: OperationLog | None = field(default=None, compare=False)  # for diagnosing a hang
    timer: StepTimer | None = field(default=None, compare=False)  # times its collectives

    @property
    def size(self) -> int:
        return len(self.ranks)

    def __deepcopy__(self, memo: dict) -> Group:
        """Returns the group itself: the copy of a module communicates with the same ranks."""
        return self


SINGLE = Group("single", (0,), 0, None)  # of layers built outside of any cluster: unsharded

GroupLike = Group | dist.ProcessGroup | None


def group_of(group: GroupLike) -> Group:
    """Returns the `Group` of a process group (None: all ranks). Raises UserError if not in it."""
    if isinstance(group, Group):
        return group
    if group is None and not dist.is_initialized():
        return SINGLE
    index = -1
    if group is None or isinstance(group, dist.ProcessGroup):
        index = dist.get_rank(group)
    if index < 0:
        raise UserError(
            f"group={group!r} must be a group that this rank is in: groups.tp, groups.pp or "
            "groups.dp of init, a group of torch.distributed, or None for all ranks"
        )
    ranks = tuple(dist.get_process_group_ranks(group))
    handle = (dist.group.WORLD if group is None else group) if len(ranks) > 1 else None
    return Group(EXTERNAL, ranks, index, handle)
