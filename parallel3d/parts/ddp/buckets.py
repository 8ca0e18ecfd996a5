"""Gradients in flat buffers, in the order in which they become ready (Li et al. 2020, §3.2.3)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch._prims_common import is_non_overlapping_and_dense_or_false

from parallel3d.device.accelerator import is_accelerator
from parallel3d.sizes.buckets import assign


@dataclass
class DDPBucket:
    """Parameters whose gradients travel together.

    Attributes:
        members: numbers of its parameters, in the order of readiness.
        flat: their gradients side by side.
        views: of each member the part of `flat`, as the parameter is shaped and laid out.
        missing: how many gradients have yet to come in this backward.
        total, total_views: the same of the sum over the ranks, once there is one.
    """

    members: list[int]
    flat: Tensor
    views: list[Tensor]
    missing: int = 0
    total: Tensor | None = None
    total_views: list[Tensor] = field(default_factory=list)


def arrange(
    parameters: Sequence[nn.Parameter],
    ready: Sequence[int],
    bucket_cap_mb: float | Sequence[float] | None,
) -> list[list[int]]:
    """Which parameters share a bucket, by their numbers; `ready` is the order of readiness.

    Each type has buckets of its own. The order of the buckets is that of their last members, since
    that is when they are full.
    """
    by_type: dict[torch.dtype, list[int]] = {}
    for number in ready:
        by_type.setdefault(parameters[number].dtype, []).append(number)
    place = {number: i for i, number in enumerate(ready)}
    found = []
    for numbers in by_type.values():
        accelerated = is_accelerator(parameters[numbers[0]].device)
        sizes = [parameters[n].nbytes for n in numbers]
        groups = assign(sizes, bucket_cap_mb, accelerated=accelerated)
        found += [[numbers[i] for i in group] for group in groups]
    return sorted(found, key=lambda members: place[members[-1]])


def views_of(flat: Tensor, parameters: Sequence[nn.Parameter]) -> list[Tensor]:
    """Of each parameter the part of `flat`, in its own strides where these leave no gaps."""
    views, start = [], 0
    for p in parameters:
        part = flat[start : start + p.numel()]
        if is_non_overlapping_and_dense_or_false(p):
            views.append(part.as_strided(p.shape, p.stride()))
        else:
            views.append(part.view(p.shape))
        start += p.numel()
    return views
