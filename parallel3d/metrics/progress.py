"""Progress on the screen: a live bar on a terminal, plain lines elsewhere."""

from __future__ import annotations

import math
import sys
import time
from collections import deque
from typing import Self

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from parallel3d.metrics.jsonl import StepRecord
from parallel3d.metrics.text import Curve, duration, encodable, loss_words, percent, si, sparkline

REFRESH_PER_SECOND = 4  # drawn by a thread of the training process, at its expense
RATE_WINDOW = 50  # steps that the remaining time is estimated from
MAX_SPARK = 32
MAX_WIDTH = 100  # wider lines and panels are hard to read


def make_console() -> Console:
    """Returns a console on stdout, styled only on a terminal, whatever FORCE_COLOR asks."""
    return Console(force_terminal=sys.stdout.isatty(), highlight=False)


def print_styled(console: Console, text: str, style: str = "") -> None:
    """Prints `text` as one unbroken line, in characters of the console's encoding."""
    line = Text(encodable(text, console.encoding), style=style)
    console.print(line, soft_wrap=True)


class TimeLeft:
    """Elapsed time, and remaining time by the pace of the last steps, evaluations included."""

    def __init__(self, last_step: int) -> None:
        self._last_step = last_step
        self._start = time.perf_counter()
        self._recent: deque[tuple[int, float]] = deque(maxlen=RATE_WINDOW)

    def tick(self, step: int) -> None:
        self._recent.append((step, time.perf_counter()))

    @property
    def elapsed(self) -> float:
        return time.perf_counter() - self._start

    @property
    def left(self) -> float:
        """Returns seconds to the last step; NaN until two steps are known."""
        if len(self._recent) < 2:
            return math.nan
        (first, begin), (last, end) = self._recent[0], self._recent[-1]
        return (self._last_step - last) * (end - begin) / (last - first)


class Bar:
    """Two live lines: step, bar and time above loss, gradient norm, learning rate and speed."""

    def __init__(self, console: Console, first_step: int, last_step: int, curve: Curve) -> None:
        """`curve` is the run's loss so far, updated by the caller."""
        self._console = console
        self._first_step = first_step
        self._last_step = last_step
        self._curve = curve
        self._clock = TimeLeft(last_step)
        self._record: StepRecord | None = None
        self._skipped = 0
        self._live = Live(
            console=console,
            get_renderable=self.render,
            refresh_per_second=REFRESH_PER_SECOND,
            transient=True,
        )

    def __enter__(self) -> Self:
        self._live.start()
        return self

    def __exit__(self, *raised: object) -> None:
        self._live.stop()

    def update(self, record: StepRecord) -> None:
        self._record = record
        self._skipped += record.skipped
        self._clock.tick(record.step)

    def note(self, text: str, style: str = "") -> None:
        print_styled(self._console, text, style)

    def render(self) -> RenderableType:
        done = self._record.step if self._record else self._first_step - 1
        width = len(str(self._last_step))
        top = Table.grid(padding=(0, 1))
        top.width = min(MAX_WIDTH, self._console.width)
        top.add_column(no_wrap=True)
        top.add_column(ratio=1)
        top.add_column(no_wrap=True, justify="right")
        top.add_column(no_wrap=True, justify="right")
        # Rounded down: 299 of 300 is 99 %.
        share = f"{math.floor(100 * done / self._last_step):3d} %"
        times = f"{duration(self._clock.elapsed)} · {duration(self._clock.left)} left"
        top.add_row(
            Text(f"step {done:{width}d}/{self._last_step}", style="bold"),
            ProgressBar(total=self._last_step, completed=done, complete_style="cyan"),
            share,
            Text(encodable(times, self._console.encoding), style="cyan"),
        )
        return Group(top, self._figures())

    def _figures(self) -> Text:
        record, is_utf = self._record, self._console.encoding.startswith("utf")
        if record is None:
            return Text("first step …" if is_utf else "first step")
        loss = 0.0 if record.loss is None else record.loss
        good = "bold green" if math.isfinite(loss) else "bold red"
        parts = [
            ("loss", loss_words(record.loss), good),
            ("grad", f"{record.grad_norm:#.3g}", ""),
            ("lr", f"{record.lr:.2e}", ""),
            ("", f"{si(record.tokens_per_s)} tok/s".replace("  ", " "), ""),
            ("MFU", percent(record.mfu), ""),
        ]
        if record.loss_scale is not None:
            parts.insert(1, ("scale", f"{record.loss_scale:g}", ""))
        if record.noise_scale is not None:
            parts.insert(-2, ("noise", f"{record.noise_scale:.3g}", ""))
        if self._skipped:
            parts.insert(1, ("skipped", f"{self._skipped:,}", "bold red" if record.skipped else ""))
        line = Text(no_wrap=True, overflow="ellipsis")
        for i, (name, value, style) in enumerate(parts):
            line.append(" · " if i else "", style="dim")
            line.append(f"{name} " if name else "", style="dim")
            line.append(value, style=style)
        width = min(MAX_SPARK, self._console.width - line.cell_len - 3)
        if width >= 4:
            line.append("  " + sparkline(self._curve.values(), width), style="green")
        if not is_utf:
            return Text(encodable(line.plain, self._console.encoding), no_wrap=True)
        return line


class Lines:
    """A plain line for the first, the last, every `every`-th and every not finite step."""

    def __init__(self, console: Console, first_step: int, last_step: int, every: int) -> None:
        self._console = console
        self._first_step = first_step
        self._last_step = last_step
        self._every = every
        self._clock = TimeLeft(last_step)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *raised: object) -> None:
        """Does nothing."""

    def update(self, record: StepRecord) -> None:
        self._clock.tick(record.step)
        due = record.step % self._every == 0 or record.step in (self._first_step, self._last_step)
        bad = record.skipped and record.loss is not None
        if not (due or bad):
            return
        width = len(str(self._last_step))
        left = duration(self._clock.left)
        self.note(
            f"step {record.step:{width}d}/{self._last_step}  loss {loss_words(record.loss):>8}  "
            f"grad {record.grad_norm:#8.3g}  lr {record.lr:.2e}  "
            f"{si(record.tokens_per_s):>6} tok/s  MFU {percent(record.mfu):>6}  left {left:>7}"
            + (f"  scale {record.loss_scale:g}" if record.loss_scale is not None else "")
            + (f"  noise {record.noise_scale:.3g}" if record.noise_scale is not None else "")
            + ("  SKIPPED: gradients not finite" if bad else "")
            + ("  SKIPPED: no token to learn" if record.loss is None else "")
        )

    def note(self, text: str, style: str = "") -> None:
        print_styled(self._console, text, style)


def make_progress(
    console: Console, *, bar: bool, first_step: int, last_step: int, log_every: int, curve: Curve
) -> Bar | Lines:
    """Returns the bar on a capable terminal if wanted (`train.progress`), else plain lines."""
    if bar and console.is_terminal and not console.is_dumb_terminal:
        return Bar(console, first_step, last_step, curve)
    return Lines(console, first_step, last_step, log_every)
