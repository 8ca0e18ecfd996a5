"""The experts that tokens choose, and the order in which tokens are read, sent and summed.

These decisions are made once per micro-batch; recomputation and the backward reuse them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from parallel3d.comm import collectives
from parallel3d.comm.group import Group
from parallel3d.device.accelerator import Reading, has_values
from parallel3d.device.fused import fused
from parallel3d.device.grouped import Groups, has_grouped_kernels


class Routing(NamedTuple):
    """The experts of n tokens, best first, (n, k) int64, and their weights, (n, k) in fp32 or
    better."""

    experts: Tensor
    weights: Tensor


@dataclass(frozen=True)
class Rows:
    """The rows that a rank's experts read, sorted by expert: a row is one token for one expert.

    Attributes:
        groups: the rows of each local expert, one after the other.
        tokens: (rows,) int64, the token of each row.
        slots: (rows,) int64, the place of each row in the flat (tokens, slots) table of choices.
        places: (tokens, slots) int64, the row of each choice; where there is none, the number of
            rows.
    """

    groups: Groups
    tokens: Tensor
    slots: Tensor
    places: Tensor

    @classmethod
    def counted(cls, experts: Tensor, count: int, balanced: int) -> Callable[[], Rows]:
        """Counts the choices of t tokens. The returned function synchronises with the device and
        sorts them (see `sorted_by`).

        `balanced`: number of rows if all experts are chosen equally often.
        """
        numbers = counts_of(experts.flatten(), count + 1)[:count]
        read = _reading(numbers, evenly(balanced, count))

        def rows() -> Rows:
            groups = Groups.of(numbers, read())
            return cls.sorted_by(experts, groups, groups.total)

        return rows

    @classmethod
    def counted_all(cls, experts: Tensor, count: int, dtype: torch.dtype) -> Callable[[], Rows]:
        """Does the same where every choice is a local expert. The host only waits for the device if
        the experts' GEMMs in `dtype` run one by one."""
        if not has_grouped_kernels(experts.device, dtype):
            return cls.counted(experts, count, experts.numel())
        groups = Groups.of(counts_of(experts.flatten(), count), None)
        return functools.partial(cls.sorted_by, experts, groups, experts.numel())

    @classmethod
    def sorted_by(cls, experts: Tensor, groups: Groups, total: int) -> Rows:
        """Sorts the choices of t tokens, (t, slots): local experts, or the number of these for
        none.

        `total`: the number of choices of local experts. An expert's rows are in the order of
        tokens.
        """
        flat = experts.flatten()
        slots = flat.sort(stable=True).indices[:total]
        places = torch.full_like(flat, total)
        places[slots] = torch.arange(total, device=flat.device)
        tokens = slots.div(experts.shape[1], rounding_mode="floor")
        return cls(groups, tokens, slots, places.view(experts.shape))


@dataclass(frozen=True)
class Sent:
    """This rank's tokens that go to each rank of ep, a message for each token and rank.

    Attributes:
        tokens: (sent,) int64, the token of each message, sorted by rank and then by token.
        places: (n, ep) int64, the message of each token to each rank; where there is none, the
            number of messages.
        given, taken: numbers of messages to and from each rank.
        rows: the rows that each of this rank's experts gets.
        most: the largest number of messages that a rank can send or receive.
    """

    tokens: Tensor
    places: Tensor
    given: tuple[int, ...]
    taken: tuple[int, ...]
    rows: Groups
    most: int

    @classmethod
    def counted(cls, experts: Tensor, local: int, ep: Group, balanced: int) -> Callable[[], Sent]:
        """Finds the ranks of the chosen experts (n, k). Collective; the returned function
        synchronises with the device.

        `balanced`: messages to each rank if all experts are chosen equally often.
        """
        ranks = experts.div(local, rounding_mode="floor")
        goes = torch.zeros(len(experts), ep.size, dtype=torch.bool, device=experts.device)
        goes.scatter_(1, ranks, True)
        # For each rank: the number of messages to it, and the number of rows of each of its
        # experts.
        of_experts = counts_of(experts.flatten(), local * ep.size).view(ep.size, local)
        numbers = torch.cat((goes.sum(0).unsqueeze(1), of_experts), dim=1)
        got = collectives.all_to_all(numbers, ep)
        of_local = got[:, 1:].sum(0)
        both = torch.cat((numbers[:, 0], got[:, 0], of_local))
        rows = evenly(experts.numel(), local)
        read = _reading(both, [*[balanced] * (2 * ep.size), *rows])

        def sent() -> Sent:
            counts = read()
            given, taken = counts[: ep.size], counts[ep.size : 2 * ep.size]
            total = sum(given)
            # A stable sort of (rank, token) lists the messages to rank 0 in the order of tokens,
            # and so on.
            flat = goes.t().flatten()
            messages = (~flat).sort(stable=True).indices[:total]
            places = torch.full_like(flat, total, dtype=torch.int64)
            places[messages] = torch.arange(total, device=flat.device)
            count = len(experts)
            return cls(
                messages % max(count, 1),
                places.view(ep.size, count).t(),
                given,
                taken,
                Groups.of(of_local, counts[2 * ep.size :]),
                ep.size * count,
            )

        return sent


@dataclass
class Choice:
    """Keeps a layer's decisions about the tokens of a micro-batch for its recomputation.

    The first forward fills it in; a recomputed forward reads it.

    Attributes:
        experts: (n, k), as in `Routing`.
        counts: (b, experts) tokens of each whole sequence that chose an expert, for the auxiliary
            loss.
        sent: the tokens that go to each rank.
        rows: the order in which this rank's experts read their tokens.
    """

    experts: Tensor | None = None
    counts: Tensor | None = None
    sent: Sent | None = None
    rows: Rows | None = None


def counts_of(numbers: Tensor, count: int) -> Tensor:
    """Counts how often each number below `count` occurs: (n,) int64 → (count,)."""
    return numbers.new_zeros(count).scatter_add_(0, numbers, torch.ones_like(numbers))


def _reading(numbers: Tensor, balanced: Sequence[int]) -> Callable[[], tuple[int, ...]]:
    """Copies the numbers to the host; the returned function waits for them. In a dry run they have
    no values, and it returns `balanced` instead."""
    reading = Reading(numbers)

    def read() -> tuple[int, ...]:
        counts = reading.values()
        return tuple(counts if has_values(numbers.device) else balanced)

    return read


def evenly(total: int, parts: int) -> list[int]:
    """Splits `total` into whole numbers that differ by at most one."""
    return [total * (i + 1) // parts - total * i // parts for i in range(parts)]


def balanced_experts(seed: int, layer: int, tokens: int, experts: int, chosen: int) -> Tensor:
    """Returns the experts of each position of a sequence, all equally often: (tokens, chosen)
    int64.

    Each run of experts/chosen positions shares out one random permutation of all experts. The
    result is the same for all sequences and layouts.
    """
    chance = torch.Generator().manual_seed(4096 * seed + layer)
    each = experts // chosen
    orders = torch.rand(-(-tokens // each), experts, generator=chance).argsort(-1)
    return orders[:, : each * chosen].reshape(-1, chosen)[:tokens].contiguous()


@functools.partial(fused, rows=True)
def sum_of_slots(rows: Tensor, places: Tensor) -> Tensor:
    """Sums each token's rows in the order of its slots: (rows, h), (t, slots) → (t, h).

    Places past the last row add nothing. Equal inputs give equal bits on every device, as nothing
    is added atomically.
    """
    if torch.compiler.is_compiling():  # one kernel, without a copy of the rows
        last, total = rows.shape[0] - 1, rows.new_zeros(places.shape[0], rows.shape[1])
        for place in places.unbind(1) if last >= 0 else ():
            row = rows.index_select(0, place.clamp(max=last))
            total = total + row.where((place <= last).unsqueeze(-1), 0)
        return total
    padded = rows  # every place is a row's own, so that as many places as rows leave none out
    if rows.shape[0] < places.numel():
        padded = torch.cat((rows, rows.new_zeros(1, rows.shape[1])))
    total = padded.index_select(0, places[:, 0])
    for slot in range(1, places.shape[1]):
        total += padded.index_select(0, places[:, slot])
    return total
