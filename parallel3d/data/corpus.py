"""The plans of a corpus: of what is trained on, and of what is held out."""

from __future__ import annotations

import dataclasses
import logging
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from parallel3d.config.fields import show
from parallel3d.data import cache
from parallel3d.data.blend import Blend, check_epochs, open_blend, part_name
from parallel3d.data.cache import Report
from parallel3d.data.chat import TOKEN, check_windows, find_chat, learned, nothing_said, open_chat
from parallel3d.data.packing import (
    PackingPlan,
    Pieces,
    best_fit,
    kept_plan,
    one_each,
    pieces_of,
    plan_file,
)
from parallel3d.data.paired import open_pair, remote_of
from parallel3d.data.sources import Document, find_documents, origin
from parallel3d.data.split import Corpus, held_out_tokens, longest_sample
from parallel3d.data.text_files import cached_pair
from parallel3d.data.tokenizer import BYTE, ByteTokenizer, open_tokenizer
from parallel3d.data.watched import marks_of
from parallel3d.errors import UserError

if TYPE_CHECKING:
    from parallel3d.config.schema import DataConfig


def with_plans(
    corpus: Corpus, data: DataConfig, seq_length: int, folder: Path, named: str, report: Report
) -> Corpus:
    """The corpus with its two plans from `folder`, which are made if need be. Raises UserError."""
    room = seq_length + 1
    fit = one_each if data.packing == "padded" else best_fit

    def plan(held_out: bool) -> PackingPlan:
        path = _path(corpus, held_out, folder, room, data.packing)

        def make() -> Pieces:
            pieces = _pieces(corpus, held_out, data, named, room)
            return _learned(pieces, corpus, held_out, report) if corpus.marked else pieces

        found = kept_plan(path, make, room, report, fit)
        if found.cut and not data.cut_documents:
            raise _too_long(named, found.cut, room, data.packing)
        return found

    plans = plan(False), plan(True)
    digests = [corpus.fingerprint, *(plan.digest for plan in plans)]
    files = *corpus.files, *(plan.watched for plan in plans)
    return dataclasses.replace(corpus, plans=plans, fingerprint=" ".join(digests), files=files)


def check_pieces(
    corpus: Corpus, data: DataConfig, seq_length: int, folder: Path, named: str
) -> None:
    """Raises the UserError of documents that do not fit a sample, unless there are plans."""
    for held_out in (False, True):
        path = _path(corpus, held_out, folder, seq_length + 1, data.packing)
        cache.check_room_for(path)
        if not path.exists():
            _pieces(corpus, held_out, data, named, seq_length + 1)


def check_lengths(lengths: Sequence[int], seq_length: int, named: str, packing: str) -> None:
    """Raises UserError if there is a document that does not fit a sample."""
    if long := sum(length > seq_length + 1 for length in lengths):
        raise _too_long(named, long, seq_length + 1, packing)


def _path(corpus: Corpus, held_out: bool, folder: Path, room: int, packing: str) -> Path:
    first = len(corpus.train) if held_out else 0
    tokens = len(corpus.valid if held_out else corpus.train)
    how = "" if packing == "best_fit" else f":{packing}"
    how += ":learned" * corpus.marked
    # The marks: a fingerprint looks at some places of a pair, a plan comes of all of it.
    stream = f"{corpus.fingerprint}:{first}:{tokens}{how}:{marks_of(corpus.watched)}"
    return plan_file(folder, stream, room)


def _pieces(corpus: Corpus, held_out: bool, data: DataConfig, named: str, room: int) -> Pieces:
    tokens = len(corpus.valid if held_out else corpus.train)
    pieces = pieces_of(corpus.begins(held_out), tokens, room)
    if pieces.cut and not data.cut_documents:
        raise _too_long(named, pieces.cut, room, data.packing)
    if not pieces.starts.size:
        part = "held-out" if held_out else "training"
        raise UserError(
            f"{named} has no document of two tokens in its {part} part, and "
            f"data.packing={data.packing} needs one: give data.packing=concat"
        )
    return pieces


def _learned(pieces: Pieces, corpus: Corpus, held_out: bool, report: Report) -> Pieces:
    """Leaves out what holds nothing that is learned. Raises UserError if that is all."""
    kept = learned(corpus.valid if held_out else corpus.train, pieces.starts, pieces.lengths)
    if not kept.any():
        raise nothing_said(held_out)
    if left_out := int((~kept).sum()):
        report(
            f"left out of the {'held-out' if held_out else 'training'} samples: {left_out:,} of "
            f"{kept.size:,} pieces of conversations, in which the assistant says nothing"
        )
    return pieces._replace(starts=pieces.starts[kept], lengths=pieces.lengths[kept])


def _too_long(named: str, documents: int, room: int, packing: str) -> UserError:
    has = f"{documents:,} documents" if documents > 1 else "a document"
    return UserError(
        f"{named} has {has} longer than the {room:,} tokens of a sample, which "
        f"data.packing={packing} does not cut: give data.cut_documents=true, which does, or a "
        "longer model.seq_length"
    )


# The text of a run, opened: a stream of tokens, or several, to train on and held out.


_log = logging.getLogger(__name__)


def open_corpus(
    data: DataConfig,
    seq_length: int,
    cache_dir: str | os.PathLike[str] | None = None,
    report: cache.Report = _log.info,
    vocab_size: int | None = None,
) -> Corpus | Blend:
    """The text that `data` describes; its token cache and its packs are made if they are not there.

    The last `data.valid_fraction` of the tokens of each text, and at least one sample of
    `seq_length` + 1, is held out. `cache_dir` wins over `data.cache_dir`, which wins over the
    user's cache folder. `report` takes a sentence when there is something to wait for.
    `vocab_size`: the model's, which no token of a pair may reach. Raises UserError.
    """
    folder = _folder(data, cache_dir)
    if data.name == "blend":
        blend = open_blend(data, seq_length, folder, vocab_size)
        if data.packing == "concat":
            return blend
        return blend.packed(
            lambda one: with_plans(one, data, seq_length, folder, part_name(one.name), report)
        )
    if data.name == "corpus":
        corpus = _open_one(data, seq_length, folder, vocab_size)
    elif data.name == "chat":
        corpus = open_chat(data, folder, report)
        if data.packing == "concat":
            check_windows(corpus, seq_length)
    else:
        corpus = _open_text(data, seq_length, folder, report)
    if data.packing == "concat":
        return corpus
    return with_plans(corpus, data, seq_length, folder, origin(data), report)


def _open_one(data: DataConfig, seq_length: int, folder: Path, vocab_size: int | None) -> Corpus:
    remote = remote_of([data.path], folder, data.block_cache_gb)
    return open_pair(data, data.path, origin(data), seq_length, vocab_size, remote=remote)


def _open_text(data: DataConfig, seq_length: int, folder: Path, report: cache.Report) -> Corpus:
    tokenizer = open_tokenizer(data.tokenizer or BYTE)
    documents = find_documents(data)
    if isinstance(tokenizer, ByteTokenizer):
        _held_out(data, seq_length, documents, cache.token_count(documents))
        tokens, digest, files = cache.cached_tokens(folder, documents, tokenizer, report)
    else:
        pair, digest, files = cached_pair(folder, documents, tokenizer, report)
        tokens = pair.tokens
    split = len(tokens) - _held_out(data, seq_length, documents, len(tokens))
    parts = tokens.part(0, split), tokens.part(split, len(tokens))
    facts = tokenizer.vocab_size, tokenizer.eot, tokenizer.digest
    return Corpus(*parts, digest, *facts, data.tokenizer or BYTE, files=files)


def check_data(
    data: DataConfig,
    seq_length: int,
    cache_dir: str | os.PathLike[str] | None = None,
    vocab_size: int | None = None,
    samples: int = 0,
) -> list[str]:
    """Raises the UserError that `open_corpus` would, as far as names, sizes and rights can tell,
    and for a tokenizer that a model of `vocab_size` tokens cannot take. Returns sentences about
    parts of a blend that a run of `samples` would read often.

    Opens no file of text, writes nothing and imports no torch: for the launcher, before workers
    start. How many tokens a text makes is known of bytes and pairs alone.
    """
    if data.name in ("corpus", "blend"):
        return _check_pairs(data, seq_length, cache_dir, vocab_size, samples)
    if data.name == "chat":
        chat = find_chat(data)
        check_vocabulary(chat.tokenizer.vocab_size, vocab_size or TOKEN, data.tokenizer)
        cache.check_room_for(_folder(data, cache_dir) / f"{chat.key}.json")
        return []
    tokenizer = open_tokenizer(data.tokenizer or BYTE)
    if vocab_size is not None:
        check_vocabulary(tokenizer.vocab_size, vocab_size, data.tokenizer)
    documents = find_documents(data)
    if isinstance(tokenizer, ByteTokenizer):
        _held_out(data, seq_length, documents, cache.token_count(documents))
        if data.packing != "concat" and not data.cut_documents:
            lengths = [d.size + 1 for d in documents]
            check_lengths(lengths, seq_length, origin(data), data.packing)
    cache.check_folder(_folder(data, cache_dir), documents, tokenizer)
    return []


def _check_pairs(
    data: DataConfig,
    seq_length: int,
    cache_dir: str | os.PathLike[str] | None,
    vocab_size: int | None,
    samples: int,
) -> list[str]:
    folder = _folder(data, cache_dir)
    if data.name == "corpus":
        corpus = _open_one(data, seq_length, folder, vocab_size)
        corpora: Sequence[Corpus] = [corpus]
        names = [origin(data)]
    else:
        corpus = open_blend(data, seq_length, folder, vocab_size)
        corpora, names = corpus.corpora, [part_name(one.name) for one in corpus.corpora]
    epochs = [(len(one.train) - 1) // seq_length for one in corpora]
    if data.packing != "concat":
        for k, (one, name) in enumerate(zip(corpora, names, strict=True)):
            check_pieces(one, data, seq_length, folder, name)
            epochs[k] = max(1, len(one.train) // (seq_length + 1))
    if isinstance(corpus, Blend):
        return check_epochs(corpus, epochs, samples, data.most_epochs)
    return []


def check_vocabulary(needed: int, vocab_size: int, name: str | None) -> None:
    """Raises UserError if tokens 0 … `needed` - 1, of the tokenizer `name`, are not the model's."""
    if needed > vocab_size:
        raise UserError(
            f"model.vocab_size={vocab_size} must be at least {needed} for the tokens of "
            f"data.tokenizer={show(name)}; the nearest is model.vocab_size={needed}"
        )


def _folder(data: DataConfig, cache_dir: str | os.PathLike[str] | None) -> Path:
    given = cache_dir if cache_dir is not None else data.cache_dir
    return cache.default_folder() if given is None else Path(os.path.expanduser(given)).absolute()


def _held_out(data: DataConfig, seq_length: int, documents: Sequence[Document], tokens: int) -> int:
    """Tokens of the held-out split. Raises UserError if either split is too short for a sample."""
    held_out = held_out_tokens(tokens, data.valid_fraction, seq_length)
    if held_out is not None:
        return held_out
    longest, sample = longest_sample(tokens, data.valid_fraction), seq_length + 1
    there = tokens - len(documents)  # the rest are end-of-text tokens
    unit = "bytes" if data.reads_bytes else "tokens"
    fits = (
        f"the longest model.seq_length that fits is {longest}"
        if longest >= 1
        else "no model.seq_length fits"
    )
    raise UserError(
        f"{origin(data)} is too short for model.seq_length={seq_length}: it has {there} {unit}, "
        f"one sample to train on and one held out need {2 * sample - len(documents)}, {fits}"
    )
