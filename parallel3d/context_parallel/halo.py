"""Finds a rank's halo, which consists of the keys of other ranks that its queries see in a window.

With a window of W keys these are the W − 1 keys before each of the rank's pieces, except for the
rank's own keys and those of other documents. Nothing here imports torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from parallel3d.context_parallel.split import Ints

Whole = npt.NDArray[np.int64]


class Segments(NamedTuple):
    """Segments, each of which is a run of consecutive tokens of one document on one rank.

    Every attribute is an array with one entry per segment.

    Attributes:
        rank: the rank that holds the segment.
        row: index of the sample.
        first: index of the first token among the rank's tokens of the sample.
        number: number of tokens.
        position: position of the first token in the sample.
        start: position at which the document begins.
    """

    rank: Whole
    row: Whole
    first: Whole
    number: Whole
    position: Ints
    start: Ints

    @classmethod
    def of(cls, held: Ints, starts: Ints) -> Segments:
        """Returns the segments of all ranks.

        Args:
            held: the positions that each rank holds (`SequenceSplit.held`).
            starts: (b, padded), the position at which each token's document begins.
        """
        size, b, n = held.shape
        own = np.take_along_axis(starts[None], held, axis=2)
        begins = np.ones(held.shape, dtype=bool)
        begins[..., 1:] = (np.diff(held) != 1) | (np.diff(own) != 0)
        rank, row, first = np.nonzero(begins)
        number = np.diff(np.append((rank * b + row) * n + first, size * b * n))
        return cls(rank, row, first, number, held[begins], own[begins])

    def of_rank(self, rank: int) -> Segments:
        chosen = self.rank == rank
        return Segments(*(x[chosen] for x in self))


def needed_of_others(segments: Segments, owner: Ints, window: int, rank: int) -> Whole:
    """Returns the tokens of other ranks that the queries of `rank` see, in ascending order.

    Tokens are numbered across all samples. `owner` (b, padded) has the rank that holds each token.
    """
    mine = segments.of_rank(rank)
    end = mine.row * owner.shape[1] + mine.position
    begin = end - np.minimum(mine.position - mine.start, window - 1)
    seen = [np.arange(*span) for span in zip(begin, end, strict=True) if span[0] < span[1]]
    tokens = np.unique(np.concatenate(seen)) if seen else np.zeros(0, dtype=np.int64)
    return tokens[owner.reshape(-1)[tokens] != rank]


def needed_by_ranks(held: Ints, starts: Ints, window: int) -> tuple[Ints, list[Whole]]:
    """Returns the rank that holds each token (b, padded), and `needed_of_others` for every rank."""
    size, b, _ = held.shape
    owner = np.empty(starts.shape, dtype=np.int32)
    for rank, row in np.ndindex(size, b):
        owner[row, held[rank, row]] = rank
    segments = Segments.of(held, starts)
    return owner, [needed_of_others(segments, owner, window, rank) for rank in range(size)]


def amounts(owner: Ints, needed: Sequence[Whole]) -> Whole:
    """Counts the tokens whose keys the ranks exchange.

    Entry [i, j] of the result is the number of tokens that rank j sends to rank i.
    """
    owners = (owner.reshape(-1)[tokens] for tokens in needed)
    return np.stack([np.bincount(ranks, minlength=len(needed)) for ranks in owners])
