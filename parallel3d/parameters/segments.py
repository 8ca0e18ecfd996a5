"""Flat shards of parameters that a rank steps, and the chunks of full tensors in them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import groupby
from operator import itemgetter
from typing import NamedTuple

from torch import Tensor

from parallel3d.parameters.copies import Copies, CopyGroups
from parallel3d.parameters.spec import Kind, ParameterSpec, ShardSpec


class ParameterSpan(NamedTuple):
    """Elements [start, start + numel) of a flattened local parameter, as part of a segment."""

    name: str
    spec: ParameterSpec
    start: int
    numel: int

    def by_kind(self, kind_of: Callable[[ShardSpec], Kind]) -> Iterator[tuple[Kind, ParameterSpan]]:
        """Cuts the span where the kind of the shards changes; yields each part's kind and span.

        A span of a parameter that holds q, k and v may have several parts.
        """
        for kind, first, end in self.spec.by_kind(kind_of, self.start, self.numel):
            yield kind, self._replace(start=self.start + first, numel=end - first)

    def by_copies(self, groups: CopyGroups) -> Iterator[tuple[Copies, ParameterSpan]]:
        """Cuts the span where the copies change; yields each part's copies and span."""
        return self.by_kind(partial(groups.of, self.spec))


@dataclass
class Segment:
    """Parts of parameters with equal optimizer settings, which this rank steps.

    Attributes:
        param: the flat parameters, in the compute dtype.
        grad: their flat gradients, fp32 or better.
        master: flat tensor that the optimizer steps, which is `param` if that is fp32 or better.
        spans: the parts of parameters that make up the three tensors, in order.
        groups: this rank's groups in which other ranks step the same elements.
    """

    param: Tensor
    grad: Tensor
    master: Tensor
    spans: list[ParameterSpan]
    groups: CopyGroups = field(default_factory=CopyGroups)

    @property
    def spec(self) -> ParameterSpec:
        """Returns the spec of the segment's first parameter.

        All parameters of a segment agree in weight decay, replication, tying and `is_expert`.
        """
        return self.spans[0].spec

    def by_kind(self, kind_of: Callable[[ShardSpec], Kind]) -> Iterator[tuple[Kind, Segment]]:
        """Cuts the segment where the kind of the shards changes; yields each part's kind and views.

        If there is only one part, this segment itself is yielded.
        """
        apart = [pair for span in self.spans for pair in span.by_kind(kind_of)]
        runs = [(kind, [span for _, span in run]) for kind, run in groupby(apart, itemgetter(0))]
        if len(runs) == 1:
            yield runs[0][0], self
            return
        first = 0
        for kind, spans in runs:
            own = slice(first, first + sum(span.numel for span in spans))
            first = own.stop
            param, grad, master = (t[own] for t in (self.param, self.grad, self.master))
            yield kind, replace(self, param=param, grad=grad, master=master, spans=spans)

    def by_copies(self) -> Iterator[tuple[Copies, Segment]]:
        """Cuts the segment where the copies change; yields each part's copies and views."""
        return self.by_kind(partial(self.groups.of, self.spec))


class Constant(NamedTuple):
    """Elements of a frozen parameter, flat and in the compute dtype, which no optimizer steps.

    `groups`: this rank's groups in which other ranks hold the same elements.
    """

    param: Tensor
    span: ParameterSpan
    groups: CopyGroups


@dataclass(frozen=True)
class Chunk:
    """A part of a full tensor, given by its first index and its size in each dimension."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    @property
    def elements(self) -> int:
        return math.prod(self.sizes)

    @property
    def ends(self) -> tuple[int, ...]:
        return tuple(map(sum, zip(self.offsets, self.sizes, strict=True)))

    def overlap(self, other: Chunk) -> Chunk | None:
        """Returns the part that is in both chunks, or None if they do not overlap."""
        first = tuple(map(max, self.offsets, other.offsets))
        ends = map(min, self.ends, other.ends)
        sizes = tuple(end - start for start, end in zip(first, ends, strict=True))
        return Chunk(first, sizes) if min(sizes) > 0 else None

    def of(self, values: Tensor, start: tuple[int, ...] | None = None) -> Tensor:
        """Returns the view of this chunk in `values`.

        `start`: index of the first element of `values` in the full tensor, or None if `values`
        begin where the full tensor begins.
        """
        start = (0,) * len(self.offsets) if start is None else start
        places = zip(self.offsets, self.ends, start, strict=True)
        return values[tuple(slice(first - s, end - s) for first, end, s in places)]


def chunks_of_range(
    spec: ParameterSpec, start: int, count: int
) -> Iterator[tuple[ShardSpec, Chunk, int]]:
    """Yields the chunks in elements [start, start + count) of the flattened local parameter.

    It yields (shard, chunk, first element of the chunk, counted from `start`). A bucket's shard may
    begin in the middle of a row, so a range of a matrix is at most three chunks: the rest of a row,
    whole rows, and the beginning of a row. With each further dimension the rest and the beginning
    are such ranges themselves. Elements outside of all shards are padding.

    Raises ValueError for shards that are not whole rows of the local parameter.
    """
    width = math.prod(spec.shape[1:])
    for shard in spec.shards:
        if math.prod(shard.shape[1:]) != width:
            raise ValueError(f"{shard.name}: {shard.shape} is not whole rows of {spec.shape}")
    for shard, low, high, at in spec.shards_in(start, count):
        for box, first in _boxes(shard.shape, low, high):
            offsets = tuple(map(sum, zip(shard.start, box.offsets, strict=True)))
            yield shard, Chunk(offsets, box.sizes), at + first - low


def _boxes(shape: tuple[int, ...], low: int, high: int) -> Iterator[tuple[Chunk, int]]:
    """Yields elements [low, high) of a flattened tensor as chunks of it.

    Each chunk comes with the index of its first element.
    """
    if len(shape) == 1:
        yield Chunk((low,), (high - low,)), low
        return
    width = math.prod(shape[1:])
    # The rest of the first row, whole rows, and the beginning of the last row.
    cuts = [low, min(high, -(-low // width) * width), max(low, high // width * width), high]
    for a, b in zip(sorted(cuts), sorted(cuts)[1:], strict=False):
        if a == b:
            continue
        row, first = divmod(a, width)
        if rows := (b - a) // width:
            yield Chunk((row, *(0 for _ in shape[1:])), (rows, *shape[1:])), a
            continue
        for box, at in _boxes(shape[1:], first, first + b - a):
            yield Chunk((row, *box.offsets), (1, *box.sizes)), a - first + at
