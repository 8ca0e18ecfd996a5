"""Keeps replicas equal: pipelines over dp, and parameters that all tensor-parallel ranks hold."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn

from parallel3d.comm import collectives
from parallel3d.comm.exchange import all_gather_json
from parallel3d.comm.process_groups import Group
from parallel3d.errors import UserError
from parallel3d.parallel.ddp.transport import broadcast_all
from parallel3d.parallel.groups import group_of
from parallel3d.parallel.linear import ShardedModule
from parallel3d.tensor_parallel.mappings import reduce_from_tensor_parallel

BUCKET_BYTES = 25 << 20


def start_equal(module: nn.Module, dp: Group) -> None:
    """Broadcasts parameters and buffers of the group's first rank; collective."""
    tensors = [p.detach() for p in module.parameters()] + list(module.buffers())
    if dp.size > 1 and tensors:
        broadcast_all(tensors, 0, dp)


@torch.no_grad()
def average_gradients(parameters: Sequence[nn.Parameter], dp: Group) -> None:
    """Averages each `.grad` over the replicas that have it, in buckets; collective."""
    if dp.size == 1:
        return
    sent = [(bucket, *_start(bucket, dp)) for bucket in _buckets(parameters)]
    for _, flat, work in sent:
        work.wait()
        flat /= dp.size
    if any(p.grad is None for bucket, _, _ in sent for p in bucket):
        # Reading the flags makes the host wait. A replica with all gradients needs no flags.
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


def _start(bucket: Sequence[nn.Parameter], dp: Group) -> tuple[Tensor, collectives.Work]:
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


@dataclass(frozen=True)
class _Sum:
    """All-reduces a gradient over a group, as a hook of its parameter."""

    group: Group

    def __call__(self, grad: Tensor) -> Tensor:
        whole = grad.clone(memory_format=torch.contiguous_format)
        return reduce_from_tensor_parallel(whole, self.group)


def sum_gradients_over(module: nn.Module, group: Group | dist.ProcessGroup | None = None) -> None:
    """All-reduces the gradients of `module`'s parameters over `group` in every backward.

    For a module whose parameters all ranks hold, but which sees only this rank's features: a norm
    of queries and keys between a `ColumnParallelLinear` and a `RowParallelLinear`. Each rank then
    has the gradient of its own heads only. Each gradient is summed once a backward, before anything
    else reads it (`DistributedDataParallel` included).

    Call it once, before the first backward. Backwards are then collective over `group`.

    Raises:
        UserError: a parameter of a tensor-parallel layer, or one that is summed already; no
            parameter that requires a gradient. Nothing is changed then.
    """
    ranks = group_of(group)
    split = {
        id(p)
        for part in module.modules()
        if isinstance(part, ShardedModule)
        for p in part.parameters()
    }
    named = [(name, p) for name, p in module.named_parameters() if p.requires_grad]
    if not named:
        raise UserError(
            "sum_gradients_over(module) must have a parameter that requires a gradient; name the "
            "module between the two layers"
        )
    for name, parameter in named:
        if id(parameter) in split:
            raise UserError(
                f"sum_gradients_over: {name} belongs to a tensor-parallel layer, whose gradient is "
                "whole already; name the modules between the two layers alone"
            )
        if any(isinstance(hook, _Sum) for hook in (parameter._backward_hooks or {}).values()):
            raise UserError(
                f"sum_gradients_over: {name} is summed over a group already; call it once for each "
                "module"
            )
    if ranks.size > 1:
        for _, parameter in named:
            parameter.register_hook(_Sum(ranks))


def check_replicated(
    module: nn.Module, group: Group | dist.ProcessGroup | None = None, tolerance: float = 0.0
) -> None:
    """Compares the parameters that all ranks of `group` hold. Collective; costs a broadcast.

    Shards of tensor-parallel layers are left out. Replicas whose gradients are partial (see
    `sum_gradients_over`) differ from the first optimizer step on.

    Args:
        tolerance: of the largest difference, over the largest value of the parameter.

    Raises:
        RuntimeError: on every rank alike, the first parameter that differs and by how much.
    """
    ranks = group_of(group)
    found: tuple[str, float] | None = None
    device = torch.device("cpu")
    for name, parameter in _replicated_parameters(module):
        device = parameter.device
        first = parameter.detach().clone(memory_format=torch.contiguous_format)
        collectives.broadcast(first, 0, ranks)
        off = float((parameter.detach() - first).abs().max()) if first.numel() else 0.0
        if found is None and not off <= tolerance * float(first.abs().max()):
            found = (name, off)
    if ranks.size == 1:
        return
    for rank, theirs in zip(ranks.ranks, all_gather_json(found, ranks.handle, device), strict=True):
        if theirs:
            raise RuntimeError(
                f"parameter {theirs[0]} differs by {theirs[1]:.3g} between ranks {ranks.ranks[0]} "
                f"and {rank}, which must hold the same; if it stands between a "
                "ColumnParallelLinear and a RowParallelLinear, call sum_gradients_over for it"
            )


def _replicated_parameters(module: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    for prefix, part in module.named_modules():
        for name, parameter in part.named_parameters(prefix, recurse=False):
            key = name.removeprefix(f"{prefix}.")
            if not (
                isinstance(part, ShardedModule)
                and part.shards[key].shape != part.shards[key].full_shape
            ):
                yield name, parameter
