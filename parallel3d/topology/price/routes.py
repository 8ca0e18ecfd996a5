"""The ways from one GPU to another: straight, or forwarded by a GPU of the same domain."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from parallel3d.topology.cluster.parts import Cluster, LinkClass
from parallel3d.topology.price.costs import send_recv


@dataclass(frozen=True)
class Route:
    """One way: the GPUs passed, sender and receiver included, and the wire of each hop."""

    slots: tuple[int, ...]
    hops: tuple[LinkClass, ...]
    seconds: float

    def describe(self, cluster: Cluster) -> str:
        """`node0 GPU 0 -nvlink- node0 GPU 1 -rail- node1 GPU 1`."""
        names = [cluster.slot_name(s) for s in self.slots]
        hops = (f" -{h.label}- {n}" for h, n in zip(self.hops, names[1:], strict=True))
        return names[0] + "".join(hops)


def routes(cluster: Cluster, a: int, b: int, nbytes: float) -> list[Route]:
    """The routes for one message from slot `a` to slot `b`, cheapest first; empty if there is none.

    A pair in one domain or on one leaf switch has one. Others may go over the spine, or be
    forwarded: over NVLink to the GPU of a's domain that is under b's leaf switch, then along that
    rail. That is what NCCL calls PXN (NVIDIA/nccl, NCCL_P2P_PXN_LEVEL); here as store and forward,
    the sum of two messages, each with its wire to itself.
    """
    kind = LinkClass(int(cluster.link_class(a, b)))
    if kind is LinkClass.SELF:
        return []
    found = []
    if kind is not LinkClass.NONE:
        found.append(Route((a, b), (kind,), send_recv(nbytes, cluster.link(kind))))
    relay = _relay(cluster, a, b) if kind > LinkClass.RAIL else None
    if relay is not None:
        seconds = send_recv(nbytes, cluster.nvlink) + send_recv(nbytes, cluster.rail)
        found.append(Route((a, relay, b), (LinkClass.NVLINK, LinkClass.RAIL), seconds))
    return sorted(found, key=lambda r: (r.seconds, len(r.hops)))


def _relay(cluster: Cluster, a: int, b: int) -> int | None:
    """A GPU of a's domain on b's rail and in b's unit, on a's node where there is one."""
    near = cluster.domain == cluster.domain[a]
    near &= (cluster.rail_of == cluster.rail_of[b]) & (cluster.unit == cluster.unit[b])
    found = np.flatnonzero(near)
    if not found.size:
        return None
    same_node = found[cluster.node[found] == cluster.node[a]]
    return int((same_node if same_node.size else found)[0])
