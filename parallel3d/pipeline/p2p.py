"""Exchanges messages between the ranks of a pipeline, and measures latencies of groups."""

from __future__ import annotations

import math
import time
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from itertools import chain, pairwise
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from parallel3d.comm import collectives
from parallel3d.comm.collectives import CompletedWork, Work
from parallel3d.comm.exchange import transfer
from parallel3d.comm.group import SINGLE, Group
from parallel3d.comm.operation_log import logged
from parallel3d.comm.shared_memory import SharedMemory, open_shared_memory
from parallel3d.comm.step_timer import StepTimer
from parallel3d.device import accelerator
from parallel3d.errors import UserError
from parallel3d.schedules.actions import Action, Kind, PipelineProgram
from parallel3d.schedules.messages import peak_unread
from parallel3d.schedules.orders import StageAssignment
from parallel3d.schedules.walk import peer_of

if TYPE_CHECKING:
    from parallel3d.comm.process_groups import ProcessGroups

Values = tuple[Tensor, ...]


@dataclass(frozen=True)
class StageOutputs:
    """Describes the outputs of a stage, and packs them into a message for the next stage.

    The gradients of the outputs, which the next stage sends back, have the same shapes.

    Attributes:
        shapes: the shapes of the output tensors.
        dtype: the dtype of all output tensors.
        slices: a group whose members hold equal outputs. Each member sends one slice of the
            message, and the next stage all-gathers the slices (Megatron-LM's
            scatter_gather_tensors_in_pipeline).
    """

    shapes: tuple[tuple[int, ...], ...]
    dtype: torch.dtype
    slices: Group = field(default=SINGLE, compare=False)

    @classmethod
    def of(cls, returned: Any, stage: int) -> StageOutputs:
        """Describes the return value of `stage`, or raises UserError if it cannot be sent."""
        values = as_tuple(returned)
        rule = f"stage {stage} of the pipeline must return a tensor or a tuple of them"
        if not values or not all(isinstance(value, Tensor) for value in values):
            raise UserError(f"{rule}, not {type(returned).__name__}")
        dtypes = {value.dtype for value in values}
        if len(dtypes) > 1 or not values[0].is_floating_point():
            names = " and ".join(sorted(map(str, dtypes)))
            raise UserError(f"{rule} of one floating-point type, not {names}")
        return cls(tuple(tuple(value.shape) for value in values), values[0].dtype)

    @cached_property
    def shape(self) -> tuple[int, ...]:
        """The shape of one rank's message."""
        numel = sum(map(math.prod, self.shapes))
        if self.slices.size > 1:
            return (numel // self.slices.size,)
        return self.shapes[0] if len(self.shapes) == 1 else (numel,)

    def empty_message(self, device: torch.device) -> Tensor:
        return torch.empty(self.shape, dtype=self.dtype, device=device)

    def message(self, values: Values) -> Tensor:
        """Packs the tensors into a message, and returns this rank's slice of it."""
        whole = values[0].contiguous()
        if len(values) > 1:
            whole = torch.cat([value.reshape(-1) for value in values])
        if self.slices.size == 1:
            return whole
        # The slice is copied because a view would keep the whole tensor alive until it is sent.
        return whole.view(-1).chunk(self.slices.size)[self.slices.index].clone()

    def values(self, message: Tensor) -> Values:
        """Returns the tensors of a message. The call is collective over `slices`."""
        whole = collectives.all_gather(message, self.slices)
        if len(self.shapes) == 1:
            return (whole.view(self.shapes[0]),)
        parts = whole.split([math.prod(shape) for shape in self.shapes])
        return tuple(part.view(shape) for part, shape in zip(parts, self.shapes, strict=True))

    def zeros(self, device: torch.device) -> Values:
        return tuple(torch.zeros(shape, dtype=self.dtype, device=device) for shape in self.shapes)

    def __str__(self) -> str:
        return " and ".join(f"{self.dtype}{list(shape)}" for shape in self.shapes)


def as_tuple(values: Any) -> tuple[Any, ...]:
    """Returns a module's return value (one value, a tuple or a list) as a tuple."""
    return tuple(values) if isinstance(values, tuple | list) else (values,)


@dataclass
class PendingTransfer:
    """A message in flight. Its tensor must stay alive and unchanged until `work` ends."""

    action: Action
    tensor: Tensor
    work: Work


@dataclass(frozen=True)
class P2PRoute:
    """The communicators, peers and tags of one rank's messages.

    Attributes:
        backward: a group with a second communicator, for gradients, or None to use `group` for all.
    """

    group: Group
    assignment: StageAssignment
    backward: Group | None = None

    def handle(self, action: Action) -> dist.ProcessGroup | None:
        back = self.backward if is_backward(action) else None
        return (back or self.group).handle

    def peer(self, action: Action) -> int:
        return peer_of(action, self.group.index, self.assignment)

    def rank(self, action: Action) -> int:
        return self.group.ranks[self.peer(action)]

    def tag(self, action: Action) -> int:
        """Returns a message's tag, equal on both of its ends and unique within a step."""
        stage = self.assignment.stage(self.group.index, action.chunk)
        stage += {Kind.SEND_F: 1, Kind.SEND_B: -1}.get(action.kind, 0)
        return 2 * (action.microbatch * self.assignment.stages + stage) + is_backward(action)


def is_backward(action: Action) -> bool:
    return action.kind in (Kind.SEND_B, Kind.RECV_B)


def post(
    messages: Sequence[tuple[Action, Tensor]],
    route: P2PRoute,
    channel: SharedP2P | None = None,
) -> list[PendingTransfer]:
    """Starts all sends and receives of one communication group of a program together.

    Messages go through shared memory if there is a `channel` and all of them fit into its slots.
    Otherwise the messages of each communicator start as one batch. NCCL matches messages by their
    position, so both ends need the same order, which the checker of schedules proves; gloo also
    matches tags. A communicator runs on one stream, so a late peer blocks every message behind its
    own. Therefore activations and gradients have separate communicators, and no receive is posted
    before its place in the program.
    """
    works: dict[Action, Work] = {}
    shared = channel if channel and all(channel.fits(tensor) for _, tensor in messages) else None
    if shared is None:
        for handle in dict.fromkeys(route.handle(action) for action, _ in messages):
            works |= _start([m for m in messages if route.handle(m[0]) is handle], route)
    pending = []
    for action, tensor in messages:
        name = "send" if action.kind.is_send else "receive"
        begin: Callable[[], Work] = partial(works.__getitem__, action)
        if shared is not None:
            call = shared.send if action.kind.is_send else shared.receive
            begin = partial(call, tensor, route.peer(action))
        work = logged(route.group, name, tensor, begin, route.rank(action))
        pending.append(PendingTransfer(action, tensor, work))
    return pending


def _start(messages: Sequence[tuple[Action, Tensor]], route: P2PRoute) -> dict[Action, Work]:
    """Starts the messages of one communicator as one batch."""
    operations = [
        dist.P2POp(
            dist.isend if action.kind.is_send else dist.irecv,
            tensor,
            route.rank(action),
            route.handle(action),
            route.tag(action),
        )
        for action, tensor in messages
    ]
    works = dist.batch_isend_irecv(operations)
    if len(works) < len(operations):  # NCCL returns one handle for the whole batch
        works = [works[0]] * len(operations)
    return dict(zip((action for action, _ in messages), works, strict=True))


# Messages through shared memory, for CPU ranks of one host
#
# Each link (sender, receiver) has a few slots. The sender waits for a free slot, copies the message
# into it and signals; the receiver waits for the signal, copies the message out and frees the slot.
# A link delivers messages in the order in which they are sent. The checker of schedules proves that
# a program receives them in the same order.


SLOT_BYTES = 4 << 20  # larger messages go through the backend
ALIGNMENT = 64  # a slot's size is a multiple of a cache line's bytes
SLOTS = 4  # smallest number of slots of a link
FILLED, FREE = 0, 1  # kinds of signals: a slot has been filled or freed

Pair = tuple[int, int]


@dataclass
class SharedP2P:
    """The links of one pipeline group, on one of its ranks.

    Attributes:
        links: (sender, receiver) → number of the link.
        slots: number of slots of each link.
        slot_bytes: size of a slot.
        step_timer: counts the time spent waiting for a peer as idle.
        sent, taken: number of the link → number of messages that this rank has sent, or
            received, over the link.
        expected: number of the link → its pending receives, in order.
    """

    memory: SharedMemory
    links: dict[Pair, int]
    slots: int
    slot_bytes: int
    step_timer: StepTimer = field(default_factory=StepTimer)
    sent: defaultdict[int, int] = field(default_factory=lambda: defaultdict(int))
    taken: defaultdict[int, int] = field(default_factory=lambda: defaultdict(int))
    expected: defaultdict[int, deque[PendingReceive]] = field(
        default_factory=lambda: defaultdict(deque)
    )

    @classmethod
    def open(
        cls,
        group: Group,
        timeout_s: float,
        assignment: StageAssignment | None = None,
        slots: int = SLOTS,
        slot_bytes: int = SLOT_BYTES,
    ) -> SharedP2P | None:
        """Opens links between the ranks of neighbouring stages.

        The call is collective over the group. It returns None if the ranks cannot share memory.
        Without an `assignment` each rank has one stage.
        """
        if group.handle is None:
            return None
        ranks = [rank for rank, _ in (assignment or StageAssignment(group.size)).places]
        pairs = {(a, b) for x, y in pairwise(ranks) if x != y for a, b in ((x, y), (y, x))}
        links = {pair: number for number, pair in enumerate(sorted(pairs))}
        memory = open_shared_memory(
            group.handle,
            group.index,
            group.size,
            data_bytes=len(links) * slots * slot_bytes,
            timeout_s=timeout_s,
            signals=(0, slots),
        )
        return None if memory is None else cls(memory, links, slots, slot_bytes)

    @classmethod
    def of_programs(
        cls, programs: Sequence[PipelineProgram], route: P2PRoute, message: Tensor, timeout_s: float
    ) -> SharedP2P | None:
        """Opens links with enough slots for these programs; each slot has room for one `message`.

        The result is None if the ranks cannot share memory, on an accelerator, in a group of one
        rank, and if `message` exceeds SLOT_BYTES.
        """
        group, assignment = route.group, route.assignment
        if group.size == 1 or message.device.type != "cpu" or message.nbytes > SLOT_BYTES:
            return None
        peaks = (peak_unread(program, assignment).values() for program in programs)
        slots = max(SLOTS, *chain.from_iterable(peaks))
        slot_bytes = -(-message.nbytes // ALIGNMENT) * ALIGNMENT
        return cls.open(group, timeout_s, assignment, slots, slot_bytes)

    def fits(self, tensor: Tensor) -> bool:
        return tensor.device.type == "cpu" and tensor.nbytes <= self.slot_bytes

    def send(self, tensor: Tensor, peer: int) -> Work:
        """Copies `tensor` into a slot for member `peer`, after which the tensor may change."""
        link = self.links[self.memory.index, peer]
        self._wait(peer, FREE)
        self._next_slot(link, self.sent, tensor).copy_(tensor)
        self.memory.post(peer, FILLED)
        return CompletedWork()

    def receive(self, tensor: Tensor, peer: int) -> PendingReceive:
        link = self.links[peer, self.memory.index]
        pending = PendingReceive(self, tensor, peer, link)
        self.expected[link].append(pending)
        return pending

    def take(self, pending: PendingReceive) -> None:
        """Waits for the link's next message and copies it into the tensor of `pending`."""
        self._wait(pending.peer, FILLED)
        pending.tensor.copy_(self._next_slot(pending.link, self.taken, pending.tensor))
        self.memory.post(pending.peer, FREE)

    def _wait(self, peer: int, kind: int) -> None:
        with self.step_timer.within("idle"):
            self.memory.wait(peer, kind)

    def _next_slot(self, link: int, count: defaultdict[int, int], like: Tensor) -> Tensor:
        start = (link * self.slots + count[link] % self.slots) * self.slot_bytes
        count[link] += 1
        return self.memory.data[start : start + like.nbytes].view(like.dtype).view_as(like)


@dataclass(eq=False)
class PendingReceive:
    """A receive from shared memory; its tensor is filled when `wait` returns."""

    channel: SharedP2P
    tensor: Tensor
    peer: int
    link: int

    def wait(self) -> None:
        """Waits for this message, and for all earlier ones of its link."""
        expected = self.channel.expected[self.link]
        while self in expected:
            self.channel.take(expected.popleft())


# Baseline latencies


LATENCY_TRIES = 5  # number of transfers, of which the fastest gives the baseline latency


def measure_baseline_latency(
    groups: ProcessGroups, message: Tensor, channel: SharedP2P | None
) -> dict[str, float]:
    """Measures for each group the seconds of a transfer when no rank is late; collective.

    The latency of dp, embedding and world is the time of an all-reduce of one number. That of pp is
    half the round trip of a `message` with the slower neighbour; it is left out if the messages go
    through shared memory. `StepTimer` counts waits beyond the latency as idle.
    """
    number = torch.zeros(1, dtype=torch.float64, device=message.device)
    latencies = {
        group.name: _fastest(partial(dist.all_reduce, number, group=group.handle), message.device)
        for group in (groups.dp, groups.embedding, groups.world)
        if group.size > 1
    }
    if groups.pp.size > 1 and channel is None:
        latencies["pp"] = _message_latency(groups.pp, message)
    return latencies


def _message_latency(pp: Group, message: Tensor) -> float:
    """Returns the latency in seconds of a message to the slower neighbour.

    Neighbours measure in pairs: first those whose lower index is even, then the other pairs.
    """
    latencies = []
    for parity in (0, 1):
        lower = pp.index % 2 == parity
        peer = pp.index + 1 if lower else pp.index - 1
        if 0 <= peer < pp.size:
            round_trip = partial(_ping, pp, pp.ranks[peer], message, lower)
            latencies.append(_fastest(round_trip, message.device) / 2)
    return max(latencies)


def _ping(pp: Group, peer: int, message: Tensor, first: bool) -> None:
    assert pp.handle is not None
    for call in (dist.isend, dist.irecv) if first else (dist.irecv, dist.isend):
        transfer(call, message, peer, pp.handle)


def _fastest(action: Callable[[], object], device: torch.device) -> float:
    seconds = []
    for _ in range(LATENCY_TRIES):
        accelerator.synchronize(device)
        start = time.perf_counter()
        action()
        accelerator.synchronize(device)
        seconds.append(time.perf_counter() - start)
    return min(seconds)
