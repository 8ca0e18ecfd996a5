"""Buffers that are the same on all ranks, as they were on one, before every forward."""

from __future__ import annotations

from collections.abc import Set

import torch
from torch import Tensor, nn

from parallel3d.comm.group import Group
from parallel3d.comm.shared_memory import SharedMemory, open_shared_memory
from parallel3d.parts.ddp.group import may_share, timeout_of
from parallel3d.parts.ddp.packing import broadcast_all, fill, packed, packed_bytes


class BufferSync:
    """Hands one rank's buffers to all; through shared memory where that is to be had.

    There the first rank writes them when all have read the ones before, and tells each.
    """

    def __init__(
        self, module: nn.Module, group: Group, device: torch.device, ignored: Set[str]
    ) -> None:
        self.group = group
        # Buffers may be replaced, as BatchNorm's are not but a user's may be: looked up each time.
        seen: set[int] = set()
        self.places = []
        for prefix, part in module.named_modules():
            for name, buffer in part._buffers.items():
                whole = f"{prefix}.{name}" if prefix else name
                if buffer is not None and id(buffer) not in seen and whole not in ignored:
                    seen.add(id(buffer))
                    self.places.append((part._buffers, name))
        self.memory: SharedMemory | None = None
        self.rounds = 0
        found = self.current()
        if found and device.type == "cpu" and may_share(group):
            signals = [0] * (2 * group.size)  # written for, and read by, each rank
            self.memory = open_shared_memory(
                group.handle,
                group.index,
                group.size,
                signals,
                packed_bytes(found),
                timeout_of(group),
            )
        if self.memory is not None:
            self.shapes = [(b.shape, b.dtype) for b in found]
            _, self.views = packed(found, self.memory.data)

    def current(self) -> list[Tensor]:
        """The buffers as they are now, each once."""
        return [buffers[name] for buffers, name in self.places]

    def from_first(self) -> None:
        """All ranks take the first rank's; collective."""
        buffers = self.current()
        if self.memory is None or self.shapes != [(b.shape, b.dtype) for b in buffers]:
            broadcast_all(buffers, 0, self.group)
            return
        size, index = self.group.size, self.group.index
        if index > 0:
            self.memory.wait(index, 0)
            fill(buffers, self.views)
            self.memory.post(size + index)
            return
        if self.rounds:
            for peer in range(1, size):
                self.memory.wait(size + peer, peer)
        self.rounds += 1
        torch._foreach_copy_(self.views, buffers)
        for peer in range(1, size):
            self.memory.post(peer)
