"""Point-to-point messages between the ranks of a pipeline, and baseline latencies of groups."""

from __future__ import annotations

import functools
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor

from parallel3d.comm.collectives import CompletedWork, Work
from parallel3d.comm.exchange import transfer
from parallel3d.comm.operation_log import logged_message
from parallel3d.comm.process_groups import Group, ProcessGroups
from parallel3d.comm.shared_memory import SharedMemory, open_shared_memory
from parallel3d.comm.step_timer import StepTimer
from parallel3d.config.schema import LaunchConfig
from parallel3d.device import accelerator
from parallel3d.schedules.actions import Action, Kind, PipelineProgram
from parallel3d.schedules.messages import enough_slots
from parallel3d.schedules.orders import StageAssignment
from parallel3d.schedules.walk import peer_of

LATENCY_TRIES = 5  # the fastest of so many transfers is the baseline latency


def measure_baseline_latency(
    groups: ProcessGroups, message: Tensor, channel: SharedMemoryP2P | None
) -> dict[str, float]:
    """Measures seconds of a transfer when no rank is late, by group; collective.

    An all-reduce of one number for dp, embedding and world; for pp, without shared memory, half the
    round trip of a `message` with the slower neighbour. `StepTimer` counts longer waits as idle.
    """
    latencies = {}
    for group in (groups.dp, groups.embedding, groups.world):
        if group.size > 1:
            tries = [_all_reduce_seconds(group, message.device) for _ in range(LATENCY_TRIES)]
            latencies[group.name] = min(tries)
    if groups.pp.size > 1 and channel is None:
        latencies["pp"] = _message_latency(groups.pp, message)
    return latencies


def _all_reduce_seconds(group: Group, device: torch.device) -> float:
    number = torch.zeros(1, dtype=torch.float64, device=device)
    return _seconds(device, lambda: dist.all_reduce(number, group=group.handle))


def _message_latency(pp: Group, message: Tensor) -> float:
    """Pairs neighbours, first those whose lower stage is even, then the others."""
    latencies = []
    for parity in (0, 1):
        lower = pp.index % 2 == parity
        peer = pp.index + 1 if lower else pp.index - 1
        if 0 <= peer < pp.size:
            round_trip = functools.partial(_ping, pp, pp.ranks[peer], message, lower)
            tries = [_seconds(message.device, round_trip) for _ in range(LATENCY_TRIES)]
            latencies.append(min(tries) / 2)
    return max(latencies)


def _ping(pp: Group, peer: int, message: Tensor, first: bool) -> None:
    assert pp.handle is not None
    calls = (dist.isend, dist.irecv) if first else (dist.irecv, dist.isend)
    for call in calls:
        if accelerator.is_on_accelerator(message):
            transfer(call, message, peer, pp.handle)
        else:
            work = call(message, peer, group=pp.handle)
            assert work is not None  # this rank is in the group
            work.wait()


def _seconds(device: torch.device, action: Callable[[], object]) -> float:
    accelerator.synchronize(device)
    start = time.perf_counter()
    action()
    accelerator.synchronize(device)
    return time.perf_counter() - start


@dataclass
class PendingTransfer:
    """A message in flight; keeps the tensor, which must not change until `work` ends."""

    action: Action
    tensor: Tensor
    work: Work


@dataclass(frozen=True)
class P2PRoute:
    """Peers and tags of one rank's messages; `backward`: a second communicator for gradients."""

    group: Group
    placement: StageAssignment
    backward: Group | None = None

    def handle(self, action: Action) -> dist.ProcessGroup | None:
        back = self.backward if is_backward(action) else None
        return (back or self.group).handle

    def peer(self, action: Action) -> int:
        return peer_of(action, self.group.index, self.placement)

    def rank(self, action: Action) -> int:
        return self.group.ranks[self.peer(action)]

    def tag(self, action: Action) -> int:
        """Returns a number that both ends of a message share, unique in a step."""
        stage = self.placement.stage(self.group.index, action.chunk)
        stage += {Kind.SEND_F: 1, Kind.SEND_B: -1}.get(action.kind, 0)
        return 2 * (action.microbatch * self.placement.stages + stage) + is_backward(action)


def is_backward(action: Action) -> bool:
    return action.kind in (Kind.SEND_B, Kind.RECV_B)


def post(
    messages: Sequence[tuple[Action, Tensor]],
    route: P2PRoute,
    channel: SharedMemoryP2P | None = None,
) -> list[PendingTransfer]:
    """Starts one communication group of a program: its sends and receives together.

    Through shared memory if there is a `channel` and all messages fit. NCCL matches messages by
    position, so messages of one direction are one batch, and the checker proves that both ends have
    the same order; gloo also matches tags. A communicator runs on one stream, so a late peer blocks
    every message behind it: activations and gradients have a communicator each, and no receive is
    posted before its place in the program.
    """
    if channel is not None and all(channel.fits(tensor) for _, tensor in messages):
        return [_through(channel, action, tensor, route) for action, tensor in messages]
    works: dict[Action, Work] = {}
    for handle in dict.fromkeys(route.handle(action) for action, _ in messages):
        works |= _start([m for m in messages if route.handle(m[0]) is handle], route)
    return [
        PendingTransfer(a, t, _noted(a, t, route, functools.partial(works.__getitem__, a)))
        for a, t in messages
    ]


def _start(messages: Sequence[tuple[Action, Tensor]], route: P2PRoute) -> dict[Action, Work]:
    """Starts the messages of one communicator, on an accelerator as one batch."""
    calls = [
        (
            dist.isend if action.kind.is_send else dist.irecv,
            tensor,
            route.rank(action),
            route.handle(action),
            route.tag(action),
        )
        for action, tensor in messages
    ]
    works: list[Work] = []
    if any(accelerator.is_on_accelerator(tensor) for _, tensor in messages):
        works += dist.batch_isend_irecv([dist.P2POp(*call) for call in calls])
        if len(works) < len(calls):  # NCCL coalesces the batch into one handle
            works = [works[0]] * len(calls)
    else:
        for call, tensor, rank, handle, tag in calls:
            work = call(tensor, rank, handle, tag)
            assert work is not None  # this rank is in the group
            works.append(work)
    return dict(zip((action for action, _ in messages), works, strict=True))


def _through(
    channel: SharedMemoryP2P, action: Action, tensor: Tensor, route: P2PRoute
) -> PendingTransfer:
    peer = route.peer(action)
    call = channel.send if action.kind.is_send else channel.receive
    return PendingTransfer(
        action, tensor, _noted(action, tensor, route, lambda: call(tensor, peer))
    )


def _noted(action: Action, tensor: Tensor, route: P2PRoute, start: Callable[[], Work]) -> Work:
    name = "send" if action.kind.is_send else "receive"
    return logged_message(route.group, name, tensor, route.rank(action), start)


# Messages through shared memory, for CPU ranks of one host
#
# Each link (sender, receiver) has a few slots. Sending waits for a free slot, copies and signals;
# receiving waits for the signal, copies and frees the slot. A link delivers in the order of
# sending, in which the checker proves that a program receives.


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
