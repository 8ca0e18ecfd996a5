"""A finished report as plain data: what topology.json holds, and what the text is made of.

Units: bytes and seconds of one optimizer step, 1e9 bytes a second, microseconds of latency. None
stands for a time that does not exist because no wire leads there.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np

import parallel3d
from parallel3d.topology import collective_costs as costs
from parallel3d.topology.cluster import Cluster, LinkClass
from parallel3d.topology.layout import DIMENSIONS

if TYPE_CHECKING:
    from parallel3d.topology.report import Report
    from parallel3d.topology.search import Candidate

WIRES = (LinkClass.NVLINK, LinkClass.RAIL, LinkClass.SPINE)


def facts_of(report: Report, made_by: str) -> dict[str, Any]:
    """Everything that the command shows, and the members of the chosen rank's groups."""
    price = report.price
    ports = {"nic": price.nic, "uplink": price.leaf_up}
    return {
        "made_by": made_by,
        "version": parallel3d.__version__,
        "assumed": report.assumed,
        "cluster": _cluster(report.cluster),
        "job": _job(report),
        "placement": report.placement.how,
        "seconds": _finite(price.seconds),
        "groups": [_group(report, dim) for dim in price.dims],
        "bytes": {
            kind.label: math.fsum(d.nbytes.get(kind, 0.0) for d in price.dims.values())
            for kind in WIRES
            if any(d.nbytes.get(kind) for d in price.dims.values())
        },
        "ports": {
            name: {"name": port.name, "bytes": port.nbytes}
            for name, port in ports.items()
            if port is not None
        },
        "search": _search(report),
        "routes": routes(report),
        "rank": _rank(report),
        "warnings": report.warnings,
    }


def _finite(seconds: float) -> float | None:
    return None if math.isinf(seconds) else seconds


def _cluster(cluster: Cluster) -> dict[str, Any]:
    domains = np.unique(cluster.domain).size
    units = np.unique(cluster.unit).size
    leaves = np.unique(cluster.unit * cluster.rails + cluster.rail_of).size
    wires = {"nvlink": cluster.nvlink, "rail": cluster.rail}
    if cluster.oversubscription is not None:
        wires["spine"] = cluster.spine
    return {
        "name": cluster.name,
        "origin": cluster.origin,
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


def _job(report: Report) -> dict[str, Any]:
    config, layout = report.config, report.layout
    return {
        "model": config.model.name,
        "precision": config.precision.name,
        "micro_batch_size": config.micro_batch_size,
        "num_microbatches": config.num_microbatches,
        "global_batch_size": config.global_batch_size,
        **{dim: layout.size(dim) for dim in DIMENSIONS},
        "ranks": layout.world_size,
        "idle_gpus": report.cluster.size - layout.world_size,
    }


def _group(report: Report, dim: str) -> dict[str, Any]:
    """One dimension: what its groups are, which links they use, what they move and cost."""
    priced, links = report.price.dims[dim], report.links.get(dim)
    fact: dict[str, Any] = {
        "dim": dim,
        "size": priced.paths.n,
        "groups": links.groups if links else report.layout.world_size // priced.paths.n,
        "algorithms": list(priced.algorithms),
        "seconds": _finite(priced.seconds),
        "bytes": {kind.label: nbytes for kind, nbytes in priced.nbytes.items() if nbytes},
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
        fact["pairs"] = {kind.label: count for kind, count in links.pairs.items()}
        fact["in_domain"], fact["on_rail"] = links.in_domain, links.on_rail
        fact["crossing"] = links.crossing
        fact["offending"] = [str(pair) for pair in links.offending]
    return fact


def _search(report: Report) -> list[dict[str, Any]]:
    """The first `topology.search` candidates, and the default order wherever it stands."""
    rows = report.config.topology.search
    shown = [c for i, c in enumerate(report.candidates) if i < rows or c.is_default]
    return [_candidate(c) for c in shown] if rows else []


def _candidate(candidate: Candidate) -> dict[str, Any]:
    return {
        "placement": str(candidate),
        "override": "default" if candidate.is_default else "auto",
        "tiling": str(candidate.tiling),
        "seconds": _finite(candidate.seconds),
        "estimated": candidate.price is None,
        "default": candidate.is_default,
    }


def _rank(report: Report) -> dict[str, Any]:
    layout, rank = report.layout, report.rank
    slot = int(report.placement.slots[rank])
    return {
        "rank": rank,
        "coordinates": layout.coordinates(rank)._asdict(),
        "gpu": report.cluster.slot_name(slot),
        "groups": {d: layout.group_of(rank, d) for d in DIMENSIONS if layout.size(d) > 1},
    }


# --- between rails ---------------------------------------------------------------------------


def routes(report: Report) -> dict[str, Any] | None:
    """The two ways of one message between rails, priced; None where there is one rail or domain.

    The message is the largest that this job sends between rails or, where it sends none, one from
    the first GPU to another rail of another domain, as long as a pipeline message. By the spine
    it takes one hop; forwarded it goes over NVLink to the GPU on the destination's rail, all of it,
    and from there along that rail.
    """
    cluster = report.cluster
    found = _crossing(report) or _example(report)
    if found is None:
        return None
    source, target, nbytes, what, happens = found
    ways = {
        "spine": _by_spine(cluster, source, target, nbytes),
        "nvlink_and_rail": _forwarded(cluster, source, target, nbytes),
    }
    possible = {name: seconds for name, seconds in ways.items() if seconds is not None}
    return {
        "from": cluster.slot_name(source),
        "to": cluster.slot_name(target),
        "rails": [int(cluster.rail_of[source]), int(cluster.rail_of[target])],
        "bytes": nbytes,
        "what": what,
        "happens": happens,
        "seconds": ways,
        "cheaper": min(possible, key=lambda k: possible[k]) if possible else None,
    }


def _crossing(report: Report) -> tuple[int, int, int, str, bool] | None:
    """The largest message between two rails that this job sends: source, target, bytes, what."""
    found = []
    for dim, links in report.links.items():
        if dim not in report.price.dims:
            continue
        for pair in links.offending:
            ends = [int(report.placement.slots[r]) for r in pair.ranks]
            if report.cluster.rail_of[ends[0]] == report.cluster.rail_of[ends[1]]:
                continue
            for p in report.price.dims[dim].transfers:
                if p.algorithm == "hierarchical":
                    continue  # in two levels the bytes stay on their rails
                # A ring passes the buffer on in as many pieces as it has members.
                pieces = 1 if p.transfer.op == "send_recv" else links.size
                nbytes = -(-p.transfer.nbytes // pieces)
                found.append((nbytes, ends[0], ends[1], f"{dim}, {p.transfer.what}"))
            break
    if not found:
        return None
    nbytes, source, target, what = max(found)
    return source, target, nbytes, what, True


def _example(report: Report) -> tuple[int, int, int, str, bool] | None:
    cluster = report.cluster
    others = (cluster.rail_of != cluster.rail_of[0]) & (cluster.domain != cluster.domain[0])
    near = others & (cluster.unit == cluster.unit[0])
    slots = np.flatnonzero(near if near.any() else others)
    if not slots.size:
        return None
    sent = [t.nbytes for t in report.transfers if t.op == "send_recv"]
    return 0, int(slots[0]), max(sent, default=1_000_000), "an example", False


def _by_spine(cluster: Cluster, source: int, target: int, nbytes: int) -> float | None:
    kind = LinkClass(int(cluster.link_class(source, target)))
    return None if kind is LinkClass.NONE else costs.send_recv(nbytes, cluster.link(kind))


def _forwarded(cluster: Cluster, source: int, target: int, nbytes: int) -> float | None:
    """Seconds over the source's NVLink and the target's rail; None without a GPU to forward."""
    same = cluster.domain == cluster.domain[source]
    relays = np.flatnonzero(same & (cluster.rail_of == cluster.rail_of[target]))
    if not relays.size:
        return None
    kind = LinkClass(int(cluster.link_class(int(relays[0]), target)))
    if kind is LinkClass.NONE:
        return None
    first = costs.send_recv(nbytes, cluster.nvlink)
    return first + costs.send_recv(nbytes, cluster.link(kind))
