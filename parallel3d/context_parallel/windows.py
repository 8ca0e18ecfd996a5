"""Finds the keys that queries see through a window.

A query at position i of a document that begins at `start` sees the keys max(start, i − W + 1) … i,
which are up to W keys, including its own. `halo.py` finds the keys that a rank needs from others.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from parallel3d.context_parallel.halo import Segments, Whole, amounts, needed_by_ranks
from parallel3d.context_parallel.split import Ints
from parallel3d.context_parallel.varlen_calls import plan_calls, rows_of
from parallel3d.device import accelerator


@dataclass(frozen=True)
class Halo:
    """The keys that the ranks of a group exchange, for b samples with n tokens on each rank.

    The shapes of the tensors do not depend on the documents, so one compilation serves all of them.
    Only the first entries of the tensors on the device are used.

    Attributes:
        sent: ((size − 1) · b · n,) int64 on the device: the tokens that this rank sends, by
            receiver, as indices among its b · n tokens.
        order: (b · padded,) int64 on the device: the index of each of this rank's keys, in the
            order of the sequences, among this rank's own tokens followed by the received ones, by
            sender.
        places: (b · padded,) int64 on the device: the inverse of `order`.
        counts: (4, size) int64 on the host: for each rank r, the numbers of tokens that this rank
            sends to r and receives from r, and that r sends and receives in total.
    """

    sent: Tensor
    order: Tensor
    places: Tensor
    counts: Tensor


@dataclass(frozen=True)
class WindowBlocks:
    """The m queries of b samples and the keys that they see through a window.

    The keys are all keys of the b samples, or this rank's own keys and its halo. They are in the
    order of the sequences, and tokens are numbered across all samples.

    Attributes:
        window: maximum number of keys that a query sees, including its own.
        table: (m + 1, 4) int32 on the host. The first row has the number of chunks, each of which
            has up to `window` consecutive queries of one document. Each further row describes a
            chunk: first query, number of queries, first key, number of keys before the first
            query's own.
        calls, edges: calls of the varlen kernel, in the form of one block of
            `documents.AttentionBlocks`.
        halo: the keys that ranks exchange; None if this rank holds all keys.
    """

    window: int
    table: Tensor
    calls: Tensor
    edges: Tensor
    halo: Halo | None = None


def window_blocks(
    held: Ints, starts: Ints, index: int, window: int, device: torch.device
) -> WindowBlocks:
    """Returns the queries of rank `index` and the keys that they see through a window.

    Args:
        held: (size, b, n), the positions that each rank holds (`SequenceSplit.held`).
        starts: (b, padded), the position at which each token's document begins.
    """
    size, b, n = held.shape
    padded = starts.shape[1]
    segments = Segments.of(held, starts)
    rows = np.arange(b, dtype=np.int64)[:, None] * padded
    keys, halo = (held[index] + rows).reshape(-1), None
    if size > 1:
        keys, halo = _halo(held, starts, index, window, device)
    mine = segments.of_rank(index)
    query, token = mine.row * n + mine.first, mine.row * padded + mine.position
    before = mine.position - mine.start
    chunks, each = _chunks(mine.number, window)
    done = each * window
    of_chunk = np.minimum(before[chunks] + done, window - 1)
    table = _filled(
        b * n,
        query[chunks] + done,
        np.minimum(mine.number[chunks] - done, window),
        np.searchsorted(keys, token[chunks] + done - of_chunk),
        of_chunk,
    )
    seen = np.minimum(before, window - 1)
    calls, edges = np.zeros((b * n + 1, 7), dtype=np.int32), np.zeros((2, 0), dtype=np.int32)
    if accelerator.is_accelerator(device):
        edges = np.zeros((2, 2 * b * n), dtype=np.int32)
        whole = np.stack((query, mine.number, np.searchsorted(keys, token - seen), seen), 1)
        plan_calls(whole.tolist(), True, calls, edges)
    return WindowBlocks(
        window,
        torch.from_numpy(table),
        torch.from_numpy(calls),
        accelerator.moved(torch.from_numpy(edges), device),
        halo,
    )


def _chunks(numbers: Whole, most: int) -> tuple[Whole, Whole]:
    """Cuts segments into chunks of at most `most` queries.

    Returns each chunk's segment and the chunk's number within that segment.
    """
    counts = -(-numbers // most)
    chunks = np.repeat(np.arange(len(numbers)), counts)
    return chunks, np.arange(len(chunks)) - np.repeat(np.cumsum(counts) - counts, counts)


def _filled(most: int, *columns: npt.NDArray) -> Ints:
    table = np.zeros((most + 1, len(columns)), dtype=np.int32)
    table[0] = len(columns[0])
    table[1 : len(columns[0]) + 1] = np.stack(columns, axis=1)
    return table


def _halo(
    held: Ints, starts: Ints, index: int, window: int, device: torch.device
) -> tuple[Whole, Halo]:
    """Returns the tokens whose keys rank `index` has after the exchange, and its halo.

    The tokens are in ascending order.
    """
    size, b, n = held.shape
    padded = starts.shape[1]
    rows = np.arange(b, dtype=np.int64)[:, None] * padded
    tokens = (held + rows).reshape(size, -1)
    owner, needed = needed_by_ranks(held, starts, window)
    owners = [owner.reshape(-1)[of_rank] for of_rank in needed]
    each = amounts(owner, needed)
    received = needed[index][np.argsort(owners[index], kind="stable")]
    sent = [of_rank[by == index] for of_rank, by in zip(needed, owners, strict=True)]
    places = np.searchsorted(tokens[index], np.concatenate(sent))
    own = np.concatenate((tokens[index], received))
    order = np.argsort(own)
    inverse = np.argsort(order)

    def on_device(values: Whole, most: int) -> Tensor:
        whole = np.zeros(most, dtype=np.int64)
        whole[: len(values)] = values
        return accelerator.moved(torch.from_numpy(whole), device)

    return own[order], Halo(
        sent=on_device(places, (size - 1) * b * n),
        order=on_device(order, b * padded),
        places=on_device(inverse, b * padded),
        counts=torch.from_numpy(np.stack((each[:, index], each[index], each.sum(0), each.sum(1)))),
    )


class Chunks(NamedTuple):
    """Neighbouring chunks of equal shape, which one call computes together.

    Attributes:
        query, key: the first query and the first key of the first chunk.
        chunks: number of chunks. Each begins `number` queries and keys after the previous one.
        number: number of queries of a chunk.
        before: number of keys of a chunk before those of its queries.
    """

    query: int
    key: int
    chunks: int
    number: int
    before: int

    def of_queries(self, x: Tensor) -> Tensor:
        """Returns the view (chunks, heads, number, …) of (tokens, heads, …)."""
        return self._view(x, self.query, self.number)

    def of_keys(self, x: Tensor) -> Tensor:
        """Returns the view (chunks, heads, before + number, …) of (tokens, heads, …)."""
        return self._view(x, self.key, self.before + self.number)

    def parts_of_keys(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Returns views of the keys before the queries and of the queries' own keys.

        Within each of the two views the chunks do not overlap.
        """
        before = self._view(x, self.key, self.before)
        return before, self._view(x, self.key + self.before, self.number)

    def _view(self, x: Tensor, first: int, length: int) -> Tensor:
        of_token, of_head, *rest = x.stride()
        size = (self.chunks, x.shape[1], length, *x.shape[2:])
        strides = (self.number * of_token, of_head, of_token, *rest)
        return x.as_strided(size, strides, x.storage_offset() + first * of_token)


def chunks_of(table: Tensor) -> Iterator[Chunks]:
    """Yields the chunks of a table of `WindowBlocks`, with neighbours of equal shape joined.

    Chunks with more earlier keys than queries are not joined. Their views of the keys would
    overlap, while gradients are added to all views at once.
    """
    found: Chunks | None = None
    for query, number, key, before in rows_of(table):
        if found is not None:
            step = found.chunks * found.number
            following = (found.query + step, found.number, found.key + step, found.before)
            if (query, number, key, before) == following and before <= number:
                found = found._replace(chunks=found.chunks + 1)
                continue
            yield found
        found = Chunks(query, key, 1, number, before)
    if found is not None:
        yield found
