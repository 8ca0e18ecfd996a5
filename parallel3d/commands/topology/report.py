"""Runs `parallel3d topology`: finds the cluster, places ranks, prices a step, shows the results.

Bytes and seconds are per optimizer step. This module does not import torch.
"""

from __future__ import annotations

import dataclasses
import math
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple, TextIO

import numpy as np

import parallel3d
from parallel3d.blueprint.blueprint import Blueprint
from parallel3d.blueprint.cluster import Cluster, LinkClass
from parallel3d.blueprint.collectives import Transfer
from parallel3d.blueprint.layout import Layout
from parallel3d.blueprint.rank_mapping import RankMapping
from parallel3d.config.fields import check_fields
from parallel3d.errors import UserError
from parallel3d.estimate.network import StepPrice, price_step
from parallel3d.estimate.traffic import transfers
from parallel3d.resolve import blueprint_of, layout_of
from parallel3d.run_config import Config, check_config
from parallel3d.text import (
    aligned,
    byte_text,
    count,
    labelled,
    ms,
    percent,
    wrap,
)
from parallel3d.topology.assumptions import assume_model, chosen_keys, full_batch
from parallel3d.topology.cluster.discover import discover, run_command
from parallel3d.topology.keys import TopologyConfig
from parallel3d.topology.links import (
    DimLinks,
    Loads,
    Route,
    classify,
    loads_of,
    routes,
    warnings_for,
)
from parallel3d.topology.picture import cluster_svg
from parallel3d.topology.placed_ranks import Process, ranks_of_file
from parallel3d.topology.search import Candidate, place, search

MADE_BY = "parallel3d topology"
LEAST_WIDTH = 40
# smaller savings, as a share of the communication, are within the error of the prediction
WORTH_SAYING = 0.005


class BetweenRails(NamedTuple):
    """A message between two rails: its GPUs, its bytes, and its routes, cheapest first."""

    source: int
    target: int
    nbytes: int
    ways: list[Route]


@dataclass(frozen=True)
class TopologyReport:
    """The results of the command, which are shown as text, JSON and a picture."""

    blueprint: Blueprint
    settings: TopologyConfig
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
        """Returns the warnings. Raises UserError if neighbours have no wire between them."""
        return warnings_for(self.placement, self.links, self.transfers)

    @property
    def shown_candidates(self) -> list[Candidate]:
        """Returns the first `topology.search` candidates, and the default order in any case."""
        rows = self.settings.search
        return self.candidates[:rows] + [c for c in self.candidates[rows:] if c.is_default]

    @property
    def between_rails(self) -> BetweenRails | None:
        """Returns an example of a message between rails, or None if no two GPUs are suitable.

        The message goes from the first GPU to a GPU of another rail and domain, with the bytes that
        one pipeline stage sends to the next (1 MB without pipeline stages).
        """
        cluster = self.cluster
        others = (cluster.rail_of != cluster.rail_of[0]) & (cluster.domain != cluster.domain[0])
        near = others & (cluster.unit == cluster.unit[0])
        slots = np.flatnonzero(near if near.any() else others)
        if not slots.size:
            return None
        sent = [t.nbytes for t in self.transfers if t.op == "send_recv"]
        nbytes, target = max(sent, default=1_000_000), int(slots[0])
        return BetweenRails(0, target, nbytes, routes(cluster, 0, target, nbytes))


def make_report(
    config: Config,
    typed: Sequence[str] | None,
    environ: Mapping[str, str],
    settings: TopologyConfig | None = None,
) -> TopologyReport:
    """Creates the report, without output. Raises UserError if the configuration cannot work.

    `typed` are the overrides of the command line; with None, every key counts as chosen.
    """
    settings = settings or TopologyConfig()
    check_fields(config)
    typed = ("experiment",) if typed is None else typed
    config, assumed = assume_model(config, typed)
    world = None if config.dp is None else config.world_size
    cluster = discover(config.cluster, environ, run_command, world)
    dp = _data_parallel(layout_of(config), config.dp, cluster)
    if not {"experiment", "global_batch_size"} & chosen_keys(typed):
        batch, told = full_batch(config.micro_batch_size, config.pp, dp)
        config, assumed = dataclasses.replace(config, global_batch_size=batch), [*assumed, told]
    config = check_config(config, config.replica_size * dp, own_samples=True)
    blueprint = blueprint_of(config)
    layout = blueprint.looped_layout
    if settings.rank >= layout.world_size:
        raise UserError(
            f"topology.rank={settings.rank} must be below the {layout.world_size} ranks of "
            f"this layout; the nearest is topology.rank={layout.world_size - 1}."
        )
    sent = transfers(config, layout)
    if config.placement == "file":
        placement = _from_file(str(config.rank_file), cluster, layout)
    else:
        placement = place(config.placement, cluster, layout, sent)
    found = search(cluster, layout, sent) if settings.search else []
    report = TopologyReport(blueprint, settings, assumed, placement, sent, found)
    _ = report.warnings  # raises UserError for a missing wire
    return report


def _data_parallel(layout: Layout, dp: int | None, cluster: Cluster) -> int:
    """Returns `dp`, or else the number of replicas that fit. Raises UserError for too few GPUs."""
    tp = layout.tp
    pp = layout.pp
    cp = layout.cp
    replica, factors = tp * pp * cp, f"tp={tp} · pp={pp} · cp={cp}"
    if replica * (dp or 1) <= cluster.size:
        return dp or cluster.size // replica
    if dp is not None:
        raise UserError(
            f"{factors} · dp={dp} needs {replica * dp} GPUs, but {cluster.name} has "
            f"{cluster.size}; the nearest is dp={cluster.size // replica or 1} "
            f"or cluster.nodes={-(-replica * dp // cluster.gpus_per_node)}."
        )
    raise UserError(
        f"{factors} needs {replica} GPUs, but {cluster.name} has {cluster.size}; the nearest is "
        f"cluster.nodes={-(-replica // cluster.gpus_per_node)}."
    )


def _from_file(rank_file: str, cluster: Cluster, layout: Layout) -> RankMapping:
    """Returns the rank mapping of `rank_file`, which names GPUs by node and local index."""
    everywhere = [
        Process(cluster.node_name(node), local)
        for node, local in zip(cluster.node.tolist(), cluster.local.tolist(), strict=True)
    ][: layout.world_size]
    slots = np.asarray(ranks_of_file(rank_file, everywhere))
    return RankMapping(cluster, layout, slots, f"rank file {Path(rank_file).name}")


def facts_of(report: TopologyReport) -> dict[str, Any]:
    """Returns the content of the JSON file: all values that are shown, without rounding."""
    price, rank = report.price, report.settings.rank
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
    """Returns a value as plain data for JSON.

    Converts dataclasses and named tuples to dicts, link classes to their labels, and infinity to
    None.
    """
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


def picture_of(report: TopologyReport) -> str:
    """Returns the picture of the cluster as an SVG document."""
    sizes, _, job = job_line(report).partition("; ")
    title = f"{report.cluster.name}: {sizes} on {report.cluster.size:,} GPUs"
    words = f"{cluster_line(report.cluster)}. {job}"
    return cluster_svg(report.placement, report.settings.rank, report.loads, title, words)


def write_report(report: TopologyReport, written: Sequence[str], stream: TextIO) -> None:
    """Writes all results, as wide as the terminal (or COLUMNS, or 80).

    `written` names the files that the command has written.
    """
    width = max(LEAST_WIDTH, shutil.get_terminal_size((80, 24)).columns)
    tables = (heading, group_table, search_table, route_lines, warning_lines)
    parts = [*(table(report, width) for table in tables), [f"wrote {name}" for name in written]]
    stream.write("\n\n".join("\n".join(part) for part in parts if part) + "\n")


def cluster_line(c: Cluster) -> str:
    """Formats `16 nodes of 8 GPUs = 128 GPUs, 16 NVLink domains of 8, 8 rails, ...`"""
    domains = np.unique(c.domain, return_counts=True)[1]
    units, leaves = np.unique(c.unit).size, count(np.unique(c.leaf).size, "leaf switch")
    spine = "no spine" if c.oversubscription is None else f"spine {c.oversubscription:g}:1"
    nodes = f"{count(c.nodes, 'node')}, {count(c.size, 'GPU')}"
    if c.nodes * c.gpus_per_node == c.size:
        nodes = f"{count(c.nodes, 'node')} of {count(c.gpus_per_node, 'GPU')} = {c.size:,}"
    return (
        f"{nodes}, {count(domains.size, c.intra_name + ' domain')} of {domains.max()}, "
        f"{count(c.rails, 'rail')}, {count(units, 'unit')} with {leaves}, {spine}"
    )


def job_line(report: TopologyReport) -> str:
    """Formats `tp=8 pp=4 dp=4; llama3_70b in fp32; 64 sequences a step ...; placement: ...`"""
    blueprint = report.blueprint
    pipeline = report.blueprint.pipeline
    layout = report.layout
    numbers = {"tp": layout.tp, "cp": layout.cp, "pp": layout.pp, "vpp": pipeline.chunks}
    numbers |= {"dp": layout.dp, "ep": layout.ep}
    may_miss = ("cp", "vpp", "ep")
    sizes = " ".join(f"{d}={n}" for d, n in numbers.items() if n > 1 or d not in may_miss)
    if pipeline.chunks > 1:
        sizes += f" schedule={pipeline.name}"
    return (
        f"{sizes}; {blueprint.model.name} in {blueprint.precision.name}; "
        f"{blueprint.global_batch_size:,} sequences a step = {blueprint.micro_batch_size} × "
        f"{blueprint.microbatches} micro-batches × dp; placement: {report.placement.how}"
    )


def heading(report: TopologyReport, width: int) -> list[str]:
    """Returns lines on the cluster, its wires, the job, assumptions, and the chosen rank."""
    c = report.cluster
    layout = report.layout
    rank = report.settings.rank
    origin = f" ({c.origin})" if c.origin != "the configuration" else ""
    wires = {c.intra: c.nvlink, "rail": c.rail}
    if c.oversubscription is not None:
        wires["spine"] = c.spine
    speeds = [f"{k} {w.gb_per_s:g} GB/s {w.latency_us:g} µs" for k, w in wires.items()]
    idle, slot = c.size - layout.world_size, int(report.placement.slots[rank])
    rows = {
        "cluster": f"{c.name}{origin}: {cluster_line(c)}",
        "wires": f"{', '.join(speeds)}; per GPU, in one direction"
        + (", NICs over TCP" if c.network == "socket" else ""),
        "job": job_line(report),
        "assumed": " ".join(report.assumed)
        and f"{' '.join(report.assumed)}, because these keys were not given",
        "idle": idle and f"{layout.world_size:,} of {c.size:,} GPUs hold ranks, {idle:,} idle",
        "rank": f"{rank} = ({layout.named(rank)}) on "
        + "; ".join([c.slot_name(slot), *layout.named_groups(rank)]),
    }
    return [line for label, text in rows.items() if text for line in labelled(label, text, width)]


def group_table(report: TopologyReport, width: int) -> list[str]:
    """Returns a table with a row per dimension: size, groups, links, algorithm, bytes, time."""
    price, label = report.price, report.cluster.label
    rows = [("group", "size", "groups", "links of neighbours", "algorithm", "bytes", "ms")]
    for dim, of_dim in price.dims.items():
        n, links = of_dim.paths.n, report.links.get(dim)
        groups = links.groups if links else report.layout.world_size // n
        pairs = links.pairs if links else {}
        ways = [f"{label(k)} {percent(c / sum(pairs.values()))}" for k, c in pairs.items()]
        sums = (byte_text(sum(of_dim.nbytes.values())), ms(of_dim.seconds))
        words = (", ".join(ways) or "any", ", ".join(of_dim.algorithms))
        rows.append((dim, f"{n:,}", f"{groups:,}", *words, *sums))
    total = (byte_text(sum(price.nbytes.values())), ms(price.seconds))
    rows.append(("all", "", "", "", "", *total))
    head = "one step's communication: bytes of all ranks, time if nothing overlaps"
    by_link = ", ".join(f"{label(kind)} {byte_text(n)}" for kind, n in price.nbytes.items())
    lines = [*wrap(head, width), *aligned(rows, "<>><<>>")]
    lines += labelled("bytes", f"{by_link or 'none'} a step", width)
    for name, sent in report.loads.busiest(report.cluster).values():
        lines += labelled("busiest", f"{name}: {byte_text(sent)} a step", width)
    return lines


def search_table(report: TopologyReport, width: int) -> list[str]:
    """Returns a table of the best placements, compared with the default order."""
    rows = report.shown_candidates
    if not rows:
        return []
    default = next(row for row in rows if row.is_default).seconds
    table = [("placement", "predicted ms", "of the default")]
    for row in rows:
        known = math.isfinite(row.seconds) and 0 < default < math.inf
        share = f"{100 * row.seconds / default:.1f} %" if known else "–"
        table.append((str(row), ms(row.seconds), share))
    lines = ["placement search, cheapest first", *aligned(table, "<>>")]
    best, here = rows[0], report.price.seconds
    if best.seconds < here * (1 - WORTH_SAYING):
        saved = f" saves {percent(1 - best.seconds / here)} of the communication time"
        override = "default" if best.is_default else "auto"
        gain = saved if math.isfinite(here) else ""
        lines += wrap(f"placement={override}{gain}: {best}", width)
    return lines


def route_lines(report: TopologyReport, width: int) -> list[str]:
    """Returns lines on the routes of a message between rails, with their prices."""
    message, c = report.between_rails, report.cluster
    if message is None:
        return []
    size = byte_text(message.nbytes)
    a, b = (f"{c.slot_name(s)} (rail {c.rail_of[s]})" for s in (message.source, message.target))
    lines = wrap(f"a message between rails, for example {size} from {a} to {b}:", width)
    for way in message.ways:
        path = c.slot_name(way.slots[0])  # node0 GPU 0 -nvlink- node0 GPU 1 -rail- node1 GPU 1
        for hop, slot in zip(way.hops, way.slots[1:], strict=True):
            path += f" -{c.label(hop)}- {c.slot_name(slot)}"
        lines += wrap(f"{ms(way.seconds)} ms  {path}", width, "  ", "    ")
    return lines if message.ways else [*lines, "  there is no route"]


def warning_lines(report: TopologyReport, width: int) -> list[str]:
    warnings = (f"warning: {text}" for text in report.warnings)
    return [line for text in warnings for line in wrap(text, width, rest="  ")]
