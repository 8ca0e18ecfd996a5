"""Chunks of full tensors in a range of a flattened local parameter.

A bucket's shard may begin in the middle of a row. So a range of a matrix is at most three chunks:
the rest of a row, whole rows, the beginning of a row.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from parallel3d.parameters.sharding import ParameterSpec, ShardSpec


@dataclass(frozen=True)
class Chunk:
    """Locates a part of a full tensor: its first index and its sizes, per dimension."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    @property
    def elements(self) -> int:
        return math.prod(self.sizes)


def chunks_of_range(
    spec: ParameterSpec, start: int, count: int
) -> Iterator[tuple[ShardSpec, Chunk, int]]:
    """Yields the chunks in elements [start, start + count) of the flattened local parameter.

    Each as (shard, chunk, first element of the chunk, counted from `start`). Elements outside of
    all shards are padding. Raises ValueError for tensors of more than two dimensions and for shards
    that are not whole rows of the local parameter.
    """
    width = math.prod(spec.shape[1:])
    for shard in spec.shards:
        if len(shard.shape) > 2 or math.prod(shard.shape[1:]) != width:
            raise ValueError(f"{shard.name}: {shard.shape} is not whole rows of {spec.shape}")
        first = shard.row * width
        low = max(start, first) - first
        high = min(start + count, first + shard.shape[0] * width) - first
        for chunk, at in _rectangles(shard, low, high):
            yield shard, chunk, first + at - start


def _rectangles(shard: ShardSpec, low: int, high: int) -> Iterator[tuple[Chunk, int]]:
    """Yields elements [low, high) of a shard as chunks of the full tensor, with first elements."""
    if low >= high:
        return
    if len(shard.shape) == 1:
        yield Chunk((shard.start[0] + low,), (high - low,)), low
        return
    width = shard.shape[1]
    # The rest of the first row, whole rows, and the beginning of the last row.
    cuts = [low, min(high, -(-low // width) * width), max(low, high // width * width), high]
    for a, b in zip(sorted(cuts), sorted(cuts)[1:], strict=False):
        if a == b:
            continue
        row, column = divmod(a, width)
        rows = (b - a) // width
        sizes = (rows, width) if rows else (1, b - a)
        yield Chunk((shard.start[0] + row, shard.start[1] + column), sizes), a
