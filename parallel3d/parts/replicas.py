"""Replicas of a pipeline: equal at the start, and the mean of their gradients after a step."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn

from parallel3d.comm import collectives
from parallel3d.comm.group import Group
from parallel3d.parts.ddp.packing import broadcast_all

BUCKET_BYTES = 25 << 20


def start_equal(module: nn.Module, dp: Group) -> None:
    """Parameters and buffers as those of the group's first rank; collective."""
    tensors = [p.detach() for p in module.parameters()] + list(module.buffers())
    if dp.size > 1 and tensors:
        broadcast_all(tensors, 0, dp)


@torch.no_grad()
def average_gradients(parameters: Sequence[nn.Parameter], dp: Group) -> None:
    """Makes each `.grad` the mean over the replicas; one that no replica has stays None.

    Collective, in buckets of one type. Behind the gradients of a bucket travels one number for
    each, whether there was one.
    """
    if dp.size == 1:
        return
    sent = [(bucket, *_started(bucket, dp)) for bucket in _buckets(parameters)]
    for _, flat, work in sent:
        work.wait()
        flat /= dp.size
    if any(p.grad is None for bucket, _, _ in sent for p in bucket):
        # The only read, for which a host waits: who has all gradients knows that they are there.
        flags = torch.cat([flat[-len(bucket) :].float() for bucket, flat, _ in sent])
        used = iter(flags.tolist())
    else:
        used = itertools.repeat(1.0)
    for bucket, flat, _ in sent:
        parts = flat[: -len(bucket)].split([p.numel() for p in bucket])
        for parameter, part in zip(bucket, parts, strict=True):
            if not next(used):
                continue
            if parameter.grad is None:
                parameter.grad = torch.empty_like(parameter)
            parameter.grad.copy_(part.view_as(parameter))


def _started(bucket: Sequence[nn.Parameter], dp: Group) -> tuple[Tensor, collectives.Work]:
    numel = sum(p.numel() for p in bucket)
    flat = bucket[0].new_zeros(numel + len(bucket))
    parts = flat[:numel].split([p.numel() for p in bucket])
    for i, (parameter, part) in enumerate(zip(bucket, parts, strict=True)):
        if parameter.grad is not None:
            part.copy_(parameter.grad.reshape(-1))
            flat[numel + i] = 1
    return flat, collectives.all_reduce_bucket(flat, dp)


def _buckets(parameters: Sequence[nn.Parameter]) -> Iterator[list[nn.Parameter]]:
    by_type: dict[torch.dtype, list[nn.Parameter]] = {}
    for parameter in parameters:
        if parameter.requires_grad:
            by_type.setdefault(parameter.dtype, []).append(parameter)
    for alike in by_type.values():
        bucket: list[nn.Parameter] = []
        for parameter in alike:
            if bucket and sum(p.nbytes for p in bucket) + parameter.nbytes > BUCKET_BYTES:
                yield bucket
                bucket = []
            bucket.append(parameter)
        yield bucket
