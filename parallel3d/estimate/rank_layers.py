"""Describes the layers that the ranks of a pipeline hold, for the fitted price of layouts."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import numpy as np

from parallel3d.schedules.orders import StageAssignment


class RankLayers(NamedTuple):
    """The layers of a table of pipelines, by kind of layer, rank and row of the table.

    The ranks are the first one, those between the ends that may be the slowest, and the last one.

    Attributes:
        counts: number of layers of each kind on each rank, over all of its chunks.
        totals: number of layers of each kind in the model.
        embeds, heads: 1 for ranks that have the embedding, or the head, else 0.
    """

    counts: Any
    totals: Any
    embeds: Any
    heads: Any

    @property
    def layers(self) -> Any:
        """Returns the number of layers of each rank."""
        return self.counts.sum(axis=0)

    @property
    def exist(self) -> Any:
        """Returns whether the ranks have something to compute; a table is filled with others."""
        return (self.layers > 0) | (self.embeds > 0) | (self.heads > 0)


class Rank(NamedTuple):
    """A rank of one pipeline: its number of layers of each kind, and whether it has the ends."""

    layers: tuple[float, ...]
    embeds: int = 0
    heads: int = 0


class PipelineLayers(NamedTuple):
    """The ranks of one pipeline that `RankLayers` lists, and the model's layers of each kind."""

    ranks: tuple[Rank, ...]
    totals: tuple[int, ...]


def pipeline_of(
    counts: Sequence[int], assignment: StageAssignment, kind_of: Sequence[int], kinds: int
) -> PipelineLayers:
    """Returns the first rank, those between the ends that may be the slowest, and the last one.

    A rank between the ends is never the slowest if another one has as many layers of each kind.

    Args:
        counts: number of layers of each stage.
        kind_of: index of the kind of each layer of the model.
        kinds: number of kinds.
    """
    held: list[list[int]] = [[0] * kinds for _ in range(assignment.ranks)]
    for (rank, _), (begin, end) in zip(
        assignment.places, pairwise([0, *accumulate(counts)]), strict=True
    ):
        for layer in range(begin, end):
            held[rank][kind_of[layer]] += 1
    numbers = [tuple(layers) for layers in held]
    embeds, heads = assignment.places[0][0], assignment.places[-1][0]
    last = assignment.ranks - 1
    between = sorted({*numbers[1:-1]})
    slowest = [
        one for one in between if not any(_covers(other, one) for other in between if other != one)
    ]
    made = [Rank(numbers[0], int(embeds == 0), int(heads == 0)), *map(Rank, slowest)]
    alone = Rank((0,) * kinds)
    made.append(Rank(numbers[-1], int(embeds == last), int(heads == last)) if last else alone)
    return PipelineLayers(tuple(made), tuple(map(sum, zip(*held, strict=True))))


def _covers(one: Sequence[int], other: Sequence[int]) -> bool:
    """Returns whether a rank has as many layers of each kind as another one."""
    return all(a >= b for a, b in zip(one, other, strict=True))


def table_of(rows: Sequence[PipelineLayers]) -> RankLayers:
    """Returns the ranks of several layouts as arrays of floats.

    Layouts with fewer ranks between the ends are filled with ranks without layers.
    """
    most, kinds = max(len(row.ranks) for row in rows), len(rows[0].totals)
    filled = []
    for row in rows:
        none = [Rank((0,) * kinds)] * (most - len(row.ranks))
        filled.append([*row.ranks[:-1], *none, row.ranks[-1]])
    counts = np.array([[rank.layers for rank in row] for row in filled], dtype=float)
    ends = np.array([[rank[1:] for rank in row] for row in filled], dtype=float)
    return RankLayers(
        counts.transpose(2, 1, 0),
        np.array([row.totals for row in rows], dtype=float).T,
        *ends.transpose(2, 1, 0),
    )
