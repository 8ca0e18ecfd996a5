"""`parallel3d topology`: what the cluster is, where the ranks go, what a step moves and costs.

Nothing here imports torch: the answer for 16,384 GPUs takes less than a second.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from parallel3d.config.checks.whole import check_config
from parallel3d.config.fields import check_fields, show
from parallel3d.config.schema import Config
from parallel3d.errors import UserError
from parallel3d.sizes.stages import layout_with_loops
from parallel3d.sizes.traffic import transfers
from parallel3d.sizes.transfer import Transfer
from parallel3d.topology.cluster.discover import discover, run_command
from parallel3d.topology.cluster.parts import Cluster
from parallel3d.topology.layout import Layout
from parallel3d.topology.map.assumptions import assume_batch, assume_model
from parallel3d.topology.map.facts import facts_of
from parallel3d.topology.map.output import check_free, write
from parallel3d.topology.map.svg import cluster_svg
from parallel3d.topology.map.text import cluster_line, job_line, write_report
from parallel3d.topology.placement.advice import warnings_for
from parallel3d.topology.placement.rank_file import Process, launch_ranks_by_file
from parallel3d.topology.placement.search import Candidate, place, search
from parallel3d.topology.price.links import DimLinks, classify
from parallel3d.topology.price.loads import loads_of
from parallel3d.topology.price.step import StepPrice, price_step
from parallel3d.topology.tiling import RankMapping

MADE_BY = "parallel3d topology"
READER_LEFT = 128 + signal.SIGPIPE


@dataclass(frozen=True)
class TopologyReport:
    """Everything that the command found out; the text, the JSON and the picture show this."""

    config: Config
    assumed: list[str]
    placement: RankMapping
    transfers: list[Transfer]
    links: dict[str, DimLinks]
    price: StepPrice
    candidates: list[Candidate]
    warnings: list[str]

    @property
    def cluster(self) -> Cluster:
        return self.placement.cluster

    @property
    def layout(self) -> Layout:
        return self.placement.layout

    @property
    def rank(self) -> int:
        return self.config.topology.rank


def topology(config: Config, typed: Sequence[str] | None = None) -> int:
    """Print the groups, their price and what to know; write the files asked for.

    `typed`: the overrides of the command line, which tell what the user chose himself; None (a
    caller with a configuration of its own) for: everything.

    Returns the exit code: 0, or 141 where the reader of a pipe left early. Raises UserError for
    what cannot work.
    """
    svg, json_file = config.topology.svg, config.topology.json
    check_free("topology.svg", svg, "data-by='parallel3d'", MADE_BY)
    check_free("topology.json", json_file, f'"made_by": "{MADE_BY}"', MADE_BY)
    report = make_report(config, typed, os.environ)
    facts = facts_of(report, MADE_BY)
    if json_file:
        write("topology.json", json_file, json.dumps(facts, indent=1, allow_nan=False) + "\n")
    if svg:
        write("topology.svg", svg, picture_of(report, facts))
    try:
        write_report(facts, [name for name in (svg, json_file) if name], sys.stdout)
        sys.stdout.flush()
    except BrokenPipeError:  # `| head` has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return READER_LEFT
    return 0


def make_report(
    config: Config, typed: Sequence[str] | None, environ: Mapping[str, str]
) -> TopologyReport:
    """Find out everything, print and write nothing.

    Raises:
        UserError: a cluster, layout, placement or model that cannot work together.
    """
    check_fields(config)
    typed = ("experiment",) if typed is None else typed
    config, assumed = assume_model(config, typed)
    cluster = the_cluster(config, environ)
    dp = _data_parallel(config, cluster)
    config, more = assume_batch(config, dp, typed)
    config = check_config(config, config.tp * config.pp * config.cp * dp, own_samples=True)
    layout = layout_with_loops(config)
    if config.topology.rank >= layout.world_size:
        raise UserError(
            f"topology.rank={config.topology.rank} must be below the {layout.world_size} ranks of "
            f"this layout; the nearest is topology.rank={layout.world_size - 1}."
        )
    sent = transfers(config, layout)
    if config.placement == "file":
        placement = _from_file(config, cluster, layout)
    else:
        placement = place(config, cluster, layout, sent)
    links = classify(placement)
    rows = config.topology.search
    found = search(cluster, layout, sent, priced=max(rows, 2)) if rows else []
    price, warnings = price_step(placement, sent), warnings_for(placement, links, sent)
    told = [*assumed, *more]
    return TopologyReport(config, told, placement, sent, links, price, found, warnings)


def the_cluster(config: Config, environ: Mapping[str, str]) -> Cluster:
    """The cluster as configured or, with another `cluster.source`, as discovered here."""
    world = None
    if config.dp is not None:
        world = config.tp * config.pp * config.cp * config.dp
    return discover(config.cluster, environ, run_command, world)


def _data_parallel(config: Config, cluster: Cluster) -> int:
    """dp as given, or as many replicas as the cluster holds; raises UserError if none fits."""
    replica = config.tp * config.pp * config.cp
    factors = f"tp={config.tp} · pp={config.pp} · cp={config.cp}"
    if replica * (config.dp or 1) <= cluster.size:
        return config.dp or cluster.size // replica
    if config.dp is not None:
        raise UserError(
            f"{factors} · dp={config.dp} needs {replica * config.dp} GPUs, and {cluster.name} has "
            f"{cluster.size}; the nearest is dp={cluster.size // replica or 1} "
            f"or cluster.nodes={-(-replica * config.dp // cluster.gpus_per_node)}."
        )
    raise UserError(
        f"{factors} needs {replica} GPUs, and {cluster.name} has {cluster.size}; the nearest is "
        f"cluster.nodes={-(-replica // cluster.gpus_per_node)}."
    )


def _from_file(config: Config, cluster: Cluster, layout: Layout) -> RankMapping:
    """The placement of `rank_file` over the GPUs of the cluster, named by node and local index."""
    path = Path(config.rank_file or "")  # check_config wants it named
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is not text"
        raise UserError(f"rank_file={show(str(path))} cannot be read: {reason}.") from None
    everywhere = [
        Process(cluster.node_name(node), local)
        for node, local in zip(cluster.node.tolist(), cluster.local.tolist(), strict=True)
    ][: layout.world_size]
    slots = np.asarray(launch_ranks_by_file(text, path.name, everywhere))
    return RankMapping(cluster, layout, slots, f"rank file {path.name}")


def picture_of(report: TopologyReport, facts: dict[str, Any]) -> str:
    """The map as an SVG document; `facts` are those of the report."""
    loads = loads_of(report.placement, report.price)
    sizes, _, job = job_line(facts).partition("; ")
    title = f"{report.cluster.name}: {sizes} on {report.cluster.size:,} GPUs"
    words = f"{cluster_line(facts)}. {job}"
    return cluster_svg(report.placement, report.rank, loads, title, words)
