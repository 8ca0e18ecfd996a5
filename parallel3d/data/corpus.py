"""Opens the text of a run as streams of tokens, trained on and held out, with packing plans."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from parallel3d.config.fields import show
from parallel3d.data import cache
from parallel3d.data.blend import Blend, check_epochs, open_blend
from parallel3d.data.chat import TOKEN, check_windows, find_chat, learned, nothing_said, open_chat
from parallel3d.data.packing import (
    PLAN_VERSION,
    PackingPlan,
    Pieces,
    best_fit,
    kept_plan,
    one_each,
    pieces_of,
)
from parallel3d.data.sources import (
    Document,
    cache_key,
    cached_text,
    find_documents,
    origin,
    token_count,
)
from parallel3d.data.split import Corpus, held_out_tokens, open_pair, remote_of
from parallel3d.data.tokenizer import BYTE, ByteTokenizer, open_tokenizer
from parallel3d.data.tokens import marks_of
from parallel3d.errors import UserError

if TYPE_CHECKING:
    from parallel3d.config.schema import DataConfig


_log = logging.getLogger(__name__)


def open_corpus(
    data: DataConfig,
    seq_length: int,
    vocab_size: int | None = None,
) -> Corpus | Blend:
    """Opens the text that `data` describes; builds its token cache and plans if they are missing.

    The last `data.held_out` of the tokens of each text, and, unless that is 0, at least one sample
    of `seq_length` + 1, is held out. `vocab_size`: the model's, an upper limit of a pair's tokens.
    Raises UserError.
    """
    folder = cache.folder_of(data)
    if data.name in ("corpus", "blend"):
        opened = _open_pairs(data, seq_length, folder, vocab_size)
    elif data.name == "chat":
        opened = open_chat(data, folder)
        if data.packing == "concat" and data.held_out < 1.0:
            check_windows(opened, seq_length)
    else:
        opened = _open_text(data, seq_length, folder)
    if data.packing == "concat":
        return opened
    if isinstance(opened, Corpus):
        return with_plans(opened, data, seq_length, folder)
    parts = tuple(with_plans(one, data, seq_length, folder) for one in opened.corpora)
    return dataclasses.replace(opened, corpora=parts)


def _open_pairs(
    data: DataConfig, seq_length: int, folder: Path, vocab_size: int | None
) -> Corpus | Blend:
    if data.name == "blend":
        return open_blend(data, seq_length, folder, vocab_size)
    assert data.path is not None, "config.checks refuses data=corpus without data.path"
    remote = remote_of([data.path], folder, data.block_cache_gb)
    return open_pair(data, data.path, origin(data), seq_length, vocab_size, remote=remote)


def _open_text(data: DataConfig, seq_length: int, folder: Path) -> Corpus:
    tokenizer = open_tokenizer(data.tokenizer or BYTE)
    documents = find_documents(data)
    if isinstance(tokenizer, ByteTokenizer):
        _check_length(data, seq_length, documents)
    pair, digest, files = cached_text(folder, documents, tokenizer)
    held_out = held_out_tokens(len(pair), data, seq_length, origin(data), len(documents))
    return Corpus.of(
        *(pair.tokens, held_out, tokenizer),
        fingerprint=digest,
        tokenizer_name=data.tokenizer or BYTE,
        named=origin(data),
        files=files,
    )


def _check_length(data: DataConfig, seq_length: int, documents: Sequence[Document]) -> None:
    """Raises UserError if documents of bytes are too short."""
    tokens = token_count(documents)
    held_out_tokens(tokens, data, seq_length, origin(data), len(documents))


def check_data(
    data: DataConfig,
    seq_length: int,
    vocab_size: int | None = None,
    samples: int = 0,
) -> list[str]:
    """Checks what `open_corpus` would need, as far as names, sizes and permissions tell.

    Opens no text file, writes nothing and imports no torch: the launcher calls it before workers
    start. Token counts are known for bytes and pairs only. Returns warnings about parts of a blend
    that a run of `samples` would repeat often. Raises UserError, also for a tokenizer that does not
    fit a model of `vocab_size` tokens.
    """
    if data.name in ("corpus", "blend"):
        return _check_pairs(data, seq_length, vocab_size, samples)
    if data.name == "chat":
        chat = find_chat(data)
        check_vocabulary(chat.tokenizer.vocab_size, vocab_size or TOKEN, data.tokenizer)
        cache.check_can_store(cache.folder_of(data), chat.key)
        return []
    tokenizer = open_tokenizer(data.tokenizer or BYTE)
    if vocab_size is not None:
        check_vocabulary(tokenizer.vocab_size, vocab_size, data.tokenizer)
    documents = find_documents(data)
    if isinstance(tokenizer, ByteTokenizer):
        _check_length(data, seq_length, documents)
        if data.packing != "concat" and not data.cut_documents:
            lengths = [d.size + 1 for d in documents]
            check_lengths(lengths, seq_length, origin(data), data.packing)
    cache.check_can_store(cache.folder_of(data), cache_key(documents, tokenizer))
    return []


def _check_pairs(
    data: DataConfig, seq_length: int, vocab_size: int | None, samples: int
) -> list[str]:
    folder = cache.folder_of(data)
    opened = _open_pairs(data, seq_length, folder, vocab_size)
    parts = opened.corpora if isinstance(opened, Blend) else (opened,)
    if data.packing == "concat":
        epochs = [(len(one.train) - 1) // seq_length for one in parts]
    else:
        for one in parts:
            check_pieces(one, data, seq_length, folder)
        epochs = [max(1, len(one.train) // (seq_length + 1)) for one in parts]
    return (
        check_epochs(opened, epochs, samples, data.most_epochs) if isinstance(opened, Blend) else []
    )


def check_vocabulary(needed: int, vocab_size: int, name: str | None) -> None:
    """Raises UserError if the model's vocabulary is smaller than tokenizer `name`'s, `needed`."""
    if needed > vocab_size:
        raise UserError(
            f"model.vocab_size={vocab_size} must be at least {needed} for the tokens of "
            f"data.tokenizer={show(name)}; the nearest is model.vocab_size={needed}"
        )


# Packing plans of a corpus


def with_plans(corpus: Corpus, data: DataConfig, seq_length: int, folder: Path) -> Corpus:
    """Returns the corpus with both plans from `folder`, built if missing. Raises UserError."""
    capacity = seq_length + 1
    fit = one_each if data.packing == "padded" else best_fit

    def plan(held_out: bool) -> PackingPlan | None:
        if not len(corpus.valid if held_out else corpus.train):
            return None
        key = _key(corpus, held_out, data, capacity)

        def make() -> Pieces:
            pieces = _pieces(corpus, held_out, data, capacity)
            return _learned(pieces, corpus, held_out) if corpus.marked else pieces

        return kept_plan(folder, key, make, capacity, fit)

    plans = plan(False), plan(True)
    made = [one for one in plans if one is not None]
    digests = [corpus.fingerprint, *(plan.digest for plan in made)]
    files = *corpus.files, *(plan.watched for plan in made)
    return dataclasses.replace(corpus, plans=plans, fingerprint=" ".join(digests), files=files)


def check_pieces(corpus: Corpus, data: DataConfig, seq_length: int, folder: Path) -> None:
    """Raises UserError for documents that do not fit a sample, unless the plans exist already."""
    for held_out in (False, True):
        if not len(corpus.valid if held_out else corpus.train):
            continue
        key = _key(corpus, held_out, data, seq_length + 1)
        cache.check_can_store(folder, key)
        if not (folder / f"{key}.json").exists():
            _pieces(corpus, held_out, data, seq_length + 1)


def check_lengths(lengths: Sequence[int], seq_length: int, named: str, packing: str) -> None:
    """Raises UserError if a document does not fit a sample."""
    if long := sum(length > seq_length + 1 for length in lengths):
        raise _too_long(named, long, seq_length + 1, packing)


def _key(corpus: Corpus, held_out: bool, data: DataConfig, capacity: int) -> str:
    """Returns the name of a part's plan in the cache: a digest of all that it is made of."""
    part = corpus.valid if held_out else corpus.train
    first = len(corpus.train) if held_out else 0
    # Fingerprints sample some places of a pair, a plan depends on all of it: so the marks count.
    stream = [corpus.fingerprint, marks_of(corpus.watched), first, len(part), corpus.marked]
    return cache.digest_of([PLAN_VERSION, stream, capacity, data.packing, data.cut_documents])


def _pieces(corpus: Corpus, held_out: bool, data: DataConfig, capacity: int) -> Pieces:
    tokens = len(corpus.valid if held_out else corpus.train)
    pieces = pieces_of(corpus.begins(held_out), tokens, capacity)
    if pieces.cut and not data.cut_documents:
        raise _too_long(corpus.named, pieces.cut, capacity, data.packing)
    if not pieces.starts.size:
        part = "held-out" if held_out else "training"
        raise UserError(
            f"{corpus.named} has no document of two tokens in its {part} part, and "
            f"data.packing={data.packing} needs one: give data.packing=concat"
        )
    return pieces


def _learned(pieces: Pieces, corpus: Corpus, held_out: bool) -> Pieces:
    """Drops pieces without a learned token. Raises UserError if none remains."""
    kept = learned(corpus.valid if held_out else corpus.train, pieces.starts, pieces.lengths)
    if not kept.any():
        raise nothing_said(held_out)
    if left_out := int((~kept).sum()):
        _log.info(
            f"left out of the {'held-out' if held_out else 'training'} samples: {left_out:,} of "
            f"{kept.size:,} pieces of conversations, in which the assistant says nothing"
        )
    return pieces._replace(starts=pieces.starts[kept], lengths=pieces.lengths[kept])


def _too_long(named: str, documents: int, capacity: int, packing: str) -> UserError:
    has = f"{documents:,} documents" if documents > 1 else "a document"
    return UserError(
        f"{named} has {has} longer than the {capacity:,} tokens of a sample, which "
        f"data.packing={packing} does not cut: give data.cut_documents=true, which does, or a "
        "longer model.seq_length"
    )
