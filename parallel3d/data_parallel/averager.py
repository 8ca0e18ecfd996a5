"""Averages the gradients of DistributedDataParallel during the backward."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from parallel3d.blueprint.buckets import assign
from parallel3d.comm.exchange import all_gather_json, broadcast_json
from parallel3d.comm.group import Group
from parallel3d.data_parallel.reducer import CommHook, Reducer, views_of
from parallel3d.data_parallel.transport import SHARED_CAP_MIB, is_shared, open_transport
from parallel3d.device import accelerator
from parallel3d.device.accelerator import is_accelerator, moved
from parallel3d.private_names import execution_engine, foreach_copy_, post_accumulate_grad_hooks


@dataclass
class DDPBucket:
    """Holds gradients that are reduced together, in the order in which they become ready.

    Source: Li et al. 2020, §3.2.3.

    Attributes:
        members: indices of the bucket's parameters, in the order in which gradients become ready.
        flat: the gradients of these parameters, concatenated.
        total: the sum of `flat` over the ranks; None before the first reduction.
        totals: a view of `total` for each member.
    """

    members: list[int]
    flat: Tensor
    total: Tensor | None = None
    totals: list[Tensor] = field(default_factory=list)


def arrange(
    parameters: Sequence[nn.Parameter],
    ready: Sequence[int],
    bucket_cap_mb: float | Sequence[float] | None,
) -> list[list[int]]:
    """Assigns parameters to buckets of one dtype; returns the buckets in the order they fill up."""
    by_type: dict[torch.dtype, list[int]] = {}
    for number in ready:
        by_type.setdefault(parameters[number].dtype, []).append(number)
    place = {number: i for i, number in enumerate(ready)}
    found = []
    for numbers in by_type.values():
        accelerated = is_accelerator(parameters[numbers[0]].device)
        sizes = [parameters[n].nbytes for n in numbers]
        groups = assign(sizes, bucket_cap_mb, accelerated=accelerated)
        found += [[numbers[i] for i in group] for group in groups]
    return sorted(found, key=lambda members: place[members[-1]])


class BackwardFlags:
    """Makes every rank raise an error that one rank found in a backward.

    The ranks sum a flag that is set by an error. On a CPU, they read the sum at the end of the
    backward. On an accelerator, reading would make the host wait, so they read the sum when the
    next backward begins.

    Attributes:
        fault: this rank's error in the current backward, or None.
        noted: the last backward's error on this rank, its summed flag, and an event that marks the
            flag's arrival on the host. It is None if there is nothing to check.
    """

    def __init__(self, group: Group, device: torch.device) -> None:
        self.group = group
        self.device = device
        self.fault: str | None = None
        self.noted: tuple[str | None, Tensor, Any] | None = None

    def found(self, sentence: str) -> None:
        self.fault = self.fault or sentence

    def note(self, flag: Tensor, other: str | None) -> None:
        """Ends a backward, whose summed `flag` (1,) is above zero if any rank found an error.

        `other` is an error that the transport found on this rank, or None.
        """
        finding = self.fault or other
        self.fault = None
        event = None
        if accelerator.is_accelerator(self.device):
            flag = flag.to("cpu", non_blocking=True)
            event = accelerator.module(self.device).Event()
            event.record()
        self.noted = (finding, flag, event)
        if event is None:
            self.check()

    def check(self) -> None:
        """Raises the same RuntimeError on all ranks if any found an error; collective only then."""
        if self.noted is None:
            return
        (finding, flag, event), self.noted = self.noted, None
        if event is not None:
            event.synchronize()
        if flag.item() > 0:
            everyone = all_gather_json(finding, self.group.handle, self.device)
            rank, sentence = next((r, s) for r, s in enumerate(everyone) if s)
            raise RuntimeError(f"rank {self.group.ranks[rank]}: {sentence}")


@dataclass(frozen=True)
class _Watch:
    averager: weakref.ref[GradientAverager]
    number: int

    def __call__(self, _: Tensor) -> None:
        averager = self.averager()
        if averager is not None and averager.enabled:
            averager._arrived(self.number)


def check_shared(named: Sequence[tuple[str, nn.Parameter]], as_views: bool) -> None:
    """Raises ValueError if two wrappers share a parameter and either keeps gradients in buckets."""
    for name, parameter in named:
        for hook in (post_accumulate_grad_hooks(parameter) or {}).values():
            other = hook.averager() if isinstance(hook, _Watch) else None
            # The wrapper that sends its bucket first would scale a gradient that the other wrapper
            # must still read.
            if other is not None and (as_views or other.as_views):
                raise ValueError(
                    f"parameter {name} is already in another DistributedDataParallel, which is "
                    "not allowed if either has gradient_as_bucket_view=True; the nearest is False "
                    "for both, or delete the other first"
                )


class GradientAverager:
    """Averages the `.grad` of some parameters over a group; collective.

    Afterwards the `.grad` of every parameter is the mean of the ranks' `.grad`, where a missing
    gradient counts as zero. Gradients that earlier backwards accumulated (under `no_sync`) are
    included, as the mean is linear. If no rank has a gradient of a parameter, its `.grad` stays
    None.

    With `watch`, every backward averages gradients while `enabled` is set. A gradient is copied
    into its bucket when it arrives, and the reduction of a bucket starts when the bucket is full,
    in the same order on every rank. A parameter whose gradient has not arrived by the end of the
    backward contributes the `.grad` of earlier backwards. Without `watch`, `average` does all of
    this after the backwards.

    The last bucket, which holds the first layer, starts at the end. It carries the flags (whether
    this rank has a gradient of each parameter, and whether it found an error), which therefore need
    no separate message, unless there is a communication hook.

    Args:
        names, parameters: parameters of the module with their names, in the same order on every
            rank.
        bucket_cap_mb: size in MiB at which a bucket closes, or a list with a size for each bucket,
            whose last entry also applies to further buckets, or None for the default sizes.
        as_views: whether to keep gradients in the buckets (`gradient_as_bucket_view`).
        static: whether every backward uses the same parameters, each as often as the first one did.
        measure: whether to rebuild the buckets in the order of the first backward.
        overlap: whether reductions start during the backward; if not, all start at its end.
        watch: whether every backward averages gradients.

    Attributes:
        enabled: whether backwards average gradients now.
        scale: factor by which gradients are multiplied before they are summed.
        running: whether a backward is running, or has raised an error before its end.
        unused: indices of parameters that the next backward will not reach; None if unknown.
        measured: whether the buckets are in the order of the first backward.
    """

    def __init__(
        self,
        names: Sequence[str],
        parameters: Sequence[nn.Parameter],
        group: Group,
        bucket_cap_mb: float | Sequence[float] | None = None,
        as_views: bool = False,
        static: bool = False,
        measure: bool = True,
        overlap: bool = True,
        watch: bool = True,
    ) -> None:
        self.names = list(names)
        self.parameters = list(parameters)
        self.group = group
        self.bucket_cap_mb = bucket_cap_mb
        self.as_views = as_views
        self.static = static
        self.measure = measure
        self.overlap = overlap
        self.hook: tuple[object, CommHook] | None = None
        self.device = self.parameters[0].device
        self.enabled = True
        self.running = False
        self.began = False
        self.scale = 1.0 / group.size
        self.unused: set[int] | None = None
        self.expected = [1] * len(self.parameters)
        self.counting = static  # until the first backward has ended
        self.measured = False
        self.errors = BackwardFlags(group, self.device)
        self.buckets: list[DDPBucket] = []
        self._fill(list(range(len(self.parameters)))[::-1])
        if watch:
            # `engine.BucketedDataParallel` explains why the reference is weak
            mine = weakref.ref(self)
            for number, parameter in enumerate(self.parameters):
                parameter.register_post_accumulate_grad_hook(_Watch(mine, number))

    def _fill(self, ready: list[int]) -> None:
        """Makes the buckets for gradients that become ready in this order; collective."""
        cap = self.bucket_cap_mb
        if cap is None and self.hook is None and is_shared(self.group, self.device):
            cap = SHARED_CAP_MIB
        members = arrange(self.parameters, ready, cap)
        of_buckets = [[self.parameters[n] for n in numbers] for numbers in members]
        if self.buckets:
            self.close()
        flags = len(self.parameters) + 1
        self.transport = open_transport(
            of_buckets, flags, self.group, self.hook, elsewhere=not self.as_views
        )
        self.order = ready
        self.buckets = list(map(DDPBucket, members, self.transport.buffers))
        self.view_of: dict[int, Tensor] = {}  # parameter's index → view of its bucket
        for bucket, part in zip(self.buckets, of_buckets, strict=True):
            self.view_of |= zip(bucket.members, views_of(bucket.flat, part), strict=True)
        self.reducer = Reducer(members, self.overlap, held=1)

    def use(self, state: object, hook: CommHook) -> None:
        """Makes `hook` reduce the buckets.

        Raises RuntimeError for a second hook, and after the first backward.
        """
        if self.hook is not None:
            raise RuntimeError("a communication hook is already registered; only one is allowed")
        if self.began:
            raise RuntimeError("a communication hook must be registered before the first backward")
        self.hook = (state, hook)
        self._fill(self.order)

    def set_static(self) -> None:
        """Sets `static`. Raises RuntimeError after the first backward."""
        if self.began:
            raise RuntimeError("_set_static_graph should be called before training loop starts")
        self.static = self.counting = self.measure = True

    def close(self) -> None:
        self.transport.close()

    def output_hook(self, _: Tensor) -> None:
        if self.enabled:
            self.begin()

    def begin(self) -> None:
        """Begins a backward, unless it is nested in a backward that is already running."""
        if self.running:
            return
        self.errors.check()
        # The callback runs at the end of the outermost backward, not of a layer's recomputation.
        execution_engine.queue_callback(self._end)
        self._reset()
        silent = {n for n, count in enumerate(self.expected) if count == 0} | (self.unused or set())
        for number in silent:
            self.reducer.left[number] = 0
            self._take(number)
        self.unused = None

    def _reset(self) -> None:
        self.transport.before()
        self.running = self.began = True
        # In the first backward of a static graph, counts go down from 0 and no bucket starts early.
        self.reducer.begin([0] * len(self.expected) if self.counting else self.expected)
        self.reducer.overlap = self.overlap and not self.counting

    def _arrived(self, number: int) -> None:
        if not self.running:
            self.begin()
        left = self.reducer.arrived(number)
        if left == 0:
            self._take(number)
        elif left < 0:
            self._arrived_again(number)

    def _arrived_again(self, number: int) -> None:
        if self.counting:
            if self.reducer.left[number] == -1:
                self.reducer.arrivals.append(number)
        elif self.static:
            self.errors.found(
                f"static_graph=True, but {self.names[number]} got more gradients in this backward "
                f"than the {self.expected[number]} of the first one"
            )
        else:
            self.errors.found(
                f"{self.names[number]} got a second gradient in one backward; static_graph=True "
                "allows it if every backward does the same"
            )

    def _take(self, number: int) -> None:
        """Copies a complete gradient into its bucket, and starts the buckets that are full."""
        if torch.is_grad_enabled():  # true in a backward with create_graph
            with torch.no_grad():
                self._take(number)
            return
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
        if self.as_views and self.hook is None:
            self.buckets[index].flat.mul_(self.scale)
        if index == len(self.buckets) - 1:
            has = [p.grad is not None for p in self.parameters]
            self._write_flags([*has, self.errors.fault is not None])
        self.transport.start(index)

    def _write_flags(self, flags: list[bool]) -> None:
        # `moved` pins the memory, as a copy from pageable memory would wait for the whole backward.
        given = torch.tensor(flags, dtype=self.transport.flags.dtype)
        self.transport.flags.copy_(moved(given, self.device))

    def _end(self) -> None:
        """Ends the backward: sends the remaining buckets and writes the means."""
        self.running = False
        self._check_static()
        for number, left in enumerate(self.reducer.left):
            if left > 0 or self.counting:
                self._take(number)
        self.counting = False
        with torch.no_grad():
            for index in self.reducer.rest():
                self._start(index)
            self._hand_out()
        self._after()

    @torch.no_grad()
    def average(self) -> None:
        """Averages the gradients of backwards that have ended."""
        self._reset()
        self._end()

    def _check_static(self) -> None:
        if self.counting:
            self.expected = [-left for left in self.reducer.left]
        elif self.static:
            for number, left in enumerate(self.reducer.left):
                if left > 0:
                    self.errors.found(
                        f"static_graph=True, but {self.names[number]} got "
                        f"{self.expected[number] - left} gradients in this backward, not the "
                        f"{self.expected[number]} of the first one"
                    )

    def _hand_out(self) -> None:
        """Writes the mean to each parameter that has a gradient on any rank."""
        lacking = []
        for bucket, total in zip(self.buckets, self.transport.finish(), strict=True):
            if total is not bucket.total:
                bucket.total = total
                bucket.totals = views_of(total, [self.parameters[n] for n in bucket.members])
            if self.as_views and total is not bucket.flat:
                bucket.flat.copy_(total)
            grads, means = [], []
            for number, mean in zip(bucket.members, bucket.totals, strict=True):
                grad = self.parameters[number].grad
                if grad is None:
                    lacking.append((number, mean))
                elif self.transport.adds:
                    torch.add(self.view_of[number], mean, out=grad)
                elif not self.as_views:
                    grads.append(grad)
                    means.append(mean)
            if grads:
                foreach_copy_(grads, means)
        if lacking:
            somewhere = self.transport.summed_flags.tolist()
            for number, mean in lacking:
                if somewhere[number] > 0:
                    view = self.view_of[number]
                    self.parameters[number].grad = view if self.as_views else mean.clone()

    def take_part(self) -> None:
        """Takes part in the other ranks' backward with gradients of zero; collective."""
        self.errors.check()
        self._reset()
        for bucket in self.buckets:
            bucket.flat.zero_()
        self._write_flags([False] * (len(self.parameters) + 1))
        for index in range(len(self.buckets)):
            self.transport.start(index)
        list(self.transport.finish())
        self.running = self.counting = False
        self._after()

    def _after(self) -> None:
        self.transport.release()
        self.errors.note(self.transport.summed_flags[-1:], self.transport.fault)
        if self.measure:
            self.measure = False
            self.measured = True
            seen = set(self.reducer.arrivals)
            mine = [*self.reducer.arrivals, *(n for n in self.order if n not in seen)]
            ready = broadcast_json(mine, self.group.handle, self.device)
            if ready != self.order:
                self._fill(ready)
