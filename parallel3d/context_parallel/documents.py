"""Describes the documents of samples, and the tokens that a context-parallel rank holds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from parallel3d.context_parallel.split import Ints, SequenceSplit, imbalance
from parallel3d.context_parallel.varlen_calls import plan_calls
from parallel3d.context_parallel.windows import WindowBlocks, window_blocks
from parallel3d.device import accelerator


@dataclass(frozen=True)
class AttentionBlocks:
    """The m queries of b samples and the keys to which they attend, in blocks of keys.

    A segment consists of consecutive queries of one document. All of them attend to `before`
    consecutive keys that precede the segment. In the first block each query also attends to the
    segment's keys up to its own. The shapes of the tensors do not depend on the documents, so one
    compilation serves all of them.

    Attributes:
        table: (blocks, m + 1, 5) int32 on the host. The first row of a block has the number of its
            segments. Each further row describes a segment: sample, first query, number of queries,
            first key and `before`.
        calls: (blocks, m + 1, 7) int32 on the host. The first row of a block has the number of its
            calls of the varlen kernel, which reads sequences of different lengths. Each further row
            describes a call: first query, number of queries, first key, number of keys, number of
            sequences, and largest numbers of queries and of keys in a sequence.
        edges: (blocks, 2, 2 · m) int32 on the device: the edges of the sequences of all calls, for
            queries and for keys. On a CPU, which has no such kernel, it is empty.
    """

    table: Tensor
    calls: Tensor
    edges: Tensor


@dataclass(frozen=True)
class Pieces:
    """The pieces of b sequences, of which each rank holds p, for layers that hand states on.

    A piece is a run of consecutive tokens. All pieces of a split have the same length, and every
    rank has the same number of them of each sequence.

    Attributes:
        order: (b, size · p) int64 on the device: the pieces in the order of the sequence, each as
            an index among those of all ranks in rank order.
        own: (b, p) int64 on the device: the places of this rank's pieces in that order, ascending.
    """

    order: Tensor
    own: Tensor

    @property
    def number(self) -> int:
        """Number of pieces of a sequence on each rank."""
        return self.own.shape[1]

    @classmethod
    def of(cls, held: Ints, index: int, device: torch.device) -> Pieces:
        """Returns the pieces of a split, on rank `index`.

        `held` has the positions that each rank holds (`SequenceSplit.held`).
        """
        _, b, n = held.shape
        cuts = np.nonzero((np.diff(held, axis=2) != 1).any(axis=(0, 1)))[0] + 1
        length = int(np.gcd.reduce([n, *cuts.tolist()]))
        firsts = held[:, :, ::length].transpose(1, 0, 2).reshape(b, -1)
        order = np.argsort(firsts, axis=1)
        number = n // length
        own = np.argsort(order, axis=1)[:, index * number : (index + 1) * number]

        def moved(x: np.ndarray) -> Tensor:
            return accelerator.moved(torch.from_numpy(np.ascontiguousarray(x)), device)

        return cls(moved(order), moved(own))

    def cut(self, x: Tensor) -> Tensor:
        """Returns this rank's tokens (b, n, …) as pieces (b · p, tokens of a piece, …)."""
        return x.unflatten(1, (self.number, -1)).flatten(0, 1)

    def joined(self, x: Tensor) -> Tensor:
        """Returns pieces as tokens, as the inverse of `cut`."""
        return x.unflatten(0, (-1, self.number)).flatten(1, 2)


@dataclass(frozen=True)
class SequenceShard:
    """The tokens of b sequences that one context-parallel rank holds, n of each sequence.

    Attributes:
        positions: (b, n) int64 on the device: each token's position in its sequence, ascending.
        starts: (b, n) int32 on the device: the position at which each token's document begins.
        order: (b · padded,) int64 on the device: the index of each token of the b sequences among
            the (size, b, n) tokens of all ranks, which an all-gather of (b, n) returns.
        places: (size · b · n,) int64 on the device: the inverse of `order`, that is, the index of
            each token in rank order among the tokens of the b sequences.
        held: (size, b, n) int32 on the host: the positions that each rank holds.
        blocks: the keys to which this rank's queries attend. In a ring there is one block per
            rank: first this rank's own, then the previous rank's, and so on. Otherwise there is one
            block with the whole sequences in order.
        index: index of this rank in the group.
        imbalance: the slowest rank's attention work divided by the ranks' mean work, minus 1.
        window: the keys that queries of sliding layers see; None if no layer slides.
        pieces: the pieces of sequences that the ranks hold; None if no layer hands states on.
    """

    positions: Tensor
    starts: Tensor
    order: Tensor
    places: Tensor
    held: Tensor
    blocks: AttentionBlocks
    index: int
    imbalance: float
    window: WindowBlocks | None = None
    pieces: Pieces | None = None

    def take(self, x: np.ndarray) -> np.ndarray:
        """Returns this rank's tokens (b, n, …) of an array (b, length, …); padding becomes 0."""
        length, held = x.shape[1], self.held[self.index].numpy()
        rows = np.arange(len(held))[:, None]
        found = x[rows, np.minimum(held, length - 1)]
        found[held >= length] = 0
        return found


@dataclass(frozen=True)
class Documents:
    """The documents of b samples of s tokens.

    This is not a tuple, because FSDP2 moves tensors in tuples to the device if they are arguments
    of a forward. The tables must stay on the host, where they are read without synchronisation.

    Attributes:
        starts: (b, s) int32 on the device: the position at which each token's document begins.
        blocks: queries and keys of whole samples, in one block.
        shard: the tokens that this rank holds; None without context parallelism.
        window: the keys that queries of sliding layers see in whole samples; None if no layer
            slides.
        are_samples: whether each sample is one document.
        used: (b, 1) int64 on the device: the number of each sample's tokens before its padding, if
            `are_samples`; None if no sample is padded.
    """

    starts: Tensor
    blocks: AttentionBlocks
    shard: SequenceShard | None = None
    window: WindowBlocks | None = None
    are_samples: bool = False
    used: Tensor | None = None

    def positions(self) -> Tensor:
        """Returns each token's position in its document, int64 on the device.

        The shape is (b, s), or (b, n) for this rank's shard.
        """
        if self.shard is not None:
            return self.shard.positions - self.shard.starts
        return torch.arange(self.starts.shape[1], device=self.starts.device) - self.starts

    def are_longer_than(self, length: int) -> Tensor:
        """Returns whether each token's document has more than `length` tokens.

        The result is a bool tensor on the device, which broadcasts to the shape of `positions`.
        """
        if self.used is not None:
            return self.used > length
        starts = self.starts if self.shard is None else self.shard.starts
        place, end = starts.long() + length, self.starts.shape[1]
        # A longer document still holds the token `length` positions after its first one.
        return (place < end) & (self.starts.gather(1, place.clamp(max=end - 1)) == starts)


def make_documents(starts: Ints, device: torch.device, split: SequenceSplit) -> Documents:
    """Returns the documents of b samples, with this rank's shard if sequences are split.

    `starts` (b, padded): the position at which each token's document begins.
    """
    b, padded = starts.shape
    whole = np.broadcast_to(np.arange(padded, dtype=np.int32), (1, b, padded))
    return Documents(
        accelerator.moved(torch.from_numpy(starts), device),
        _attention_blocks(whole, starts, device, SequenceSplit(padded)),
        _shard(starts, device, split) if split.size > 1 else None,
        _window_blocks(whole, starts, device, split.window, 0),
    )


def whole_samples(
    number: int, device: torch.device, split: SequenceSplit, used: Sequence[int] | None = None
) -> Documents:
    """Returns the documents of `number` samples, each of which is one document.

    `used` has the number of each sample's tokens before its padding, or is None without padding.
    """
    starts = np.zeros((number, split.length), dtype=np.int32)
    documents = make_documents(split.pad_starts(starts), device, split)
    if used is None:
        return replace(documents, are_samples=True)
    lengths = torch.tensor(used, dtype=torch.int64).unsqueeze(1)
    return replace(documents, are_samples=True, used=accelerator.moved(lengths, device))


def _window_blocks(
    held: Ints, starts: Ints, device: torch.device, window: int | None, index: int
) -> WindowBlocks | None:
    return None if window is None else window_blocks(held, starts, index, window, device)


def _shard(starts: Ints, device: torch.device, split: SequenceSplit) -> SequenceShard:
    held = split.held(starts)
    mine = held[split.index]
    rows = np.arange(len(starts), dtype=np.int64)[:, None] * split.padded
    places = (held + rows).reshape(-1)
    order = np.empty_like(places)
    order[places] = np.arange(places.size)

    def moved(x: np.ndarray) -> Tensor:
        return accelerator.moved(torch.from_numpy(x), device)

    return SequenceShard(
        positions=moved(mine.astype(np.int64)),
        starts=moved(np.take_along_axis(starts, mine, axis=1)),
        order=moved(order),
        places=moved(places),
        held=torch.from_numpy(held),
        blocks=_attention_blocks(held, starts, device, split),
        index=split.index,
        imbalance=imbalance(held, starts),
        window=_window_blocks(held, starts, device, split.window, split.index),
        pieces=Pieces.of(held, split.index, device) if split.hands_states else None,
    )


def _attention_blocks(
    held: Ints, starts: Ints, device: torch.device, split: SequenceSplit
) -> AttentionBlocks:
    """Returns this rank's queries and the keys to which they attend.

    `held` has the positions that each rank holds (`SequenceSplit.held`).
    """
    table = segments_of(held, starts, split)
    queries = table.shape[1] - 1
    calls = np.zeros((len(table), queries + 1, 7), dtype=np.int32)
    edges = np.zeros((len(table), 2, 0), dtype=np.int32)
    if accelerator.is_accelerator(device):
        edges = np.zeros((len(table), 2, 2 * queries), dtype=np.int32)
        keys = split.local if split.ring else split.padded
        for i, rows in enumerate(table):
            segments = [
                (row * split.local + first, number, row * keys + key, before)
                for row, first, number, key, before in rows[1 : rows[0, 0] + 1].tolist()
            ]
            plan_calls(segments, i == 0, calls[i], edges[i])
    moved = accelerator.moved(torch.from_numpy(edges), device)
    return AttentionBlocks(torch.from_numpy(table), torch.from_numpy(calls), moved)


def segments_of(held: Ints, starts: Ints, split: SequenceSplit) -> Ints:
    """Returns the `AttentionBlocks.table` of this rank's queries."""
    positions = held[split.index]
    b, n = positions.shape
    own_starts = np.take_along_axis(starts, positions, axis=1)
    begins = np.ones((b, n), dtype=bool)
    begins[:, 1:] = (np.diff(positions) != 1) | (np.diff(own_starts) != 0)
    row, first = np.nonzero(begins)
    number = np.diff(np.append(row * n + first, b * n))
    position, start = positions[row, first], own_starts[row, first]
    if not split.ring:
        return _table([np.stack((row, first, number, start, position - start))], b * n)
    blocks = []
    for i in range(split.size):
        # The positions of a rank ascend. So its tokens of this document that precede the
        # segment are consecutive among its tokens.
        offsets = np.arange(b)[:, None] * split.padded
        theirs = (held[(split.index - i) % split.size] + offsets).reshape(-1)
        key, end = (np.searchsorted(theirs, x + row * split.padded) for x in (start, position))
        block = np.stack((row, first, number, key - row * n, end - key))
        blocks.append(block if i == 0 else block[:, end > key])
    return _table(blocks, b * n)


def _table(blocks: Sequence[npt.NDArray], most: int) -> Ints:
    table = np.zeros((len(blocks), most + 1, 5), dtype=np.int32)
    for rows, columns in zip(table, blocks, strict=True):
        rows[0] = columns.shape[1]
        rows[1 : columns.shape[1] + 1] = columns.T
    return table
