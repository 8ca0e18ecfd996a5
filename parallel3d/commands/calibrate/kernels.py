"""What a rank computes, piece by piece, by the very functions that training calls."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import product
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from parallel3d.comm.group import SINGLE
from parallel3d.commands.calibrate.timing import Run, seconds_of
from parallel3d.config.schema import OptimConfig
from parallel3d.device import accelerator, products
from parallel3d.models.attention import causal_attention
from parallel3d.models.ops import rms_norm, swiglu
from parallel3d.optim.optimizer import Optimizer
from parallel3d.parameters.gradients import add_product
from parallel3d.parameters.pieces import ParameterSpec
from parallel3d.parameters.segments import Segment, SegmentPart
from parallel3d.plan.measured.tables import Table
from parallel3d.tensor_parallel.cross_entropy import ChunkLoss, Objective

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
            return lambda: products.linear(x, weight)
        if part == "input":
            return lambda: products.matmul(grad, weight)
        out = self.tensor(outputs, inputs, wide=True)
        return lambda: add_product(out, grad, x)

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
        segment = Segment(param, grad, master, True, False, tied_copy=False, parts=[part])
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
