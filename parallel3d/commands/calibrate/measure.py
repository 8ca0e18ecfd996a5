"""Measurements of `parallel3d calibrate`: kernels, launches, collectives, cores. Best of several.

Every rank runs `calibrate`: the first rank measures GEMMs, attention, norms, activations, the loss
and the optimizer over a grid of sizes, by the functions that training calls, and the launches of a
layer, an action and a step; the first 2, 4, … ranks measure collectives and messages, and how much
busy ranks slow each other. The first rank writes the cluster file.
"""

from __future__ import annotations

import dataclasses
import datetime
import os
import socket
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from parallel3d.comm.exchange import all_gather_json
from parallel3d.comm.process_groups import SINGLE, ProcessGroups
from parallel3d.comm.shared_memory import SPIN_S
from parallel3d.commands.bench.operations import BenchOperation, Site, prepare
from parallel3d.commands.calibrate.command import written_to
from parallel3d.config.checks.whole import check_config
from parallel3d.config.schema import Config, LaunchConfig, ModelConfig, OptimConfig
from parallel3d.data.sampler import Sample
from parallel3d.device import accelerator, matmul
from parallel3d.device.precision import compute_dtype, set_matmul_precision
from parallel3d.errors import print_line
from parallel3d.estimate.profiled_cost import (
    COLLECTIVES,
    SHARED,
    CalibrationSource,
    MeasuredMachine,
    Table,
    step_parts,
)
from parallel3d.files import replace_durably
from parallel3d.host.devices import cores, device_name
from parallel3d.metrics.provenance import version_of
from parallel3d.models.attention import causal_attention
from parallel3d.models.ops import rms_norm, swiglu
from parallel3d.optim import Optimizer
from parallel3d.parameters.gradients import add_matmul
from parallel3d.parameters.sharding import ParameterSpec, Segment, SegmentPart
from parallel3d.pipeline.p2p import SharedMemoryP2P
from parallel3d.run.launch import Worker
from parallel3d.tensor_parallel.loss import ChunkLoss, Objective
from parallel3d.topology.layout import Layout
from parallel3d.trainer import Trainer

Run = Callable[[], object]
LEAST_S = 1e-3  # of a burst: calls are repeated up to that
MOST_CALLS = 1000
BURSTS, LONG_S = 3, 0.02  # longer bursts are not repeated
MEASURED_KEY = "parallel3d/calibrate/measured"
SINGLE_RANK = Table(((1.0, 2.0), (64.0, 128.0)), (1e-4,) * 4)  # of one device: never used


def calibrate(config: Config, worker: Worker, grids: Grids | None = None) -> int:
    """Measures on every rank and writes the file; collective. Returns the exit code, 0."""
    device, began = torch.device(worker.device), time.perf_counter()
    set_matmul_precision(config.precision)
    tell = _teller(worker)
    numbers = {"rank_gb": _own_memory(device), "memory_gb": _memory(device)}
    sizes = group_sizes(worker.world_size)
    tables = collectives(sizes, device, config.launch, tell) if sizes else {}
    tables |= slowing(device, tell)
    if worker.rank == 0:  # the others wait idle
        tables["threads"] = threads(device, tell)
        numbers["peak_tflops"] = peak_tflops(device, compute_dtype(config.precision))
        kernels = Kernels.on(device, compute_dtype(config.precision), grids)
        tables |= tables_of(kernels, config.calibrate.passes, tell)
        made = provenance(config, device)
        numbers |= launches(config, device, made, tables, tell)
        if not sizes:
            names = [name + way for name in COLLECTIVES for way in ("", SHARED)]
            tables |= dict.fromkeys(names, SINGLE_RANK)
        path = written_to(config)
        replace_durably(path, MeasuredMachine(made, tables, numbers).text().encode())
        seconds = time.perf_counter() - began
        _print_result(path, made, numbers, worker.world_size, seconds)
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


def _print_result(
    path: Path, made: CalibrationSource, numbers: dict[str, float], ranks: int, seconds: float
) -> None:
    if sys.stderr.isatty():
        sys.stderr.write("\r\x1b[K")
    each = "a core" if made.device == "cpu" else "a GPU"
    print(
        f"{made.name}, {made.count} of them, {made.type}: {1e3 * numbers['peak_tflops']:.0f} "
        f"GFLOP/s {each} at best; groups of up to {ranks} ranks. {seconds:.0f} s."
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
Axes = tuple[tuple[int, ...], ...]
NORM_EPS = 1e-5


class Grids(NamedTuple):
    """Grid points: small sizes for a core, larger ones for a GPU."""

    gemm: Axes = ((16, 128, 1024, 4096), (16, 64, 128, 256, 1024), (16, 64, 128, 256, 1024))
    attention: Axes = ((1, 4, 16, 64), (16, 64, 256, 512), (16, 32, 64))
    norm: Axes = ((16, 128, 1024, 4096), (32, 128, 512, 1024))
    elements: Axes = ((1 << 10, 1 << 13, 1 << 16, 1 << 19, 1 << 22),)
    loss: Axes = ((64, 512, 2048), (32, 128, 512, 8192))
    update: Axes = ((1 << 12, 1 << 15, 1 << 18, 1 << 21, 1 << 23),)


LARGE = Grids(
    gemm=((256, 1024, 4096, 16384), (256, 1024, 4096, 16384), (256, 1024, 4096, 16384)),
    attention=((8, 64), (512, 2048, 8192), (64, 128)),
    norm=((1024, 8192), (1024, 8192)),
    elements=((1 << 16, 1 << 20, 1 << 24, 1 << 27),),
    loss=((1024, 8192), (8192, 32768)),
    update=((1 << 16, 1 << 20, 1 << 24, 1 << 27),),
)


class Case(NamedTuple):
    """One measurement of `table` at `point`. `before`: the table whose time is subtracted."""

    table: str
    point: Point
    make: Callable[[], Run]
    before: str | None = None


@dataclass(frozen=True)
class Kernels:
    """Measurements of one device and type."""

    device: torch.device
    dtype: torch.dtype
    grids: Grids

    @classmethod
    def on(cls, device: torch.device, dtype: torch.dtype, grids: Grids | None = None) -> Kernels:
        usual = LARGE if accelerator.is_accelerator(device) else Grids()
        return cls(device, dtype, grids or usual)

    def tensor(self, *shape: int, wide: bool = False, grad: bool = False) -> Tensor:
        dtype = torch.promote_types(self.dtype, torch.float32) if wide else self.dtype
        return torch.rand(shape, device=self.device, dtype=dtype).sub_(0.5).requires_grad_(grad)

    def cases(self) -> Iterator[Case]:
        """Yields every measurement at every point."""
        for m, n, k in product(*self.grids.gemm):
            for part in ("forward", "input", "weight"):
                yield Case(f"gemm.{part}", (m, n, k), partial(self._gemm, part, m, n, k))
        for heads, tokens, width in product(*self.grids.attention):
            for name, rotates in (("attention", False), ("rotary", True)):
                make = partial(self._attention, rotates, heads, tokens, width)
                yield from self._both(name, (heads, tokens, width), make)
        for rows, width in product(*self.grids.norm):
            for name, is_rms in (("layernorm", False), ("rmsnorm", True)):
                yield from self._both(name, (rows, width), partial(self._norm, is_rms, rows, width))
        for name in ("gelu", "relu", "swiglu", "embedding"):
            for (count,) in product(*self.grids.elements):
                yield from self._both(name, (count,), partial(self._wise, name, count))
        for (count,) in product(*self.grids.elements):
            yield Case("bias", (count,), partial(self._bias, count))
            yield Case("add", (count,), partial(self._add, count))
        for rows, columns in product(*self.grids.loss):
            yield Case("loss", (rows, columns), partial(self._loss, rows, columns))
        for name, (count,) in product(("adamw", "sgd"), product(*self.grids.update)):
            yield Case(name, (count,), partial(self._update, name, count))

    def _both(
        self, name: str, point: Point, make: Callable[[], tuple[Callable[[], Tensor], list[Tensor]]]
    ) -> Iterator[Case]:
        """Yields the forward, and the backward as the time of both minus the forward's."""

        def forward() -> Run:
            return make()[0]

        def both() -> Run:
            run, inputs = make()
            grad = torch.rand_like(run())
            return lambda: torch.autograd.grad(run(), inputs, grad)

        yield Case(f"{name}.forward", point, forward)
        yield Case(f"{name}.backward", point, both, before=f"{name}.forward")

    def _gemm(self, part: str, rows: int, outputs: int, inputs: int) -> Run:
        x, weight = self.tensor(rows, inputs), self.tensor(outputs, inputs)
        grad = self.tensor(rows, outputs)
        if part == "forward":
            return lambda: matmul.linear(x, weight)
        if part == "input":
            return lambda: matmul.matmul(grad, weight)
        out = self.tensor(outputs, inputs, wide=True)
        return lambda: add_matmul(out, grad, x)

    def _attention(
        self, rotates: bool, heads: int, tokens: int, width: int
    ) -> tuple[Callable[[], Tensor], list[Tensor]]:
        qkv = self.tensor(1, tokens, 3 * heads * width, grad=True)
        rotary = None
        if rotates:
            cos, sin = (self.tensor(tokens, 1, width // 2, wide=True) for _ in range(2))
            rotary = cos, sin
        return lambda: causal_attention(qkv, heads, heads, width, rotary), [qkv]

    def _norm(
        self, is_rms: bool, rows: int, width: int
    ) -> tuple[Callable[[], Tensor], list[Tensor]]:
        x, weight = self.tensor(rows, width, grad=True), self.tensor(width, grad=True)
        if is_rms:
            return lambda: rms_norm(x, weight, NORM_EPS), [x, weight]
        bias = self.tensor(width, grad=True)
        return lambda: F.layer_norm(x, (width,), weight, bias, NORM_EPS), [x, weight, bias]

    def _wise(self, name: str, count: int) -> tuple[Callable[[], Tensor], list[Tensor]]:
        """Makes an element-wise operation with `count` results."""
        width = 64
        if name == "embedding":
            table = self.tensor(256, width, grad=True)
            tokens = torch.arange(count // width, device=self.device) % 256
            return lambda: F.embedding(tokens, table), [table]
        x = self.tensor(count // width, width * (2 if name == "swiglu" else 1), grad=True)
        functions: dict[str, Callable[[Tensor], Tensor]] = {
            "gelu": F.gelu, "relu": F.relu, "swiglu": swiglu,
        }  # fmt: skip
        return lambda: functions[name](x), [x]

    def _bias(self, count: int) -> Run:
        grad = self.tensor(count // 64, 64)
        return lambda: grad.sum(0)

    def _add(self, count: int) -> Run:
        x, other = self.tensor(count), self.tensor(count)
        return lambda: x + other

    def _loss(self, rows: int, columns: int) -> Run:
        logits, factor = self.tensor(rows, columns), self.tensor(rows, wide=True)
        labels = torch.arange(rows, device=self.device) % columns

        def run() -> None:
            loss = ChunkLoss(logits, labels, 0, Objective(columns))
            loss.losses(loss.statistics().unsqueeze(0))
            loss.gradient(factor)

        return run

    def _update(self, name: str, count: int) -> Run:
        """Makes a step that clears, norms, clips, updates and casts one flat shard."""
        master, grad = (self.tensor(count, wide=True) for _ in range(2))
        param = master if self.dtype == master.dtype else self.tensor(count)
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


def tables_of(kernels: Kernels, passes: int, tell: Callable[[str], None]) -> dict[str, Table]:
    """Measures everything in `passes` interleaved passes, and takes the best."""
    cases = list(kernels.cases())
    best: dict[tuple[str, Point], float] = {}
    for number in range(passes):
        for case in cases:
            tell(f"{case.table}, pass {number + 1} of {passes}")
            seconds = seconds_of(case.make(), kernels.device)
            key = case.table, case.point
            best[key] = min(seconds, best.get(key, seconds))
    found: dict[str, dict[Point, float]] = {}
    for case in cases:
        seconds = best[case.table, case.point]
        if case.before is not None:  # a backward takes at least a tenth of its forward
            ahead = best[case.before, case.point]
            seconds = max(seconds - ahead, ahead / 10)
        found.setdefault(case.table, {})[case.point] = max(seconds, 1e-9)
    return {name: table_of(points) for name, points in found.items()}


def table_of(points: dict[Point, float]) -> Table:
    """Returns a table of a complete grid of points."""
    axes = tuple(tuple(sorted(set(axis))) for axis in zip(*points, strict=True))
    return Table(axes, tuple(points[p] for p in product(*axes)))


# Time of a step beyond its kernels (Python, autograd, the pipeline's actions), from whole steps of
# models so small that nothing else takes time.
SHAPES = ((1, 1), (6, 1), (1, 6), (6, 6))  # layers, micro-batches
FORWARD = 0.35  # of a layer's launches; a backward has about twice as many autograd nodes
LEAST = 1e-7
STEPS, ROUNDS = 6, 4


@dataclasses.dataclass
class Same:
    """Samples that cost nothing to make."""

    seq_length: int

    def sample(self, i: int) -> Sample:
        tokens = (np.arange(self.seq_length + 1) + i) % 256
        return Sample(tokens, np.ones(self.seq_length, dtype=bool))


def launches(
    config: Config,
    device: torch.device,
    made: CalibrationSource,
    tables: Mapping[str, Table],
    tell: Callable[[str], None],
) -> dict[str, float]:
    """Returns seconds of a layer's forward and backward, an action and a step, without kernels."""
    none = dict.fromkeys(("forward", "backward", "action", "step"), LEAST)
    empty = {f"launch.{name}": value for name, value in none.items()}
    rest = {"rank_gb": 1.0, "memory_gb": 1.0, "peak_tflops": 1.0}
    one = Table(((1, 2), (64, 128)), (LEAST,) * 4)
    collectives = {name + way: one for name in COLLECTIVES for way in ("", SHARED)}
    alone = Table(((1,),), (1.0,))
    more = {"together.gemm": alone, "together.move": alone, "threads": alone}
    machine = MeasuredMachine(
        dataclasses.replace(made, count=1), {**tables, **collectives, **more}, {**empty, **rest}
    )
    measured, kernels = [], []
    for layers, count in SHAPES:
        tell(f"steps of {layers} layers and {count} micro-batches")
        one_config = tiny(config, layers, count)
        measured.append(_step(one_config, device))
        kernels.append(step_parts(one_config, machine).total)
    terms = np.array([[layers * count, 2 * count, 1] for layers, count in SHAPES], dtype=float)
    left = np.array(measured) - (0.0 if accelerator.is_accelerator(device) else np.array(kernels))
    # Relative errors: a step of many launches may not dominate the fit.
    layer, action, step = np.linalg.lstsq(
        terms / np.array(measured)[:, None], left / np.array(measured), rcond=None
    )[0]
    layer, action, step = (max(float(v), LEAST) for v in (layer, action, step))
    return {
        "launch.forward": FORWARD * layer,
        "launch.backward": (1 - FORWARD) * layer,
        "launch.action": action,
        "launch.step": step,
    }


def tiny(config: Config, layers: int, microbatches: int) -> Config:
    """Returns a minimal model of the same kind, on one rank."""
    model = config.model
    return check_config(
        Config(
            micro_batch_size=1,
            global_batch_size=microbatches,
            dp=1,
            device=config.device,
            model=ModelConfig(
                hidden_size=32,
                num_attention_heads=2,
                ffn_hidden_size=64,
                seq_length=16,
                num_layers=layers,
                num_query_groups=None,
                head_dim=None,
                norm=model.norm,
                position_embedding=model.position_embedding,
                activation=model.activation,
                bias=model.bias,
                tie_embeddings=model.tie_embeddings,
            ),
            optim=config.optim,
            precision=config.precision,
            launch=config.launch,
        ),
        1,
        own_samples=True,
    )


def _step(config: Config, device: torch.device) -> float:
    """Returns seconds of a step on this rank alone, the best of several runs of STEPS steps."""
    groups = ProcessGroups.single()
    source = Same(config.model.seq_length)
    trainer = Trainer(config, groups, device, train_source=source)
    clock, found = clock_of(device), []
    for _ in range(ROUNDS):
        trainer.train_step()
        accelerator.synchronize(device)
        begun = clock()
        for _ in range(STEPS):
            trainer.train_step()
        accelerator.synchronize(device)
        found.append((clock() - begun) / STEPS)
        time.sleep(0)
    return min(found)


# Collectives, messages, and cores that several ranks use at once.
SIZES = (64, 4096, 65536, 524288, 4 << 20)  # bytes
LARGE_SIZES = (1024, 65536, 1 << 20, 16 << 20, 256 << 20)
# Calls of a window, short enough to be undisturbed sometimes; the best window counts.
CALLS, WINDOWS, FEW_WINDOWS = 4, 40, 8
MOST_WAIT = 3.0  # times a call's CPU work: longer wall times are a neighbour's
MOVED = 1 << 22  # elements of a sum that exceeds every cache
SQUARE = 384  # of a matmul that fits into a cache

Tell = Callable[[str], None]


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


def slowing(device: torch.device, tell: Tell) -> dict[str, Table]:
    """Measures the slow-down of matmuls and sums by busy ranks, up to one a core; collective."""
    world = dist.get_world_size()
    found: dict[str, Table] = {}
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
