"""Runs the verbs of `parallel3d data`: makes corpora and tokenizers, shows and proves corpora."""

from __future__ import annotations

import hashlib
import os
import shutil
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Self

import numpy as np
from rich.progress import (
    BarColumn,
    Progress,
    TaskProgressColumn,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)

from parallel3d.config.fields import show as shown
from parallel3d.data.indexed import CorpusFacts, IndexedCorpus, facts_beside, tokenizer_beside
from parallel3d.data.inputs import Count, find_inputs
from parallel3d.data.preprocess import (
    JournalEntry,
    PreprocessJob,
    check_free,
    is_begun,
    tokenize,
    train_tokenizer,
)
from parallel3d.data.tokenizer import TOKENIZER, FileTokenizer, Tokenizer, open_tokenizer
from parallel3d.errors import UserError, print_line
from parallel3d.files import plain, replace_durably
from parallel3d.metrics.screen import make_console, print_styled
from parallel3d.metrics.text import si

DAMAGED = 1  # the exit code
READ = 1 << 20  # tokens, or lengths, at a time
SHOWN = 200  # characters of a document
LINE_EVERY_S = 10


class BytesBar:
    """Shows progress over `total` bytes: a bar on a terminal, else a line now and then."""

    def __init__(self, what: str, total: int) -> None:
        self.what, self.total, self.logged = what, max(1, total), time.monotonic()
        self.console = make_console()
        self.live = self.console.is_terminal and not self.console.is_dumb_terminal
        self.bar = Progress(
            *(TextColumn(what), BarColumn(20), TaskProgressColumn(), TransferSpeedColumn()),
            *(TimeRemainingColumn(), TextColumn("{task.fields[facts]}")),
            console=self.console,
            transient=True,
            disable=not self.live,
        )
        self.task = self.bar.add_task(what, total=self.total, facts="")

    def __enter__(self) -> Self:
        self.bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.bar.stop()

    def update(self, read: int, facts: str) -> None:
        """Sets the bytes done, earlier starts included, and the text after them."""
        self.bar.update(self.task, completed=read, facts=facts)
        if not self.live and time.monotonic() - self.logged > LINE_EVERY_S:
            self.logged = time.monotonic()
            # Rounded down: 100 only when all is done.
            share = 100 * min(read, self.total) // self.total
            print_styled(self.console, f"{self.what} {share} % of {si(self.total)}B · {facts}")


def tokenize_corpus(
    given: str, kind: str | None, text_key: str, tokenizer: str, to: Path, workers: int, bad: float
) -> int:
    """Makes or continues a corpus and prints a summary. Returns the exit code."""
    if not to.name or to.suffix in (".bin", ".idx"):
        raise UserError(
            f"to={shown(str(to))} must be a prefix; the nearest is to={to.stem or 'web'}"
        )
    begun = is_begun(to)
    if not begun:
        check_free(to)
    inputs = tuple(find_inputs(given, kind))
    if begun:
        print_line(f"to={to} was begun: going on with it")
    to.parent.mkdir(parents=True, exist_ok=True)
    job = PreprocessJob(inputs, tokenizer, to, text_key, bad, workers)
    with BytesBar("tokenize", sum(each.size for each in inputs)) as bar:
        facts, done = tokenize(job, lambda done: bar.update(done.read, _so_far(done)))
    for sentence in _left_out(done.count):
        print_line(sentence)
    print(
        f"{to}: {facts.documents:,} documents, {facts.tokens:,} tokens of {done.count.size:,} bytes"
    )
    print(f"parallel3d data show {to}")
    print(f"parallel3d train data=corpus data.path={to} model.vocab_size={facts.vocab_size}")
    return 0


def _so_far(done: JournalEntry) -> str:
    left_out = f" · {done.count.bad:,} bad rows" if done.count.bad else ""
    return f"{done.documents:,} documents, {done.tokens:,} tokens{left_out}"


def _left_out(count: Count) -> list[str]:
    """Returns a sentence for each kind of rows left out or changed."""
    sentences = []
    if count.bad:
        shown = "; ".join(count.shown)
        more = " …" if count.bad > len(count.shown) else ""
        sentences.append(f"{count.bad:,} of {count.rows:,} rows hold no document: {shown}{more}")
    if count.empty:
        sentences.append(f"{count.empty:,} of {count.rows:,} documents are empty and left out")
    if count.broken:
        sentences.append(f"{count.broken:,} documents have broken UTF-8, now U+FFFD")
    return sentences


def train(given: str, kind: str | None, text_key: str, vocab_size: int, to: Path) -> int:
    """Trains a tokenizer and writes it, as a file or a folder. Returns the exit code."""
    if os.path.lexists(to):
        raise UserError(f"to={shown(str(to))} is there and stays as it is: choose another")
    inputs = find_inputs(given, kind)
    total = sum(each.size for each in inputs)
    with BytesBar("read", total) as bar:
        content, count = train_tokenizer(
            inputs,
            vocab_size,
            text_key,
            lambda read, count: bar.update(read, f"{count.rows:,} documents"),
        )
    for sentence in _left_out(count):
        print_line(sentence)
    tokenizer = FileTokenizer(str(to), content, None, "to")
    to.parent.mkdir(parents=True, exist_ok=True)
    if to.suffix == ".json":
        replace_durably(to, content)
    else:
        tokenizer.save(to)
    if tokenizer.vocab_size < vocab_size:
        print_line(
            f"the text gives {tokenizer.vocab_size:,} tokens, fewer than vocab_size={vocab_size}"
        )
    file = to if to.suffix == ".json" else to / TOKENIZER
    print(f"{file}: {tokenizer.vocab_size:,} tokens, from {count.size:,} bytes of text")
    return 0


# A corpus shown, and proved


def show(prefix: str, given: str | None, documents: int) -> int:
    """Prints the corpus at `prefix`; `given`: a tokenizer to use instead of the corpus's own.

    Returns the exit code, 1 for a damaged corpus. Raises UserError for an invalid one.
    """
    prefix = os.path.expanduser(prefix)
    corpus, facts = IndexedCorpus.open(prefix), facts_beside(prefix)
    tokenizer = _tokenizer(prefix, given, facts)
    _print(f"{prefix}: {corpus.documents:,} documents, {len(corpus):,} tokens, {corpus.dtype}")
    if tokenizer is not None:
        sizes = f"{tokenizer.vocab_size:,} tokens, {tokenizer.eot} ends a document"
        _print(f"tokenizer: {tokenizer.name}, {sizes}")
    _print(statistics(corpus))
    if tokenizer is None:
        print_line("no tokenizer lies beside it: give tokenizer=… to see text")
    else:
        for number in range(min(documents, corpus.documents)):
            _print("")
            _print(f"document {number}: {_text(corpus, tokenizer, number)}")
    return _proved(corpus, facts, tokenizer)


def _tokenizer(prefix: str, given: str | None, facts: CorpusFacts | None) -> Tokenizer | None:
    if given is not None:
        tokenizer = open_tokenizer(given, "tokenizer")
        if facts is not None and tokenizer.digest != facts.tokenizer:
            raise UserError(
                f"tokenizer={given} is not the one that {prefix} was made with: leave it out, that "
                "one lies beside the corpus"
            )
        return tokenizer
    return None if facts is None else open_tokenizer(tokenizer_beside(prefix, facts), "tokenizer")


def statistics(corpus: IndexedCorpus) -> str:
    """Returns the documents' lengths as a line; memory grows with the lengths that occur alone."""
    found: Counter[int] = Counter()
    for first in range(0, corpus.documents, READ):
        begins = corpus.begins(first, min(first + READ, corpus.documents))
        values, counts = np.unique(np.diff(begins), return_counts=True)
        found.update(dict(zip(values.tolist(), counts.tolist(), strict=True)))
    lengths = sorted(found)
    ends = np.cumsum([found[length] for length in lengths])

    def at(share: float) -> int:
        return lengths[np.searchsorted(ends, share * (corpus.documents - 1), side="right")]

    return (
        f"tokens a document: least {lengths[0]:,}, median {at(0.5):,}, mean "
        f"{len(corpus) / corpus.documents:,.1f}, 90 % {at(0.9):,}, 99 % {at(0.99):,}, most "
        f"{lengths[-1]:,}"
    )


def _text(corpus: IndexedCorpus, tokenizer: Tokenizer, number: int) -> str:
    """Returns the beginning of a document, on one line."""
    begin, end = corpus.begins(number, number + 1).tolist()
    # A character of real text is at most four tokens.
    text = tokenizer.decode(corpus.tokens[begin : min(end, begin + 4 * SHOWN)])
    return plain(text[:SHOWN]) + ("…" if len(text) > SHOWN else "")


def _proved(corpus: IndexedCorpus, facts: CorpusFacts | None, tokenizer: Tokenizer | None) -> int:
    """Reads every token and prints whether the bytes are as written. Returns the exit code."""
    digest, largest = hashlib.blake2b(digest_size=16), -1
    width = corpus.dtype.itemsize
    with BytesBar("prove", len(corpus) * width) as bar:
        for begin in range(0, len(corpus), READ):
            tokens = corpus.tokens[begin : begin + READ]
            digest.update(tokens.data)
            largest = max(largest, int(tokens.max()))
            bar.update((begin + len(tokens)) * width, f"{begin + len(tokens):,} tokens")
    _print("")
    made = digest.hexdigest()
    if tokenizer is not None and largest >= tokenizer.vocab_size:
        _print(f"DAMAGED: it holds token {largest}, the tokenizer has {tokenizer.vocab_size}")
        return DAMAGED
    if facts is None:
        _print(
            f"digest {made}: made elsewhere, nothing to prove it by; its largest token is {largest}"
        )
        return 0
    if (made, corpus.documents, len(corpus)) != (facts.digest, facts.documents, facts.tokens):
        _print(f"DAMAGED: its digest is {made}, it was made with {facts.digest}")
        return DAMAGED
    _print(f"proved: every byte is as it was made (digest {made})")
    return 0


def _print(line: str) -> None:
    """Prints a line, cut to a terminal's width."""
    width = shutil.get_terminal_size((100, 40)).columns if sys.stdout.isatty() else None
    print(line[:width])
