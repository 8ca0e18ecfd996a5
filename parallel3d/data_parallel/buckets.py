"""Flat buckets of parameters and gradients, and the shards of them that a rank steps."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor, nn

from parallel3d.device.accelerator import is_accelerator
from parallel3d.estimate.buckets import assign, padded_numel
from parallel3d.parameters.sharding import (
    Segment,
    SegmentPart,
    spec_of,
    state_of,
)


@dataclass
class Bucket:
    """A flat buffer of parameters, in the order of `params`, and one of gradients (fp32 or better).

    The model's parameters are views of `param`, gradients are added to `grad`, one collective
    reduces it, and the optimizer steps the `segments` of `own`: everything, or under ZeRO this
    rank's shard. Parameters that are treated alike, and so make one segment, stand together.
    """

    index: int
    params: dict[str, nn.Parameter]
    param: Tensor
    grad: Tensor
    own: slice
    segments: list[Segment] = field(default_factory=list)

    def parts_of(self, index: int, sharding: Sharding) -> list[SegmentPart]:
        """Returns what rank `index` of the sharding's ranks steps, in the order of its segments."""
        shard = self.param.numel() // sharding.shards
        first = shard * index if sharding.shards > 1 else 0
        return _parts(self.params, 0, first, first + shard)


class Sharding(NamedTuple):
    shards: int
    shard: int


UNSHARDED = Sharding(1, 0)
InitFn = Callable[[nn.Parameter], Tensor]


def current_values(parameter: nn.Parameter) -> Tensor:
    return parameter.detach()


def build_buckets(
    parameters: list[tuple[str, nn.Parameter]],
    bucket_cap_mb: float | None,
    param_dtype: torch.dtype,
    sharding: Sharding = UNSHARDED,
    alone: Collection[str] = (),
    values: InitFn = current_values,
    first: int = 0,
) -> list[Bucket]:
    """Moves the parameters into flat buckets, in reverse of the given (forward) order.

    Each parameter becomes a view of its bucket, in `param_dtype`, and gets a `main_grad`. The
    values, in fp32 or better, become the masters.

    Args:
        alone: names of parameters that get buckets of their own.
        first: index of the first bucket.
        values: called for one parameter at a time, so that deferred ones never exist twice.
    """
    ready = list(reversed(parameters))
    item = torch.promote_types(param_dtype, torch.float32).itemsize
    apart = {i for i, (name, _) in enumerate(ready) if name in alone}
    accelerated = bool(ready) and is_accelerator(ready[0][1].device)
    groups = assign((p.numel() * item for _, p in ready), bucket_cap_mb, apart, accelerated)
    ordered = [dict(ready[j] for j in sorted(members, reverse=True)) for members in groups]
    return [_build(i, p, param_dtype, sharding, values) for i, p in enumerate(ordered, first)]


def segment_kind(parameter: nn.Parameter) -> tuple[bool, bool, bool]:
    spec = spec_of(parameter)
    return spec.decays, spec.replicated, spec.tied_lm_head


@torch.no_grad()
def _build(
    index: int,
    params: dict[str, nn.Parameter],
    dtype: torch.dtype,
    sharding: Sharding,
    values: InitFn,
) -> Bucket:
    device = next(iter(params.values())).device
    wide = torch.promote_types(dtype, torch.float32)
    total = padded_numel(sum(p.numel() for p in params.values()), sharding.shards)
    shard = total // sharding.shards
    own = slice(shard * sharding.shard, shard * (sharding.shard + 1))
    flat = torch.zeros(total, dtype=dtype, device=device)
    grad = torch.zeros(total, dtype=wide, device=device)
    bucket = Bucket(index, {}, flat, grad, own)
    offset = 0
    for kind in sorted({segment_kind(p) for p in params.values()}):
        alike = {name: p for name, p in params.items() if segment_kind(p) == kind}
        end = offset + sum(p.numel() for p in alike.values())
        first, last = max(offset, own.start), min(end, own.stop)
        if first < last:
            master = flat[first:last]
            if dtype != wide:
                master = torch.empty(last - first, dtype=wide, device=device)
            parts = _parts(alike, offset, first, last)
            segment = Segment(flat[first:last], grad[first:last], master, *kind, parts)
            bucket.segments.append(segment)
        bucket.params |= alike
        for p in alike.values():
            until = offset + p.numel()
            whole = values(p).flatten()
            flat[offset:until] = whole
            begin, stop = max(first, offset), min(last, until)
            if begin < stop and dtype != wide:
                master[begin - first : stop - first] = whole[begin - offset : stop - offset]
            p.data = flat[offset:until].view(p.shape)
            state_of(p).main_grad = grad[offset:until].view(p.shape)
            offset = until
            del whole  # before the next parameter is drawn
    return bucket


def _parts(
    params: dict[str, nn.Parameter], offset: int, first: int, last: int
) -> list[SegmentPart]:
    """Returns the parts in [first, last) of parameters that are contiguous from `offset` on."""
    found = []
    for name, p in params.items():
        start, end = max(offset, first), min(offset + p.numel(), last)
        if start < end:
            found.append(SegmentPart(name, spec_of(p), start - offset, end - start))
        offset += p.numel()
    return found
