"""The experts of each token, and the order in which tokens are sent, read and summed.

These decisions are made once per micro-batch; the backward and recomputed forwards reuse them.
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
    """The experts that n tokens use.

    Attributes:
        experts: (n, k) int64, the experts of each token, best first.
        weights: (n, k), the weights of these experts, in fp32 or fp64.
    """

    experts: Tensor
    weights: Tensor


@dataclass(frozen=True)
class Rows:
    """The rows that a rank's experts read, sorted by expert; a row is one token for one expert.

    Attributes:
        groups: the consecutive rows that belong to each local expert.
        tokens: (rows,) int64, the token of each row.
        slots: (rows,) int64, the index of each row's choice in the flattened (tokens, slots) table
            of choices.
        places: (tokens, slots) int64, the row of each choice, or the number of rows if the choice
            is not a local expert.
    """

    groups: Groups
    tokens: Tensor
    slots: Tensor
    places: Tensor

    @classmethod
    def counted(cls, experts: Tensor, count: int, balanced: int) -> Callable[[], Rows]:
        """Counts the choices of t tokens for each local expert.

        The returned function waits for the counts and returns the sorted rows.

        Args:
            experts: the choices, as in `sorted_by`.
            count: the number of local experts.
            balanced: the number of rows if all experts are chosen equally often, for a dry run.
        """
        numbers = counts_of(experts.flatten(), count + 1)[:count]
        read = _reading(numbers, evenly(balanced, count))

        def rows() -> Rows:
            groups = Groups.of(numbers, read())
            return cls.sorted_by(experts, groups, groups.total)

        return rows

    @classmethod
    def counted_all(cls, experts: Tensor, count: int, dtype: torch.dtype) -> Callable[[], Rows]:
        """Does the same as `counted` for choices that are all local experts.

        The host only waits for the device if no grouped kernel runs the experts' GEMMs in `dtype`.
        """
        if not has_grouped_kernels(experts.device, dtype):
            return cls.counted(experts, count, experts.numel())
        groups = Groups.of(counts_of(experts.flatten(), count), None)
        return functools.partial(cls.sorted_by, experts, groups, experts.numel())

    @classmethod
    def sorted_by(cls, experts: Tensor, groups: Groups, total: int) -> Rows:
        """Sorts the choices of t tokens by expert, and the rows of an expert by token.

        Args:
            experts: (t, slots), the local experts that each token chose; an expert of another rank
                is replaced by the number of local experts.
            groups: the rows of each local expert.
            total: the number of choices that are local experts.
        """
        flat = experts.flatten()
        slots = flat.sort(stable=True).indices[:total]
        places = torch.full_like(flat, total)
        places[slots] = torch.arange(total, device=flat.device)
        tokens = slots.div(experts.shape[1], rounding_mode="floor")
        return cls(groups, tokens, slots, places.view(experts.shape))


@dataclass(frozen=True)
class Sent:
    """The messages in which this rank sends its tokens to the ranks of ep.

    A message is one token for one rank.

    Attributes:
        tokens: (sent,) int64, the token of each message; messages are sorted by destination rank
            and then by token.
        places: (n, ep) int64, the message that carries each token to each rank, or the number of
            messages if the token does not go to that rank.
        given, taken: the number of messages to each rank, and from each rank.
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
        """Finds the ranks that hold the chosen experts, (n, k), and exchanges counts; collective.

        The returned function waits for the counts and returns the messages.

        Args:
            experts: (n, k), the chosen experts, numbered over all ranks.
            local: the number of experts on each rank.
            balanced: the number of messages to each rank if all experts are chosen equally often,
                for a dry run.
        """
        ranks = experts.div(local, rounding_mode="floor")
        goes = torch.zeros(len(experts), ep.size, dtype=torch.bool, device=experts.device)
        goes.scatter_(1, ranks, True)
        # Each rank receives the number of messages from this rank, and the number of rows for each
        # of its experts.
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
            # A stable sort of the (rank, token) pairs keeps the messages to each rank in the order
            # of the tokens.
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
    """Keeps a layer's decisions about a micro-batch's tokens for recomputed forwards.

    The first forward sets the attributes, which are None until then; a recomputed forward reads
    them.

    Attributes:
        experts: (n, k), as in `Routing`.
        counts: (b, experts), the number of tokens in each whole sequence that chose each expert;
            None without an auxiliary loss.
        sent: the messages to each rank; None unless tokens are sent by all_to_all.
        rows: the order in which this rank's experts read their tokens.
    """

    experts: Tensor | None = None
    counts: Tensor | None = None
    sent: Sent | None = None
    rows: Rows | None = None


def counts_of(numbers: Tensor, count: int) -> Tensor:
    """Returns how often each number below `count` occurs: (n,) int64 → (count,)."""
    return numbers.new_zeros(count).scatter_add_(0, numbers, torch.ones_like(numbers))


def _reading(numbers: Tensor, balanced: Sequence[int]) -> Callable[[], tuple[int, ...]]:
    """Starts copying `numbers` to the host, and returns a function that waits for them.

    In a dry run the numbers have no values, so the function returns `balanced` instead.
    """
    reading = Reading(numbers)

    def read() -> tuple[int, ...]:
        counts = reading.values()
        return tuple(counts if has_values(numbers.device) else balanced)

    return read


def evenly(total: int, parts: int) -> list[int]:
    """Returns `parts` whole numbers that sum to `total` and differ by at most one."""
    return [total * (i + 1) // parts - total * i // parts for i in range(parts)]


def balanced_experts(seed: int, layer: int, tokens: int, experts: int, chosen: int) -> Tensor:
    """Returns experts for each position of a sequence, with every expert used equally often.

    The result, (tokens, chosen) int64, is the same for all sequences and layouts. One random
    permutation of all experts is divided among experts/chosen consecutive positions.
    """
    # The generator takes 64 bits, which are more than enough for a table that only spreads tokens.
    chance = torch.Generator().manual_seed((4096 * seed + layer) % 2**64)
    each = experts // chosen
    orders = torch.rand(-(-tokens // each), experts, generator=chance).argsort(-1)
    return orders[:, : each * chosen].reshape(-1, chosen)[:tokens].contiguous()


@functools.partial(fused, rows=True)
def sum_of_slots(rows: Tensor, places: Tensor) -> Tensor:
    """Returns the sum of each token's rows, added in the order of its slots.

    (rows, h), (t, slots) → (t, h). A place after the last row adds nothing. Because no addition is
    atomic, equal inputs give equal bits on every device.
    """
    if torch.compiler.is_compiling():  # this becomes one kernel, which does not copy the rows
        last, total = rows.shape[0] - 1, rows.new_zeros(places.shape[0], rows.shape[1])
        for place in places.unbind(1) if last >= 0 else ():
            row = rows.index_select(0, place.clamp(max=last))
            total = total + row.where((place <= last).unsqueeze(-1), 0)
        return total
    padded = rows  # with as many rows as places, every place has its own row
    if rows.shape[0] < places.numel():
        padded = torch.cat((rows, rows.new_zeros(1, rows.shape[1])))
    total = padded.index_select(0, places[:, 0])
    for slot in range(1, places.shape[1]):
        total += padded.index_select(0, places[:, slot])
    return total
