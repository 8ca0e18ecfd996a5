"""Parameters and gradients in contiguous buckets, in the order in which gradients become ready.

Each bucket is one flat buffer of parameters and one of gradients (fp32 or better). The parameters
that the model uses are views of the first, every gradient is added into the second, one collective
reduces it, and the optimizer steps on flat views of both. Under ZeRO each rank of the data-parallel
group owns an equal part of every bucket, and steps that part alone.

Inside a bucket, parameters of equal treatment stand together (`Segment`), so that weight decay, the
gradient norm and the sequence-parallel sum each touch a few long views and not every parameter.
"""

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
from parallel3d.parameters.sharding import ParameterSpec, Segment, SegmentPart
from parallel3d.sizes.traffic import assign, padded_numel


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


# Sums the gradient buckets over the data-parallel group while the backward pass still runs.
#
# The micro-batches of a step add into the buckets, and only the last gradients trigger reductions
# (Li et al. 2020, §3.2.4: communication is skipped while accumulating). Which they are, the
# reducer counts: a parameter gets one gradient a micro-batch and use, in whatever order a pipeline
# schedule makes them, in backwards or (split ones) after them. A bucket is started when its last
# gradient has arrived, always in bucket order: every rank issues the same collectives in the same
# order, whatever order its own gradients came in.
#
# The gradients are of (sum of losses) / (tokens of the global batch): the division is part of the
# loss, so the reduction is a plain sum and no pass over memory averages anything.


CommHook = Callable[[Tensor, Group], Work]
"""Starts the sum of a bucket's flat gradients over the group, in place, and returns its handle.

The default is `collectives.all_reduce_bucket`; a hook may compress or reduce hierarchically.
"""


class Watcher(Protocol):
    """Sees gradients before they are reduced."""

    def start_step(self) -> None: ...
    def added(self, name: str, times: int) -> None: ...
    def full(self, bucket: Bucket) -> None: ...


class Reducer:
    """Watches gradients arrive and reduces full buckets.

    Args:
        buckets: in the order of readiness.
        group: the data-parallel group; of one: nothing is sent.
        overlap: start a bucket as soon as it is full; else all at the end.
        comm_hook: see `CommHook`.

    Attributes:
        arrivals: names in the order in which the last step's gradients were complete.
        watcher: is told of gradients before they are reduced.
    """

    def __init__(
        self,
        buckets: list[Bucket],
        group: Group,
        overlap: bool = True,
        comm_hook: CommHook = collectives.all_reduce_bucket,
    ) -> None:
        self.group = group
        self.clock = group.timer or StepTimer()
        self.overlap = overlap
        self.running = False
        self.missing: list[dict[str, int]] = []
        self.works: list[Work] = []
        self.arrivals: list[str] = []
        self.watcher: Watcher | None = None
        self.use(buckets, comm_hook)
        for bucket in buckets:
            for name, parameter in bucket.params.items():
                self._watch(name, parameter)

    def use(self, buckets: list[Bucket], comm_hook: CommHook) -> None:
        """From here on the same parameters are in these buckets; between steps alone."""
        self.buckets, self.comm_hook = buckets, comm_hook
        self.index_of = {name: b.index for b in buckets for name in b.params}

    def _watch(self, name: str, parameter: nn.Parameter) -> None:
        # Weakly: Python's collector does not see the circle parameter → hook → this → parameter,
        # and an ended trainer would stay, with its model and its groups' threads.
        reducer = weakref.ref(self)

        def register_grad_ready() -> None:
            this = reducer()
            if this is not None and this.running:
                this._arrived(name)

        def accumulate(p: nn.Parameter) -> None:
            if p.grad is None:  # the layer added it to the bucket itself and has said so
                return
            p.main_grad.add_(p.grad)
            p.grad = None
            register_grad_ready()

        parameter.register_grad_ready = register_grad_ready
        parameter.register_post_accumulate_grad_hook(accumulate)

    def start_step(self, microbatches: int) -> None:
        """Clears the gradients of the step before; `microbatches` are to come."""
        for bucket in self.buckets:
            bucket.grad.zero_()
        self.expected = {
            name: p.spec.uses * microbatches for b in self.buckets for name, p in b.params.items()
        }
        self.missing = [{n: self.expected[n] for n in b.params} for b in self.buckets]
        self.works, self.arrivals = [], []
        if self.watcher is not None:
            self.watcher.start_step()
        self.running = True

    def _arrived(self, name: str) -> None:
        waiting = self.missing[self.index_of[name]]
        if name not in waiting:
            raise RuntimeError(f"{name}: its gradient came once more than the forward used it")
        waiting[name] -= 1
        if self.watcher is not None:
            self.watcher.added(name, self.expected[name] - waiting[name])
        if waiting[name] == 0:
            del waiting[name]
            self.arrivals.append(name)
        while self.overlap and self._next_is_full():
            self._reduce_next()

    def _next_is_full(self) -> bool:
        i = len(self.works)
        return i < len(self.buckets) and not self.missing[i]

    def _reduce_next(self) -> None:
        clock, bucket = self.clock, self.buckets[len(self.works)]
        if self.watcher is not None:
            self.watcher.full(bucket)
        work = collectives.CompletedWork()
        if self.group.size > 1:
            name = clock.ranges and f"gradient reduction of bucket {bucket.index}"
            with clock.within("dp", name):  # a hook may do more than communicate
                work = self.comm_hook(bucket.grad, self.group)
        self.works.append(work)

    def finish_step(self) -> list[str]:
        """Reduces what is left and waits; after it the gradients are those of the global batch.

        Returns:
            Names of parameters that no gradient reached. Their buckets are reduced here, so that
            an unused parameter costs overlap and a message, never a hang.
        """
        unused = [
            name
            for waiting in self.missing
            for name, left in waiting.items()
            if left == self.expected[name]
        ]
        while len(self.works) < len(self.buckets):
            self._reduce_next()
        if self.group.size > 1:
            with self.clock.within("dp", "wait gradient reduction"):
                for work in self.works:
                    work.wait()
        self.running = False
        return unused
