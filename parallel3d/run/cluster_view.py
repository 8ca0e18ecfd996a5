"""Says where the ranks of a run are: their hosts, their GPUs, and the links between them."""

from __future__ import annotations

import socket
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from parallel3d.blueprint.cluster import Link, LinkClass, cluster_from_config
from parallel3d.blueprint.keys import ClusterConfig
from parallel3d.blueprint.layout import DEFAULT_ORDER, Layout
from parallel3d.blueprint.rank_mapping import RankMapping, Tiling
from parallel3d.comm.exchange import all_gather_json
from parallel3d.run.launch import Worker


@dataclass(frozen=True)
class ClusterView:
    """The rank mapping of the run, and the host name of every rank."""

    placement: RankMapping
    hosts: tuple[str, ...]

    @classmethod
    def find(cls, settings: ClusterConfig, worker: Worker, layout: Layout) -> ClusterView:
        """Returns the rank mapping and the gathered host names.

        If the worker has no rank mapping, ranks are placed in order on the configured cluster.
        The call is collective over the world. Raises UserError if the cluster has too few GPUs.
        """
        placement = worker.placement
        if placement is None:
            cluster = cluster_from_config(settings, layout.world_size)
            placement = RankMapping.tiled(cluster, layout, Tiling.parse(DEFAULT_ORDER, layout))
        device = torch.device(worker.device)
        hosts = all_gather_json(socket.gethostname(), dist.group.WORLD, device)
        return cls(placement, tuple(hosts))

    def link_class(self, a: int, b: int) -> LinkClass:
        """Returns the class of the link between two ranks."""
        slots = self.placement.slots
        return LinkClass(int(self.placement.cluster.link_class(slots[a], slots[b])))

    def slowest_link(self, ranks: Sequence[int], chain: bool) -> tuple[LinkClass, Link | None]:
        """Returns the class of the slowest link between ranks in a ring or chain, and this link.

        The link is None if no wire connects the neighbours.
        """
        ends = list(zip(ranks, [*ranks[1:], ranks[0]], strict=True))
        worst = max(self.link_class(a, b) for a, b in (ends[:-1] if chain else ends))
        return worst, None if worst is LinkClass.NONE else self.placement.cluster.link(worst)

    def name(self, rank: int) -> str:
        """Describes a rank, such as `rank 5 (pp 1, dp 0, tp 1) on web12 GPU 5, rail 5`.

        The host name precedes the GPU if the cluster has another name for the node.
        """
        place, facts, host = self.placement.layout.named(rank), self.facts(rank), self.hosts[rank]
        gpu = str(facts["gpu"])
        if gpu.split(" GPU ")[0].split(".")[0] != host.split(".")[0]:
            gpu = f"{host}, {gpu}"
        return f"rank {rank} ({place}) on {gpu}, rail {facts['rail']}"

    def facts(self, rank: int) -> dict[str, object]:
        """Returns plain data about a rank for JSON."""
        cluster, slot = self.placement.cluster, int(self.placement.slots[rank])
        return {
            "rank": rank,
            **self.placement.layout.coordinates(rank)._asdict(),
            "host": self.hosts[rank],
            "gpu": cluster.slot_name(slot),
            "rail": int(cluster.rail_of[slot]),
        }
