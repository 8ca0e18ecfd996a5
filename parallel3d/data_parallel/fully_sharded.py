"""Runs ZeRO stages 2 and 3 with PyTorch's FSDP2 (Zhao et al. 2023), as a `DataParallel` engine.

Every block is an FSDP unit. The rest of the pipeline stage (embedding, final norm and head) is one
more unit, so that a tied table is one tensor. Under ZeRO 3 the parameters of a block are freed
after its forward and gathered again for its backward. The other parameters, and all parameters
under ZeRO 2, stay gathered until the step's last backward. ZeRO 2 therefore holds frozen parameters
whole, and ZeRO 3 shards them in the compute dtype.

FSDP2 gathers all parameters of a unit in one dtype. Parameters that stay in fp32 in a run of 16
bits (`ParameterSpec.wide`), which are a few vectors, are therefore whole on every rank, in buckets
of their own, which are reduced when the step ends.

This module extends FSDP2 with sums instead of means (the loss is already divided), one flat
gradient buffer, the names of parameters without a gradient, and our own collectives, which are
timed, logged and counted, and use shared memory on one host.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from typing import NamedTuple, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from parallel3d.comm import collectives
from parallel3d.comm.group import SINGLE, Group
from parallel3d.data_parallel.engine import BucketedDataParallel
from parallel3d.device import accelerator
from parallel3d.parameters.copies import GroupsOf
from parallel3d.parameters.initializer import Initializer
from parallel3d.parameters.segments import Constant, ParameterSpan, Segment
from parallel3d.parameters.state import spec_of, state_of

T = TypeVar("T")


class ShardGroups(NamedTuple):
    """The ranks that hold a module's parameters.

    Each rank of `shards` holds a different part; all ranks of `replicas` hold the same part (HSDP).
    """

    shards: Group
    replicas: Group = SINGLE


class FullyShardedDataParallel:
    """Shards the parameters, gradients and optimizer state of a rank's stages over dp.

    Args:
        stages: modules with parameters in fp32 or better, which become the masters.
        units: modules whose parameters are gathered together, each with the ranks that hold them. A
            nested unit comes before the unit that contains it.
        rest: the ranks that hold the parameters outside of all units.
        groups_of: returns the groups over which a parameter has copies.
        initializer: draws the initial values here if it is `deferred`.
        dtype: the compute dtype, in which parameters are gathered.
        zero: the ZeRO stage, 2 or 3.
        every_microbatch: whether every backward reduce-scatters the gradients, so that a rank holds
            unsharded gradients of only one unit. HSDP replicas then sum their shards at the end of
            the step. Otherwise, only the last backward reduces.
        mesh_of: returns the mesh of a group.
        without_backward: units whose parameters no backward reads.

    Attributes:
        segments: flat shards that this rank steps, one per parameter.
        constants: frozen parameters, or with stage 3 this rank's shards of them.
        wide: the engine of the parameters that FSDP2 does not shard, or None if there are none.
    """

    def __init__(
        self,
        stages: Sequence[nn.Module],
        units: Sequence[tuple[nn.Module, ShardGroups]],
        rest: ShardGroups,
        groups_of: GroupsOf,
        initializer: Initializer,
        dtype: torch.dtype,
        zero: int,
        every_microbatch: bool,
        mesh_of: Callable[[Group], DeviceMesh],
        without_backward: Collection[nn.Module] = (),
    ) -> None:
        root = stages[0] if len(stages) == 1 else _Chunks(stages)
        divided = [*units, (root, rest)]
        self.held = _held(stages, divided)
        specs = {name: spec_of(p) for name, p in _named(stages).items()}
        self.whole = {name: p.shape for name, p in _named(stages).items()}
        accum_dtype = torch.promote_types(dtype, torch.float32)
        policy = MixedPrecisionPolicy(dtype, reduce_dtype=accum_dtype, cast_forward_inputs=False)
        # FSDP2 could reduce over replicas itself, with a mesh of two dimensions; our all-reduce
        # hook does so instead, so that this sum is timed and logged too.
        meshes = {held.shards: mesh_of(held.shards) for _, held in divided}
        self.zero = zero
        self.every_microbatch = every_microbatch
        self.reduces_each = every_microbatch  # whether each backward of this step reduces
        ignored = {p for p in root.parameters() if not p.requires_grad} if zero == 2 else set()
        wide = {p for p in root.parameters() if spec_of(p).dtype(dtype) != dtype}
        ignored -= wide

        def values_of(parameter: nn.Parameter) -> Tensor:
            drawn = initializer.deferred
            return initializer.values(spec_of(parameter)) if drawn else parameter.detach()

        for parameter in ignored:
            parameter.data = values_of(parameter).to(dtype)
        self.wide: BucketedDataParallel | None = None
        if wide:
            chunks = [
                {name: p for name, p in stage.named_parameters() if p in wide} for stage in stages
            ]
            self.wide = BucketedDataParallel(
                chunks, dtype, groups_of, 0, overlap=False, values=values_of
            )
        ignored |= wide
        for module, held in divided:  # each unit is sharded before the next is drawn
            _draw_own_rows(module, initializer, held.shards, dtype, ignored)
            # The backward needs the root's parameters first, so they stay gathered.
            frees = zero == 3 and module is not root
            fully_shard(
                module,
                mesh=meshes[held.shards],
                reshard_after_forward=frees,
                mp_policy=policy,
                ignored_params=ignored or None,
            )
        assert isinstance(root, FSDPModule)  # `fully_shard` has changed its class
        self.root: FSDPModule = root
        self.units = [m for m in root.modules() if isinstance(m, FSDPModule)]
        for unit, held in divided:
            assert isinstance(unit, FSDPModule)
            unit.set_gradient_divide_factor(1.0)
            unit.set_force_sum_reduction_for_comms(True)
            # The base classes that these methods name are private to FSDP2.
            unit.set_custom_all_gather(_AllGather(held.shards))  # type: ignore[arg-type]
            unit.set_custom_reduce_scatter(_ReduceScatter(held.shards))  # type: ignore[arg-type]
            if held.replicas.size > 1 and not every_microbatch:
                unit.set_all_reduce_hook(_sum_over(held.replicas))
        # Each block's backward prefetches the preceding block. FSDP2's own guess, the preceding
        # unit in the latest forward, may belong to another chunk or micro-batch and be useless. The
        # root prefetches itself, which does nothing, as it is already gathered.
        self.root.set_modules_to_backward_prefetch([self.root])
        for stage in stages:
            blocks = [m for m in stage.modules() if isinstance(m, FSDPModule) and m is not root]
            for before, block in zip([*blocks[:1], *blocks], blocks, strict=False):
                nearest = block if before in without_backward else before
                block.set_modules_to_backward_prefetch([nearest])
        self.parameters: dict[str, nn.Parameter] = _named(stages)
        self.without_gradient: set[str] = set()
        sharded = {name: p for name, p in self.parameters.items() if p not in wide}
        self.trained = {name: p for name, p in sharded.items() if p.requires_grad}
        numel: Counter[ShardGroups] = Counter()
        for name, parameter in self.trained.items():
            numel[self.held[name]] += _local(parameter).numel()
        device = _local(next(iter(sharded.values()))).device
        self.gradients = {
            held: torch.zeros(n, dtype=accum_dtype, device=device) for held, n in numel.items()
        }
        self.segments: list[Segment] = []
        self.gradient_of: dict[str, Tensor] = {}
        self.constants: list[Constant] = []
        used: Counter[ShardGroups] = Counter()
        for name, parameter in sharded.items():
            state, held = state_of(parameter), self.held[name]
            state.spec = specs[name]
            state.compute_dtype = dtype
            flat = _local(parameter).view(-1)
            if name not in self.trained:
                self.constants += self._constant(name, parameter, flat, groups_of)
                continue
            grad = self.gradients[held][used[held] : used[held] + flat.numel()]
            used[held] += flat.numel()
            self._keep_gradient(name, parameter, grad)
            span = self._span(name, held.shards.index)
            if span.numel:  # if there are fewer rows than ranks, some shards are empty
                copies = replace(groups_of(specs[name]), data=held.replicas)
                self.segments.append(Segment(flat, grad, flat, [span], copies))
        if self.wide is not None:
            self.segments += self.wide.segments
            self.constants += self.wide.constants

    def _constant(
        self, name: str, parameter: nn.Parameter, flat: Tensor, groups_of: GroupsOf
    ) -> list[Constant]:
        spec = spec_of(parameter)
        if not isinstance(parameter.data, DTensor):
            return [Constant(flat, ParameterSpan(name, spec, 0, flat.numel()), groups_of(spec))]
        held = self.held[name]
        span = self._span(name, held.shards.index)
        copies = replace(groups_of(spec), data=held.replicas)
        return [Constant(flat, span, copies)] if span.numel else []

    def _keep_gradient(self, name: str, parameter: nn.Parameter, grad: Tensor) -> None:
        """Makes `parameter.grad`, to which FSDP2 adds reduced gradients, a view of the buffer."""
        sharded = parameter.data
        assert isinstance(sharded, DTensor)
        parameter.grad = DTensor.from_local(
            grad.view(_local(parameter).shape),
            sharded.device_mesh,
            sharded.placements,
            run_check=False,
            shape=sharded.shape,
            stride=sharded.stride(),
        )
        self.gradient_of[name] = grad
        parameter.register_post_accumulate_grad_hook(lambda _: self.without_gradient.discard(name))

    def spans_of(self, index: int) -> list[ParameterSpan]:
        """Returns the spans that rank `index` of dp steps, in the order of its segments."""
        sizes = {name: self.held[name].shards.size for name in self.trained}
        spans = (self._span(name, index % size) for name, size in sizes.items())
        whole = [] if self.wide is None else self.wide.spans_of(index)
        return [*(span for span in spans if span.numel), *whole]

    def _span(self, name: str, shard: int) -> ParameterSpan:
        rows, *row = self.whole[name]
        ranks = self.held[name].shards.size
        first, end = (first_row(rows, ranks, i) for i in (shard, shard + 1))
        width, spec = math.prod(row), spec_of(self.parameters[name])
        return ParameterSpan(name, spec, first * width, (end - first) * width)

    def callable_stages(self, stages: Sequence[T]) -> Sequence[T]:
        """Returns the objects that the pipeline calls for these stages.

        With several stages, the calls go through their common root.
        """
        if not isinstance(self.root, _Chunks):
            return stages
        return cast(Sequence[T], [_Chunk(self.root, i) for i in range(len(stages))])

    def start_step(self, microbatches: int) -> None:
        for flat in self.gradients.values():
            flat.zero_()
        self.without_gradient = set(self.trained)
        # With one reduction per step, a parameter that both ends of the model use has a gradient in
        # fp32, from the first backward, and one in the compute dtype, from the last backward. FSDP2
        # refuses to add these unless every parameter has had a backward before.
        self.reduces_each = self.every_microbatch or microbatches == 1
        self._last_backward(False)
        if self.wide is not None:
            self.wide.start_step(microbatches)

    def start_last_microbatch(self) -> None:
        """Lets the next backward, the last of the step, free the parameters."""
        self._last_backward(True)

    def _last_backward(self, last: bool) -> None:
        # With several chunks, only the very last backward triggers FSDP2's reduction of all of
        # them.
        self.root.set_requires_gradient_sync(last or self.reduces_each)
        self.root.set_is_last_backward(last)
        self.root.set_reshard_after_backward(last, recurse=self.zero == 2)

    def finish_step(self) -> list[str]:
        for held, flat in self.gradients.items():
            if self.every_microbatch and held.replicas.size > 1:
                collectives.all_reduce(flat, held.replicas)
        missing = self.without_gradient | set(() if self.wide is None else self.wide.finish_step())
        return [name for name in self.parameters if name in missing]

    def tied_gradient(self, name: str) -> Tensor:
        return self.gradient_of[name]

    def all_gather_params(self) -> None:
        """Frees the previous step's gathered parameters; the next forward gathers the new ones."""
        for unit in self.units:
            unit.reshard()

    def wait_for_all_gathers(self) -> None:
        """Does nothing, because sharded parameters are always complete."""


class _Chunks(nn.Module):
    """Holds a rank's stages under one FSDP root, because two of them may read the same table."""

    def __init__(self, stages: Sequence[nn.Module]) -> None:
        super().__init__()
        self.stages = nn.ModuleList(stages)

    def forward(self, chunk: int, *args: object) -> Tensor:
        result: Tensor = self.stages[chunk](*args)
        return result


class _Chunk:
    """Calls one stage of a `_Chunks` root."""

    def __init__(self, root: nn.Module, chunk: int) -> None:
        self.root = root
        self.chunk = chunk

    def __call__(self, *args: object) -> Tensor:
        result: Tensor = self.root(self.chunk, *args)
        return result

    def parameters(self) -> list[nn.Parameter]:
        return []  # no weight gradient is deferred


def _named(stages: Sequence[nn.Module]) -> dict[str, nn.Parameter]:
    """Returns all stages' parameters by name; a shared one has its name in the first stage."""
    first: dict[nn.Parameter, str] = {}
    for name, parameter in (pair for stage in stages for pair in stage.named_parameters()):
        first.setdefault(parameter, name)
    return {name: parameter for parameter, name in first.items()}


def _held(
    stages: Sequence[nn.Module], divided: Sequence[tuple[nn.Module, ShardGroups]]
) -> dict[str, ShardGroups]:
    """Maps the name of each parameter to the ranks of the first module that contains it."""
    found: dict[nn.Parameter, ShardGroups] = {}
    for module, held in divided:
        found |= {p: held for p in module.parameters() if p not in found}
    return {name: found[p] for name, p in _named(stages).items()}


class _Collective:
    def __init__(self, group: Group) -> None:
        self.group = group

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)


class _AllGather(_Collective):
    """All-gathers in place, because FSDP2 has already copied this rank's shard to the output."""

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        async_op: bool = False,
    ) -> None:
        collectives.all_gather_bucket(output_tensor, self.group).wait()


class _ReduceScatter(_Collective):
    """Reduce-scatters for FSDP2; supports only sums (`set_force_sum_reduction_for_comms`)."""

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: object,
        async_op: bool = False,
    ) -> None:
        if op != dist.ReduceOp.SUM:
            raise ValueError(f"FSDP2 reduces by {op}, but this engine supports only sums")
        if self.group.size == 1:  # no other rank holds these experts
            output_tensor.copy_(input_tensor)
            return
        collectives.reduce_scatter_into(output_tensor, input_tensor, self.group).wait()


def _draw_own_rows(
    unit: nn.Module,
    initializer: Initializer,
    shards: Group,
    dtype: torch.dtype,
    ignored: Collection[nn.Parameter],
) -> None:
    """Allocates a unit's deferred parameters, and draws the rows of this rank's shard.

    Frozen parameters are converted to the compute dtype `dtype`. Those in `ignored` are left as
    they are.
    """
    for parameter in unit.parameters():
        if isinstance(parameter, DTensor) or parameter in ignored:  # a DTensor is sharded already
            continue
        values = parameter.data
        if initializer.deferred:
            values = torch.zeros(parameter.shape, dtype=parameter.dtype, device=parameter.device)
            rows = len(values)
            first, end = (first_row(rows, shards.size, shards.index + i) for i in (0, 1))
            initializer.fill_rows(spec_of(parameter), first, values[first:end])
        parameter.data = values if parameter.requires_grad else values.to(dtype)


def _sum_over(replicas: Group) -> Callable[[Tensor], None]:
    return lambda flat: all_reduce_replicas(flat, replicas)


def all_reduce_replicas(flat: Tensor, replicas: Group) -> None:
    """All-reduces a unit's reduced gradients, which FSDP2 then adds to `.grad`."""
    collectives.all_reduce(flat, replicas)
    if accelerator.is_on_accelerator(flat):
        # FSDP2 allocated `flat` on its reduce-scatter stream, and adds it to the existing `.grad`
        # on its all-reduce stream, the current one. Afterwards nothing refers to `flat`, and the
        # next unit's reduce-scatter, on a stream that waits for neither, would get the same memory.
        # From torch 2.15 on, FSDP2 itself keeps `flat`.
        flat.record_stream(accelerator.module(flat.device).current_stream(flat.device))


def first_row(rows: int, ranks: int, rank: int) -> int:
    """Returns the first row of a rank's shard as torch.chunk cuts it; later shards may be empty."""
    return min(rows, -(-rows // ranks) * rank)


def _local(parameter: nn.Parameter) -> Tensor:
    """Returns this rank's shard, or the whole parameter if FSDP2 ignores it."""
    sharded = parameter.detach()
    return sharded.to_local() if isinstance(sharded, DTensor) else sharded
