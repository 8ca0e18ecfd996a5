"""Runs collectives; hides timing, logging and differences between torch versions and backends.

The `*_async` and `*_bucket` functions return a handle. The result may be read after the handle's
`wait()`, which makes the current stream wait on NCCL and blocks the host on gloo. Several
collectives of a group may be in flight if all ranks start them, and wait for them, in the same
order. In a group of one rank nothing is communicated.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from parallel3d.comm.group import Group
from parallel3d.comm.operation_log import logged
from parallel3d.comm.shared_memory import SharedCollectives
from parallel3d.comm.step_timer import KIND_OF_GROUP, StepTimer


class Work(Protocol):
    def wait(self) -> object: ...


class CompletedWork:
    """The handle of an operation that has already ended."""

    def wait(self) -> None:
        return None


def kind_of(group: Group) -> str:
    """Returns the kind of time (in `step_timer.KINDS`) to which a group's communication belongs."""
    return KIND_OF_GROUP.get(group.name, "model")


@dataclass
class TimedWork:
    """A handle whose `wait` counts as communication."""

    work: Work
    timer: StepTimer
    kind: str
    name: str | None  # the name of the wait in a profile; None without a profiler

    def wait(self) -> None:
        self.timer.push(self.kind, self.name)
        self.work.wait()
        self.timer.pop()


def observed(name: str, tensor: Tensor, group: Group, start: Callable[[], Work]) -> Work:
    """Starts a collective, logs it, and times its wait and, on a CPU, also its start."""
    if group.size == 1:
        return CompletedWork()
    timer = group.timer
    if timer is None:
        return logged(group, name, tensor, start)
    kind = kind_of(group)
    label = None if timer.ranges is None else f"{name} {group.name}"
    with timer.starting(kind, label):
        work = logged(group, name, tensor, start)
    return TimedWork(work, timer, kind, label and f"wait {label}")


def _shared_memory(tensor: Tensor, group: Group) -> SharedCollectives | None:
    """Returns the memory through which a group's collectives go, or None if torch runs them."""
    return group.shared if tensor.device.type == "cpu" else None


# All-reduce


def all_reduce_async(tensor: Tensor, group: Group) -> Work:
    """Starts to sum a contiguous `tensor` over the group in place."""

    def start() -> Work:
        if (shared := _shared_memory(tensor, group)) is not None:
            return shared.all_reduce(tensor)
        return dist.all_reduce(tensor, group=group.handle, async_op=True)

    return observed("all_reduce", tensor, group, start)


def all_reduce(tensor: Tensor, group: Group) -> Tensor:
    """Sums a contiguous `tensor` over the group in place and returns it."""
    all_reduce_async(tensor, group).wait()
    return tensor


def all_reduce_few(tensor: Tensor, group: Group) -> Tensor:
    """Sums a few numbers in place; the time beyond the group's baseline latency counts as idle."""
    timer = group.timer
    if timer is None or group.size == 1:
        return all_reduce(tensor, group)
    name = None if timer.ranges is None else f"wait all_reduce {group.name}"
    timer.push(kind_of(group), name)
    all_reduce(tensor, replace(group, timer=None))
    timer.pop(timer.baseline_latency.get(group.name, math.inf))
    return tensor


# Reduce-scatter and all-gather


def own_shard(tensor: Tensor, group: Group) -> Tensor:
    """Returns a view of this rank's shard of a flat tensor that divides evenly over the group."""
    return tensor.chunk(group.size)[group.index]


def _begun(work: Any) -> Work:
    """Returns the handle of a call with `async_op=True`; torch's annotations also allow None."""
    return work


def _gather(out: Tensor, own: Tensor, group: Group) -> Work:
    """Starts an all-gather of `own`, which may be this rank's part of `out`."""
    if (shared := _shared_memory(own, group)) is not None:
        return shared.all_gather(own, out)
    if hasattr(dist, "all_gather_single"):  # its name since torch 2.13
        return _begun(dist.all_gather_single(out, own, group=group.handle, async_op=True))
    return _begun(dist.all_gather_into_tensor(out, own, group=group.handle, async_op=True))


def _scatter(out: Tensor, tensor: Tensor, group: Group) -> Work:
    """Starts a reduce-scatter into `out`, which may be this rank's part of `tensor`."""
    if (shared := _shared_memory(tensor, group)) is not None:
        return shared.reduce_scatter(tensor, out)
    if hasattr(dist, "reduce_scatter_single"):  # its name since torch 2.13
        return _begun(dist.reduce_scatter_single(out, tensor, group=group.handle, async_op=True))
    return _begun(dist.reduce_scatter_tensor(out, tensor, group=group.handle, async_op=True))


def reduce_scatter_into(out: Tensor, tensor: Tensor, group: Group) -> Work:
    """Starts to reduce-scatter `tensor` (size · n, ...) over the group into `out` (n, ...)."""
    return observed("reduce_scatter", tensor, group, lambda: _scatter(out, tensor, group))


def reduce_scatter_bucket(tensor: Tensor, group: Group) -> Work:
    """Starts to reduce-scatter a flat bucket into this rank's shard; other shards are undefined."""
    return reduce_scatter_into(own_shard(tensor, group), tensor, group)


def reduce_scatter_async(tensor: Tensor, group: Group) -> tuple[Tensor, Work]:
    """Starts to reduce-scatter `tensor` (size · n, ...) over the group; the result is (n, ...)."""
    tensor = tensor.contiguous()
    if group.size == 1:
        return tensor, CompletedWork()
    out = tensor.new_empty(tensor.shape[0] // group.size, *tensor.shape[1:])
    return out, reduce_scatter_into(out, tensor, group)


def reduce_scatter(tensor: Tensor, group: Group) -> Tensor:
    out, work = reduce_scatter_async(tensor, group)
    work.wait()
    return out


def all_gather_bucket(tensor: Tensor, group: Group) -> Work:
    """Starts to gather a flat bucket in place; at first each rank has only its own shard."""
    own = own_shard(tensor, group)
    return observed("all_gather", tensor, group, lambda: _gather(tensor, own, group))


def all_gather_async(tensor: Tensor, group: Group) -> tuple[Tensor, Work]:
    """Starts to gather the tensors (n, ...) of all ranks into (size · n, ...), in rank order."""
    tensor = tensor.contiguous()
    if group.size == 1:
        return tensor, CompletedWork()
    out = tensor.new_empty(group.size * tensor.shape[0], *tensor.shape[1:])
    return out, observed("all_gather", tensor, group, lambda: _gather(out, tensor, group))


def all_gather(tensor: Tensor, group: Group) -> Tensor:
    out, work = all_gather_async(tensor, group)
    work.wait()
    return out


# Other collectives


def all_to_all_async(tensor: Tensor, group: Group) -> tuple[Tensor, Work]:
    """Starts to send part j of `tensor` (size · n, ...) to rank j; results are in sender order."""
    tensor = tensor.contiguous()
    if group.size == 1:
        return tensor, CompletedWork()
    out = torch.empty_like(tensor)

    def start() -> Work:
        if (shared := _shared_memory(tensor, group)) is not None:
            return shared.all_to_all(tensor, out)
        return _all_to_all(out, tensor, group)

    return out, observed("all_to_all", tensor, group, start)


def all_to_all(tensor: Tensor, group: Group) -> Tensor:
    out, work = all_to_all_async(tensor, group)
    work.wait()
    return out


def all_to_all_uneven_async(
    tensor: Tensor, group: Group, given: list[int], taken: list[int], most: int | None = None
) -> tuple[Tensor, Work]:
    """Starts to send `given[j]` consecutive elements of a flat tensor to each rank j.

    The result has the received elements in the order of the senders, `taken[i]` from rank i.

    `most` is the largest number of elements that any rank sends; all ranks must give the same
    number. Shared memory is used only if that many fit into a slot, and never if `most` is None.
    """
    if group.size == 1:
        return tensor, CompletedWork()
    out = tensor.new_empty(sum(taken))
    to_bytes = [[n * tensor.itemsize for n in each] for each in (taken, given)]

    def start() -> Work:
        shared = _shared_memory(tensor, group)
        if shared is None or most is None or not shared.takes_uneven(most * tensor.itemsize):
            return _all_to_all(out, tensor, group, *to_bytes)
        as_bytes = tensor.view(torch.uint8), to_bytes[1], out.view(torch.uint8), to_bytes[0]
        shared.all_to_all_uneven(*as_bytes)
        return CompletedWork()

    return out, observed("all_to_all", tensor, group, start)


def all_to_all_uneven(
    tensor: Tensor, group: Group, given: list[int], taken: list[int], most: int | None = None
) -> Tensor:
    out, work = all_to_all_uneven_async(tensor, group, given, taken, most)
    work.wait()
    return out


def all_to_all_rows_async(
    x: Tensor, group: Group, given: Sequence[int], taken: Sequence[int], most: int
) -> tuple[Tensor, Work]:
    """Starts to send rows of `x` (rows, …) as `all_to_all_uneven_async` sends elements.

    `given`, `taken` and `most` count rows.
    """
    width = math.prod(x.shape[1:])
    sent, got = ([n * width for n in each] for each in (given, taken))
    flat = x.contiguous().view(-1)
    out, work = all_to_all_uneven_async(flat, group, sent, got, most * width)
    return out.view(-1, *x.shape[1:]), work


def all_to_all_rows(
    x: Tensor, group: Group, given: Sequence[int], taken: Sequence[int], most: int
) -> Tensor:
    out, work = all_to_all_rows_async(x, group, given, taken, most)
    work.wait()
    return out


def _all_to_all(out: Tensor, tensor: Tensor, group: Group, *splits: list[int]) -> Work:
    # The tensors travel as bytes, because gloo supports fewer dtypes than PyTorch.
    outs, given = out.view(torch.uint8), tensor.view(torch.uint8)
    taken_bytes, given_bytes = splits or (None, None)
    return _begun(
        dist.all_to_all_single(
            outs, given, taken_bytes, given_bytes, group=group.handle, async_op=True
        )
    )


@dataclass
class CombinedWork:
    """The handle of several operations, which keeps their tensors alive until they have ended."""

    works: list[dist.Work]
    tensors: tuple[Tensor, ...]

    def wait(self) -> None:
        for work in self.works:
            work.wait()


def ring_shift_async(tensor: Tensor, group: Group) -> tuple[Tensor, Work]:
    """Starts to send `tensor` to the next rank; the result is the previous rank's tensor."""
    tensor = tensor.contiguous()
    if group.size == 1:
        return tensor, CompletedWork()
    out = torch.empty_like(tensor)

    def start() -> Work:
        if (shared := _shared_memory(tensor, group)) is not None:
            return shared.shift(tensor, out)
        peers = (group.ranks[(group.index + step) % group.size] for step in (1, -1))
        following, previous = peers
        operations = [
            dist.P2POp(dist.isend, tensor, following, group.handle),
            dist.P2POp(dist.irecv, out, previous, group.handle),
        ]
        return CombinedWork(dist.batch_isend_irecv(operations), (tensor, out))

    return out, observed("ring_shift", tensor, group, start)


def broadcast(tensor: Tensor, source: int, group: Group) -> Tensor:
    """Broadcasts `tensor` in place from member `source` of the group, and returns it."""
    if group.size > 1:
        dist.broadcast(tensor, group.ranks[source], group=group.handle)
    return tensor


def differs(numbers: Tensor, group: Group) -> bool:
    """Returns whether any of the integers `numbers` (n,) differs between the ranks; collective."""
    if group.size == 1:
        return False
    both = torch.stack((numbers, ~numbers))  # the maxima give the largest and the smallest number
    dist.all_reduce(both, dist.ReduceOp.MAX, group=group.handle)
    return bool((both[0] != ~both[1]).any())
