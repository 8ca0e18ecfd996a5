"""Validation sets of `data.valid`: opened by name, and read whole."""

from __future__ import annotations

import dataclasses
import os
from typing import TYPE_CHECKING

import numpy as np

from parallel3d.config.fields import show
from parallel3d.data.blend import Blend
from parallel3d.data.corpus import check_data, open_corpus
from parallel3d.data.sampler import Sample
from parallel3d.data.split import Corpus, is_remote
from parallel3d.errors import UserError

if TYPE_CHECKING:
    from parallel3d.config.schema import DataConfig
    from parallel3d.data.loader import SampleSource


def sets_of(data: DataConfig) -> dict[str, DataConfig]:
    """Returns a `data` section for each validation set: a pair where there is one, else
    conversations under data=chat, else text; all of it held out."""
    found = {}
    for name, path in (data.valid or {}).items():
        there = os.path.exists(f"{os.path.expanduser(path)}.idx")
        kind = "corpus" if there or is_remote(path) else "chat" if data.name == "chat" else "text"
        one = dataclasses.replace(data, name=kind, path=path, blend=None, blend_stages=None)
        found[name] = dataclasses.replace(one, valid=None, valid_fraction=1.0)
    return found


def check_sets(data: DataConfig, seq_length: int, vocab_size: int) -> None:
    """Checks all sets as `check_data` does. Raises UserError."""
    for name, one in sets_of(data).items():
        try:
            check_data(one, seq_length, vocab_size=vocab_size)
        except UserError as error:
            raise UserError(f"data.valid, its set {show(name)}: {error}") from None


def open_sets(
    data: DataConfig, training: Corpus | Blend, seq_length: int, vocab_size: int
) -> dict[str, Corpus]:
    """Opens all sets, tokenized by the tokenizer of the `training` text. Raises UserError."""
    sets = {}
    for name, one in sets_of(data).items():
        named = f"data.valid, its set {show(name)}"
        try:
            corpus = open_corpus(one, seq_length, vocab_size=vocab_size)
        except UserError as error:
            raise UserError(f"{named}: {error}") from None
        assert isinstance(corpus, Corpus), "sets are no blends"
        if (corpus.tokenizer, corpus.eot) != (training.tokenizer, training.eot):
            raise UserError(
                f"{named}: its tokenizer is {corpus.tokenizer[:12]}, and that of the training "
                f"text {training.tokenizer[:12]}: they must be one; give data.tokenizer, the "
                "training text's, or a set that it has made"
            )
        if corpus.valid_tokens < 2:
            raise UserError(f"{named}: {one.path} must have at least two tokens; give more")
        sets[name] = corpus
    return sets


class FirstSamples:
    """The first `count` samples of a source, and after them samples without a label.

    So every sample counts once, whatever the global batch is: the last one is filled up by samples
    that add nothing to the loss or to the number of tokens.
    """

    masks = True

    def __init__(self, source: SampleSource, count: int) -> None:
        self.source, self.count, self.seq_length = source, count, source.seq_length

    def sample(self, i: int) -> Sample:
        """Returns sample `i` >= 0."""
        sample = self.source.sample(min(i, self.count - 1))
        if i < self.count:
            return sample
        return sample._replace(loss_mask=np.zeros(self.seq_length, np.bool_))
