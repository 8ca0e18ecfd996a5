"""Gradient reduction in two levels: inside each NVLink domain, then between the domains.

A group that straddles domains has a ring whose slowest wire is a NIC, used for the whole of the
gradients. In two levels only 1/g of them leaves a domain, where g members of the group share one,
and the j-th members of all domains, which talk to each other, sit on one rail.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor

from parallel3d.comm import collectives
from parallel3d.comm.collectives import Work
from parallel3d.comm.group import Group
from parallel3d.data_parallel.side_stream import SideStream
from parallel3d.device.accelerator import is_on_accelerator


@dataclass(frozen=True)
class HierarchicalAllReduce:
    """A `CommHook`: reduce-scatter inside, all-reduce of the shard outside, all-gather inside.

    Time 2(g − 1)/g · S/B_nvlink + 2(m − 1)/m · S/(g · B_nic) for S bytes, g members a domain and m
    domains, without latencies (`costs.hierarchical_all_reduce`).
    """

    inner: Group
    outer: Group
    side: SideStream = field(default_factory=SideStream)

    def __call__(self, tensor: Tensor, group: Group) -> Work:
        """Starts the sum of a flat `tensor` over inner × outer, which are the whole `group`."""
        if is_on_accelerator(tensor):
            return self.side.run(tensor, lambda: self._start(tensor))
        return self._start(tensor)

    def _start(self, tensor: Tensor) -> Work:
        even = tensor.numel() // self.inner.size * self.inner.size
        if even == 0:
            return _Started(self, tensor, 0, tensor[:0], collectives.CompletedWork())
        shard, scattering = collectives.reduce_scatter_async(tensor[:even], self.inner)
        return _Started(self, tensor, even, shard, scattering)


@dataclass(frozen=True)
class _Started:
    levels: HierarchicalAllReduce
    tensor: Tensor
    even: int
    shard: Tensor
    scattering: Work

    def wait(self) -> None:
        inner, outer = self.levels.inner, self.levels.outer
        self.scattering.wait()
        if self.even:
            collectives.all_reduce(self.shard, outer)
            self.tensor[: self.even] = collectives.all_gather(self.shard, inner)
        rest = self.tensor[self.even :]  # fewer elements than the inner group has members
        if rest.numel():
            for group in (inner, outer):
                collectives.all_reduce(rest, group)
