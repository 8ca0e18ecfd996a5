"""Document boundaries of a micro-batch, for positions and attention."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from parallel3d.context_parallel.documents import Documents, SequenceSplit, make_documents
from parallel3d.data.sampler import Sample


def documents_of(
    samples: Sequence[Sample],
    numbers: Sequence[int],
    device: torch.device,
    split: SequenceSplit | None = None,
) -> Documents:
    """Returns the documents of `samples`, which are `numbers` in the run.

    Raises ValueError for starts that are not positions where documents begin.
    """
    length = len(samples[0].loss_mask)
    split = split or SequenceSplit(length)
    rows = [_starts(sample, i, length) for sample, i in zip(samples, numbers, strict=True)]
    return make_documents(split.pad_starts(np.stack(rows)), device, split)


def whole_samples(number: int, device: torch.device, split: SequenceSplit) -> Documents:
    """Returns the documents of `number` samples that are one document each."""
    starts = np.zeros((number, split.length), dtype=np.int32)
    return make_documents(split.pad_starts(starts), device, split)


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
