"""Assembles the logical full parameters from the boxes that the ranks hold."""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor, nn

from parallel3d.tensor_parallel.parameters import Piece
from parallel3d.topology.process_groups import ProcessGroups


def owned_boxes(
    parameters: Iterable[nn.Parameter], groups: ProcessGroups
) -> list[tuple[Piece, Tensor]]:
    """The boxes that this rank speaks for: each box of the model is owned by exactly one rank.

    Of data-parallel replicas the first, of values that several tp ranks hold the first of them, of
    a tied table the first stage. Collective over dp where parameters are sharded over it.
    """
    boxes = []
    for parameter in parameters:
        spec, local = parameter.spec, local_parameter(parameter)
        if groups.dp.index > 0 or spec.tied_copy or (spec.replicated and groups.tp.index > 0):
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
) -> list[tuple[int, Piece, Tensor]]:
    """Every box that any rank holds, replicas and copies too: (rank, box, CPU tensor) on rank 0,
    an empty list elsewhere; collective."""
    held = [(p.spec, local_parameter(p)) for p in parameters]
    boxes = [(piece, piece.of_local(local)) for spec, local in held for piece in spec.pieces]
    return _gather(boxes, groups)


def _gather(
    boxes: list[tuple[Piece, Tensor]], groups: ProcessGroups
) -> list[tuple[int, Piece, Tensor]]:
    mine = [(groups.rank, piece, box.to("cpu").contiguous()) for piece, box in boxes]
    if groups.world.size == 1:
        return mine
    everyone: list[list | None] = [None] * groups.world.size
    dist.gather_object(mine, everyone if groups.rank == 0 else None)
    return [item for items in everyone for item in items] if groups.rank == 0 else []


def gather_parameters(
    parameters: Iterable[nn.Parameter], groups: ProcessGroups
) -> dict[str, Tensor]:
    """Logical name → full, unpadded CPU tensor on rank 0, an empty dict elsewhere; collective.

    For models that fit rank 0's memory: comparison and export of small ones.

    Raises:
        RuntimeError: the boxes do not cover a tensor exactly once.
    """
    full: dict[str, Tensor] = {}
    covered: dict[str, Tensor] = {}
    for _, piece, box in _gather(owned_boxes(parameters, groups), groups):
        if piece.name not in full:
            full[piece.name] = torch.empty(piece.full_shape, dtype=box.dtype)
            covered[piece.name] = torch.zeros(piece.full_shape, dtype=torch.int8)
        piece.of_full(full[piece.name]).copy_(box)
        piece.of_full(covered[piece.name]).add_(1)
    for name, times in covered.items():
        if not bool((times == 1).all()):
            raise RuntimeError(f"the ranks' boxes do not cover {name} exactly once")
    return full
