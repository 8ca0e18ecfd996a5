"""Samples by a plan: whole documents side by side, the rest filled up with end-of-texts."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from parallel3d.data.packing.plan import PackingPlan
from parallel3d.data.sampler import Order, Sample
from parallel3d.data.tokens import Tokens


class PackSampler:
    """Packs, epoch after epoch. No token is told to predict another document, nor the padding."""

    masks = True

    def __init__(
        self,
        tokens: npt.NDArray[np.integer] | Tokens,
        plan: PackingPlan,
        seed: int,
        shuffle: bool,
        eot: int,
        name: str = "",
    ) -> None:
        """`tokens`: the stream that `plan` was made of; the rest as `Sampler`."""
        self.seq_length, self.windows = plan.room - 1, plan.packs
        self._tokens, self._plan, self._eot = tokens, plan, eot
        self._order = Order(plan.packs, seed, shuffle, name)

    def will_read(self, i: int) -> None:
        """Has the system fetch what sample `i` is made of, if it lies on a disk."""
        if isinstance(self._tokens, Tokens):
            for start, length in zip(*self._plan.pack(self._order.at(i)), strict=True):
                self._tokens.will_read(start, start + length)

    def sample(self, i: int) -> Sample:
        """Sample `i` >= 0 of the endless sequence of epochs. Raises OSError for a damaged plan."""
        tokens = np.full(self.seq_length + 1, self._eot, np.int64)
        mask = np.zeros(self.seq_length, np.bool_)
        starts = np.zeros(self.seq_length, np.int32)
        number, at = self._order.at(i), 0
        for start, length in zip(*self._plan.pack(number), strict=True):
            end = at + length
            piece = self._tokens[start : start + length]
            if piece.size != length or end > tokens.size:
                raise OSError(f"the plan of packs is damaged: pack {number} does not fit its text")
            tokens[at:end] = piece
            mask[at : end - 1] = True
            starts[at:end] = at
            at = end
        starts[at:] = at  # the padding is a document by itself
        return Sample(tokens, mask, starts)
