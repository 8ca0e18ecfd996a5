"""Many tensors in one message: what one rank holds, on all of them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from parallel3d.comm import collectives
from parallel3d.comm.group import Group

MESSAGE_BYTES = 64 << 20
ALIGNMENT = 16  # bytes: of the widest type


@torch.no_grad()
def broadcast_all(tensors: Sequence[Tensor], source: int, group: Group) -> None:
    """Gives every member the values of member `source`, in place; any types and strides."""
    for part in _messages(tensors):
        flat, views = packed(part)
        if group.index == source:
            fill(views, part)
        collectives.broadcast(flat, source, group)
        if group.index != source:
            fill(part, views)


def _messages(tensors: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    part: list[Tensor] = []
    filled = 0
    for tensor in tensors:
        if part and filled + tensor.nbytes > MESSAGE_BYTES:
            yield part
            part, filled = [], 0
        part.append(tensor)
        filled += tensor.nbytes
    if part:
        yield part


def packed_bytes(tensors: Sequence[Tensor]) -> int:
    """Bytes that hold all of them, each at an aligned place."""
    return sum(_aligned(tensor.nbytes) for tensor in tensors)


def packed(tensors: Sequence[Tensor], flat: Tensor | None = None) -> tuple[Tensor, list[Tensor]]:
    """A buffer of bytes (`flat`, or a new one) and a view of it for each tensor; not filled."""
    if flat is None:
        flat = torch.empty(packed_bytes(tensors), dtype=torch.uint8, device=tensors[0].device)
    views, start = [], 0
    for tensor in tensors:
        views.append(flat[start : start + tensor.nbytes].view(tensor.dtype).view(tensor.shape))
        start += _aligned(tensor.nbytes)
    return flat, views


def fill(targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
    """Copies each source to its target, without a new version of it: a forward's graph that is
    not backpropagated yet may have saved it."""
    with torch.autograd._unsafe_preserve_version_counter(tuple(targets)):
        torch._foreach_copy_(list(targets), list(sources))


def _aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT
