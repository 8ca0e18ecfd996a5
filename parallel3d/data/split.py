"""A corpus: a stream of tokens, split by position into a training and a held-out part."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from io import IOBase
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from parallel3d.config.fields import show
from parallel3d.data.indexed import CorpusFacts, IndexedCorpus, facts_beside, tokenizer_beside
from parallel3d.data.packing import PackingPlan
from parallel3d.data.sampler import Starts
from parallel3d.data.tokenizer import BYTE, ByteTokenizer, Tokenizer, open_tokenizer
from parallel3d.data.tokens import PROVED, File, Proof, Tokens, WatchedFile, prove, size_of
from parallel3d.errors import UserError

if TYPE_CHECKING:
    from parallel3d.config.schema import DataConfig
    from parallel3d.data.remote import BlockCache


_LOOKED_AT = 1 << 22  # tokens at a time
_PLACES, _RUN = 8, 512  # sampled places of stream and index for a fingerprint, tokens at each


@dataclass(frozen=True)
class Corpus:
    """Packed documents; `train` and `valid` are disjoint, in that order; one of them may be empty.

    fingerprint: a digest of the stream, the same on any machine. vocab_size, eot, tokenizer: of the
    tokenizer, the last its digest. tokenizer_name: its location, if known. documents: where they
    begin; None: after each `eot`. plans: packs of both parts, None of an empty one. name: of a
    pair, its prefix. named: what errors call it. marked: tokens carry marks of what is learned
    (`chat`). files: all open files.
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
    named: str = ""
    marked: bool = False
    files: tuple[WatchedFile, ...] = ()

    @classmethod
    def of(cls, tokens: Tokens, held_out: int, tokenizer: Tokenizer, **more: Any) -> Corpus:
        """Splits `tokens`, made by `tokenizer`, whose last `held_out` are not trained on."""
        facts: dict[str, Any] = {"vocab_size": tokenizer.vocab_size, "eot": tokenizer.eot}
        facts["tokenizer"] = tokenizer.digest
        return cls(*halves(tokens, held_out), **(facts | more))

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


def halves(tokens: Tokens, held_out: int) -> tuple[Tokens, Tokens]:
    """Returns the tokens to train on, and the last `held_out`."""
    split = len(tokens) - held_out
    return tokens.part(0, split), tokens.part(split, len(tokens))


def held_out_tokens(
    tokens: int, data: DataConfig, seq_length: int, named: str, separators: int = 0
) -> int:
    """Returns how many tokens at the end are held out: of `data.held_out` 1, a validation set, all;
    of 0 none; else that share, and at least one sample.

    `separators`: how many of the tokens end documents, which are not counted in the sentence.
    Raises UserError, about `named`, if a part has no sample.
    """
    share, sample = data.held_out, seq_length + 1
    held_out = max(int(tokens * share), sample) if share else 0
    if share == 1.0:
        return tokens
    if tokens - held_out >= sample:
        return held_out
    longest = (min(tokens // 2, tokens - int(tokens * share)) if share else tokens) - 1
    unit = "bytes" if data.reads_bytes else "tokens"
    needs = (
        f"one sample to train on and one held out need {2 * sample - separators:,}"
        if share
        else f"one sample needs {sample - separators:,}"
    )
    fits = (
        f"model.seq_length must be at most {longest}"
        if longest >= 1
        else "no model.seq_length fits: give more text"
    )
    raise UserError(
        f"{named} is too short for model.seq_length={seq_length}: it has {tokens - separators:,} "
        f"{unit}, {needs}, {fits}"
    )


# Megatron's indexed datasets


def open_pair(
    data: DataConfig,
    prefix: str,
    named: str,
    seq_length: int,
    limit: int | None = None,
    tokenizer: Tokenizer | None = None,
    remote: BlockCache | None = None,
) -> Corpus:
    """Opens the pair at `prefix`, which errors call `named`, as a corpus without plans.

    `limit`: the model's vocabulary, an upper limit of tokens. `tokenizer`: data.tokenizer, if it is
    open already. `remote`: opens remote files (`remote_of`). Time and memory do not grow with the
    pair. Raises UserError.
    """
    if is_remote(prefix):
        assert remote is not None, "remote_of was not given this prefix"
        pair = IndexedCorpus.open(prefix, named, remote.opened)
        index = pair.index
        assert not isinstance(index, IOBase)
        index.check()  # both files may have been replaced between their openings
        kept = facts_beside(prefix, remote.read)
    else:
        pair = IndexedCorpus.open(prefix, named)
        kept = facts_beside(pair.prefix)
    facts, name = _facts(data, pair, tokenizer, kept)
    if limit is not None and facts.vocab_size > limit:
        raise UserError(
            f"model.vocab_size={limit} must be at least {facts.vocab_size} for the tokens of "
            f"{named}; the nearest is model.vocab_size={facts.vocab_size}"
        )
    held_out = held_out_tokens(len(pair), data, seq_length, named)
    tokens = pair.tokens.below(limit or facts.vocab_size, named)
    fingerprint, files = _watched(pair, tokens, facts.digest)
    return Corpus(
        *halves(tokens, held_out),
        fingerprint=fingerprint,
        vocab_size=facts.vocab_size,
        eot=facts.eot,
        tokenizer=facts.tokenizer,
        tokenizer_name=name,
        documents=pair,
        name=prefix,
        named=named,
        files=files,
    )


def is_remote(prefix: str) -> bool:
    """Returns whether a prefix is an fsspec address."""
    return "://" in prefix


def remote_of(prefixes: Iterable[str], folder: Path, most_gb: float) -> BlockCache | None:
    """Returns the opener of remote prefixes, with blocks below `folder`; None if all are local."""
    if not any(map(is_remote, prefixes)):
        return None
    from parallel3d.data.remote import BlockCache

    return BlockCache(folder / "blocks", int(most_gb * 1e9))


def _facts(
    data: DataConfig, pair: IndexedCorpus, tokenizer: Tokenizer | None, kept: CorpusFacts | None
) -> tuple[CorpusFacts, str | None]:
    """Returns what is known of a pair, and where its tokenizer lies. Raises UserError."""
    if data.tokenizer is not None and tokenizer is None:
        tokenizer = open_tokenizer(data.tokenizer)
    if kept is None:
        if tokenizer is None:
            raise UserError(
                f"{pair.named} has no {pair.prefix}.json that tells its tokenizer: give "
                "data.tokenizer, as in data.tokenizer=my/tokenizer.json"
            )
        own = tokenizer.digest, None, tokenizer.vocab_size, tokenizer.eot
        return CorpusFacts(*own, pair.documents, len(pair), digest=""), data.tokenizer
    if (kept.documents, kept.tokens) != (pair.documents, len(pair)):
        raise UserError(
            f"{pair.named} cannot be read, {pair.prefix}.json is of another pair: it has "
            f"{kept.documents:,} documents of {kept.tokens:,} tokens, the .idx {pair.documents:,} "
            f"of {len(pair):,}; make it again"
        )
    known: Tokenizer | None = tokenizer
    if tokenizer is None and kept.tokenizer == BYTE:
        known = ByteTokenizer()
    if known is not None and known.digest == kept.tokenizer and known.eot != kept.eot:
        raise UserError(
            f"{pair.named} cannot be read, {pair.prefix}.json has eot={kept.eot}, and its "
            f"tokenizer {known.eot}; make it again"
        )
    if tokenizer is not None and tokenizer.digest != kept.tokenizer:
        raise UserError(
            f"{pair.named} was made by another tokenizer than data.tokenizer="
            f"{show(data.tokenizer)}: their digests are {kept.tokenizer[:12]} and "
            f"{tokenizer.digest[:12]}; leave data.tokenizer out, or give the corpus's own"
        )
    beside = tokenizer_beside(pair.prefix, kept)
    there = beside if beside == BYTE or os.path.lexists(beside) else None
    return kept, there if data.tokenizer is None else data.tokenizer


def _watched(
    pair: IndexedCorpus, tokens: Tokens, text: str
) -> tuple[str, tuple[WatchedFile, WatchedFile]]:
    """Returns a pair's fingerprint, and its files with their marks from before it was computed."""

    fingerprint, index = "", pair.index
    remedy = (
        "put back the pair that the run began with and start again (`parallel3d data show "
        f"{pair.prefix}` reads all of it), or choose another run="
    )

    def proof(file: File) -> Proof:
        if _fingerprint(pair, tokens, text) != fingerprint:
            return Proof.CHANGED
        if file is tokens.file:
            return prove(file, text or None)
        if size_of(file) <= PROVED:
            pair.check_all()
        return Proof.SAMPLED

    files = (
        WatchedFile(tokens.file, partial(proof, tokens.file), remedy),
        WatchedFile(index, partial(proof, index), remedy),
    )
    fingerprint = _fingerprint(pair, tokens, text)
    return fingerprint, files


def _fingerprint(pair: IndexedCorpus, tokens: Tokens, text: str) -> str:
    """Returns a digest of sizes, of the known text digest, and of sampled places."""
    digest = hashlib.blake2b(digest_size=16)
    sizes = [str(pair.dtype), len(pair), pair.documents, pair.sequences, text]
    digest.update(json.dumps(sizes).encode())
    for place in range(_PLACES):
        for stream in (tokens, pair.lengths):
            at = place * max(0, len(stream) - _RUN) // (_PLACES - 1)
            digest.update(stream[at : at + _RUN].tobytes())
    return digest.hexdigest()
