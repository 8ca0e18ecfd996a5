"""The pipeline schedule of a run, by its configuration."""

from __future__ import annotations

from parallel3d.config.schema import Config
from parallel3d.schedules.choose import RankWork, chosen, wanted
from parallel3d.schedules.schedule import Schedule
from parallel3d.sizes.stage_costs import StageWeights


def run_schedule(config: Config, microbatches: int | None = None) -> Schedule:
    """What `schedule=…` names, for the run's micro-batches or as many as are given.

    Raises UserError where there is no such schedule (see `choose.wanted`).
    """
    count = config.num_microbatches if microbatches is None else microbatches
    name, file = config.schedule.name, config.schedule.file
    return wanted(name, config.pp, count, config.vpp, file, *_costs(config))


def sends_slices(config: Config, on_accelerator: bool) -> bool:
    """Whether the ranks of a tensor group, which hold equal hidden states without `sp`, each send
    a part of them to the next stage (Narayanan et al. 2021 §4.1)."""
    if config.sp or config.tp == 1 or config.pp == 1 or config.model.seq_length % config.tp:
        return False
    wanted = config.schedule.slices
    return on_accelerator if wanted is None else wanted


def why_chosen(config: Config) -> str:
    """What `schedule=auto` has found, and what it is better than."""
    return chosen(config.pp, config.num_microbatches, config.vpp, *_costs(config)).why


def _costs(config: Config) -> tuple[RankWork, float]:
    keys = config.schedule
    work = RankWork(*keys.costs, keys.hop, StageWeights.of_run(config))
    return work, 1.0 if keys.memory is None else keys.memory
