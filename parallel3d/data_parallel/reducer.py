"""Sums the gradient buckets over the data-parallel group while the backward pass still runs.

The micro-batches of a step add into the buckets, and only the last gradients trigger reductions
(Li et al. 2020, §3.2.4: communication is skipped while accumulating). Which they are, the reducer
counts: a parameter gets one gradient a micro-batch and use, in whatever order a pipeline schedule
makes them, in backwards or (split ones) after them. A bucket is started when its last gradient has
arrived, always in bucket order: every rank issues the same collectives in the same order, whatever
order its own gradients came in.

The gradients are of (sum of losses) / (tokens of the global batch): the division is part of the
loss, so the reduction is a plain sum and no pass over memory averages anything.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Protocol

from torch import Tensor, nn

from parallel3d.comm import collectives
from parallel3d.comm.clock import StepTimer
from parallel3d.comm.collectives import Work
from parallel3d.comm.group import Group
from parallel3d.data_parallel.buckets import Bucket

CommHook = Callable[[Tensor, Group], Work]
"""Starts the sum of a bucket's flat gradients over the group, in place, and returns its handle.

The default is `collectives.all_reduce_bucket`; a hook may compress or reduce hierarchically.
"""


class Watcher(Protocol):
    """Sees gradients before they are reduced."""

    def start_step(self) -> None: ...
    def added(self, name: str, times: int) -> None: ...
    def full(self, bucket: Bucket) -> None: ...


class Reducer:
    """Watches gradients arrive and reduces full buckets.

    Args:
        buckets: in the order of readiness.
        group: the data-parallel group; of one: nothing is sent.
        overlap: start a bucket as soon as it is full; else all at the end.
        comm_hook: see `CommHook`.

    Attributes:
        arrivals: names in the order in which the last step's gradients were complete.
        watcher: is told of gradients before they are reduced.
    """

    def __init__(
        self,
        buckets: list[Bucket],
        group: Group,
        overlap: bool = True,
        comm_hook: CommHook = collectives.all_reduce_bucket,
    ) -> None:
        self.group = group
        self.clock = group.clock or StepTimer()
        self.overlap = overlap
        self.running = False
        self.missing: list[dict[str, int]] = []
        self.works: list[Work] = []
        self.arrivals: list[str] = []
        self.watcher: Watcher | None = None
        self.use(buckets, comm_hook)
        for bucket in buckets:
            for name, parameter in bucket.params.items():
                self._watch(name, parameter)

    def use(self, buckets: list[Bucket], comm_hook: CommHook) -> None:
        """From here on the same parameters are in these buckets; between steps alone."""
        self.buckets, self.comm_hook = buckets, comm_hook
        self.index_of = {name: b.index for b in buckets for name in b.params}

    def _watch(self, name: str, parameter: nn.Parameter) -> None:
        # Weakly: Python's collector does not see the circle parameter → hook → this → parameter,
        # and an ended trainer would stay, with its model and its groups' threads.
        reducer = weakref.ref(self)

        def gradient_added() -> None:
            this = reducer()
            if this is not None and this.running:
                this._arrived(name)

        def accumulate(p: nn.Parameter) -> None:
            if p.grad is None:  # the layer added it to the bucket itself and has said so
                return
            p.main_grad.add_(p.grad)
            p.grad = None
            gradient_added()

        parameter.gradient_added = gradient_added
        parameter.register_post_accumulate_grad_hook(accumulate)

    def start_step(self, microbatches: int) -> None:
        """Clears the gradients of the step before; `microbatches` are to come."""
        for bucket in self.buckets:
            bucket.grad.zero_()
        self.expected = {
            name: p.spec.uses * microbatches for b in self.buckets for name, p in b.params.items()
        }
        self.missing = [{n: self.expected[n] for n in b.params} for b in self.buckets]
        self.works, self.arrivals = [], []
        if self.watcher is not None:
            self.watcher.start_step()
        self.running = True

    def _arrived(self, name: str) -> None:
        waiting = self.missing[self.index_of[name]]
        if name not in waiting:
            raise RuntimeError(f"{name}: its gradient came once more than the forward used it")
        waiting[name] -= 1
        if self.watcher is not None:
            self.watcher.added(name, self.expected[name] - waiting[name])
        if waiting[name] == 0:
            del waiting[name]
            self.arrivals.append(name)
        while self.overlap and self._next_is_full():
            self._reduce_next()

    def _next_is_full(self) -> bool:
        i = len(self.works)
        return i < len(self.buckets) and not self.missing[i]

    def _reduce_next(self) -> None:
        clock, bucket = self.clock, self.buckets[len(self.works)]
        if self.watcher is not None:
            self.watcher.full(bucket)
        work = collectives.CompletedWork()
        if self.group.size > 1:
            name = clock.ranges and f"gradient reduction of bucket {bucket.index}"
            with clock.within("dp", name):  # a hook may do more than communicate
                work = self.comm_hook(bucket.grad, self.group)
        self.works.append(work)

    def finish_step(self) -> list[str]:
        """Reduces what is left and waits; after it the gradients are those of the global batch.

        Returns:
            Names of parameters that no gradient reached. Their buckets are reduced here, so that
            an unused parameter costs overlap and a message, never a hang.
        """
        unused = [
            name
            for waiting in self.missing
            for name, left in waiting.items()
            if left == self.expected[name]
        ]
        while len(self.works) < len(self.buckets):
            self._reduce_next()
        if self.group.size > 1:
            with self.clock.within("dp", "wait gradient reduction"):
                for work in self.works:
                    work.wait()
        self.running = False
        return unused
