"""How long a transfer takes when nobody is late: by it a wait is told from idling."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor

from parallel3d.comm.exchange import transfer
from parallel3d.comm.group import Group
from parallel3d.comm.process_groups import ProcessGroups
from parallel3d.device import accelerator
from parallel3d.pipeline.mailbox import SharedMemoryP2P

FLOOR_TRIES = 5  # the fastest of so many transfers is the floor


def measure_baseline_latency(
    groups: ProcessGroups, message: Tensor, boxes: SharedMemoryP2P | None
) -> dict[str, float]:
    """Seconds that a transfer takes when nobody is late, by group (`Clock.floors`); collective.

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
