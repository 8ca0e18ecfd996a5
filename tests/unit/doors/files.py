"""Reads files and folders as the commands do that take them."""

from __future__ import annotations

import numpy as np

from parallel3d.commands.evaluate.rows import read_rows
from parallel3d.data.corpus import Corpus, open_corpus
from parallel3d.data.inputs import BAD, Count, cut, documents, judge, take_inputs
from parallel3d.data.keys import DataConfig


def tokenized(path: str, kind: str | None = None) -> list[str]:
    """Returns the documents that are read by `data tokenize`, with `kind` as its format."""
    count, found = Count(), []
    for shard in cut(take_inputs(path, kind).inputs, size=300):
        here = Count()
        found += [one.text for one in documents(shard, "text", here)]
        count.add(here)
    judge(count, 1, BAD, "bad=0.01", "fix them")
    return found


def texts_in(data: DataConfig) -> list[str]:
    """Returns the documents of bytes that a run reads."""
    corpus = open_corpus(data, 1)
    assert isinstance(corpus, Corpus)
    tokens = np.concatenate([corpus.train[:], corpus.valid[:]])
    assert tokens[-1] == 256
    parts = np.split(tokens, np.flatnonzero(tokens == 256) + 1)[:-1]
    return [bytes(part[:-1].astype(np.uint8)).decode() for part in parts]


def asked(path: str) -> list[str]:
    """Returns the contexts of `eval tasks=`."""
    return [row.context for row in read_rows(path)]
