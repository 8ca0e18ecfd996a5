"""Small facts that ranks tell each other as JSON: nothing that arrives from a rank is unpickled.

A value is JSON in bytes, and the bytes travel as a uint8 tensor on the group's device: the same on
gloo and on NCCL, which knows no other memory than the device's. What comes back is what JSON makes
of a value, also where there is nobody to send it to: tuples become lists, keys words. A handle of
None is a group of one.
"""

from __future__ import annotations

import json
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


def all_gather_json(value: Any, handle: dist.ProcessGroup | None, device: torch.device) -> list:
    """The `value` of every member, in the group's order; collective.

    Raises TypeError for a value that JSON does not have.
    """
    mine, lengths = _padded(value, handle, device)
    if handle is None:
        return _values([mine], lengths)
    everyone = [torch.empty_like(mine) for _ in lengths]
    dist.all_gather(everyone, mine, group=handle)
    return _values(everyone, lengths)


def gather_json(value: Any, handle: dist.ProcessGroup | None, device: torch.device) -> list:
    """As `all_gather_json` on the group's first member, an empty list elsewhere; collective."""
    mine, lengths = _padded(value, handle, device)
    if handle is None:
        return _values([mine], lengths)
    first = dist.get_rank(handle) == 0
    everyone = [torch.empty_like(mine) for _ in lengths] if first else None
    dist.gather(mine, everyone, dist.get_global_rank(handle, 0), group=handle)
    return _values(everyone, lengths) if first else []


def broadcast_json(value: Any, handle: dist.ProcessGroup | None, device: torch.device) -> Any:
    """The `value` of the group's first member, on every member; collective.

    What the others give is not looked at. Raises TypeError as `all_gather_json`.
    """
    first = handle is None or dist.get_rank(handle) == 0
    mine = _as_bytes(value) if first else torch.empty(0, dtype=torch.uint8)
    if handle is None:
        return _value(mine)
    source = dist.get_global_rank(handle, 0)
    length = torch.tensor([mine.numel()], device=device)
    dist.broadcast(length, source, group=handle)
    word = mine.to(device) if first else mine.new_empty(int(length), device=device)
    dist.broadcast(word, source, group=handle)
    return _value(word.cpu())


def _padded(
    value: Any, handle: dist.ProcessGroup | None, device: torch.device
) -> tuple[Tensor, list[int]]:
    """`value` as bytes (longest of the group,) on the device, and every member's true length."""
    word = _as_bytes(value)
    if handle is None:
        return word, [word.numel()]
    mine = torch.tensor([word.numel()], device=device)
    lengths = [torch.empty_like(mine) for _ in range(dist.get_world_size(handle))]
    dist.all_gather(lengths, mine, group=handle)
    numbers = torch.cat(lengths).tolist()
    padded = word.new_zeros(max(numbers))
    padded[: word.numel()] = word
    return padded.to(device), numbers


def _as_bytes(value: Any) -> Tensor:
    return torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)


def _values(words: list[Tensor], lengths: list[int]) -> list:
    return [_value(word[:n].cpu()) for word, n in zip(words, lengths, strict=True)]


def _value(word: Tensor) -> Any:
    return json.loads(word.numpy().tobytes())
