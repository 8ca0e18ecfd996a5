"""`parallel3d data tokenize` and `train-tokenizer`."""

from __future__ import annotations

import os
from pathlib import Path

from parallel3d.commands.data.progress import BytesBar
from parallel3d.config.fields import show
from parallel3d.data.making.documents import Count
from parallel3d.data.making.inputs import find_inputs
from parallel3d.data.making.journal import Journal, JournalEntry, check_free
from parallel3d.data.making.tokenizing import PreprocessJob, tokenize
from parallel3d.data.making.training import train_tokenizer
from parallel3d.data.text.file_tokenizer import TOKENIZER, FileTokenizer
from parallel3d.errors import UserError, print_line
from parallel3d.files.durable import replace_durably


def tokenize_corpus(
    given: str, kind: str | None, text_key: str, tokenizer: str, to: Path, workers: int, bad: float
) -> int:
    """Make a corpus, or go on with one, and say what came of it. Returns the exit code."""
    if not to.name or to.suffix in (".bin", ".idx"):
        raise UserError(
            f"to={show(str(to))} must be a prefix; the nearest is to={to.stem or 'web'}"
        )
    begun = Journal.begun(to)
    if not begun:
        check_free(to)
    inputs = tuple(find_inputs(given, kind))
    if begun:
        print_line(f"to={to} was begun: going on with it")
    to.parent.mkdir(parents=True, exist_ok=True)
    job = PreprocessJob(inputs, tokenizer, to, text_key, bad, workers)
    with BytesBar("tokenize", sum(each.size for each in inputs)) as bar:
        facts, done = tokenize(job, lambda done: bar.update(done.read, _so_far(done)))
    for word in _left_out(done.count):
        print_line(word)
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
    """What was not taken as it was, a sentence each."""
    said = []
    if count.bad:
        shown = "; ".join(count.shown)
        more = " …" if count.bad > len(count.shown) else ""
        said.append(f"{count.bad:,} of {count.rows:,} rows hold no document: {shown}{more}")
    if count.empty:
        said.append(f"{count.empty:,} of {count.rows:,} documents are empty and left out")
    if count.broken:
        said.append(f"{count.broken:,} documents have broken UTF-8, now U+FFFD")
    return said


def train(given: str, kind: str | None, text_key: str, vocab_size: int, to: Path) -> int:
    """Train a tokenizer and write it, as a file or a folder. Returns the exit code."""
    if os.path.lexists(to):
        raise UserError(f"to={show(str(to))} is there and stays as it is: choose another")
    inputs = find_inputs(given, kind)
    total = sum(each.size for each in inputs)
    with BytesBar("read", total) as bar:
        content, count = train_tokenizer(
            inputs,
            vocab_size,
            text_key,
            lambda read, count: bar.update(read, f"{count.rows:,} documents"),
        )
    for word in _left_out(count):
        print_line(word)
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
