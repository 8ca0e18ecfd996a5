"""Starts `parallel3d eval`: finds the run, its model and the rows. Imports no torch."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Sequence
from pathlib import Path

from parallel3d.commands.evaluate.rows import read_rows
from parallel3d.commands.generate.command import (
    check_overrides,
    checkpoints_of,
    config_of_run,
)
from parallel3d.config.fields import show
from parallel3d.config.schema import Config
from parallel3d.errors import UserError

EVAL = "eval"
MAY_BE_SET = ("run", "runs_dir", "tp", "pp", "dp", "device", "eval.*", "launch.*")
TYPED = ("tasks", "to", "batch_tokens", "step", "weights")  # may be typed without `eval.`


def eval_config(config: Config, overrides: Sequence[str], world_size: int | None) -> Config:
    """Returns the configuration of an evaluation, checked; dp is what is left of `world_size`.

    Raises:
        UserError: no such run, no checkpoint, rows that are none, a result that exists, or a key
            that only training may set.
    """
    check_overrides(EVAL, overrides, MAY_BE_SET)
    settings = config.eval
    dp = config.dp or max(1, (world_size or 1) // (config.tp * config.pp))
    config = config_of_run(EVAL, dataclasses.replace(config, dp=dp), world_size)
    if settings.tasks is None:
        raise UserError(
            f"eval needs tasks=…, a jsonl of rows, as in: eval run={config.run} tasks=a.jsonl"
        )
    read_rows(settings.tasks)
    if settings.to is not None and os.path.lexists(settings.to):
        raise UserError(f"to={show(settings.to)} exists already: give the name of a new file")
    if settings.to is not None and not (folder := Path(settings.to).parent).is_dir():
        raise UserError(
            f"to={show(settings.to)}: there is no folder {folder}; make it, or give another to="
        )
    chosen = dataclasses.replace(config.generate, step=settings.step, weights=settings.weights)
    config = dataclasses.replace(config, generate=chosen)
    checkpoints_of(config)
    return config
