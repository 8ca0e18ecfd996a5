"""`parallel3d topology`: finds the cluster, places ranks, prices a step; facts as plain data.

Units of the facts: bytes and seconds of one optimizer step, 1e9 bytes a second, microseconds of
latency. A time of None: no wire leads there. Imports no torch.
"""

from __future__ import annotations

import json
import math
import os
import signal
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

import parallel3d
from parallel3d.config.checks.whole import check_config
from parallel3d.config.fields import check_fields
from parallel3d.config.schema import Config
from parallel3d.errors import UserError
from parallel3d.estimate.balance import layout_with_loops
from parallel3d.estimate.network import StepPrice, Transfer, price_step
from parallel3d.estimate.traffic import transfers
from parallel3d.topology.assumptions import assume_batch, assume_model, check_free, write
from parallel3d.topology.cluster.discover import discover, run_command
from parallel3d.topology.cluster.parts import Cluster, LinkClass
from parallel3d.topology.layout import DIMENSIONS, Layout
from parallel3d.topology.links import DimLinks, Loads, classify, loads_of, routes
from parallel3d.topology.placement.advice import warnings_for
from parallel3d.topology.placement.placed_ranks import Process, ranks_of_file
from parallel3d.topology.placement.search import Candidate, place, search
from parallel3d.topology.svg import cluster_svg
from parallel3d.topology.text import cluster_line, job_line, write_report
from parallel3d.topology.tiling import RankMapping

MADE_BY = "parallel3d topology"
READER_LEFT = 128 + signal.SIGPIPE
SCALARS = 4096  # bytes up to which a message is pure latency: a loss, a norm
WIRES = (LinkClass.NVLINK, LinkClass.RAIL, LinkClass.SPINE)


@dataclass(frozen=True)
class TopologyReport:
    """Results of the command, shown as text, JSON and picture."""

    config: Config
    assumed: list[str]
    placement: RankMapping
    transfers: list[Transfer]
    links: dict[str, DimLinks]
    price: StepPrice
    loads: Loads
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


def facts_of(report: TopologyReport, made_by: str) -> dict[str, Any]:
    """Returns everything that text and topology.json contain."""
    price, nbytes = report.price, report.price.nbytes
    return {
        "made_by": made_by,
        "version": parallel3d.__version__,
        "assumed": report.assumed,
        "cluster": _cluster(report.cluster),
        "job": _job(report),
        "placement": report.placement.how,
        "seconds": _finite(price.seconds),
        "groups": [_group(report, dim) for dim in price.dims],
        "bytes": {report.cluster.label(kind): nbytes[kind] for kind in WIRES if kind in nbytes},
        "ports": {
            port: {"name": name, "bytes": sent}
            for port, (name, sent) in report.loads.busiest(report.cluster).items()
        },
        "search": _search(report),
        "routes": _routes(report),
        "rank": _rank(report),
        "warnings": report.warnings,
    }


def _finite(seconds: float) -> float | None:
    return None if math.isinf(seconds) else seconds


def _cluster(cluster: Cluster) -> dict[str, Any]:
    domains = np.unique(cluster.domain).size
    units = np.unique(cluster.unit).size
    leaves = np.unique(cluster.leaf).size
    wires = {cluster.intra: cluster.nvlink, "rail": cluster.rail}
    if cluster.oversubscription is not None:
        wires["spine"] = cluster.spine
    return {
        "name": cluster.name,
        "origin": cluster.origin,
        "intra": cluster.intra_name,
        "network": cluster.network,
        "nodes": cluster.nodes,
        "gpus_per_node": cluster.gpus_per_node,
        "gpus": cluster.size,
        "domains": domains,
        "domain_gpus": int(np.bincount(np.unique(cluster.domain, return_inverse=True)[1]).max()),
        "rails": cluster.rails,
        "units": units,
        "leaf_switches": leaves,
        "oversubscription": cluster.oversubscription,
        "wires": {
            name: {"gb_per_s": wire.gb_per_s, "latency_us": wire.latency_us}
            for name, wire in wires.items()
        },
    }


def _job(report: TopologyReport) -> dict[str, Any]:
    config, layout = report.config, report.layout
    return {
        "model": config.model.name,
        "precision": config.precision.name,
        "micro_batch_size": config.micro_batch_size,
        "num_microbatches": config.num_microbatches,
        "global_batch_size": config.global_batch_size,
        **{dim: layout.size(dim) for dim in DIMENSIONS},
        "vpp": config.vpp,
        "schedule": config.schedule.name,
        "ranks": layout.world_size,
        "idle_gpus": report.cluster.size - layout.world_size,
    }


def _group(report: TopologyReport, dim: str) -> dict[str, Any]:
    """Returns one dimension's groups, links, bytes and seconds."""
    priced, links, label = report.price.dims[dim], report.links.get(dim), report.cluster.label
    fact: dict[str, Any] = {
        "dim": dim,
        "size": priced.paths.n,
        "groups": links.groups if links else report.layout.world_size // priced.paths.n,
        "algorithms": list(priced.algorithms),
        "seconds": _finite(priced.seconds),
        "bytes": {label(kind): nbytes for kind, nbytes in priced.nbytes.items() if nbytes},
        "transfers": [
            {
                "op": p.transfer.op,
                "what": p.transfer.what,
                "bytes": p.transfer.nbytes,
                "count": p.transfer.count,
                "algorithm": p.algorithm,
                "seconds": _finite(p.seconds),
            }
            for p in priced.transfers
        ],
    }
    if links:
        fact["pairs"] = {label(kind): count for kind, count in links.pairs.items()}
        fact["in_domain"], fact["on_rail"] = links.in_domain, links.on_rail
        fact["crossing"] = links.crossing
        fact["offending"] = [str(pair) for pair in links.offending]
    return fact


def _search(report: TopologyReport) -> list[dict[str, Any]]:
    """Returns the first `topology.search` candidates, and the default order in any case."""
    rows = report.config.topology.search
    return [
        {
            "placement": str(candidate),
            "override": "default" if candidate.is_default else "auto",
            "tiling": str(candidate.tiling),
            "seconds": _finite(candidate.seconds),
            "default": candidate.is_default,
        }
        for place, candidate in enumerate(report.candidates)
        if rows and (place < rows or candidate.is_default)
    ]


def _rank(report: TopologyReport) -> dict[str, Any]:
    layout, rank = report.layout, report.rank
    slot = int(report.placement.slots[rank])
    return {
        "rank": rank,
        "coordinates": layout.coordinates(rank)._asdict(),
        "gpu": report.cluster.slot_name(slot),
        "groups": {d: layout.group_of(rank, d) for d in DIMENSIONS if layout.size(d) > 1},
    }


def _routes(report: TopologyReport) -> dict[str, Any] | None:
    """Returns the ways of one message between rails, cheapest first; None on a single rail.

    The largest message of this job between rails or, if there is none, one from the first GPU to
    another rail and domain, as large as a pipeline message.
    """
    cluster = report.cluster
    found = _crossing(report) or _example(report)
    if found is None:
        return None
    nbytes, source, target, what = found
    return {
        "from": cluster.slot_name(source),
        "to": cluster.slot_name(target),
        "rails": [int(cluster.rail_of[source]), int(cluster.rail_of[target])],
        "bytes": nbytes,
        "what": what,
        "ways": [
            {
                # node0 GPU 0 -nvlink- node0 GPU 1 -rail- node1 GPU 1
                "path": cluster.slot_name(source)
                + "".join(
                    f" -{cluster.label(hop)}- {cluster.slot_name(slot)}"
                    for hop, slot in zip(route.hops, route.slots[1:], strict=True)
                ),
                "hops": [cluster.label(hop) for hop in route.hops],
                "seconds": route.seconds,
            }
            for route in routes(cluster, source, target, nbytes)
        ],
    }


def _crossing(report: TopologyReport) -> tuple[int, int, int, str | None] | None:
    """Returns (bytes, from, to, content) of the job's largest message between two rails; None if
    there are only scalars."""
    found = []
    rail, slots = report.cluster.rail_of, report.placement.slots
    for dim, links in report.links.items():
        priced = report.price.dims.get(dim)
        pairs = ([int(slots[rank]) for rank in pair.ranks] for pair in links.offending)
        # The first neighbours on different rails and domains.
        ends = next(((a, b) for a, b in pairs if rail[a] != rail[b]), None)
        if priced is None or ends is None:
            continue
        for p in priced.transfers:
            # In two levels the bytes stay on their rails. A ring sends the buffer in `size` shards.
            if p.algorithm != "hierarchical":
                shards = 1 if p.transfer.op == "send_recv" else links.size
                found.append((-(-p.transfer.nbytes // shards), *ends, f"{dim}: {p.transfer.what}"))
    largest = max(found, default=None)
    return largest if largest and largest[0] >= SCALARS else None


def _example(report: TopologyReport) -> tuple[int, int, int, None] | None:
    cluster = report.cluster
    others = (cluster.rail_of != cluster.rail_of[0]) & (cluster.domain != cluster.domain[0])
    near = others & (cluster.unit == cluster.unit[0])
    slots = np.flatnonzero(near if near.any() else others)
    if not slots.size:
        return None
    sent = [t.nbytes for t in report.transfers if t.op == "send_recv"]
    return max(sent, default=1_000_000), 0, int(slots[0]), None


def topology(config: Config, typed: Sequence[str] | None = None) -> int:
    """Prints the groups, their price and warnings; writes the files asked for.

    `typed`: the command line's overrides, i.e. the user's own choices; None counts as all chosen.
    Returns the exit code: 0, or 141 if the reader of a pipe left. Raises UserError for what cannot
    work.
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
    except BrokenPipeError:  # `| head` has read enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return READER_LEFT
    return 0


def make_report(
    config: Config, typed: Sequence[str] | None, environ: Mapping[str, str]
) -> TopologyReport:
    """Finds and prices everything without output. Raises UserError for what cannot work."""
    check_fields(config)
    typed = ("experiment",) if typed is None else typed
    config, assumed = assume_model(config, typed)
    cluster = the_cluster(config, environ)
    dp = _data_parallel(config, cluster)
    config, more = assume_batch(config, dp, typed)
    config = check_config(config, config.replica_size * dp, own_samples=True)
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
    found = search(cluster, layout, sent) if rows else []
    price, warnings = price_step(placement, sent), warnings_for(placement, links, sent)
    told, loads = [*assumed, *more], loads_of(placement, price)
    return TopologyReport(config, told, placement, sent, links, price, loads, found, warnings)


def the_cluster(config: Config, environ: Mapping[str, str]) -> Cluster:
    """Returns the cluster as configured or, with another `cluster.source`, as discovered here."""
    world = None
    if config.dp is not None:
        world = config.world_size
    return discover(config.cluster, environ, run_command, world)


def _data_parallel(config: Config, cluster: Cluster) -> int:
    """Returns dp as given, or as many replicas as fit; raises UserError if none does."""
    replica = config.replica_size
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
    """Returns the rank mapping of `rank_file` over the cluster's GPUs by node and local index."""
    everywhere = [
        Process(cluster.node_name(node), local)
        for node, local in zip(cluster.node.tolist(), cluster.local.tolist(), strict=True)
    ][: layout.world_size]
    slots = np.asarray(ranks_of_file(config, everywhere))
    return RankMapping(cluster, layout, slots, f"rank file {Path(str(config.rank_file)).name}")


def picture_of(report: TopologyReport, facts: dict[str, Any]) -> str:
    """Returns the map as an SVG document; `facts` are those of the report."""
    sizes, _, job = job_line(facts).partition("; ")
    title = f"{report.cluster.name}: {sizes} on {report.cluster.size:,} GPUs"
    words = f"{cluster_line(facts)}. {job}"
    return cluster_svg(report.placement, report.rank, report.loads, title, words)
