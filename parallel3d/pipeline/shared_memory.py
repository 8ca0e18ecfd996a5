"""Point-to-point messages through shared memory, for CPU ranks of one host.

Each link (sender, receiver) has a few slots. Sending waits for a free slot, copies and signals;
receiving waits for the signal, copies and frees the slot. A link delivers in the order of sending,
in which the checker proves that a program receives.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import torch.distributed as dist
from torch import Tensor

from parallel3d.comm.collectives import CompletedWork, Work
from parallel3d.comm.process_groups import Group
from parallel3d.comm.shared_memory import SharedMemory, open_shared_memory
from parallel3d.comm.step_timer import StepTimer
from parallel3d.config.schema import LaunchConfig
from parallel3d.schedules.actions import Action, PipelineProgram
from parallel3d.schedules.messages import enough_slots, peer_of
from parallel3d.schedules.orders import StageAssignment

SLOT_BYTES = 4 << 20  # larger messages go through the backend
ALIGNMENT = 64  # of a slot: a cache line
SLOTS = 4  # at least: so many messages a sender may be ahead of its receiver

Pair = tuple[int, int]


@dataclass
class SharedMemoryP2P:
    """The links of one pipeline group, on one of its ranks.

    Attributes:
        links: (sender, receiver) → number of the link.
        sent, taken: link → number of messages sent and received.
        expected: link → pending receives, in order.
        step_timer: counts the waits for a peer as idle.
    """

    memory: SharedMemory
    links: dict[Pair, int]
    slots: int
    slot_bytes: int
    sent: dict[int, int] = field(default_factory=dict)
    expected: dict[int, deque[PendingReceive]] = field(default_factory=dict)
    taken: dict[int, int] = field(default_factory=dict)
    step_timer: StepTimer = field(default_factory=StepTimer)

    @classmethod
    def open(
        cls,
        handle: dist.ProcessGroup,
        index: int,
        size: int,
        timeout_s: float,
        pairs: Iterable[Pair] | None = None,
        slots: int = SLOTS,
        slot_bytes: int = SLOT_BYTES,
    ) -> SharedMemoryP2P | None:
        """Opens links between `pairs` (neighbours); None without shared memory; collective."""
        if pairs is None:
            steps = [(a, a + 1) for a in range(size - 1)]
            pairs = [*steps, *((b, a) for a, b in steps)]
        links = {pair: number for number, pair in enumerate(pairs)}
        # Semaphore 2·link counts the filled slots of a link, semaphore 2·link + 1 the free ones.
        semaphores = [0, slots] * len(links)
        data = len(links) * slots * slot_bytes
        memory = open_shared_memory(handle, index, size, semaphores, data, timeout_s)
        return None if memory is None else cls(memory, links, slots, slot_bytes)

    @classmethod
    def of_plans(
        cls,
        plans: Sequence[PipelineProgram],
        placement: StageAssignment,
        launch: LaunchConfig,
        pp: Group,
        message: Tensor,
    ) -> SharedMemoryP2P | None:
        """Opens the links of programs with messages like `message`, with enough slots for each.

        None if messages do not fit or the ranks cannot share memory; collective over `pp`.
        """
        if pp.size == 1 or not launch.shared_memory:
            return None
        assert pp.handle is not None
        if message.device.type != "cpu" or message.nbytes > SLOT_BYTES:
            return None
        pairs = {
            (rank, peer_of(action, rank, placement))
            for plan in plans
            for rank, steps in enumerate(plan)
            for step in steps
            if not isinstance(step, Action)
            for action in step
            if action.kind.is_send
        }
        slots = max(enough_slots(plan, placement, SLOTS) for plan in plans)
        size = -(-message.nbytes // ALIGNMENT) * ALIGNMENT
        return cls.open(pp.handle, pp.index, pp.size, launch.timeout_s, sorted(pairs), slots, size)

    def fits(self, tensor: Tensor) -> bool:
        return tensor.device.type == "cpu" and tensor.nbytes <= self.slot_bytes

    def _slot(self, link: int, number: int, like: Tensor) -> Tensor:
        start = (link * self.slots + number % self.slots) * self.slot_bytes
        return self.memory.data[start : start + like.nbytes].view(like.dtype).view_as(like)

    def send(self, tensor: Tensor, peer: int) -> Work:
        """Copies `tensor` to member `peer`; it may change as soon as this returns."""
        link = self.links[self.memory.index, peer]
        number = self.sent.get(link, 0)
        self.sent[link] = number + 1
        with self.step_timer.within("idle"):
            self.memory.wait(2 * link + 1, peer)
        self._slot(link, number, tensor).copy_(tensor)
        self.memory.post(2 * link)
        return CompletedWork()

    def receive(self, tensor: Tensor, peer: int) -> PendingReceive:
        link = self.links[peer, self.memory.index]
        pending = PendingReceive(self, tensor, peer, link)
        self.expected.setdefault(link, deque()).append(pending)
        return pending

    def complete_next(self, link: int) -> None:
        pending = self.expected[link].popleft()
        number = self.taken.get(link, 0)
        self.taken[link] = number + 1
        with self.step_timer.within("idle"):
            self.memory.wait(2 * link, pending.peer)
        pending.tensor.copy_(self._slot(link, number, pending.tensor))
        self.memory.post(2 * link + 1)
        pending.received = True


@dataclass(eq=False)
class PendingReceive:
    channel: SharedMemoryP2P
    tensor: Tensor
    peer: int
    link: int
    received: bool = False

    def wait(self) -> None:
        """Waits for this message, and for all earlier ones of its link."""
        while not self.received:
            self.channel.complete_next(self.link)
