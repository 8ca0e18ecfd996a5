"""Measures each figure of Li et al. 2020 that is repeated here."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from benchmarks.figures.ddp.nets import inputs, made
from parallel3d.blueprint.cluster import Link
from parallel3d.comm import collectives
from parallel3d.comm.group import Group
from parallel3d.comm.timed_operations import timed_calls
from parallel3d.data_parallel.ddp import DistributedDataParallel
from parallel3d.data_parallel.reducer import GradBucket
from parallel3d.device.accelerator import is_accelerator, module, synchronize
from parallel3d.estimate import network

PARTS = ("forward", "backward", "exposed", "optimizer")
Row = dict[str, float | int | str]


@dataclass
class Trial:
    """A net with some options, which runs step by step on this rank's device.

    Attributes:
        every: one of so many steps, the last, is reduced.
        in_turn: more groups of the same ranks, among which buckets alternate.
    """

    name: str
    group: Group
    device: torch.device
    bucket_cap_mb: float | None = None
    overlap: bool = True
    every: int = 1
    in_turn: Sequence[dist.ProcessGroup] = ()

    def __post_init__(self) -> None:
        self.net = DistributedDataParallel(
            made(self.name).to(self.device),
            process_group=self.group,
            bucket_cap_mb=self.bucket_cap_mb,
            overlap=self.overlap,
        )
        self.optimizer = torch.optim.SGD(self.net.parameters(), lr=1e-3)
        self.inputs, self.labels = (t.to(self.device) for t in inputs(self.name, self.group.index))
        self.finish = partial(synchronize, self.device)
        self.steps = 0
        if self.in_turn:
            self.net.register_comm_hook(self.in_turn, average_in_turn)
        self.step()  # after these steps the buckets are in their final order

    def step(self) -> dict[str, float]:
        """Runs one step; returns seconds by part, each of which ends when the device has done it.

        The communication that the backward did not hide is exposed.
        """
        self.steps += 1
        reduced = self.steps % self.every == 0
        marks = [self._now()]
        with nullcontext() if reduced else self.net.no_sync():
            made = self.net(self.inputs)
            loss = F.cross_entropy(made.flatten(0, -2), self.labels.flatten())
            marks.append(self._now())
            exposed = self._backward(loss)
        marks.append(self._now())
        if reduced:
            self.optimizer.step()
            self.optimizer.zero_grad()
        marks.append(self._now())
        if self.net.averager is None or not reduced:
            exposed = 0.0
        forward, backward, update = (b - a for a, b in pairwise(marks))
        return dict(zip(PARTS, (forward, backward - exposed, exposed, update), strict=True))

    def _backward(self, loss: Tensor) -> float:
        """Returns the seconds from the end of the computation to the end of the reduction."""
        computed: list[Any] = []

        def begins(_: Tensor) -> None:
            # Called when all gradients exist, before the reducer's own callback, which is queued
            # after it.
            torch.autograd.Variable._execution_engine.queue_callback(
                lambda: computed.append(self._instant())
            )

        loss.register_hook(begins)
        loss.backward()
        ended = self._instant()
        self.finish()
        if is_accelerator(self.device):
            return 1e-3 * computed[0].elapsed_time(ended)
        return ended - computed[0]

    def _instant(self) -> Any:
        """Returns the present time on a CPU, otherwise an event on the device's current stream."""
        if not is_accelerator(self.device):
            return time.perf_counter()
        event = module(self.device).Event(enable_timing=True)
        event.record()
        return event

    def _now(self) -> float:
        self.finish()
        return time.perf_counter()

    def medians(self, warmup: int, steps: int) -> dict[str, float]:
        """Returns the seconds of each part, and of the whole ("step"), by its slowest rank; the
        same on every rank."""
        found = []
        for number in range(warmup + steps):
            collectives_of(self.group)
            parts = self.step()
            if number >= warmup:
                found.append([*parts.values(), sum(parts.values())])
        times = torch.tensor(found, dtype=torch.float64, device=self.device)
        slowest = times[:, -1].clone()
        if self.group.size > 1:
            dist.all_reduce(times, group=self.group.handle)
            dist.all_reduce(slowest, dist.ReduceOp.MAX, group=self.group.handle)
        means = (times / self.group.size).median(0).values.tolist()
        whole = slowest.mean().item() if self.every > 1 else slowest.median().item()
        return dict(zip(PARTS, means[:-1], strict=True)) | {"step": whole}


def average_in_turn(handles: Sequence[dist.ProcessGroup], bucket: GradBucket) -> dist.Work:
    """A communication hook that passes each bucket to the next one of several groups of equal
    ranks."""
    handle = handles[bucket.index() % len(handles)]
    flat = bucket.buffer().div_(handle.size())
    return dist.all_reduce(flat, group=handle, async_op=True)


def collectives_of(group: Group) -> None:
    """Waits until all ranks of a group are here."""
    if group.size > 1:
        dist.barrier(group.handle)


def all_reduce_times(
    ways: dict[str, Group],
    device: torch.device,
    total: int,
    sizes: Sequence[int],
    warmup: int,
    calls: int,
) -> list[Row]:
    """Measures figure 2 (a), (b): seconds to sum `total` fp32 numbers, with this many per call."""
    rows: list[Row] = []
    for way, group in ways.items():
        for size in sizes:
            parts = [torch.ones(size, device=device) for _ in range(total // size)]

            def reduce_all(parts: list[Tensor] = parts, group: Group = group) -> None:
                works = [collectives.all_reduce_async(part, group) for part in parts]
                for work in works:
                    work.wait()

            barrier = partial(dist.barrier, group.handle)
            seconds = timed_calls(reduce_all, barrier, device, warmup, calls)
            slowest = torch.tensor(seconds, dtype=torch.float64, device=device)
            dist.all_reduce(slowest, dist.ReduceOp.MAX, group=group.handle)
            median = slowest.median().item()
            rows.append({"way": way, "parameters": size, "calls": len(parts), "seconds": median})
    return rows


def readiness(name: str, group: Group, device: torch.device, steps: int) -> list[Row]:
    """Measures figure 2 (c), (d): the number of ready gradients by seconds since the backward
    began.

    The host waits for the accelerator at each gradient.
    """
    net = DistributedDataParallel(made(name).to(device), process_group=group)
    images, labels = (t.to(device) for t in inputs(name, group.index))
    finish = partial(synchronize, device)
    times: list[list[float]] = []
    sizes: list[int] = []
    start = 0.0

    def arrived(parameter: torch.nn.Parameter) -> None:
        finish()
        times[-1].append(time.perf_counter() - start)
        sizes.append(parameter.numel())

    for parameter in net.parameters():
        parameter.register_post_accumulate_grad_hook(arrived)
    for _ in range(steps):
        loss = F.cross_entropy(net(images).flatten(0, -2), labels.flatten())
        times.append([])
        sizes.clear()
        with net.no_sync():  # only the computation
            assert net.averager is not None
            net.averager.enabled = False
            finish()
            start = time.perf_counter()
            loss.backward()
    rows: list[Row] = []
    ready = 0
    for size, at in zip(sizes, zip(*times, strict=True), strict=True):
        ready += size
        rows.append({"net": name, "ready": ready, "seconds": statistics.median(at)})
    return rows


def priced_step(
    parts: dict[str, float], buckets: Sequence[tuple[float, int]], ranks: int, link: Link
) -> float:
    """Returns the predicted seconds of a step on more ranks than exist here; buckets are sent in
    turn.

    Args:
        parts: forward, backward and optimizer of one rank alone.
        buckets: for each, when it is ready (as a share of the backward), and its bytes.
    """
    begin = parts["forward"]
    end = begin
    for share, nbytes in buckets:
        ready = begin + share * parts["backward"]
        end = max(end, ready) + network.collective_time("all_reduce", ranks, nbytes, link)
    return max(end, begin + parts["backward"]) + parts["optimizer"]


def in_turns(
    trials: dict[str, Callable[[], Trial]], warmup: int, steps: int, rounds: int
) -> dict[str, dict[str, float]]:
    """Measures the trials in turns, in several rounds, and returns the medians of each.

    Whatever else the machine does in the meantime then affects all of them equally.
    """
    found: dict[str, list[dict[str, float]]] = {name: [] for name in trials}
    running = {name: make() for name, make in trials.items()}
    for _ in range(rounds):
        for name, trial in running.items():
            found[name].append(trial.medians(warmup, steps))
    return {
        name: {part: statistics.median(of[part] for of in each) for part in each[0]}
        for name, each in found.items()
    }
