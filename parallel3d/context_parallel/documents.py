"""The documents of samples, and the tokens of a sequence that a context-parallel rank holds."""

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
    """m queries of b samples and the keys that they attend to, in blocks of keys.

    A segment is consecutive queries of one document. They attend to `before` consecutive keys that
    come before all of them and, in the first block, each to the keys of the segment up to its own.
    The shapes of the tensors do not depend on the documents: one compilation serves all.

    Attributes:
        table: (blocks, m + 1, 5) int32 on the host. A block's first row has the number of its
            segments; the others have sample, first query, number of queries, first key, `before`.
        calls: (blocks, m + 1, 7) int32 on the host: likewise, the calls of a kernel that reads
            sequences of different lengths: first query, queries, first key, keys, sequences,
            longest queries, longest keys.
        edges: (blocks, 2, 2 · m) int32 on the device: the edges of the sequences of all calls, for
            queries and for keys. Empty on a CPU, which has no such kernel.
    """

    table: Tensor
    calls: Tensor
    edges: Tensor


@dataclass(frozen=True)
class SequenceShard:
    """The tokens of b sequences that one context-parallel rank holds, n of each.

    Attributes:
        positions: (b, n) int64 on the device: each token's position in its sequence, ascending.
        starts: (b, n) int32 on the device: where the token's document begins in the sequence.
        order: (b · padded,) int64 on the device: the place of each token of the b sequences among
            the (size, b, n) tokens of all ranks, the result of an all-gather of (b, n).
        places: (size · b · n,) int64 on the device, the inverse: the place in the b sequences of
            each token in rank order.
        held: (size, b, n) int32 on the host: the positions that each rank holds.
        blocks: which queries attend to which keys, a block of keys after the other (see
            `AttentionBlocks`): one block of the whole sequence in order; in a ring one block per
            rank, this rank's first, then the previous rank's, and so on.
        index: place of this rank in the group.
        imbalance: the work of the slowest rank's attention over the mean, less 1.
        window: the keys that queries of sliding layers see.
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

    def take(self, x: np.ndarray) -> np.ndarray:
        """Returns this rank's tokens (b, n, …) of (b, length, …) on the host; the padding is 0."""
        length, held = x.shape[1], self.held[self.index].numpy()
        rows = np.arange(len(held))[:, None]
        found = x[rows, np.minimum(held, length - 1)]
        found[held >= length] = 0
        return found


@dataclass(frozen=True)
class Documents:
    """The documents of b samples of s tokens.

    Not a tuple: FSDP2 moves the tensors of tuples in a forward's arguments to the device, and
    tables have to stay on the host, where they are read without a device synchronisation.

    Attributes:
        starts: (b, s) int32 on the device: where the document of each position begins.
        blocks: queries and keys of whole samples, in one block.
        shard: the tokens that this rank holds, under context parallelism.
        window: the keys that queries of sliding layers see in whole samples.
        are_samples: each sample is one document.
    """

    starts: Tensor
    blocks: AttentionBlocks
    shard: SequenceShard | None = None
    window: WindowBlocks | None = None
    are_samples: bool = False

    def positions(self) -> Tensor:
        """Returns each token's place in its document: (b, s), or (b, n) of a shard, int64 on the
        device."""
        if self.shard is not None:
            return self.shard.positions - self.shard.starts
        return torch.arange(self.starts.shape[1], device=self.starts.device) - self.starts


def make_documents(starts: Ints, device: torch.device, split: SequenceSplit) -> Documents:
    """Returns the documents of b samples, and this rank's shard of them if they are split.

    `starts`: (b, padded), where the document of each position begins.
    """
    b, padded = starts.shape
    whole = np.broadcast_to(np.arange(padded, dtype=np.int32), (1, b, padded))
    return Documents(
        accelerator.moved(torch.from_numpy(starts), device),
        _attention_blocks(whole, starts, device, SequenceSplit(padded)),
        _shard(starts, device, split) if split.size > 1 else None,
        _window_blocks(whole, starts, device, split.window, 0),
    )


def whole_samples(number: int, device: torch.device, split: SequenceSplit) -> Documents:
    """Returns the documents of `number` samples that are one document each."""
    starts = np.zeros((number, split.length), dtype=np.int32)
    documents = make_documents(split.pad_starts(starts), device, split)
    return replace(documents, are_samples=True)


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
    )


def _attention_blocks(
    held: Ints, starts: Ints, device: torch.device, split: SequenceSplit
) -> AttentionBlocks:
    """Returns this rank's queries and the keys that they attend to, given the positions of all
    ranks."""
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
    """Returns `AttentionBlocks.table` of this rank's queries."""
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
        # A rank's positions ascend, so its tokens of a document before this segment are
        # consecutive.
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
