"""Times of one call on this rank's device: the best of several, as what disturbs only adds."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
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
from parallel3d.config.checks.whole import check_config
from parallel3d.config.schema import Config, LaunchConfig, ModelConfig, OptimConfig
from parallel3d.data.sampler import Sample
from parallel3d.device import accelerator, matmul
from parallel3d.host.devices import cores
from parallel3d.models.attention import causal_attention
from parallel3d.models.ops import rms_norm, swiglu
from parallel3d.optim.optimizer import Optimizer
from parallel3d.parameters.gradients import add_matmul
from parallel3d.parameters.sharding import ParameterSpec, Segment, SegmentPart
from parallel3d.pipeline.shared_memory import SharedMemoryP2P
from parallel3d.plan.profiled_cost import (
    COLLECTIVES,
    SHARED,
    CalibrationSource,
    MeasuredMachine,
    Table,
    step_parts,
)
from parallel3d.tensor_parallel.loss import ChunkLoss, Objective
from parallel3d.topology.layout import Layout
from parallel3d.trainer import Trainer

Run = Callable[[], object]
LEAST_S = 1e-3  # of a measurement: calls are repeated up to that
MOST_CALLS = 1000
BURSTS, LONG_S = 3, 0.02  # of a burst that is repeated no more


def clock_of(device: torch.device) -> Callable[[], float]:
    """On a CPU the process's own seconds, by which neighbours on the machine show little."""
    if accelerator.is_accelerator(device):
        return time.perf_counter
    return time.process_time


def seconds_of(run: Run, device: torch.device, clock: Callable[[], float] | None = None) -> float:
    """Seconds of one call, the device's work included; the first call is not counted.

    The best of a few bursts, each short enough to lie within a process's turn on a busy core.
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


# What a rank computes, piece by piece, by the very functions that training calls.


Point = tuple[int, ...]
Axes = tuple[tuple[int, ...], ...]
NORM_EPS = 1e-5


class Grids(NamedTuple):
    """Where the pieces are measured: small sizes for a core, larger ones for a GPU."""

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
    """One time to take: of `table` at `point`. `before`: the table that its time is beyond."""

    table: str
    point: Point
    make: Callable[[], Run]
    before: str | None = None


@dataclass(frozen=True)
class Kernels:
    """The cases of one device and type."""

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
        """Every piece at every point."""
        for m, n, k in product(*self.grids.gemm):
            point = (m, n, k)
            yield Case("gemm.forward", point, lambda p=point: self._gemm("forward", *p))
            yield Case("gemm.input", point, lambda p=point: self._gemm("input", *p))
            yield Case("gemm.weight", point, lambda p=point: self._gemm("weight", *p))
        for point in product(*self.grids.attention):
            yield from self._both("attention", point, lambda p=point: self._attention(False, *p))
            yield from self._both("rotary", point, lambda p=point: self._attention(True, *p))
        for point in product(*self.grids.norm):
            yield from self._both("layernorm", point, lambda p=point: self._norm(False, *p))
            yield from self._both("rmsnorm", point, lambda p=point: self._norm(True, *p))
        for name in ("gelu", "relu", "swiglu", "embedding"):
            for (count,) in product(*self.grids.elements):
                yield from self._both(name, (count,), lambda n=name, c=count: self._wise(n, c))
        for (count,) in product(*self.grids.elements):
            yield Case("bias", (count,), lambda c=count: self._bias(c))
            yield Case("add", (count,), lambda c=count: self._add(c))
        for point in product(*self.grids.loss):
            yield Case("loss", point, lambda p=point: self._loss(*p))
        for name, (count,) in product(("adamw", "sgd"), product(*self.grids.update)):
            yield Case(name, (count,), lambda n=name, c=count: self._update(n, c))

    def _both(
        self, name: str, point: Point, make: Callable[[], tuple[Callable[[], Tensor], list[Tensor]]]
    ) -> Iterator[Case]:
        """The forward, and the backward as what both take beyond it."""

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
        """Element by element; `count` elements come of it."""
        width = 64
        if name == "embedding":
            table = self.tensor(256, width, grad=True)
            tokens = torch.arange(count // width, device=self.device) % 256
            return lambda: F.embedding(tokens, table), [table]
        x = self.tensor(count // width, width * (2 if name == "swiglu" else 1), grad=True)
        functions = {"gelu": F.gelu, "relu": F.relu, "swiglu": swiglu}
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
        """Clears, norms, clips and steps one segment, then copies it into the compute type."""
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
    """All pieces measured, each `passes` times with the others between, the best taken."""
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
        if case.before is not None:  # a backward takes at least some of its forward's time
            ahead = best[case.before, case.point]
            seconds = max(seconds - ahead, ahead / 10)
        found.setdefault(case.table, {})[case.point] = max(seconds, 1e-9)
    return {name: table_of(points) for name, points in found.items()}


def table_of(points: dict[Point, float]) -> Table:
    """A table of a whole grid of points."""
    axes = tuple(tuple(sorted(set(axis))) for axis in zip(*points, strict=True))
    return Table(axes, tuple(points[p] for p in product(*axes)))


# What a step costs beside its kernels: Python, autograd, the pipeline's actions.
#
# Told from whole steps of models so small that nothing else takes time.


SHAPES = ((1, 1), (6, 1), (1, 6), (6, 6))  # layers, micro-batches
TINY = {"hidden_size": 32, "num_attention_heads": 2, "ffn_hidden_size": 64, "seq_length": 16}
FORWARD = 0.35  # of a layer's launches; a backward has about twice as many nodes
LEAST = 1e-7
STEPS, ROUNDS = 6, 4


@dataclasses.dataclass(frozen=True)
class Same:
    """Samples that cost nothing to make."""

    length: int

    def sample(self, i: int) -> Sample:
        tokens = (np.arange(self.length + 1) + i) % 256
        return Sample(tokens, np.ones(self.length, dtype=bool))


def launches(
    config: Config,
    device: torch.device,
    made: CalibrationSource,
    tables: Mapping[str, Table],
    tell: Callable[[str], None],
) -> dict[str, float]:
    """Seconds of a layer's forward and backward, of an action and of a step, kernels left out."""
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
    # by relative errors: a step of many launches may not drown the others
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
    """A model of the same kind with next to nothing in it, on one rank."""
    model = config.model
    sizes = TINY | {"num_layers": layers, "num_query_groups": None, "head_dim": None}
    kept = ("norm", "position_embedding", "activation", "bias", "tie_embeddings")
    kinds = {name: getattr(model, name) for name in kept}
    return check_config(
        Config(
            micro_batch_size=1,
            global_batch_size=microbatches,
            dp=1,
            device=config.device,
            model=ModelConfig(**sizes, **kinds),
            optim=config.optim,
            precision=config.precision,
            launch=config.launch,
        ),
        1,
        own_samples=True,
    )


def _step(config: Config, device: torch.device) -> float:
    """Seconds of a step on this rank alone, the best of some runs of some."""
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


# What ranks of one host do to each other: collectives, messages, and cores that work at once.


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
