"""Pairs of random bytes to train on, as `data tokenize` leaves them."""

from __future__ import annotations

import json
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
    """A pair of `documents` of 1 … `longest` tokens, each ended by 256; `said` of it beside it."""
    random = np.random.default_rng(seed)
    prefix.parent.mkdir(parents=True, exist_ok=True)
    with IndexedWriter(prefix, np.dtype("<u2")) as writer:
        for _ in range(documents):
            text = random.integers(0, 256, int(random.integers(0, longest)))
            writer.add(np.append(text, 256))
    own = {"tokenizer": "byte", "tokenizer_file": None, "vocab_size": 257, "eot": 256}
    own |= {"documents": writer.documents, "tokens": writer.tokens, "digest": writer.digest}
    if facts:
        Path(f"{prefix}.json").write_text(json.dumps(own | said))
    return prefix
