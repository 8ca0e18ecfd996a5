"""Asynchronous tensor parallelism: the sequence is gathered and scattered piece by piece.

Under sequence parallelism a GEMM stands behind an all-gather, or in front of a reduce-scatter, of
its own data, so the two cannot run side by side as they are. Cut into pieces of the sequence they
can: piece i + 1 travels while the GEMM of piece i runs (Wang et al. 2023, "Overlap Communication
with Dependent Computation via Decomposition in Large Deep Learning Models"). The backward of a
column-parallel layer needs no pieces: its two GEMMs hide its two collectives as they are.

A piece of an (s/tp) shard has s/(tp·chunks) tokens, and gathered it holds such a run of every rank:

    sequence    |  rank 0: a0 a1 a2 a3  |  rank 1: b0 b1 b2 b3  |
    chunks=2       piece 0: a0 a1 b0 b1    piece 1: a2 a3 b2 b3

so its results go to tp places of the whole. Sums over ranks are those of one piece, element by
element and in the same order.
"""

from __future__ import annotations

import torch
from torch import Tensor

from parallel3d.comm import collectives
from parallel3d.comm.collectives import CompletedWork, Work
from parallel3d.comm.group import Group
from parallel3d.device.products import linear
from parallel3d.tensor_parallel.mappings import (
    all_gather_sequence,
    reduce_scatter_sequence,
    sequence_first,
)


def gather_linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    group: Group,
    chunks: int,
    *,
    keep: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """All-gather along the sequence, then x·Wᵀ + b: (b, s/tp, in) → (b, s, out).

    `chunks`: pieces of the sequence; 1: the communication and the GEMM one after the other.

    Returns: the result and, with `keep`, the gathered x (b, s, in).
    """
    if chunks > 1:
        return _gather_linear_in_pieces(x, weight, bias, group, chunks, keep)
    full = all_gather_sequence(x, group)
    return linear(full, weight, bias), full if keep else None


def linear_scatter(x: Tensor, weight: Tensor, group: Group, chunks: int) -> Tensor:
    """x·Wᵀ, summed over the ranks and scattered along the sequence: (b, s, in) → (b, s/tp, out)."""
    if chunks > 1:
        return _linear_scatter_in_pieces(x, weight, group, chunks)
    return reduce_scatter_sequence(linear(x, weight), group)


def _gather_linear_in_pieces(
    x: Tensor, weight: Tensor, bias: Tensor | None, group: Group, chunks: int, keep: bool
) -> tuple[Tensor, Tensor | None]:
    batch, local, inputs = x.shape
    places = (batch, group.size, chunks, local // chunks)
    y = x.new_empty(*places, weight.shape[0])
    full = x.new_empty(*places, inputs) if keep else None
    pieces = sequence_first(x).chunk(chunks)
    gathered, gathering = collectives.all_gather_async(pieces[0], group)
    for i in range(chunks):
        gathering.wait()
        piece = gathered
        if i + 1 < chunks:  # travels while the GEMM of this piece runs
            gathered, gathering = collectives.all_gather_async(pieces[i + 1], group)
        _put(linear(piece, weight, bias), y, i)
        if full is not None:
            _put(piece, full, i)
    return y.flatten(1, 3), None if full is None else full.flatten(1, 3)


def _linear_scatter_in_pieces(x: Tensor, weight: Tensor, group: Group, chunks: int) -> Tensor:
    whole = x.unflatten(1, (group.size, chunks, -1))
    scattered: list[Tensor] = []
    reducing: Work = CompletedWork()
    for i in range(chunks):
        y = linear(_take(whole, i), weight)  # runs while the piece before is summed
        reducing.wait()
        part, reducing = collectives.reduce_scatter_async(y, group)
        scattered.append(part)
    reducing.wait()
    return torch.cat(scattered).transpose(0, 1).contiguous()


def _take(whole: Tensor, i: int) -> Tensor:
    """Piece i of (b, tp, chunks, c, features) as collectives want it: (tp · c, b, features)."""
    return whole[:, :, i].permute(1, 2, 0, 3).flatten(0, 1)


def _put(piece: Tensor, whole: Tensor, i: int) -> None:
    """The reverse of `_take`."""
    whole[:, :, i] = piece.unflatten(0, (whole.shape[1], whole.shape[3])).permute(2, 0, 1, 3)
