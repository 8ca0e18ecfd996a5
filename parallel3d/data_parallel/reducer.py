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
    """Counts the gradients that buckets lack, and returns full buckets to start, in a fixed order.

    Every rank therefore issues the same collectives in the same order, whatever the order in which
    its gradients arrive. Two classes use the counts. `engine.BucketedDataParallel` accumulates
    gradients in the buckets, and knows their number from the pipeline schedule.
    `gradient_mean.GradientMean` copies each `.grad` into a bucket once a backward.

    Args:
        members: for each bucket, the indices of its parameters.
        overlap: whether a bucket may start when it is full; if not, all buckets start at the end.

    Attributes:
        left: for each parameter, the number of gradients that have not yet arrived.
        started: number of buckets whose reduction has been started.
    """

    def __init__(self, members: Sequence[Sequence[int]], overlap: bool = True) -> None:
        self.members = members
        self.overlap = overlap
        self.bucket_of = {n: index for index, numbers in enumerate(members) for n in numbers}
        self.begin([0] * len(self.bucket_of))

    def begin(self, expected: Sequence[int]) -> None:
        """Begins a step or a backward, in which parameter i gets `expected[i]` gradients."""
        self.left = list(expected)
        self.missing = [len(numbers) for numbers in self.members]
        self.started = 0

    def arrived(self, number: int) -> int:
        """Counts a gradient of a parameter, and returns how many gradients are still to come.

        The result is below 0 if the gradient was not expected. After the last gradient, the caller
        calls `filled`.
        """
        self.left[number] -= 1
        return self.left[number]

    def filled(self, number: int) -> range:
        """Notes that a parameter's gradient is in its bucket; returns the buckets to start now."""
        self.missing[self.bucket_of[number]] -= 1
        first, end = self.started, len(self.members)
        while self.overlap and self.started < end and not self.missing[self.started]:
            self.started += 1
        return range(first, self.started)

    def rest(self) -> range:
        """Returns the buckets that have not started, for the caller to start at the end.

        A parameter without a gradient therefore costs overlap, but never makes the ranks hang.
        """
        first = self.started
        self.started = len(self.members)
        return range(first, self.started)


# Communication hooks


def views_of(flat: Tensor, parameters: Sequence[nn.Parameter]) -> list[Tensor]:
    """Returns a view of `flat` for each parameter, with the parameter's strides if it is dense."""
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
    """Presents a bucket to a communication hook, like PyTorch's `dist.GradBucket`."""

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
        """Returns the bucket's parameters, in the order of their gradients in the buffer."""
        return list(self._parameters)

    def gradients(self) -> list[Tensor]:
        return views_of(self._buffer, self._parameters)


CommHook = Callable[[Any, GradBucket], Work]
"""A function that starts the reduction of a bucket.

Its first argument is the hook's state, which for hooks of this package is the group. It returns a
handle (such as a `torch.futures.Future`) whose `wait` returns the reduced gradients, unless they
are in the bucket's buffer, where hooks of this package leave them."""


def all_reduce(group: Group, bucket: GradBucket) -> Work:
    return collectives.all_reduce_async(bucket.buffer(), group)


def reduce_scatter(group: Group, bucket: GradBucket) -> Work:
    """Sums this rank's shard of the buffer; the other shards become undefined (ZeRO stage 1)."""
    return collectives.reduce_scatter_bucket(bucket.buffer(), group)
