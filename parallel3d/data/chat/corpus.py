"""Conversations of a run: a pair of marked tokens in the token cache, and samples of it.

A marked token is the token, and SPOKEN besides where the assistant says it: so a conversation goes
through the same windows, packs and shuffles as every document.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt

from parallel3d.config.fields import show
from parallel3d.data import cache
from parallel3d.data.build_lock import Report
from parallel3d.data.chat.conversation import Conversation, Reader
from parallel3d.data.chat.template import ChatTemplate, Refused
from parallel3d.data.corpora.split import Corpus
from parallel3d.data.indexed import IndexedWriter
from parallel3d.data.making.kinds import LINES, PACKED
from parallel3d.data.sampler import Sample
from parallel3d.data.sources import Document, find_documents
from parallel3d.data.text.file_tokenizer import FileTokenizer
from parallel3d.data.text.packed import kept_pair
from parallel3d.data.tokenizer import open_tokenizer
from parallel3d.data.tokens import Tokens
from parallel3d.errors import UserError

if TYPE_CHECKING:  # the configuration drags in omegaconf, which this file can do without
    from parallel3d.config.schema import DataConfig
    from parallel3d.data.corpora.blended import DatasetOrder

VERSION = 2
SPOKEN = 1 << 30
TOKEN = SPOKEN - 1
DTYPE = np.dtype("<i4")
LOOKED_AT = 1 << 22  # tokens at a time
LONGEST = 64 << 20  # bytes of a row


class Chat(NamedTuple):
    """What a run's conversations are made of."""

    documents: list[Document]
    tokenizer: FileTokenizer
    template: ChatTemplate

    @property
    def key(self) -> str:
        """Another one if anything else would come of it."""
        made_of = cache.cache_key(self.documents, self.tokenizer)
        return cache.digest_of(["chat", VERSION, made_of, self.template.text])


def find_chat(data: DataConfig) -> Chat:
    """The files of data=chat, the tokenizer and its template. Raises UserError."""
    tokenizer = open_tokenizer(data.tokenizer) if data.tokenizer is not None else None
    if not isinstance(tokenizer, FileTokenizer):
        raise UserError(
            f"data=chat needs data.tokenizer, which is {show(data.tokenizer)}: give a folder with "
            "a tokenizer.json and a chat template, or run= of an imported model"
        )
    return Chat(find_documents(data), tokenizer, ChatTemplate(tokenizer))


def open_chat(data: DataConfig, folder: Path, report: Report) -> Corpus:
    """The conversations of `data`, made tokens of in `folder` if they are not yet.

    The last ones, `data.valid_fraction` of the tokens and at least one, are held out. Raises
    UserError for a row that is no conversation.
    """
    chat = find_chat(data)
    build = lambda path: _build(path, chat, report)  # noqa: E731
    pair, digest, files = kept_pair(folder, chat.key, build, report)
    if pair.documents < 2:
        raise UserError(
            f"data.path={data.path} has one conversation, and one to train on and one held out "
            "are needed"
        )
    wanted = len(pair) - max(1, int(len(pair) * data.valid_fraction))
    last = pair.index.document_from(wanted)
    last = min(max(1, last), pair.documents - 1)
    split = int(pair.index.begins(last, last + 1)[0])
    tokenizer = chat.tokenizer
    return Corpus(
        *(pair.tokens.part(0, split), pair.tokens.part(split, len(pair)), digest),
        *(tokenizer.vocab_size, tokenizer.eot, tokenizer.digest, data.tokenizer, pair),
        marked=True,
        files=files,
    )


def learned(
    tokens: Tokens, starts: npt.NDArray[np.int64], lengths: npt.NDArray[np.int64]
) -> npt.NDArray[np.bool_]:
    """Tells which pieces of marked tokens have one behind their first that the assistant says."""
    begins, ends = starts + 1, starts + lengths
    spoken = np.zeros(starts.size, np.int64)  # in each piece
    for first in range(0, len(tokens), LOOKED_AT):
        places = np.flatnonzero(tokens[first : first + LOOKED_AT] & SPOKEN) + first
        spoken += np.searchsorted(places, ends) - np.searchsorted(places, begins)
    return spoken > 0


def check_windows(corpus: Corpus, seq_length: int) -> None:
    """Raises UserError if conversations laid end to end make no sample to train on and none held
    out, or held-out ones in which nothing is learned."""
    for tokens, held_out in ((corpus.train, False), (corpus.valid, True)):
        windows = (len(tokens) - 1) // seq_length
        if windows < 1:
            raise UserError(
                f"data.path: its {'held-out' if held_out else 'training'} conversations have "
                f"{len(tokens):,} tokens, and a sample of data.packing=concat has "
                f"{seq_length + 1:,}: give data.packing=padded"
            )
        if not learned(tokens, np.zeros(1, np.int64), np.full(1, windows * seq_length + 1)).any():
            raise nothing_said(held_out)


def nothing_said(held_out: bool) -> UserError:
    """The error of a part of a corpus in which nothing is learned."""
    part, share = ("held out", "a larger") if held_out else ("trained on", "a smaller")
    return UserError(
        f"data.path: the assistant says nothing in the samples that are {part}: give {share} "
        "data.valid_fraction, or a longer model.seq_length"
    )


class ChatSamples:
    """The samples of marked tokens, without their marks: what the assistant says is learned."""

    masks = True

    def __init__(self, marked: DatasetOrder) -> None:
        self._marked = marked
        self.seq_length, self.windows = marked.seq_length, marked.windows

    def will_read(self, i: int) -> None:
        """Has the system fetch what sample `i` is made of."""
        self._marked.will_read(i)

    def sample(self, i: int) -> Sample:
        """Sample `i` >= 0. A position is learned where the next token is the assistant's."""
        sample = self._marked.sample(i)
        spoken = (sample.tokens & SPOKEN) != 0
        tokens = sample.tokens & TOKEN
        return Sample(tokens, sample.loss_mask & spoken[1:], sample.starts)


def _build(path: Path, chat: Chat, report: Report) -> IndexedWriter:
    report(f"building the token cache: conversations of {len(chat.documents)} files")
    reader = Reader(chat.tokenizer, chat.template)
    with IndexedWriter(path.with_suffix(""), DTYPE, replace=True) as writer:
        for where, row in _rows(chat.documents):
            try:
                found = reader.read(row)
            except Refused as error:
                raise UserError(f"data.path: {where} {error}; mend or remove it") from None
            if not found.spoken[1:].any():
                raise UserError(
                    f"data.path: {where} has nothing that the assistant says; mend or remove it"
                )
            writer.add(_marked(found))
        if not writer.documents:
            raise UserError("data.path holds no conversations: give jsonl, a row each")
    return writer


def _marked(found: Conversation) -> np.ndarray:
    return (found.tokens | np.where(found.spoken, SPOKEN, 0)).astype(DTYPE)


def _rows(documents: list[Document]) -> Iterator[tuple[str, Any]]:
    """Where each row stands, and the row. Raises UserError."""
    # Only here, as fsspec takes its time to load.
    from parallel3d.data.making.inputs import Input, of_input
    from parallel3d.data.making.opening import opened

    for document in documents:
        packed = next((end for end in PACKED if document.path.endswith(end)), "")
        source = Input(f"file://{Path(document.path).absolute()}", LINES, packed, document.size, "")
        with of_input(document.path, "data.path"), opened(source) as (content, _):
            lines = iter(lambda: content.readline(LONGEST + 1), b"")
            for number, line in enumerate(lines, 1):
                if len(line) > LONGEST:
                    raise UserError(
                        f"data.path: {document.name}:{number} has more than {LONGEST:,} bytes, "
                        "which is no conversation; mend or remove it"
                    )
                if not line.strip():
                    continue
                try:
                    row = json.loads(line)
                except (ValueError, RecursionError):
                    raise UserError(
                        f"data.path: {document.name}:{number} is no JSON; mend or remove it"
                    ) from None
                yield f"{document.name}:{number}", row
        cache.check_unchanged(document, os.stat(document.path))
