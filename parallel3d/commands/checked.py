"""Checks a configuration for its command before any rank starts. Imports no torch."""

from __future__ import annotations

from collections.abc import Sequence

from parallel3d.commands.calibrate.command import CALIBRATE, calibrate_config
from parallel3d.config.checks.whole import check_config
from parallel3d.config.schema import Config
from parallel3d.run.launch import RankAssignment

NEED_DATA = ("train", "verify")


def checked(
    app: str, config: Config, overrides: Sequence[str], place: RankAssignment | None
) -> Config:
    """Returns `config` for the command `app` with open choices made. Raises UserError."""
    world_size = place.world_size if place else None
    if app == CALIBRATE:
        return calibrate_config(config, overrides, world_size)
    if app == "train" and config.layout == "auto":
        # Here, because the planner would take a tenth of a second of every command's start.
        from parallel3d.commands.best_layout import take_layout

        config = take_layout(config, overrides, place)
    return check_config(config, world_size, communication_only=app not in NEED_DATA)
