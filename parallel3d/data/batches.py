"""Micro-batches as tensors. The global batch of a step is the same samples for every layout."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

import numpy as np
import torch

from parallel3d.data.documents import Documents, documents_of
from parallel3d.data.read_ahead import ReadAhead
from parallel3d.data.sampler import Sample
from parallel3d.device import accelerator


class SampleSource(Protocol):
    """Anything with samples of one length.

    A source whose loss masks are all True may say so by an attribute `masks` = False beside
    `seq_length`; `Batches.token_count` then need not read it.
    """

    def sample(self, i: int) -> Sample:
        """Sample `i` >= 0, always the same for the same i."""
        ...


class MicroBatch(NamedTuple):
    """Tensors of shape (micro batch, seq): tokens and labels int64, loss_mask bool; None on stages
    that do not read them. samples: (micro batch,) int64, their numbers in the run. documents: on
    every stage, or None where a sample is one document."""

    tokens: torch.Tensor | None
    labels: torch.Tensor | None
    loss_mask: torch.Tensor | None
    samples: torch.Tensor
    documents: Documents | None = None

    @property
    def starts(self) -> torch.Tensor | None:
        """(micro batch, seq) int32: where each token's document begins."""
        return None if self.documents is None else self.documents.starts


class Batches:
    """One data-parallel rank's micro-batches.

    A step trains on the next global batch of samples, from `first` on, whatever dp and
    micro_batch_size are; rank d has a contiguous share of them, its micro-batches in order.

    With `reads` false (stages between the ends) micro-batches hold the samples' numbers alone, and
    with `document_mask` their documents.
    """

    def __init__(
        self,
        source: SampleSource,
        micro_batch_size: int,
        num_microbatches: int,
        dp_rank: int,
        device: torch.device | str,
        reads: bool = True,
        document_mask: bool = False,
        stride: int = 0,
    ) -> None:
        """`stride` > 0: the samples of a step of all ranks; a thread reads those of the next steps,
        so `source` must not change when it is read."""
        self._source, self._reads, self._document_mask = source, reads, document_mask
        self._micro_batch_size = micro_batch_size
        self._num_microbatches = num_microbatches
        self._dp_rank = dp_rank
        self._device = torch.device(device)
        self._ahead: ReadAhead | None = None
        if stride and (reads or document_mask):
            share = num_microbatches * micro_batch_size
            self._ahead = ReadAhead(source, dp_rank * share, share, stride)

    def indices(self, first: int, m: int) -> range:
        """The samples of micro-batch `m` of the global batch that begins at sample `first`.

        IndexError if there is no such micro-batch.
        """
        if not 0 <= m < self._num_microbatches:
            raise IndexError(f"micro-batch {m} of {self._num_microbatches}")
        share = self._num_microbatches * self._micro_batch_size
        start = first + self._dp_rank * share + m * self._micro_batch_size
        return range(start, start + self._micro_batch_size)

    def micro_batch(self, first: int, m: int) -> MicroBatch:
        """Micro-batch `m` of the global batch from sample `first` on, on the device."""
        indices = self.indices(first, m)
        numbers = self._moved(torch.tensor(indices, dtype=torch.int64))
        if not (self._reads or self._document_mask):
            return MicroBatch(None, None, None, numbers)
        samples = [self._sample(first, i) for i in indices]
        documents = None
        if self._document_mask:
            documents = documents_of(samples, indices, self._device)
        if not self._reads:
            return MicroBatch(None, None, None, numbers, documents)
        tokens = torch.from_numpy(np.stack([s.tokens for s in samples]))
        mask = torch.from_numpy(np.stack([s.loss_mask for s in samples]))
        return MicroBatch(
            self._moved(tokens[:, :-1].contiguous()),
            self._moved(tokens[:, 1:].contiguous()),
            self._moved(mask),
            numbers,
            documents,
        )

    def token_count(self, first: int) -> int:
        """Unmasked tokens of this rank's share of the global batch from sample `first` on."""
        if not getattr(self._source, "masks", True):
            return self._num_microbatches * self._micro_batch_size * self._source.seq_length
        return sum(
            int(np.count_nonzero(self._sample(first, i, keep=True).loss_mask))
            for m in range(self._num_microbatches)
            for i in self.indices(first, m)
        )

    def _sample(self, first: int, i: int, keep: bool = False) -> Sample:
        if self._ahead is None:
            return self._source.sample(i)
        self._ahead.step(first)
        return self._ahead.sample(i, keep)

    def _moved(self, tensor: torch.Tensor) -> torch.Tensor:
        return accelerator.moved(tensor, self._device)


class InOrder:
    """Micro-batches in the order of their forwards; on an accelerator the next is made ahead.

    One that several chunks of a rank read is made once, and kept until the last has read it.

    There a forward is queued long before it is done. `look_ahead`, called then, samples, stacks and
    pins the next micro-batch while the device computes, not between two forwards, when it may have
    nothing to do. The first of a step is made when it is asked for: the device then still has the
    optimizer's work of the step before.

    Args:
        load: micro-batch number → tensors.
        order: the numbers in the order of their forwards, one for each that reads them.
    """

    def __init__(
        self, load: Callable[[int], MicroBatch], order: Sequence[int], device: torch.device
    ) -> None:
        self.load, self.left = load, deque(dict.fromkeys(order))
        self.readers = Counter(order)
        self.looks_ahead = accelerator.is_accelerator(device)
        self.ahead: MicroBatch | None = None
        self.held: dict[int, MicroBatch] = {}

    def take(self, m: int) -> MicroBatch:
        """Micro-batch `m`, which is the next one or has been read before by another chunk."""
        if m not in self.held:
            batch, self.ahead = self.ahead, None
            self.held[m] = self.load(self.left.popleft()) if batch is None else batch
        self.readers[m] -= 1
        return self.held[m] if self.readers[m] else self.held.pop(m)

    def look_ahead(self) -> None:
        """Makes the next one, if there is one, and if `looks_ahead`."""
        if self.looks_ahead and self.ahead is None and self.left:
            self.ahead = self.load(self.left.popleft())
