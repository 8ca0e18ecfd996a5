"""How long a transfer takes when nobody is late: by it a wait is told from idling."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from parallel3d.comm.collectives import Work
from parallel3d.comm.exchange import transfer
from parallel3d.comm.operation_log import logged_message
from parallel3d.comm.process_groups import Group, ProcessGroups
from parallel3d.device import accelerator
from parallel3d.pipeline.shared_memory import SharedMemoryP2P
from parallel3d.schedules.actions import Action, Kind
from parallel3d.schedules.messages import peer_of
from parallel3d.schedules.orders import StageAssignment

FLOOR_TRIES = 5  # the fastest of so many transfers is the floor


def measure_baseline_latency(
    groups: ProcessGroups, message: Tensor, boxes: SharedMemoryP2P | None
) -> dict[str, float]:
    """Measures seconds of a transfer when no rank is late, by group; collective.

    A sum of one number for dp, embedding and world. For pp, without shared memory, half the round
    trip of a tensor like `message` with the slower neighbour.
    """
    floors = {}
    for group in (groups.dp, groups.embedding, groups.world):
        if group.size > 1:
            floors[group.name] = min(_one_sum(group, message.device) for _ in range(FLOOR_TRIES))
    if groups.pp.size > 1 and boxes is None:
        floors["pp"] = _message_floor(groups.pp, message)
    return floors


def _one_sum(group: Group, device: torch.device) -> float:
    number = torch.zeros(1, dtype=torch.float64, device=device)
    return _seconds(device, lambda: dist.all_reduce(number, group=group.handle))


def _message_floor(pp: Group, message: Tensor) -> float:
    """Neighbours in pairs, first those whose lower stage is even, then the others."""
    floors = []
    for parity in (0, 1):
        lower = pp.index % 2 == parity
        peer = pp.index + 1 if lower else pp.index - 1
        if 0 <= peer < pp.size:
            there_and_back = functools.partial(_ping, pp, pp.ranks[peer], message, lower)
            times = [_seconds(message.device, there_and_back) for _ in range(FLOOR_TRIES)]
            floors.append(min(times) / 2)
    return max(floors)


def _ping(pp: Group, peer: int, message: Tensor, first: bool) -> None:
    """There and back, each way as the executor sends: on an accelerator as a batch."""
    calls = (dist.isend, dist.irecv) if first else (dist.irecv, dist.isend)
    for call in calls:
        if accelerator.is_on_accelerator(message):
            transfer(call, message, peer, pp.handle)
        else:
            call(message, peer, group=pp.handle).wait()


def _seconds(device: torch.device, action: Callable[[], object]) -> float:
    accelerator.synchronize(device)
    start = time.perf_counter()
    action()
    accelerator.synchronize(device)
    return time.perf_counter() - start


# Messages between the ranks of a pipeline.


@dataclass
class PendingTransfer:
    """A message in flight; until `work` ends the tensor lives, and a sent one stays unchanged."""

    action: Action
    tensor: Tensor
    work: Work


@dataclass(frozen=True)
class P2PRoute:
    """Where the messages of one rank of a pipeline go, and by what number both ends know them.

    `backward`: the same ranks, by which gradients go back; None: by `group`, as activations do.
    """

    group: Group
    placement: StageAssignment
    backward: Group | None = None

    def handle(self, action: Action) -> dist.ProcessGroup | None:
        """By which both ends exchange it."""
        back = self.backward if is_backward(action) else None
        return (back or self.group).handle

    def peer(self, action: Action) -> int:
        """The member of the group at the other end."""
        return peer_of(action, self.group.index, self.placement)

    def rank(self, action: Action) -> int:
        """The world's rank at the other end."""
        return self.group.ranks[self.peer(action)]

    def tag(self, action: Action) -> int:
        """Equal on both ends of a message and of no other one of a step: by the stage that reads
        it; gradients are odd, activations even."""
        stage = self.placement.stage(self.group.index, action.chunk)
        stage += {Kind.SEND_F: 1, Kind.SEND_B: -1}.get(action.kind, 0)
        return 2 * (action.microbatch * self.placement.stages + stage) + is_backward(action)


def is_backward(action: Action) -> bool:
    """Whether a message is of gradients."""
    return action.kind in (Kind.SEND_B, Kind.RECV_B)


def post(
    messages: Sequence[tuple[Action, Tensor]], route: P2PRoute, boxes: SharedMemoryP2P | None = None
) -> list[PendingTransfer]:
    """Starts one communication group of a plan: all of its sends and receives together.

    With `boxes` messages go through shared memory, as long as they fit.

    On NCCL a message is known by its position alone, so what goes one way leaves as one batch and
    the checker proves that both ends list the same messages in the same order; gloo also matches
    tags. A communicator has one stream, on which all wait for who is late. So activations and
    gradients have one each: a gradient that has come is not held up by an activation whose reader
    still computes. And nothing is posted before its place in the plan: a receive posted early would
    keep the sends behind it waiting for its other end.
    """
    if boxes is not None and all(boxes.fits(tensor) for _, tensor in messages):
        return [_through(boxes, action, tensor, route) for action, tensor in messages]
    works: dict[Action, Work] = {}
    for handle in dict.fromkeys(route.handle(action) for action, _ in messages):
        works |= _start([m for m in messages if route.handle(m[0]) is handle], route)
    return [PendingTransfer(a, t, _noted(a, t, route, lambda a=a: works[a])) for a, t in messages]


def _start(messages: Sequence[tuple[Action, Tensor]], route: P2PRoute) -> dict[Action, Work]:
    """Those of one communicator, on an accelerator as one batch."""
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
    works: list[Work]
    if any(accelerator.is_on_accelerator(tensor) for _, tensor in messages):
        works = dist.batch_isend_irecv([dist.P2POp(*call) for call in calls])
        if len(works) < len(calls):  # NCCL coalesces the batch into one handle
            works = [works[0]] * len(calls)
    else:
        works = [call(tensor, *rest) for call, tensor, *rest in calls]
    return dict(zip((action for action, _ in messages), works, strict=True))


def _through(
    boxes: SharedMemoryP2P, action: Action, tensor: Tensor, route: P2PRoute
) -> PendingTransfer:
    peer = route.peer(action)
    call = boxes.send if action.kind.is_send else boxes.receive
    return PendingTransfer(
        action, tensor, _noted(action, tensor, route, lambda: call(tensor, peer))
    )


def _noted(action: Action, tensor: Tensor, route: P2PRoute, start: Callable[[], Work]) -> Work:
    name = "send" if action.kind.is_send else "receive"
    return logged_message(route.group, name, tensor, route.rank(action), start)
