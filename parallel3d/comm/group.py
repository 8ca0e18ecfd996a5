"""Ranks that communicate: what every collective is told of the group that it runs over."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch.distributed as dist

from parallel3d.comm.operation_log import OperationLog
from parallel3d.comm.shared_collectives import SharedCollectives

if TYPE_CHECKING:
    from parallel3d.comm.clock import StepTimer


@dataclass(frozen=True)
class Group:
    """Ranks that communicate along one dimension.

    `handle` is None for a group of one: nothing may be sent there, so nothing is.
    """

    name: str
    ranks: tuple[int, ...]
    index: int  # this rank's place in `ranks`
    handle: dist.ProcessGroup | None
    shared: SharedCollectives | None = field(default=None, compare=False)  # CPU ranks of one host
    log: OperationLog | None = field(default=None, compare=False)  # for telling a hang
    clock: StepTimer | None = field(default=None, compare=False)  # told how long collectives take

    @property
    def size(self) -> int:
        return len(self.ranks)

    def __deepcopy__(self, memo: dict) -> Group:
        """Itself: the copy of a module talks to the same ranks."""
        return self


SINGLE = Group("single", (0,), 0, None)  # layers built outside of any cluster are unsharded
