"""Loggers besides metrics.jsonl: the calls and names of figures of each, and TensorBoard's."""

from __future__ import annotations

import dataclasses
import shlex
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol

from omegaconf import OmegaConf

from parallel3d.config.schema import Config
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


FOLDER = "tensorboard"
FLUSH_S = 30  # until a line is on the page


def show_command(folder: Path) -> str:
    return shlex.join(["tensorboard", "--logdir", str(folder)])


class TensorBoardLogger:
    """Writes the event files of one start; the first OSError is logged by `say` and disables it.

    All starts of a run are one curve. A start marks the step from which on it writes, and
    TensorBoard drops what earlier files hold from there on (`purge_step`). What was logged before a
    checkpoint is in the file when that is written, so that no kill loses a step. Into an empty
    folder a start writes all earlier lines of metrics.jsonl first.
    """

    label = "TensorBoard"

    def __init__(
        self,
        config: Config,
        run_dir: Path,
        first_step: int,
        say: Callable[[str], None],
        earlier: Iterable[Mapping[str, Any]] = (),
    ) -> None:
        """`earlier`: rows of metrics.jsonl from earlier sessions."""
        from torch.utils.tensorboard import SummaryWriter  # an optional package

        self._say = say
        self._folder = run_dir / FOLDER
        self._writer: SummaryWriter | None = None
        is_new = not any(self._folder.glob("events.out.tfevents.*"))

        def begin() -> None:
            # The first start also repeats an evaluation at step 0.
            purge = first_step if first_step > 1 else 0
            writer = SummaryWriter(str(self._folder), purge_step=purge, flush_secs=FLUSH_S)
            text = OmegaConf.to_yaml(OmegaConf.create(dataclasses.asdict(config)))
            writer.add_text("config", f"```\n{text}```", purge)
            self._writer = writer

        self._guard(begin)
        for line in earlier if is_new else ():
            self.log(line)

    def log(self, line: Mapping[str, Any]) -> None:
        if (writer := self._writer) is None:
            return
        figures = figures_of(line)
        step = int(figures.pop("step"))
        if "eval_loss" in line:
            del figures["tokens"]  # the step's own line has them

        def add() -> None:
            for name, figure in figures.items():
                writer.add_scalar(name, figure, step)

        self._guard(add)

    def flush(self) -> None:
        if self._writer is not None:
            self._guard(self._writer.flush)

    def finish(self, summary: dict[str, Any], exit_code: int) -> None:
        writer, self._writer = self._writer, None
        if writer is not None:
            self._guard(writer.close)

    def shown(self) -> str:
        return show_command(self._folder)

    def _guard(self, action: Callable[[], object]) -> None:
        try:
            action()
        except OSError as error:
            self._writer = None
            self._say(
                f"warning: TensorBoard's files in {self._folder} cannot be written "
                f"({error.strerror or error}); the training goes on and metrics.jsonl has "
                "everything"
            )
