"""Runs a command that would measure for minutes with few calls, for `APPS` of run/worker."""

from __future__ import annotations

from unittest.mock import patch

from parallel3d.calibrate import measure, pieces
from parallel3d.commands import calibrate as command
from parallel3d.commands.options import CommandConfig
from parallel3d.run.launch import Worker


def calibrate(config: CommandConfig, worker: Worker) -> int:
    with (
        patch.multiple(measure, LARGE_SIZES=(1024, 65536), CALLS=1, WINDOWS=1),
        patch.multiple(pieces, MICRO_BATCHES=(1, 2), BLOCKS=1),
        patch.object(measure, "MOST_RUNS", 1),
        patch.object(measure, "peak_tflops", lambda *_: 1.0),  # products of 8192²
    ):
        return command.calibrate(config, worker)
