"""Averages the `.grad` of parameters over the ranks of a group, in flat buckets."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from parallel3d.blueprint.buckets import assign
from parallel3d.comm.collectives import Work, all_reduce
from parallel3d.comm.group import Group
from parallel3d.data_parallel import reducer
from parallel3d.data_parallel.reducer import CommHook, GradBucket, Reducer, views_of
from parallel3d.device.accelerator import is_accelerator, moved
from parallel3d.private_names import Future, foreach_copy_


def arrange(
    parameters: Sequence[nn.Parameter], bucket_cap_mb: float | None = None
) -> list[list[int]]:
    """Assigns parameters to buckets of one dtype; returns the buckets in the order they fill up.

    Gradients are expected in the reverse order of the parameters (Li et al. 2020, §3.2.3).
    """
    by_type: dict[torch.dtype, list[int]] = {}
    for number in reversed(range(len(parameters))):
        by_type.setdefault(parameters[number].dtype, []).append(number)
    found = []
    for numbers in by_type.values():
        accelerated = is_accelerator(parameters[numbers[0]].device)
        sizes = [parameters[n].nbytes for n in numbers]
        groups = assign(sizes, bucket_cap_mb, accelerated=accelerated)
        found += [[numbers[i] for i in group] for group in groups]
    return sorted(found, key=lambda members: -members[-1])


class GradientMean:
    """Averages the `.grad` of some parameters over a group of several ranks; collective.

    Afterwards the `.grad` of every parameter is the mean of the ranks' `.grad`, where a missing
    gradient counts as zero. Gradients that earlier backwards accumulated are included, as the mean
    is linear. If no rank has a gradient of a parameter, its `.grad` stays None.

    A step is `begin`, `arrived` for each gradient of the backward, and `finish`.

    Args:
        parameters: the same parameters in the same order on every rank.
        bucket_cap_mb: size in MiB at which a bucket closes, or None for the default sizes.
        as_views: whether to keep gradients in the buckets (`gradient_as_bucket_view`).

    Attributes:
        hook: a communication hook with its state, or None for a plain mean.
    """

    def __init__(
        self,
        parameters: Sequence[nn.Parameter],
        group: Group,
        bucket_cap_mb: float | None = None,
        as_views: bool = False,
    ) -> None:
        self.parameters = list(parameters)
        self.group = group
        self.as_views = as_views
        self.hook: tuple[Any, CommHook] | None = None
        self.device = self.parameters[0].device
        self.scale = 1.0 / group.size
        self.members = arrange(self.parameters, bucket_cap_mb)
        self.reducer = Reducer(self.members)
        self.works: list[Work] = []
        self.buckets: list[Tensor] = []
        self.view_of: dict[int, Tensor] = {}  # parameter's index → view of its bucket
        for numbers in self.members:
            part = [self.parameters[n] for n in numbers]
            bucket = part[0].new_zeros(sum(p.numel() for p in part), requires_grad=False)
            self.buckets.append(bucket)
            self.view_of |= zip(numbers, views_of(bucket, part), strict=True)

    def average(self) -> None:
        """Averages the gradients of backwards that have ended."""
        self.begin()
        self.finish()

    def begin(self, unused: Collection[int] = ()) -> None:
        """Begins a backward that will not reach the parameters with the indices `unused`."""
        for work in self.works:  # an error ended the last backward: they still write to the buckets
            work.wait()
        self.works = []
        self.reducer.begin([1] * len(self.parameters))
        for number in unused:
            self.reducer.left[number] = 0
            self._take(number)

    def arrived(self, number: int) -> int:
        """Counts a gradient, and returns how many are still to come: below 0 if it is one more."""
        left = self.reducer.arrived(number)
        if left == 0:
            self._take(number)
        return left

    @torch.no_grad()  # a backward with create_graph records
    def _take(self, number: int) -> None:
        """Copies a complete gradient into its bucket, and starts the buckets that are full."""
        parameter, view = self.parameters[number], self.view_of[number]
        grad = parameter.grad
        if grad is None:
            view.zero_()
        elif self.as_views:
            if grad.data_ptr() != view.data_ptr():
                view.copy_(grad)
                parameter.grad = view
        elif self.hook is not None:
            view.copy_(grad)
        else:  # never in place: another wrapper may still have to read the gradient
            torch.mul(grad, self.scale, out=view)
        for index in self.reducer.filled(number):
            self._start(index)

    def _start(self, index: int) -> None:
        tensor = self.buckets[index]
        if self.as_views and self.hook is None:
            tensor.mul_(self.scale)
        parameters = [self.parameters[n] for n in self.members[index]]
        bucket = GradBucket(index, index == len(self.buckets) - 1, tensor, parameters)
        if self.hook is None:
            self.works.append(reducer.all_reduce(self.group, bucket))
            return
        # The thread that completes a hook's first message may send its second one, so two ranks
        # could send in different orders and deadlock, as PyTorch's PowerSGD hook does on gloo.
        if not is_accelerator(self.device) and self.works and isinstance(self.works[-1], Future):
            self.works[-1].wait()
        state, hook = self.hook
        work = hook(state, bucket)
        if not callable(getattr(work, "wait", None)):
            raise TypeError(
                f"the communication hook must return a torch.futures.Future; it returned a "
                f"{type(work).__name__}"
            )
        self.works.append(work)

    @torch.no_grad()
    def finish(self) -> None:
        """Sends the remaining buckets, waits for all, and writes the means to `.grad`."""
        for number, left in enumerate(self.reducer.left):
            if left > 0:
                self._take(number)
        # A parameter that has no gradient on this rank gets one if another rank has it.
        here = [parameter.grad is not None for parameter in self.parameters]
        means = [self._mean(index, work.wait()) for index, work in enumerate(self.works)]
        self.works = []
        ranks = all_reduce(moved(torch.tensor(here, dtype=torch.int32), self.device), self.group)
        lacking = []
        for numbers, flat, mean in zip(self.members, self.buckets, means, strict=True):
            if self.as_views and mean is not flat:
                flat.copy_(mean)
            of_bucket = views_of(mean, [self.parameters[n] for n in numbers])
            lacking += [pair for pair in zip(numbers, of_bucket, strict=True) if not here[pair[0]]]
            if not self.as_views:
                pairs = [p for p in zip(numbers, of_bucket, strict=True) if here[p[0]]]
                if pairs:
                    grads = [self.parameters[number].grad for number, _ in pairs]
                    foreach_copy_(grads, [view for _, view in pairs])
        if lacking:
            there = ranks.tolist()
            for number, view in lacking:
                if there[number]:
                    grad = self.view_of[number] if self.as_views else view.clone()
                    self.parameters[number].grad = grad

    def _mean(self, index: int, result: object) -> Tensor:
        """Returns the result of a reduction, which the works of torch leave in the bucket."""
        bucket = self.buckets[index]
        if isinstance(result, (list, tuple)):
            (result,) = result
        if result is None or isinstance(result, bool):
            return bucket
        if isinstance(result, Tensor) and result.shape == bucket.shape:
            return result
        shape = tuple(result.shape) if isinstance(result, Tensor) else type(result).__name__
        raise RuntimeError(
            f"the communication hook returned {shape} for bucket {index}, which must stay a "
            f"tensor of {tuple(bucket.shape)}"
        )
