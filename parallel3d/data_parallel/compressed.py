"""Gradient buckets that travel as bf16: half the bytes of fp32."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from parallel3d.comm import collectives
from parallel3d.comm.collectives import Work
from parallel3d.comm.group import Group
from parallel3d.data_parallel.side_stream import SideStream
from parallel3d.device.accelerator import is_on_accelerator
from parallel3d.sizes.buckets import padded_numel


@dataclass(frozen=True)
class InBf16:
    """A `CommHook`: each rank's gradients are rounded to bf16, added in fp32, and the sum rounded.

    Two roundings of 2⁻⁹ at most, however many ranks: every rank gets its part of the bucket from
    all others, adds it in fp32 in rank order, and hands the rounded sum to all. An all-reduce of
    bf16 tensors sends the same bytes, and rounds after each of its n − 1 additions.
    """

    side: SideStream = field(default_factory=SideStream)

    def __call__(self, tensor: Tensor, group: Group) -> Work:
        """Starts the sum of a flat `tensor` over the group; it is there after `wait()`."""
        started = _Started(tensor, group)
        if is_on_accelerator(tensor):
            return self.side.run(tensor, lambda: started)
        if group.shared is None:  # else all in the wait, as `collectives.all_reduce_bucket` does
            started.exchange()
        return started


@dataclass
class _Started:
    tensor: Tensor
    group: Group
    parts: Tensor | None = None
    exchanging: Work | None = None

    def exchange(self) -> None:
        size = self.tensor.numel()
        padded = padded_numel(size, self.group.size)
        rounded = self.tensor.new_zeros(padded, dtype=torch.bfloat16)
        rounded[:size] = self.tensor
        self.parts, self.exchanging = collectives.all_to_all_async(rounded, self.group)

    def wait(self) -> None:
        if self.exchanging is None:
            self.exchange()
        self.exchanging.wait()
        mine = self.parts.view(self.group.size, -1).sum(0, dtype=torch.float32)
        total = collectives.all_gather(mine.bfloat16(), self.group)
        self.tensor.copy_(total[: self.tensor.numel()])
