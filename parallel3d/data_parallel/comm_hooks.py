"""Communication hooks that reduce gradient buckets hierarchically or in bf16."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from parallel3d.blueprint.buckets import padded_numel
from parallel3d.comm import collectives
from parallel3d.comm.collectives import Work
from parallel3d.comm.group import Group
from parallel3d.data_parallel.reducer import CommHook, GradBucket
from parallel3d.device import accelerator
from parallel3d.device.accelerator import is_on_accelerator


class SideStream:
    """Wraps a `CommHook`, to run all of its phases on a separate accelerator stream.

    Each phase waits for the previous phase's collective. On the compute stream, these waits would
    block the backward. Instead, the compute stream waits once, when the step needs the sums.
    Buckets run in the same order on every rank.

    Lifetimes: tensors that the phases allocate belong to the side stream. The bucket belongs to the
    compute stream and must not be freed before the compute stream has waited, so the handle keeps a
    reference to it.
    """

    def __init__(self, hook: CommHook) -> None:
        self.hook = hook
        self.stream: Any = None

    def __call__(self, group: Group, bucket: GradBucket) -> Work:
        if is_on_accelerator(bucket.buffer()):
            return self.run(bucket.buffer(), lambda: self.hook(group, bucket))
        return self.hook(group, bucket)

    def run(self, tensor: Tensor, start: Callable[[], Work]) -> Work:
        """Runs `start()` and waits for its handle on the side stream, after the current stream."""
        module = accelerator.module(tensor.device)
        if self.stream is None:
            self.stream = module.Stream(device=tensor.device)
        self.stream.wait_stream(module.current_stream(tensor.device))
        with accelerator.on_stream(self.stream):
            work = start()
            work.wait()
        return _Queued(tensor, self.stream.record_event())


@dataclass
class _Queued:
    tensor: Tensor
    done: Any

    def wait(self) -> None:
        """Makes the current stream wait for the sum; the host does not wait."""
        device = self.tensor.device
        accelerator.module(device).current_stream(device).wait_event(self.done)


class HierarchicalAllReduce:
    """Reduces a bucket in two levels: inside each NVLink domain, then between the domains.

    Each domain reduce-scatters the bucket, its shards are all-reduced between the domains, and each
    domain all-gathers the result. A flat ring over several domains sends all gradients through a
    NIC. Here each of the g members of a domain sends only 1/g of the gradients, to the members of
    other domains on the same rail (`estimate.network.two_level_time`).
    """

    def __init__(self, inner: Group, outer: Group, bucket: GradBucket) -> None:
        self.inner = inner
        self.outer = outer
        tensor = bucket.buffer()
        even = tensor.numel() // inner.size * inner.size
        # The rest has fewer elements than the inner group has members.
        self.whole = tensor[:even]
        self.rest = tensor[even:]
        self.shard = self.whole
        self.scattering: Work | None = None
        if even:
            self.shard, self.scattering = collectives.reduce_scatter_async(self.whole, inner)

    def wait(self) -> None:
        if self.scattering is not None:
            self.scattering.wait()
            collectives.all_reduce(self.shard, self.outer)
            self.whole.copy_(collectives.all_gather(self.shard, self.inner))
        if self.rest.numel():
            for group in (self.inner, self.outer):
                collectives.all_reduce(self.rest, group)


class InBf16:
    """Sends a bucket in bf16 and adds in fp32; the class itself is a `CommHook`.

    It rounds twice, with a relative error of at most 2⁻⁹ each, whatever the number of ranks. An
    all-reduce of bf16 tensors sends as many bytes, but rounds after each of its n − 1 additions.
    """

    def __init__(self, group: Group, bucket: GradBucket) -> None:
        self.tensor = bucket.buffer()
        self.group = group
        numel = self.tensor.numel()
        rounded = self.tensor.new_zeros(padded_numel(numel, group.size), dtype=torch.bfloat16)
        rounded[:numel] = self.tensor
        # `received` holds the gradients of all ranks for this rank's shard.
        self.received, self.exchanging = collectives.all_to_all_async(rounded, group)

    def wait(self) -> None:
        self.exchanging.wait()
        mine = self.received.view(self.group.size, -1).sum(0, dtype=torch.float32)
        total = collectives.all_gather(mine.bfloat16(), self.group)
        self.tensor.copy_(total[: self.tensor.numel()])
