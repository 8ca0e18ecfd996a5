"""Specs of local parameters, which list the shards of full tensors that they hold.

Full tensors do not depend on the layout: q, k and v are separate, as are gate and up, and the
vocabulary has no padding. Initialisation, gathering, comparison and resharding read only the specs,
so a layout changes only where the numbers are stored.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from operator import itemgetter
from typing import TYPE_CHECKING, TypeVar

import torch
from torch import Tensor

if TYPE_CHECKING:
    from parallel3d.parameters.declaration import Drawn, FullTensor


@dataclass(frozen=True)
class ShardSpec:
    """A shard of one full tensor inside a local parameter.

    Attributes:
        name: name of the full tensor, such as `layers.3.attention.q.weight`.
        start: first row (and column) of the shard in the full tensor.
        row: first row of the shard in the local parameter.
        std: standard deviation of the initial values around 0, or 0 if all values are `fill`.
        tp_replicas: number of consecutive tp ranks that hold this same shard. It is above 1 for
            norms of heads, and for key-value heads if there are fewer of them than ranks. Each rank
            has only the gradient of its own query heads, so these ranks sum their gradients.
        muon: whether Muon may update the tensor.
        drawn: how the initial values are drawn, if they do not follow from `std` and `fill`.
    """

    name: str
    full_shape: tuple[int, ...]
    start: tuple[int, ...]
    shape: tuple[int, ...]
    row: int = 0
    std: float = 0.0
    fill: float = 0.0
    tp_replicas: int = 1
    muon: bool = False
    drawn: Drawn | None = None

    def of_full(self, full: Tensor) -> Tensor:
        """Returns the shard as a view of the full tensor."""
        for dim, (start, length) in enumerate(zip(self.start, self.shape, strict=True)):
            full = full.narrow(dim, start, length)
        return full

    def of_local(self, local: Tensor) -> Tensor:
        """Returns the shard as a view of the local parameter."""
        return local.narrow(0, self.row, self.shape[0])


Kind = TypeVar("Kind")
NO_SHARD = ShardSpec("", (), (), ())  # represents a parameter that holds only padding


def tp_replicas_of(shard: ShardSpec) -> int:
    return shard.tp_replicas


@dataclass(frozen=True)
class ParameterSpec:
    """Maps a local parameter to full tensors.

    Attributes:
        shape: local shape, including the padding of the vocabulary.
        shards: the shards that it holds; rows outside of them are padding and stay zero.
        replicated: whether every tp rank holds the same values. Under sequence parallelism its
            gradient is a partial sum over the rank's tokens (Korthikanti et al. 2022 §4.2.2).
        tied: whether the first and the last stage each hold a copy of it (a tied word embedding).
        is_expert: whether it holds experts, whose gradients are summed over edp only.
        uses: how often a forward pass reads it, which is twice for a tied table if one rank holds
            the first and the last stage.
        decays: whether weight decay applies, as it does to all but biases and norms.
        wide: whether it is in fp32 or better although the run computes in 16 bits.
    """

    shape: tuple[int, ...]
    shards: tuple[ShardSpec, ...]
    replicated: bool
    tied: bool = False
    uses: int = 1
    is_expert: bool = False
    decays: bool = True
    wide: bool = False

    @classmethod
    def of(
        cls, tensors: Sequence[FullTensor], tp: int = 1, index: int = 0, experts: range = range(0)
    ) -> ParameterSpec:
        """Returns the spec of the parameter that holds a rank's part of declared tensors.

        Args:
            tp, index: the number of tensor-parallel ranks, and this rank's index among them.
            experts: the numbers of this rank's experts.
        """
        like, shards, row = tensors[0], [], 0
        for tensor in _stacked(tensors, experts):
            start, shape = tensor.start(tp, index), tensor.local_shape(tp)
            rows = min(shape[0], tensor.shape[0] - start[0])  # the rest is padding
            if rows > 0:
                shard = ShardSpec(
                    tensor.name,
                    tensor.shape,
                    start,
                    (rows, *shape[1:]),
                    row,
                    tensor.std,
                    tensor.fill,
                    tensor.summed_over(tp),
                    tensor.muon,
                    tensor.drawn,
                )
                shards.append(shard)
            row += shape[0]
        return cls(
            (row, *like.local_shape(tp)[1:]),
            tuple(shards),
            like.is_replicated(tp),
            is_expert=like.experts > 0,
            decays=like.decays,
            wide=like.wide,
        )

    def dtype(self, computed: torch.dtype) -> torch.dtype:
        """Returns the dtype of the parameter in a run that computes in `computed`."""
        return torch.promote_types(computed, torch.float32) if self.wide else computed

    def by_kind(
        self, kind_of: Callable[[ShardSpec], Kind], start: int, numel: int
    ) -> Iterator[tuple[Kind, int, int]]:
        """Yields (kind, first, end) for each run of shards of one kind.

        `first` and `end` are counted from `start`. Together the runs are elements [start, start +
        numel) of the flattened local parameter. Padding belongs to the shard before it.
        """
        width = math.prod(self.shape[1:])
        rows = [(kind_of(shard), shard.row) for shard in self.shards or (NO_SHARD,)]
        runs = [(kind, next(run)[1]) for kind, run in groupby(rows, itemgetter(0))]
        ends = [row for _, row in runs[1:]] + [self.shape[0] if self.shape else 1]
        for i, ((kind, row), end) in enumerate(zip(runs, ends, strict=True)):
            first = max(row * width - start, 0) if i else 0
            last = min(end * width - start, numel)
            if first < last:
                yield kind, first, last

    def runs(self, start: int, numel: int) -> Iterator[tuple[int, int, int]]:
        """Yields (tp_replicas, first, end) for runs of equal replication, like `by_kind`."""
        return self.by_kind(tp_replicas_of, start, numel)

    def shards_in(self, start: int, numel: int) -> Iterator[tuple[ShardSpec, int, int, int]]:
        """Yields (shard, first, end, at) of the shards in a range of the flattened parameter.

        [first, end) are elements of the flattened shard; `first` is `at` elements after `start`.
        """
        for shard in self.shards:
            begin = shard.row * math.prod(shard.shape[1:])
            first, end = max(start, begin), min(start + numel, begin + math.prod(shard.shape))
            if first < end:
                yield shard, first - begin, end - begin, first - start


def _stacked(tensors: Sequence[FullTensor], experts: range) -> Sequence[FullTensor]:
    """Returns the tensors of a parameter by rows: those of experts for each of these experts."""
    if not tensors[0].experts:
        return tensors
    return [t._replace(name=t.name.format(number)) for number in experts for t in tensors]
