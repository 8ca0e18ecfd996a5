"""Messages between the ranks of a pipeline through shared memory, for CPU ranks of one host.

Each link (a rank, another that it sends to) has a few slots. Sending waits for a free slot, copies
and signals; receiving waits for the signal, copies and frees the slot. A link delivers in the order
of sending, which is the order in which the checker proves that a plan receives; a message that is
needed before an earlier one of its link makes room for that one first.

How many slots never block a plan for ever, `schedules.flight.enough_slots` tells.
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

SLOT_BYTES = 4 << 20  # larger messages take the backend's way
ALIGNMENT = 64  # of a slot: a cache line
SLOTS = 4  # at least: so far a rank may be ahead of another before it has to wait

Pair = tuple[int, int]


@dataclass
class SharedMemoryP2P:
    """The links of one pipeline group, on one of its ranks.

    Attributes:
        links: (sender, receiver) → number of the link.
        slots, slot_bytes: of each link.
        sent: link → messages so far; expected: link → those that are awaited, in order.
        taken: link → messages received.
    """

    memory: SharedMemory
    links: dict[Pair, int]
    slots: int
    slot_bytes: int
    sent: dict[int, int] = field(default_factory=dict)
    expected: dict[int, deque[PendingReceive]] = field(default_factory=dict)
    taken: dict[int, int] = field(default_factory=dict)
    clock: StepTimer = field(
        default_factory=StepTimer
    )  # told how long a stage waits for its neighbour

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
        """None where the ranks cannot share memory; collective over the group.

        Args:
            pairs: (sender, receiver) of all links; None: neighbours in both directions.
        """
        if pairs is None:
            steps = [(a, a + 1) for a in range(size - 1)]
            pairs = [*steps, *((b, a) for a, b in steps)]
        links = {pair: number for number, pair in enumerate(pairs)}
        semaphores = [0, slots] * len(links)  # of each link: filled slots, free slots
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
        """Those for messages like `message` of a run's ranks, on CPUs that may share memory, with
        as many slots as each plan needs; collective over `pp`."""
        if pp.size == 1 or not launch.shared_memory:
            return None
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

    def _slot(self, link: int, turn: int, like: Tensor) -> Tensor:
        start = (link * self.slots + turn % self.slots) * self.slot_bytes
        return self.memory.data[start : start + like.nbytes].view(like.dtype).view_as(like)

    def send(self, tensor: Tensor, peer: int) -> Work:
        """Copies `tensor` to member `peer`; it may change as soon as this returns."""
        link = self.links[self.memory.index, peer]
        turn = self.sent.get(link, 0)
        self.sent[link] = turn + 1
        with self.clock.within("idle"):
            self.memory.wait(2 * link + 1, peer)
        self._slot(link, turn, tensor).copy_(tensor)
        self.memory.post(2 * link)
        return CompletedWork()

    def receive(self, tensor: Tensor, peer: int) -> PendingReceive:
        """The next message of member `peer` will be in `tensor` after the handle's `wait()`."""
        link = self.links[peer, self.memory.index]
        arrival = PendingReceive(self, tensor, peer, link)
        self.expected.setdefault(link, deque()).append(arrival)
        return arrival

    def take_next(self, link: int) -> PendingReceive:
        """The oldest awaited message of a link, once it has come."""
        arrival = self.expected[link].popleft()
        turn = self.taken.get(link, 0)
        self.taken[link] = turn + 1
        with self.clock.within("idle"):
            self.memory.wait(2 * link, arrival.peer)
        arrival.tensor.copy_(self._slot(link, turn, arrival.tensor))
        self.memory.post(2 * link + 1)
        arrival.there = True
        return arrival


@dataclass(eq=False)
class PendingReceive:
    """A message that is awaited."""

    boxes: SharedMemoryP2P
    tensor: Tensor
    peer: int
    link: int
    there: bool = False

    def wait(self) -> None:
        """Returns when it is in its tensor, and so is all that was awaited before on its link."""
        while not self.there:
            self.boxes.take_next(self.link)
