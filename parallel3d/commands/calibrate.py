"""Measures this machine, and writes a cluster file (`parallel3d calibrate`)."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING

from parallel3d.blueprint.checks import check_groups
from parallel3d.blueprint.keys import CONFLICTS
from parallel3d.commands.options import CommandConfig
from parallel3d.config.fields import check_conflicts, check_fields, show
from parallel3d.errors import UserError
from parallel3d.host.devices import CPU, DeviceChoice, choose_device
from parallel3d.host.quotas import available_cores
from parallel3d.run.checks import check_run_name
from parallel3d.run_config import check_plain
from parallel3d.topology.assumptions import chosen_keys

if TYPE_CHECKING:
    from parallel3d.run.launch import Worker

CALIBRATE = "calibrate"
PER_CORE, LEAST_RANKS, MOST_RANKS = 4, 8, 64
TYPES = {"cpu": ("fp32", "bf16"), "cuda": ("fp32", "tf32", "bf16", "fp16")}


def calibrate(config: CommandConfig, worker: Worker) -> int:
    """Runs all measurements, and writes the cluster file on rank 0. Returns the exit code, 0.

    The call is collective.
    """
    from parallel3d.calibrate.measure import measure_machine  # imports torch

    measure_machine(config, worker, config.calibrate.passes, lambda: written_to(config))
    return 0


def calibrate_config(
    config: CommandConfig, typed: Sequence[str], world_size: int | None
) -> CommandConfig:
    """Returns the configuration of the measuring ranks, which are all replicas (dp).

    `typed` lists the command-line overrides, and `world_size` is the number of ranks that a
    launcher started (None without a launcher). Raises UserError for keys that calibrate sets
    itself, a number of ranks that is not a power of two, a precision that calibrate does not
    measure on the device, and an output file that cannot be written.
    """
    check_fields(config)
    check_plain(config)
    check_run_name(config.run, config.runs_dir)
    check_conflicts(CONFLICTS, lambda name: attrgetter(name)(config))
    check_groups(config.launch, config.cluster)
    for key in ("tp", "pp", "dp", "cp", "ep"):
        if key in chosen_keys(typed):
            raise UserError(
                f"{key}={getattr(config, key)}: calibrate measures groups of every size, so leave "
                f"{key} out and give the largest size, as in calibrate.ranks=4"
            )
    device = choose_device(config.device, 1)
    kind = device.kind
    types = TYPES.get(kind, TYPES[CPU])
    if config.precision.name not in types:
        raise UserError(
            f"precision={config.precision.name} must be one of {', '.join(types)} for calibrate on "
            f"device={kind}; the nearest is precision={types[0]}"
        )
    ranks = world_size or config.calibrate.ranks or _usual(device)
    if ranks & (ranks - 1):
        near = 1 << (ranks.bit_length() - 1)
        raise UserError(f"calibrate.ranks={ranks} must be a power of two; the nearest is {near}")
    written_to(config)
    return replace(config, tp=1, pp=1, cp=1, ep=1, dp=ranks)


def _usual(device: DeviceChoice) -> int:
    """Returns the default number of ranks, rounded down to a power of two.

    On a CPU there are PER_CORE ranks per core, but at least LEAST_RANKS and at most MOST_RANKS. On
    GPUs there is one rank per GPU.
    """
    per_core = min(MOST_RANKS, max(LEAST_RANKS, PER_CORE * available_cores()))
    most = per_core if device.kind == CPU else len(device.gpus)
    return 1 << (max(1, most).bit_length() - 1)


def written_to(config: CommandConfig) -> Path:
    """Returns the path of the cluster file to write.

    Raises UserError if the path does not end in .yaml or .yml, if its folder does not exist, or if
    the file exists and may not be overwritten.
    """
    file = config.calibrate.file
    path = Path(file)
    if not file.endswith((".yaml", ".yml")):
        raise UserError(
            f"calibrate.file={show(file)} must end in .yaml or .yml, by which cluster= recognizes "
            f"a file; the nearest is calibrate.file={show(file + '.yaml')}"
        )
    if not path.parent.is_dir():
        raise UserError(
            f"calibrate.file={show(file)} must be in a folder that exists; the nearest is "
            f"calibrate.file={show(path.name)}"
        )
    if os.path.lexists(path) and not config.calibrate.replace:
        raise UserError(
            f"calibrate.file={show(file)} already exists; give another file, or "
            "calibrate.replace=true to overwrite this one"
        )
    return path
