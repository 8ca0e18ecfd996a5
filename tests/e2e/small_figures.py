"""Runs a command that would measure for minutes with few calls, for `APPS` of run/worker."""

from __future__ import annotations

from unittest.mock import patch

from parallel3d.commands.calibrate import measure
from parallel3d.config.schema import Config
from parallel3d.run.launch import Worker


def calibrate(config: Config, worker: Worker) -> int:
    with (
        patch.multiple(measure, LARGE_SIZES=(1024, 65536), CALLS=1, WINDOWS=1),
        patch.multiple(measure, MICRO_BATCHES=(1, 2), BLOCKS=1, MOST_RUNS=1),
        patch.object(measure, "peak_tflops", lambda *_: 1.0),  # products of 8192²
    ):
        return measure.calibrate(config, worker)
