"""What loggers besides metrics.jsonl have in common: their calls, and the names of figures."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Protocol

from parallel3d.metrics.jsonl import value


class Logger(Protocol):
    """One logger of a run; its errors are logged once and never stop training."""

    label: str  # in the header

    def log(self, line: Mapping[str, Any]) -> None:
        """Logs a line of metrics.jsonl, of a step or of an evaluation."""

    def flush(self) -> None:
        """Hands all lines to the operating system: a checkpoint is about to be written."""

    def finish(self, summary: dict[str, Any], exit_code: int) -> None:
        """Closes the logger at the end of the run."""

    def shown(self) -> str:
        """Returns where the figures are, for the header."""


# Sections of a logger's page. `step` and `tokens` have none: they are the x axes.
NAMES = {
    "loss": "train/loss",
    "grad_norm": "train/grad_norm",
    "lr": "train/lr",
    "skipped": "train/skipped",
    "loss_scale": "train/loss_scale",
    "tokens_per_s": "speed/tokens_per_s",
    "mfu": "speed/mfu",
    "step_time_s": "speed/step_time_s",
    "eval_loss": "eval/loss",
}
# Entries with parts: the begin of their names.
_PARTS = {"times": "time/", "memory": "memory/", "noise": "noise/", "eval_losses": "eval/loss of "}


def figures_of(line: Mapping[str, Any]) -> dict[str, float]:
    """Returns the figures of a line by their names in a logger, without those that are null.

    NaN and infinities are restored.
    """
    return dict(_named(line, NAMES))


def _named(entries: Mapping[str, Any], names: Mapping[str, str]) -> Iterator[tuple[str, float]]:
    for key, entry in entries.items():
        if key == "nonfinite":
            continue
        if isinstance(entry, Mapping):
            begin = _PARTS.get(key, f"{key}/")
            yield from ((begin + name, figure) for name, figure in _named(entry, {}))
        else:
            figure = entry if isinstance(entry, int) else value(entries, key)
            if figure is not None:
                yield names.get(key, key), figure
