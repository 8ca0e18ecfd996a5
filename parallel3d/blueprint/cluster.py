"""Describes a cluster: its nodes, NVLink domains, NICs on rails, leaf switches and spine.

A GPU's *slot* is its number in the cluster: the number of GPUs on all earlier nodes, plus its index
on its own node.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from parallel3d.blueprint.keys import ClusterConfig
from parallel3d.errors import UserError

Slots = npt.NDArray[np.int64]


class LinkClass(IntEnum):
    """Class of the link between two GPUs, cheapest first.

    `NONE` means that they are not connected.
    """

    SELF = 0
    NVLINK = 1
    RAIL = 2
    SPINE = 3
    NONE = 4

    @property
    def label(self) -> str:
        return self.name.lower()


@dataclass(frozen=True)
class Link:
    """Bandwidth and latency of one GPU on a class of links.

    `gb_per_s` is the datasheet's rate in one direction, which is half of NVIDIA's figure for NVLink
    (450 for an H100's 900 GB/s) and an eighth of a NIC's Gb/s. `estimate.fitted_cost` has the
    fraction of this rate that is achieved.
    """

    gb_per_s: float  # 1e9 bytes per second
    latency_us: float


@dataclass(frozen=True)
class Cluster:
    """Nodes of GPUs, their NVLink domains, rails and switches.

    A domain is `domain_gpus` GPUs that share NVLink: a part of a node, a node, or several nodes
    (NVL72). GPU g of a node has its NIC on rail g mod `rails`. A *unit* (NVIDIA's scalable unit) is
    `unit_nodes` nodes with one leaf switch per rail. The spine joins the leaf switches and carries
    1/`oversubscription` of the NICs' bandwidth; if `oversubscription` is None, there is no spine.

    `node_gpus`, `node_domain` and `node_unit` have an entry per node and describe uneven nodes; if
    they are empty, they follow from the sizes. A domain in `node_domain` consists of whole nodes.
    `local_rail` and `local_domain` give the rail and the domain of each GPU of a node, if these do
    not follow the rules above. `origin` is a phrase that names the source of the description.
    """

    name: str
    nodes: int
    gpus_per_node: int
    domain_gpus: int
    rails: int
    nvlink: Link
    rail: Link
    spine: Link
    oversubscription: float | None = 1.0
    unit_nodes: int | None = None  # None if all nodes are one unit
    node_names: tuple[str, ...] = ()
    node_gpus: tuple[int, ...] = ()
    node_domain: tuple[int, ...] = ()
    node_unit: tuple[int, ...] = ()
    local_rail: tuple[int, ...] = ()
    local_domain: tuple[int, ...] = ()
    origin: str = ""
    intra: str = "nvlink"
    network: str = "infiniband"

    @cached_property
    def _gpus(self) -> Slots:
        even = np.full(self.nodes, self.gpus_per_node, dtype=np.int64)
        return np.asarray(self.node_gpus, dtype=np.int64) if self.node_gpus else even

    @cached_property
    def first_slot(self) -> Slots:
        """(nodes,): the slot of each node's GPU 0."""
        return np.concatenate(([0], np.cumsum(self._gpus)[:-1]))

    @cached_property
    def size(self) -> int:
        """Number of GPUs."""
        return int(self._gpus.sum())

    @cached_property
    def node(self) -> Slots:
        """(size,): the node of each slot."""
        return np.repeat(np.arange(self.nodes), self._gpus)

    @cached_property
    def local(self) -> Slots:
        """(size,): the index of each slot inside its node."""
        return np.arange(self.size) - self.first_slot[self.node]

    @cached_property
    def domain(self) -> Slots:
        """(size,): the NVLink domain of each slot; the numbers need not be consecutive."""
        if self.node_domain:
            return np.asarray(self.node_domain, dtype=np.int64)[self.node]
        if self.local_domain:
            own = np.asarray(self.local_domain, dtype=np.int64)
            return self.node * (own.max() + 1) + own[self.local]
        if self.domain_gpus >= self.gpus_per_node:
            return self.node // (self.domain_gpus // self.gpus_per_node)
        per_node = -(-max(int(self._gpus.max()), self.gpus_per_node) // self.domain_gpus)
        return self.node * per_node + self.local // self.domain_gpus

    @cached_property
    def rail_of(self) -> Slots:
        """(size,): the rail of each slot's NIC."""
        if self.local_rail:
            return np.asarray(self.local_rail, dtype=np.int64)[self.local]
        return self.local % self.rails

    @cached_property
    def unit(self) -> Slots:
        """(size,): the scalable unit of each slot."""
        if self.node_unit:
            return np.asarray(self.node_unit, dtype=np.int64)[self.node]
        return self.node // (self.unit_nodes or self.nodes)

    # int32 halves the memory traffic at a million ranks.
    @cached_property
    def leaf(self) -> npt.NDArray[np.int32]:
        """(size,): the leaf switch of each slot; each rail of each unit has one switch."""
        return (self.unit * self.rails + self.rail_of).astype(np.int32)

    @cached_property
    def nic(self) -> npt.NDArray[np.int32]:
        """(size,): the NIC of each slot; each rail of each node has one NIC."""
        return (self.node * self.rails + self.rail_of).astype(np.int32)

    @cached_property
    def leaf_nics(self) -> Slots:
        """(leaf switches,): the number of NICs under each switch.

        A NIC counts under the switch of its first GPU.
        """
        first = np.unique(self.nic, return_index=True)[1]
        return np.bincount(self.leaf[first], minlength=(int(self.unit.max()) + 1) * self.rails)

    @cached_property
    def shares_nics(self) -> bool:
        """Whether any GPUs share a NIC."""
        return np.unique(self.nic).size < self.size

    def sorted_slots(self) -> Slots:
        """Returns all slots, (size,), in an order in which neighbours have fast connections.

        Slurm hands out nodes in any order, nodes fail, and some nodes have fewer GPUs. In the
        returned order domains and units are contiguous; a domain in several units belongs to the
        unit of its first slot. Whole domains and full units come first, so that a missing GPU only
        affects the last groups. The sort is stable, so an even cluster in order stays unchanged.
        """
        domain_first, domain_size = _first_and_size(self.domain)
        unit_first, unit_size = _first_and_size(self.unit)
        home_first, home_size = unit_first[domain_first], unit_size[domain_first]
        keys = (domain_first, -domain_size, home_first, -home_size)
        return np.lexsort((np.arange(self.size), unit_first, *keys))

    def link_class(self, a: Slots | int, b: Slots | int) -> npt.NDArray[np.int8]:
        """Returns the `LinkClass` between slots `a` and `b`, element by element.

        `RAIL` means that both slots are under one leaf switch, on the same rail of the same unit.
        All other pairs in different domains use the spine, or are not connected if there is no
        spine.
        """
        a, b = np.asarray(a), np.asarray(b)
        far = LinkClass.NONE if self.oversubscription is None else LinkClass.SPINE
        found = np.where(self.leaf[a] == self.leaf[b], np.int8(LinkClass.RAIL), np.int8(far))
        found[self.domain[a] == self.domain[b]] = LinkClass.NVLINK
        found[a == b] = LinkClass.SELF
        return found

    def link(self, kind: LinkClass) -> Link:
        """Returns the speed of a link class for one GPU.

        The speed of the spine is a GPU's share while all GPUs use the spine. Raises ValueError for
        `SELF`, `NONE`, and `SPINE` in a cluster without a spine.
        """
        if kind is LinkClass.NVLINK:
            return self.nvlink
        if kind is LinkClass.RAIL:
            return self.rail
        if kind is LinkClass.SPINE and self.oversubscription is not None:
            return Link(self.spine.gb_per_s / self.oversubscription, self.spine.latency_us)
        raise ValueError(f"{kind.label} is not a wire of {self.name}")

    @property
    def intra_name(self) -> str:
        """The name of the links inside a domain."""
        return {"nvlink": "NVLink", "pcie": "PCIe"}[self.intra]

    @property
    def nic_name(self) -> str:
        return "NIC" if self.network == "infiniband" else "NIC (TCP)"

    @property
    def forwards(self) -> bool:
        """Whether NCCL can reach another rail through a GPU of the domain (PXN)."""
        return self.intra == "nvlink" and self.network == "infiniband"

    def label(self, kind: LinkClass) -> str:
        """Returns the name of a link class, which is `pcie` for `NVLINK` if domains use PCIe."""
        return self.intra if kind is LinkClass.NVLINK else kind.label

    def node_name(self, node: int) -> str:
        return self.node_names[node] if self.node_names else f"node{node}"

    def slot_name(self, slot: int) -> str:
        """Formats a slot as `node3 GPU 5`."""
        return f"{self.node_name(int(self.node[slot]))} GPU {int(self.local[slot])}"


def _first_and_size(group: Slots) -> tuple[Slots, Slots]:
    """Returns, for each slot, the first slot and the size of its group."""
    _, first, inverse, counts = np.unique(
        group, return_index=True, return_inverse=True, return_counts=True
    )
    return first[inverse], counts[inverse]


def natural(name: str) -> list[tuple[int, int, str]]:
    """Returns a sorting key that puts node2 before node10."""
    parts = [part for part in re.split(r"(\d+)", name) if part]
    return [(0, int(p), "") if p.isdigit() else (1, 0, p) for p in parts]


USUAL_NODE = 8  # GPUs per node if neither the configuration nor the ranks determine it


def cluster_from_config(config: ClusterConfig, world_size: int | None = None) -> Cluster:
    """Returns the cluster of the configured sizes, with enough GPUs for `world_size` ranks.

    Keys that are null have these defaults. `nodes` is as many as the ranks need, or as one domain
    needs if `world_size` is None, but 1 if `gpus_per_node` is null too. `gpus_per_node` spreads the
    ranks evenly over the nodes, or is 8 if `world_size` is None. A domain is a node, a node has one
    rail per GPU, and all nodes are one unit. The last domain and unit may be smaller.

    Raises UserError for sizes that contradict each other, or fewer GPUs than ranks.
    """
    nodes, gpus = config.nodes, config.gpus_per_node
    if gpus is None:
        nodes = nodes or 1
        gpus = USUAL_NODE if world_size is None else -(-world_size // nodes)
    if nodes is None:
        needed = config.domain_gpus or gpus if world_size is None else world_size
        nodes = -(-needed // gpus)
    if world_size is not None and nodes * gpus < world_size:
        raise UserError(
            f"cluster.nodes={nodes} of cluster.gpus_per_node={gpus} have {nodes * gpus} GPUs, but "
            f"{world_size} ranks need one each; the nearest is "
            f"cluster.nodes={-(-world_size // gpus)}."
        )
    return cluster_of(config, nodes, gpus, "the configuration")


def cluster_of(
    config: ClusterConfig,
    nodes: int,
    gpus: int,
    origin: str,
    names: Sequence[str] = (),
    **own: Any,
) -> Cluster:
    """Returns a cluster of nodes with `gpus` GPUs each and the configured speeds and sizes.

    `own`: discovered fields of `Cluster`, which override the configured ones. Raises UserError for
    domains or rails that do not fit the nodes.
    """
    sizes = {"domain_gpus": config.domain_gpus or gpus, "rails": config.rails or gpus} | own
    _check_domain(sizes["domain_gpus"], gpus)
    if sizes["rails"] > gpus:
        raise UserError(
            f"cluster.rails={sizes['rails']} must be at most cluster.gpus_per_node={gpus}, as each "
            f"rail takes the NIC of at least one GPU; the nearest is cluster.rails={gpus}."
        )
    return Cluster(
        config.name,
        nodes,
        gpus,
        nvlink=Link(config.nvlink_gb_per_s, config.nvlink_latency_us),
        rail=Link(config.rail_gb_per_s, config.rail_latency_us),
        spine=Link(config.rail_gb_per_s, config.spine_latency_us),
        oversubscription=config.oversubscription if config.spine else None,
        unit_nodes=config.unit_nodes,
        node_names=tuple(names),
        origin=origin,
        intra=config.intra,
        network=config.network,
        **sizes,
    )


def _check_domain(domain: int, gpus: int) -> None:
    """Raises UserError unless nodes of `gpus` GPUs can have NVLink domains of `domain` GPUs."""
    fitting = [d for d in range(1, gpus + 1) if gpus % d == 0]
    fitting += [domain // gpus * gpus, (domain // gpus + 1) * gpus]
    close = min((d for d in fitting if d), key=lambda d: (abs(d - domain), d))
    if close != domain:
        raise UserError(
            f"cluster.domain_gpus={domain} must divide cluster.gpus_per_node={gpus} or be a "
            f"multiple of it; the nearest is cluster.domain_gpus={close}."
        )
