"""Assembles the logical full parameters from the boxes that the ranks hold."""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import fields
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from parallel3d.comm.exchange import gather_json, transfer
from parallel3d.comm.process_groups import ProcessGroups
from parallel3d.parameters.sharding import ShardSpec

MESSAGE_BYTES = 1 << 26  # small boxes travel together
# All fields of a piece, without the deep copies of `dataclasses.astuple`.
_fields = operator.attrgetter(*(field.name for field in fields(ShardSpec)))


def owned_boxes(
    parameters: Iterable[nn.Parameter], groups: ProcessGroups
) -> list[tuple[ShardSpec, Tensor]]:
    """The boxes that this rank speaks for: each box of the model is owned by exactly one rank.

    Of data-parallel replicas the first, of values that several tp ranks hold the first of them, of
    a tied table the first stage. Collective over dp where parameters are sharded over it.
    """
    boxes = []
    for parameter in parameters:
        spec, local = parameter.spec, local_parameter(parameter)
        if groups.dp.index > 0 or spec.tied_lm_head or (spec.replicated and groups.tp.index > 0):
            continue
        own = [piece for piece in spec.pieces if groups.tp.index % piece.copies == 0]
        boxes += [(piece, piece.of_local(local)) for piece in own]
    return boxes


def local_parameter(parameter: nn.Parameter) -> Tensor:
    """What this rank holds of the model in a parameter, in the type that the model reads.

    Gathers what FSDP2 shards over dp, and is collective there.
    """
    local = parameter.detach()
    return local.full_tensor().to(parameter.read_as) if hasattr(local, "full_tensor") else local


def gather_boxes(
    parameters: Iterable[nn.Parameter], groups: ProcessGroups
) -> list[tuple[int, ShardSpec, Tensor]]:
    """Every box that any rank holds, replicas and copies too: (rank, box, CPU tensor) on rank 0,
    an empty list elsewhere; collective."""
    held = [(p.spec, local_parameter(p)) for p in parameters]
    boxes = [(piece, piece.of_local(local)) for spec, local in held for piece in spec.pieces]
    return _gather(boxes, held[0][1].device, groups)


def _gather(
    boxes: list[tuple[ShardSpec, Tensor]], device: torch.device, groups: ProcessGroups
) -> list[tuple[int, ShardSpec, Tensor]]:
    """Each rank says in JSON what it holds; the values follow as bare bytes, rank by rank.

    NCCL knows the memory of devices alone, so rank 0's holds one message of the others at a time.
    """
    facts = [[_fields(piece), str(box.dtype)] for piece, box in boxes]
    by_rank = gather_json(facts, groups.world.handle, device)
    if groups.rank > 0:
        sizes = [box.nbytes for _, box in boxes]
        for span in messages(sizes):
            parts = [boxes[i][1].reshape(-1).view(torch.uint8) for i in span]
            flat = torch.cat(parts) if len(parts) > 1 else parts[0]
            transfer(dist.isend, flat, 0, groups.world.handle)
        return []
    found = [(groups.rank, piece, box.to("cpu").contiguous()) for piece, box in boxes]
    for rank in range(1, groups.world.size):
        kinds = [(_piece(told), _dtype(word)) for told, word in by_rank[rank]]
        sizes = [math.prod(piece.shape) * dtype.itemsize for piece, dtype in kinds]
        for span in messages(sizes):
            flat = torch.empty(sum(sizes[i] for i in span), dtype=torch.uint8, device=device)
            transfer(dist.irecv, flat, rank, groups.world.handle)
            parts = flat.cpu().split([sizes[i] for i in span])
            for (piece, dtype), part in zip((kinds[i] for i in span), parts, strict=True):
                # A copy of its own: aligned for its type, whatever came before it.
                found.append((rank, piece, part.clone().view(dtype).view(piece.shape)))
    return found


def messages(sizes: Sequence[int]) -> Iterator[range]:
    """Boxes of these bytes that travel together: up to `MESSAGE_BYTES`, a larger one alone."""
    first, total = 0, 0
    for i, size in enumerate(sizes):
        if i > first and total + size > MESSAGE_BYTES:
            yield range(first, i)
            first, total = i, 0
        total += size
    if sizes:
        yield range(first, len(sizes))


def _piece(told: Sequence[Any]) -> ShardSpec:
    """What JSON has made of a piece's fields, its tuples lists."""
    return ShardSpec(*(tuple(field) if isinstance(field, list) else field for field in told))


def _dtype(word: str) -> torch.dtype:
    return getattr(torch, word.removeprefix("torch."))


def gather_parameters(
    parameters: Iterable[nn.Parameter], groups: ProcessGroups
) -> dict[str, Tensor]:
    """Logical name → full, unpadded CPU tensor on rank 0, an empty dict elsewhere; collective.

    For models that fit rank 0's memory: comparison and export of small ones.

    Raises:
        RuntimeError: the boxes do not cover a tensor exactly once.
    """
    parameters = list(parameters)
    full: dict[str, Tensor] = {}
    covered: dict[str, Tensor] = {}
    for _, piece, box in _gather(owned_boxes(parameters, groups), parameters[0].device, groups):
        if piece.name not in full:
            full[piece.name] = torch.empty(piece.full_shape, dtype=box.dtype)
            covered[piece.name] = torch.zeros(piece.full_shape, dtype=torch.int8)
        piece.of_full(full[piece.name]).copy_(box)
        piece.of_full(covered[piece.name]).add_(1)
    for name, times in covered.items():
        if not bool((times == 1).all()):
            raise RuntimeError(f"the ranks' boxes do not cover {name} exactly once")
    return full
