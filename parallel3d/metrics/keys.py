"""Declares the keys of the section `logger`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from parallel3d.config.values import (
    FREE,
    LOGGERS,
    key,
    words_of,
)


@dataclass
class LoggerConfig:
    """Loggers besides `metrics.jsonl`, such as `logger=wandb` or `logger=[wandb,tensorboard]`."""

    RESUME: ClassVar[str] = FREE
    name: Any = key(
        "none",
        "one logger or a list of them; in a file: name: [wandb, tensorboard]",
        choices=("none", *LOGGERS),
        list_of=LOGGERS,
    )
    project: str | None = key(None, "W&B project; null: WANDB_PROJECT, or parallel3d")
    entity: str | None = key(None, "W&B user or team; null: WANDB_ENTITY, or that of the API key")
    group: str | None = key(None, "W&B group")
    job_type: str | None = key(None, "W&B job type, such as train; null: WANDB_JOB_TYPE")
    notes: str | None = key(None, "W&B notes: a sentence about the run; null: WANDB_NOTES")
    tags: list[str] = key([], "W&B tags")
    mode: str = key(
        "auto",
        "auto: WANDB_MODE if it is set; otherwise online with an API key, and offline without one",
        choices=("auto", "online", "offline"),
    )
    system_metrics: bool = key(
        False, "W&B also samples CPU, memory and GPUs of rank 0's host, every 15 s"
    )

    @property
    def names(self) -> tuple[str, ...]:
        """Returns the loggers that `name` selects, without `none`."""
        return tuple(word for word in dict.fromkeys(words_of(self.name)) if word != "none")
