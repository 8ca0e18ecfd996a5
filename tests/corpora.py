"""Writes corpora of random bytes to train on, as pairs of files like those of `data tokenize`."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from parallel3d.data.indexed import IndexedWriter


def pair(
    prefix: Path,
    seed: int,
    documents: int = 60,
    longest: int = 40,
    facts: bool = True,
    **said: object,
) -> Path:
    """Writes a pair of `documents` of 1 … `longest` tokens, each ended by 256, and `said`, its
    description, in a JSON file."""
    random = np.random.default_rng(seed)
    prefix.parent.mkdir(parents=True, exist_ok=True)
    with IndexedWriter(prefix, np.dtype("<u2")) as writer:
        for _ in range(documents):
            text = random.integers(0, 256, int(random.integers(0, longest)))
            writer.add(np.append(text, 256))
    if facts:
        _write_facts(prefix, writer, **said)
    return prefix


def like_pair(prefix: Path, seed: int) -> Path:
    """Writes a pair with the same file sizes as every other pair of this function, and other
    contents."""
    random = np.random.default_rng(seed)
    prefix.parent.mkdir(parents=True, exist_ok=True)
    with IndexedWriter(prefix, np.dtype("<u2")) as writer:
        for length in random.permutation(np.arange(20, 60).repeat(20)):
            writer.add(np.append(random.integers(0, 256, length), 256))
    _write_facts(prefix, writer)
    return prefix


def _write_facts(prefix: Path, writer: IndexedWriter, **said: object) -> None:
    facts = {"tokenizer": "byte", "tokenizer_file": None, "vocab_size": 257, "eot": 256}
    facts |= {"documents": writer.documents, "tokens": writer.tokens, "digest": writer.digest}
    Path(f"{prefix}.json").write_text(json.dumps(facts | said))


@contextmanager
def heard(call: Callable[[str], object] = lambda _: None) -> Iterator[list[str]]:
    """Collects the sentences that are logged about data; `call` gets each of them."""
    said: list[str] = []

    class Ear(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            said.append(record.getMessage())
            call(said[-1])

    logger, ear = logging.getLogger("parallel3d.data"), Ear()
    level = logger.level
    logger.setLevel(logging.INFO)
    logger.addHandler(ear)
    try:
        yield said
    finally:
        logger.removeHandler(ear)
        logger.setLevel(level)
