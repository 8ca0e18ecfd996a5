"""Settles what is auto in a configuration, and makes dry runs of its ranks.

`dryrun` reports them, and `plan` confirms its rows by them. The dry run itself (`dryrun/`) imports
nothing of the planner, which chooses what is auto.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from parallel3d.blueprint.cluster import cluster_from_config
from parallel3d.blueprint.layout import Layout
from parallel3d.blueprint.rank_mapping import RankMapping
from parallel3d.dryrun.keys import DryrunConfig
from parallel3d.errors import UserError, said_in_full
from parallel3d.estimate.search import with_style
from parallel3d.estimate.traffic import transfers
from parallel3d.resolve import blueprint_of, layout_of
from parallel3d.run_config import Config, check_config
from parallel3d.topology.search import place

if TYPE_CHECKING:
    from parallel3d.dryrun.facts import Facts
    from parallel3d.optim.own import OptimizerFactory


def find_facts(
    config: Config,
    rank: int | None = None,
    reserve_gb: float = DryrunConfig().reserve_gb,
    optimizer: OptimizerFactory | None = None,
) -> Facts:
    """Returns the facts about a rank or, if `rank` is None, about the ranks that `_ranks` chooses.

    `reserve_gb` is the GPU memory that must stay free, in 1e9 bytes. `optimizer` makes the
    optimizer of a script. Raises UserError for an impossible configuration.
    """
    config, placement = _settled(config)
    ranks = _ranks(layout_of(config), rank)
    from parallel3d.dryrun.facts import facts_of  # imports torch

    with _explained(config):
        return facts_of(config, ranks, placement, reserve_gb, optimizer)


def find_memory(config: Config, stage: int, optimizer: OptimizerFactory | None = None) -> Facts:
    """Returns only the facts about memory, for the first rank whose index along pp is `stage`.

    `optimizer` is as in `find_facts`. Raises UserError for an impossible configuration.
    """
    config, placement = _settled(config)
    rank = layout_of(config).group_of(0, "pp")[stage]
    from parallel3d.dryrun.counting import dry_step, gpu_of  # imports torch

    gpu = gpu_of(config.cluster, config.precision.name, config.launch.peak_tflops)
    with _explained(config):
        return dry_step(config, rank, gpu, placement, memory_only=True, optimizer=optimizer)


@contextmanager
def _explained(config: Config) -> Iterator[None]:
    """Turns an error of the user's own model, which has a note, into a UserError."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        if not hasattr(error, "__notes__"):
            raise
        raise UserError(
            f"{config.model.name} cannot run without values: {said_in_full(error)} A dry run makes "
            "tensors that have shapes alone, on a simulated GPU; training may still work"
        ) from error


def _settled(config: Config) -> tuple[Config, RankMapping | None]:
    """Returns the checked configuration, and the rank mapping if the dp groups depend on it.

    The configuration has the cheapest style in place of context_parallel.style=auto.
    """
    config = check_config(config, own_samples=True)
    # The number of steps in an epoch is unknown without data, and a dry run needs only two steps.
    config = dataclasses.replace(config, train=dataclasses.replace(config.train, epochs=None))
    placement = None
    if config.ddp.hierarchical:
        looped = blueprint_of(config).looped_layout
        cluster = cluster_from_config(config.cluster, looped.world_size)
        placement = place(config.placement, cluster, looped, transfers(config, looped))
    return with_style(config), placement


def _ranks(layout: Layout, rank: int | None) -> list[int]:
    """Returns the requested rank, or the first rank of the first, a middle and the last stage.

    Raises UserError if the layout has no such rank.
    """
    world, pp = layout.world_size, layout.pp
    if rank is None:
        first_pipeline = layout.groups("pp")[0]
        return [first_pipeline[stage] for stage in sorted({0, pp // 2, pp - 1})]
    if rank >= world:
        raise UserError(
            f"dryrun.rank={rank} must be less than {world}, the number of ranks of this layout; "
            f"the nearest is dryrun.rank={world - 1}."
        )
    return [rank]
