"""Describes the layers that the ranks of a pipeline hold, for the fitted price of layouts."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import numpy as np

from parallel3d.schedules.orders import StageAssignment


class RankLayers(NamedTuple):
    """The layers of a pipeline rank, over all of its chunks, with embedding and head.

    The fields are numbers for one rank. For a table of layouts they are arrays with an axis of
    ranks before the rows: the first rank, ranks between the ends, and the last rank.

    Attributes:
        layers: number of layers.
        sparse: share of the layers that have experts.
        sliding: share of the layers that have a window, or 1 if the model has no window.
        embeds, heads: 1 if the rank has the embedding, or the head, else 0.
    """

    layers: Any = 0
    sparse: Any = 0
    sliding: Any = 0
    embeds: Any = 0
    heads: Any = 0

    @property
    def exist(self) -> Any:
        """Returns whether the ranks have something to compute; a table is filled with others."""
        return (self.layers > 0) | (self.embeds > 0) | (self.heads > 0)


def even_ranks(counts: Sequence[int], sparse: float, sliding: float) -> list[RankLayers]:
    """Returns the first rank, the largest one between the ends, and the last one.

    Args:
        counts: number of layers of each rank.
        sparse, sliding: shares of the model's layers, which are also those of each rank.
    """
    first, *between, last = counts if len(counts) > 1 else (*counts, 0)
    return [
        RankLayers(first, sparse, sliding, 1, int(len(counts) == 1)),
        RankLayers(max(between, default=0), sparse, sliding),
        RankLayers(last, sparse, sliding, 0, int(len(counts) > 1)),
    ]


def rank_layers(
    counts: Sequence[int],
    assignment: StageAssignment,
    experts: Sequence[bool],
    windows: Sequence[bool],
) -> list[RankLayers]:
    """Returns the first rank, those between the ends that may be the slowest, and the last one.

    A rank between the ends is never the slowest if another one has as many layers of each kind.

    Args:
        counts: number of layers of each stage.
        experts, windows: whether each layer of the model has experts, and a window.
    """
    held: list[list[int]] = [[] for _ in range(assignment.ranks)]
    for (rank, _), (begin, end) in zip(
        assignment.places, pairwise([0, *accumulate(counts)]), strict=True
    ):
        held[rank] += range(begin, end)
    numbers = [
        (len(layers), sum(experts[i] for i in layers), sum(windows[i] for i in layers))
        for layers in held
    ]
    embeds, heads = assignment.places[0][0], assignment.places[-1][0]

    def made(number: tuple[int, int, int], rank: int | None = None) -> RankLayers:
        layers, sparse, sliding = number
        share = max(layers, 1)
        ends = int(rank == embeds), int(rank == heads)
        return RankLayers(layers, sparse / share, sliding / share, *ends)

    between = sorted({*numbers[1:-1]})
    slowest = [
        one for one in between if not any(_covers(other, one) for other in between if other != one)
    ]
    first, last = made(numbers[0], 0), made(numbers[-1], assignment.ranks - 1)
    return [first, *map(made, slowest), last if assignment.ranks > 1 else RankLayers()]


def _covers(one: tuple[int, int, int], other: tuple[int, int, int]) -> bool:
    """Returns whether a rank has as many layers of each kind as another one.

    Both are given by the numbers of layers, of layers with experts and of layers with a window.
    """
    layers, sparse, sliding = (a - b for a, b in zip(one, other, strict=True))
    return min(sparse, layers - sparse, sliding, layers - sliding) >= 0


def table_of(rows: Sequence[Sequence[RankLayers]]) -> RankLayers:
    """Returns the ranks of several layouts as arrays of floats, of shape (ranks, layouts).

    Layouts with fewer ranks between the ends are filled with ranks without layers.
    """
    most = max(map(len, rows))
    filled = [
        [first, *between, *[RankLayers()] * (most - 2 - len(between)), last]
        for first, *between, last in rows
    ]
    return RankLayers(*np.moveaxis(np.array(filled, dtype=float), -1, 0).swapaxes(1, 2))
