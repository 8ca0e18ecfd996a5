"""Measures the figures of Li et al. 2020 (PyTorch Distributed) on this machine.

DistributedDataParallel of `import parallel3d` trains two small nets, over the backend and through
shared memory. The figures show where the time of a step goes, and how it depends on bucket size,
number of ranks, steps between reductions and number of groups. They need no data. docs/ddp.md has
the results.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.figures.ddp.measures import (
    PARTS,
    Trial,
    all_reduce_times,
    in_turns,
    priced_step,
    readiness,
)
from benchmarks.figures.ddp.nets import NETS, made
from benchmarks.figures.ddp.report import write_report
from parallel3d.blueprint.cluster import Link
from parallel3d.comm.group import SINGLE, Group
from parallel3d.comm.process_groups import GLOO_ON, Interfaces, ProcessGroups, gloo_on
from parallel3d.commands.bench.comm import MeasuredOperation, fit
from parallel3d.commands.options import CommandConfig
from parallel3d.errors import UserError
from parallel3d.run.launch import Worker

TOTAL = 1 << 20  # number of fp32 numbers that figure 2 sums
PER_CALL = [1 << n for n in range(12, 21, 2)]
BUCKETS_MB = [0.0, 0.25, 1.0, 5.0, 25.0]
EVERY = [1, 2, 4, 8]
GROUPS = [1, 3, 5]
PRICED_TO = 256
ROUNDS = 2
WARMUP_STEPS = 1

Make = Callable[[], Trial]


def ddp_figures(config: CommandConfig, worker: Worker) -> int:
    """Measures and writes the report into the run directory; collective. Returns 0.

    Raises UserError for another dimension than dp.
    """
    for key in ("tp", "pp", "cp"):
        if getattr(config, key) != 1:
            raise UserError(
                f"{key}={getattr(config, key)} must be 1, since the figures compare replicas "
                f"only; the nearest is {key}=1"
            )
    worker.phase = "making process groups"
    groups = ProcessGroups.of_run(config, worker.device, worker.placement)
    worker.phase = "DDP figures: first steps"
    bench = Bench(config, worker, groups.dp)
    report = bench.report()
    groups.close()
    if worker.rank == 0:
        write_report(report, worker.run_dir)
    return 0


@dataclass
class Bench:
    """Measures all figures on one rank; every method is collective over the world.

    Attributes:
        device: this rank's device.
        ways: the groups over which ranks reduce, by name.
        steps: number of steps of each trial in each round, as the budget allows.
    """

    config: CommandConfig
    worker: Worker
    group: Group
    device: torch.device = field(init=False)
    ways: dict[str, Group] = field(init=False)
    steps: int = field(init=False)

    def __post_init__(self) -> None:
        self.device = torch.device(self.worker.device)
        self.ways = {"backend": replace(self.group, shared=None)}
        if self.group.shared is not None:
            self.ways["shared memory"] = self.group
        self.steps = self._steps()

    def _steps(self) -> int:
        """Returns the number of steps that the budget allows, by one step of each net; rank 0
        decides."""
        trials = 2 * len(self.ways) * (2 + len(BUCKETS_MB)) + 2 * (len(EVERY) * 2 + len(GROUPS))
        trials += 2 * (1 + len(self.ways) * len(self._worlds()))
        start = time.perf_counter()
        for name in NETS:
            Trial(name, self.ways["backend"], self.device).step()
        seconds = (time.perf_counter() - start) / 4
        left = self.config.bench.budget_s / (trials * ROUNDS * seconds) - WARMUP_STEPS
        steps = max(1, min(self.config.bench.iterations, int(left)))
        number = torch.tensor([steps], device=self.device)
        dist.broadcast(number, 0)
        return int(number)

    def report(self) -> dict[str, object]:
        """Returns the rows of each figure; times are in seconds."""
        figures: dict[str, Any] = {"ranks": self.group.size, "steps": self.steps * ROUNDS}
        for name, measure in {
            "2ab": self.calls,
            "2cd": self.ready,
            "6": self.breakdown,
            "7": self.bucket_sizes,
            "10": self.no_sync,
            "12": self.in_turn,
        }.items():
            self.worker.phase = f"DDP figures: figure {name}"
            figures[name] = measure()
        self.worker.phase = "DDP figures: figure 9"
        figures["9"], figures["link"] = self.worlds(figures["2ab"])
        return figures

    def calls(self) -> list[dict]:
        """Measures figure 2 (a), (b)."""
        bench = self.config.bench
        return all_reduce_times(
            self.ways, self.device, TOTAL, PER_CALL, bench.warmup, bench.iterations
        )

    def ready(self) -> list[dict]:
        """Measures figure 2 (c), (d)."""
        rows = []
        for name in NETS:
            rows += readiness(name, self.ways["backend"], self.device, self.steps + 2)
        return rows

    def breakdown(self) -> list[dict]:
        """Measures figure 6."""
        return self._compared(
            [
                ({"net": name, "way": way, "overlap": overlap}, self._trial(name, way, overlap))
                for name in NETS
                for way in self.ways
                for overlap in (True, False)
            ]
        )

    def _trial(self, name: str, way: str, overlap: bool = True) -> Make:
        return partial(Trial, name, self.ways[way], self.device, 1.0, overlap)

    def bucket_sizes(self) -> list[dict]:
        """Measures figures 7 and 8."""
        return self._compared(
            [
                (
                    {"net": name, "way": way, "bucket_cap_mb": size},
                    partial(Trial, name, self.ways[way], self.device, size),
                )
                for name in NETS
                for way in self.ways
                for size in BUCKETS_MB
            ]
        )

    def no_sync(self) -> list[dict]:
        """Measures figure 10: the mean of all steps if every n-th one is reduced."""
        trials = [
            (
                {"net": name, "every": every},
                partial(Trial, name, self.ways["backend"], self.device, every=every),
            )
            for name in NETS
            for every in EVERY
        ]
        return self._compared(trials, least=max(EVERY))

    def in_turn(self) -> list[dict]:
        """Measures figure 12: buckets that alternate between groups of the same ranks."""
        handles = [self._first(list(self.group.ranks)) for _ in range(max(GROUPS))]
        rows = self._compared(
            [
                (
                    {"net": name, "groups": count},
                    partial(
                        Trial, name, self.ways["backend"], self.device, 1.0, in_turn=handles[:count]
                    ),
                )
                for name in NETS
                for count in GROUPS
            ]
        )
        for handle in handles:
            dist.destroy_process_group(handle)
        return rows

    def _compared(self, trials: Sequence[tuple[dict, Make]], least: int = 1) -> list[dict]:
        numbered = {str(i): make for i, (_, make) in enumerate(trials)}
        steps = -(-max(self.steps, least) // least) * least
        warmup = WARMUP_STEPS if least == 1 else least - 1  # one step was measured already
        found = in_turns(numbered, warmup, steps, ROUNDS)
        return [keys | found[str(i)] for i, (keys, _) in enumerate(trials)]

    def _worlds(self) -> list[int]:
        return [n for n in (2, 4, 8, 16, 32) if n < self.group.size] + [self.group.size]

    def worlds(self, calls: list[dict]) -> tuple[list[dict], dict[str, float] | None]:
        """Measures figure 9: the first n ranks, and the prices by the fitted link up to
        `PRICED_TO`."""
        rows: list[dict] = []
        alone = [
            self._compared([({"net": name}, partial(Trial, name, SINGLE, self.device))])
            for name in NETS
        ]
        for n in self._worlds():
            members = list(self.group.ranks[:n])
            handle = self._first(members)
            if self.group.index < n:
                for way, whole in self.ways.items():
                    # The group's name decides whether shared memory is tried.
                    name = "ddp" if whole.shared is not None else "dp"
                    part = Group(name, tuple(members), self.group.index, handle)
                    rows += self._compared(
                        [
                            (
                                {"net": net, "way": way, "ranks": n},
                                partial(Trial, net, part, self.device),
                            )
                            for net in NETS
                        ]
                    )
                dist.destroy_process_group(handle)
            dist.barrier()
        link = self._link(calls)
        for (of_net,) in alone:
            rows.append(of_net | {"way": "alone", "ranks": 1})
            rows += self._priced(of_net, link) if link is not None else []
        told = None if link is None else {"gb_per_s": link.gb_per_s, "latency_us": link.latency_us}
        return rows, told

    def _first(self, members: list[int]) -> dist.ProcessGroup:
        """Creates a group of these ranks, on the network interfaces of the run's own groups."""
        more: dict[str, Any] = {}
        cluster, placement = self.config.cluster, self.worker.placement
        interfaces = Interfaces.of_run(cluster, placement) if self.group.size > 1 else None
        if interfaces is not None and self.group.index < len(members) > 1:
            name = interfaces.of_group(members, dist.get_rank())
            timeout = timedelta(seconds=self.config.launch.timeout_s)
            if name is not None:
                more = {"backend": GLOO_ON, "pg_options": gloo_on(name, timeout)}
        return dist.new_group(members, **more)

    def _link(self, calls: list[dict]) -> Link | None:
        """Returns the link that prices the backend's calls of figure 2 best."""
        samples = [
            MeasuredOperation(
                "all_reduce", self.group.size, 4 * row["parameters"], row["seconds"] / row["calls"]
            )
            for row in calls
            if row["way"] == "backend"
        ]
        fitted = fit(samples)
        return None if fitted is None else fitted.link

    def _priced(self, alone: dict, link: Link) -> list[dict]:
        parts = {part: alone[part] for part in PARTS}
        buckets = _buckets(alone["net"])
        sizes = [2**n for n in range(1, 9) if 2**n <= PRICED_TO]
        return [
            {
                "net": alone["net"],
                "way": "priced",
                "ranks": n,
                "step": priced_step(parts, buckets, n, link),
            }
            for n in sizes
        ]


def _buckets(name: str) -> list[tuple[float, int]]:
    """Returns the bytes of each bucket (of 1 MiB, then of 25 MiB), and the share of all gradients
    that exist when it is full, which is the share of the backward that has passed."""
    sizes = [p.nbytes for p in made(name).parameters()][::-1]
    total, ready, filled = sum(sizes), 0, 0
    found: list[tuple[float, int]] = []
    for size in sizes:
        ready, filled = ready + size, filled + size
        if filled >= (25 if found else 1) << 20 or ready == total:
            found.append((ready / total, filled))
            filled = 0
    return found
