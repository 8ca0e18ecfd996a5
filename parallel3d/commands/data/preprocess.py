"""Runs `parallel3d data tokenize` and `train-tokenizer`, with a progress bar over bytes."""

from __future__ import annotations

import math
import os
import time
from pathlib import Path
from typing import Self

from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from parallel3d.config.fields import show
from parallel3d.data.inputs import Count, find_inputs
from parallel3d.data.preprocess import (
    JournalEntry,
    PreprocessJob,
    check_free,
    is_begun,
    tokenize,
    train_tokenizer,
)
from parallel3d.data.tokenizer import TOKENIZER, FileTokenizer
from parallel3d.errors import UserError, print_line
from parallel3d.files import replace_durably
from parallel3d.metrics.screen import MAX_WIDTH, REFRESH_PER_SECOND, make_console, print_styled
from parallel3d.metrics.text import duration, si

LINE_EVERY_S = 10


class BytesBar:
    """Shows progress over `total` bytes: a bar on a terminal, else a line now and then."""

    def __init__(self, what: str, total: int) -> None:
        self.what, self.total, self.read, self.facts = what, max(1, total), 0, ""
        self.console = make_console()
        self.begun = self.logged = time.monotonic()
        self.first: int | None = None
        live = self.console.is_terminal and not self.console.is_dumb_terminal
        self.live = (
            Live(
                console=self.console,
                get_renderable=self.render,
                refresh_per_second=REFRESH_PER_SECOND,
                transient=True,
            )
            if live
            else None
        )

    def __enter__(self) -> Self:
        if self.live:
            self.live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self.live:
            self.live.stop()

    def update(self, read: int, facts: str) -> None:
        """Sets the bytes done, earlier starts included, and the text after them."""
        self.first = read if self.first is None else self.first
        self.read, self.facts = read, facts
        if not self.live and time.monotonic() - self.logged > LINE_EVERY_S:
            self.logged = time.monotonic()
            print_styled(self.console, f"{self.what} {self.share()} %  {self.status()}")

    def share(self) -> int:
        """Returns whole percents, rounded down: 100 only when all is done."""
        return math.floor(100 * min(self.read, self.total) / self.total)

    def status(self) -> str:
        """Returns bytes, pace and time left by the pace of this start, and `facts`."""
        seconds = time.monotonic() - self.begun
        pace = (self.read - (self.first or 0)) / max(seconds, 1e-9)
        left = (self.total - self.read) / pace if pace > 0 else math.nan
        sizes = f"{si(self.read)}B of {si(self.total)}B".replace("  ", " ")
        return f"{sizes} · {si(pace)}B/s · {duration(left)} left · {self.facts}"

    def render(self) -> Table:
        """Returns the bar and the status line."""
        top = Table.grid(padding=(0, 1))
        top.width = min(MAX_WIDTH, self.console.width)
        top.add_column(no_wrap=True)
        top.add_column(ratio=1)
        top.add_column(no_wrap=True, justify="right")
        bar = ProgressBar(total=self.total, completed=min(self.read, self.total))
        status = Text(self.status(), style="cyan")
        top.add_row(Text(self.what, style="bold"), bar, f"{self.share():3d} %")
        both = Table.grid()
        both.add_row(top)
        both.add_row(status)
        return both


def tokenize_corpus(
    given: str, kind: str | None, text_key: str, tokenizer: str, to: Path, workers: int, bad: float
) -> int:
    """Makes or continues a corpus and prints a summary. Returns the exit code."""
    if not to.name or to.suffix in (".bin", ".idx"):
        raise UserError(
            f"to={show(str(to))} must be a prefix; the nearest is to={to.stem or 'web'}"
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
