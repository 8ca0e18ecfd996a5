"""Simulates a group of several ranks in one process, to time one rank's share of a layer.

All simulated ranks hold the same tensors as this rank, so a collective only copies: its result has
the shape that it has in a real group, and no time is spent on a network.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


class FinishedWork:
    """The handle of a collective that ended before its call returned."""

    def wait(self) -> None:
        return None


@dataclass(frozen=True)
class MirroredPeers:
    """Performs the collectives of rank 0 in a group of `size` ranks with equal tensors."""

    size: int

    def all_reduce(self, tensor: Tensor) -> FinishedWork:
        tensor.mul_(self.size)
        return FinishedWork()

    def reduce_scatter(self, tensor: Tensor, out: Tensor) -> FinishedWork:
        torch.mul(tensor.view(self.size, -1)[0], self.size, out=out.view(-1))
        return FinishedWork()

    def all_gather(self, tensor: Tensor, out: Tensor) -> FinishedWork:
        out.view(self.size, -1).copy_(tensor.view(-1))
        return FinishedWork()

    def all_to_all(self, tensor: Tensor, out: Tensor) -> FinishedWork:
        out.view(self.size, -1).copy_(tensor.view(self.size, -1)[0])
        return FinishedWork()

    def shift(self, tensor: Tensor, out: Tensor) -> FinishedWork:
        out.copy_(tensor)
        return FinishedWork()

    def takes_uneven(self, most: int) -> bool:
        return True

    def all_to_all_uneven(
        self, tensor: Tensor, given: Sequence[int], out: Tensor, taken: Sequence[int]
    ) -> None:
        """Fills each peer's part of `out` with the bytes that this rank sends to itself.

        A part may need more bytes than these, because a peer returns as many tokens as it was sent.
        Then bytes are repeated, as the values do not matter for a measurement of time.
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
