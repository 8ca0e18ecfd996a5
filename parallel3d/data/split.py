"""One stream of tokens, split by position: training, then held out."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from parallel3d.data.packing import PackingPlan
from parallel3d.data.sampler import Starts
from parallel3d.data.tokens import Tokens
from parallel3d.data.watched import WatchedFile

if TYPE_CHECKING:
    from parallel3d.data.indexed import IndexedCorpus


_LOOKED_AT = 1 << 22  # tokens at a time


@dataclass(frozen=True)
class Corpus:
    """Packed documents; `train` and `valid` are disjoint, in that order.

    fingerprint: a digest of the stream of tokens, on any machine the same. vocab_size, eot: of the
    tokenizer that cut it. tokenizer: its digest; tokenizer_name: where it lies, None if nobody
    knows. documents: where they begin; None: each is followed by `eot`. plans: of the packs of
    both parts. marked: tokens tell which of them are to be learned, as `chat` marks them.
    files: all that stay open.
    """

    train: Tokens
    valid: Tokens
    fingerprint: str
    vocab_size: int
    eot: int
    tokenizer: str = "byte"
    tokenizer_name: str | None = None
    documents: IndexedCorpus | None = None
    plans: tuple[PackingPlan, PackingPlan] | None = None
    name: str = ""
    marked: bool = False
    files: tuple[WatchedFile, ...] = ()

    @property
    def watched(self) -> dict[str, WatchedFile]:
        """`files` by keys that are the same wherever this corpus lies."""
        return {f"{self.fingerprint[:16]}.{k}": file for k, file in enumerate(self.files)}

    @property
    def train_tokens(self) -> int:
        return len(self.train)

    @property
    def valid_tokens(self) -> int:
        return len(self.valid)

    def starts(self, held_out: bool) -> Starts | None:
        """Where documents begin in a part, counted from its first token."""
        documents = self.documents
        if documents is None:
            return None
        first = len(self.train) if held_out else 0
        return lambda begin, end: documents.starts(first + begin, first + end) - first

    def begins(self, held_out: bool) -> npt.NDArray[np.int64]:
        """All of them; the first is 0, whether a document begins there or goes on."""
        tokens, starts = self.valid if held_out else self.train, self.starts(held_out)
        found = [np.zeros(1, np.int64)]
        for first in range(0, len(tokens), _LOOKED_AT):
            last = min(first + _LOOKED_AT, len(tokens))
            if starts is not None:
                found.append(starts(first, last))
            else:
                last -= last == len(tokens)  # no document begins behind the last end
                found.append(np.flatnonzero(tokens[first:last] == self.eot) + first + 1)
        return np.unique(np.concatenate(found))


def held_out_tokens(tokens: int, fraction: float, seq_length: int) -> int | None:
    """The last `fraction`, and at least one sample; None if that leaves no sample to train on."""
    held_out = max(int(tokens * fraction), seq_length + 1)
    return held_out if tokens - held_out >= seq_length + 1 else None


def longest_sample(tokens: int, fraction: float) -> int:
    """The longest seq_length of which both parts have a sample; below 1 if there is none."""
    return min(tokens // 2, tokens - int(tokens * fraction)) - 1
