"""Messages between the ranks of a pipeline."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch.distributed as dist
from torch import Tensor

from parallel3d.comm.collectives import Work
from parallel3d.comm.group import Group
from parallel3d.comm.operation_log import noted_message
from parallel3d.device import accelerator
from parallel3d.pipeline.mailbox import SharedMemoryP2P
from parallel3d.schedules.actions import Action, Kind
from parallel3d.schedules.messages import peer_of
from parallel3d.schedules.placement import StageAssignment


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
    return noted_message(route.group, name, tensor, route.rank(action), start)
