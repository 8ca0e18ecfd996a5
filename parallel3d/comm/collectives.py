"""Collectives that tell their group's clock when they begin and when they are waited for."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from parallel3d.comm.operation_log import logged, operation_name
from parallel3d.comm.process_groups import Group
from parallel3d.comm.step_timer import OF_GROUP, StepTimer
from parallel3d.device.accelerator import is_on_accelerator


class _Work(Protocol):
    def wait(self) -> object: ...


def kind_of(group: Group) -> str:
    """The kind under which a group's communication counts."""
    return OF_GROUP.get(group.name, "model")


@dataclass
class Timed:
    """A handle whose wait counts as communication."""

    work: _Work
    clock: StepTimer
    kind: str
    name: str | None = None  # in a profile

    def wait(self) -> None:
        self.clock.push(self.kind, self.name)
        self.work.wait()
        self.clock.pop()


def timed(call: Callable[[Tensor, Group], Any]) -> Callable[[Tensor, Group], Any]:
    """Counts a collective's wait, and on the CPU its start, as its group's communication.

    `call` returns a handle, or a tensor and a handle. A group without a clock, or of one rank, is
    handed through.
    """
    operation = operation_name(call)

    @functools.wraps(call)
    def run(tensor: Tensor, group: Group) -> Any:
        clock = group.clock
        if clock is None or group.size == 1:
            return call(tensor, group)
        kind = kind_of(group)
        name = wait = None
        if clock.ranges is not None:
            name = f"{operation} {group.name}"
            wait = f"wait {name}"
        starts = clock.times.marks_starts
        if starts:
            clock.push(kind, name)
        elif name is not None:
            clock.ranges.push(name)
        result = call(tensor, group)
        if starts:
            clock.pop()
        elif name is not None:
            clock.ranges.pop()
        if isinstance(result, tuple):
            return result[0], Timed(result[1], clock, kind, wait)
        return Timed(result, clock, kind, wait)

    return run


# Every collective that the framework calls: one place for torch versions and backends.
#
# A group of one communicates nothing. The `*_async` functions return a handle whose `wait()` must
# be called before the result is read; on NCCL that orders streams, on gloo it blocks the host.


class Work(Protocol):
    def wait(self) -> object: ...


class CompletedWork:
    """The handle of a collective that had nothing to do."""

    def wait(self) -> None:
        return None


class PairExchange:
    """Two CPU ranks send each other a tensor; what arrives is added to `add_to`, if given.

    At the sizes of activations this takes half the time of gloo's ring (0.6 against 1.7 ms for
    512 KiB), and a sum is bit-identical on both sides because a + b == b + a.
    """

    def __init__(
        self, send: Tensor, receive: Tensor, group: Group, add_to: Tensor | None = None
    ) -> None:
        peer = group.ranks[1 - group.index]
        self.send, self.receive, self.add_to = send, receive, add_to  # alive until the end
        self.receiving = dist.irecv(receive, peer, group=group.handle)
        self.sending = dist.isend(send, peer, group=group.handle)

    def wait(self) -> None:
        self.receiving.wait()
        self.sending.wait()  # `add_to` may be `send`: it changes only after it has left
        if self.add_to is not None:
            self.add_to.add_(self.receive)


def _is_shared(tensor: Tensor, group: Group) -> bool:
    return group.shared is not None and group.shared.fits(tensor)


def _is_cpu_pair(tensor: Tensor, group: Group) -> bool:
    return group.size == 2 and tensor.device.type == "cpu"


@timed
@logged
def all_reduce_async(tensor: Tensor, group: Group) -> Work:
    """Starts the sum of a contiguous `tensor` over the group, in place."""
    if group.size == 1:
        return CompletedWork()
    if _is_shared(tensor, group):
        return group.shared.all_reduce(tensor)
    if group.shared is not None and tensor.device.type == "cpu":
        return group.shared.all_reduce_in_pieces(tensor)
    if _is_cpu_pair(tensor, group):
        return PairExchange(tensor, torch.empty_like(tensor), group, add_to=tensor)
    return dist.all_reduce(tensor, group=group.handle, async_op=True)


@timed
@logged
def all_reduce_bucket(tensor: Tensor, group: Group) -> Work:
    """Starts the sum of a gradient bucket, in place; several may be under way, waited for in order.

    Through shared memory all of it happens in the wait: copying takes the cores that compute.
    """
    if group.shared is not None and tensor.device.type == "cpu":
        return group.shared.all_reduce_in_pieces(tensor)
    return all_reduce_async(tensor, group)


@dataclass
class Then:
    """A collective whose result is moved to its place in the wait."""

    work: Work
    finish: Callable[[], object]

    def wait(self) -> None:
        self.work.wait()
        self.finish()


def own_shard(tensor: Tensor, group: Group) -> Tensor:
    """This rank's part, a view, of a flat tensor that divides evenly over the group."""
    return tensor.chunk(group.size)[group.index]


def _gather_into(out: Tensor, tensor: Tensor, group: Group) -> Work:
    """The backend's gather of `tensor` (n, ...) into `out` (size · n, ...).

    `tensor` may be this rank's part of `out` where the backend knows gathers in place, as NCCL
    does: nothing is copied then.
    """
    if hasattr(dist, "all_gather_single"):  # its name since torch 2.13
        return dist.all_gather_single(out, tensor, group=group.handle, async_op=True)
    return dist.all_gather_into_tensor(out, tensor, group=group.handle, async_op=True)


def _scatter_into(out: Tensor, tensor: Tensor, group: Group) -> Work:
    """The backend's sum of `tensor` (size · n, ...), of which `out` (n, ...) gets this rank's part.

    `out` may be that part of `tensor`, under the same condition.
    """
    if hasattr(dist, "reduce_scatter_single"):  # its name since torch 2.13
        return dist.reduce_scatter_single(out, tensor, group=group.handle, async_op=True)
    return dist.reduce_scatter_tensor(out, tensor, group=group.handle, async_op=True)


@timed
@logged
def reduce_scatter_bucket(tensor: Tensor, group: Group) -> Work:
    """Starts the sum of a flat gradient bucket of which each rank needs its shard alone.

    The shard is summed in place, the rest of `tensor` is undefined afterwards. As with
    `all_reduce_bucket`, several may be under way, and through shared memory the wait does the work.
    """
    if group.size == 1:
        return CompletedWork()
    own = own_shard(tensor, group)
    if is_on_accelerator(tensor):
        return _scatter_into(own, tensor, group)
    if group.shared is not None:
        return group.shared.reduce_scatter_in_pieces(tensor, own)
    out, work = reduce_scatter_async(tensor, group)
    return Then(work, lambda: own.copy_(out))


def reduce_scatter_into(out: Tensor, tensor: Tensor, group: Group) -> Work:
    """`reduce_scatter_bucket` whose shard is written to `out` (n,); `tensor` is undefined after."""

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
    """Starts making a flat bucket whole, of which each rank holds its shard; in place."""
    if group.size == 1:
        return CompletedWork()
    own = own_shard(tensor, group)
    if is_on_accelerator(tensor):
        return _gather_into(tensor, own, group)
    if group.shared is not None:
        return group.shared.all_gather_in_pieces(own, tensor)
    out, work = all_gather_async(own, group)
    return Then(work, lambda: tensor.copy_(out))


def all_reduce(tensor: Tensor, group: Group) -> Tensor:
    """Sums a contiguous `tensor` over the group in place and returns it."""
    all_reduce_async(tensor, group).wait()
    return tensor


def all_reduce_few(tensor: Tensor, group: Group) -> Tensor:
    """Sums a few numbers in place, and returns them; here the ranks of a group meet.

    There is nothing to transfer: what it takes beyond the group's floor is time in which this rank
    is idle (see `comm.clock`).
    """
    clock = group.clock
    if clock is None or group.size == 1:
        return all_reduce(tensor, group)
    clock.push(kind_of(group), clock.ranges and f"wait all_reduce {group.name}")
    all_reduce_async(tensor, replace(group, clock=None)).wait()
    clock.pop(clock.floors.get(group.name, math.inf))
    return tensor


@timed
@logged
def all_gather_async(tensor: Tensor, group: Group) -> tuple[Tensor, Work]:
    """Starts gathering (n, ...) of every rank into (size · n, ...), in rank order."""
    tensor = tensor.contiguous()
    if group.size == 1:
        return tensor, CompletedWork()
    out = tensor.new_empty(group.size * tensor.shape[0], *tensor.shape[1:])
    if _is_shared(tensor, group):
        return out, group.shared.all_gather(tensor, out)
    if _is_cpu_pair(tensor, group):
        halves = out.chunk(2)
        halves[group.index].copy_(tensor)
        return out, PairExchange(tensor, halves[1 - group.index], group)
    return out, _gather_into(out, tensor, group)


def all_gather(tensor: Tensor, group: Group) -> Tensor:
    """(n, ...) of every rank as (size · n, ...), in rank order."""
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
    if _is_shared(tensor, group):
        out = tensor.new_empty(tensor.shape[0] // group.size, *tensor.shape[1:])
        return out, group.shared.reduce_scatter(tensor, out)
    if _is_cpu_pair(tensor, group):
        halves = tensor.chunk(2)
        mine, theirs = halves[group.index].clone(), halves[1 - group.index]
        return mine, PairExchange(theirs, torch.empty_like(mine), group, add_to=mine)
    out = tensor.new_empty(tensor.shape[0] // group.size, *tensor.shape[1:])
    return out, _scatter_into(out, tensor, group)


def reduce_scatter(tensor: Tensor, group: Group) -> Tensor:
    """The sum of (size · n, ...) over the group, this rank's (n, ...) of it."""
    out, work = reduce_scatter_async(tensor, group)
    work.wait()
    return out


@timed
@logged
def all_to_all_async(tensor: Tensor, group: Group) -> tuple[Tensor, Work]:
    """Starts handing part j of (size · n, ...) to rank j; the result is what came, in rank order.

    Nothing is added up, so a narrow type travels without a second rounding.
    """
    tensor = tensor.contiguous()
    if group.size == 1:
        return tensor, CompletedWork()
    out = torch.empty_like(tensor)
    if _is_shared(tensor, group):
        return out, group.shared.all_to_all(tensor, out)
    if _is_cpu_pair(tensor, group):
        given, taken = tensor.chunk(2), out.chunk(2)
        taken[group.index].copy_(given[group.index])
        return out, PairExchange(given[1 - group.index], taken[1 - group.index], group)
    # As bytes: gloo moves them whatever they mean, and knows fewer types than PyTorch.
    work = dist.all_to_all_single(
        out.view(torch.uint8), tensor.view(torch.uint8), group=group.handle, async_op=True
    )
    return out, work


def broadcast(tensor: Tensor, source: int, group: Group) -> Tensor:
    """`tensor` of the group's member number `source`, in place."""
    if group.size > 1:
        dist.broadcast(tensor, group.ranks[source], group=group.handle)
    return tensor


def differs(numbers: Tensor, group: Group) -> bool:
    """Whether any of these whole numbers (n,) is not the same on all ranks; alike on all."""
    if group.size == 1:
        return False
    both = torch.stack((numbers, ~numbers))  # the largest, and the complement of the smallest
    dist.all_reduce(both, dist.ReduceOp.MAX, group=group.handle)
    return bool((both[0] != ~both[1]).any())
