"""The pipeline schedule of a run, by its configuration."""

from __future__ import annotations

from parallel3d.config.schema import Config
from parallel3d.schedules.choose import Work, wanted
from parallel3d.schedules.schedule import Schedule


def run_schedule(config: Config, microbatches: int | None = None) -> Schedule:
    """What `schedule=…` names, for the run's micro-batches or as many as are given.

    Raises UserError where there is no such schedule (see `choose.wanted`).
    """
    keys = config.schedule
    return wanted(
        keys.name,
        config.pp,
        config.num_microbatches if microbatches is None else microbatches,
        config.vpp,
        keys.file,
        Work(*keys.costs, keys.hop),
        1.0 if keys.memory is None else keys.memory,
    )
