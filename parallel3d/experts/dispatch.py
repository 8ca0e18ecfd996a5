"""Sends tokens to the experts of other ranks, and returns the results, in one of two ways.

| way | a rank gets | bytes for each token, in hidden states and each direction |
|---|---|---|
| gather | the tokens of all ranks of ep | ep − 1 |
| all_to_all | each token once if it chose an expert there | (ep − 1) · p, see `share_sent` |

A rank runs its own experts on the tokens that it received and returns one sum for each; the token's
own rank adds these sums in the order of the ranks. All sizes are known from the forward: neither a
backward nor a recomputation exchanges counts or waits for the device.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from parallel3d.blueprint.dispatch import GATHER, share_sent
from parallel3d.comm import collectives
from parallel3d.comm.group import Group
from parallel3d.experts.choice import Choice, Routing, Rows, Sent, sum_of_slots

# (tokens (t, h), weights (t, slots), rows) → (t, h): the sums over this rank's experts.
RunExperts = Callable[[Tensor, Tensor, Rows], Tensor]


def dispatched(
    x: Tensor,
    routing: Routing,
    choice: Choice,
    experts: int,
    ep: Group,
    way: str,
    run: RunExperts,
) -> Tensor:
    """Returns the weighted sums of the chosen experts' results: (n, hidden) → (n, hidden).

    Args:
        choice: keeps the order of rows and the ranks of tokens for recomputation.
        experts: the number of all experts; each rank of `ep` holds equally many consecutive ones.
        run: runs this rank's experts.
    """
    local = experts // ep.size
    if ep.size == 1:
        if choice.rows is None:
            choice.rows = Rows.of_all(routing.experts, local, x.dtype)
        return run(x, routing.weights, choice.rows)
    if way == GATHER:
        return _by_gather(x, routing, choice, local, ep, run)
    return _by_all_to_all(x, routing, choice, local, ep, run)


def _local(experts: Tensor, local: int, index: int) -> Tensor:
    """Returns numbers among the `local` experts of rank `index`; `local` for the others."""
    numbers = experts - local * index
    return numbers.where((numbers >= 0) & (numbers < local), local)


def _by_gather(
    x: Tensor, routing: Routing, choice: Choice, local: int, ep: Group, run: RunExperts
) -> Tensor:
    if choice.rows is None:
        experts = collectives.all_gather(routing.experts, ep)
        local_experts = _local(experts, local, ep.index)
        choice.rows = Rows.of(local_experts, local, routing.experts.numel())
    tokens, weights = _Gather.apply(x, ep), _Gather.apply(routing.weights, ep)
    return _Scatter.apply(run(tokens, weights, choice.rows), ep)


class _Gather(torch.autograd.Function):
    """All-gathers (n, …) to (ep · n, …); the backward sums the ranks' gradients."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
        ctx.group = group
        return collectives.all_gather(x, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return collectives.reduce_scatter(grad, ctx.group), None


class _Scatter(torch.autograd.Function):
    """Reduce-scatters (ep · n, …) to (n, …)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
        ctx.group = group
        return collectives.reduce_scatter(x, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return collectives.all_gather(grad, ctx.group), None


def _by_all_to_all(
    x: Tensor, routing: Routing, choice: Choice, local: int, ep: Group, run: RunExperts
) -> Tensor:
    if choice.sent is None:
        count, chosen = routing.experts.shape
        balanced = round(count * share_sent(local * ep.size, chosen, ep.size))
        choice.sent = Sent.of(routing.experts, local, ep, balanced)
    sent = choice.sent
    if choice.rows is None:
        experts = collectives.all_to_all_rows(
            routing.experts[sent.tokens], ep, sent.given, sent.taken, sent.most
        )
        local_experts = _local(experts, local, ep.index)
        choice.rows = Rows.sorted_by(local_experts, sent.rows, sent.rows.total)
    sizes = sent.given, sent.taken, sent.most
    tokens = _Exchange.apply(_Take.apply(x, sent), ep, *sizes)
    weights = _Exchange.apply(_Take.apply(routing.weights, sent), ep, *sizes)
    results = run(tokens, weights, choice.rows)
    return _Sum.apply(_Exchange.apply(results, ep, sent.taken, sent.given, sent.most), sent)


class _Exchange(torch.autograd.Function):
    """Exchanges rows by all-to-all; the backward sends the gradients back."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, ep: Group, given: tuple[int, ...], taken: tuple[int, ...], most: int
    ) -> Tensor:
        ctx.sizes = ep, taken, given, most
        return collectives.all_to_all_rows(x, ep, given, taken, most)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None, None]:
        return collectives.all_to_all_rows(grad, *ctx.sizes), None, None, None, None


class _Take(torch.autograd.Function):
    """Copies the tokens of all messages; the backward sums each token's gradients by rank."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, sent: Sent) -> Tensor:
        ctx.sent = sent
        return x.index_select(0, sent.tokens)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return sum_of_slots(grad, ctx.sent.places), None


class _Sum(torch.autograd.Function):
    """Sums each token's results in the order of ranks; it is the adjoint of `_Take`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, sent: Sent) -> Tensor:
        ctx.sent = sent
        return sum_of_slots(x, sent.places)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad.index_select(0, ctx.sent.tokens), None
