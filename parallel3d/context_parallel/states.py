"""Hands states from piece to piece of sequences that are split over context-parallel ranks.

A layer with a state S reads a sequence from its first token to its last. Where tokens act on the
state as S ← M·S + S', as in linear attention, no rank waits for another: each computes M and S' of
its pieces from a zero state, one all-gather gives every rank those of all pieces, and each takes
the states before its own pieces from a prefix in the order of the sequence. In the backward the
gradient of the state does dS ← Mᵀ·dS + dS', from the last piece to the first. A rank sends

| forward                                        | backward |
|------------------------------------------------|----------|
| all-gather: (cp − 1) · p · b · heads · (K + V) | the same |

bytes in fp32 or better, for p pieces of each of b sequences, the bytes K of M (dk · dk) and V of S'
(dk · dv). They do not grow with the length of the sequence. If a document begins within a piece, M
is 0.

A layer that reads a few tokens before each token, such as a convolution, gets those before each
piece by another all-gather, whose backward is a reduce-scatter.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from parallel3d.comm import collectives
from parallel3d.comm.group import Group
from parallel3d.context_parallel.attention import ContextParallel
from parallel3d.context_parallel.documents import Pieces
from parallel3d.device.fused import operator, registered


def states_before(move: Tensor, add: Tensor, pieces: Pieces, group: Group) -> Tensor:
    """Returns the state before each of this rank's pieces (b · p, heads, dk, dv).

    Args:
        move: (b · p, heads, dk, dk), the matrix M of each piece.
        add: (b · p, heads, dk, dv), its S'.
    """
    moves, adds = _of_all(move, add, pieces, group)
    state, found = torch.zeros_like(adds[0]), []
    for of_piece, added in zip(moves, adds, strict=True):
        found.append(state)
        state = torch.baddbmm(added, of_piece, state)
    return _of_own(found, pieces, add)


def gradients_after(move: Tensor, add: Tensor, pieces: Pieces, group: Group) -> Tensor:
    """Returns the gradient of the state after each of this rank's pieces (b · p, heads, dk, dv).

    Args:
        move: as in `states_before`.
        add: (b · p, heads, dk, dv), the gradient of the state before each piece if that of the
            state after it is 0.
    """
    moves, adds = _of_all(move, add, pieces, group)
    grad, found = torch.zeros_like(adds[0]), []
    for of_piece, added in zip(moves[::-1], adds[::-1], strict=True):
        found.append(grad)
        grad = torch.baddbmm(added, of_piece.mT, grad)
    return _of_own(found[::-1], pieces, add)


def _of_all(
    move: Tensor, add: Tensor, pieces: Pieces, group: Group
) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
    """Gathers M and S' (b · heads, dk, …) of all pieces, in the order of the sequence."""
    both = torch.cat((move, add), dim=-1).unflatten(0, (-1, pieces.number))
    everyone = collectives.all_gather(both.unsqueeze(0), group)
    ordered = in_sequence_order(everyone, pieces).flatten(1, 2)
    moves, adds = ordered.split((move.shape[-1], add.shape[-1]), dim=-1)
    return moves.unbind(), adds.unbind()


def in_sequence_order(by_rank: Tensor, pieces: Pieces) -> Tensor:
    """Returns what belongs to pieces (size, b, p, …) in their order (size · p, b, …)."""
    places = pieces.order.T
    rows = torch.arange(places.shape[1], device=places.device)
    return by_rank.transpose(1, 2).flatten(0, 1)[places, rows]


def _of_own(found: list[Tensor], pieces: Pieces, like: Tensor) -> Tensor:
    """Returns those of the results for all pieces that belong to this rank's pieces."""
    every = torch.stack(found).unflatten(1, (len(pieces.own), like.shape[1]))
    return every[pieces.own, _rows(pieces.own)].flatten(0, 1)


def tokens_before(x: Tensor, few: int, cp: ContextParallel, pieces: Pieces) -> Tensor:
    """Returns the `few` tokens before each of this rank's pieces (b · p, few, width).

    They are 0 before the first piece of a sequence. `x` has this rank's tokens (b, n, width).
    """
    if few == 0:
        return x.new_empty(pieces.own.numel(), 0, x.shape[2])
    return _tokens_before(x, cp.handle, pieces.order, pieces.own, few, x.shape[1])


def _tails(x: Tensor, handle: Tensor, order: Tensor, own: Tensor, few: int, tokens: int) -> Tensor:
    pieces = Pieces(order, own)
    tails = x.unflatten(1, (pieces.number, -1))[:, :, -few:]
    everyone = collectives.all_gather(tails.unsqueeze(0), registered(handle).group)
    ordered = in_sequence_order(everyone, pieces).transpose(0, 1).flatten(1, 2)
    before = F.pad(ordered, (0, 0, few, 0))
    return before[_before(own, few, tails.shape[2])].flatten(0, 1)


def _before(own: Tensor, few: int, tails: int) -> tuple[Tensor, Tensor]:
    """Returns the rows and the places (b, p, few) of the tokens before pieces.

    They are among `few` zeros, followed by the last `tails` tokens of each piece.
    """
    places = (own * tails).unsqueeze(-1) + torch.arange(few, device=own.device)
    return _rows(own).unsqueeze(-1), places


def _tails_shape(
    x: Tensor, handle: Tensor, order: Tensor, own: Tensor, few: int, tokens: int
) -> Tensor:
    return x.new_empty(own.numel(), few, x.shape[2])


def _tails_backward(
    grad: Tensor, handle: Tensor, order: Tensor, own: Tensor, few: int, tokens: int
) -> Tensor:
    group, (b, every), width = registered(handle).group, order.shape, grad.shape[-1]
    found = grad.new_zeros(b, own.shape[1], tokens // own.shape[1], width)
    tails = found[:, :, -few:].shape[2]
    of_before = grad.new_zeros(b, few + every * tails, width)
    # A token is before several pieces only if pieces are shorter than `few`.
    places, shared = _before(own, few, tails), tails < few
    of_before.index_put_(places, grad.unflatten(0, (b, -1)), accumulate=shared)
    ordered = of_before[:, few:].unflatten(1, (every, tails))
    by_rank = ordered[_rows(own), order.argsort(dim=1)]
    by_rank = by_rank.unflatten(1, (group.size, -1)).transpose(0, 1)
    found[:, :, -few:] = collectives.reduce_scatter(by_rank, group).squeeze(0)
    return found.flatten(1, 2)


def _tails_backward_shape(
    grad: Tensor, handle: Tensor, order: Tensor, own: Tensor, few: int, tokens: int
) -> Tensor:
    return grad.new_empty(len(own), tokens, grad.shape[-1])


_tokens_before = operator(
    "tokens_before",
    "Tensor x",
    "Tensor handle, Tensor order, Tensor own, int few, int tokens",
    _tails,
    _tails_shape,
    _tails_backward,
    _tails_backward_shape,
)


def _rows(own: Tensor) -> Tensor:
    return torch.arange(len(own), device=own.device).unsqueeze(1)
