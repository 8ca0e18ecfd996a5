"""How far a command over many bytes has come: a bar on a terminal, else a line now and then."""

from __future__ import annotations

import math
import time
from typing import Self

from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

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
