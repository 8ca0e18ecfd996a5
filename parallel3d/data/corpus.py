"""Opens a run's text as a stream to train on and a held-out stream, with packing plans."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import logging
import math
import os
import resource
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from fractions import Fraction
from functools import partial
from io import IOBase
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from parallel3d.config.fields import show
from parallel3d.data import cache
from parallel3d.data.blend import BlendedSamples, StagedShares, WeightPeriod, whole_weights
from parallel3d.data.boundary_tokens import BoundaryTokens, look_at_dataset, look_at_turns
from parallel3d.data.chat import (
    DTYPE,
    SPOKEN,
    TOKEN,
    ChatSamples,
    find_chat,
    learned,
    nothing_said,
    write_chat,
)
from parallel3d.data.checks import Weights, blend_weights
from parallel3d.data.formats import PROSE, TEXT, endings, file_name, named
from parallel3d.data.indexed import CorpusFacts, IndexedCorpus, facts_beside, tokenizer_beside
from parallel3d.data.packing import (
    PLAN_VERSION,
    PackingPlan,
    PackSampler,
    StreamPieces,
    best_fit,
    kept_plan,
    one_each,
    pieces_of,
)
from parallel3d.data.sampler import DatasetOrder, Sampler, Sources, Starts
from parallel3d.data.sources import (
    Document,
    cache_key,
    cached_dataset,
    cached_text,
    origin,
    take_documents,
)
from parallel3d.data.tokenizer import (
    BYTE,
    NO_ROLES,
    ByteTokenizer,
    Roles,
    Tokenizer,
    beyond_table,
    check_tokens,
    check_vocabulary,
    open_tokenizer,
)
from parallel3d.data.tokens import (
    PROVED,
    File,
    Proof,
    Tokens,
    WatchedFile,
    marks_of,
    prove,
    size_of,
)
from parallel3d.errors import UserError
from parallel3d.text import count

if TYPE_CHECKING:
    from parallel3d.data.keys import DataConfig
    from parallel3d.data.remote import BlockCache
    from parallel3d.models.keys import ModelConfig


_log = logging.getLogger(__name__)

_LOOKED_AT = 1 << 22  # number of tokens read at a time
_SENTENCES = 4  # maximum number of shown notes on a blend's parts
# A fingerprint samples this many places of the tokens and of the index, and this many numbers at
# each place.
_PLACES, _RUN = 8, 512


@dataclass(frozen=True)
class Corpus:
    """A text as a stream of tokens, split into `train` and `valid`, either of which may be empty.

    Attributes:
        fingerprint: a digest of the stream, the same on any machine.
        vocab_size, eot: number of tokens, and the token that ends a text.
        tokenizer: the tokenizer's digest.
        tokenizer_name: location of the tokenizer; None if it is not known.
        documents: finds where documents begin, or None if they begin after each `eot`.
        plans: packing plans of `train` and `valid`, each None if the part is empty; None if the
            documents are not packed.
        name: the prefix of an indexed dataset; "" for other texts.
        named: the name of the corpus in errors.
        marked: whether the tokens carry the marks of `chat`.
        told: notes for the user about the corpus, one sentence each.
        roles: the tokens that begin and end the documents.
        files: all open files.
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
    told: tuple[str, ...] = ()
    roles: Roles = NO_ROLES
    files: tuple[WatchedFile, ...] = ()

    @classmethod
    def of(cls, tokens: Tokens, held_out: int, tokenizer: Tokenizer, **more: Any) -> Corpus:
        """Makes a corpus from `tokens` of `tokenizer`; the last `held_out` tokens are held out."""
        split = len(tokens) - held_out
        return cls(
            *(tokens.part(0, split), tokens.part(split, len(tokens))),
            vocab_size=tokenizer.vocab_size,
            eot=tokenizer.eot,
            tokenizer=tokenizer.digest,
            **more,
        )

    @property
    def watched(self) -> dict[str, WatchedFile]:
        """The open files, by keys that do not depend on the corpus's location."""
        return {f"{self.fingerprint[:16]}.{k}": file for k, file in enumerate(self.files)}

    @property
    def train_tokens(self) -> int:
        return len(self.train)

    @property
    def valid_tokens(self) -> int:
        return len(self.valid)

    def part(self, held_out: bool) -> Tokens:
        """Returns the held-out tokens, or the tokens to train on."""
        return self.valid if held_out else self.train

    def starts(self, held_out: bool) -> Starts | None:
        """Returns a function that finds where documents start, relative to the part's start.

        Returns None if a document begins after each `eot`.
        """
        documents = self.documents
        if documents is None:
            return None
        return partial(_starts, documents, len(self.train) if held_out else 0)

    def begins(self, held_out: bool) -> npt.NDArray[np.int64]:
        """Returns where the documents of a part start.

        The first start is 0, even if the part begins inside a document.
        """
        tokens, starts = self.part(held_out), self.starts(held_out)
        found = [np.zeros(1, np.int64)]
        for first in range(0, len(tokens), _LOOKED_AT):
            last = min(first + _LOOKED_AT, len(tokens))
            if starts is not None:
                found.append(starts(first, last))
            else:
                last -= last == len(tokens)  # no document begins after the last end-of-text
                found.append(np.flatnonzero(tokens[first:last] == self.eot) + first + 1)
        return np.unique(np.concatenate(found))

    def sources(self, model: ModelConfig, data: DataConfig, seed: int) -> Sources:
        """Returns the text's samples. Raises UserError if the model's vocabulary is too small."""
        _check_table(self.vocab_size, model, data.tokenizer)
        length = model.seq_length
        valid = self.samples(True, length, data, seed) if self.valid_tokens else None
        return Sources(self.samples(False, length, data, seed), valid, {})

    def samples(
        self, held_out: bool, seq_length: int, data: DataConfig, seed: int, name: str = ""
    ) -> DatasetOrder:
        """Returns the samples of one part.

        Samples to train on are shuffled; held-out samples are in order and include the last token.
        `name` identifies a part of a blend, so that each part has an order of its own.
        """
        tokens, shuffle = self.part(held_out), not held_out
        if self.plans is not None:
            plan = self.plans[held_out]
            assert plan is not None  # the part is not empty
            packs = PackSampler(tokens, plan, seed, shuffle, self.eot, name)
            return ChatSamples(packs) if self.marked else packs
        masks = data.eod_mask_loss, data.masks_documents
        more = self.eot, *masks, self.starts(held_out), name, held_out
        windows = Sampler(tokens, seq_length, seed, shuffle, *more)
        return ChatSamples(windows) if self.marked else windows


def _starts(dataset: IndexedCorpus, first: int, begin: int, end: int) -> npt.NDArray[np.int64]:
    """Returns where documents start in a part that starts at token `first`.

    This is a module-level function, because a closure could not be pickled.
    """
    return dataset.starts(first + begin, first + end) - first


@dataclass(frozen=True)
class Blend:
    """Several corpora that were made with the same tokenizer, mixed by weight.

    The corpora are in the order of their fingerprints, which depends neither on file names nor on
    the order in which the user gave them.
    """

    corpora: tuple[Corpus, ...]
    stages: tuple[WeightPeriod, ...]

    @property
    def vocab_size(self) -> int:
        return self.corpora[0].vocab_size

    @property
    def eot(self) -> int:
        return self.corpora[0].eot

    @property
    def tokenizer(self) -> str:
        return self.corpora[0].tokenizer

    @property
    def tokenizer_name(self) -> str | None:
        return next((c.tokenizer_name for c in self.corpora if c.tokenizer_name), None)

    @property
    def watched(self) -> dict[str, WatchedFile]:
        return {key: file for one in self.corpora for key, file in one.watched.items()}

    @property
    def roles(self) -> Roles:
        """The tokens that begin and end the corpora's documents.

        The tokens that begin documents are taken from the first corpus that has any.
        """
        parts = [corpus.roles for corpus in self.corpora]
        begin = next((roles.begin for roles in parts if roles.begin), ())
        return Roles(begin, tuple(sorted({end for roles in parts for end in roles.ends})))

    @property
    def told(self) -> tuple[str, ...]:
        """The first notes for the user about the corpora, one sentence each."""
        told = [sentence for corpus in self.corpora for sentence in corpus.told]
        if len(told) > _SENTENCES:
            told[_SENTENCES:] = [
                f"data.blend: {count(len(told) - _SENTENCES, 'more note')} about its parts, not "
                "shown here"
            ]
        begin = self.roles.begin
        bare = [one.named for one in self.corpora if one.roles.begin != begin]
        if bare:
            told.append(
                f"the documents of {len(bare):,} of {len(self.corpora):,} parts, such as "
                f"{bare[0]}, do not begin with the same tokens as those of other parts: tokenize "
                "all parts in the same way"
            )
        return tuple(told)

    @property
    def train_tokens(self) -> int:
        return sum(len(corpus.train) for corpus in self.corpora)

    @property
    def valid_tokens(self) -> int:
        return sum(len(corpus.valid) for corpus in self.corpora)

    @property
    def fingerprint(self) -> str:
        """A digest of the corpora and the weights of all stages."""
        return hashlib.blake2b(self.history.encode(), digest_size=16).hexdigest()

    @property
    def history(self) -> str:
        """The first sample and a digest of each stage, as text for a checkpoint's manifest."""
        stages = []
        for stage in self.stages:
            facts = [[self.corpora[k].fingerprint, weight] for k, weight in stage.weights.items()]
            stages.append(f"{stage.first}:{cache.digest_of(facts)}")
        return " ".join(stages)

    def sources(self, model: ModelConfig, data: DataConfig, seed: int) -> Sources:
        """Returns the text's samples. Raises UserError if the model's vocabulary is too small."""
        _check_table(self.vocab_size, model, data.tokenizer)
        names = [one.name for one in self.corpora]

        def part(held_out: bool) -> list[DatasetOrder]:
            return [
                one.samples(held_out, model.seq_length, data, seed, name=one.fingerprint)
                for one in self.corpora
            ]

        train = BlendedSamples(part(False), self.stages, names)
        if not self.valid_tokens:
            return Sources(train, None, {})
        valid, first = part(True), self.stages[0].weights
        heaviest = sorted(first, key=lambda k: (-first[k], k)) + [
            k for k in range(len(valid)) if k not in first
        ]
        shown = heaviest[: data.held_out_sets]
        held_out = {names[k]: valid[k] for k in shown}
        return Sources(train, BlendedSamples(valid, self.stages[:1], names), held_out)


def history_until(history: str, samples: int) -> list[str]:
    """Returns the stages of a `Blend.history` that contribute to the first `samples` samples."""
    stages = history.split()
    return [stage for stage in stages if int(stage.partition(":")[0]) < max(1, samples)]


# Opening


def open_corpus(
    data: DataConfig,
    seq_length: int,
    vocab_size: int | None = None,
) -> Corpus | Blend:
    """Opens the text that `data` describes; builds its token cache and plans if they are missing.

    The end of each text is held out: the share `data.held_out`, and at least one sample of
    `seq_length` + 1 tokens, or one conversation, unless the share is 0. `vocab_size` is the size of
    the model's vocabulary; all tokens of an indexed dataset must be below it. None stands for the
    tokenizer's vocabulary. Raises UserError.
    """
    folder = cache.folder_of(data)
    if data.name in ("corpus", "blend"):
        opened = _open_pairs(data, seq_length, folder, vocab_size)
    elif data.name == "chat":
        opened = _open_chat(data, seq_length, folder, vocab_size)
    else:
        opened = _open_text(data, seq_length, folder, vocab_size)
    if data.packing == "concat":
        return opened
    if isinstance(opened, Corpus):
        return _with_plans(opened, data, seq_length, folder)
    parts = tuple(_with_plans(one, data, seq_length, folder) for one in opened.corpora)
    return dataclasses.replace(opened, corpora=parts)


def _open_text(data: DataConfig, seq_length: int, folder: Path, limit: int | None) -> Corpus:
    tokenizer, documents, _ = _find_text(data, seq_length)
    begin = tokenizer.bos if data.add_bos else []
    dataset, files, _ = cached_text(folder, documents, tokenizer, begin)
    held_out = _held_out_tokens(len(dataset), data, seq_length, origin(data))
    corpus = Corpus.of(
        *(dataset.tokens, held_out, tokenizer),
        fingerprint=files[0].digest,
        tokenizer_name=data.tokenizer or BYTE,
        # With byte tokens, the documents of the dataset are blocks of a text.
        documents=None if isinstance(tokenizer, ByteTokenizer) else dataset,
        roles=Roles(tuple(begin), ()),
        named=origin(data),
        files=files,
    )
    return _within(corpus, dataset, tokenizer, limit, "document")


def _find_text(data: DataConfig, seq_length: int) -> tuple[Tokenizer, list[Document], list[str]]:
    """Returns the tokenizer and the documents of a text, and lines on how its files are read.

    Raises UserError, for example if plain files are too short for byte tokens. Other tokens are
    counted later, when the text is tokenized.
    """
    tokenizer = open_tokenizer(data.tokenizer or BYTE)
    documents, lines = take_documents(data)
    if isinstance(tokenizer, ByteTokenizer) and all(each.is_plain for each in documents):
        # every text ends with an end-of-text
        tokens = sum(document.size + 1 for document in documents)
        _held_out_tokens(tokens, data, seq_length, origin(data))
    return tokenizer, documents, lines


def _open_chat(data: DataConfig, seq_length: int, folder: Path, limit: int | None) -> Corpus:
    """Opens the conversations of `data`, after tokenizing them into `folder` if necessary.

    The last conversations are held out: the share `data.held_out` of the tokens, and at least one
    conversation unless this share is 0. Raises UserError if too many rows are not conversations.
    """
    chat = find_chat(data)
    dataset, files, facts = cached_dataset(folder, chat.key, DTYPE, partial(write_chat, chat))
    held_out = len(dataset) if data.held_out else 0
    if 0.0 < data.held_out < 1.0:
        if dataset.documents < 2:
            raise UserError(
                f"data.path={data.path} has one conversation, but needs one to train on and one to "
                "hold out; give more conversations, or data.valid_fraction=0"
            )
        wanted = len(dataset) - max(1, int(len(dataset) * data.held_out))
        last = min(max(1, dataset.document_from(wanted)), dataset.documents - 1)
        held_out = len(dataset) - int(dataset.begins(last, last)[0])
    boundaries = look_at_turns(dataset, chat.tokenizer, SPOKEN, TOKEN, origin(data))
    told = [f"{origin(data)}: {line}" for line in facts.get("told", ())]
    if data.packing != "padded":
        see = "do not see each other" if data.masks_documents else "see each other"
        told.append(
            f"data.packing={data.packing}: conversations in the same sample {see} "
            f"(data.document_mask={show(data.masks_documents)})"
        )
    corpus = Corpus.of(
        *(dataset.tokens, held_out, chat.tokenizer),
        fingerprint=files[0].digest,
        tokenizer_name=data.tokenizer,
        documents=dataset,
        named=origin(data),
        marked=True,
        told=(*told, *boundaries.sentences),
        roles=boundaries.roles,
        files=files,
    )
    if data.packing == "concat" and data.held_out < 1.0:
        _check_windows(corpus, seq_length)
    return _within(corpus, dataset, chat.tokenizer, limit, "conversation")


def _check_windows(corpus: Corpus, seq_length: int) -> None:
    """Raises UserError if a part of the conversations has no full sample or no learned token."""
    for tokens, held_out in ((corpus.train, False), (corpus.valid, True)):
        if not len(tokens):
            continue
        windows = (len(tokens) - 1) // seq_length
        if windows < 1:
            raise UserError(
                f"data.path: the {'held-out' if held_out else 'training'} conversations have "
                f"{len(tokens):,} tokens, but a sample of data.packing=concat has "
                f"{seq_length + 1:,}: give data.packing=padded"
            )
        if not learned(tokens, np.zeros(1, np.int64), np.full(1, windows * seq_length + 1)).any():
            raise nothing_said(held_out)


def _held_out_tokens(tokens: int, data: DataConfig, seq_length: int, named: str) -> int:
    """Returns the number of tokens at the end of a text that are held out.

    All tokens are held out if `data.held_out` is 1, as for a validation set, and none if it is 0.
    Otherwise that share is held out, and at least one sample. Raises UserError if a part has no
    sample; the error calls the text `named`.
    """
    share, sample = data.held_out, seq_length + 1
    held_out = max(int(tokens * share), sample) if share else 0
    if share == 1.0:
        return tokens
    if tokens - held_out >= sample:
        return held_out
    longest = (min(tokens // 2, tokens - int(tokens * share)) if share else tokens) - 1
    needs = f"one sample needs {sample:,}"
    if share:
        needs = f"one sample to train on and one held out need {2 * sample:,}"
    fits = "give more text, because no model.seq_length is short enough"
    if longest >= 1:
        fits = f"model.seq_length must be at most {longest}"
    raise UserError(
        f"{named} is too short for model.seq_length={seq_length}: it has {tokens:,} tokens, "
        f"but {needs}; {fits}"
    )


# Megatron's indexed datasets, alone and blended


def _open_pairs(
    data: DataConfig, seq_length: int, folder: Path, limit: int | None
) -> Corpus | Blend:
    """Opens the dataset of `data`, or the datasets of its blend, without plans.

    Time and memory do not grow with the size of an indexed dataset. Raises UserError.

    Args:
        folder: the cache folder, which keeps blocks of remote files.
        limit: the size of the model's vocabulary, or None if it is not known.
    """
    weights = blend_weights(data) if data.name == "blend" else []
    named = {
        prefix: f"data.blend's {show(prefix)}" for stage in weights for prefix in stage.by_prefix
    }
    if not weights:
        assert data.path is not None, "check_config refuses data=corpus without data.path"
        named[data.path] = origin(data)
    remote = None
    if any(map(is_remote, named)):
        from parallel3d.data.remote import BlockCache

        remote = BlockCache(folder / "blocks", int(data.block_cache_gb * 1e9))
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))  # a dataset has two files, two plans
    tokenizer = None if data.tokenizer is None else open_tokenizer(data.tokenizer)
    corpora = [
        _open_dataset(data, prefix, called, seq_length, limit, tokenizer, remote)
        for prefix, called in named.items()
    ]
    if not weights:
        return corpora[0]
    corpora.sort(key=lambda corpus: corpus.fingerprint)
    _check_alike(corpora)
    stages = (_stage(stage, corpora, seq_length) for stage in weights)
    # If several stages begin at one sample, the last of them counts.
    last = {stage.first: stage for stage in stages}
    return Blend(tuple(corpora), tuple(last.values()))


def _stage(stage: Weights, corpora: Sequence[Corpus], seq_length: int) -> WeightPeriod:
    """Converts a stage: its start to samples, and its weights to whole numbers, keyed by corpus
    index.
    """
    typed = stage.by_prefix
    members = [k for k, corpus in enumerate(corpora) if corpus.name in typed]
    exact = [typed[corpora[k].name] or Fraction(len(corpora[k].train)) for k in members]
    return WeightPeriod(
        -(-stage.first // seq_length), dict(zip(members, whole_weights(exact), strict=True))
    )


def _check_alike(corpora: Sequence[Corpus]) -> None:
    first = corpora[0]
    for before, corpus in pairwise(corpora):
        if before.fingerprint == corpus.fingerprint:
            raise UserError(
                f"{before.named} and {show(corpus.name)} hold the same tokens: "
                "give one of them, with the sum of their weights"
            )
        if (corpus.tokenizer, corpus.eot) != (first.tokenizer, first.eot):
            raise UserError(
                f"{first.named} and {show(corpus.name)} were made with different tokenizers, "
                f"{first.tokenizer[:12]} and {corpus.tokenizer[:12]}: make both with the same one"
            )


def _open_dataset(
    data: DataConfig,
    prefix: str,
    named: str,
    seq_length: int,
    limit: int | None,
    tokenizer: Tokenizer | None,
    remote: BlockCache | None,
) -> Corpus:
    if remote is not None and is_remote(prefix):
        dataset = IndexedCorpus(prefix, named, remote.opened)
        index = dataset.index
        assert not isinstance(index, IOBase)
        index.check()  # the index may have been replaced before the .bin was opened
        kept = facts_beside(prefix, remote.read)
    else:
        dataset = IndexedCorpus(prefix, named)
        kept = facts_beside(dataset.prefix)
    facts, name = _facts(data, dataset, tokenizer, kept)
    boundaries = BoundaryTokens(Roles(facts.begin, ()))
    if kept is None:
        assert tokenizer is not None  # `_facts` ensures this
        boundaries = look_at_dataset(dataset, tokenizer, name)
    size, texts = facts.vocab_size, dict[int, str]()
    if limit is not None and size > limit:
        if name is None or open_tokenizer(name).vocab_size < size:
            raise UserError(
                f"model.vocab_size={limit} must be at least {size} for the tokens of {named}; the "
                f"nearest is model.vocab_size={size}"
            )
        try:
            beyond = check_vocabulary(open_tokenizer(name), limit)
        except UserError as error:
            raise UserError(f"{named}: {error}") from None
        boundaries = boundaries._replace(sentences=(*boundaries.sentences, *beyond))
        size, texts = limit, beyond_table(open_tokenizer(name), limit)
    split = len(dataset) - _held_out_tokens(len(dataset), data, seq_length, named)
    tokens = dataset.tokens.below(size if limit is None else limit, named, texts)
    fingerprint, files = _watched(dataset, tokens, facts.digest)
    return Corpus(
        *(tokens.part(0, split), tokens.part(split, len(dataset))),
        fingerprint=fingerprint,
        vocab_size=size,
        eot=facts.eot,
        tokenizer=facts.tokenizer,
        tokenizer_name=name,
        documents=dataset,
        name=prefix,
        named=named,
        told=boundaries.sentences,
        roles=boundaries.roles,
        files=files,
    )


def is_remote(prefix: str) -> bool:
    """Returns whether a prefix is an fsspec address."""
    return "://" in prefix


def _facts(
    data: DataConfig, dataset: IndexedCorpus, tokenizer: Tokenizer | None, kept: CorpusFacts | None
) -> tuple[CorpusFacts, str | None]:
    """Returns facts about an indexed dataset, and the location of its tokenizer (None if unknown).

    Raises UserError.
    """
    if kept is None:
        if tokenizer is None:
            raise UserError(
                f"{dataset.named} has no {dataset.prefix}.json that names its tokenizer: give "
                "data.tokenizer, for example data.tokenizer=my/tokenizer.json"
            )
        own = tokenizer.digest, None, tokenizer.vocab_size, tokenizer.eot
        return CorpusFacts(*own, dataset.documents, len(dataset), digest=""), data.tokenizer
    if (kept.documents, kept.tokens) != (dataset.documents, len(dataset)):
        raise UserError(
            f"{dataset.named} cannot be read, because {dataset.prefix}.json belongs to "
            f"another dataset: it has {kept.documents:,} documents and {kept.tokens:,} tokens, but "
            f"the .idx has {dataset.documents:,} and {len(dataset):,}; make the dataset again"
        )
    if tokenizer is not None and tokenizer.digest != kept.tokenizer:
        raise UserError(
            f"{dataset.named} was made with another tokenizer than data.tokenizer="
            f"{show(data.tokenizer)}: their digests are {kept.tokenizer[:12]} and "
            f"{tokenizer.digest[:12]}; leave data.tokenizer out, or give the corpus's own tokenizer"
        )
    known = tokenizer or (ByteTokenizer() if kept.tokenizer == BYTE else None)
    if known is not None and known.eot != kept.eot:
        raise UserError(
            f"{dataset.named} cannot be read, because {dataset.prefix}.json has eot={kept.eot}, "
            f"but its tokenizer has {known.eot}; make the dataset again"
        )
    beside = tokenizer_beside(dataset.prefix, kept)
    there = beside if beside == BYTE or os.path.lexists(beside) else None
    return kept, there if data.tokenizer is None else data.tokenizer


def _watched(
    dataset: IndexedCorpus, tokens: Tokens, text: str
) -> tuple[str, tuple[WatchedFile, WatchedFile]]:
    """Returns an indexed dataset's fingerprint, and its files.

    The files' marks are taken before the fingerprint is computed, so that no change goes unnoticed.
    """

    fingerprint, index = "", dataset.index
    remedy = (
        "restore the dataset that the run began with and start again (`parallel3d data show "
        f"{dataset.prefix}` reads all of it), or choose another run="
    )

    def proof(file: File) -> Proof:
        if _fingerprint(dataset, tokens, text) != fingerprint:
            return Proof.CHANGED
        if file is tokens.file:
            return prove(file, text or None)
        if size_of(file) <= PROVED:
            dataset.check_all()
        return Proof.SAMPLED

    files = (
        WatchedFile(tokens.file, partial(proof, tokens.file), remedy),
        WatchedFile(index, partial(proof, index), remedy),
    )
    fingerprint = _fingerprint(dataset, tokens, text)
    return fingerprint, files


def _fingerprint(dataset: IndexedCorpus, tokens: Tokens, text: str) -> str:
    """Returns a digest of a dataset's sizes and samples, and of its .bin's digest, if known."""
    digest = hashlib.blake2b(digest_size=16)
    sizes = [str(dataset.dtype), len(dataset), dataset.documents, dataset.sequences, text]
    digest.update(json.dumps(sizes).encode())
    for place in range(_PLACES):
        for stream in (tokens, dataset.lengths):
            at = place * max(0, len(stream) - _RUN) // (_PLACES - 1)
            digest.update(stream[at : at + _RUN].tobytes())
    return digest.hexdigest()


# Checks before a run


def check_data(
    data: DataConfig,
    seq_length: int,
    vocab_size: int | None = None,
    samples: int = 0,
) -> list[str]:
    """Checks the inputs of `open_corpus`, as far as names, sizes and permissions allow.

    The launcher calls this function before workers start, so it reads only the first bytes of text
    files, writes nothing and does not import torch. It counts only byte tokens and the tokens of
    indexed datasets. Returns sentences on how the files of folders are read, and on parts of a
    blend that a run of `samples` samples would repeat often. Raises UserError, even for a tokenizer
    that does not fit a model of `vocab_size` tokens.
    """
    folder, limit = cache.folder_of(data), vocab_size or TOKEN
    if data.name in ("corpus", "blend"):
        opened = _open_pairs(data, seq_length, folder, vocab_size)
        parts = opened.corpora if isinstance(opened, Blend) else (opened,)
        if data.packing == "concat":
            epochs = [(len(one.train) - 1) // seq_length for one in parts]
        else:
            for one in parts:
                _check_plans(one, data, seq_length, folder)
            epochs = [max(1, len(one.train) // (seq_length + 1)) for one in parts]
        if isinstance(opened, Blend):
            return check_epochs(opened, epochs, samples, data.most_epochs)
    elif data.name == "chat":
        chat = find_chat(data)
        beyond = check_vocabulary(chat.tokenizer, limit)
        cache.check_can_store(folder, chat.key)
        return [*chat.lines, *beyond]
    else:
        tokenizer, documents, lines = _find_text(data, seq_length)
        beyond = check_vocabulary(tokenizer, limit)
        if isinstance(tokenizer, ByteTokenizer) and data.packing != "concat":
            plain = (document for document in documents if document.is_plain)
            long = sum(document.size > seq_length for document in plain)
            _check_lengths(long, data, seq_length + 1, origin(data))
        cache.check_can_store(folder, cache_key(documents, tokenizer))
        return [*lines, *beyond]
    return []


def _check_table(vocab_size: int, model: ModelConfig, name: str | None) -> None:
    """Raises UserError if a corpus of tokenizer `name` was opened for a larger vocabulary."""
    if vocab_size > model.vocab_size:
        raise UserError(
            f"model.vocab_size={model.vocab_size} must be at least {vocab_size} for the tokens of "
            f"data.tokenizer={show(name)}; the nearest is model.vocab_size={vocab_size}"
        )


def _within(
    corpus: Corpus, dataset: IndexedCorpus, tokenizer: Tokenizer, limit: int | None, each: str
) -> Corpus:
    """Returns a corpus whose tokens are below `limit`, the size of the model's vocabulary.

    Reads all tokens if the tokenizer has more. The error names the document, which it calls `each`.
    Raises UserError.
    """
    if limit is None or tokenizer.vocab_size <= limit:
        return corpus
    check_vocabulary(tokenizer, limit)
    for first in range(0, len(dataset), _LOOKED_AT):
        tokens = dataset.tokens[first : min(first + _LOOKED_AT, len(dataset))]
        tokens = tokens & TOKEN if corpus.marked else tokens
        odd = np.flatnonzero(tokens >= limit)
        if odd.size:
            at = first + int(odd[0])
            number = dataset.document_from(at + 1)
            where = f"{corpus.named}: {each} {number:,}"
            check_tokens([int(tokens[odd[0]])], tokenizer, limit, where)
    return dataclasses.replace(corpus, vocab_size=limit)


# Up to this number of epochs, repeated text trains about as well as new text. Source: N.
# Muennighoff and others, "Scaling Data-Constrained Language Models", NeurIPS 2023.
_REPEATS_WITHOUT_LOSS = 4


def check_epochs(
    blend: Blend, windows: Sequence[int], samples: int, most: float | None
) -> list[str]:
    """Returns warnings about parts that a run of `samples` samples would repeat often.

    `windows` has the number of samples in an epoch of each part. Raises UserError for a part that
    would be read more than `most` times, unless `most` is None.
    """
    counts = StagedShares(blend.stages, len(blend.corpora)).counts(samples)
    warnings = []
    for corpus, had, epoch in zip(blend.corpora, counts, windows, strict=True):
        times = had / epoch
        small = (
            f"{corpus.named} is small for its share: its {epoch:,} samples would "
            f"be read {times:.1f} times"
        )
        if most is not None and times > most:
            raise UserError(
                f"{small}, more than data.most_epochs={most:g}; give it about "
                f"{math.floor(most / times * 100)} % of this weight, or more text"
            )
        if times > _REPEATS_WITHOUT_LOSS:
            warnings.append(small)
    return warnings


# Packing plans of a corpus


def _with_plans(corpus: Corpus, data: DataConfig, seq_length: int, folder: Path) -> Corpus:
    """Returns the corpus with both packing plans; builds missing plans. Raises UserError."""
    capacity = seq_length + 1
    fit = one_each if data.packing == "padded" else best_fit
    training, held_out = (
        kept_plan(folder, key, partial(_pieces, corpus, part, data, capacity), capacity, fit)
        if (key := _plan_key(corpus, part, data, capacity))
        else None
        for part in (False, True)
    )
    made = [plan for plan in (training, held_out) if plan is not None]
    return dataclasses.replace(
        corpus,
        plans=(training, held_out),
        fingerprint=" ".join([corpus.fingerprint, *(plan.digest for plan in made)]),
        files=(*corpus.files, *(plan.watched for plan in made)),
    )


def _check_plans(corpus: Corpus, data: DataConfig, seq_length: int, folder: Path) -> None:
    """Raises UserError for documents that do not fit a sample, unless the plans exist already."""
    for held_out in (False, True):
        if key := _plan_key(corpus, held_out, data, seq_length + 1):
            cache.check_can_store(folder, key)
            if not (folder / f"{key}.json").exists():
                _pieces(corpus, held_out, data, seq_length + 1)


def _plan_key(corpus: Corpus, held_out: bool, data: DataConfig, capacity: int) -> str:
    """Returns the name of a part's plan in the cache, which is a digest of the plan's inputs.

    Returns "" for a part without tokens, which has no plan.
    """
    part, first = corpus.part(held_out), len(corpus.train) if held_out else 0
    if not len(part):
        return ""
    # A fingerprint only samples places of an indexed dataset, but a plan depends on all of it, so
    # the files' marks count, too.
    stream = [corpus.fingerprint, marks_of(corpus.watched), first, len(part), corpus.marked]
    return cache.digest_of([PLAN_VERSION, stream, capacity, data.packing, data.cut_documents])


def _pieces(corpus: Corpus, held_out: bool, data: DataConfig, capacity: int) -> StreamPieces:
    """Returns the pieces of a part that are to be packed. Raises UserError."""
    part, name = corpus.part(held_out), "held-out" if held_out else "training"
    pieces = pieces_of(corpus.begins(held_out), len(part), capacity)
    _check_lengths(pieces.cut, data, capacity, corpus.named)
    if not pieces.starts.size:
        raise UserError(
            f"{corpus.named} has no document of two or more tokens in its {name} part, but "
            f"data.packing={data.packing} needs one: give data.packing=concat"
        )
    if not corpus.marked:
        return pieces
    kept = learned(part, pieces.starts, pieces.lengths)
    if not kept.any():
        raise nothing_said(held_out)
    if left_out := int((~kept).sum()):
        _log.info(
            f"left out of the {name} samples, because the assistant says nothing in them: "
            f"{left_out:,} of {kept.size:,} pieces of conversations"
        )
    return pieces._replace(starts=pieces.starts[kept], lengths=pieces.lengths[kept])


def _check_lengths(documents: int, data: DataConfig, capacity: int, named: str) -> None:
    """Raises UserError if documents are longer than a sample and must not be cut.

    `documents` is the number of such documents.
    """
    if documents and not data.cut_documents:
        has = f"{documents:,} documents" if documents > 1 else "a document"
        raise UserError(
            f"{named} has {has} longer than the {capacity:,} tokens of a sample, but "
            f"data.packing={data.packing} does not cut documents: give data.cut_documents=true, or "
            "a longer model.seq_length"
        )


# Validation sets of `data.valid`


def sets_of(data: DataConfig) -> dict[str, DataConfig]:
    """Returns a `data` section for each validation set, whose text is all held out.

    A set is either an indexed dataset, given by its prefix or one of its files, or other files,
    which hold conversations if data=chat and text otherwise. Raises UserError for anything else.
    """
    found = {}
    for name, path in (data.valid or {}).items():
        with _naming(name):
            prefix = _prefix_of(path)
        kind = "corpus" if prefix is not None else "chat" if data.name == "chat" else "text"
        path = path if prefix is None else prefix
        one = dataclasses.replace(data, name=kind, path=path, blend=None, blend_stages=None)
        found[name] = dataclasses.replace(one, valid=None, valid_fraction=1.0)
    return found


def _prefix_of(path: str) -> str | None:
    """Returns the prefix of the indexed dataset that a path names, or None if it names none.

    Raises UserError for the address of a file outside an indexed dataset, and for a folder of
    indexed datasets.
    """
    bare, end = os.path.splitext(path)
    local = os.path.expanduser(path)
    if is_remote(path):
        if end in (".bin", ".idx"):
            return bare
        form, ends = named(file_name(path)), endings(file_name(path))
        # A prefix may end in a language or in any other word.
        if form is not None and (form.kind != TEXT or form.packed or ends[0] in PROSE):
            raise UserError(
                f"{path} is the address of a {form} file, but only indexed datasets are read from "
                "addresses: copy it to this host, or make a corpus of it with `parallel3d data "
                "tokenize`"
            )
        return path
    if os.path.exists(f"{local}.idx"):
        return path
    if end in (".bin", ".idx") and os.path.exists(f"{os.path.splitext(local)[0]}.idx"):
        return bare
    if os.path.isdir(local):
        datasets = sorted(each[:-4] for each in os.listdir(local) if each.endswith(".idx"))
        if datasets:
            raise UserError(
                f"{path} is a folder of indexed datasets ({', '.join(datasets[:3])}"
                f"{' …' if datasets[3:] else ''}): give each as a set of its own, such as "
                f"{os.path.join(path, datasets[0])}"
            )
    return None


def check_sets(data: DataConfig, seq_length: int, vocab_size: int) -> list[str]:
    """Checks all validation sets with `check_data`; returns its sentences. Raises UserError."""
    sentences = []
    for name, one in sets_of(data).items():
        with _naming(name):
            found = check_data(one, seq_length, vocab_size=vocab_size)
        sentences += [f"set {show(name)} of data.valid: {sentence}" for sentence in found]
    return sentences


def open_sets(
    data: DataConfig, training: Corpus | Blend, seq_length: int, vocab_size: int
) -> dict[str, Corpus]:
    """Opens all validation sets, which must have the tokenizer of the `training` text.

    Raises UserError.
    """
    sets = {}
    for name, one in sets_of(data).items():
        with _naming(name):
            corpus = open_corpus(one, seq_length, vocab_size=vocab_size)
            assert isinstance(corpus, Corpus), "sets are not blends"
            if (corpus.tokenizer, corpus.eot) != (training.tokenizer, training.eot):
                raise UserError(
                    f"its tokenizer is {corpus.tokenizer[:12]}, but must be that of the training "
                    f"text, {training.tokenizer[:12]}; give the latter as data.tokenizer, or a set "
                    "that was made with it"
                )
            here, there = corpus.roles.begin, training.roles.begin
            if here != there:
                line = (
                    f"set {show(name)} of data.valid: its documents begin with tokens "
                    f"{list(here)}, but those of the training text begin with {list(there)}; "
                    "tokenize both in the same way, because otherwise the first tokens count as "
                    "badly predicted"
                )
                corpus = dataclasses.replace(corpus, told=(*corpus.told, line))
            if corpus.valid_tokens < 2:
                raise UserError(f"{one.path} must have at least two tokens; give more text")
        sets[name] = corpus
    return sets


@contextmanager
def _naming(name: str) -> Iterator[None]:
    """Adds the name of a validation set to errors inside a `with` block."""
    try:
        yield
    except UserError as error:
        raise UserError(f"set {show(name)} of data.valid: {error}") from None
