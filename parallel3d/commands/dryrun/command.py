"""`parallel3d dryrun`: what a step of this configuration takes of one GPU, before there is one.

The trainer itself runs, on tensors that have shapes and no values, as one rank of a world whose
other ranks are not there. What it allocates, launches and sends is counted.
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
from parallel3d.sizes.balance import layout_with_loops
from parallel3d.sizes.traffic import transfers
from parallel3d.topology.assumptions import check_free, chosen_keys, write
from parallel3d.topology.cluster.parts import cluster_from_config
from parallel3d.topology.layout import layout_of
from parallel3d.topology.placement.search import place
from parallel3d.topology.tiling import RankMapping

MADE_BY = "parallel3d dryrun"
ASSUMED_CLUSTER = "dgx_h100"


def dryrun(config: Config, typed: Sequence[str] | None = None) -> int:
    """Print what a step takes, and write the file asked for. Returns the exit code, 0.

    `typed`: the overrides of the command line, which tell what the user chose himself; None (a
    caller with a configuration of its own) for: everything. Raises UserError for what cannot work.
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
    """The configuration with a cluster that has GPUs, where the user chose none."""
    keys = {"cluster"} if typed is None else chosen_keys(typed)
    chosen = any(k in ("cluster", "experiment") or k.startswith("cluster.") for k in keys)
    if chosen or config.cluster.gpu is not None:
        return config, []
    values = OmegaConf.to_container(OmegaConf.load(conf_dir() / "cluster" / "dgx_h100.yaml"))
    cluster = ClusterConfig(**values)  # type: ignore[arg-type]
    return dataclasses.replace(config, cluster=cluster), [f"cluster={ASSUMED_CLUSTER}"]


def find_facts(config: Config) -> dict[str, Any]:
    """Everything that the report shows, as plain data; nothing is printed or written.

    This process has the simulated device from here on. Raises UserError for what cannot work.
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
    """The rank asked for, or the first ones of the first, a middle and the last stage."""
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
    """Where the ranks sit on the configured cluster, which decides the two levels of dp."""
    layout = layout_with_loops(config)
    cluster = cluster_from_config(config.cluster, layout.world_size)
    return place(config, cluster, layout, transfers(config, layout))
