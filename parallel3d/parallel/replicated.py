"""Keeps parameters equal that all tensor-parallel ranks hold."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from parallel3d.comm import collectives
from parallel3d.comm.exchange import all_gather_json
from parallel3d.comm.group import Group, GroupLike, group_of
from parallel3d.errors import UserError
from parallel3d.tensor_parallel.layers import ShardedModule
from parallel3d.tensor_parallel.mappings import reduce_from_tensor_parallel


@dataclass(frozen=True)
class _Sum:
    """All-reduces a gradient over a group, as a hook of its parameter."""

    group: Group

    def __call__(self, grad: Tensor) -> Tensor:
        whole = grad.clone(memory_format=torch.contiguous_format)
        return reduce_from_tensor_parallel(whole, self.group)


def sum_gradients_over(module: nn.Module, group: GroupLike = None) -> None:
    """All-reduces the gradients of `module`'s parameters over `group` in every backward.

    For a module whose parameters all ranks hold, but which sees only this rank's features: a norm
    of queries and keys between a `ColumnParallelLinear` and a `RowParallelLinear`. Each rank then
    has the gradient of its own heads only. Each gradient is summed once a backward, before anything
    else reads it (`DistributedDataParallel` included).

    Call it once, before the first backward. Backwards are then collective over `group`.

    Raises:
        UserError: a parameter of a tensor-parallel layer, or one that is summed already or under
            `fully_shard`; no parameter that requires a gradient. Nothing is changed then.
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
        if hasattr(parameter, "placements"):
            raise UserError(
                f"sum_gradients_over: {name} is under fully_shard, which must not be: it takes "
                "gradients past hooks; sum parameter.grad.to_local() over the group after the last "
                "backward instead"
            )
        if any(isinstance(hook, _Sum) for hook in (parameter._backward_hooks or {}).values()):
            raise UserError(
                f"sum_gradients_over: {name} is summed over a group already; call it once for each "
                "module"
            )
    if ranks.size > 1:
        for _, parameter in named:
            parameter.register_hook(_Sum(ranks))


def check_replicated(module: nn.Module, group: GroupLike = None, tolerance: float = 0.0) -> None:
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
        device, mine = parameter.device, parameter.detach()
        if hasattr(mine, "to_local"):  # under `fully_shard`: this rank's rows, as on the others
            mine = mine.to_local()
        first = mine.clone(memory_format=torch.contiguous_format)
        collectives.broadcast(first, 0, ranks)
        off = float((mine - first).abs().max()) if first.numel() else 0.0
        if found is None and first.numel() and not off <= tolerance * float(first.abs().max()):
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
        specs = part.specs(part.group.index) if isinstance(part, ShardedModule) else {}
        for name, parameter in part.named_parameters(prefix, recurse=False):
            spec = specs.get(name.removeprefix(f"{prefix}."))
            if spec is None or spec.replicated:
                yield name, parameter
