"""Messages between neighbouring stages."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch.distributed as dist
from torch import Tensor

from parallel3d.comm.collectives import Work
from parallel3d.comm.group import Group
from parallel3d.comm.operation_log import noted_message
from parallel3d.device import accelerator
from parallel3d.pipeline.mailbox import Mailboxes
from parallel3d.schedules.actions import Action, Kind


@dataclass
class Transfer:
    """A message in flight; until `work` ends the tensor lives, and a sent one stays unchanged."""

    action: Action
    tensor: Tensor
    work: Work


def _tag(action: Action) -> int:
    """Equal on both ends of a message: gradients are odd, activations even."""
    return 2 * action.microbatch + (action.kind in (Kind.SEND_B, Kind.RECV_B))


def _through(boxes: Mailboxes, action: Action, tensor: Tensor, group: Group) -> Transfer:
    peer = boxes.memory.index + action.kind.peer_offset
    call = boxes.send if action.kind.is_send else boxes.receive
    return Transfer(action, tensor, _noted(action, tensor, group, lambda: call(tensor, peer)))


def _noted(action: Action, tensor: Tensor, group: Group, start: Callable[[], Work]) -> Work:
    name = "send" if action.kind.is_send else "receive"
    peer = group.ranks[group.index + action.kind.peer_offset]
    return noted_message(group, name, tensor, peer, start)


def post(
    messages: Sequence[tuple[Action, Tensor]], group: Group, boxes: Mailboxes | None = None
) -> list[Transfer]:
    """Starts one communication group of a plan: all of its sends and receives together.

    With `boxes` messages go through shared memory, as long as they fit.

    On NCCL a message is known by its position alone, so the group goes out as one batch and the
    checker proves that both ends list the same messages in the same order; gloo also matches tags.
    So nothing is posted before its place in the plan either: a receive posted early would keep the
    sends behind it on NCCL's one stream waiting for its other end.
    """
    if boxes is not None and all(boxes.fits(tensor) for _, tensor in messages):
        return [_through(boxes, action, tensor, group) for action, tensor in messages]
    calls = []
    for action, tensor in messages:
        peer = group.ranks[group.index + action.kind.peer_offset]
        calls.append(
            (dist.isend if action.kind.is_send else dist.irecv, tensor, peer, _tag(action))
        )
    works: list[Work]
    if any(accelerator.is_on_accelerator(tensor) for _, tensor in messages):
        works = dist.batch_isend_irecv(
            [dist.P2POp(call, tensor, peer, group.handle, tag) for call, tensor, peer, tag in calls]
        )
        if len(works) < len(calls):  # NCCL coalesces the batch into one handle
            works = [works[0]] * len(calls)
    else:
        works = [call(tensor, peer, group.handle, tag) for call, tensor, peer, tag in calls]
    return [
        Transfer(a, t, _noted(a, t, group, lambda w=w: w))
        for (a, t), w in zip(messages, works, strict=True)
    ]
