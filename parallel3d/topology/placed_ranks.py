"""Assigns ranks to processes by rank file or rank mapping, before torch.distributed starts.

A launcher gives each process an arbitrary number, its *launch rank*. Each process has a *slot*, a
GPU of the cluster, and a rank mapping decides which slot holds which rank. Only the places of ranks
change, not the groups, so training gives the same bits under every mapping. The launcher's first
process stays rank 0, since it holds the store, the run directory and the records. This module does
not import torch.

A line of a rank file is `rank host local_index`, or OpenMPI's `rank 0=host slot=0`; `#` starts a
comment. The local index is the process's number on its host (LOCAL_RANK, SLURM_LOCALID).
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from parallel3d.blueprint.cluster import Cluster, Link, Slots, natural
from parallel3d.blueprint.keys import ClusterConfig
from parallel3d.blueprint.layout import DIMENSIONS, Coordinates, Layout
from parallel3d.blueprint.rank_mapping import RankMapping
from parallel3d.config.user_files import read_given
from parallel3d.errors import UserError, nearest
from parallel3d.estimate.network import price_step
from parallel3d.estimate.traffic import transfers
from parallel3d.files import replace_durably
from parallel3d.resolve import blueprint_of, layout_of
from parallel3d.run_config import Config
from parallel3d.text import count
from parallel3d.topology.search import place

OWN_FORM = re.compile(r"(\d+)\s+(\S+)\s+(\d+)")
OPENMPI_FORM = re.compile(r"rank\s+(\d+)\s*=\s*(\S+)\s+slots?\s*=\s*(\d+)", re.IGNORECASE)


class Process(NamedTuple):
    """A launched process.

    Attributes:
        host, local: the host's name, and the number of the process on its host.
        address, pattern: SLURM_TOPOLOGY_ADDR and its pattern, or "" if not set.
        gpu: identity of the process's GPU, or "" on a CPU or if it is unknown.
    """

    host: str
    local: int
    address: str = ""
    pattern: str = ""
    gpu: str = ""


def ranks_of_file(rank_file: str, processes: Sequence[Process]) -> list[int]:
    """Returns the launch rank of each rank, read from the file `rank_file`.

    Raises UserError if it cannot be read or does not list every rank once.
    """
    text = read_given("rank_file", rank_file)
    return launch_ranks_by_file(text, Path(rank_file).name, processes)


def launch_ranks_by_file(text: str, name: str, processes: Sequence[Process]) -> list[int]:
    """Returns the launch rank of each rank, given the text of a rank file.

    Args:
        name: the file's name, for messages.
        processes: all launched processes, by launch rank.

    Raises:
        UserError: for a malformed line, an unknown rank, host or index, a rank or process that is
            named twice or never, or a rank 0 that is not launch rank 0.
    """
    found: dict[int, int] = {}
    lines: dict[tuple[str, int], str] = {}  # ("rank" or "launch", number) → its line
    launch_of = {(process.host, process.local): i for i, process in enumerate(processes)}
    hosts = dict.fromkeys(process.host for process in processes)
    for number, line in enumerate(text.splitlines(), start=1):
        words = line.split("#", 1)[0].strip()
        if not words:
            continue
        where = f"rank_file: {name} line {number}"
        match = OWN_FORM.fullmatch(words) or OPENMPI_FORM.fullmatch(words)
        if match is None:
            raise UserError(
                f"{where}, {words!r}, cannot be read: it must be `rank host local_index`, such as "
                "`0 node1 0`, or `rank 0=node1 slot=0`"
            )
        rank = int(match[1])
        host = match[2]
        local = int(match[3])
        if rank >= len(processes):
            raise UserError(
                f"{where} places rank {rank}, but the run has ranks 0 to {len(processes) - 1}; the "
                f"nearest is {len(processes) - 1}"
            )
        launch = launch_of.get((_host_called(host, hosts), local))
        if launch is None:
            close = nearest(f"{host} {local}", [f"{p.host} {p.local}" for p in processes])
            first = f"{processes[0].host} {processes[0].local}"
            raise UserError(
                f"{where} names {host} {local}, where no rank of this run was started; the nearest "
                f"is {close or first}"
            )
        for what in (("rank", rank), ("launch", launch)):
            if what in lines:
                raise UserError(
                    f"{where} gives {host} {local} to rank {rank}, but {lines[what]} already names "
                    f"that {'rank' if what[0] == 'rank' else 'process'}"
                )
            lines[what] = f"line {number}"
        found[rank] = launch
    missing = [rank for rank in range(len(processes)) if rank not in found]
    if missing:
        free = next(p for i, p in enumerate(processes) if ("launch", i) not in lines)
        raise UserError(
            f"rank_file: {name} has no line for rank {missing[0]}"
            f"{f' and {len(missing) - 1} more' if len(missing) > 1 else ''}; "
            f"add a line such as `{missing[0]} {free.host} {free.local}`"
        )
    if found[0] != 0:
        raise UserError(
            f"rank_file: {name} {lines['rank', 0]} places rank 0 on another process than the "
            f"launcher's first one, where all ranks meet; it must be `0 {processes[0].host} "
            f"{processes[0].local}`"
        )
    return [found[rank] for rank in range(len(processes))]


def _host_called(name: str, hosts: Collection[str]) -> str:
    """Returns the host that a rank file calls `name`, or `name` itself if there is no such host.

    Without an exact match, `name` means the only host with the same first label (up to the dot),
    and `localhost` means the only host of the run.
    """
    if name in hosts:
        return name
    short = [host for host in hosts if host.split(".")[0] == name.split(".")[0]]
    found = list(hosts) if name == "localhost" else short
    return found[0] if len(found) == 1 else name


DEFAULT, FILE = "default", "file"


@dataclass(frozen=True)
class PlacedRanks:
    """The ranks of all processes.

    Attributes:
        processes: the processes by launch rank.
        launch_ranks: the launch rank of each rank.
        how: a phrase that names the source of the assignment.
        placement: the rank mapping on the cluster, or None if the cluster is not needed.
        predicted_s: predicted seconds of communication per step, or None without a cluster.
        note: a message for the user, or None.
    """

    processes: tuple[Process, ...]
    launch_ranks: tuple[int, ...]
    layout: Layout
    how: str
    placement: RankMapping | None = None
    predicted_s: float | None = None
    note: str | None = None

    @property
    def rank_of_launch(self) -> list[int]:
        """Returns the rank of each launch rank."""
        return np.argsort(self.launch_ranks).tolist()


def wants_cluster(
    placement: str, settings: ClusterConfig, *, preflight: bool, hierarchical: bool
) -> bool:
    """Returns whether a run needs its rank mapping on the cluster.

    The default order and rank files alone do not need it.
    """
    searched = placement not in (DEFAULT, FILE)
    interfaces = settings.nvlink_interface or settings.rail_interface
    return bool(searched or interfaces or preflight or hierarchical)


def place_processes(
    config: Config, processes: Sequence[Process], cluster: Cluster | None
) -> PlacedRanks:
    """Decides which process becomes which rank.

    Args:
        config: a checked configuration.
        processes: the processes by launch rank.
        cluster: None if it is not needed (default order, rank files).

    Raises:
        UserError: if a rank file, order or tiling does not fit.
    """
    layout = layout_of(config)
    chosen = list(range(len(processes)))
    if cluster is not None or config.placement == FILE:
        _check_names(processes)
    if config.placement == FILE:
        chosen = ranks_of_file(str(config.rank_file), processes)
    if cluster is None:
        return PlacedRanks(tuple(processes), tuple(chosen), layout, config.placement)
    layout = blueprint_of(config).looped_layout
    cluster, slots, note = slots_of(cluster, processes)
    if config.placement in (DEFAULT, FILE):
        placement = RankMapping(cluster, layout, slots[chosen], config.placement)
    else:
        ordered = cluster.sorted_slots()
        free = ordered[np.isin(ordered, slots)]
        placement = place(config.placement, cluster, layout, transfers(config, layout), free)
        placement = with_rank_0_at(placement, int(slots[0]))
    launch_at = {int(slot): launch for launch, slot in enumerate(slots)}
    ranks = tuple(launch_at[int(slot)] for slot in placement.slots)
    if ranks[0] != 0:
        raise RuntimeError(f"{placement.how} moves rank 0 to launch rank {ranks[0]}")
    seconds = float(price_step(placement, transfers(config, layout)).seconds)
    return PlacedRanks(tuple(processes), ranks, layout, placement.how, placement, seconds, note)


def _check_names(processes: Sequence[Process]) -> None:
    """Raises UserError if two hosts have the same name, as clones of a virtual machine do."""
    found = Counter((process.host, process.local) for process in processes)
    (host, local), count = found.most_common(1)[0]
    if count > 1:
        raise UserError(
            f"{count} ranks have the local index {local} on hosts named {host}: give each host its "
            "own name, or leave out cluster.source, placement and rank_file"
        )


def with_rank_0_at(placement: RankMapping, slot: int) -> RankMapping:
    """Renumbers the ranks of a mapping so that `slot` holds rank 0 and groups stay the same.

    Along tp, cp and dp the ranks rotate, which keeps every ring. Along pp, if the last stage must
    become the first, the pipeline is reversed; if a middle one must, the pipeline rotates.
    """
    layout = placement.layout
    start = layout.coordinates(int(placement.ranks[slot]))
    if start == Coordinates(0, 0, 0, 0):
        return placement
    old = np.zeros(layout.world_size, dtype=np.int64)
    for dim in DIMENSIONS:
        size, stride = layout.size(dim), layout.stride(dim)
        index = np.arange(layout.world_size) // stride % size
        first = getattr(start, dim)
        backwards = dim == "pp" and first == size - 1
        old += (first - index if backwards else first + index) % size * stride
    return dataclasses.replace(placement, slots=placement.slots[old])


def hosts_in_order(processes: Sequence[Process]) -> list[str]:
    """Returns the hosts' names in the order of the cluster's nodes.

    Hosts that Slurm's addresses put under one switch are adjacent, and node2 comes before node10.
    """
    address = {process.host: process.address for process in processes}

    def above(host: str) -> list[str]:  # the switches above the host
        return address[host].split(".")[:-1] if address[host] else []

    return sorted(address, key=lambda host: (above(host), natural(host)))


def slots_of(cluster: Cluster, processes: Sequence[Process]) -> tuple[Cluster, Slots, str | None]:
    """Returns (cluster with named nodes, slot of each launch rank, a note for the user or None).

    A process runs on GPU `local` of its host. If that is impossible (more processes on a host than
    GPUs, or hosts that the cluster lacks), slots are taken in launch order, and the note gives the
    reason.
    """
    hosts, named = hosts_in_order(processes), cluster
    if not cluster.node_names and len(hosts) <= cluster.nodes:
        spare = [f"node{number}" for number in range(len(hosts), cluster.nodes)]
        named = dataclasses.replace(cluster, node_names=(*hosts, *spare))
    nodes = {name.split(".")[0]: node for node, name in enumerate(named.node_names)}
    sizes = np.bincount(cluster.node, minlength=cluster.nodes)
    slots, misfit = [], None
    for process in processes:
        node = nodes.get(process.host.split(".")[0])
        if node is None:
            misfit = f"{process.host} is not one of the {cluster.nodes} nodes of the cluster"
            break
        if process.local >= sizes[node]:
            ranks = sum(p.host == process.host for p in processes)
            gpus = count(int(sizes[node]), "GPU")
            misfit = f"{process.host} runs {ranks} ranks but has {gpus}"
            break
        slots.append(int(named.first_slot[node]) + process.local)
    if misfit is None:
        return named, np.array(slots, dtype=np.int64), None
    note = f"{misfit}: GPUs of cluster {cluster.name} are assigned in launch order"
    return cluster, np.arange(len(processes), dtype=np.int64), note


def to_message(placed: PlacedRanks) -> dict[str, Any]:
    """Returns the assignment, as JSON, for the other processes."""
    message: dict[str, Any] = {"ranks": placed.rank_of_launch, "how": placed.how}
    if placed.placement is not None:
        message["slots"] = placed.placement.slots.tolist()
        message["cluster"] = dataclasses.asdict(placed.placement.cluster)
    return message


def from_message(content: dict[str, Any], layout: Layout) -> tuple[list[int], RankMapping | None]:
    """Returns (rank of each launch rank, the rank mapping or None) from a message."""
    if "cluster" not in content:
        return content["ranks"], None
    fields: dict[str, Any] = {
        k: tuple(v) if isinstance(v, list) else v for k, v in content["cluster"].items()
    }
    for wire in ("nvlink", "rail", "spine"):
        fields[wire] = Link(**fields[wire])
    slots = np.array(content["slots"], dtype=np.int64)
    return content["ranks"], RankMapping(Cluster(**fields), layout, slots, content["how"])


def save(placed: PlacedRanks, path: Path) -> None:
    """Writes the assignment as JSON, with one line per rank."""
    rows = []
    for rank, launch in enumerate(placed.launch_ranks):
        host, local, *_ = placed.processes[launch]
        row: dict[str, object] = {
            "rank": rank,
            "host": host,
            "local_index": local,
            "launch_rank": launch,
            **placed.layout.coordinates(rank)._asdict(),
        }
        if placed.placement is not None:
            row["gpu"] = placed.placement.cluster.slot_name(int(placed.placement.slots[rank]))
        rows.append(json.dumps(row))
    head = {
        "how": placed.how,
        "cluster": placed.placement.cluster.name if placed.placement else None,
        "predicted_communication_s": placed.predicted_s,
        "note": placed.note,
    }
    ranks = ",\n    ".join(rows)
    text = json.dumps(head, indent=2)[:-2] + f',\n  "ranks": [\n    {ranks}\n  ]\n}}\n'
    replace_durably(path, text.encode())


def rank_of_launch(path: Path, launch_rank: int) -> int:
    """Returns the rank of `launch_rank` in a file written by `save`.

    Returns `launch_rank` itself if the file cannot be read or does not name it.
    """
    try:
        rows = json.loads(path.read_text(encoding="utf-8"))["ranks"]
        return next(row["rank"] for row in rows if row["launch_rank"] == launch_rank)
    except (OSError, ValueError, LookupError, TypeError, StopIteration):
        return launch_rank
