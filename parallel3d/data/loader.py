"""Micro-batches as tensors. The global batch of a step is the same samples for every layout."""

from __future__ import annotations

import threading
import time
import weakref
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from typing import NamedTuple, Protocol

import numpy as np
import torch

from parallel3d.data.documents import Documents, documents_of
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


# Samples that are there when they are asked for: a thread reads the next ones meanwhile.
#
# Which ones is known, since sample i is a function of i. The thread first tells the system what it
# will read, all of it, and then reads: a disk serves the one while the other is taken.


_BYTES = 256 << 20  # that samples read ahead hold at most
_EACH = 16  # bytes a token of a sample
_PAUSE_S = 1e-4  # between two samples, for those who run the same Python


class Source(Protocol):
    """What is read ahead of: by a thread beside others, so it must not change when it is read.

    `will_read(i)`, if it has that, tells the system of a sample that `sample` is to read soon.
    """

    seq_length: int

    def sample(self, i: int) -> Sample: ...


class ReadAhead:
    """The samples of one rank, step after step: of a step `share`, from `first` + `offset` on.

    As the source that it reads from, but for time: what that raises for a sample is raised where
    the sample is asked for. The thread ends with this object.
    """

    def __init__(self, source: Source, offset: int, share: int, stride: int) -> None:
        """`stride`: samples of a step of all ranks."""
        self.source, self.seq_length = source, source.seq_length
        self.masks = getattr(source, "masks", True)
        self._offset, self._share, self._stride = offset, share, stride
        # Up to the end of the next step.
        self._most = max(1, min(2 * share, _BYTES // (_EACH * source.seq_length)))
        self._first = -1
        self._order: Iterator[int] = iter(())
        self._shelf: _Shelf | None = None

    def step(self, first: int) -> None:
        """The step that begins at sample `first` is next, or goes on."""
        if first == self._first:
            return
        if self._shelf is None:
            self._shelf = _Shelf(self.source)
            weakref.finalize(self, self._shelf.end)
            threading.Thread(target=_read, args=(self._shelf,), daemon=True).start()
        if self._first < 0 or first != self._first + self._stride:
            self._order = self._numbers(first)
            self._shelf.clear()
        self._first = first
        self._shelf.drop_before(first + self._offset)
        self._fill()

    def sample(self, i: int, keep: bool = False) -> Sample:
        """Sample `i`; `keep`: it will be asked for again."""
        found = None if self._shelf is None else self._shelf.take(i, keep)
        if not keep:
            self._fill()
        if found is None:
            return self.source.sample(i)
        if isinstance(found, Exception):
            raise found
        return found

    def _numbers(self, first: int) -> Iterator[int]:
        while True:
            yield from range(first + self._offset, first + self._offset + self._share)
            first += self._stride

    def _fill(self) -> None:
        if self._shelf is None:
            return
        room = self._most - self._shelf.count()
        if 2 * room >= self._most:  # by and by, not one for each that is taken
            self._shelf.want([next(self._order) for _ in range(room)])


class _Shelf:
    """What is wanted, what is being read, and what has been."""

    def __init__(self, source: Source) -> None:
        self.source = source
        self.changed = threading.Condition()
        self.wanted: deque[int] = deque()
        self.pending: set[int] = set()  # wanted, or being read
        self.found: dict[int, Sample | Exception] = {}
        self.ended = False
        self.waiting = False  # for a sample that is being read

    def count(self) -> int:
        return len(self.pending) + len(self.found)

    def want(self, numbers: list[int]) -> None:
        with self.changed:
            self.wanted.extend(numbers)
            self.pending.update(numbers)
            self.changed.notify_all()

    def take(self, i: int, keep: bool) -> Sample | Exception | None:
        """Sample `i`, waited for if it is wanted; None if it is not."""
        with self.changed:
            while i in self.pending and not self.ended:
                self.waiting = True
                self.changed.wait()
            self.waiting = False
            return self.found.get(i) if keep else self.found.pop(i, None)

    def put(self, i: int, sample: Sample | Exception) -> None:
        with self.changed:
            if i in self.pending:  # else it was cleared meanwhile
                self.pending.discard(i)
                self.found[i] = sample
                self.changed.notify_all()

    def drop_before(self, first: int) -> None:
        with self.changed:
            for i in [i for i in self.found if i < first]:
                del self.found[i]

    def clear(self) -> None:
        with self.changed:
            self.wanted.clear()
            self.pending.clear()
            self.found.clear()

    def end(self) -> None:
        with self.changed:
            self.ended = True
            self.changed.notify_all()


def _read(shelf: _Shelf) -> None:
    """The thread: reads what is wanted until the end."""
    tell = getattr(shelf.source, "will_read", None)
    while True:
        with shelf.changed:
            while not shelf.wanted and not shelf.ended:
                shelf.changed.wait()
            if shelf.ended:
                return
            numbers = list(shelf.wanted)
            shelf.wanted.clear()
        with suppress(Exception):  # whatever it is, reading will meet it again
            for i in numbers if tell is not None else ():
                tell(i)
        for i in numbers:
            if i not in shelf.pending:
                continue
            try:
                found: Sample | Exception = shelf.source.sample(i)
            except Exception as error:
                found = error
            shelf.put(i, found)
            if not shelf.waiting:
                time.sleep(_PAUSE_S)
