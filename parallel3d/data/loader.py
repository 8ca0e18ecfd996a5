"""Loads micro-batches as tensors; the global batch of a step is the same for every layout."""

from __future__ import annotations

import dataclasses
import math
import socket
import threading
import time
import weakref
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from fractions import Fraction
from itertools import islice
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from parallel3d.comm.exchange import all_gather_json
from parallel3d.context_parallel.documents import Documents, make_documents, whole_samples
from parallel3d.context_parallel.split import SequenceSplit
from parallel3d.data.sampler import (
    FieldSource,
    Finite,
    Masking,
    Prefetching,
    Sample,
    SampleSource,
    TrainingText,
)
from parallel3d.device import accelerator
from parallel3d.errors import UserError, users_place
from parallel3d.experts.balance import Balance
from parallel3d.models.layer_inputs import LayerInputs

if TYPE_CHECKING:
    from parallel3d.comm.group import Group
    from parallel3d.loop.keys import TrainConfig


class MicroBatch(NamedTuple):
    """The tensors of a micro-batch.

    Attributes:
        tokens, labels: (micro batch, seq) int64; None if not needed.
        loss_mask: (micro batch, seq) bool; None if not needed.
        inputs: the tokens' further properties, on every stage: the numbers of the samples and,
            where they matter, documents and the data for balancing experts.
    """

    tokens: torch.Tensor | None
    labels: torch.Tensor | None
    loss_mask: torch.Tensor | None
    inputs: LayerInputs


class OwnMicroBatch(NamedTuple):
    """A micro-batch for a user's own model: `inputs.batch` has the fields of the samples."""

    inputs: LayerInputs


class Batches:
    """Reads the micro-batches of one data-parallel rank.

    The global batch of a step begins at sample `first` and does not depend on dp or
    micro_batch_size. Each rank has a contiguous share of its samples, divided into consecutive
    micro-batches. Without `needs_batch`, as on middle pipeline stages, micro-batches hold only the
    samples' numbers, their documents if `document_mask` is set, and their padding if `routes` is
    set. With `fields_in`, every stage gets all fields of the samples (`OwnMicroBatch`).
    """

    def __init__(
        self,
        source: SampleSource,
        micro_batch_size: int,
        num_microbatches: int,
        dp_rank: int,
        device: torch.device | str,
        needs_batch: bool = True,
        document_mask: bool = False,
        stride: int = 0,
        split: SequenceSplit | None = None,
        vocab_size: int | None = None,
        routes: bool = False,
        measures: bool = False,
        fields_in: torch.dtype | None = None,
    ) -> None:
        """Prepares to read samples of `source`.

        Args:
            stride: number of samples of all ranks in a step; above 0, a thread reads ahead.
            split: how context-parallel ranks split a sample, or None if they do not. Each rank
                reads the whole sample and keeps its own tokens.
            vocab_size: the vocabulary size against which samples are checked, or None for no check.
            routes: whether the stage has experts, which must know the padding.
            measures: whether the model depends on the length of a sample without its padding.
            fields_in: for a user's own model, the dtype of its samples' floating-point fields.
        """
        self.source = source
        self._needs_batch = needs_batch
        self._masks = source.masks if isinstance(source, Masking) else True
        self._document_mask = document_mask
        self._micro_batch_size = micro_batch_size
        self._dp_rank = dp_rank
        self._device = torch.device(device)
        self._split = split
        self._vocab_size = vocab_size
        self._routes = routes
        # Sources without masks have no padding either.
        self._measures = measures and self._masks and not document_mask
        self._fields = None if fields_in is None else SampleFields(fields_in, vocab_size)
        self._reads = needs_batch or document_mask or (routes and self._masks) or self._measures
        self._reads = self._reads or fields_in is not None
        self._ahead: ReadAhead | None = None
        self._reads_ahead = stride > 0 and self._reads
        self.resize(num_microbatches, stride)

    def resize(self, num_microbatches: int, stride: int) -> None:
        """Sets a rank's number of micro-batches and `stride` from the next step on."""
        self._num_microbatches = num_microbatches
        self._imbalances: dict[int, float] = {}  # of the last step, by number of the micro-batch
        if self._reads_ahead:
            share = num_microbatches * self._micro_batch_size
            self._ahead = ReadAhead(self.source, self._dp_rank * share, share, stride)

    def indices(self, first: int, m: int) -> range:
        """Returns the sample numbers of micro-batch `m` of the global batch that begins at `first`.

        Raises IndexError if there is no such micro-batch.
        """
        if not 0 <= m < self._num_microbatches:
            raise IndexError(f"micro-batch {m} of {self._num_microbatches}")
        share = self._num_microbatches * self._micro_batch_size
        start = first + self._dp_rank * share + m * self._micro_batch_size
        return range(start, start + self._micro_batch_size)

    def micro_batch(self, first: int, m: int) -> MicroBatch | OwnMicroBatch:
        """Returns micro-batch `m` of the global batch that begins at sample `first`.

        Its tensors are on the device.
        """
        indices = self.indices(first, m)
        numbers = self._moved(torch.tensor(indices, dtype=torch.int64))
        if self._fields is not None:
            return self._own_micro_batch(first, indices, numbers)
        samples = [self._sample(first, i) for i in indices] if self._reads else []
        documents = None
        if self._document_mask:
            documents = documents_of(samples, indices, self._device, self._split)
        elif self._measures or (self._split is not None and self._split.size > 1):
            split = self._split or SequenceSplit(self.source.seq_length)
            used = self._used(samples) if self._measures else None
            documents = whole_samples(len(indices), self._device, split, used)
        if documents is not None and documents.shard is not None:
            self._imbalances[m] = documents.shard.imbalance
        balance = self._balance(numbers, samples, documents) if self._routes else None
        inputs = LayerInputs(numbers, documents, balance)
        if not self._needs_batch:
            return MicroBatch(None, None, None, inputs)
        whole = np.stack([s.tokens for s in samples])
        parts = [whole[:, :-1], whole[:, 1:], np.stack([s.loss_mask for s in samples])]
        if documents is not None and documents.shard is not None:
            parts = [documents.shard.take(part) for part in parts]
        tokens, labels, mask = (self._moved(torch.from_numpy(p.copy(order="C"))) for p in parts)
        return MicroBatch(tokens, labels, mask, inputs)

    def _own_micro_batch(
        self, first: int, indices: Sequence[int], numbers: torch.Tensor
    ) -> OwnMicroBatch:
        assert self._fields is not None
        samples: list[Any] = [self._sample(first, i) for i in indices]
        stacked = self._fields.stacked(samples, indices)
        documents = None
        if self._document_mask and isinstance(samples[0], Sample):
            documents = documents_of(samples, indices, self._device)
        fields = {name: self._moved(field) for name, field in stacked.items()}
        return OwnMicroBatch(LayerInputs(numbers, documents, batch=fields))

    def _balance(
        self, numbers: torch.Tensor, samples: Sequence[Sample], documents: Documents | None
    ) -> Balance:
        """Returns the `Balance` of a micro-batch, which marks padding for the experts."""
        length = self.source.seq_length
        lengths = self._used(samples) or [length] * self._micro_batch_size
        shard = None if documents is None else documents.shard
        used = None
        is_padded = self._split is not None and self._split.padded > length
        if min(lengths) < length or is_padded:
            mask = np.arange(length) < np.array(lengths)[:, None]
            mask = mask if shard is None else shard.take(mask)
            used = self._moved(torch.from_numpy(mask.copy(order="C")))
        on_device = self._moved(torch.tensor(lengths, dtype=torch.float64))
        positions = None if shard is None else shard.positions
        return Balance(numbers, positions, used, on_device)

    def _used(self, samples: Sequence[Sample]) -> list[int]:
        """Returns the number of each sample's inputs before its padding."""
        return [self.source.seq_length if s.used is None else s.used for s in samples]

    def routed_count(self, first: int) -> int:
        """Counts the tokens, without padding, of this rank's share of the global batch."""
        length = self.source.seq_length
        if not self._masks:
            return self._num_microbatches * self._micro_batch_size * length
        return sum(length if s.used is None else s.used for s in self._share(first))

    @property
    def imbalance(self) -> float | None:
        """The mean `SequenceShard.imbalance` of the last step; None if sequences are not split."""
        found = self._imbalances.values()
        return sum(found) / len(found) if found else None

    def token_count(self, first: int) -> int:
        """Counts the unmasked labels of this rank's share of the global batch from `first` on."""
        if not self._masks:
            return self._num_microbatches * self._micro_batch_size * self.source.seq_length
        return sum(int(np.count_nonzero(sample.loss_mask)) for sample in self._share(first))

    def byte_count(self, first: int, sizes: npt.NDArray[np.int64]) -> int:
        """Counts the bytes of the unmasked labels in this rank's share of the global batch.

        `sizes` has the number of bytes of each token of the vocabulary.
        """
        return sum(int(sizes[s.tokens[1:][s.loss_mask]].sum()) for s in self._share(first))

    def _share(self, first: int) -> Iterator[Sample]:
        """Yields this rank's samples of the global batch from `first` on, and keeps them ready."""
        for m in range(self._num_microbatches):
            for i in self.indices(first, m):
                yield self._sample(first, i, keep=True)

    def _sample(self, first: int, i: int, keep: bool = False) -> Sample:
        if self._ahead is None:
            try:
                sample = self.source.sample(i)
            except UserError:
                raise
            except Exception as error:
                if place := users_place(error):
                    error.add_note(f"The error was raised by sample({i}){place}.")
                raise
            if self._vocab_size is None or self._fields is not None:
                return sample
            return checked(sample, i, self._vocab_size)
        self._ahead.step(first)
        return self._ahead.sample(i, keep)

    def _moved(self, tensor: torch.Tensor) -> torch.Tensor:
        return accelerator.moved(tensor, self._device)


def checked(sample: Sample, number: int, vocab_size: int) -> Sample:
    """Checks a sample of the user's own source, and returns it with a bool mask.

    On an accelerator, a token beyond the vocabulary would become a vector of zeros, and weights in
    a mask would count as ones; either would give a finite but wrong loss. Raises UserError.
    """
    named = f"sample {number} of train_source or valid_source"
    if not hasattr(sample, "tokens") or not hasattr(sample, "loss_mask"):
        raise UserError(
            f"{named} is of type {type(sample).__name__}, but the transformer takes only "
            "p3d.Sample(tokens, loss_mask); other samples are for a model of your own"
        )
    tokens, mask = np.asarray(sample.tokens), np.asarray(sample.loss_mask)
    if tokens.ndim != 1 or mask.shape != (len(tokens) - 1,):
        raise UserError(
            f"{named}: tokens have shape {tokens.shape} and loss_mask {mask.shape}: they must be "
            "(seq + 1,) and (seq,)"
        )
    if tokens.dtype.kind not in "iu":
        raise UserError(
            f"{named}: tokens are of type {tokens.dtype}: give whole numbers, such as int64"
        )
    low, high = int(tokens.min()), int(tokens.max())
    if low < 0 or high >= vocab_size:
        raise UserError(
            f"{named} has token {low if low < 0 else high}: tokens, which are the labels too, must "
            f"be from 0 to model.vocab_size - 1 = {vocab_size - 1}; to ignore a label, use "
            "loss_mask"
        )
    if mask.dtype != np.bool_:
        whole = mask.astype(np.bool_)
        if mask.dtype.kind not in "iuf" or (mask != whole).any():
            raise UserError(
                f"{named}: loss_mask of type {mask.dtype} must be bool, or hold only the numbers "
                "0 and 1: it tells which labels count, and weights are not supported"
            )
        mask = whole
    return sample._replace(tokens=tokens, loss_mask=mask)


# Samples of any form, for a user's own model


class SampleFields:
    """Stacks samples of one form; the first sample that it gets defines the form.

    A `Sample` has the fields `tokens`, `labels` and `loss_mask`.

    Args:
        dtype: the dtype of the floating-point fields.
        vocab_size: the vocabulary size against which tokens are checked, or None for no check.
    """

    def __init__(self, dtype: torch.dtype, vocab_size: int | None = None) -> None:
        self._dtype = dtype
        self._vocab_size = vocab_size
        self._form: dict[str, tuple[tuple[int, ...], np.dtype]] = {}
        self._defined_by = 0  # the number of the sample that defined the form

    def stacked(self, samples: Sequence[Any], numbers: Sequence[int]) -> dict[str, torch.Tensor]:
        """Returns the fields of the samples with these numbers, each (samples, …), on the CPU.

        Raises UserError for a sample that has another form than the first.
        """
        rows = [self._checked(sample, i) for sample, i in zip(samples, numbers, strict=True)]
        fields = {}
        for name in self._form:
            whole = torch.from_numpy(np.stack([row[name] for row in rows]))
            fields[name] = whole.to(self._dtype) if whole.is_floating_point() else whole
        return fields

    def _checked(self, sample: Any, number: int) -> dict[str, npt.NDArray[Any]]:
        row = {name: array_of(each, name, number) for name, each in self._named(sample, number)}
        form = {name: (array.shape, array.dtype) for name, array in row.items()}
        if not self._form:
            self._form, self._defined_by = form, number
        if form != self._form:
            self._refuse(form, number)
        return row

    def _named(self, sample: Any, number: int) -> Iterable[tuple[str, Any]]:
        if isinstance(sample, Sample):
            if self._vocab_size is not None:
                sample = checked(sample, number, self._vocab_size)
            tokens = np.asarray(sample.tokens).astype(np.int64, copy=False)
            mask = np.asarray(sample.loss_mask)
            return {"tokens": tokens[:-1], "labels": tokens[1:], "loss_mask": mask}.items()
        if not isinstance(sample, Mapping) or not all(isinstance(name, str) for name in sample):
            raise UserError(
                f"sample {number} is of type {type(sample).__name__}, but a sample must be a "
                "p3d.Sample, or a mapping of names to arrays or numbers, such as "
                "{'image': image, 'label': 3}"
            )
        if not sample:
            raise UserError(f"sample {number} has no field, but must have at least one")
        return sample.items()

    def _refuse(self, form: Mapping[str, tuple[tuple[int, ...], np.dtype]], number: int) -> None:
        """Raises UserError that names how a sample differs from the first."""
        usual, first = self._form, f"sample {self._defined_by}"
        if form.keys() != usual.keys():
            raise UserError(
                f"sample {number} has the fields {', '.join(form)}, but {first} has "
                f"{', '.join(usual)}; all samples must have the same fields"
            )
        name = next(name for name in usual if form[name] != usual[name])
        (shape, dtype), (usual_shape, usual_dtype) = form[name], usual[name]
        if shape != usual_shape:
            raise UserError(
                f"the field {name} of sample {number} has shape {shape}, but that of {first} has "
                f"{usual_shape}; all samples must have the same shapes, so pad or cut it"
            )
        raise UserError(
            f"the field {name} of sample {number} is of type {dtype}, but that of {first} is of "
            f"type {usual_dtype}; all samples must have the same types"
        )


def array_of(value: Any, name: str, number: int) -> npt.NDArray[Any]:
    """Returns a field of a sample as an array of a type that torch has; raises UserError."""
    if isinstance(value, torch.Tensor):
        value = value.detach().cpu()
        value = (value.float() if value.dtype == torch.bfloat16 else value).numpy()
    try:
        array = np.asarray(value)
    except ValueError:  # lists of unequal lengths
        array = np.asarray(None)
    if array.dtype.kind not in "biuf":
        raise UserError(
            f"the field {name} of sample {number} is of type {type(value).__name__}"
            + (f" with elements of {array.dtype}" if array.dtype.kind != "O" else "")
            + ", but a field must be a number, or an array of numbers or bools of one shape"
        )
    if array.dtype.kind == "u" and array.dtype.itemsize > 1:
        array = array.astype(np.int64)  # torch computes with few unsigned types
    if array.dtype.kind == "f" and array.dtype.itemsize > 8:
        array = array.astype(np.float64)
    return array.astype(array.dtype.newbyteorder("="), copy=False)


# Document boundaries of a micro-batch, for positions and attention


def documents_of(
    samples: Sequence[Sample],
    numbers: Sequence[int],
    device: torch.device,
    split: SequenceSplit | None = None,
) -> Documents:
    """Returns the documents of `samples`, whose numbers in the run are `numbers`.

    Raises ValueError if a sample's `starts` name a position at which no document begins.
    """
    length = len(samples[0].loss_mask)
    split = split or SequenceSplit(length)
    rows = [_checked_starts(sample, i, length) for sample, i in zip(samples, numbers, strict=True)]
    return make_documents(split.pad_starts(np.stack(rows)), device, split)


def _checked_starts(sample: Sample, number: int, length: int) -> npt.NDArray[np.int32]:
    if sample.starts is None:
        return np.zeros(length, dtype=np.int32)
    starts = sample.starts.astype(np.int32, copy=False)
    place = np.arange(length, dtype=np.int32)
    is_begin = starts == place if starts.shape == place.shape else place == 0
    if not np.array_equal(starts, np.maximum.accumulate(np.where(is_begin, place, 0))):
        raise ValueError(
            f"sample {number}: starts[p] must be the position at which the document of "
            "input p begins"
        )
    return starts


# A thread reads the next samples. It prefetches all of them before it reads the first, so the disk
# serves later samples while the first are used.


_BYTES = 256 << 20  # maximum number of bytes of samples read ahead
_BYTES_PER_TOKEN = 16
Futures = dict[int, Future[Sample]]  # samples by their numbers
_PAUSE_S = 1e-4  # pause between two samples, so that the main thread gets the interpreter lock


class ReadAhead:
    """Reads one rank's samples ahead: `share` samples per step, from `first` + `offset` on.

    An exception that the source raises for a sample is raised when the sample is taken. The thread
    ends with this object.
    """

    def __init__(self, source: SampleSource, offset: int, share: int, stride: int) -> None:
        """Starts the thread; `stride` is the number of samples of all ranks in a step."""
        self.source = source
        self._offset = offset
        self._share = share
        self._stride = stride
        # The thread reads up to the end of the next step, within the limit of bytes.
        self._most = max(1, min(2 * share, _BYTES // (_BYTES_PER_TOKEN * source.seq_length)))
        self._first = -1
        self._order: Iterator[int] = iter(())
        self._ahead: Futures = {}
        self._wanted: SimpleQueue[Futures] = SimpleQueue()
        threading.Thread(target=_read, args=(source, self._wanted), daemon=True).start()
        weakref.finalize(self, self._wanted.put, {})

    def step(self, first: int) -> None:
        """Announces the step that begins at sample `first`."""
        if first == self._first:
            return
        if self._first < 0 or first != self._first + self._stride:
            self._order = self._numbers(first)
            self._drop(list(self._ahead))
        self._first = first
        self._drop([i for i in self._ahead if i < first + self._offset])
        self._fill()

    def sample(self, i: int, keep: bool = False) -> Sample:
        """Returns sample `i`; with `keep`, holds it for another call."""
        found = self._ahead.get(i) if keep else self._ahead.pop(i, None)
        if not keep:
            self._fill()
        return self.source.sample(i) if found is None else found.result()

    def _numbers(self, first: int) -> Iterator[int]:
        while True:
            yield from range(first + self._offset, first + self._offset + self._share)
            first += self._stride

    def _drop(self, numbers: list[int]) -> None:
        for i in numbers:
            self._ahead.pop(i).cancel()

    def _fill(self) -> None:
        free = self._most - len(self._ahead)
        if self._first >= 0 and 2 * free >= self._most:  # requests are made in bulk, not one by one
            more: Futures = {i: Future() for i in islice(self._order, free)}
            self._ahead |= more
            self._wanted.put(more)


def _read(source: SampleSource, wanted: SimpleQueue[Futures]) -> None:
    """Runs in the thread: reads the samples of each dict in `wanted`, until a dict is empty."""
    while samples := wanted.get():
        with suppress(Exception):  # reading the sample raises the same error
            if isinstance(source, Prefetching):
                for i in samples:
                    source.will_read(i)
        for i, found in samples.items():
            if not found.set_running_or_notify_cancel():
                continue
            try:
                found.set_result(source.sample(i))
            except Exception as error:
                found.set_exception(error)
            time.sleep(_PAUSE_S)


# Checks that all ranks read the same text


def check_same_text(corpus: TrainingText, world: Group, device: torch.device) -> None:
    """Raises UserError on every rank if two ranks have different tokens; collective.

    The tokens differ if a file grows while the ranks start, or if hosts hold different copies.
    """
    sizes = corpus.train_tokens, corpus.valid_tokens
    facts = [corpus.fingerprint, corpus.tokenizer, corpus.eot, *sizes, socket.gethostname()]
    gathered = all_gather_json(facts, world.handle, device)
    texts = [tuple(facts[:-1]) for facts in gathered]
    usual, _ = Counter(texts).most_common(1)[0]
    odd = [rank for rank, text in enumerate(texts) if text != usual]
    if not odd:
        return
    said = " and ".join(
        f"rank {rank} on {gathered[rank][-1]} reads {sum(texts[rank][3:]):,} tokens (fingerprint "
        f"{texts[rank][0][:12]}, tokenizer {texts[rank][1][:12]})"
        for rank in sorted((odd[0], texts.index(usual)))
    )
    raise UserError(
        f"the ranks do not read the same text: {said}; start again when the text is complete, "
        "and give a data.path with the same text on every host"
    )


def with_length(
    train: TrainConfig, source: SampleSource | FieldSource, seq_length: int
) -> TrainConfig:
    """Returns `train` with `epochs` converted to `tokens` by the length of the source's epoch.

    A sample counts `seq_length` tokens (`model.seq_length`), and 1 if it is no text.

    Raises UserError if the source lacks `windows`, its number of samples.
    """
    epochs = train.epochs
    if epochs is None:
        return train
    if not isinstance(source, Finite):
        raise UserError(
            f"train.epochs={epochs:g} needs a source that has its number of samples as `windows`; "
            "give train.tokens instead"
        )
    samples = math.ceil(Fraction(repr(epochs)) * source.windows)
    tokens = float(samples * seq_length)
    return dataclasses.replace(train, epochs=None, tokens=tokens)
