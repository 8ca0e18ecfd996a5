"""Runs `parallel3d data …`, which makes corpora and tokenizers, and shows and verifies corpora."""

from __future__ import annotations

import hashlib
import math
import os
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from parallel3d.cli.verbs import Verb, run_verb, true_or_false, whole_number
from parallel3d.config.fields import show as shown
from parallel3d.data.formats import KINDS, PACKED
from parallel3d.data.indexed import CorpusFacts, IndexedCorpus, facts_beside, tokenizer_beside
from parallel3d.data.inputs import BAD, left_out, take_inputs
from parallel3d.data.preprocess import (
    JournalEntry,
    PreprocessJob,
    check_free,
    is_begun,
    tokenize,
    train_tokenizer,
)
from parallel3d.data.tokenizer import TOKENIZER, FileTokenizer, Tokenizer, open_tokenizer
from parallel3d.data.tokenizer_check import unlike_theirs
from parallel3d.errors import UserError, nearest_hint, print_line
from parallel3d.files import plain, replace_durably
from parallel3d.host.quotas import available_cores
from parallel3d.text import si

DATA = "data"
# Limits of a trained tokenizer's vocabulary size; 257 tokens are the bytes and the end of text.
SMALLEST, LARGEST = 257, 1 << 24
DAMAGED = 1  # exit code for a damaged corpus
READ = 1 << 20  # number of tokens, or lengths, that are read at a time
SHOWN = 200  # maximum number of characters of a document that are shown
LINE_EVERY_S = 10  # seconds between progress lines without a terminal
PAIR = (".bin", ".idx")  # endings of a corpus's files
INPUT = {
    "input": "files, folders, globs or addresses that fsspec knows, joined by commas: jsonl, "
    "parquet, or text with one document per file, recognized by ending and first bytes; "
    f"{', '.join(dict.fromkeys(PACKED.values()))} are unpacked",
    "text_key": "key of jsonl, or column of parquet, that holds the text (text)",
    "format": f"format of all input: {', '.join(KINDS)} (by the files' names)",
}
VERBS = {
    "tokenize": Verb(
        "make a corpus, Megatron's indexed dataset, from text; if killed, the same "
        "command resumes, and neither that nor the number of workers changes the corpus",
        {
            "input": INPUT["input"],
            "to": "prefix of the corpus, such as corpora/web for corpora/web.bin and .idx",
            "tokenizer": "byte, a tokenizer.json, a folder with one, or a name on the hub (byte)",
            "add_bos": "begin documents with the tokens that the tokenizer puts before every text, "
            "such as Llama's <|begin_of_text|>: true or false (true)",
            "workers": "processes that tokenize (one per core, within a quota)",
            "text_key": INPUT["text_key"],
            "format": INPUT["format"],
            "bad": "largest share of rows without a document that may be left out (0.01)",
        },
        ("input", "to"),
        "parallel3d data tokenize input='dump/*.jsonl.zst' tokenizer=my/tokenizer.json "
        "to=corpora/web\n"
        "parallel3d data tokenize input=rows.parquet text_key=content to=corpora/rows workers=8",
        paths=("input", "to", "tokenizer"),
    ),
    "train-tokenizer": Verb(
        "train a byte-level BPE tokenizer on text",
        {
            "input": INPUT["input"],
            "vocab_size": f"tokens to make, {SMALLEST} or more",
            "to": "file to make, NAME.json, or folder to make, in which tokenizer.json is written",
            "text_key": INPUT["text_key"],
            "format": INPUT["format"],
        },
        ("input", "vocab_size", "to"),
        "parallel3d data train-tokenizer input=book.txt vocab_size=8192 to=tok.json",
        paths=("input", "to"),
    ),
    "show": Verb(
        "show a corpus: documents, tokens, lengths, the first documents as text; reads and "
        "verifies every byte; exit code 1 if one has changed",
        {
            "prefix": "prefix of the corpus, without .bin and .idx",
            "tokenizer": "tokenizer to decode it (the one next to the corpus)",
            "documents": "number of first documents to show as text (3)",
        },
        ("prefix",),
        "parallel3d data show corpora/web\nparallel3d data show corpora/web documents=10",
        names=("prefix",),
        paths=("prefix", "tokenizer"),
    ),
}


def data(arguments: Sequence[str]) -> int:
    """Runs a `parallel3d data …` command line. Returns its exit code.

    Raises UserError for invalid arguments or input.
    """
    return run_verb(DATA, VERBS, arguments, _run)


def _run(name: str, given: Mapping[str, str], _: list[str]) -> int:
    if name == "show":
        count = whole_number("documents", given)
        return show(given["prefix"], given.get("tokenizer"), 3 if count is None else count)
    kind, text_key = given.get("format"), given.get("text_key", "text")
    if kind is not None and kind not in KINDS:
        hint = nearest_hint(kind, KINDS, "format=")
        raise UserError(f"format={shown(kind)} must be one of {', '.join(KINDS)}{hint}")
    to = Path(given["to"])
    if name == "train-tokenizer":
        vocab_size = whole_number("vocab_size", given, SMALLEST, LARGEST) or SMALLEST
        return train(given["input"], kind, text_key, vocab_size, to)
    workers = whole_number("workers", given, 1, 4096) or available_cores()
    tokenizer, bad = given.get("tokenizer", "byte"), share("bad", given.get("bad", f"{BAD:g}"))
    add_bos = true_or_false("add_bos", given, True)
    return tokenize_corpus(given["input"], kind, text_key, tokenizer, to, workers, bad, add_bos)


def share(key: str, text: str) -> float:
    """Parses `text`, the value of `key`, as a number from 0 to 1.

    Raises UserError for any other text.
    """
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not 0 <= number <= 1:
        near = 0 if number < 0 else 1 if number > 1 else 0.01
        raise UserError(
            f"{key}={shown(text)} must be a number from 0 to 1; the nearest is {key}={near}"
        )
    return number


@contextmanager
def byte_progress(what: str, total: int) -> Iterator[Callable[[int, str], None]]:
    """Shows progress over `total` bytes: a bar on a terminal, else a line every LINE_EVERY_S.

    `what` names the work. Yields a function to be called with the number of bytes done, which
    includes those of earlier starts, and a text to show.
    """
    # These imports are slow, and the help does not need them.
    from rich.progress import Progress, TextColumn, TransferSpeedColumn

    from parallel3d.metrics.screen import make_console

    console, total, logged = make_console(), max(1, total), time.monotonic()
    live = console.is_terminal and not console.is_dumb_terminal
    columns = *Progress.get_default_columns(), TransferSpeedColumn()
    with Progress(
        *(*columns, TextColumn("{task.fields[facts]}")),
        console=console,
        transient=True,
        disable=not live,
    ) as bar:
        task = bar.add_task(what, total=total, facts="")

        def update(read: int, facts: str) -> None:
            nonlocal logged
            bar.update(task, completed=read, facts=facts)
            if not live and time.monotonic() - logged > LINE_EVERY_S:
                logged = time.monotonic()
                # The percentage is rounded down, so that it is 100 only when all is done.
                share = 100 * min(read, total) // total
                print(f"{what} {share} % of {si(total)}B · {facts}", flush=True)

        yield update


def tokenize_corpus(
    given: str,
    kind: str | None,
    text_key: str,
    tokenizer: str,
    to: Path,
    workers: int,
    bad: float,
    add_bos: bool,
) -> int:
    """Makes a corpus, or resumes making it, and prints a summary. Returns the exit code, 0.

    The arguments are those of `parallel3d data tokenize`. `kind` is its `format`, or None if the
    names of the files determine the format. Raises UserError for invalid input.
    """
    if not to.name or to.suffix in PAIR:
        near = to
        while near.suffix in PAIR:
            near = near.with_suffix("")
        raise UserError(
            f"to={shown(str(to))} must be a prefix without .bin or .idx; the nearest is "
            f"to={near if to.name else 'web'}"
        )
    begun = is_begun(to)
    if not begun:
        check_free(to)
    inputs, lines = take_inputs(given, kind, text_key)
    for sentence in lines:
        print_line(sentence)
    if begun:
        print_line(f"to={to} was begun: resuming it")
    to.parent.mkdir(parents=True, exist_ok=True)
    job = PreprocessJob(tuple(inputs), tokenizer, to, text_key, bad, workers, add_bos=add_bos)
    with byte_progress("tokenize", sum(each.size for each in inputs)) as update:
        facts, done = tokenize(job, lambda done: update(done.read, _so_far(done)))
    for sentence in left_out(done.count):
        print_line(sentence)
    if lines:
        files = Counter(each.label for each in inputs)
        for label, count in done.by_label.items():
            print(f"{label}: {_counted(files[label], 'file')}, {_counted(count, 'document')}")
    for sentence in _of_tokenizer(to, facts):
        print_line(sentence)
    print(
        f"{to}: {facts.documents:,} documents, {facts.tokens:,} tokens from {done.count.size:,} "
        "bytes"
    )
    print(f"parallel3d data show {to}")
    print(f"parallel3d train data=corpus data.path={to} model.vocab_size={facts.vocab_size}")
    return 0


def _of_tokenizer(to: Path, facts: CorpusFacts) -> list[str]:
    """Returns notices about the tokenizer of a corpus, or [] for bytes.

    The notices describe where the tokenizer may be wrong, how it differs from transformers, and
    whether documents begin with the tokens that it puts before every text.
    """
    tokenizer = open_tokenizer(tokenizer_beside(to, facts), "tokenizer")
    if not isinstance(tokenizer, FileTokenizer):
        return []
    sentences = list(tokenizer.doubts())
    assert tokenizer.folder is not None  # a corpus keeps a copy of its tokenizer
    if unlike := unlike_theirs(tokenizer, tokenizer.folder):
        sentences.append(unlike)
    if tokenizer.bos:
        begin = tokenizer.spelled(tokenizer.bos)
        does = "each document begins with" if facts.begin else "no document begins with"
        joined = "; " if facts.begin else ", because "
        sentences.append(
            f"{does} {begin}, which the tokenizer puts before every text{joined}add_bos=false "
            "leaves it out"
        )
    return sentences


def _counted(count: int, what: str) -> str:
    return f"{count:,} {what}{'' if count == 1 else 's'}"


def _so_far(done: JournalEntry) -> str:
    left_out = f" · {done.count.bad:,} bad rows" if done.count.bad else ""
    return f"{done.documents:,} documents, {done.tokens:,} tokens{left_out}"


def train(given: str, kind: str | None, text_key: str, vocab_size: int, to: Path) -> int:
    """Trains a tokenizer and writes it to a file or a folder. Returns the exit code, 0.

    The arguments are those of `parallel3d data train-tokenizer`. `kind` is its `format`, or None if
    the names of the files determine the format. Raises UserError for invalid input.
    """
    if os.path.lexists(to):
        raise UserError(f"to={shown(str(to))} exists and is never overwritten: choose another path")
    inputs, lines = take_inputs(given, kind, text_key)
    for sentence in lines:
        print_line(sentence)
    with byte_progress("read", sum(each.size for each in inputs)) as update:
        show_rows = lambda read, count: update(read, f"{count.rows:,} documents")  # noqa: E731
        content, count = train_tokenizer(inputs, vocab_size, text_key, show_rows)
    for sentence in left_out(count):
        print_line(sentence)
    tokenizer = FileTokenizer(str(to), content, None, "to")
    to.parent.mkdir(parents=True, exist_ok=True)
    if to.suffix == ".json":
        replace_durably(to, content)
    else:
        tokenizer.save(to)
    if tokenizer.vocab_size < vocab_size:
        print_line(
            f"the text suffices for only {tokenizer.vocab_size:,} tokens, not for "
            f"vocab_size={vocab_size}"
        )
    file = to if to.suffix == ".json" else to / TOKENIZER
    print(f"{file}: {tokenizer.vocab_size:,} tokens, from {count.size:,} bytes of text")
    return 0


# Showing and verifying a corpus


def show(prefix: str, given: str | None, documents: int) -> int:
    """Prints facts about the corpus at `prefix` and its first documents, and verifies it.

    `given` names the tokenizer that decodes the corpus, or is None for the tokenizer next to it.
    Returns the exit code, which is 1 if the corpus is damaged, or else 0. Raises UserError if there
    is no corpus.
    """
    corpus, facts = IndexedCorpus(prefix), facts_beside(prefix)
    tokenizer = _tokenizer(prefix, given, facts)
    print(f"{prefix}: {corpus.documents:,} documents, {len(corpus):,} tokens, {corpus.dtype}")
    if tokenizer is not None:
        sizes = f"{tokenizer.vocab_size:,} tokens, token {tokenizer.eot} ends a document"
        begin = facts.begin if facts is not None else ()
        if begin and isinstance(tokenizer, FileTokenizer):
            sizes += f", {tokenizer.spelled(begin)} begins one"
        print(f"tokenizer: {tokenizer.name}, {sizes}")
    print(statistics(corpus))
    if tokenizer is None:
        print_line("the corpus has no tokenizer next to it: give tokenizer=… to see text")
    else:
        for number in range(min(documents, corpus.documents)):
            print()
            print(f"document {number}: {_text(corpus, tokenizer, number)}")
    return _proved(corpus, facts, tokenizer)


def _tokenizer(prefix: str, given: str | None, facts: CorpusFacts | None) -> Tokenizer | None:
    if given is not None:
        tokenizer = open_tokenizer(given, "tokenizer")
        if facts is not None and tokenizer.digest != facts.tokenizer:
            raise UserError(
                f"tokenizer={given} is not the one with which {prefix} was made: leave it out to "
                "use the one next to the corpus"
            )
        return tokenizer
    return None if facts is None else open_tokenizer(tokenizer_beside(prefix, facts), "tokenizer")


def statistics(corpus: IndexedCorpus) -> str:
    """Returns a line on the lengths of the documents.

    The memory that this takes grows with the number of different lengths, not of documents.
    """
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
        f"tokens per document: minimum {lengths[0]:,}, median {at(0.5):,}, mean "
        f"{len(corpus) / corpus.documents:,.1f}, 90th percentile {at(0.9):,}, 99th percentile "
        f"{at(0.99):,}, maximum {lengths[-1]:,}"
    )


def _text(corpus: IndexedCorpus, tokenizer: Tokenizer, number: int) -> str:
    """Returns the beginning of document `number` as text on one line."""
    begin, end = corpus.begins(number, number + 1).tolist()
    # A character has at most four tokens, because it has at most four bytes in UTF-8.
    text = tokenizer.decode(corpus.tokens[begin : min(end, begin + 4 * SHOWN)])
    return plain(text[:SHOWN]) + ("…" if len(text) > SHOWN else "")


def _proved(corpus: IndexedCorpus, facts: CorpusFacts | None, tokenizer: Tokenizer | None) -> int:
    """Reads every token and prints whether the bytes are unchanged.

    Returns the exit code: DAMAGED if they have changed, else 0.
    """
    digest, largest = hashlib.blake2b(digest_size=16), -1
    width = corpus.dtype.itemsize
    with byte_progress("verify", len(corpus) * width) as update:
        for begin in range(0, len(corpus), READ):
            tokens = corpus.tokens[begin : begin + READ]
            digest.update(tokens.data)
            largest = max(largest, int(tokens.max()))
            update((begin + len(tokens)) * width, f"{begin + len(tokens):,} tokens")
    print()
    made = digest.hexdigest()
    if tokenizer is not None and largest >= tokenizer.vocab_size:
        print(
            f"DAMAGED: the corpus holds token {largest}, but the tokenizer has only "
            f"{tokenizer.vocab_size} tokens"
        )
        return DAMAGED
    if facts is None:
        print(
            f"digest {made}: the corpus was made elsewhere, so it cannot be verified; its largest "
            f"token is {largest}"
        )
        return 0
    if (made, corpus.documents, len(corpus)) != (facts.digest, facts.documents, facts.tokens):
        print(
            f"DAMAGED: the corpus has {corpus.documents:,} documents, {len(corpus):,} tokens and "
            f"digest {made}, but was made with {facts.documents:,} documents, {facts.tokens:,} "
            f"tokens and digest {facts.digest}"
        )
        return DAMAGED
    print(f"verified: every byte is unchanged (digest {made})")
    return 0
