"""Gradient buckets, and their reduction over the data-parallel group during the backward."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import torch
from torch import Tensor, nn

from parallel3d.comm import collectives
from parallel3d.comm.collectives import Work
from parallel3d.comm.process_groups import Group
from parallel3d.comm.step_timer import StepTimer
from parallel3d.device.accelerator import is_accelerator
from parallel3d.estimate.buckets import assign, padded_numel
from parallel3d.parameters.sharding import (
    Segment,
    SegmentPart,
    main_grad_of,
    set_grad_ready_hook,
    set_main_grad,
    spec_of,
)


@dataclass
class Bucket:
    """A flat buffer of parameters, in forward order, and one of gradients (fp32 or better).

    The model's parameters are views of `param`, gradients are added to `grad`, one collective
    reduces it, and the optimizer steps the `segments` of `own`: everything, or under ZeRO this
    rank's shard.
    """

    index: int
    params: dict[str, nn.Parameter]
    param: Tensor
    grad: Tensor
    own: slice
    segments: list[Segment] = field(default_factory=list)


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
    bucket = Bucket(index, params, flat, grad, own)
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
        for p in alike.values():
            until = offset + p.numel()
            whole = values(p).flatten()
            flat[offset:until] = whole
            begin, stop = max(first, offset), min(last, until)
            if begin < stop and dtype != wide:
                master[begin - first : stop - first] = whole[begin - offset : stop - offset]
            p.data = flat[offset:until].view(p.shape)
            set_main_grad(p, grad[offset:until].view(p.shape))
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


CommHook = Callable[[Tensor, Group], Work]
"""Starts the sum of a bucket's flat gradients over the group, in place, and returns its handle.

The default is `collectives.all_reduce_bucket`; a hook may compress or reduce hierarchically.
"""


class GradientObserver(Protocol):
    """Observes gradients before they are reduced."""

    def start_step(self) -> None: ...
    def added(self, name: str, times: int) -> None: ...
    def full(self, bucket: Bucket) -> None: ...


class Reducer:
    """Counts the gradients that buckets miss, and reduces full buckets during the backward.

    Only the last gradients of a step trigger reductions (Li et al. 2020, §3.2.4): a parameter gets
    one per micro-batch and use, in any order that a pipeline schedule computes them. Buckets are
    reduced in their order, so every rank issues the same collectives in the same order. The loss is
    already divided by the tokens of the global batch, so the reduction is a plain sum.

    Args:
        overlap: reduce a bucket as soon as it is full; else all at the end.

    Attributes:
        ready_order: names in the order in which the last step's gradients were complete.
    """

    def __init__(
        self,
        buckets: list[Bucket],
        group: Group,
        overlap: bool = True,
        comm_hook: CommHook = collectives.all_reduce_bucket,
    ) -> None:
        self.group = group
        self.step_timer = group.timer or StepTimer()
        self.overlap = overlap
        self.running = False
        self.missing: list[dict[str, int]] = []
        self.works: list[Work] = []
        self.ready_order: list[str] = []
        self.observer: GradientObserver | None = None
        self.set_buckets(buckets, comm_hook)
        for bucket in buckets:
            for name, parameter in bucket.params.items():
                self._register_hooks(name, parameter)

    def set_buckets(self, buckets: list[Bucket], comm_hook: CommHook) -> None:
        """Replaces the buckets by others of the same parameters; between steps alone."""
        self.buckets, self.comm_hook = buckets, comm_hook
        self.index_of = {name: b.index for b in buckets for name in b.params}

    def _register_hooks(self, name: str, parameter: nn.Parameter) -> None:
        # A weak reference: Python's collector does not see the cycle parameter → hook → reducer →
        # parameter, and an ended trainer would keep its model and its groups' threads.
        reducer = weakref.ref(self)

        def register_grad_ready() -> None:
            this = reducer()
            if this is not None and this.running:
                this._grad_ready(name)

        def accumulate(p: Tensor) -> None:
            if p.grad is None:  # the layer has added it to the bucket itself
                return
            main_grad = main_grad_of(p)
            assert main_grad is not None
            main_grad.add_(p.grad)
            p.grad = None
            register_grad_ready()

        set_grad_ready_hook(parameter, register_grad_ready)
        parameter.register_post_accumulate_grad_hook(accumulate)

    def start_step(self, microbatches: int) -> None:
        self.expected: dict[str, int] = {}
        for bucket in self.buckets:
            bucket.grad.zero_()
            for name, parameter in bucket.params.items():
                self.expected[name] = spec_of(parameter).uses * microbatches
        self.missing = [{n: self.expected[n] for n in b.params} for b in self.buckets]
        self.works, self.ready_order = [], []
        if self.observer is not None:
            self.observer.start_step()
        self.running = True

    def _grad_ready(self, name: str) -> None:
        missing = self.missing[self.index_of[name]]
        if name not in missing:
            raise RuntimeError(f"{name}: its gradient came once more than the forward used it")
        missing[name] -= 1
        if self.observer is not None:
            self.observer.added(name, self.expected[name] - missing[name])
        if missing[name] == 0:
            del missing[name]
            self.ready_order.append(name)
        while self.overlap and self._next_is_full():
            self._reduce_next()

    def _next_is_full(self) -> bool:
        i = len(self.works)
        return i < len(self.buckets) and not self.missing[i]

    def _reduce_next(self) -> None:
        bucket = self.buckets[len(self.works)]
        if self.observer is not None:
            self.observer.full(bucket)
        work: Work = collectives.CompletedWork()
        if self.group.size > 1:
            profiled = self.step_timer.ranges is not None
            name = f"gradient reduction of bucket {bucket.index}" if profiled else None
            with self.step_timer.within("dp", name):  # a hook may do more than communicate
                work = self.comm_hook(bucket.grad, self.group)
        self.works.append(work)

    def finish_step(self) -> list[str]:
        """Reduces the other buckets and waits; returns names of parameters without a gradient.

        An unused parameter leaves its bucket unfull until here: it costs overlap, never a hang.
        """
        unused = [
            name
            for missing in self.missing
            for name, left in missing.items()
            if left == self.expected[name]
        ]
        while len(self.works) < len(self.buckets):
            self._reduce_next()
        if self.group.size > 1:
            with self.step_timer.within("dp", "wait gradient reduction"):
                for work in self.works:
                    work.wait()
        self.running = False
        return unused
