"""Collectives of the framework: one place for torch versions, backends, timing and logging.

The `*_async` and `*_bucket` functions return a handle; the result may be read after its `wait()`,
which on NCCL orders streams and on gloo blocks the host. A group of one communicates nothing.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from parallel3d.comm.group import Group
from parallel3d.comm.operation_log import logged, operation_name
from parallel3d.comm.shared_memory import SharedCollectives
from parallel3d.comm.step_timer import KIND_OF_GROUP, StepTimer
from parallel3d.device.accelerator import is_on_accelerator


class Work(Protocol):
    def wait(self) -> object: ...


class CompletedWork:
    """Handle of a collective that had nothing to do."""

    def wait(self) -> None:
        return None


def kind_of(group: Group) -> str:
    """Returns the kind of time (`step_timer.KINDS`) under which a group's communication counts."""
    return KIND_OF_GROUP.get(group.name, "model")


@dataclass
class Timed:
    """Handle whose wait counts as communication."""

    work: Work
    timer: StepTimer
    kind: str
    name: str | None = None  # in a profile

    def wait(self) -> None:
        self.timer.push(self.kind, self.name)
        self.work.wait()
        self.timer.pop()


def timed(call: Callable[[Tensor, Group], Any]) -> Callable[[Tensor, Group], Any]:
    """Counts a collective's wait, and on the CPU its start, as its group's communication."""
    operation = operation_name(call)

    @functools.wraps(call)
    def run(tensor: Tensor, group: Group) -> Any:
        timer = group.timer
        if timer is None or group.size == 1:
            return call(tensor, group)
        kind = kind_of(group)
        name = wait = None
        if timer.ranges is not None:
            name = f"{operation} {group.name}"
            wait = f"wait {name}"
        with timer.starting(kind, name):
            result = call(tensor, group)
        if isinstance(result, tuple):
            return result[0], Timed(result[1], timer, kind, wait)
        return Timed(result, timer, kind, wait)

    return run


class PairExchange:
    """Exchanges a tensor between two CPU ranks; the received one is added to `add_to`, if given.

    At the sizes of activations this takes half the time of gloo's ring (0.6 against 1.7 ms for
    512 KiB), and a sum is bit-identical on both sides because a + b == b + a.
    """

    def __init__(
        self, send: Tensor, receive: Tensor, group: Group, add_to: Tensor | None = None
    ) -> None:
        peer = group.ranks[1 - group.index]
        self.send, self.receive, self.add_to = send, receive, add_to  # alive until the end
        receiving = dist.irecv(receive, peer, group=group.handle)
        sending = dist.isend(send, peer, group=group.handle)
        assert receiving is not None and sending is not None  # this rank is in the group
        self.receiving, self.sending = receiving, sending

    def wait(self) -> None:
        self.receiving.wait()
        self.sending.wait()  # before the sum: `add_to` may be `send`
        if self.add_to is not None:
            self.add_to.add_(self.receive)


def _shared_memory(tensor: Tensor, group: Group) -> SharedCollectives | None:
    """Returns the group's shared memory if it has any and `tensor` fits one of its slots."""
    return group.shared if group.shared is not None and group.shared.fits(tensor) else None


def _is_cpu_pair(tensor: Tensor, group: Group) -> bool:
    return group.size == 2 and tensor.device.type == "cpu"


# All-reduce


@timed
@logged
def all_reduce_async(tensor: Tensor, group: Group) -> Work:
    """Starts the sum of a contiguous `tensor` over the group, in place."""
    if group.size == 1:
        return CompletedWork()
    if (shared := _shared_memory(tensor, group)) is not None:
        return shared.all_reduce(tensor)
    if group.shared is not None and tensor.device.type == "cpu":
        return group.shared.all_reduce_in_chunks(tensor)
    if _is_cpu_pair(tensor, group):
        return PairExchange(tensor, torch.empty_like(tensor), group, add_to=tensor)
    return dist.all_reduce(tensor, group=group.handle, async_op=True)


def all_reduce(tensor: Tensor, group: Group) -> Tensor:
    """Sums a contiguous `tensor` over the group in place and returns it."""
    all_reduce_async(tensor, group).wait()
    return tensor


def all_reduce_few(tensor: Tensor, group: Group) -> Tensor:
    """Sums a few numbers in place; time above the group's baseline latency counts as idle."""
    timer = group.timer
    if timer is None or group.size == 1:
        return all_reduce(tensor, group)
    name = None if timer.ranges is None else f"wait all_reduce {group.name}"
    timer.push(kind_of(group), name)
    all_reduce_async(tensor, replace(group, timer=None)).wait()
    timer.pop(timer.baseline_latency.get(group.name, math.inf))
    return tensor


@timed
@logged
def all_reduce_bucket(tensor: Tensor, group: Group) -> Work:
    """Starts the in-place sum of a gradient bucket; several may be in flight, in order."""
    if group.shared is not None and tensor.device.type == "cpu":
        return group.shared.all_reduce_in_chunks(tensor)
    return all_reduce_async(tensor, group)


# Reduce-scatter and all-gather


@dataclass
class Then:
    """Handle of a collective whose result the wait copies to its place."""

    work: Work
    finish: Callable[[], object]

    def wait(self) -> None:
        self.work.wait()
        self.finish()


@dataclass
class Each:
    """Handle of several operations, which keeps their tensors until they have ended."""

    works: list[dist.Work]
    tensors: tuple[Tensor, ...]

    def wait(self) -> None:
        for work in self.works:
            work.wait()


def own_shard(tensor: Tensor, group: Group) -> Tensor:
    """Returns this rank's shard, a view, of a flat tensor that divides evenly over the group."""
    return tensor.chunk(group.size)[group.index]


def _gather_into(out: Tensor, tensor: Tensor, group: Group) -> Work:
    """Starts an all-gather into `out` (size · n, ...); on NCCL `tensor` may be a part of it."""
    if hasattr(dist, "all_gather_single"):  # its name since torch 2.13
        return dist.all_gather_single(out, tensor, group=group.handle, async_op=True)
    return dist.all_gather_into_tensor(out, tensor, group=group.handle, async_op=True)


def _scatter_into(out: Tensor, tensor: Tensor, group: Group) -> Work:
    """Starts a reduce-scatter to `out` (n, ...); on NCCL that may be a part of `tensor`."""
    if hasattr(dist, "reduce_scatter_single"):  # its name since torch 2.13
        return dist.reduce_scatter_single(out, tensor, group=group.handle, async_op=True)
    return dist.reduce_scatter_tensor(out, tensor, group=group.handle, async_op=True)


@timed
@logged
def reduce_scatter_bucket(tensor: Tensor, group: Group) -> Work:
    """Starts the sum of a flat gradient bucket into this rank's shard; the rest is undefined."""
    if group.size == 1:
        return CompletedWork()
    own = own_shard(tensor, group)
    if is_on_accelerator(tensor):
        return _scatter_into(own, tensor, group)
    if group.shared is not None:
        return group.shared.reduce_scatter_in_chunks(tensor, own)
    out, work = reduce_scatter_async(tensor, group)
    return Then(work, lambda: own.copy_(out))


def reduce_scatter_into(out: Tensor, tensor: Tensor, group: Group) -> Work:
    """Starts `reduce_scatter_bucket` into `out` (n,); `tensor` is undefined afterwards."""

    @timed
    @logged
    def reduce_scatter(tensor: Tensor, group: Group) -> Work:
        return _scatter_into(out, tensor, group)

    if group.size > 1 and is_on_accelerator(tensor):
        return reduce_scatter(tensor, group)
    work = reduce_scatter_bucket(tensor, group)
    return Then(work, lambda: out.copy_(own_shard(tensor, group)))


@timed
@logged
def all_gather_bucket(tensor: Tensor, group: Group) -> Work:
    """Starts gathering a flat bucket in place, of which each rank holds its shard."""
    if group.size == 1:
        return CompletedWork()
    own = own_shard(tensor, group)
    if is_on_accelerator(tensor):
        return _gather_into(tensor, own, group)
    if group.shared is not None:
        return group.shared.all_gather_in_chunks(own, tensor)
    out, work = all_gather_async(own, group)
    return Then(work, lambda: tensor.copy_(out))


@timed
@logged
def all_gather_async(tensor: Tensor, group: Group) -> tuple[Tensor, Work]:
    """Starts gathering (n, ...) of every rank into (size · n, ...), in rank order."""
    tensor = tensor.contiguous()
    if group.size == 1:
        return tensor, CompletedWork()
    out = tensor.new_empty(group.size * tensor.shape[0], *tensor.shape[1:])
    if (shared := _shared_memory(tensor, group)) is not None:
        return out, shared.all_gather(tensor, out)
    if _is_cpu_pair(tensor, group):
        halves = out.chunk(2)
        halves[group.index].copy_(tensor)
        return out, PairExchange(tensor, halves[1 - group.index], group)
    return out, _gather_into(out, tensor, group)


def all_gather(tensor: Tensor, group: Group) -> Tensor:
    out, work = all_gather_async(tensor, group)
    work.wait()
    return out


@timed
@logged
def reduce_scatter_async(tensor: Tensor, group: Group) -> tuple[Tensor, Work]:
    """Starts the sum of (size · n, ...) over the group; each rank keeps its own (n, ...)."""
    tensor = tensor.contiguous()
    if group.size == 1:
        return tensor, CompletedWork()
    if (shared := _shared_memory(tensor, group)) is not None:
        out = tensor.new_empty(tensor.shape[0] // group.size, *tensor.shape[1:])
        return out, shared.reduce_scatter(tensor, out)
    if _is_cpu_pair(tensor, group):
        halves = tensor.chunk(2)
        mine, theirs = halves[group.index].clone(), halves[1 - group.index]
        return mine, PairExchange(theirs, torch.empty_like(mine), group, add_to=mine)
    out = tensor.new_empty(tensor.shape[0] // group.size, *tensor.shape[1:])
    return out, _scatter_into(out, tensor, group)


def reduce_scatter(tensor: Tensor, group: Group) -> Tensor:
    out, work = reduce_scatter_async(tensor, group)
    work.wait()
    return out


# Others


@timed
@logged
def all_to_all_async(tensor: Tensor, group: Group) -> tuple[Tensor, Work]:
    """Starts sending part j of (size · n, ...) to rank j; the result is in order of senders."""
    tensor = tensor.contiguous()
    if group.size == 1:
        return tensor, CompletedWork()
    out = torch.empty_like(tensor)
    if (shared := _shared_memory(tensor, group)) is not None:
        return out, shared.all_to_all(tensor, out)
    if group.shared is not None and tensor.device.type == "cpu":
        return out, group.shared.all_to_all_in_chunks(tensor, out)
    if _is_cpu_pair(tensor, group):
        given, taken = tensor.chunk(2), out.chunk(2)
        taken[group.index].copy_(given[group.index])
        return out, PairExchange(given[1 - group.index], taken[1 - group.index], group)
    # As bytes: gloo knows fewer types than PyTorch.
    work = dist.all_to_all_single(
        out.view(torch.uint8), tensor.view(torch.uint8), group=group.handle, async_op=True
    )
    return out, work


def all_to_all(tensor: Tensor, group: Group) -> Tensor:
    out, work = all_to_all_async(tensor, group)
    work.wait()
    return out


@timed
@logged
def ring_shift_async(tensor: Tensor, group: Group) -> tuple[Tensor, Work]:
    """Starts sending `tensor` to the next rank; the result is what the rank before sends.

    Several may be in flight, in order.
    """
    tensor = tensor.contiguous()
    if group.size == 1:
        return tensor, CompletedWork()
    out = torch.empty_like(tensor)
    if group.shared is not None and tensor.device.type == "cpu":
        return out, group.shared.shift_in_chunks(tensor, out)
    if _is_cpu_pair(tensor, group):
        return out, PairExchange(tensor, out, group)
    peers = (group.ranks[(group.index + step) % group.size] for step in (1, -1))
    ways = zip((dist.isend, dist.irecv), (tensor, out), peers, strict=True)
    operations = [dist.P2POp(*way, group.handle) for way in ways]
    return out, Each(dist.batch_isend_irecv(operations), (tensor, out))


def all_to_all_uneven(tensor: Tensor, group: Group, given: list[int], taken: list[int]) -> Tensor:
    """Sends `given[j]` elements of a flat tensor to rank j, in order; returns the received ones.

    `taken[i]` of them come from rank i, in order of senders. Ranks may call it without elements.
    """

    @timed
    @logged
    def all_to_all(tensor: Tensor, group: Group) -> tuple[Tensor, Work]:
        out = tensor.new_empty(sum(taken))
        # As bytes: gloo knows fewer types than PyTorch.
        taken_bytes, given_bytes = ([n * tensor.itemsize for n in each] for each in (taken, given))
        work = dist.all_to_all_single(
            out.view(torch.uint8),
            tensor.view(torch.uint8),
            taken_bytes,
            given_bytes,
            group=group.handle,
            async_op=True,
        )
        return out, work

    if group.size == 1:
        return tensor
    out, work = all_to_all(tensor, group)
    work.wait()
    return out


def broadcast(tensor: Tensor, source: int, group: Group) -> Tensor:
    """Broadcasts `tensor` of the group's member number `source`, in place."""
    if group.size > 1:
        dist.broadcast(tensor, group.ranks[source], group=group.handle)
    return tensor


def differs(numbers: Tensor, group: Group) -> bool:
    """Returns whether any of these integers (n,) differs between ranks; alike on all of them."""
    if group.size == 1:
        return False
    both = torch.stack((numbers, ~numbers))  # the largest, and the complement of the smallest
    dist.all_reduce(both, dist.ReduceOp.MAX, group=group.handle)
    return bool((both[0] != ~both[1]).any())
