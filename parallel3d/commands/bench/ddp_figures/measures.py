"""The measurements of `bench ddp`, one for each figure of Li et al. 2020 that it repeats."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import pairwise

import torch
import torch.distributed as dist
import torch.nn.functional as F

from parallel3d.comm import collectives
from parallel3d.comm.group import Group
from parallel3d.commands.bench.ddp_figures.nets import inputs, made
from parallel3d.parts.ddp.ddp import DistributedDataParallel
from parallel3d.parts.ddp.transport import BackendTransport
from parallel3d.topology.cluster.parts import Link
from parallel3d.topology.price import costs

PARTS = ("forward", "backward", "exposed", "optimizer")
Row = dict[str, float | int | str]


@dataclass
class Trial:
    """A net under some options, step by step on this rank.

    Attributes:
        every: steps of which the last one alone is reduced.
        in_turn: more groups of the same ranks, among which buckets alternate.
    """

    name: str
    group: Group
    bucket_cap_mb: float | None = None
    overlap: bool = True
    every: int = 1
    in_turn: Sequence[dist.ProcessGroup] = ()

    def __post_init__(self) -> None:
        self.net = DistributedDataParallel(
            made(self.name),
            self.group,
            bucket_cap_mb=self.bucket_cap_mb,
            overlap=self.overlap,
        )
        self.optimizer = torch.optim.SGD(self.net.parameters(), lr=1e-3)
        self.inputs, self.labels = inputs(self.name, self.group.index)
        self.steps = 0
        self.step()  # after it the buckets are in their final order
        transport = self.net.reducer.transport if self.net.reducer else None
        if self.in_turn and isinstance(transport, BackendTransport):
            transport.handles = list(self.in_turn)

    def step(self) -> dict[str, float]:
        """One step; seconds by part. What of the communication the backward did not hide is
        exposed."""
        self.steps += 1
        reduced = self.steps % self.every == 0
        marks = [time.perf_counter()]
        with nullcontext() if reduced else self.net.no_sync():
            made = self.net(self.inputs)
            loss = F.cross_entropy(made.flatten(0, -2), self.labels.flatten())
            marks.append(time.perf_counter())
            loss.backward()
        marks.append(time.perf_counter())
        if reduced:
            self.optimizer.step()
            self.optimizer.zero_grad()
        marks.append(time.perf_counter())
        reducer = self.net.reducer
        exposed = reducer.exposed_s if reducer and reduced else 0.0
        forward, backward, update = (b - a for a, b in pairwise(marks))
        return dict(zip(PARTS, (forward, backward - exposed, exposed, update), strict=True))

    def medians(self, warmup: int, steps: int) -> dict[str, float]:
        """Of each part, and of the whole ("step") by its slowest rank; seconds, on every rank."""
        found = []
        for number in range(warmup + steps):
            collectives_of(self.group)
            parts = self.step()
            if number >= warmup:
                found.append([*parts.values(), sum(parts.values())])
        times = torch.tensor(found, dtype=torch.float64)
        slowest = times[:, -1].clone()
        if self.group.size > 1:
            dist.all_reduce(times, group=self.group.handle)
            dist.all_reduce(slowest, dist.ReduceOp.MAX, group=self.group.handle)
        means = (times / self.group.size).median(0).values.tolist()
        whole = slowest.mean().item() if self.every > 1 else slowest.median().item()
        return dict(zip(PARTS, means[:-1], strict=True)) | {"step": whole}


def collectives_of(group: Group) -> None:
    """All ranks of a group are here."""
    if group.size > 1:
        dist.barrier(group.handle)


def all_reduce_times(
    ways: dict[str, Group], total: int, sizes: Sequence[int], warmup: int, calls: int
) -> list[Row]:
    """Figure 2 (a), (b): seconds to sum `total` fp32 numbers by so many a call."""
    rows: list[Row] = []
    for way, group in ways.items():
        for size in sizes:
            parts = [torch.ones(size) for _ in range(total // size)]
            seconds = []
            for number in range(warmup + calls):
                dist.barrier(group.handle)
                start = time.perf_counter()
                works = [collectives.all_reduce_bucket(part, group) for part in parts]
                for work in works:
                    work.wait()
                if number >= warmup:
                    seconds.append(time.perf_counter() - start)
            slowest = torch.tensor(seconds, dtype=torch.float64)
            dist.all_reduce(slowest, dist.ReduceOp.MAX, group=group.handle)
            median = slowest.median().item()
            rows.append({"way": way, "parameters": size, "calls": len(parts), "seconds": median})
    return rows


def readiness(name: str, group: Group, steps: int) -> list[Row]:
    """Figure 2 (c), (d): when how many gradients are ready, seconds since the backward began."""
    net = DistributedDataParallel(made(name), group)
    images, labels = inputs(name, group.index)
    times: list[list[float]] = []
    sizes: list[int] = []
    start = 0.0

    def arrived(parameter: torch.nn.Parameter) -> None:
        times[-1].append(time.perf_counter() - start)
        sizes.append(parameter.numel())

    for parameter in net.parameters():
        parameter.register_post_accumulate_grad_hook(arrived)
    for _ in range(steps):
        loss = F.cross_entropy(net(images).flatten(0, -2), labels.flatten())
        times.append([])
        sizes.clear()
        with net.no_sync():  # computing alone
            net.reducer.enabled = False
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
    """Seconds of a step on more ranks than there are: the buckets leave one after the other.

    Args:
        parts: forward, backward and optimizer of one rank alone.
        buckets: of each when it is ready, as a share of the backward, and its bytes.
    """
    begin = parts["forward"]
    end = begin
    for share, nbytes in buckets:
        ready = begin + share * parts["backward"]
        end = max(end, ready) + costs.all_reduce(ranks, nbytes, link)
    return max(end, begin + parts["backward"]) + parts["optimizer"]


def in_turns(
    trials: dict[str, Callable[[], Trial]], warmup: int, steps: int, rounds: int
) -> dict[str, dict[str, float]]:
    """Medians of each over rounds in which all take their turns, so that what else the machine
    does meets all alike."""
    found: dict[str, list[dict[str, float]]] = {name: [] for name in trials}
    running = {name: make() for name, make in trials.items()}
    for _ in range(rounds):
        for name, trial in running.items():
            found[name].append(trial.medians(warmup, steps))
    return {
        name: {part: statistics.median(of[part] for of in each) for part in each[0]}
        for name, each in found.items()
    }
