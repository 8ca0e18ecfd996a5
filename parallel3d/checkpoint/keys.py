"""Configuration keys for a run's initial weights and for saving checkpoints."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from parallel3d.config.conflicts import Conflict, OneOf
from parallel3d.config.values import (
    FREE,
    INTERVAL,
    REFUSED,
    key,
)


@dataclass
class StartKeys:
    """Keys that choose the initial weights of a new run."""

    init_from: str | None = key(
        None,
        "source of a new run's weights, model and tokenizer: another run (its newest intact "
        "checkpoint; run@500 for the one of step 500), the folder of a run or of a checkpoint, or "
        "a Hugging Face folder",
        holds=Path,
        resume=REFUSED,
        tried=("old",),
    )
    init_optimizer: bool = key(
        False,
        "with init_from=RUN: load the optimizer's state, the number of updates and the loss scale "
        "too",
        resume=REFUSED,
        alike=True,
    )


@dataclass
class CheckpointConfig:
    """Settings for saving and keeping checkpoints: `checkpoint.every=500 checkpoint.keep=3`."""

    RESUME: ClassVar[str] = FREE
    every: Any = key(
        500,
        "steps between checkpoints, with one more at the end; or a time (10min, 90s, 2h); auto: "
        "the time that loses least, by the measured delay of a save and the rate of failures; "
        "0: never save",
        holds=INTERVAL,
        minimum=0,
        tried=("10min", "auto"),
    )
    keep: int = key(3, "number of newest checkpoints to keep; older ones are removed", minimum=1)
    keep_every: int | None = key(
        None,
        "never remove checkpoints of steps that are multiples of this; if checkpoint.every is a "
        "time, the first checkpoint from each multiple on",
        minimum=1,
    )
    async_save: bool = key(
        True,
        "write in the background while training continues; short form: checkpoint.async",
    )
    load: bool = key(
        True,
        "resume from the run's newest good checkpoint; false refuses a run that exists",
        once=True,
    )

    @property
    def is_timed(self) -> bool:
        """Returns whether time, and not the number of steps, says when to save."""
        return isinstance(self.every, str)


CONFLICTS = (
    Conflict(
        {"init_optimizer": OneOf(True), "init_from": OneOf(None)},
        "{init_optimizer} loads the optimizer's state from init_from=RUN, but init_from is not "
        "given",
        (("init_optimizer", False),),
    ),
)
