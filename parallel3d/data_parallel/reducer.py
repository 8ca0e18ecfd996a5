"""Starts the reduction of gradient buckets during the backward (Li et al. 2020, §3.2.3)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor, nn

from parallel3d.comm import collectives
from parallel3d.comm.collectives import Work
from parallel3d.comm.group import Group
from parallel3d.private_names import is_dense


class Reducer:
    """Counts the missing gradients of buckets, and tells which buckets are full, in their order.

    So every rank issues the same collectives in the same order, whatever the order in which its
    gradients arrive. Its users decide where a gradient lands, when a backward ends and how a bucket
    is reduced: `engine.BucketedDataParallel` (gradients are added in the buckets, the schedule
    knows their number) and `averager.GradientAverager` (`.grad` is copied, autograd calls at the
    end).

    Args:
        members: by bucket, the numbers of its parameters.
        overlap: a bucket may start when it is full; else all of them at the end.
        held: the last `held` buckets are never started early.

    Attributes:
        left: by parameter, gradients that have not yet arrived.
        arrivals: numbers of parameters in the order in which their last gradients arrived.
        started: buckets whose reduction has been started.
    """

    def __init__(
        self, members: Sequence[Sequence[int]], overlap: bool = True, held: int = 0
    ) -> None:
        self.members = members
        self.overlap = overlap
        self.held = held
        self.bucket_of = {n: index for index, numbers in enumerate(members) for n in numbers}
        self.begin([0] * len(self.bucket_of))

    def begin(self, expected: Sequence[int]) -> None:
        """Begins a step or a backward; `expected`: gradients that each parameter will get in it."""
        self.left = list(expected)
        self.missing = [len(numbers) for numbers in self.members]
        self.arrivals: list[int] = []
        self.started = 0

    def arrived(self, number: int) -> int:
        """Counts a gradient of a parameter; returns how many are left, below 0 if it was not
        expected. After the last one, the caller calls `filled`."""
        left = self.left[number] = self.left[number] - 1
        if left == 0:
            self.arrivals.append(number)
        return left

    def filled(self, number: int) -> range:
        """Notes that a parameter's gradient is in its bucket; returns the buckets to start now."""
        self.missing[self.bucket_of[number]] -= 1
        first, end = self.started, len(self.members) - self.held
        while self.overlap and self.started < end and not self.missing[self.started]:
            self.started += 1
        return range(first, self.started)

    def rest(self) -> range:
        """Returns the buckets to start at the end, so that a parameter without a gradient costs
        overlap but never a hang."""
        first = self.started
        self.started = len(self.members)
        return range(first, self.started)


# Communication hooks


def views_of(flat: Tensor, parameters: Sequence[nn.Parameter]) -> list[Tensor]:
    """Returns the part of `flat` for each parameter, with its strides if they leave no gaps."""
    views, start = [], 0
    for p in parameters:
        part = flat[start : start + p.numel()]
        if is_dense(p):
            views.append(part.as_strided(p.shape, p.stride()))
        else:
            views.append(part.view(p.shape))
        start += p.numel()
    return views


class GradBucket:
    """Holds a bucket for a communication hook; the interface of `torch.distributed.GradBucket`."""

    def __init__(
        self, index: int, last: bool, buffer: Tensor, parameters: Sequence[nn.Parameter]
    ) -> None:
        self._index = index
        self._last = last
        self._buffer = buffer
        self._parameters = list(parameters)

    def index(self) -> int:
        return self._index

    def is_last(self) -> bool:
        return self._last

    def buffer(self) -> Tensor:
        """Returns this rank's gradients, flat, neither summed nor divided."""
        return self._buffer

    def set_buffer(self, buffer: Tensor) -> None:
        self._buffer = buffer

    def parameters(self) -> list[Tensor]:
        """Returns its parameters, in the order of their gradients in the buffer."""
        return list(self._parameters)

    def gradients(self) -> list[Tensor]:
        return views_of(self._buffer, self._parameters)


CommHook = Callable[[Any, GradBucket], Work]
"""Starts the reduction of a bucket. The first argument is the hook's state; hooks of this package
get the group. The returned handle (such as a `torch.futures.Future`) waits for the reduced
gradients and returns them, unless they are in the bucket's buffer, where hooks of this package
leave them."""


def all_reduce(group: Group, bucket: GradBucket) -> Work:
    return collectives.all_reduce_async(bucket.buffer(), group)


def reduce_scatter(group: Group, bucket: GradBucket) -> Work:
    """Sums into this rank's shard of the buffer; the rest of it is undefined (ZeRO stage 1)."""
    return collectives.reduce_scatter_bucket(bucket.buffer(), group)
