"""A stream of tokens, split by position into a training and a held-out part."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import numpy.typing as npt

from parallel3d.data.packing import PackingPlan
from parallel3d.data.sampler import Starts
from parallel3d.data.tokens import Tokens, WatchedFile

if TYPE_CHECKING:
    from parallel3d.data.indexed import IndexedCorpus


_LOOKED_AT = 1 << 22  # tokens at a time


class TokenizerFacts(Protocol):
    """What a corpus knows of its tokenizer."""

    @property
    def digest(self) -> str: ...
    @property
    def vocab_size(self) -> int: ...
    @property
    def eot(self) -> int: ...


@dataclass(frozen=True)
class Corpus:
    """Packed documents; `train` and `valid` are disjoint, in that order; one of them may be empty.

    fingerprint: a digest of the stream, the same on any machine. vocab_size, eot, tokenizer: of the
    tokenizer, the last its digest. tokenizer_name: its location, if known. documents: where they
    begin; None: after each `eot`. plans: packs of both parts, None of an empty
    one. marked: tokens carry marks of what is learned (`chat`). files: all open files.
    """

    train: Tokens
    valid: Tokens
    fingerprint: str
    vocab_size: int
    eot: int
    tokenizer: str = "byte"
    tokenizer_name: str | None = None
    documents: IndexedCorpus | None = None
    plans: tuple[PackingPlan | None, PackingPlan | None] | None = None
    name: str = ""
    marked: bool = False
    files: tuple[WatchedFile, ...] = ()

    @classmethod
    def of(cls, tokens: Tokens, held_out: int, tokenizer: TokenizerFacts, **more: Any) -> Corpus:
        """Splits `tokens`, whose last `held_out` are not trained on."""
        split = len(tokens) - held_out
        return cls(
            train=tokens.part(0, split),
            valid=tokens.part(split, len(tokens)),
            vocab_size=tokenizer.vocab_size,
            eot=tokenizer.eot,
            tokenizer=tokenizer.digest,
            **more,
        )

    @property
    def watched(self) -> dict[str, WatchedFile]:
        """`files` by keys that do not depend on the corpus's location."""
        return {f"{self.fingerprint[:16]}.{k}": file for k, file in enumerate(self.files)}

    @property
    def train_tokens(self) -> int:
        return len(self.train)

    @property
    def valid_tokens(self) -> int:
        return len(self.valid)

    def starts(self, held_out: bool) -> Starts | None:
        """Returns the function that finds document begins in a part, from its first token."""
        documents = self.documents
        if documents is None:
            return None
        first = len(self.train) if held_out else 0
        return lambda begin, end: documents.starts(first + begin, first + end) - first

    def begins(self, held_out: bool) -> npt.NDArray[np.int64]:
        """Returns all document begins of a part; the first is 0, even inside a document."""
        tokens, starts = self.valid if held_out else self.train, self.starts(held_out)
        found = [np.zeros(1, np.int64)]
        for first in range(0, len(tokens), _LOOKED_AT):
            last = min(first + _LOOKED_AT, len(tokens))
            if starts is not None:
                found.append(starts(first, last))
            else:
                last -= last == len(tokens)  # no document begins after the last end-of-text
                found.append(np.flatnonzero(tokens[first:last] == self.eot) + first + 1)
        return np.unique(np.concatenate(found))


def held_out_tokens(tokens: int, fraction: float, seq_length: int) -> int | None:
    """Returns the size of the last `fraction`, at least one sample; None if no training sample is
    left. Of fraction 0 it is none, of 1, a validation set, all."""
    if fraction == 1.0:
        return tokens
    if fraction == 0.0:
        return 0 if tokens >= seq_length + 1 else None
    held_out = max(int(tokens * fraction), seq_length + 1)
    return held_out if tokens - held_out >= seq_length + 1 else None


def longest_sample(tokens: int, fraction: float) -> int:
    """Returns the longest seq_length with a sample in both parts; below 1 if there is none."""
    if fraction == 0.0:
        return tokens - 1
    return min(tokens // 2, tokens - int(tokens * fraction)) - 1


def needs(seq_length: int, fraction: float, separators: int = 0) -> str:
    """Returns which tokens both parts need, less `separators`, which are there in any case."""
    sample = seq_length + 1
    if fraction == 0.0:
        return f"one sample needs {sample - separators:,}"
    return f"one sample to train on and one held out need {2 * sample - separators:,}"
