"""Splits the tokens of a sequence over context-parallel ranks. Nothing here imports torch."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from parallel3d.blueprint.blueprint import Blueprint
from parallel3d.config.values import padded_length
from parallel3d.models.declared import hands_states

Ints = npt.NDArray[np.int32]

BLOCKS = 16  # maximum number of blocks per rank in a balanced split; each may need a kernel call
# The same if layers hand states from block to block (`states.py`), and the least tokens of a block.
BLOCKS_OF_STATES, LEAST_TOKENS = 4, 8
EVEN = 0.05  # accepted imbalance: extra work of the slowest rank, as a fraction of the mean


@dataclass(frozen=True)
class SequenceSplit:
    """Splits sequences over `size` ranks, of which this rank is number `index`.

    A sequence is padded at its end and cut into 2 · size pieces. Rank r holds the pieces r and
    2 · size − 1 − r, so that under a causal mask all ranks have the same number of query-key
    pairs (Brandon et al. 2023, Striped Attention; Llama 3 report, §3.3.2). If documents make this
    split uneven, a balanced split chooses the blocks of each rank by their attention work,
    with the same number of blocks on every rank.

    Attributes:
        length: number of tokens of a sequence without padding.
        multiple: number that must divide `local` (tp, under sequence parallelism).
        balanced: whether a balanced split may be used.
        ring: whether attention reads the keys of one rank after another instead of the whole
            sequence at once.
        window: number of keys that a query of a sliding layer sees; None if no layer slides.
        hands_states: whether layers hand states from block to block, so that few blocks are better.
    """

    length: int
    size: int = 1
    index: int = 0
    multiple: int = 1
    balanced: bool = False
    ring: bool = False
    window: int | None = None
    hands_states: bool = False

    @classmethod
    def of_run(cls, blueprint: Blueprint, index: int) -> SequenceSplit:
        """Returns the split of a run on the rank with this index in cp."""
        layer = blueprint.layer
        return cls(
            length=blueprint.model.seq_length,
            size=blueprint.layout.cp,
            index=index,
            multiple=blueprint.rank_multiple,
            # With style=heads each rank attends to whole sequences, so the work is always even.
            balanced=layer.cp_balance and layer.cp_style != "heads",
            ring=layer.cp_style == "ring",
            window=blueprint.model.sliding_window,
            hands_states=hands_states(blueprint.model),
        )

    @property
    def padded(self) -> int:
        return padded_length(self.length, self.size, self.multiple)

    @property
    def local(self) -> int:
        """Number of tokens of a sequence that each rank holds."""
        return self.padded // self.size

    def pad_starts(self, starts: Ints) -> Ints:
        """Pads the starts of documents (b, length) to (b, padded).

        The padding is a document of its own. If it is longer than a sequence, it becomes several
        documents, so that none is longer than the model allows.
        """
        padding = np.arange(self.length, self.padded, dtype=np.int32) // self.length * self.length
        return np.hstack((starts, np.tile(padding, (len(starts), 1))))

    def held(self, starts: Ints) -> Ints:
        """Returns the positions that each rank holds of each sequence (size, b, local), ascending.

        `starts` (b, padded): the position at which each token's document begins. The result is the
        same on all ranks.
        """
        pieces = np.arange(self.padded, dtype=np.int32).reshape(2 * self.size, -1)
        ranks = [np.concatenate((pieces[r], pieces[-1 - r])) for r in range(self.size)]
        halves = np.repeat(np.stack(ranks)[:, None], len(starts), axis=1)
        if not self.balanced:
            return halves
        most = BLOCKS
        if self.hands_states:
            most = min(BLOCKS_OF_STATES, self.local // LEAST_TOKENS)
        counts = [n for n in range(2, most + 1) if self.local % n == 0]
        best, least = halves, imbalance(halves, starts)
        for count in counts:  # the smallest count whose split is even enough wins
            if least <= EVEN:
                break
            blocks = self._balanced(starts, count)
            if (found := imbalance(blocks, starts)) < least:
                best, least = blocks, found
        return best

    def _balanced(self, starts: Ints, count: int) -> Ints:
        """Returns the positions of a balanced split with `count` blocks per sequence and rank.

        Blocks are assigned in order of decreasing work. Each block goes to the rank with the
        least work so far among those with fewer than `count` blocks.
        """
        blocks = np.arange(self.padded, dtype=np.int32).reshape(self.size * count, -1)
        pairs = blocks.reshape(-1) - starts + 1  # number of keys of each query
        work = pairs.reshape(len(starts), len(blocks), -1).sum(2)
        loads = np.zeros(self.size, dtype=np.int64)
        held = np.empty((self.size, len(starts), self.local), dtype=np.int32)
        for row, of_blocks in enumerate(work):
            given: list[list[int]] = [[] for _ in range(self.size)]
            for block in np.argsort(-of_blocks, kind="stable"):
                free = [r for r in range(self.size) if len(given[r]) < count]
                rank = min(free, key=lambda r: loads[r])
                given[rank].append(block)
                loads[rank] += of_blocks[block]
            for rank, of_rank in enumerate(given):
                held[rank, row] = blocks[sorted(of_rank)].reshape(-1)
        return held


def work_of_ranks(held: Ints, starts: Ints) -> npt.NDArray[np.int64]:
    """Returns the number of query-key pairs in each rank's attention (size,)."""
    pairs = held - np.take_along_axis(starts[None], held, axis=2) + 1
    return pairs.sum(axis=(1, 2), dtype=np.int64)


def imbalance(held: Ints, starts: Ints) -> float:
    """Returns the slowest rank's attention work divided by the ranks' mean work, minus 1."""
    work = work_of_ranks(held, starts)
    return float(work.max() / work.mean() - 1)
