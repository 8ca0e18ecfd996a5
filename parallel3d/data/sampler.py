"""Maps sample i to a window of the stream; the result depends only on the seed and i."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Mapping
from typing import NamedTuple, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

from parallel3d.data.keys import DataConfig
from parallel3d.data.tokens import Tokens, WatchedFile
from parallel3d.models.keys import ModelConfig

_ROUNDS = 8
LOSS_MASK = "loss_mask"  # the field of a sample that tells what of it counts in the loss

# A function that gets (first, last + 1) and returns the positions at which documents begin in this
# range of the stream.
Starts = Callable[[int, int], npt.NDArray[np.int64]]


class Sample(NamedTuple):
    """A sample of `seq` inputs and as many labels.

    Attributes:
        tokens: (seq + 1,) int64; the inputs are [:-1], the labels [1:].
        loss_mask: (seq,) bool, whether each label counts in the loss.
        starts: (seq,) int32; starts[p] is the position in the sample where the document of input p
            begins. It is None if the sample is one document.
        used: number of inputs before the padding at the end; None stands for all inputs.
    """

    tokens: npt.NDArray[np.int64]
    loss_mask: npt.NDArray[np.bool_]
    starts: npt.NDArray[np.int32] | None = None
    used: int | None = None


class SampleSource(Protocol):
    """Samples of equal length. A source may also be `Finite`, `Masking` or `Prefetching`."""

    seq_length: int

    def sample(self, i: int) -> Sample:
        """Returns sample `i` >= 0, always the same for the same i."""
        ...


class FieldSource(Protocol):
    """Samples of any form, for a user's own model; it may also be `Finite`.

    A sample maps names to arrays or numbers, whose shapes and types are the same in all samples.
    """

    def sample(self, i: int) -> Sample | Mapping[str, object]:
        """Returns sample `i` >= 0, always the same for the same i."""
        ...


@runtime_checkable
class Finite(Protocol):
    """A source whose epoch has `windows` samples."""

    @property
    def windows(self) -> int: ...


@runtime_checkable
class Masking(Protocol):
    """A source that states whether its loss masks can contain False.

    If no mask can contain False, `Batches.token_count` reads no sample. A source that is not
    `Masking` is assumed to have such masks.
    """

    @property
    def masks(self) -> bool: ...


@runtime_checkable
class Prefetching(Protocol):
    """A source that can begin to fetch samples before they are read."""

    def will_read(self, i: int) -> None:
        """Begins to fetch sample `i`, without any effect on its content."""
        ...


class DatasetOrder(SampleSource, Finite, Masking, Prefetching, Protocol):
    """The samples of one data set, epoch after epoch, with an order of its own for each epoch."""


class Sources(NamedTuple):
    """Training and held-out samples.

    `held_out` maps names of a blend's heaviest parts to the parts' own held-out samples.
    """

    train: DatasetOrder
    valid: DatasetOrder | None  # None if `data.held_out` is 0
    held_out: Mapping[str, DatasetOrder]


class TrainingText(Protocol):
    """A text to train on: a `Corpus` or a `Blend` of several."""

    @property
    def fingerprint(self) -> str: ...
    @property
    def tokenizer(self) -> str: ...
    @property
    def eot(self) -> int: ...
    @property
    def train_tokens(self) -> int: ...
    @property
    def valid_tokens(self) -> int: ...
    @property
    def watched(self) -> dict[str, WatchedFile]: ...

    def sources(self, model: ModelConfig, data: DataConfig, seed: int) -> Sources:
        """Returns the text's samples. Raises UserError if the model's vocabulary is too small."""
        ...


class Order:
    """Orders `count` items, epoch after epoch, each epoch in its own order."""

    def __init__(self, count: int, seed: int, shuffle: bool, name: str = "") -> None:
        """Prepares an order of `count` items for each epoch.

        Items keep their order unless `shuffle` is set. `name` makes orders with the same seed
        differ.
        """
        self.count = count
        self._seed = seed
        self._shuffle = shuffle
        self._name = f":{name}" if name else ""

    def at(self, i: int) -> int:
        """Returns the item at place `i` >= 0 of the endless sequence."""
        if i < 0:
            raise IndexError(f"sample {i}: samples are numbered from 0")
        epoch, place = divmod(i, self.count)
        if not self._shuffle:
            return place
        message = f"{self._seed}:{epoch}{self._name}".encode()
        return permuted(place, self.count, hashlib.blake2b(message, digest_size=32).digest())


class Sampler:
    """Makes samples from windows of seq_length + 1 tokens at multiples of seq_length.

    Neighbouring windows share one token, which is the last label of the first window and the first
    input of the second, so every token but the stream's first is a label once an epoch. Tokens
    after the last whole window are not used, unless `whole` is set: then another window holds them
    and padding, whose labels are masked.
    """

    def __init__(
        self,
        tokens: npt.NDArray[np.integer] | Tokens,
        seq_length: int,
        seed: int,
        shuffle: bool,
        eot: int,
        eod_mask_loss: bool,
        document_mask: bool = False,
        starts: Starts | None = None,
        name: str = "",
        whole: bool = False,
    ) -> None:
        """Cuts `tokens`, of shape (n,), into windows.

        Args:
            shuffle: whether each epoch has an order of its own.
            eod_mask_loss: whether each label that begins a document is masked.
            document_mask: whether samples get their `starts`.
            starts: finds where documents begin, or None if they begin after each `eot`.
            name: identifies a part of a blend, so that each part has an order of its own.
            whole: whether the tokens after the last whole window are used, too.

        Raises ValueError unless n > seq_length (n > 1 if `whole`).
        """
        self.seq_length = seq_length
        labels = len(tokens) - 1
        self.windows = (labels + seq_length - 1 if whole else labels) // seq_length
        if self.windows < 1:
            raise ValueError(
                f"a sampler needs at least {2 if whole else seq_length + 1} tokens, but got "
                f"{len(tokens)}"
            )
        self._tokens = tokens
        self._order = Order(self.windows, seed, shuffle, name)
        self._eot = eot
        self._eod_mask_loss = eod_mask_loss
        self._whole = whole
        self._document_mask = document_mask
        self._starts = starts

    @property
    def masks(self) -> bool:
        """Whether a loss mask can contain False."""
        return self._eod_mask_loss or self._whole

    def window(self, i: int) -> int:
        """Returns the window of sample `i` >= 0; each epoch has every window once."""
        return self._order.at(i)

    def will_read(self, i: int) -> None:
        """Prefetches the tokens of sample `i` if they are read from a file."""
        start = self.window(i) * self.seq_length
        if isinstance(self._tokens, Tokens):
            self._tokens.will_read(start, start + self.seq_length + 1)

    def sample(self, i: int) -> Sample:
        """Returns sample `i` >= 0 of the endless sequence of epochs."""
        start = self.window(i) * self.seq_length
        tokens = self._tokens[start : start + self.seq_length + 1].astype(np.int64)
        # With `whole`, the last window may have fewer labels.
        starts, there = None, len(tokens) - 1
        if there < self.seq_length:
            tokens = np.pad(tokens, (0, self.seq_length - there), constant_values=self._eot)
        mask = np.ones(self.seq_length, dtype=np.bool_)
        mask[there:] = False
        if self._document_mask or self._eod_mask_loss:
            begins = self._begins(tokens, start, there)
            if self._document_mask:
                starts = document_starts(begins[begins < self.seq_length], self.seq_length)
            if self._eod_mask_loss:
                # Such a label is the first token of another document, which cannot be predicted.
                mask[begins[begins > 0] - 1] = False
        return Sample(tokens, mask, starts)

    def _begins(
        self, tokens: npt.NDArray[np.int64], start: int, there: int
    ) -> npt.NDArray[np.integer]:
        """Returns the positions in a window, from 0 to seq, at which a document begins."""
        if self._starts is None:
            return np.flatnonzero(tokens[:-1] == self._eot) + 1
        return self._starts(start, start + there + 1) - start


class FirstSamples:
    """The first `count` samples of a source, followed by samples without a label.

    The samples without a label fill up the last global batch, and add nothing to the loss or to the
    number of tokens. Each of the `count` samples thus counts once, whatever the batch size. In a
    sample of any form, the field `loss_mask` becomes zeros.
    """

    masks = True

    def __init__(self, source: SampleSource, count: int) -> None:
        self.source = source
        self.count = count
        self.seq_length = getattr(source, "seq_length", 1)

    def sample(self, i: int) -> Sample:
        """Returns sample `i` >= 0."""
        sample = self.source.sample(min(i, self.count - 1))
        if i < self.count:
            return sample
        if isinstance(sample, Sample):
            return sample._replace(loss_mask=np.zeros_like(np.asarray(sample.loss_mask)))
        zeros = np.zeros_like(np.asarray(sample[LOSS_MASK]))
        return {**sample, LOSS_MASK: zeros}


def has_loss_mask(sample: Sample | Mapping[str, object]) -> bool:
    """Returns whether a sample can be masked, so that it adds nothing to the loss."""
    return isinstance(sample, Sample) or LOSS_MASK in sample


def document_starts(begins: npt.NDArray[np.integer], seq_length: int) -> npt.NDArray[np.int32]:
    """Returns `Sample.starts` for documents that begin at 0 and at `begins`.

    `begins` are below `seq_length`, in any order.
    """
    starts = np.zeros(seq_length, dtype=np.int32)
    starts[begins] = begins
    return np.maximum.accumulate(starts)


def permuted(x: int, n: int, key: bytes) -> int:
    """Maps `x` by a pseudo-random permutation of [0, n), chosen by `key`, in O(1) memory.

    A Feistel network whose halves are numbers modulo a = ⌈√n⌉ permutes [0, a²); following its cycle
    until a value is below n again gives a permutation of [0, n).
    Source: J. Black and P. Rogaway, "Ciphers with Arbitrary Finite Domains", CT-RSA 2002.
    """
    a = math.isqrt(n - 1) + 1
    while True:
        right, left = divmod(x, a)
        for step in range(_ROUNDS):
            left, right = right, (left + _hash(step, right, key)) % a
        x = a * right + left
        if x < n:
            return x


def _hash(step: int, value: int, key: bytes) -> int:
    message = step.to_bytes(1, "little") + value.to_bytes(8, "little")
    return int.from_bytes(hashlib.blake2b(message, key=key, digest_size=8).digest(), "little")
