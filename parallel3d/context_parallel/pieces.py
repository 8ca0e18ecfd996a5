"""Orders the pieces of sequences that context-parallel ranks hold, for layers that hand states on.

A piece is a run of consecutive tokens. All pieces of a split have the same length, and every rank
has the same number of them of each sequence.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from parallel3d.context_parallel.split import Ints
from parallel3d.device import accelerator


@dataclass(frozen=True)
class Pieces:
    """The pieces of b sequences, of which each rank holds p.

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
