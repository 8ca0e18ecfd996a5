"""Checks the keys of `parallel3d bench comm` before its ranks start, without torch."""

from __future__ import annotations

import dataclasses
from operator import attrgetter
from pathlib import Path

from parallel3d.blueprint.checks import check_groups, data_parallel_size
from parallel3d.blueprint.keys import CONFLICTS
from parallel3d.commands.options import CommandConfig
from parallel3d.config.fields import check_conflicts, check_fields, show
from parallel3d.errors import UserError
from parallel3d.run.checks import check_run_name
from parallel3d.run_config import check_plain


def check_communication(config: CommandConfig, world_size: int | None) -> CommandConfig:
    """Returns `config` with `dp`, after checking what `bench comm` needs.

    It needs a layout of at least two ranks, sizes to measure, and an existing folder for the output
    file. The data and the model are not checked. `world_size` is the number of ranks that a
    launcher started, or None without a launcher. Raises UserError if a check fails.
    """
    check_fields(config)
    check_plain(config)
    tp, pp, cp = config.tp, config.pp, config.cp
    dp = data_parallel_size(world_size, tp=tp, pp=pp, cp=cp, dp=config.dp)
    check_run_name(config.run, config.runs_dir)
    check_conflicts(CONFLICTS, lambda name: attrgetter(name)(config))
    check_groups(config.launch, config.cluster)
    if config.replica_size * dp == 1:
        raise UserError(
            f"tp={tp}, pp={pp} and dp={dp} make a single rank, which has nothing to send; "
            "bench comm needs at least 2 ranks, as in dp=2."
        )
    sizes, file = config.bench.sizes, config.bench.json
    if not sizes or min(sizes) < 4:
        raise UserError(
            f"bench.sizes={show(sizes)} must have at least one size, and none below 4 bytes; the "
            f"nearest is bench.sizes={show([max(4, size) for size in sizes] or [4])}."
        )
    if file is not None and not Path(file).parent.is_dir():
        raise UserError(
            f"bench.json={show(file)}: there is no folder {Path(file).parent}; make it, or leave "
            "bench.json=null, which writes into the run directory."
        )
    return dataclasses.replace(config, dp=dp)
