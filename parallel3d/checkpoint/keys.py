"""Keys of checkpoints: what a run begins from, and what it saves."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from parallel3d.config.conflicts import Conflict, Is
from parallel3d.config.values import (
    FREE,
    REFUSED,
    key,
)


@dataclass
class StartKeys:
    """What the weights of a new run are."""

    init_from: str | None = key(
        None,
        "weights of a new run: another run (its newest whole checkpoint; run@500 for that of step "
        "500), the folder of a run or of a checkpoint, or a Hugging Face folder; model and "
        "tokenizer come along",
        holds=Path,
        resume=REFUSED,
        tried=("old",),
    )
    init_optimizer: bool = key(
        False,
        "init_from a run: the optimizer's state, the number of updates and the loss scale too",
        resume=REFUSED,
        alike=True,
    )


@dataclass
class CheckpointConfig:
    """Saving of checkpoints: `checkpoint.every=500 checkpoint.keep=3`."""

    RESUME: ClassVar[str] = FREE
    every: int = key(
        500,
        "save every so many steps and at the end; 0: never",
        minimum=0,
    )
    keep: int = key(3, "newest checkpoints that are kept; older ones are removed", minimum=1)
    keep_every: int | None = key(
        None,
        "checkpoints of steps that are multiples of this are kept for good",
        minimum=1,
    )
    async_save: bool = key(
        True,
        "write in the background while training goes on; may be typed checkpoint.async",
    )
    load: bool = key(
        True,
        "resume from the run's newest good checkpoint; false refuses a run that exists",
        once=True,
    )


CONFLICTS = (
    Conflict(
        {"init_optimizer": Is(True), "init_from": Is(None)},
        "{init_optimizer} takes the optimizer of init_from, which is not given",
        (("init_optimizer", False),),
    ),
)
