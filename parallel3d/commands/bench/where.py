"""Where the ranks of a run sit, and by what wires: what a finding is named by, and priced by."""

from __future__ import annotations

import socket
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from parallel3d.comm.exchange import all_gather_json
from parallel3d.config.schema import Config
from parallel3d.run.launch import Worker
from parallel3d.topology.cluster.configured import cluster_from_config
from parallel3d.topology.cluster.parts import Link, LinkClass
from parallel3d.topology.layout import DEFAULT_ORDER, Layout
from parallel3d.topology.tiling import RankMapping, Tiling


@dataclass(frozen=True)
class Where:
    """The placement of the run, and the host name of every rank."""

    placement: RankMapping
    hosts: tuple[str, ...]

    @classmethod
    def find(cls, config: Config, worker: Worker, layout: Layout) -> Where:
        """Collective over the world: every rank says its host.

        Without a placement of the worker's own the ranks sit in their order on the configured
        cluster. Raises UserError if that has too few GPUs.
        """
        placement = worker.placement
        if placement is None:
            cluster = cluster_from_config(config.cluster, layout.world_size)
            placement = RankMapping.tiled(cluster, layout, Tiling.from_order(DEFAULT_ORDER, layout))
        device = torch.device(worker.device)
        hosts = all_gather_json(socket.gethostname(), dist.group.WORLD, device)
        return cls(placement, tuple(hosts))

    def link_class(self, a: int, b: int) -> LinkClass:
        """Of the wire between two ranks."""
        slots = self.placement.slots
        return LinkClass(int(self.placement.cluster.link_class(slots[a], slots[b])))

    def slowest_link(self, ranks: Sequence[int], chain: bool) -> tuple[LinkClass, Link | None]:
        """The worst wire between neighbours of a ring (of a chain, where it is not closed).

        The link is None where no wire leads from one to the other.
        """
        ends = list(zip(ranks, [*ranks[1:], ranks[0]], strict=True))
        worst = max(self.link_class(a, b) for a, b in (ends[:-1] if chain else ends))
        return worst, None if worst is LinkClass.NONE else self.placement.cluster.link(worst)

    def rail(self, rank: int) -> int:
        return int(self.placement.cluster.rail_of[self.placement.slots[rank]])

    def gpu(self, rank: int) -> str:
        return self.placement.cluster.slot_name(int(self.placement.slots[rank]))

    def name(self, rank: int) -> str:
        """`rank 5 (pp 1, dp 0, tp 1) on web12 GPU 5, rail 5`.

        The host comes first where the cluster does not call the node by its name.
        """
        place, gpu = self.placement.layout.coordinates(rank), self.gpu(rank)
        host = self.hosts[rank]
        known = gpu.split(" GPU ")[0].split(".")[0] == host.split(".")[0]
        return (
            f"rank {rank} ({place}) on {gpu if known else f'{host}, {gpu}'}, rail {self.rail(rank)}"
        )

    def facts(self, rank: int) -> dict[str, object]:
        """The same for JSON."""
        return {
            "rank": rank,
            **self.placement.layout.coordinates(rank)._asdict(),
            "host": self.hosts[rank],
            "gpu": self.gpu(rank),
            "rail": self.rail(rank),
        }
