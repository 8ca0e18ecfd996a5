"""Parameters and gradients in contiguous buckets, in the order in which gradients become ready.

Each bucket is one flat buffer of parameters and one of gradients (fp32 or better). The parameters
that the model uses are views of the first, every gradient is added into the second, one collective
reduces it, and the optimizer steps on flat views of both.

Inside a bucket, parameters of equal treatment stand together (`Segment`), so that weight decay, the
gradient norm and the sequence-parallel sum each touch a few long views and not every parameter.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from parallel3d.data_parallel.bucket_sizes import assign
from parallel3d.tensor_parallel.parameters import ParameterSpec


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
