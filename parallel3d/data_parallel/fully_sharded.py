"""ZeRO stages 2 and 3 by PyTorch's FSDP2 (Zhao et al. 2023), with the face of the bucket engine.

Every block is a unit of its own, and the rest of the stage (embedding, final norm, head, so that a
tied table is one tensor) is one more. FSDP2 cuts each local parameter, already this rank's part of
the tensor group, along its first dimension over dp. A unit's parameters are gathered before its
forward. Under stage 3 those of a block are freed after it and gathered again for its backward; the
others, and all under stage 2, stay until the step's last backward. Gradients are reduce-scattered
in every backward, or (`every_microbatch` false) add up whole and are reduce-scattered in the last.

What FSDP2 leaves to us: sums instead of means (the loss carries 1/N already), one flat buffer that
all reduced gradients are added to, the names of what never got one, and the collectives, which are
those of everybody else: through shared memory where there is some, timed, logged and counted.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from parallel3d.comm import collectives
from parallel3d.comm.process_groups import SINGLE, Group, ProcessGroups
from parallel3d.device import accelerator
from parallel3d.models.transformer import Stage
from parallel3d.parameters.sharding import (
    Initializer,
    Segment,
    SegmentPart,
    set_compute_dtype,
    set_spec,
    spec_of,
)


class FullyShardedDataParallel:
    """Shards a stage's parameters, gradients and optimizer state over dp.

    Args:
        stage: with parameters in fp32 or better, which become the masters.
        initializer: what the stage was made with; with `deferred`, the values are drawn here.
        dtype: the compute type, in which parameters are gathered.
        groups: with two levels of dp (`dp_inner`, `dp_outer`), a copy of the model is sharded over
            the inner group, and the outer one holds replicas (HSDP).
        zero: 2 or 3.
        every_microbatch: reduce in every backward: no rank holds whole gradients of more than a
            unit, for as many reduce-scatters as there are micro-batches. With two levels of dp the
            sum over the replicas is made once, at the end of the step.

    Attributes:
        parameters: local name → sharded parameter with its spec and compute dtype.
        segments: what this rank steps, one parameter's shard each.
        replicas: (this rank's number, how many) among the dp ranks that step the same elements.
    """

    def __init__(
        self,
        stage: Stage,
        initializer: Initializer,
        dtype: torch.dtype,
        groups: ProcessGroups,
        zero: int,
        every_microbatch: bool,
    ) -> None:
        specs = {name: spec_of(p) for name, p in stage.named_parameters()}
        whole = {name: p.shape for name, p in stage.named_parameters()}
        wide = torch.promote_types(dtype, torch.float32)
        policy = MixedPrecisionPolicy(dtype, reduce_dtype=wide, cast_forward_inputs=False)
        hybrid = groups.dp_inner.size > 1
        shards, copies = (groups.dp_inner, groups.dp_outer) if hybrid else (groups.dp, SINGLE)
        mesh, self.zero, self.every_microbatch = _mesh(groups), zero, every_microbatch
        for unit in (*stage.layers.values(), stage):  # drawn and cut one after the other
            if initializer.deferred:
                _draw_own_rows(unit, initializer, shards)
            # The root's parameters are needed again at once in the backward: they stay.
            frees = zero == 3 and unit is not stage
            fully_shard(unit, mesh=mesh, reshard_after_forward=frees, mp_policy=policy)
        self.stage: FSDPModule = stage
        self.units = [m for m in stage.modules() if isinstance(m, FSDPModule)]
        for unit in self.units:
            unit.set_gradient_divide_factor(1.0)
            unit.set_force_sum_reduction_for_comms(True)
            unit.set_custom_all_gather(_AllGather(shards))
            unit.set_custom_reduce_scatter(_ReduceScatter(shards))
            if hybrid and not every_microbatch:
                unit.set_all_reduce_hook(lambda flat: _sum_over_copies(flat, copies))
        self.copies = copies
        self.replicas = (copies.index, copies.size)
        self.parameters: dict[str, nn.Parameter] = dict(stage.named_parameters())
        self.without_gradient: set[str] = set()
        self.gradients = torch.zeros(
            sum(_local(p).numel() for p in self.parameters.values()),
            dtype=wide,
            device=_local(next(iter(self.parameters.values()))).device,
        )
        self.segments: list[Segment] = []
        self.gradient_of: dict[str, Tensor] = {}
        offset = 0
        for name, parameter in self.parameters.items():
            set_spec(parameter, specs[name])
            set_compute_dtype(parameter, dtype)
            flat = _local(parameter).view(-1)
            grad = self.gradients[offset : offset + flat.numel()]
            offset += flat.numel()
            self._keep_gradient(name, parameter, grad)
            if flat.numel():  # fewer rows than ranks leave some without any
                start = first_row(whole[name][0], shards.size, shards.index) * _row(whole[name])
                self.segments.append(_segment(name, parameter, flat, grad, start))

    def _keep_gradient(self, name: str, parameter: nn.Parameter, grad: Tensor) -> None:
        """FSDP2 adds reduced gradients to `parameter.grad`, from now on a view of the buffer."""
        sharded: DTensor = parameter.data
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

    def start_step(self, microbatches: int) -> None:
        """Clears the gradients of the step before."""
        self.gradients.zero_()
        self.without_gradient = set(self.parameters)
        self._last_backward(False)

    def start_last_microbatch(self) -> None:
        """The next backward is the last: after it the parameters may go."""
        self._last_backward(True)

    def _last_backward(self, last: bool) -> None:
        self.stage.set_requires_gradient_sync(last or self.every_microbatch)
        self.stage.set_is_last_backward(last)
        self.stage.set_reshard_after_backward(last, recurse=self.zero == 2)

    def finish_step(self) -> list[str]:
        """The names of parameters without a gradient; FSDP2 has waited for the sums."""
        if self.every_microbatch and self.copies.size > 1:
            collectives.all_reduce(self.gradients, self.copies)
        return [name for name in self.parameters if name in self.without_gradient]

    def tied_gradient(self, name: str) -> Tensor:
        """This rank's shard of a tied table's gradient, flat; both stages cut it alike."""
        return self.gradient_of[name]

    def all_gather_params(self) -> None:
        """Drops what was gathered of older parameters; the next forward gathers the new ones."""
        for unit in self.units:
            unit.reshard()

    def wait_for(self, part: str) -> None:
        """A unit's own hooks gather its parameters."""

    def wait_for_all(self) -> None:
        """The sharded parameters are always complete."""


class _Buffers:
    """Where FSDP2's collectives write."""

    def __init__(self, group: Group) -> None:
        self.group = group

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)


class _AllGather(_Buffers):
    """FSDP2 has put this rank's part in its place in the output already."""

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: object, async_op: bool = False
    ) -> None:
        collectives.all_gather_bucket(output_tensor, self.group).wait()


class _ReduceScatter(_Buffers):
    """Sums alone, as `set_force_sum_reduction_for_comms` asks of FSDP2."""

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: object,
        op: object,
        async_op: bool = False,
    ) -> None:
        if op != dist.ReduceOp.SUM:
            raise ValueError(f"FSDP2 reduces by {op}, and gradients of one loss are sums")
        collectives.reduce_scatter_into(output_tensor, input_tensor, self.group).wait()


def _draw_own_rows(unit: nn.Module, initializer: Initializer, shards: Group) -> None:
    """Gives a unit's parameters memory, and in the rows that this rank keeps their values.

    The rest of them is zero, and FSDP2 drops it in a moment. What an earlier unit holds, as the
    blocks do of the stage, is in shards already.
    """
    for parameter in unit.parameters():
        if isinstance(parameter, DTensor):
            continue
        whole = torch.zeros(parameter.shape, dtype=parameter.dtype, device=parameter.device)
        rows = len(whole)
        first, end = (first_row(rows, shards.size, shards.index + i) for i in (0, 1))
        initializer.fill_rows(spec_of(parameter), first, whole[first:end])
        parameter.data = whole


def _sum_over_copies(flat: Tensor, copies: Group) -> None:
    """The all-reduce hook: sums a unit's reduced gradients, which FSDP2 then adds to `.grad`.

    FSDP2 made `flat` on its reduce-scatter stream, and calls this on its all-reduce stream, where
    the addition follows. Since every `.grad` is there already, nothing holds `flat` once that
    addition is queued, and the next unit's reduce-scatter, on a stream that waits for neither,
    would be given the same memory. The mark keeps it until the all-reduce stream is past the
    point at which the last reference goes.
    """
    collectives.all_reduce(flat, copies)
    if accelerator.is_on_accelerator(flat):
        flat.record_stream(accelerator.module(flat.device).current_stream(flat.device))


def _mesh(groups: ProcessGroups) -> DeviceMesh:
    """dp of the run's own mesh; with copies of the model, the members that share one.

    FSDP2 would take (copies, shards) as a mesh of two dimensions as well, and reduce over copies by
    itself; here its hook does, so that this sum is one of `collectives` too.
    """
    if groups.dp_inner.size == 1:
        return groups.mesh["dp"]
    handle, device_type = groups.dp_inner.handle, groups.mesh.device_type
    return DeviceMesh.from_group(handle, device_type, mesh_dim_names=("dp_shard",))


def first_row(rows: int, ranks: int, rank: int) -> int:
    """First row of a shard as torch.chunk cuts: the last ones may be short, or empty."""
    return min(rows, -(-rows // ranks) * rank)


def _row(shape: torch.Size) -> int:
    """Elements of one row."""
    return shape[1:].numel()


def _local(parameter: nn.Parameter) -> Tensor:
    return parameter.detach().to_local()


def _segment(name: str, parameter: nn.Parameter, flat: Tensor, grad: Tensor, start: int) -> Segment:
    spec = spec_of(parameter)
    kind = (spec.decays, spec.replicated, spec.tied_lm_head)
    return Segment(flat, grad, flat, *kind, [SegmentPart(name, spec, start, flat.numel())])
