"""Document boundaries of a micro-batch, for positions and attention."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from parallel3d.data.sampler import Sample
from parallel3d.device import accelerator


@dataclass(frozen=True)
class Documents:
    """The documents of b samples of s tokens, in tensors whose shapes do not depend on them, so
    that one compilation serves all.

    Not a tuple: FSDP2 moves the tensors of tuples in a forward's arguments to the device, and
    `bounds` has to stay on the host.

    Attributes:
        starts: (b, s) int32 on the device, `Sample.starts` of each sample.
        bounds: (b·s + 3,) int32 on the host, readable without a device synchronisation: the number
            n of documents, the length of the longest, n + 1 edges in the concatenated samples, and
            b·s as padding.
        edges: bounds[2:] on the device.
    """

    starts: Tensor
    bounds: Tensor
    edges: Tensor

    def positions(self) -> Tensor:
        """(b, s) int64 on the device: each token's place in its document."""
        return torch.arange(self.starts.shape[1], device=self.starts.device) - self.starts


def documents_of(
    samples: Sequence[Sample], numbers: Sequence[int], device: torch.device
) -> Documents:
    """Returns the documents of `samples`, which are `numbers` in the run.

    Raises ValueError for starts that are not positions where documents begin.
    """
    length = len(samples[0].loss_mask)
    rows = [_starts(sample, i, length) for sample, i in zip(samples, numbers, strict=True)]
    starts = np.stack(rows)
    begins = np.flatnonzero(starts == np.arange(length))
    edges = np.full(starts.size + 1, starts.size, dtype=np.int32)
    edges[: len(begins)] = begins
    longest = int(np.diff(edges).max())
    bounds = np.concatenate((np.array((len(begins), longest), dtype=np.int32), edges))
    moved = [accelerator.moved(torch.from_numpy(part), device) for part in (starts, edges)]
    return Documents(moved[0], torch.from_numpy(bounds), moved[1])


def _starts(sample: Sample, number: int, length: int) -> npt.NDArray[np.int32]:
    if sample.starts is None:
        return np.zeros(length, dtype=np.int32)
    starts = sample.starts.astype(np.int32, copy=False)
    place = np.arange(length, dtype=np.int32)
    is_begin = starts == place if starts.shape == place.shape else place == 0
    if not np.array_equal(starts, np.maximum.accumulate(np.where(is_begin, place, 0))):
        raise ValueError(
            f"sample {number}: starts[p] must be the position at which the document of p begins"
        )
    return starts
