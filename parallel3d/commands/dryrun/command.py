"""`parallel3d dryrun`: memory, kernels and traffic of a step of this configuration, without a GPU.

The trainer runs on tensors without values, as one rank of a world without its other ranks, and its
allocations, launches and collectives are counted.
"""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Sequence
from typing import Any

from omegaconf import OmegaConf

from parallel3d.config.checks.whole import check_config
from parallel3d.config.schema import ClusterConfig, Config, conf_dir
from parallel3d.errors import UserError
from parallel3d.estimate.balance import layout_with_loops
from parallel3d.estimate.traffic import transfers
from parallel3d.topology.assumptions import check_free, chosen_keys, write
from parallel3d.topology.cluster.parts import cluster_from_config
from parallel3d.topology.layout import layout_of
from parallel3d.topology.placement.search import place
from parallel3d.topology.tiling import RankMapping

MADE_BY = "parallel3d dryrun"
ASSUMED_CLUSTER = "dgx_h100"


def dryrun(config: Config, typed: Sequence[str] | None = None) -> int:
    """Prints the report and writes the file asked for. Returns the exit code, 0.

    `typed`: the command line's overrides, i.e. the user's own choices; None counts as all chosen.
    Raises UserError for what cannot work.
    """
    wanted = config.dryrun.json
    check_free("dryrun.json", wanted, f'"made_by": "{MADE_BY}"', MADE_BY)
    config, assumed = assume_cluster(config, typed)
    facts = find_facts(config) | {"assumed": assumed}
    if wanted:
        text = json.dumps({"made_by": MADE_BY} | facts, indent=1, allow_nan=False)
        write("dryrun.json", wanted, text + "\n")
    from parallel3d.commands.dryrun.report import print_report

    print_report(facts, sys.stdout)
    return 0


def assume_cluster(config: Config, typed: Sequence[str] | None) -> tuple[Config, list[str]]:
    """Returns the configuration with a cluster of GPUs if none was chosen, and the assumption."""
    keys = {"cluster"} if typed is None else chosen_keys(typed)
    chosen = any(k in ("cluster", "experiment") or k.startswith("cluster.") for k in keys)
    if chosen or config.cluster.gpu is not None:
        return config, []
    values = OmegaConf.to_container(OmegaConf.load(conf_dir() / "cluster" / "dgx_h100.yaml"))
    cluster = ClusterConfig(**values)  # type: ignore[arg-type]
    return dataclasses.replace(config, cluster=cluster), [f"cluster={ASSUMED_CLUSTER}"]


def find_facts(config: Config) -> dict[str, Any]:
    """Returns everything that the report contains, as plain data.

    Enables the simulated device in this process. Raises UserError for what cannot work.
    """
    config = check_config(config, own_samples=True)
    layout = layout_of(config)
    ranks = _ranks(config)
    from parallel3d.commands.dryrun.counting import gpu_of
    from parallel3d.commands.dryrun.report import facts_of  # imports torch
    from parallel3d.commands.dryrun.world import dry_step

    gpu = gpu_of(config)
    placement = _placement(config) if config.ddp.hierarchical else None
    rows = [dry_step(config, rank, gpu, placement) for rank in ranks]
    return facts_of(config, layout, gpu, rows)


def _ranks(config: Config) -> list[int]:
    """Returns the rank asked for, or the first ranks of the first, a middle and the last stage."""
    world, pp = layout_of(config).world_size, config.pp
    rank = config.dryrun.rank
    if rank is None:
        first_pipeline = layout_of(config).groups("pp")[0]
        return [first_pipeline[stage] for stage in sorted({0, pp // 2, pp - 1})]
    if rank >= world:
        raise UserError(
            f"dryrun.rank={rank} must be below the {world} ranks of this layout; the nearest is "
            f"dryrun.rank={world - 1}."
        )
    return [rank]


def _placement(config: Config) -> RankMapping:
    """Returns the rank mapping on the configured cluster, which decides the two levels of dp."""
    layout = layout_with_loops(config)
    cluster = cluster_from_config(config.cluster, layout.world_size)
    return place(config, cluster, layout, transfers(config, layout))
