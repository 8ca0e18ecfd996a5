"""Runs a command that would measure for long with few calls, for `APPS` of run/worker."""

from __future__ import annotations

from unittest.mock import patch

from parallel3d.calibrate import measure
from parallel3d.commands import calibrate as command
from parallel3d.commands.options import CommandConfig
from parallel3d.run.launch import Worker


def calibrate(config: CommandConfig, worker: Worker) -> int:
    with patch.multiple(
        measure,
        SIZES=((64, 65536), (1024, 65536)),
        PRODUCT=(64, 64),
        ADDED=(1 << 16, 1 << 16),
        ATTENTION=((1, 64), (1, 64)),
        WINDOWS=1,
    ):
        return command.calibrate(config, worker)
