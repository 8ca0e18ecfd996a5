"""What a run remembers of itself: the figures of a step, and the statistics over steps."""

from __future__ import annotations

import math
import statistics
from array import array
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from parallel3d.comm.clock import WARMUP_STEPS
from parallel3d.metrics.jsonl import value

if TYPE_CHECKING:
    from parallel3d.metrics.memory import PeakMemory


class StepRecord(NamedTuple):
    """One optimizer step, as it is written to `metrics.jsonl` (same names, same order)."""

    step: int  # counts from 1
    loss: float | None  # nats per token, mean over the unmasked tokens; None without any
    grad_norm: float  # before clipping
    lr: float
    tokens: int  # of the whole run so far
    tokens_per_s: float
    mfu: float  # fraction
    step_time_s: float
    skipped: bool = False  # no loss or gradients not finite: the parameters stay as they were
    loss_scale: float | None = None  # of fp16, after the step
    times: Mapping[str, float] | None = None  # seconds by kind, see `comm.clock`
    memory: PeakMemory | None = None  # of rank 0's accelerator so far
    noise: Mapping[str, float | None] | None = None  # see `data_parallel.noise_scale`
    profiled: bool = False  # slower than others, and left out of the run's throughput

    @property
    def noise_scale(self) -> float | None:
        """In sequences; None where it is not measured or not known yet."""
        return None if self.noise is None else self.noise["scale"]

    def row(self) -> dict[str, Any]:
        """As a line of metrics.jsonl: what a step has not, is not there."""
        row = self._asdict()
        for mark in ("skipped", "profiled"):
            if not row[mark]:
                del row[mark]
        if self.times is not None:
            row["times"] = {kind: round(seconds, 6) for kind, seconds in self.times.items()}
        if self.memory is not None:
            row["memory"] = self.memory._asdict()
        if self.noise is not None:
            row["noise"] = {part: v for part, v in self.noise.items() if v is not None}
        return {key: value for key, value in row.items() if value is not None or key == "loss"}


class Throughput:
    """Step times and tokens of one session; the first `WARMUP_STEPS` are left out of its figures.

    A session that is no longer than that has nothing else: then all of its steps count, and
    `excluded` is 0.
    """

    def __init__(self) -> None:
        self._seconds = array("d")
        self._tokens = array("d")

    def add(self, tokens: int, seconds: float) -> None:
        """One step: tokens that it computed and its duration."""
        self._tokens.append(tokens)
        self._seconds.append(seconds)

    @property
    def excluded(self) -> int:
        """Warm-up steps that the figures leave out."""
        return WARMUP_STEPS if len(self._seconds) > WARMUP_STEPS else 0

    @property
    def mean(self) -> float:
        """Tokens per second: all tokens / all step time. NaN without steps."""
        seconds = sum(self._seconds[self.excluded :])
        return sum(self._tokens[self.excluded :]) / seconds if seconds else math.nan

    @property
    def median(self) -> float:
        """Median over steps of tokens per second. NaN without steps."""
        pairs = zip(self._tokens, self._seconds, strict=True)
        rates = [tokens / seconds for tokens, seconds in pairs][self.excluded :]
        return statistics.median(rates) if rates else math.nan

    def summary(self) -> dict[str, float | None]:
        """Both figures, null without steps, and what they leave out."""
        rates = {"mean": self.mean, "median": self.median}
        usable = {k: v if math.isfinite(v) else None for k, v in rates.items()}
        return usable | {"warmup_steps_excluded": self.excluded}


class Evaluation(NamedTuple):
    """A held-out loss (nats per token) after `step` steps; None without a token to tell."""

    step: int
    loss: float | None


def is_whole(row: Mapping[str, Any]) -> bool:
    """Whether a line of metrics.jsonl has what is taken up from it: a step's, an evaluation's."""
    keys = ("eval_loss", "tokens") if "eval_loss" in row else StepRecord._fields[1:8]
    may_lack = "eval_loss" if "eval_loss" in row else "loss" if row.get("skipped") else None
    try:
        return all(value(row, key) is not None or key == may_lack for key in keys)
    except (KeyError, TypeError, ValueError, AttributeError):
        return False


def best_evaluation(evaluations: Sequence[Evaluation]) -> Evaluation | None:
    """The lowest finite held-out loss, the earliest of equals; None without one."""
    usable = [e for e in evaluations if e.loss is not None and math.isfinite(e.loss)]
    return min(usable, key=lambda e: e.loss, default=None)
