"""Checks the loggers: their packages must be installed, and WANDB_MODE must be valid."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping

from parallel3d.config.fields import (
    show,
)
from parallel3d.errors import UserError, nearest_hint
from parallel3d.metrics.keys import LoggerConfig

WANDB_MODES = ("online", "offline", "disabled", "dryrun", "run", "shared")


def check_loggers(logger: LoggerConfig, environ: Mapping[str, str]) -> None:
    """Raises UserError if the package tensorboard is needed and missing, or WANDB_MODE is unknown.

    It is called on the host of rank 0, the only rank that logs.
    """
    mode = environ.get("WANDB_MODE")
    if "wandb" in logger.names and logger.mode == "auto" and mode and mode not in WANDB_MODES:
        raise UserError(
            f"WANDB_MODE={mode} must be one of {', '.join(WANDB_MODES)}"
            f"{nearest_hint(mode, WANDB_MODES)}: set one of these, or give logger.mode"
        )
    if "tensorboard" in logger.names and importlib.util.find_spec("tensorboard") is None:
        given = show(logger.name)
        others = [name for name in logger.names if name != "tensorboard"]
        raise UserError(
            f"logger={given} needs the package tensorboard, which is not installed: run "
            f"pip install 'parallel3d[tensorboard]', or give "
            f"logger={show(others) if others else 'none'}"
        )
