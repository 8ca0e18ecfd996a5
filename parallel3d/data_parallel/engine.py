"""Runs data parallelism in flat buckets, which the optimizer steps whole or in shards (ZeRO 1)."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeVar

import torch
from torch import Tensor, nn

from parallel3d.blueprint.buckets import assign, padded_numel
from parallel3d.comm import collectives
from parallel3d.comm.collectives import Work
from parallel3d.comm.group import SINGLE, Group
from parallel3d.comm.step_timer import StepTimer
from parallel3d.data_parallel.pending_gathers import PendingGathers
from parallel3d.data_parallel.reducer import (
    CommHook,
    GradBucket,
    Reducer,
    all_reduce,
    reduce_scatter,
)
from parallel3d.device.accelerator import is_accelerator
from parallel3d.parameters.copies import CopyGroups, GroupsOf
from parallel3d.parameters.segments import Constant, ParameterSpan, Segment
from parallel3d.parameters.state import spec_of, state_of

T = TypeVar("T")


@dataclass
class Bucket:
    """Flat buffers of parameters and of their gradients (fp32 or better), in the order of `params`.

    The model's parameters are views of `param`. Gradients are added to `grad`, which one collective
    reduces. The optimizer steps the slice `own` in `segments`: the whole bucket or, under ZeRO,
    this rank's shard. Parameters with equal optimizer settings are adjacent and form one segment.

    Attributes:
        data: the ranks over which `grad` is summed.
        shards: the ranks that each step a part, or this rank alone if every rank steps everything.
    """

    index: int
    params: dict[str, nn.Parameter]
    param: Tensor
    grad: Tensor
    own: slice
    data: Group
    shards: Group
    segments: list[Segment] = field(default_factory=list)


InitFn = Callable[[nn.Parameter], Tensor]


def build_buckets(
    parameters: list[tuple[str, nn.Parameter]],
    bucket_cap_mb: float | None,
    param_dtype: torch.dtype,
    sharded: bool = False,
    groups_of: GroupsOf = lambda spec: CopyGroups(),
    values: InitFn = Tensor.detach,
    first: int = 0,
) -> list[Bucket]:
    """Moves the parameters into flat buckets, in the reverse of the given (forward) order.

    Each parameter becomes a view of its bucket, in `param_dtype` or wider (`ParameterSpec.dtype`),
    and gets a `main_grad`. The values, in fp32 or better, become the masters. All parameters of a
    bucket have one dtype, and their copies on the same ranks.

    Args:
        bucket_cap_mb: size in MiB at which a bucket closes, or None for the default sizes.
        sharded: whether each rank steps only a shard of a bucket.
        groups_of: returns the groups over which a parameter has copies.
        first: index of the first bucket.
        values: returns a parameter's initial values. It is called for one parameter at a time, so
            that values that are drawn on demand need little extra memory.
    """
    ready = list(reversed(parameters))
    item = torch.promote_types(param_dtype, torch.float32).itemsize
    accelerated = bool(ready) and is_accelerator(ready[0][1].device)
    alike: dict[tuple[Group, torch.dtype], list[int]] = {}
    for i, (_, p) in enumerate(ready):
        spec = spec_of(p)
        alike.setdefault((groups_of(spec).data, spec.dtype(param_dtype)), []).append(i)
    buckets: list[list[int]] = []
    for places in alike.values():
        sizes = (ready[i][1].numel() * item for i in places)
        # Tied tables have separate buckets, so that both stages shard them equally.
        apart = {j for j, i in enumerate(places) if spec_of(ready[i][1]).tied}
        assigned = assign(sizes, bucket_cap_mb, apart, accelerated)
        buckets += [[places[j] for j in members] for members in assigned]
    buckets.sort(key=max)  # in the order in which they become full
    ordered = [dict(ready[i] for i in sorted(members, reverse=True)) for members in buckets]
    return [
        _build(i, p, param_dtype, sharded, groups_of, values) for i, p in enumerate(ordered, first)
    ]


def segment_kind(parameter: nn.Parameter) -> tuple[bool, bool, bool]:
    spec = spec_of(parameter)
    return spec.decays, spec.replicated, spec.tied


@torch.no_grad()
def _build(
    index: int,
    params: dict[str, nn.Parameter],
    param_dtype: torch.dtype,
    sharded: bool,
    groups_of: GroupsOf,
    values: InitFn,
) -> Bucket:
    spec = spec_of(next(iter(params.values())))
    data, dtype = groups_of(spec).data, spec.dtype(param_dtype)
    shards = data if sharded else SINGLE
    device = next(iter(params.values())).device
    accum_dtype = torch.promote_types(dtype, torch.float32)
    total = padded_numel(sum(p.numel() for p in params.values()), shards.size)
    shard = total // shards.size
    own = slice(shard * shards.index, shard * (shards.index + 1))
    flat = torch.zeros(total, dtype=dtype, device=device)
    grad = torch.zeros(total, dtype=accum_dtype, device=device)
    bucket = Bucket(index, {}, flat, grad, own, data, shards)
    offset = 0
    for kind in sorted({segment_kind(p) for p in params.values()}):
        alike = {name: p for name, p in params.items() if segment_kind(p) == kind}
        end = offset + sum(p.numel() for p in alike.values())
        first, last = max(offset, own.start), min(end, own.stop)
        if first < last:
            param = master = flat[first:last]  # no copy follows a step of what is one object
            if dtype != accum_dtype:
                master = torch.empty(last - first, dtype=accum_dtype, device=device)
            spans = _spans(alike, offset, first, last)
            groups = groups_of(spans[0].spec)
            if sharded:
                groups = replace(groups, data=SINGLE)
            segment = Segment(param, grad[first:last], master, spans, groups)
            bucket.segments.append(segment)
        bucket.params |= alike
        for p in alike.values():
            until = offset + p.numel()
            whole = values(p).flatten()
            flat[offset:until] = whole
            begin, stop = max(first, offset), min(last, until)
            if begin < stop and dtype != accum_dtype:
                master[begin - first : stop - first] = whole[begin - offset : stop - offset]
            p.data = flat[offset:until].view(p.shape)
            state_of(p).main_grad = grad[offset:until].view(p.shape)
            offset = until
            del whole  # frees its memory before the next parameter is drawn
    return bucket


def _spans(
    params: dict[str, nn.Parameter], offset: int, first: int, last: int
) -> list[ParameterSpan]:
    """Returns the spans in [first, last) of parameters that lie one after another from `offset`."""
    found = []
    for name, p in params.items():
        start, end = max(offset, first), min(offset + p.numel(), last)
        if start < end:
            found.append(ParameterSpan(name, spec_of(p), start - offset, end - start))
        offset += p.numel()
    return found


class BucketedDataParallel:
    """Owns gradient buckets, their reduction, and the all-gather of stepped parameters.

    Gradients accumulate in the buckets. In a step a parameter gets one gradient per micro-batch and
    use, in the order of the pipeline schedule. Only after the last gradient is the parameter ready
    for the reduction of its bucket (Li et al. 2020, §3.2.4). The loss is already divided by the
    tokens of the global batch, so the reduction is a plain sum. Frozen parameters are in no bucket,
    and every rank holds them whole.

    Under ZeRO stage 1 (Rajbhandari et al. 2020 §5.1) gradients are reduce-scattered, each rank
    steps its shard, and the parameters are gathered while the next forward begins, layer by layer.

    Args:
        chunks: the parameters of each stage by name, in forward order, fp32 or better. Stages
            finish at different times, so no bucket holds parameters of two stages.
        dtype: the compute dtype.
        groups_of: returns the groups over which a parameter has copies.
        zero: the ZeRO stage, 0 or 1.
        bucket_cap_mb, overlap: as in DistributedDataParallel.
        hook: reduces a bucket, or is None for a plain reduce-scatter (ZeRO) or all-reduce.
        values: returns the initial values of a parameter (see `build_buckets`).
        gathers: gets the all-gathers of stepped parameters, for which the layers wait.
        before_reduction: called before a bucket is reduced. With `BatchOverlap` it makes the
            current stream wait for those that add gradients.

    Attributes:
        segments: flat shards that this rank steps.
        constants: the frozen parameters.
        works: handles of this step's reductions, in the order in which they were started.
    """

    def __init__(
        self,
        chunks: Sequence[dict[str, nn.Parameter]],
        dtype: torch.dtype,
        groups_of: GroupsOf,
        zero: int,
        *,
        bucket_cap_mb: float | None = None,
        overlap: bool = True,
        hook: CommHook | None = None,
        values: InitFn = Tensor.detach,
        gathers: PendingGathers | None = None,
        before_reduction: Callable[[], None] = lambda: None,
    ) -> None:
        self.groups_of = groups_of
        self.sharded = zero > 0
        self.parameters = {name: p for chunk in chunks for name, p in chunk.items()}
        self.trained = {name: p for name, p in self.parameters.items() if p.requires_grad}
        self.names = list(self.trained)
        self.cap = bucket_cap_mb
        self.overlap = overlap
        self.dtype = dtype
        self.comm_hook = hook or (reduce_scatter if self.sharded else all_reduce)
        self.gathers = PendingGathers() if gathers is None else gathers
        self.works: list[Work] = []
        self.running = False
        self.before_reduction = before_reduction
        self.constants = [
            self._hold(name, p, values)
            for name, p in self.parameters.items()
            if name not in self.trained
        ]
        trained = [[name for name in chunk if name in self.trained] for chunk in chunks]
        self._fill_buckets(trained, values)
        timers = (groups_of(spec_of(p)).data.timer for p in self.parameters.values())
        self.step_timer = next(timers, None) or StepTimer()  # blocks may have no parameters
        for number, parameter in enumerate(self.trained.values()):
            self._register_hooks(number, parameter)

    def _hold(self, name: str, parameter: nn.Parameter, values: InitFn) -> Constant:
        """Converts a frozen parameter to its dtype in this run, and returns it as a constant."""
        spec = spec_of(parameter)
        parameter.data = values(parameter).detach().to(spec.dtype(self.dtype))
        span = ParameterSpan(name, spec, 0, parameter.numel())
        return Constant(parameter.detach().view(-1), span, self.groups_of(spec))

    def _fill_buckets(self, chunks: list[list[str]], values: InitFn = Tensor.detach) -> None:
        self.buckets: list[Bucket] = []
        for names in reversed(chunks):  # the order in which their gradients become ready
            named = [(name, self.parameters[name]) for name in names]
            self.buckets += build_buckets(
                named,
                self.cap,
                self.dtype,
                self.sharded,
                self.groups_of,
                values,
                len(self.buckets),
            )
        self.segments: list[Segment] = [s for bucket in self.buckets for s in bucket.segments]
        self.bucket_of = {name: bucket for bucket in self.buckets for name in bucket.params}
        number_of = {name: number for number, name in enumerate(self.names)}
        members = [[number_of[name] for name in bucket.params] for bucket in self.buckets]
        self.reducer = Reducer(members, self.overlap)

    def _register_hooks(self, number: int, parameter: nn.Parameter) -> None:
        # The reference is weak because Python's collector does not see the cycle parameter → hook →
        # engine → parameter: the model and the groups' threads would outlive their trainer.
        engine = weakref.ref(self)

        def register_grad_ready() -> None:
            this = engine()
            if this is not None and this.running:
                this._grad_ready(number)

        def accumulate(p: Tensor) -> None:
            if p.grad is None:  # the layer itself has added the gradient to the bucket
                return
            main_grad = state_of(p).main_grad
            assert main_grad is not None
            main_grad.add_(p.grad)
            p.grad = None
            register_grad_ready()

        state_of(parameter).register_grad_ready = register_grad_ready
        parameter.register_post_accumulate_grad_hook(accumulate)

    def spans_of(self, index: int) -> list[ParameterSpan]:
        """Returns the spans that rank `index` of dp steps, in the order of its segments."""
        found = []
        for bucket in self.buckets:
            shard = bucket.param.numel() // bucket.shards.size
            first = shard * (index % bucket.shards.size)
            found += _spans(bucket.params, 0, first, first + shard)
        return found

    def callable_stages(self, stages: Sequence[T]) -> Sequence[T]:
        """Returns the stages unchanged, because the pipeline can call them directly."""
        return stages

    def start_step(self, microbatches: int) -> None:
        for bucket in self.buckets:
            bucket.grad.zero_()
        self.expected = [spec_of(p).uses * microbatches for p in self.trained.values()]
        self.reducer.begin(self.expected)
        self.works = []
        self.running = True

    def start_last_microbatch(self) -> None:
        """Does nothing, because this engine counts the gradients instead."""

    def _grad_ready(self, number: int) -> None:
        left = self.reducer.arrived(number)
        if left < 0:
            raise RuntimeError(
                f"{self.names[number]} got more gradients than the forward has uses of this "
                "parameter"
            )
        if left == 0:
            for index in self.reducer.filled(number):
                self.reduce_bucket(index)

    def reduce_bucket(self, index: int) -> None:
        """Starts the reduction of a bucket to which this rank will add no more gradients."""
        bucket = self.buckets[index]
        if bucket.data.size == 1:
            return
        self.before_reduction()
        given = GradBucket(
            index, index == len(self.buckets) - 1, bucket.grad, list(bucket.params.values())
        )
        profiled = self.step_timer.ranges is not None
        name = f"gradient reduction of bucket {index}" if profiled else None
        with self.step_timer.within("dp", name):  # a hook may do more than communicate
            self.works.append(self.comm_hook(bucket.data, given))

    def finish_step(self) -> list[str]:
        """Reduces the remaining buckets and waits; returns the parameters without a gradient."""
        for index in self.reducer.rest():
            self.reduce_bucket(index)
        if self.works:
            with self.step_timer.within("dp", "wait gradient reduction"):
                for work in self.works:
                    work.wait()
        self.running = False
        counts = zip(self.names, self.reducer.left, self.expected, strict=True)
        return [name for name, left, expected in counts if left == expected]

    def tied_gradient(self, name: str) -> Tensor:
        """Returns the flat shard of a tied table's gradient that this rank steps."""
        bucket = self.bucket_of[name]
        return bucket.grad[bucket.own]

    def all_gather_params(self) -> None:
        """Copies the stepped masters to the parameters, and starts all-gathers of the shards."""
        for segment in self.segments:
            if segment.master is not segment.param:
                segment.param.copy_(segment.master)
        divided = [bucket for bucket in self.buckets if bucket.shards.size > 1]
        if divided:
            with self.step_timer.range("parameter all-gather"):
                for bucket in reversed(divided):  # the first layers first
                    work = collectives.all_gather_bucket(bucket.param, bucket.shards)
                    self.gathers.add(bucket.index, bucket.params, work)

    def wait_for_all_gathers(self) -> None:
        self.gathers.wait_for_all()
