"""Exchanges small values between ranks as JSON, so that nothing from another rank is unpickled.

The JSON bytes travel as a uint8 tensor on the group's device, because NCCL can use no other memory.
Values come back in JSON's types: tuples become lists, and keys become strings. The handle None
stands for a group of one rank.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from parallel3d.errors import UserError


def all_gather_json(value: Any, handle: dist.ProcessGroup | None, device: torch.device) -> list:
    """Gathers a JSON value from every member, in the group's order; collective."""
    encoded = _as_bytes(value)
    if handle is None:
        return [_value(encoded)]
    length = torch.tensor([encoded.numel()], device=device)
    of_ranks = [torch.empty_like(length) for _ in range(dist.get_world_size(handle))]
    dist.all_gather(of_ranks, length, group=handle)
    lengths = torch.cat(of_ranks).tolist()
    mine = encoded.new_zeros(max(lengths))
    mine[: encoded.numel()] = encoded
    mine = mine.to(device)
    everyone = [torch.empty_like(mine) for _ in lengths]
    dist.all_gather(everyone, mine, group=handle)
    return [_value(encoded[:n].cpu()) for encoded, n in zip(everyone, lengths, strict=True)]


def check_agreement(
    call: str, arguments: dict[str, Any], handle: dist.ProcessGroup | None, device: torch.device
) -> None:
    """Raises the same UserError on every member if an argument of `call` differs; collective."""
    mine = {key: repr(value) for key, value in arguments.items()}
    first, *others = all_gather_json(mine, handle, device)
    ranks = [0] if handle is None else dist.get_process_group_ranks(handle)
    for rank, theirs in zip(ranks[1:], others, strict=True):
        for key, value in theirs.items():
            if value != first[key]:
                raise UserError(
                    f"{call}({key}={value}) on rank {rank} must be {key}={first[key]}, as on rank "
                    f"{ranks[0]}: all ranks must give the same arguments"
                )


def broadcast_json(value: Any, handle: dist.ProcessGroup | None, device: torch.device) -> Any:
    """Returns the first member's JSON `value` on every member; collective."""
    first = handle is None or dist.get_rank(handle) == 0
    mine = _as_bytes(value) if first else torch.empty(0, dtype=torch.uint8)
    if handle is None:
        return _value(mine)
    source = dist.get_global_rank(handle, 0)
    length = torch.tensor([mine.numel()], device=device)
    dist.broadcast(length, source, group=handle)
    encoded = mine.to(device) if first else mine.new_empty(int(length), device=device)
    dist.broadcast(encoded, source, group=handle)
    return _value(encoded.cpu())


def messages(sizes: Sequence[int], most: int) -> Iterator[range]:
    """Yields ranges of consecutive tensors that together fit into a message of `most` bytes.

    A larger tensor has a message to itself.
    """
    first, total = 0, 0
    for i, size in enumerate(sizes):
        if i > first and total + size > most:
            yield range(first, i)
            first, total = i, 0
        total += size
    if sizes:
        yield range(first, len(sizes))


def dtype_of(name: str) -> torch.dtype:
    """Returns the dtype with this name, which may begin with "torch."."""
    return getattr(torch, name.removeprefix("torch."))


def transfer(call: Callable, tensor: Tensor, peer: int, handle: dist.ProcessGroup) -> None:
    """Sends or receives a tensor as a batch of one, because NCCL needs batches in large groups."""
    for work in dist.batch_isend_irecv([dist.P2POp(call, tensor, peer, handle)]):
        work.wait()


def _as_bytes(value: Any) -> Tensor:
    return torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)


def _value(encoded: Tensor) -> Any:
    return json.loads(encoded.numpy().tobytes())
