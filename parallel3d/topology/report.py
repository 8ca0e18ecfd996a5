"""`parallel3d topology`: finds the cluster, places ranks, prices a step; shows it.

Bytes and seconds are those of one optimizer step. Imports no torch.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import signal
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

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
from parallel3d.topology.layout import Layout
from parallel3d.topology.links import DimLinks, Loads, Route, classify, loads_of, routes
from parallel3d.topology.placement.advice import warnings_for
from parallel3d.topology.placement.placed_ranks import Process, ranks_of_file
from parallel3d.topology.placement.search import Candidate, place, search
from parallel3d.topology.svg import cluster_svg
from parallel3d.topology.text import cluster_line, job_line, write_report
from parallel3d.topology.tiling import RankMapping

MADE_BY = "parallel3d topology"
READER_LEFT = 128 + signal.SIGPIPE
SCALARS = 4096  # bytes up to which a message is pure latency: a loss, a norm


class BetweenRails(NamedTuple):
    """A message between two rails: its GPUs, its content (None: an example), and its ways, cheapest
    first."""

    source: int
    target: int
    nbytes: int
    what: str | None
    ways: list[Route]


@dataclass(frozen=True)
class TopologyReport:
    """Results of the command, shown as text, JSON and picture."""

    config: Config
    assumed: list[str]
    placement: RankMapping
    transfers: list[Transfer]
    candidates: list[Candidate]

    @property
    def cluster(self) -> Cluster:
        return self.placement.cluster

    @property
    def layout(self) -> Layout:
        return self.placement.layout

    @cached_property
    def links(self) -> dict[str, DimLinks]:
        return classify(self.placement)

    @cached_property
    def price(self) -> StepPrice:
        return price_step(self.placement, self.transfers)

    @cached_property
    def loads(self) -> Loads:
        return loads_of(self.placement, self.price)

    @cached_property
    def warnings(self) -> list[str]:
        """Raises UserError if neighbours have no wire between them."""
        return warnings_for(self.placement, self.links, self.transfers)

    @property
    def shown_candidates(self) -> list[Candidate]:
        """The first `topology.search` candidates, and the default order in any case."""
        rows = self.config.topology.search
        return self.candidates[:rows] + [c for c in self.candidates[rows:] if c.is_default]

    @property
    def between_rails(self) -> BetweenRails | None:
        """The largest message of this job between rails or, if there is none, one from the first
        GPU to another rail and domain, as large as a pipeline message; None on a single rail."""
        found = self._largest_between_rails() or self._example()
        if found is None:
            return None
        nbytes, source, target, what = found
        return BetweenRails(*found[1:3], nbytes, what, routes(self.cluster, source, target, nbytes))

    def _largest_between_rails(self) -> tuple[int, int, int, str | None] | None:
        found = []
        rail, slots = self.cluster.rail_of, self.placement.slots
        for dim, links in self.links.items():
            pairs = ([int(slots[rank]) for rank in pair.ranks] for pair in links.offending)
            # The first neighbours on different rails and domains.
            ends = next(((a, b) for a, b in pairs if rail[a] != rail[b]), None)
            if ends is None or dim not in self.price.dims:
                continue
            for p in self.price.dims[dim].transfers:
                # In two levels the bytes stay on their rails. A ring sends the buffer in shards.
                if p.algorithm != "hierarchical":
                    shards = 1 if p.transfer.op == "send_recv" else links.size
                    nbytes = -(-p.transfer.nbytes // shards)
                    found.append((nbytes, *ends, f"{dim}: {p.transfer.what}"))
        return max((message for message in found if message[0] >= SCALARS), default=None)

    def _example(self) -> tuple[int, int, int, str | None] | None:
        cluster = self.cluster
        others = (cluster.rail_of != cluster.rail_of[0]) & (cluster.domain != cluster.domain[0])
        near = others & (cluster.unit == cluster.unit[0])
        slots = np.flatnonzero(near if near.any() else others)
        if not slots.size:
            return None
        sent = [t.nbytes for t in self.transfers if t.op == "send_recv"]
        return max(sent, default=1_000_000), 0, int(slots[0]), None

    @property
    def picture(self) -> str:
        """The map as an SVG document."""
        sizes, _, job = job_line(self).partition("; ")
        title = f"{self.cluster.name}: {sizes} on {self.cluster.size:,} GPUs"
        words = f"{cluster_line(self.cluster)}. {job}"
        return cluster_svg(self.placement, self.config.topology.rank, self.loads, title, words)


def facts_of(report: TopologyReport) -> dict[str, Any]:
    """Returns the content of topology.json: what is shown, as the report's objects hold it."""
    price, rank = report.price, report.config.topology.rank
    return {
        "made_by": MADE_BY,
        "version": parallel3d.__version__,
        "assumed": report.assumed,
        "cluster": _plain(report.cluster),
        "layout": _plain(report.layout),
        "placement": report.placement.how,
        "slots": report.placement.slots.tolist(),
        "seconds": _plain(price.seconds),
        "bytes": _plain(price.nbytes),
        "groups": {
            dim: {"seconds": _plain(of_dim.seconds), "price": _plain(of_dim)}
            | {"links": _plain(report.links.get(dim))}
            for dim, of_dim in price.dims.items()
        },
        "busiest": report.loads.busiest(report.cluster),
        "search": [
            {"placement": str(c), "default": c.is_default, "seconds": _plain(c.seconds)}
            for c in report.shown_candidates
        ],
        "between_rails": _plain(report.between_rails),
        "rank": {"rank": rank, **report.layout.coordinates(rank)._asdict()},
        "warnings": report.warnings,
    }


def _plain(value: Any) -> Any:
    """Returns dataclasses and tuples with names as dicts, links by their names; None: infinite."""
    if dataclasses.is_dataclass(value):
        value = {f.name: getattr(value, f.name) for f in dataclasses.fields(value)}
    elif hasattr(value, "_asdict"):
        value = value._asdict()
    if isinstance(value, dict):
        return {_plain(key): _plain(item) for key, item in value.items()}
    if isinstance(value, LinkClass):
        return value.label
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return None if value == math.inf else value


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
    if json_file:
        text = json.dumps(facts_of(report), indent=1, allow_nan=False)
        write("topology.json", json_file, text + "\n")
    if svg:
        write("topology.svg", svg, report.picture)
    try:
        write_report(report, [name for name in (svg, json_file) if name], sys.stdout)
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
    found = search(cluster, layout, sent) if config.topology.search else []
    report = TopologyReport(config, [*assumed, *more], placement, sent, found)
    _ = report.warnings  # refuses what has no wire
    return report


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
