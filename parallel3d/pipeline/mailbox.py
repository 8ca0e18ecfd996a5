"""Messages between neighbouring stages through shared memory, for CPU ranks of one host.

Each link (a stage, one of its neighbours, one direction) has two slots. Sending waits for a free
slot, copies and signals; receiving waits for the signal, copies and frees the slot. A link delivers
in the order of sending, which is the order in which the checker proves that a plan receives.

Two slots are enough never to block a sound plan for ever: a stage runs at most one forward further
ahead of the next stage than that one's own warm-up, and GPipe sends in one direction at a time.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor

from parallel3d.comm.clock import Clock
from parallel3d.comm.collectives import Done, Work
from parallel3d.comm.group import Group
from parallel3d.comm.shared_memory import SharedMemory, open_shared_memory
from parallel3d.config.schema import LaunchConfig

SLOT_BYTES = 4 << 20  # larger messages take the backend's way
SLOTS = 2


@dataclass
class Mailboxes:
    """The links of one pipeline group, on one of its ranks."""

    memory: SharedMemory
    sent: dict[int, int] = field(default_factory=dict)  # link → messages so far
    expected: dict[int, int] = field(default_factory=dict)
    taken: dict[int, int] = field(default_factory=dict)
    clock: Clock = field(default_factory=Clock)  # told how long a stage waits for its neighbour

    @classmethod
    def open(
        cls, handle: dist.ProcessGroup, index: int, size: int, timeout_s: float
    ) -> Mailboxes | None:
        """None where the ranks cannot share memory; collective over the group."""
        links = 2 * (size - 1)
        semaphores = [0, SLOTS] * links  # of each link: filled slots, free slots
        data = links * SLOTS * SLOT_BYTES
        memory = open_shared_memory(handle, index, size, semaphores, data, timeout_s)
        return None if memory is None else cls(memory)

    @classmethod
    def of_run(cls, launch: LaunchConfig, pp: Group, device: torch.device) -> Mailboxes | None:
        """Those of a run's stages on CPU ranks that may share memory; collective over `pp`."""
        if pp.size == 1 or device.type != "cpu" or not launch.shared_memory:
            return None
        return cls.open(pp.handle, pp.index, pp.size, launch.timeout_s)

    def fits(self, tensor: Tensor) -> bool:
        return tensor.device.type == "cpu" and tensor.nbytes <= SLOT_BYTES

    def _link(self, sender: int, receiver: int) -> int:
        """Links to the next stage come first, then those to the previous one."""
        forward = receiver > sender
        return min(sender, receiver) + (0 if forward else self.memory.size - 1)

    def _slot(self, link: int, turn: int, like: Tensor) -> Tensor:
        start = (link * SLOTS + turn % SLOTS) * SLOT_BYTES
        return self.memory.data[start : start + like.nbytes].view(like.dtype).view_as(like)

    def send(self, tensor: Tensor, peer: int) -> Work:
        """Copies `tensor` to member `peer`; it may change as soon as this returns."""
        link = self._link(self.memory.index, peer)
        turn = self.sent.get(link, 0)
        self.sent[link] = turn + 1
        with self.clock.within("idle"):
            self.memory.wait(2 * link + 1, peer)
        self._slot(link, turn, tensor).copy_(tensor)
        self.memory.post(2 * link)
        return Done()

    def receive(self, tensor: Tensor, peer: int) -> Arrival:
        """The next message of member `peer` will be in `tensor` after the handle's `wait()`.

        Handles of one peer are waited for in the order in which they were made.
        """
        link = self._link(peer, self.memory.index)
        turn = self.expected.get(link, 0)
        self.expected[link] = turn + 1
        return Arrival(self, tensor, peer, link, turn)


@dataclass
class Arrival:
    """A message that is awaited."""

    boxes: Mailboxes
    tensor: Tensor
    peer: int
    link: int
    turn: int

    def wait(self) -> None:
        """Raises RuntimeError out of order: that would hand out another message's tensor."""
        memory = self.boxes.memory
        if self.boxes.taken.get(self.link, 0) != self.turn:
            raise RuntimeError(f"message {self.turn} of member {self.peer} is taken out of order")
        self.boxes.taken[self.link] = self.turn + 1
        with self.boxes.clock.within("idle"):
            memory.wait(2 * self.link, self.peer)
        self.tensor.copy_(self.boxes._slot(self.link, self.turn, self.tensor))
        memory.post(2 * self.link + 1)
