"""Measurements of `parallel3d calibrate`: a block, the ends, collectives, cores. Best of several.

Every rank runs `calibrate`. The first rank times the actions of the pipeline executor on training's
own stages, with the sizes that one tensor rank has: the embedding, a few blocks, the head with the
loss; then the optimizer, and what a step takes besides. The first 2, 4, … ranks measure collectives
and messages, and how much busy ranks slow each other. The first rank writes the cluster file.
"""

from __future__ import annotations

import dataclasses
import datetime
import os
import socket
import sys
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from parallel3d.comm.exchange import all_gather_json
from parallel3d.comm.process_groups import SINGLE, ProcessGroups
from parallel3d.comm.shared_memory import SPIN_S
from parallel3d.commands.bench.operations import BenchOperation, Site, prepare
from parallel3d.commands.calibrate.command import written_to
from parallel3d.config.schema import Config, LaunchConfig, ModelConfig, OptimConfig
from parallel3d.config.sections import PARTS, parts_of
from parallel3d.data.sampler import Sample
from parallel3d.data_parallel.engine import data_parallel_engine
from parallel3d.device import accelerator
from parallel3d.device.precision import compute_dtype, set_matmul_precision
from parallel3d.errors import print_line
from parallel3d.estimate.profiled_cost import (
    COLLECTIVES,
    SHARED,
    WAYS,
    BlockShape,
    CalibrationSource,
    MeasuredMachine,
    Table,
)
from parallel3d.files import replace_durably
from parallel3d.host.devices import cores, device_name
from parallel3d.metrics.provenance import version_of
from parallel3d.models.layers import BuildContext
from parallel3d.models.transformer import Stage
from parallel3d.optim import Optimizer
from parallel3d.parameters.sharding import Initializer, ParameterSpec, Segment, SegmentPart
from parallel3d.pipeline.executor import ActionTimes, Executor
from parallel3d.pipeline.p2p import P2PRoute, SharedMemoryP2P
from parallel3d.run.launch import Worker
from parallel3d.schedules.actions import Action, Kind
from parallel3d.schedules.orders import StageAssignment
from parallel3d.topology.layout import Layout
from parallel3d.trainer import Trainer

Run = Callable[[], object]
Tell = Callable[[str], None]
LEAST_S = 1e-3  # of a burst: calls are repeated up to that
MOST_CALLS = 1000
BURSTS, LONG_S = 3, 0.02  # longer bursts are not repeated
MEASURED_KEY = "parallel3d/calibrate/measured"
SINGLE_RANK = Table(((1.0, 2.0), (64.0, 128.0)), (1e-4,) * 4)  # of one device: never used


def calibrate(config: Config, worker: Worker) -> int:
    """Measures on every rank and writes the file; collective. Returns the exit code, 0."""
    device, began = torch.device(worker.device), time.perf_counter()
    set_matmul_precision(config.precision)
    tell = _teller(worker)
    numbers = {"rank_gb": _own_memory(device), "memory_gb": _memory(device)}
    sizes = group_sizes(worker.world_size)
    tables = collectives(sizes, device, config.launch, tell) if sizes else {}
    tables["together"] = slowing(config, device, tell)
    if worker.rank == 0:  # the others wait idle
        tables["threads"] = threads(device, tell)
        numbers["peak_tflops"] = peak_tflops(device, compute_dtype(config.precision))
        found, numbers["launch.action"] = pieces(config, device, worker.world_size, tell)
        tables |= found | updates(config, device, tell)
        numbers["launch.step"] = step_launch(config, device, numbers["launch.action"], tables)
        if not sizes:
            names = [name + way for name in COLLECTIVES for way in ("", SHARED)]
            tables |= dict.fromkeys(names, SINGLE_RANK)
        made, path = provenance(config, device), written_to(config)
        machine = MeasuredMachine(made, BlockShape.of(config.model), tables, numbers)
        replace_durably(path, machine.text().encode())
        _print_result(path, machine, worker.world_size, time.perf_counter() - began)
    _wait_for_rank_0(worker)
    return 0


def _wait_for_rank_0(worker: Worker) -> None:
    """Waits at the store, as rank 0 takes longer than a collective's timeout."""
    if worker.store is None:
        return
    if worker.rank == 0:
        worker.store.set(MEASURED_KEY, "")
    else:
        worker.store.wait([MEASURED_KEY], datetime.timedelta(days=1))


def provenance(config: Config, device: torch.device) -> CalibrationSource:
    """Returns device, software and date of a file that is made now."""
    on_device = accelerator.is_accelerator(device)
    return CalibrationSource(
        device=device.type,
        name=device_name(device.type) or accelerator.name(device),
        count=accelerator.module(device).device_count() if on_device else cores(),
        type=config.precision.name,
        host=socket.gethostname(),
        torch=str(torch.__version__),
        parallel3d=version_of("parallel3d") or "source",
        date=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    )


def _teller(worker: Worker) -> Callable[[str], None]:
    """Returns a function that shows progress on rank 0's terminal."""
    shown = worker.rank == 0 and sys.stderr.isatty()

    def tell(what: str) -> None:
        worker.phase = f"calibrate: {what}"
        if shown:
            sys.stderr.write(f"\r\x1b[Kcalibrate: {what}")
            sys.stderr.flush()

    return tell


def _own_memory(device: torch.device) -> float:
    """Returns 1e9 bytes of a rank without a model: its own pages, or the GPU's context."""
    if accelerator.is_accelerator(device):
        free, total = accelerator.module(device).mem_get_info(device)
        return max(total - free, 1) / 1e9
    try:
        lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
        return max(sum(int(line.split()[1]) for line in lines if line.startswith("Pss:")), 1) / 1e6
    except (OSError, ValueError, IndexError):
        return 0.25


def _memory(device: torch.device) -> float:
    """Returns 1e9 bytes of the GPU, or of the host."""
    if accelerator.is_accelerator(device):
        return accelerator.module(device).mem_get_info(device)[1] / 1e9
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9


def _print_result(path: Path, machine: MeasuredMachine, ranks: int, seconds: float) -> None:
    if sys.stderr.isatty():
        sys.stderr.write("\r\x1b[K")
    made = machine.made
    each = "a core" if made.device == "cpu" else "a GPU"
    print(
        f"{made.name}, {made.count} of them, {made.type}: "
        f"{1e3 * machine.numbers['peak_tflops']:.0f} GFLOP/s {each} at best; blocks of "
        f"{machine.model.name}, groups of up to {ranks} ranks. {seconds:.0f} s."
    )
    print(f"parallel3d plan cluster={path}  prices layouts of this machine; so does")
    print(f"parallel3d train layout=auto cluster={path}")
    if made.device == "cpu" and os.getloadavg()[0] > 1.5 * ranks:
        print_line(
            f"the machine was busy (load {os.getloadavg()[0]:.1f}): calibrate anew when it is not"
        )


def group_sizes(world_size: int) -> list[int]:
    """Returns 2, 4, 8, … up to the world."""
    return [n for n in (2**i for i in range(1, 20)) if n <= world_size]


def clock_of(device: torch.device) -> Callable[[], float]:
    """Returns the CPU time on a CPU, which neighbours hardly disturb, else the wall clock."""
    if accelerator.is_accelerator(device):
        return time.perf_counter
    return time.process_time


def seconds_of(run: Run, device: torch.device, clock: Callable[[], float] | None = None) -> float:
    """Returns seconds of one call with its device work, without the first call.

    The best of a few bursts, each short enough for a process's turn on a busy core.
    """
    now = clock or clock_of(device)
    run()
    accelerator.synchronize(device)
    calls, found = 1, []
    while True:
        start = now()
        for _ in range(calls):
            run()
        accelerator.synchronize(device)
        spent = now() - start
        if spent >= LEAST_S or calls >= MOST_CALLS:
            found.append(spent / calls)
            if len(found) == BURSTS or spent > LONG_S:
                return min(found)
        else:
            calls = min(MOST_CALLS, max(2 * calls, int(calls * LEAST_S / max(spent, 1e-6)) + 1))


Point = tuple[int, ...]

# Pieces of a model: the executor's actions on stages of one process.
BLOCKS = 4  # of a stage: more weights than the next block finds in a cache
MICRO_BATCHES = (1, 2, 4, 16)  # the first two always, the others up to the global batch
TOGETHER = 2  # micro-batches of a run of the executor
RUN_S, MOST_RUNS, LONG_RUN_S = 0.4, 8, 8.0  # a point's runs in a pass; no larger micro-batch after
LEAST = 1e-7


class WorkTimes(ActionTimes):
    """Times actions by a CPU's seconds of this process, which neighbours hardly disturb."""

    def _now(self) -> Any:
        return super()._now() if accelerator.is_accelerator(self.device) else time.process_time()


def shard_of(model: ModelConfig, tp: int) -> ModelConfig:
    """Returns a model whose block and ends are those of one of `tp` tensor ranks."""
    return dataclasses.replace(
        model,
        num_attention_heads=model.num_attention_heads // tp,
        num_query_groups=max(1, model.kv_heads // tp),
        head_dim=model.head_size,
        ffn_hidden_size=model.ffn_size // tp,
        vocab_size=model.padded_vocab_size // tp,
        vocab_multiple=1,
    )


def tensor_sizes(model: ModelConfig, most: int) -> list[int]:
    """Returns the tp that layouts of up to `most` ranks have."""
    sizes = model.num_attention_heads, model.ffn_size, model.padded_vocab_size
    return [tp for tp in range(1, most + 1) if not any(size % tp for size in sizes)]


class Pieces:
    """A pipeline of one rank: the embedding, a stage of blocks for each way, and the head.

    Args:
        model: of one tensor rank.
        ways: parts that the blocks of a stage recompute.
    """

    def __init__(
        self,
        config: Config,
        model: ModelConfig,
        size: int,
        device: torch.device,
        ways: Sequence[Collection[str]] = ((),),
    ) -> None:
        dtype, groups = compute_dtype(config.precision), ProcessGroups.single()
        config = dataclasses.replace(config, model=model, micro_batch_size=size, recompute="none")
        initializer = Initializer(
            config.seed, torch.promote_types(dtype, torch.float32), device, deferred=True
        )
        usual = BuildContext.of_run(config, initializer, groups.tp)
        self.blocks, self.device = min(BLOCKS, model.num_layers), device
        stages = [Stage(model, range(0), True, False, usual, first_and_last_share_rank=True)]
        for i, way in enumerate(ways):
            context = dataclasses.replace(usual, recompute=parts_of(tuple(way)))
            layers = range(i * self.blocks, (i + 1) * self.blocks)
            stages.append(Stage(model, layers, False, False, context))
        stages.append(Stage(model, range(0), False, True, usual, stages[0], True))
        self.engine = data_parallel_engine(config, stages, initializer, dtype, groups)
        for stage in stages:
            stage.pre_forward = self.engine.pre_forward
        route = P2PRoute(groups.pp, StageAssignment(1, len(stages)))
        shape = (size, model.seq_length, model.hidden_size)
        self.executor = Executor(stages, route, shape, dtype, device)
        chunks = range(len(stages))
        orders = ((Kind.F, chunks, (Kind.F,)), (Kind.I, chunks[::-1], (Kind.I, Kind.W)))
        self.plan = [
            Action(kind, m, chunk)
            for m in range(TOGETHER)
            for _, order, kinds in orders
            for chunk in order
            for kind in kinds
        ]
        tokens = torch.arange(size * model.seq_length, device=device).view(size, -1)
        tokens = tokens % model.vocab_size
        self.batch = (tokens, tokens, torch.ones_like(tokens, dtype=torch.bool), None, None)
        self.scale = torch.tensor(1.0 / tokens.numel(), device=device)

    def run(self) -> float:
        """Runs two micro-batches; returns seconds between the actions, for one action."""
        now = clock_of(self.device)
        self.engine.start_step(TOGETHER)
        accelerator.synchronize(self.device)
        self.executor.action_times = times = WorkTimes(self.device)
        begun = now()
        self.executor.train_step(
            self.plan, lambda _: self.batch, self.scale, self.engine.start_last_microbatch
        )
        accelerator.synchronize(self.device)
        spent = now() - begun
        self.engine.finish_step()
        inside = sum(end - start for _, start, end in times.measured())
        return max(spent - inside, 0.0) / len(self.plan)

    def best(self) -> dict[tuple[str, int], float]:
        """Returns (kind, chunk) → seconds of an action, and ("", 0) → of the time between two."""
        found: dict[tuple[str, int], float] = {}
        self.run()
        begun = time.perf_counter()
        for _ in range(MOST_RUNS):
            actions = {("", 0): [self.run()]}
            assert self.executor.action_times is not None
            spans = self.executor.action_times.measured()
            for action, (_, start, end) in zip(self.plan, spans, strict=True):
                actions.setdefault((action.kind.value, action.chunk), []).append(end - start)
            for key, each in actions.items():  # the mean of a run, as a step has slow ones too
                mean = sum(each) / len(each)
                found[key] = min(mean, found.get(key, mean))
            if time.perf_counter() - begun > RUN_S:
                break
        return found


def pieces(
    config: Config, device: torch.device, most: int, tell: Tell
) -> tuple[dict[str, Table], float]:
    """Measures blocks and ends of every tp and several micro-batches, in interleaved passes.

    Returns the tables, and seconds of the host between two actions.
    """
    model, kinds = config.model, dict(zip(WAYS, "FIW", strict=True))
    found: dict[str, dict[Point, float]] = {}
    between = float("inf")

    def keep(name: str, point: Point, seconds: float) -> None:
        points = found.setdefault(name, {})
        points[point] = max(min(seconds, points.get(point, seconds)), LEAST)

    sizes = [n for n in MICRO_BATCHES if n <= max(2, config.global_batch_size)]
    for number in range(config.calibrate.passes):
        for tp in tensor_sizes(model, most):
            shard = shard_of(model, tp)
            for size in list(sizes):
                tell(f"tp={tp} micro_batch_size={size}, pass {number + 1}")
                begun, here = time.perf_counter(), Pieces(config, shard, size, device)
                times = here.best()
                between = min(between, times["", 0])
                for name, chunk, count in (
                    ("embedding", 0, 1), ("block", 1, here.blocks), ("head", 2, 1)
                ):  # fmt: skip
                    for way, kind in kinds.items():
                        point = (tp, size * model.seq_length)
                        keep(f"{name}.{way}", point, times[kind, chunk] / count)
                if tp == 1 and number == 0 and time.perf_counter() - begun > LONG_RUN_S:
                    sizes = [n for n in sizes if n <= max(size, 2)]
            tell(f"tp={tp}, recomputation, pass {number + 1}")
            ways = [(), *((part,) for part in PARTS)]
            times = Pieces(config, shard, sizes[0], device, ways).best()
            for chunk, part in enumerate(PARTS, 2):
                more = times["I", chunk] - times["I", 1]
                keep(f"recompute.{part}", (tp,), max(more / times["F", 1], 1e-3))
    return {name: table_of(points) for name, points in found.items()}, max(between, LEAST)


UPDATES = (1 << 12, 1 << 15, 1 << 18, 1 << 21, 1 << 23)  # elements, on a core
LARGE_UPDATES = (1 << 16, 1 << 20, 1 << 24, 1 << 27)


def updates(config: Config, device: torch.device, tell: Tell) -> dict[str, Table]:
    """Measures steps of the optimizers."""
    dtype, found = compute_dtype(config.precision), {}
    sizes = LARGE_UPDATES if accelerator.is_accelerator(device) else UPDATES
    for name in ("adamw", "sgd"):
        tell(name)
        runs = {(count,): update(name, count, dtype, device) for count in sizes}
        found[name] = table_of({point: seconds_of(run, device) for point, run in runs.items()})
    return found


def update(name: str, count: int, dtype: torch.dtype, device: torch.device) -> Run:
    """Makes a step that clears, norms, clips, updates and casts one flat shard."""
    wide = torch.promote_types(dtype, torch.float32)
    master, grad = (torch.rand(count, device=device, dtype=wide) for _ in range(2))
    param = master if dtype == wide else master.to(dtype)
    part = SegmentPart("weight", ParameterSpec((count,), (), replicated=False), 0, count)
    segment = Segment(param, grad, master, True, False, tied_lm_head=False, parts=[part])
    optimizer = Optimizer(OptimConfig(name=name), [segment], SINGLE)
    clips = 2 * optimizer.optim.clip_grad

    def run() -> None:
        grad.zero_()
        optimizer.squared_norm()
        optimizer.step(1e-6, clips)
        if param is not master:
            param.copy_(master)

    return run


def table_of(points: dict[Point, float]) -> Table:
    """Returns a table of a complete grid of points."""
    axes = tuple(tuple(sorted(set(axis))) for axis in zip(*points, strict=True))
    return Table(axes, tuple(points[p] for p in product(*axes)))


@dataclass
class Same:
    """Samples that cost nothing to make."""

    seq_length: int

    def sample(self, i: int) -> Sample:
        tokens = (np.arange(self.seq_length + 1) + i) % 256
        return Sample(tokens, np.ones(self.seq_length, dtype=bool))


STEPS = 12


def step_launch(
    config: Config, device: torch.device, action: float, tables: Mapping[str, Table]
) -> float:
    """Returns seconds of a step beyond its actions and its update, of a model of one layer."""
    model = dataclasses.replace(config.model, num_layers=1)
    small = dataclasses.replace(
        config, dp=1, micro_batch_size=1, global_batch_size=1, model=model, recompute="none"
    )
    trainer = Trainer(small, ProcessGroups.single(), device, train_source=Same(model.seq_length))
    elements = sum(p.numel() for stage in trainer.stages for p in stage.parameters())
    clock, left = clock_of(device), []
    for _ in range(STEPS):
        accelerator.synchronize(device)
        trainer.executor.action_times = times = WorkTimes(device)
        begun = clock()
        trainer.train_step()
        accelerator.synchronize(device)
        spans = times.measured()
        spent = clock() - begun - sum(end - start for _, start, end in spans)
        left.append(spent - action * len(spans))
    return max(min(left) - tables[config.optim.name](elements), LEAST)


# Collectives, messages, and cores that several ranks use at once.
SIZES = (64, 4096, 65536, 524288, 4 << 20)  # bytes
LARGE_SIZES = (1024, 65536, 1 << 20, 16 << 20, 256 << 20)
# Calls of a window, short enough to be undisturbed sometimes; the best window counts.
CALLS, WINDOWS, FEW_WINDOWS = 4, 40, 8
MOST_WAIT = 3.0  # times a call's CPU work: longer wall times are a neighbour's
SQUARE = 384  # of a matmul that fits into a cache


def collectives(
    ranks: Sequence[int], device: torch.device, launch: LaunchConfig, tell: Tell
) -> dict[str, Table]:
    """Measures each collective over the first 2, 4, … ranks; collective over the world.

    Ranks that share cores (tables with suffix SHARED) sleep while they wait, and only their CPU
    work counts, as a wait for a core is a neighbour's work. Ranks with their own core or GPU spin,
    and the wall clock counts.
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
            assert tp.handle is not None
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
    for name in COLLECTIVES if tables else ():  # on one core or on GPUs there is only one way
        either = tables.get(name, tables.get(name + SHARED))
        assert either is not None
        tables.setdefault(name, either)
        tables.setdefault(name + SHARED, either)
    return tables


def _ways(count: int, device: torch.device) -> list[bool]:
    """Whether ranks share cores; both if they need not."""
    if accelerator.is_accelerator(device):
        return [False]
    return [True, False] if count <= cores() else [True]


def _spin(site: Site, seconds: float) -> None:
    """Sets how long ranks spin before they sleep."""
    for one in (site.group.shared, site.boxes):
        if one is not None:
            one.memory.spin_s = seconds


def _slowest(
    run: Callable[[], object], groups: ProcessGroups, count: int, device: torch.device, shares: bool
) -> float:
    """Returns seconds of one call in the first group, on its slowest rank; equal on every rank."""
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


def slowing(config: Config, device: torch.device, tell: Tell) -> Table:
    """Measures the slow-down of blocks by busy ranks, up to one a core; collective."""
    world = dist.get_world_size()
    most = min(world, cores()) if device.type == "cpu" else world
    run, times = Pieces(config, config.model, 1, device).run, {}
    for count in (n for n in (2**i for i in range(16)) if n <= most):
        tell(f"blocks on {count} ranks at once")
        times[count,] = min(_at_once(run, count, device) for _ in range(3))
    return table_of({at: max(1.0, seconds / times[1,]) for at, seconds in times.items()})


def _at_once(run: Callable[[], object], count: int, device: torch.device) -> float:
    """Returns seconds of a call on `count` ranks at once, the mean of the ranks; collective."""
    dist.barrier()
    seconds = None
    if dist.get_rank() < count:
        until = time.perf_counter() + 0.05
        times = [seconds_of(run, device)]
        while time.perf_counter() < until:
            times.append(seconds_of(run, device))
        seconds = sorted(times)[len(times) // 2]
    seen = [s for s in all_gather_json(seconds, dist.group.WORLD, device) if s is not None]
    return sum(seen) / len(seen)


def threads(device: torch.device, tell: Tell) -> Table:
    """Measures the speed-up of a matmul by threads, on one rank alone."""
    if accelerator.is_accelerator(device):
        return Table(((1,),), (1.0,))
    before = torch.get_num_threads()
    times: dict[Point, float] = {}
    a = torch.rand(2 * SQUARE, 2 * SQUARE)
    for count in (n for n in (2**i for i in range(16)) if n <= cores()):
        tell(f"{count} threads")
        torch.set_num_threads(count)
        times[count,] = min(seconds_of(lambda: a @ a, device, time.perf_counter) for _ in range(5))
    torch.set_num_threads(before)
    alone = times[1,]
    return table_of({point: min(1.0, seconds / alone) for point, seconds in times.items()})


def peak_tflops(device: torch.device, dtype: torch.dtype) -> float:
    """Returns the rate of the fastest matmul: of one device, or of one thread's core."""
    clock, best = clock_of(device), 0.0
    for size in (512, 1024) if device.type == "cpu" else (4096, 8192):
        a = torch.rand(size, size, device=device).to(dtype)
        best = max(best, 2 * size**3 / seconds_of(partial(torch.matmul, a, a), device, clock))
    return best / 1e12
