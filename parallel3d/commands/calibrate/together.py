"""What ranks of one host do to each other: collectives, messages, and cores that work at once."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from itertools import product

import torch
import torch.distributed as dist

from parallel3d.comm.exchange import all_gather_json
from parallel3d.comm.process_groups import ProcessGroups
from parallel3d.comm.shared_memory import SPIN_S
from parallel3d.commands.bench.operations import BenchOperation, Site, prepare
from parallel3d.commands.calibrate.kernels import Point, table_of
from parallel3d.commands.calibrate.timing import clock_of, seconds_of
from parallel3d.config.schema import LaunchConfig
from parallel3d.device import accelerator
from parallel3d.host.devices import cores
from parallel3d.pipeline.mailbox import SharedMemoryP2P
from parallel3d.plan.measured.machine import COLLECTIVES, SHARED
from parallel3d.plan.measured.tables import Table
from parallel3d.topology.layout import Layout

SIZES = (64, 4096, 65536, 524288, 4 << 20)  # bytes
LARGE_SIZES = (1024, 65536, 1 << 20, 16 << 20, 256 << 20)
# Calls of a window, too short to be disturbed always; the best window counts.
CALLS, WINDOWS, FEW_WINDOWS = 4, 40, 8
MOST_WAIT = 3.0  # times a call's work: what the wall shows beyond is a neighbour's
MOVED = 1 << 22  # elements of a sum that no cache holds
SQUARE = 384  # of a product that a cache holds

Tell = Callable[[str], None]


def collectives(
    ranks: Sequence[int], device: torch.device, launch: LaunchConfig, tell: Tell
) -> dict[str, Table]:
    """Seconds of each collective over the first so many ranks; collective over the world.

    Ranks that share cores (the tables named shared) sleep where they wait, and what counts is the
    work of each: their wait for a core would count a neighbour's work as theirs. Ranks with a core
    or a GPU each look for their peers, and the clock on the wall counts.
    """
    found: dict[str, dict[Point, float]] = {}
    world, sizes = dist.get_world_size(), SIZES
    if accelerator.is_accelerator(device):
        sizes = LARGE_SIZES
    for count in ranks:
        layout = Layout(tp=count, dp=world // count)
        groups = ProcessGroups.create(layout, device.type, launch.timeout_s, launch)
        boxes = None
        if device.type == "cpu" and launch.shared_memory:
            tp = groups.tp
            boxes = SharedMemoryP2P.open(tp.handle, tp.index, tp.size, launch.timeout_s)
        for name, size, shares in product(COLLECTIVES, sizes, _ways(count, device)):
            tell(f"{name} over {count} ranks")
            site = Site(groups.tp, device, boxes, chain=name == "send_recv")
            _spin(site, 0.0 if shares else SPIN_S)
            reduction = "sum" if name.startswith(("all_reduce", "reduce")) else None
            run = prepare(BenchOperation(name, reduction, own=True), site, size).run
            seconds = _slowest(run, groups, count, device, shares)
            if not shares and (work := found.get(name + SHARED)):
                seconds = min(seconds, MOST_WAIT * work[count, size])
            found.setdefault(name + SHARED * shares, {})[count, size] = seconds
        if boxes is not None:
            boxes.memory.close()
        groups.close()
    tables = {name: table_of(points) for name, points in found.items()}
    for name in COLLECTIVES if tables else ():  # one core, or GPUs: there is one way
        tables.setdefault(name, tables.get(name + SHARED))
        tables.setdefault(name + SHARED, tables[name])
    return tables


def _ways(count: int, device: torch.device) -> list[bool]:
    """Whether ranks share cores: both where they need not."""
    if accelerator.is_accelerator(device):
        return [False]
    return [True, False] if count <= cores() else [True]


def _spin(site: Site, seconds: float) -> None:
    """How long ranks look before they sleep, as in a run of so many."""
    for one in (site.group.shared, site.boxes):
        if one is not None:
            one.memory.spin_s = seconds


def _slowest(
    run: Callable[[], object], groups: ProcessGroups, count: int, device: torch.device, shares: bool
) -> float:
    """Seconds of one call in the first group, of its slowest rank; the same on every rank."""
    seconds = 0.0
    if groups.rank < count:
        seconds = _seconds(run, groups, device, shares)
    return max(all_gather_json(seconds, dist.group.WORLD, device))


def _seconds(
    run: Callable[[], object], groups: ProcessGroups, device: torch.device, shares: bool
) -> float:
    wall, work = [], []
    run()
    dist.barrier(group=groups.tp.handle)
    for _ in range(FEW_WINDOWS if shares else WINDOWS):
        accelerator.synchronize(device)
        begun, worked = time.perf_counter(), time.process_time()
        for _ in range(CALLS):
            run()
        accelerator.synchronize(device)
        wall.append((time.perf_counter() - begun) / CALLS)
        work.append((time.process_time() - worked) / CALLS)
    return sorted(work)[len(work) // 4] if shares else min(wall)


def slowing(device: torch.device, tell: Tell) -> dict[str, Table]:
    """How much longer products and sums take with so many ranks at work; collective.

    Up to as many as there are cores: beyond, they take turns, which the clock counts.
    """
    world, found = dist.get_world_size(), {}
    most = min(world, cores()) if device.type == "cpu" else world
    counts = [n for n in (2**i for i in range(16)) if n <= most]
    a = torch.rand(SQUARE, SQUARE, device=device)
    x, y = (torch.rand(MOVED, device=device) for _ in range(2))
    out = torch.empty_like(x)
    runs = {"together.gemm": lambda: a @ a, "together.move": lambda: torch.add(x, y, out=out)}
    for name, run in runs.items():
        times: dict[Point, float] = {}
        for count in counts:
            tell(f"{name} on {count} ranks")
            times[count,] = min(_at_once(run, count, device) for _ in range(3))
        alone = times[1,]
        table = {point: max(1.0, seconds / alone) for point, seconds in times.items()}
        found[name] = table_of(table)
    return found


def _at_once(run: Callable[[], object], count: int, device: torch.device) -> float:
    """Seconds of a call with `count` ranks at it, the mean of the ranks; collective."""
    dist.barrier()
    seconds = None
    if dist.get_rank() < count:
        until = time.perf_counter() + 0.05
        times = [seconds_of(run, device)]
        while time.perf_counter() < until:
            times.append(seconds_of(run, device))
        seconds = sorted(times)[len(times) // 2]
    said = [s for s in all_gather_json(seconds, dist.group.WORLD, device) if s is not None]
    return sum(said) / len(said)


def threads(device: torch.device, tell: Tell) -> Table:
    """How much longer a product takes with so many threads than with one; on one rank alone."""
    if accelerator.is_accelerator(device):
        return Table(((1,),), (1.0,))
    before, times = torch.get_num_threads(), {}
    a = torch.rand(2 * SQUARE, 2 * SQUARE)
    for count in (n for n in (2**i for i in range(16)) if n <= cores()):
        tell(f"{count} threads")
        torch.set_num_threads(count)
        times[count,] = min(seconds_of(lambda: a @ a, device, time.perf_counter) for _ in range(5))
    torch.set_num_threads(before)
    alone = times[1,]
    return table_of({point: min(1.0, seconds / alone) for point, seconds in times.items()})


def peak_tflops(device: torch.device, dtype: torch.dtype) -> float:
    """Of the fastest product seen: of one device, or of one thread's core."""
    clock, best = clock_of(device), 0.0
    for size in (512, 1024) if device.type == "cpu" else (4096, 8192):
        a = torch.rand(size, size, device=device).to(dtype)
        best = max(best, 2 * size**3 / seconds_of(lambda a=a: a @ a, device, clock))
    return best / 1e12
