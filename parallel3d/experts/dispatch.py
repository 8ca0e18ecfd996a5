"""Sends tokens to the experts of other ranks, and returns the results, in one of two ways.

| way | tokens that a rank receives | traffic per token and direction, in hidden states |
|---|---|---|
| gather | the tokens of all ranks of ep | ep − 1 |
| all_to_all | each token that chose an expert of the rank, once | (ep − 1) · p, see `share_sent` |

A rank runs its own experts on the tokens that it received and returns one sum for each token; the
token's own rank adds these sums in the order of the ranks. The host waits for the sizes once per
forward. Neither a backward nor a recomputed forward exchanges counts or waits for the device.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from parallel3d.blueprint.dispatch import GATHER, share_sent
from parallel3d.comm import collectives
from parallel3d.comm.collectives import Work
from parallel3d.comm.group import Group
from parallel3d.comm.turns import Turns
from parallel3d.experts.choice import Choice, Rows, Sent, sum_of_slots

# A function (tokens (t, h), weights (t, slots), rows) → (t, h) that returns each token's weighted
# sum over this rank's experts.
RunExperts = Callable[[Tensor, Tensor, Rows], Tensor]


class Order(NamedTuple):
    """The order in which this rank's experts read tokens, and the messages to other ranks.

    `sent` is None unless tokens are sent by all_to_all.
    """

    rows: Rows
    sent: Sent | None = None


def counted(
    chosen: Tensor, choice: Choice, experts: int, ep: Group, way: str, dtype: torch.dtype
) -> Callable[[], Order]:
    """Counts the rows of this rank's experts, and returns a function that waits for their order.

    Work that is launched between the two calls hides the wait. A recomputed forward finds the order
    in `choice`.

    Args:
        chosen: (n, k), the experts of each token.
        choice: the record in which the order is kept for a recomputed forward.
        experts: the number of experts in the layer, which the ranks of `ep` divide into equal
            consecutive parts.
        way: how tokens travel, `gather` or `all_to_all`.
        dtype: the dtype of the experts' GEMMs.
    """
    if choice.rows is not None:
        kept = Order(choice.rows, choice.sent)
        return lambda: kept
    find = _found(chosen, experts // ep.size, ep, way, dtype)

    def order() -> Order:
        found = find()
        choice.rows, choice.sent = found
        return found

    return order


def _found(
    chosen: Tensor, local: int, ep: Group, way: str, dtype: torch.dtype
) -> Callable[[], Order]:
    if ep.size == 1:
        rows = Rows.counted_all(chosen, local, dtype)
        return lambda: Order(rows())
    if way == GATHER:
        everyone = _local(collectives.all_gather(chosen, ep), local, ep.index)
        rows = Rows.counted(everyone, local, chosen.numel())
        return lambda: Order(rows())
    balanced = round(len(chosen) * share_sent(local * ep.size, chosen.shape[1], ep.size))
    sent = Sent.counted(chosen, local, ep, balanced)

    def order() -> Order:
        found = sent()
        sizes = found.given, found.taken, found.most
        experts = collectives.all_to_all_rows(chosen[found.tokens], ep, *sizes)
        experts = _local(experts, local, ep.index)
        return Order(Rows.sorted_by(experts, found.rows, found.rows.total), found)

    return order


def dispatched(
    x: Tensor,
    weights: Tensor,
    order: Order,
    ep: Group,
    run: RunExperts,
    turns: Turns | None = None,
) -> Tensor:
    """Returns the weighted sums of the chosen experts' results: (n, hidden) → (n, hidden).

    Args:
        weights: (n, k), the weights of the chosen experts.
        order: the result of the function that `counted` returned.
        run: the function that runs this rank's experts.
        turns: lets another micro-batch compute while tokens are in flight; None: there is no other.
    """
    if ep.size == 1:
        return run(x, weights, order.rows)
    if order.sent is None:
        tokens, weights = _Gather.apply(x, ep, turns), _Gather.apply(weights, ep, None)
        return _Scatter.apply(run(tokens, weights, order.rows), ep, turns)
    sent = order.sent
    sizes = sent.given, sent.taken, sent.most
    tokens = _Exchange.apply(_Take.apply(x, sent), turns, ep, *sizes)
    weights = _Exchange.apply(_Take.apply(weights, sent), None, ep, *sizes)
    results = run(tokens, weights, order.rows)
    sizes = sent.taken, sent.given, sent.most
    return _Sum.apply(_Exchange.apply(results, turns, ep, *sizes), sent)


def _arrived(sending: tuple[Tensor, Work], turns: Turns | None) -> Tensor:
    """Waits for data in flight and returns it; with `turns`, another micro-batch computes first."""
    out, work = sending
    if turns is not None:
        turns.pass_on()
    work.wait()
    return out


def _local(experts: Tensor, local: int, index: int) -> Tensor:
    """Renumbers the experts of rank `index` from 0; experts of other ranks become `local`."""
    numbers = experts - local * index
    return numbers.where((numbers >= 0) & (numbers < local), local)


class _Gather(torch.autograd.Function):
    """All-gathers (n, …) to (ep · n, …); the backward reduce-scatters the gradients."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group, turns: Turns | None) -> Tensor:
        ctx.group = group
        ctx.turns = turns
        return _arrived(collectives.all_gather_async(x, group), turns)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        sending = collectives.reduce_scatter_async(grad, ctx.group)
        return _arrived(sending, ctx.turns), None, None


class _Scatter(torch.autograd.Function):
    """Reduce-scatters (ep · n, …) to (n, …); the backward all-gathers the gradients."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group, turns: Turns | None) -> Tensor:
        ctx.group = group
        ctx.turns = turns
        return _arrived(collectives.reduce_scatter_async(x, group), turns)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return _arrived(collectives.all_gather_async(grad, ctx.group), ctx.turns), None, None


class _Exchange(torch.autograd.Function):
    """Exchanges rows by all-to-all; the backward sends the gradients back."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        turns: Turns | None,
        ep: Group,
        given: tuple[int, ...],
        taken: tuple[int, ...],
        most: int,
    ) -> Tensor:
        ctx.turns = turns
        ctx.sizes = ep, taken, given, most
        return _arrived(collectives.all_to_all_rows_async(x, ep, given, taken, most), turns)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        sending = collectives.all_to_all_rows_async(grad, *ctx.sizes)
        return _arrived(sending, ctx.turns), None, None, None, None, None


class _Take(torch.autograd.Function):
    """Copies each message's token; the backward sums a token's gradients in order of the ranks."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, sent: Sent) -> Tensor:
        ctx.sent = sent
        return x.index_select(0, sent.tokens)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return sum_of_slots(grad, ctx.sent.places), None


class _Sum(torch.autograd.Function):
    """Sums each token's results in the order of the ranks; it is the adjoint of `_Take`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, sent: Sent) -> Tensor:
        ctx.sent = sent
        return sum_of_slots(x, sent.places)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad.index_select(0, ctx.sent.tokens), None
