"""The packed text of a run: one stream of tokens, split by position: training, then held out."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from parallel3d.config.fields import show
from parallel3d.data import cache
from parallel3d.data.sources import Document, find_documents, origin
from parallel3d.data.text.packed import cached_pair
from parallel3d.data.tokenizer import BYTE, ByteTokenizer, open_tokenizer
from parallel3d.data.tokens import Tokens
from parallel3d.errors import UserError

if TYPE_CHECKING:  # the configuration drags in omegaconf, which this file can do without
    from parallel3d.config.schema import DataConfig

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Corpus:
    """Packed documents, each followed by `eot`; `train` and `valid` are disjoint, in that order.

    Both are parts of the cache on the disk. `fingerprint` is a digest of the stream of tokens:
    equal for equal text in equal order, on any machine and whatever the files' times are.
    """

    train: Tokens
    valid: Tokens
    fingerprint: str
    vocab_size: int
    eot: int
    tokenizer: str = BYTE  # its digest


def open_corpus(
    data: DataConfig,
    seq_length: int,
    cache_dir: str | os.PathLike[str] | None = None,
    report: cache.Report = _log.info,
) -> Corpus:
    """The corpus that `data` describes; its token cache is built if it is not there yet.

    The last `data.valid_fraction` of the tokens, and at least one sample of `seq_length` + 1, is
    held out. `cache_dir` wins over `data.cache_dir`, which wins over the user's cache folder.
    `report` takes a sentence when there is something to wait for. Raises UserError.
    """
    tokenizer = open_tokenizer(data.tokenizer or BYTE)
    documents = find_documents(data)
    folder = _folder(data, cache_dir)
    if isinstance(tokenizer, ByteTokenizer):
        _held_out(data, seq_length, documents, cache.token_count(documents))
        tokens, digest = cache.cached_tokens(folder, documents, tokenizer, report)
    else:
        tokens, digest = cached_pair(folder, documents, tokenizer, report)
    split = len(tokens) - _held_out(data, seq_length, documents, len(tokens))
    parts = tokens.part(0, split), tokens.part(split, len(tokens))
    return Corpus(*parts, digest, tokenizer.vocab_size, tokenizer.eot, tokenizer.digest)


def check_data(
    data: DataConfig,
    seq_length: int,
    cache_dir: str | os.PathLike[str] | None = None,
    vocab_size: int | None = None,
) -> None:
    """Raises the UserError that `open_corpus` would, as far as names, sizes and rights can tell,
    and for a tokenizer that a model of `vocab_size` tokens cannot take.

    Opens no file of text, writes nothing and imports no torch: for the launcher, before workers
    start. How many tokens a text makes is known of bytes alone.
    """
    tokenizer = open_tokenizer(data.tokenizer or BYTE)
    if vocab_size is not None:
        check_vocabulary(tokenizer.vocab_size, vocab_size, data.tokenizer)
    documents = find_documents(data)
    if isinstance(tokenizer, ByteTokenizer):
        _held_out(data, seq_length, documents, cache.token_count(documents))
    cache.check_folder(_folder(data, cache_dir), documents, tokenizer)


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
    share = int(tokens * data.valid_fraction)
    sample = seq_length + 1
    if tokens - max(share, sample) >= sample:
        return max(share, sample)
    # What the held-out split leaves must fit a sample, and so must the held-out split itself.
    longest = min(tokens // 2, tokens - share) - 1
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
