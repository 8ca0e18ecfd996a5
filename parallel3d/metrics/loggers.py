"""What loggers besides metrics.jsonl have in common: their calls, and the names of figures."""

from __future__ import annotations

import math
from collections.abc import Mapping
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
_NAMES = {
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
    found: dict[str, float | None] = {}
    for key, entry in line.items():
        if isinstance(entry, Mapping) and key != "nonfinite":
            found |= _figures(entry, _PARTS.get(key, f"{key}/"))
        elif key != "nonfinite":
            found[_NAMES.get(key, key)] = _figure(line, key)
    return {name: figure for name, figure in found.items() if figure is not None}


def _figures(entry: Mapping[str, Any], begin: str) -> dict[str, float | None]:
    found: dict[str, float | None] = {}
    for part in (key for key in entry if key != "nonfinite"):
        if isinstance(entry[part], Mapping):  # a validation set
            found |= _figures(entry[part], f"{begin}{part}/")
        else:
            found[begin + part] = _figure(entry, part)
    return found


def _figure(line: Mapping[str, Any], key: str) -> float | None:
    entry = line[key]
    if isinstance(entry, float) and math.isfinite(entry):
        return entry
    return entry if isinstance(entry, int) else value(line, key)
