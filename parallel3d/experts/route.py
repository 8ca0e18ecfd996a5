"""Brings a micro-batch's tokens to their experts and back: the exchange of expert parallelism.

| way | tokens that a rank receives | traffic per token and direction, in hidden states |
|---|---|---|
| gather | the tokens of all ranks of ep | ep − 1 |
| all_to_all | each token that chose an expert of the rank, once | (ep − 1) · p, see `share_sent` |

A rank runs its own experts on the tokens that it received and returns one sum for each token; the
token's own rank adds these sums in the order of the ranks. The host waits for the sizes once per
forward. Neither a backward nor a recomputed forward exchanges counts or waits for the device.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from parallel3d.blueprint.dispatch import GATHER, load_of_tokens, share_sent
from parallel3d.comm import collectives
from parallel3d.comm.batch_overlap import BatchOverlap
from parallel3d.comm.collectives import Work
from parallel3d.comm.group import SINGLE, Group
from parallel3d.device.grouped import Groups
from parallel3d.experts.rows import (
    HostCounts,
    LocalRowCounts,
    RowCounts,
    Rows,
    counts_of,
    evenly,
    sum_of_slots,
)

# A function (tokens (t, h), weights (t, slots), rows) → (t, h) that returns each token's weighted
# sum over this rank's experts.
RunExperts = Callable[[Tensor, Tensor, Rows], Tensor]


class PendingRows(Protocol):
    """Counts on their way to the host, from which the order of the rows follows."""

    def rows(self) -> Rows:
        """Waits for the counts, and returns the rows of this rank's experts."""
        ...


class TokenRoute(ABC):
    """The route of n tokens of a micro-batch through a layer of experts, in steps.

    1. The router chooses the experts and sets `experts`.
    2. `start` begins to count the rows of this rank's experts.
    3. Work that is launched here hides the wait for the counts.
    4. `run` waits, sends the tokens, runs the experts, and returns the sums of their results.

    Each micro-batch has a route of its own in each layer, because several micro-batches may be
    between their forward and their backward. All of this is decided once: a recomputed forward gets
    the same route, chooses and counts nothing, and sends the tokens in the same messages.

    Args:
        experts: the number of experts in the layer, which the ranks of `ep` divide into equal
            consecutive parts.
        overlap: lets another micro-batch compute while tokens are in flight; None without one.
        load: number of rows of this rank's experts, relative to the mean over the ranks of `ep`, if
            the tensors have no values.

    Attributes:
        experts: (n, k) int64, the experts of each token, best first; None before they are chosen.
        counts: (b, experts), the number of tokens in each whole sequence that chose each expert;
            None without an auxiliary loss.
        rows: the order in which this rank's experts read their tokens; None before `run`.
    """

    def __init__(
        self,
        experts: int,
        ep: Group = SINGLE,
        overlap: BatchOverlap | None = None,
        load: float = 1.0,
    ) -> None:
        self.local = experts // ep.size
        self.ep = ep
        self.overlap = overlap
        self.load = load
        self.experts: Tensor | None = None
        self.counts: Tensor | None = None
        self.rows: Rows | None = None
        self._pending: PendingRows | None = None

    def start(self, dtype: torch.dtype) -> None:
        """Begins to count rows for experts whose GEMMs are in `dtype`; may be collective."""
        assert self.experts is not None  # the router has chosen them
        if self.rows is None:
            self._pending = self._counted(self.experts, dtype)

    def run(self, x: Tensor, weights: Tensor, experts: RunExperts) -> Tensor:
        """Returns the weighted sums of the chosen experts' results: (n, hidden) → (n, hidden).

        Args:
            weights: (n, k), the weights of the chosen experts.
            experts: the function that runs this rank's experts.
        """
        if self._pending is not None:
            self.rows, self._pending = self._pending.rows(), None
        assert self.rows is not None  # `start` was called
        tokens, weights = self._sent(x, self.overlap), self._sent(weights, None)
        return self._returned(experts(tokens, weights, self.rows))

    @abstractmethod
    def _counted(self, experts: Tensor, dtype: torch.dtype) -> PendingRows:
        """Counts the rows that the chosen `experts` (n, k) give to this rank's experts."""

    @abstractmethod
    def _sent(self, x: Tensor, overlap: BatchOverlap | None) -> Tensor:
        """Sends this rank's rows of x, (n, …), and returns those of the tokens received, (t, …)."""

    @abstractmethod
    def _returned(self, results: Tensor) -> Tensor:
        """Returns the results (t, …) to the tokens' ranks, and adds them up there: (n, …)."""


def new_route(
    way: str, experts: int, ep: Group, overlap: BatchOverlap | None, load: float = 1.0
) -> TokenRoute:
    """Creates a route; `way`: how tokens travel between several ranks, gather or all_to_all."""
    if ep.size == 1:
        return LocalRoute(experts, ep, overlap)
    return (GatherRoute if way == GATHER else AllToAllRoute)(experts, ep, overlap, load)


class LocalRoute(TokenRoute):
    """Runs all experts on the tokens' own rank."""

    def _counted(self, experts: Tensor, dtype: torch.dtype) -> PendingRows:
        return LocalRowCounts(experts, self.local, dtype)

    def _sent(self, x: Tensor, overlap: BatchOverlap | None) -> Tensor:
        return x

    def _returned(self, results: Tensor) -> Tensor:
        return results


class GatherRoute(TokenRoute):
    """Gathers the tokens of all ranks, and reduce-scatters the sums."""

    def _counted(self, experts: Tensor, dtype: torch.dtype) -> PendingRows:
        everyone = _local(collectives.all_gather(experts, self.ep), self.local, self.ep.index)
        return RowCounts(everyone, self.local, round(self.load * experts.numel()))

    def _sent(self, x: Tensor, overlap: BatchOverlap | None) -> Tensor:
        return _Gather.apply(x, self.ep, overlap)

    def _returned(self, results: Tensor) -> Tensor:
        return _Scatter.apply(results, self.ep, self.overlap)


class AllToAllRoute(TokenRoute):
    """Sends each token once to each rank with experts that it chose."""

    def _counted(self, experts: Tensor, dtype: torch.dtype) -> PendingRows:
        self._exchange = RowExchange(experts, self.local, self.ep, self.load)
        return self._exchange

    @property
    def messages(self) -> TokenMessages:
        """The messages to other ranks, which are known after `run` has waited for the counts."""
        return self._exchange.messages

    def _sent(self, x: Tensor, overlap: BatchOverlap | None) -> Tensor:
        to = self.messages
        taken = _Take.apply(x, to)
        return _Exchange.apply(taken, overlap, self.ep, to.given, to.taken, to.most)

    def _returned(self, results: Tensor) -> Tensor:
        to = self.messages
        back = _Exchange.apply(results, self.overlap, self.ep, to.taken, to.given, to.most)
        return _Sum.apply(back, to)


@dataclass(frozen=True)
class TokenMessages:
    """The messages in which this rank sends its tokens to the ranks of ep.

    A message is one token for one rank.

    Attributes:
        tokens: (sent,) int64, the token of each message; messages are sorted by destination rank
            and then by token.
        places: (n, ep) int64, the message that carries each token to each rank, or the number of
            messages if the token does not go to that rank.
        given, taken: the number of messages to each rank, and from each rank.
        most: the largest number of messages that a rank can send or receive.
    """

    tokens: Tensor
    places: Tensor
    given: tuple[int, ...]
    taken: tuple[int, ...]
    most: int


class RowExchange:
    """Exchanges the counts of messages and rows, and then the choices; collective.

    Args:
        experts: (n, k), the chosen experts, numbered over all ranks.
        local: the number of experts on each rank.
        load: as in `TokenRoute`.

    Attributes:
        messages: this rank's messages, which `rows` finds.
    """

    messages: TokenMessages

    def __init__(self, experts: Tensor, local: int, ep: Group, load: float = 1.0) -> None:
        self._experts, self._local, self._ep = experts, local, ep
        ranks = experts.div(local, rounding_mode="floor")
        goes = torch.zeros(len(experts), ep.size, dtype=torch.bool, device=experts.device)
        self._goes = goes.scatter_(1, ranks, True)
        # Each rank receives the number of messages from this rank, and the number of rows for each
        # of its experts.
        of_experts = counts_of(experts.flatten(), local * ep.size).view(ep.size, local)
        numbers = torch.cat((goes.sum(0).unsqueeze(1), of_experts), dim=1)
        got = collectives.all_to_all(numbers, ep)
        self._of_local = got[:, 1:].sum(0)
        both = torch.cat((numbers[:, 0], got[:, 0], self._of_local))
        # a dry run counts as many messages to each rank as there are on average
        share = share_sent(local * ep.size, experts.shape[1], ep.size)
        given = [round(len(experts) * share)] * ep.size
        taken = [round(len(experts) * share * load_of_tokens(load, share))] * ep.size
        rows = evenly(round(load * experts.numel()), local)
        self._counts = HostCounts(both, [*given, *taken, *rows])

    def rows(self) -> Rows:
        counts, ep, count = self._counts.wait(), self._ep, len(self._experts)
        given, taken = counts[: ep.size], counts[ep.size : 2 * ep.size]
        total = sum(given)
        # A stable sort of the (rank, token) pairs keeps the messages to each rank in the order of
        # the tokens.
        flat = self._goes.t().flatten()
        sent = (~flat).sort(stable=True).indices[:total]
        places = torch.full_like(flat, total, dtype=torch.int64)
        places[sent] = torch.arange(total, device=flat.device)
        tokens, places = sent % max(count, 1), places.view(ep.size, count).t()
        self.messages = to = TokenMessages(tokens, places, given, taken, ep.size * count)
        groups = Groups.of(self._of_local, counts[2 * ep.size :])
        sizes = to.given, to.taken, to.most
        chosen = collectives.all_to_all_rows(self._experts[to.tokens], ep, *sizes)
        # Only the messages are needed until the backward.
        del self._experts, self._goes, self._of_local, self._counts
        return Rows.sorted_by(_local(chosen, self._local, ep.index), groups, groups.total)


def _arrived(sending: tuple[Tensor, Work], overlap: BatchOverlap | None) -> Tensor:
    """Waits for data in flight and returns it; with `overlap`, another one computes first."""
    out, work = sending
    if overlap is not None:
        overlap.yield_()
    work.wait()
    return out


def _local(experts: Tensor, local: int, index: int) -> Tensor:
    """Renumbers the experts of rank `index` from 0; experts of other ranks become `local`."""
    numbers = experts - local * index
    return numbers.where((numbers >= 0) & (numbers < local), local)


class _Gather(torch.autograd.Function):
    """All-gathers (n, …) to (ep · n, …); the backward reduce-scatters the gradients."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group, overlap: BatchOverlap | None) -> Tensor:
        ctx.group = group
        ctx.overlap = overlap
        return _arrived(collectives.all_gather_async(x, group), overlap)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        sending = collectives.reduce_scatter_async(grad, ctx.group)
        return _arrived(sending, ctx.overlap), None, None


class _Scatter(torch.autograd.Function):
    """Reduce-scatters (ep · n, …) to (n, …); the backward all-gathers the gradients."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group, overlap: BatchOverlap | None) -> Tensor:
        ctx.group = group
        ctx.overlap = overlap
        return _arrived(collectives.reduce_scatter_async(x, group), overlap)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return _arrived(collectives.all_gather_async(grad, ctx.group), ctx.overlap), None, None


class _Exchange(torch.autograd.Function):
    """Exchanges rows by all-to-all; the backward sends the gradients back."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        overlap: BatchOverlap | None,
        ep: Group,
        given: tuple[int, ...],
        taken: tuple[int, ...],
        most: int,
    ) -> Tensor:
        ctx.overlap = overlap
        ctx.sizes = ep, taken, given, most
        return _arrived(collectives.all_to_all_rows_async(x, ep, given, taken, most), overlap)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        sending = collectives.all_to_all_rows_async(grad, *ctx.sizes)
        return _arrived(sending, ctx.overlap), None, None, None, None, None


class _Take(torch.autograd.Function):
    """Copies each message's token; the backward sums a token's gradients in order of the ranks."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, messages: TokenMessages) -> Tensor:
        ctx.messages = messages
        return x.index_select(0, messages.tokens)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return sum_of_slots(grad, ctx.messages.places), None


class _Sum(torch.autograd.Function):
    """Sums each token's results in the order of the ranks; it is the adjoint of `_Take`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, messages: TokenMessages) -> Tensor:
        ctx.messages = messages
        return sum_of_slots(x, messages.places)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad.index_select(0, ctx.messages.tokens), None
