"""Assembles full parameters from the shards of all ranks."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import fields
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from parallel3d.comm.exchange import all_gather_json, dtype_of, messages, transfer
from parallel3d.parameters.copies import copy_groups
from parallel3d.parameters.spec import ShardSpec
from parallel3d.parameters.state import spec_of, state_of

if TYPE_CHECKING:
    from parallel3d.comm.process_groups import ProcessGroups

MESSAGE_BYTES = 1 << 26  # small shards are sent together, up to this size
FIELDS = tuple(field.name for field in fields(ShardSpec))


def owned_shards(
    parameters: Iterable[nn.Parameter], groups: ProcessGroups
) -> list[tuple[ShardSpec, Tensor]]:
    """Returns the shards that this rank owns; each shard of the model has exactly one owner.

    The owner is the first rank that holds a copy. If FSDP2 shards the parameters, this is
    collective over dp.
    """
    shards: list[tuple[ShardSpec, Tensor]] = []
    for parameter in parameters:
        spec, local = spec_of(parameter), full_local_parameter(parameter)
        copies = copy_groups(spec, groups)
        own = [shard for shard in spec.shards if copies.of(spec, shard).is_first]
        shards += [(shard, shard.of_local(local)) for shard in own]
    return shards


def full_local_parameter(parameter: nn.Parameter) -> Tensor:
    """Returns this rank's local parameter; collective over dp if FSDP2 shards it."""
    local = parameter.detach()
    full_tensor: Callable[[], Tensor] | None = getattr(local, "full_tensor", None)
    return local if full_tensor is None else full_tensor().to(state_of(parameter).compute_dtype)


def gather_shards(
    parameters: Iterable[nn.Parameter], groups: ProcessGroups
) -> list[tuple[int, ShardSpec, Tensor]]:
    """Returns (rank, shard, CPU tensor) of all shards on rank 0 and [] elsewhere; collective.

    A shard that several ranks hold is returned once for each of them.
    """
    held = [(spec_of(p), full_local_parameter(p)) for p in parameters]
    shards = [(shard, shard.of_local(local)) for spec, local in held for shard in spec.shards]
    return _gather(shards, held[0][1].device, groups)


def _gather(
    shards: list[tuple[ShardSpec, Tensor]], device: torch.device, groups: ProcessGroups
) -> list[tuple[int, ShardSpec, Tensor]]:
    """Returns (rank, shard, CPU tensor) of all given shards on rank 0, else []; collective.

    Ranks send specs and dtypes as JSON, then the values as bytes, one rank after another. NCCL only
    sends device memory, so values pass through rank 0's device, one message at a time.
    """
    # `dataclasses.astuple` would make deep copies.
    facts = [[[getattr(spec, f) for f in FIELDS], str(values.dtype)] for spec, values in shards]
    by_rank = all_gather_json(facts, groups.world.handle, device)
    if groups.rank > 0:
        assert groups.world.handle is not None
        sizes = [values.nbytes for _, values in shards]
        for span in messages(sizes, MESSAGE_BYTES):
            parts = [shards[i][1].reshape(-1).view(torch.uint8) for i in span]
            flat = torch.cat(parts) if len(parts) > 1 else parts[0]
            transfer(dist.isend, flat, 0, groups.world.handle)
        return []
    found = [(groups.rank, spec, values.to("cpu").contiguous()) for spec, values in shards]
    for rank in range(1, groups.world.size):
        assert groups.world.handle is not None
        specs = [(_shard_spec(fact), dtype_of(name)) for fact, name in by_rank[rank]]
        sizes = [math.prod(spec.shape) * dtype.itemsize for spec, dtype in specs]
        for span in messages(sizes, MESSAGE_BYTES):
            flat = torch.empty(sum(sizes[i] for i in span), dtype=torch.uint8, device=device)
            transfer(dist.irecv, flat, rank, groups.world.handle)
            parts = flat.cpu().split([sizes[i] for i in span])
            for (spec, dtype), part in zip((specs[i] for i in span), parts, strict=True):
                # A copy is aligned for its dtype, whatever came before it in the message.
                found.append((rank, spec, part.clone().view(dtype).view(spec.shape)))
    return found


def _shard_spec(values: Sequence[Any]) -> ShardSpec:
    given: list[Any] = [tuple(value) if isinstance(value, list) else value for value in values]
    return ShardSpec(*given)


def gather_parameters(
    parameters: Iterable[nn.Parameter], groups: ProcessGroups
) -> dict[str, Tensor]:
    """Returns full, unpadded CPU tensors by name on rank 0 and an empty dict elsewhere; collective.

    Raises:
        RuntimeError: the shards do not cover a tensor exactly once.
    """
    parameters = list(parameters)
    full: dict[str, Tensor] = {}
    covered: dict[str, Tensor] = {}
    # A stage of blocks without parameters has none to ask.
    device = parameters[0].device if parameters else groups.device
    for _, spec, values in _gather(owned_shards(parameters, groups), device, groups):
        if spec.name not in full:
            full[spec.name] = torch.empty(spec.full_shape, dtype=values.dtype)
            covered[spec.name] = torch.zeros(spec.full_shape, dtype=torch.int8)
        spec.of_full(full[spec.name]).copy_(values)
        spec.of_full(covered[spec.name]).add_(1)
    for name, times in covered.items():
        if not bool((times == 1).all()):
            raise RuntimeError(f"the ranks' shards do not cover {name} exactly once")
    return full
