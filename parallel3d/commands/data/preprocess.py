"""How far a command over many bytes has come: a bar on a terminal, else a line now and then."""

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
from parallel3d.data.preprocess.inputs import Count, find_inputs
from parallel3d.data.preprocess.journal import Journal, JournalEntry, check_free
from parallel3d.data.preprocess.tokenize import PreprocessJob, tokenize, train_tokenizer
from parallel3d.data.tokenizer import TOKENIZER, FileTokenizer
from parallel3d.errors import UserError, print_line
from parallel3d.files import replace_durably
from parallel3d.metrics.progress import MAX_WIDTH, REFRESH_PER_SECOND, make_console, print_styled
from parallel3d.metrics.text import duration, encodable, si

LINE_EVERY_S = 10


class BytesBar:
    """`what` is being done to `total` bytes. Time left by the pace since this start."""

    def __init__(self, what: str, total: int) -> None:
        self.what, self.total, self.read, self.facts = what, max(1, total), 0, ""
        self.console = make_console()
        self.begun = self.said = time.monotonic()
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
        """`read` bytes are done in all, those of earlier starts included; `facts` of them."""
        self.first = read if self.first is None else self.first
        self.read, self.facts = read, facts
        if not self.live and time.monotonic() - self.said > LINE_EVERY_S:
            self.said = time.monotonic()
            print_styled(self.console, f"{self.what} {self.share()} %  {self.words()}")

    def share(self) -> int:
        """Not done before it is: 299 of 300 is 99 %."""
        return math.floor(100 * min(self.read, self.total) / self.total)

    def words(self) -> str:
        """Bytes, pace, time left, facts."""
        seconds = time.monotonic() - self.begun
        pace = (self.read - (self.first or 0)) / max(seconds, 1e-9)
        left = (self.total - self.read) / pace if pace > 0 else math.nan
        sizes = f"{si(self.read)}B of {si(self.total)}B".replace("  ", " ")
        return f"{sizes} · {si(pace)}B/s · {duration(left)} left · {self.facts}"

    def render(self) -> Table:
        """What the screen shows now."""
        top = Table.grid(padding=(0, 1))
        top.width = min(MAX_WIDTH, self.console.width)
        top.add_column(no_wrap=True)
        top.add_column(ratio=1)
        top.add_column(no_wrap=True, justify="right")
        bar = ProgressBar(total=self.total, completed=min(self.read, self.total))
        words = Text(encodable(self.words(), self.console.encoding), style="cyan")
        top.add_row(Text(self.what, style="bold"), bar, f"{self.share():3d} %")
        both = Table.grid()
        both.add_row(top)
        both.add_row(words)
        return both


# `parallel3d data tokenize` and `train-tokenizer`.


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
