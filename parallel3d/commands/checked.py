"""A configuration that is proved right for its command, before any rank starts; no torch."""

from __future__ import annotations

from collections.abc import Sequence

from parallel3d.commands.calibrate.start import CALIBRATE, calibrate_config
from parallel3d.config.checks.whole import check_config
from parallel3d.config.schema import Config
from parallel3d.run.launch import RankAssignment

NEED_DATA = ("train", "verify")


def checked(app: str, config: Config, typed: Sequence[str], place: RankAssignment | None) -> Config:
    """`config` for `app`, with what it leaves open decided; `typed` are the overrides.

    Raises UserError.
    """
    world_size = place.world_size if place else None
    if app == CALIBRATE:
        return calibrate_config(config, typed, world_size)
    if app == "train" and config.layout == "auto":
        from parallel3d.commands.best_layout import take_layout

        config = take_layout(config, typed, place)
    return check_config(config, world_size, communication_only=app not in NEED_DATA)
