"""Parameters and gradients in contiguous buckets, in the order in which gradients become ready.

Each bucket is one flat buffer of parameters and one of gradients (fp32 or better). The parameters
that the model uses are views of the first, every gradient is added into the second, one collective
reduces it, and the optimizer steps on flat views of both. Under ZeRO each rank of the data-parallel
group owns an equal part of every bucket, and steps that part alone.

Inside a bucket, parameters of equal treatment stand together (`Segment`), so that weight decay, the
gradient norm and the sequence-parallel sum each touch a few long views and not every parameter.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor, nn

from parallel3d.device.accelerator import is_accelerator
from parallel3d.parameters.pieces import ParameterSpec
from parallel3d.parameters.segments import Segment, SegmentPart
from parallel3d.sizes.buckets import assign, padded_numel


@dataclass
class Bucket:
    """One flat pair of buffers; `params` in forward order of the model.

    `own` is the part that this rank steps: all of it, or under ZeRO one of equal shards.
    """

    index: int
    params: dict[str, nn.Parameter]
    param: Tensor
    grad: Tensor
    own: slice
    segments: list[Segment] = field(default_factory=list)


class Sharding(NamedTuple):
    """Into how many equal parts buckets are cut, and which of them is this rank's."""

    count: int
    index: int


WHOLE = Sharding(1, 0)
InitFn = Callable[[nn.Parameter], Tensor]


def current_values(parameter: nn.Parameter) -> Tensor:
    """What the parameter holds now."""
    return parameter.detach()


def build_buckets(
    parameters: list[tuple[str, nn.Parameter]],
    bucket_cap_mb: float | None,
    param_dtype: torch.dtype,
    sharding: Sharding = WHOLE,
    alone: Collection[str] = (),
    values: InitFn = current_values,
    first: int = 0,
) -> list[Bucket]:
    """Moves the parameters into flat buckets, in reverse of the given (forward) order.

    Each parameter's storage becomes a view of its bucket, in `param_dtype`, and it gains
    `main_grad`, the view of the bucket's gradients that every backward adds to. Views are never
    reassigned. The values, in fp32 or better, become the masters.

    Args:
        alone: names of parameters that get buckets of their own.
        first: index of the first bucket.
        values: asked once for each parameter, one after the other, so that parameters which are
            only drawn here (`Initializer.deferred`) never lie beside their buckets all at once.
    """
    ready = list(reversed(parameters))
    item = torch.promote_types(param_dtype, torch.float32).itemsize
    apart = {i for i, (name, _) in enumerate(ready) if name in alone}
    accelerated = bool(ready) and is_accelerator(ready[0][1].device)
    groups = assign((p.numel() * item for _, p in ready), bucket_cap_mb, apart, accelerated)
    ordered = [dict(ready[j] for j in sorted(members, reverse=True)) for members in groups]
    return [_build(i, p, param_dtype, sharding, values) for i, p in enumerate(ordered, first)]


def _treatment(parameter: nn.Parameter) -> tuple[bool, bool, bool]:
    spec: ParameterSpec = parameter.spec
    return spec.decays, spec.replicated, spec.tied_copy


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
    total = padded_numel(sum(p.numel() for p in params.values()), sharding.count)
    shard = total // sharding.count
    own = slice(shard * sharding.index, shard * (sharding.index + 1))
    flat = torch.zeros(total, dtype=dtype, device=device)
    grad = torch.zeros(total, dtype=wide, device=device)
    bucket = Bucket(index, params, flat, grad, own)
    offset = 0
    for kind in sorted({_treatment(p) for p in params.values()}):
        alike = {name: p for name, p in params.items() if _treatment(p) == kind}
        end = offset + sum(p.numel() for p in alike.values())
        first, last = max(offset, own.start), min(end, own.stop)
        if first < last:
            master = flat[first:last]
            if dtype != wide:
                master = torch.empty(last - first, dtype=wide, device=device)
            parts = _parts(alike, offset, first, last)
            segment = Segment(flat[first:last], grad[first:last], master, *kind, parts)
            bucket.segments.append(segment)
        for p in alike.values():
            until = offset + p.numel()
            whole = values(p).flatten()
            flat[offset:until] = whole
            begin, stop = max(first, offset), min(last, until)
            if begin < stop and dtype != wide:
                master[begin - first : stop - first] = whole[begin - offset : stop - offset]
            p.data = flat[offset:until].view(p.shape)
            p.main_grad = grad[offset:until].view(p.shape)
            offset = until
            del whole  # before the next one is drawn
    return bucket


def _parts(
    params: dict[str, nn.Parameter], offset: int, first: int, last: int
) -> list[SegmentPart]:
    """What of the parameters, which lie side by side from `offset` on, is in [first, last)."""
    found = []
    for name, p in params.items():
        start, end = max(offset, first), min(offset + p.numel(), last)
        if start < end:
            found.append(SegmentPart(name, p.spec, start - offset, end - start))
        offset += p.numel()
    return found
