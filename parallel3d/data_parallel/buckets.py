"""Parameters and gradients in contiguous buckets, in the order in which gradients become ready.

Each bucket is one flat buffer of parameters and one of gradients (fp32 or better). The parameters
that the model uses are views of the first, every gradient is added into the second, one collective
reduces it, and the optimizer steps on flat views of both.

Inside a bucket, parameters of equal treatment stand together (`Segment`), so that weight decay, the
gradient norm and the sequence-parallel sum each touch a few long views and not every parameter.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from parallel3d.tensor_parallel.parameters import ParameterSpec

MIB = 1024 * 1024
FIRST_BUCKET_MIB = 1.0
DEFAULT_CAP_MIB = 25.0


@dataclass
class Segment:
    """A run of one bucket whose parameters are treated alike.

    Attributes:
        param, grad: flat views of the bucket's buffers.
        decays: weight decay applies.
        replicated: every tp rank holds the same values (see ParameterSpec).
        tied_copy: belongs to a table that the first stage owns.
    """

    param: Tensor
    grad: Tensor
    decays: bool
    replicated: bool
    tied_copy: bool


@dataclass
class Bucket:
    """One flat pair of buffers; `params` in forward order of the model."""

    index: int
    params: dict[str, nn.Parameter]
    param: Tensor
    grad: Tensor
    segments: list[Segment] = field(default_factory=list)


def assign(sizes: Iterable[int], bucket_cap_mb: float | None) -> list[list[int]]:
    """Groups parameters, given by their bytes in the order of readiness, into buckets.

    As PyTorch's DDP means `bucket_cap_mb`: parameters are never split, and a bucket closes with
    the parameter that makes it reach the cap. With None the first bucket closes at 1 MiB, so that
    communication starts early, and the others at 25 MiB (Li et al. 2020, §3.2.3).
    """
    caps = [FIRST_BUCKET_MIB, DEFAULT_CAP_MIB] if bucket_cap_mb is None else [bucket_cap_mb]
    buckets: list[list[int]] = []
    current: list[int] = []
    filled = 0
    for i, size in enumerate(sizes):
        current.append(i)
        filled += size
        if filled >= caps[min(len(buckets), len(caps) - 1)] * MIB:
            buckets.append(current)
            current, filled = [], 0
    if current:
        buckets.append(current)
    return buckets


def build_buckets(
    parameters: list[tuple[str, nn.Parameter]],
    bucket_cap_mb: float | None,
    grad_dtype: torch.dtype,
) -> list[Bucket]:
    """Moves the parameters into flat buckets, in reverse of the given (forward) order.

    Each parameter's storage becomes a view of its bucket, and it gains `main_grad`, the view of the
    bucket's gradients that every backward adds to. Views are never reassigned.
    """
    ready = list(reversed(parameters))
    groups = assign((p.numel() * grad_dtype.itemsize for _, p in ready), bucket_cap_mb)
    return [
        _build(i, dict(ready[j] for j in sorted(members, reverse=True)), grad_dtype)
        for i, members in enumerate(groups)
    ]


def _treatment(parameter: nn.Parameter) -> tuple[bool, bool, bool]:
    spec: ParameterSpec = parameter.spec
    return spec.decays, spec.replicated, spec.tied_copy


@torch.no_grad()
def _build(index: int, params: dict[str, nn.Parameter], grad_dtype: torch.dtype) -> Bucket:
    first = next(iter(params.values()))
    total = sum(p.numel() for p in params.values())
    flat = torch.empty(total, dtype=first.dtype, device=first.device)
    grad = torch.zeros(total, dtype=grad_dtype, device=first.device)
    bucket = Bucket(index, params, flat, grad)
    offset = 0
    for kind in sorted({_treatment(p) for p in params.values()}):
        start = offset
        for p in params.values():
            if _treatment(p) != kind:
                continue
            view = flat[offset : offset + p.numel()].view(p.shape)
            view.copy_(p)
            p.data = view
            p.main_grad = grad[offset : offset + p.numel()].view(p.shape)
            offset += p.numel()
        bucket.segments.append(Segment(flat[start:offset], grad[start:offset], *kind))
    return bucket
