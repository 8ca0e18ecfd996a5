"""Ranks that run out of inputs before the others: they take part in what the others send."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch.distributed.algorithms.join import JoinHook

from parallel3d.parts.ddp.packing import broadcast_all

if TYPE_CHECKING:
    from parallel3d.comm.group import Group
    from parallel3d.parts.ddp.ddp import DistributedDataParallel


class DDPJoinHook(JoinHook):
    """What a joined rank does for each step of the others, and when all have joined."""

    def __init__(self, net: DistributedDataParallel, by_initial_size: bool) -> None:
        super().__init__()
        self.net = net
        net.by_initial_size = by_initial_size
        net.step_record.joins = True

    def main_hook(self) -> None:
        """Mirrors one forward and backward."""
        net = self.net
        if net.will_sync_buffers():
            net.sync_buffers_joined(joined=True)
        synced = any_of(net.group, False, net.device)
        net.require_forward_sync = synced
        if synced:
            net.reducer.take_part()

    def post_hook(self, is_last_joiner: bool) -> None:
        """Every rank takes the model of one that was among the last."""
        net = self.net
        source = highest(net.group, net.group.index if is_last_joiner else -1, net.device)
        tensors = [p.detach() for p in net.module.parameters()]
        broadcast_all([*tensors, *net.module.buffers()], source, net.group)


def highest(group: Group, value: int, device: torch.device) -> int:
    """The largest over the ranks."""
    number = torch.tensor([value], device=device)
    dist.all_reduce(number, dist.ReduceOp.MAX, group=group.handle)
    return int(number)


def any_of(group: Group, value: bool, device: torch.device) -> bool:
    """Whether it is true on any rank."""
    return highest(group, int(value), device) > 0
