"""Opens a Megatron indexed dataset as a corpus, with its tokenizer and its fingerprint."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable
from io import IOBase
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from parallel3d.config.fields import show
from parallel3d.data.indexed import CorpusFacts, IndexedCorpus, facts_beside, tokenizer_beside
from parallel3d.data.split import Corpus, held_out_tokens, longest_sample, needs
from parallel3d.data.tokenizer import BYTE, ByteTokenizer, Tokenizer, open_tokenizer
from parallel3d.data.tokens import PROVED, Proof, Tokens, WatchedFile, prove, size_of
from parallel3d.errors import UserError

if TYPE_CHECKING:
    from parallel3d.config.schema import DataConfig
    from parallel3d.data.remote import BlockCache


_PLACES, _RUN = 8, 512  # sampled places of stream and index for a fingerprint, tokens at each


class _Facts(NamedTuple):
    """A pair's tokenizer, by the pair's .json file or by data.tokenizer."""

    digest: str
    name: str | None  # location of the tokenizer
    vocab_size: int
    eot: int
    text: str  # a digest of the tokens, or ""


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
        index = pair.index.lengths.file
        assert not isinstance(index, IOBase)
        index.check()  # both files may have been replaced between their openings
        facts = _facts(data, pair, tokenizer, facts_beside(prefix, remote.read))
    else:
        pair = IndexedCorpus.open(prefix, named)
        facts = _facts(data, pair, tokenizer, facts_beside(pair.prefix))
    if limit is not None and facts.vocab_size > limit:
        raise UserError(
            f"model.vocab_size={limit} must be at least {facts.vocab_size} for the tokens of "
            f"{named}; the nearest is model.vocab_size={facts.vocab_size}"
        )
    held_out = held_out_tokens(len(pair), data.held_out, seq_length)
    if held_out is None:
        longest = longest_sample(len(pair), data.held_out)
        most = f"it must be at most {longest}"
        fits = most if longest > 0 else "none fits: give a longer corpus"
        raise UserError(
            f"{named} is too short for model.seq_length={seq_length}: it has {len(pair):,} tokens, "
            f"{needs(seq_length, data.held_out)}, {fits}"
        )
    tokens = pair.tokens.below(limit or facts.vocab_size, named)
    fingerprint, files = _watched(pair, tokens, facts.text)
    return Corpus.of(
        *(tokens, held_out, facts),
        fingerprint=fingerprint,
        tokenizer_name=facts.name,
        documents=pair,
        name=prefix,
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
) -> _Facts:
    if data.tokenizer is not None and tokenizer is None:
        tokenizer = open_tokenizer(data.tokenizer)
    if kept is None:
        if tokenizer is None:
            raise UserError(
                f"{pair.named} has no {pair.prefix}.json that tells its tokenizer: give "
                "data.tokenizer, as in data.tokenizer=my/tokenizer.json"
            )
        sizes = tokenizer.vocab_size, tokenizer.eot
        return _Facts(tokenizer.digest, data.tokenizer, *sizes, "")
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
    name = there if data.tokenizer is None else data.tokenizer
    return _Facts(kept.tokenizer, name, kept.vocab_size, kept.eot, kept.digest)


def _watched(
    pair: IndexedCorpus, tokens: Tokens, text: str
) -> tuple[str, tuple[WatchedFile, WatchedFile]]:
    """Returns a pair's fingerprint, and its files with their marks from before it was computed."""

    def places() -> Proof:
        is_same = _fingerprint(pair, tokens, text) == fingerprint
        return Proof.SAMPLED if is_same else Proof.CHANGED

    def places_or_all() -> Proof:
        found = places()
        return found if found is Proof.CHANGED else prove(tokens.file, text or None)

    def places_and_order() -> Proof:
        found = places()
        if found is Proof.SAMPLED and size_of(index) <= PROVED:
            pair.index.check_all()
        return found

    remedy = (
        "put back the pair that the run began with and start again (`parallel3d data show "
        f"{pair.prefix}` reads all of it), or choose another run="
    )
    index = pair.index.lengths.file
    files = (
        WatchedFile(tokens.file, places_or_all, remedy),
        WatchedFile(index, places_and_order, remedy),
    )
    fingerprint = _fingerprint(pair, tokens, text)
    return fingerprint, files


def _fingerprint(pair: IndexedCorpus, tokens: Tokens, text: str) -> str:
    """Returns a digest of sizes, of the known text digest, and of sampled places."""
    digest = hashlib.blake2b(digest_size=16)
    sizes = [str(pair.dtype), len(pair), pair.documents, pair.index.sequences, text]
    digest.update(json.dumps(sizes).encode())
    for place in range(_PLACES):
        for stream in (tokens, pair.lengths):
            at = place * max(0, len(stream) - _RUN) // (_PLACES - 1)
            digest.update(stream[at : at + _RUN].tobytes())
    return digest.hexdigest()
