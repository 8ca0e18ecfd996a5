"""A group of one process that behaves like several, to measure one rank's share of a layer.

The peers hold what this rank holds, so a collective only copies: it has the shapes of a real group,
and no time of a wire.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


class Done:
    """Handle of a collective that ended when it started."""

    def wait(self) -> None:
        return None


@dataclass(frozen=True)
class MirroredPeers:
    """Does the collectives of rank 0 of a group of `size` ranks with equal tensors."""

    size: int

    def all_reduce(self, tensor: Tensor) -> Done:
        tensor.mul_(self.size)
        return Done()

    def reduce_scatter(self, tensor: Tensor, out: Tensor) -> Done:
        torch.mul(tensor.view(self.size, -1)[0], self.size, out=out.view(-1))
        return Done()

    def all_gather(self, tensor: Tensor, out: Tensor) -> Done:
        out.view(self.size, -1).copy_(tensor.view(-1))
        return Done()

    def all_to_all(self, tensor: Tensor, out: Tensor) -> Done:
        out.view(self.size, -1).copy_(tensor.view(self.size, -1)[0])
        return Done()

    def shift(self, tensor: Tensor, out: Tensor) -> Done:
        out.copy_(tensor)
        return Done()

    def takes_uneven(self, most: int) -> bool:
        return True

    def all_to_all_uneven(
        self, tensor: Tensor, given: Sequence[int], out: Tensor, taken: Sequence[int]
    ) -> None:
        """Receives what this rank sends to itself from each peer.

        On the way back each peer returns as much as it was sent. That differs from rank to rank,
        and values do not matter for a time: the first bytes are repeated.
        """
        own = tensor[: given[0]]
        for part in out.split(list(taken)):
            same = own if part.numel() <= own.numel() else tensor
            if same.numel() == 0:
                part.zero_()
            elif part.numel() > same.numel():
                part.copy_(same.repeat(-(-part.numel() // same.numel()))[: part.numel()])
            else:
                part.copy_(same[: part.numel()])
