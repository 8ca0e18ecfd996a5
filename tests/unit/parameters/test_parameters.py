"""Tests that initial values are a function of (seed, name, index): any chunk equals its part of the
whole matrix."""

from __future__ import annotations

import math
import os
import random
from collections.abc import Callable, Iterator
from unittest.mock import patch

import pytest
import torch
from torch import Tensor
from torch.nn.functional import softplus

from parallel3d.device import accelerator
from parallel3d.parameters import gradients, initializer
from parallel3d.parameters.declaration import Drawn
from parallel3d.parameters.gradients import add_matmul, supports_wide_addmm
from parallel3d.parameters.initializer import TILE, Initializer
from parallel3d.parameters.spec import ParameterSpec, ShardSpec
from parallel3d.parameters.state import spec_of

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def tried_anew() -> Iterator[None]:
    supports_wide_addmm.cache_clear()
    yield
    supports_wide_addmm.cache_clear()


def draw(
    seed: int, name: str, full: tuple[int, int], start: tuple[int, int], shape: tuple[int, int]
) -> torch.Tensor:
    out = torch.full(shape, float("nan"))
    Initializer(seed, torch.float32, CPU).fill(ShardSpec(name, full, start, shape, std=0.02), out)
    return out


def test_every_box_is_cut_out_of_the_same_matrix() -> None:
    rng = random.Random(0)
    full_shape = (2 * TILE + 37, 3 * TILE + 11)
    full = draw(1, "w", full_shape, (0, 0), full_shape)
    assert full.isfinite().all()
    for _ in range(20):
        top, left = rng.randrange(full_shape[0]), rng.randrange(full_shape[1])
        rows = rng.randrange(1, full_shape[0] - top + 1)
        cols = rng.randrange(1, full_shape[1] - left + 1)
        box = draw(1, "w", full_shape, (top, left), (rows, cols))
        assert torch.equal(box, full[top : top + rows, left : left + cols])


def test_seed_and_name_change_the_values_and_rows_differ() -> None:
    shape = (TILE, TILE)
    base = draw(1, "a", shape, (0, 0), shape)
    for other in (draw(2, "a", shape, (0, 0), shape), draw(1, "b", shape, (0, 0), shape)):
        assert (base == other).float().mean() < 0.01
    wide = draw(1, "a", (2 * TILE, 2 * TILE), (0, 0), (2 * TILE, 2 * TILE))
    tiles = [wide[i : i + TILE, j : j + TILE] for i in (0, TILE) for j in (0, TILE)]
    for i, a in enumerate(tiles):
        for b in tiles[i + 1 :]:
            assert (a == b).float().mean() < 0.01


def test_values_have_the_given_deviation() -> None:
    values = draw(3, "w", (1024, 1024), (0, 0), (1024, 1024))
    assert values.mean().abs() < 1e-4
    assert values.std().item() == pytest.approx(0.02, rel=0.01)


@pytest.mark.parametrize(
    ("drawn", "uniform"),
    [
        (Drawn(0.0, 16.0, "log"), lambda x: x.exp()),
        (Drawn(1e-3, 0.1, "inverse_softplus"), lambda x: softplus(x).log()),
    ],
    ids=["decay", "time step"],
)
def test_a_drawn_vector_is_uniform_when_mapped_back_and_cut_anywhere(
    drawn: Drawn, uniform: Callable[[Tensor], Tensor]
) -> None:
    def part(start: int, numel: int) -> Tensor:
        out = torch.full((numel,), float("nan"))
        shard = ShardSpec("x", (5000,), (start,), (numel,), drawn=drawn)
        Initializer(5, torch.float32, CPU).fill(shard, out)
        return out

    whole = part(0, 5000)
    for start, numel in ((0, 1), (200, 300), (255, 2), (4000, 1000)):
        assert torch.equal(part(start, numel), whole[start : start + numel])
    low, high = drawn.low, drawn.high
    if drawn.value == "inverse_softplus":
        low, high = math.log(low), math.log(high)
    places = (uniform(whole.double()) - low) / (high - low)
    ranks = (torch.arange(5000) + 0.5) / 5000
    assert (places.sort().values - ranks).abs().max() < 0.03  # Kolmogorov's distance


def test_fp64_holds_the_same_values_as_fp32() -> None:
    piece = ShardSpec("w", (40, 40), (0, 0), (40, 40), std=0.02)
    spec = ParameterSpec((40, 40), (piece,), replicated=False)
    narrow = Initializer(5, torch.float32, CPU).parameter(spec)
    wide = Initializer(5, torch.float64, CPU).parameter(spec)
    assert torch.equal(narrow.double(), wide)


def test_padding_rows_stay_zero_and_constants_are_constant() -> None:
    piece = ShardSpec("w", (3, 4), (0, 0), (3, 4), row=0, fill=1.0)
    made = Initializer(0, torch.float32, CPU).parameter(ParameterSpec((5, 4), (piece,), False))
    assert made[:3].eq(1).all() and made[3:].eq(0).all()


def test_runs_cut_a_parameter_where_its_copies_change() -> None:
    q, k, v = (
        ShardSpec(name, (8, 4), (0, 0), (rows, 4), row, tp_replicas=copies)
        for name, rows, row, copies in (("q", 4, 0, 1), ("k", 2, 4, 2), ("v", 2, 6, 2))
    )
    spec = ParameterSpec((8, 4), (q, k, v), replicated=False)
    assert list(spec.runs(0, 32)) == [(1, 0, 16), (2, 16, 32)]
    assert list(spec.runs(10, 10)) == [(1, 0, 6), (2, 6, 10)]
    assert list(spec.runs(20, 7)) == [(2, 0, 7)]
    assert list(ParameterSpec((8, 4), (), replicated=False).runs(3, 5)) == [(1, 0, 5)]
    padded = ParameterSpec((9, 4), (q,), replicated=False)
    assert list(padded.runs(0, 36)) == [(1, 0, 36)]


@pytest.mark.parametrize(("threads", "band"), [(1, 1), (3, 1), (3, 1 << 24), (2, 3 * TILE * TILE)])
def test_neither_threads_nor_bands_change_a_value(threads: int, band: int) -> None:
    full, start, shape = (4 * TILE, 3 * TILE), (100, 50), (2 * TILE + 7, TILE + 300)
    with patch.object(torch, "get_num_threads", lambda: 1):
        expected = draw(4, "w", full, start, shape)
    with (
        patch.object(torch, "get_num_threads", lambda: threads),
        patch.object(initializer, "BAND", band),
    ):
        assert torch.equal(draw(4, "w", full, start, shape), expected)


@pytest.mark.parametrize(
    ("device", "environ", "threads"),
    [
        ("cuda", {"LOCAL_WORLD_SIZE": "2"}, 4),
        ("cuda", {"LOCAL_WORLD_SIZE": "16"}, 1),
        ("cuda", {}, 1),  # srun: torch may use the cores that are bound to the task
        ("cpu", {"LOCAL_WORLD_SIZE": "2"}, 1),
    ],
)
def test_ranks_on_accelerators_share_the_cores_to_draw(
    device: str, environ: dict[str, str], threads: int
) -> None:
    """The number does not depend on OMP_NUM_THREADS, which torchrun sets to 1."""
    pools = []

    class Pool(initializer.ThreadPoolExecutor):
        def __init__(self, threads: int) -> None:
            pools.append(threads)
            super().__init__(threads)

    full = (4 * TILE, 3 * TILE)
    expected, out = draw(4, "w", full, (0, 0), full), torch.empty(full)
    with (
        patch.object(torch, "get_num_threads", lambda: 1),
        patch.object(initializer, "available_cores", lambda: 8),
        patch.object(initializer, "ThreadPoolExecutor", Pool),
        patch.dict(os.environ, environ),
    ):
        if not environ:
            os.environ.pop("LOCAL_WORLD_SIZE", None)
        piece = ShardSpec("w", full, (0, 0), full, std=0.02)
        Initializer(4, torch.float32, torch.device(device)).fill(piece, out)
    assert pools == ([threads] if threads > 1 else [])
    assert torch.equal(out, expected)


def test_a_matrix_reaches_its_device_in_one_copy_a_band() -> None:
    copies = []

    class Counted(torch.Tensor):
        """Stands in for the target of the values, and counts the values that are written."""

        @classmethod
        def __torch_function__(cls, func, types, args=(), kwargs=None):
            if func is torch.Tensor.__setitem__:
                copies.append(args[0][args[1]].shape)
            return super().__torch_function__(func, types, args, kwargs or {})

    shape = (5 * TILE, 4 * TILE)
    out = torch.empty(shape).as_subclass(Counted)
    piece = ShardSpec("w", shape, (0, 0), shape, std=0.02)
    with patch.object(initializer, "BAND", 2 * 4 * TILE * TILE):
        Initializer(0, torch.float32, CPU).fill(piece, out)
    assert [tuple(copied) for copied in copies] == [(512, 1024), (512, 1024), (256, 1024)]


def fused() -> ParameterSpec:
    """Returns two matrices in one parameter, with rows from the middle of both, and three rows of
    padding."""
    q = ShardSpec("q", (700, 300), (90, 20), (280, 260), 0, std=0.02)
    k = ShardSpec("k", (700, 300), (400, 20), (20, 260), 280, std=0.02)
    one = ShardSpec("one", (2, 260), (0, 0), (2, 260), 300, fill=1.0)
    return ParameterSpec((305, 260), (q, k, one), replicated=False)


@pytest.mark.parametrize(("first", "rows"), [(0, 305), (0, 0), (270, 35), (299, 2), (301, 4)])
def test_rows_of_a_parameter_equal_those_of_the_full_one(first: int, rows: int) -> None:
    init, spec = Initializer(3, torch.float64, CPU), fused()
    whole = init.values(spec)
    assert whole[:300].ne(0).all() and whole[302:].eq(0).all()
    out = torch.full((rows, 260), float("nan"), dtype=torch.float64)
    init.fill_rows(spec, first, out)
    assert torch.equal(out, whole[first : first + rows])


def test_a_deferred_parameter_has_its_shape_and_no_memory() -> None:
    init, spec = Initializer(3, torch.float32, CPU, deferred=True), fused()
    made = init.parameter(spec)
    assert made.shape == spec.shape and spec_of(made) is spec and made.requires_grad
    assert made.untyped_storage().nbytes() == 4
    assert torch.equal(init.values(spec), Initializer(3, torch.float32, CPU).parameter(spec))


def factors(kind: torch.dtype) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(4)
    return tuple(torch.randn(64, n, generator=generator).to(kind) for n in (24, 16))


def add_rounded(out: Tensor, grad: Tensor, x: Tensor) -> None:
    """Tests a device without a kernel for the sum, and products of fp16."""
    with patch.object(gradients, "is_widened", lambda tensor: False):
        add_matmul(out, grad, x)


@pytest.mark.parametrize("kind", [torch.bfloat16, torch.float16], ids=str)
def test_an_accelerators_gemm_adds_in_fp32_without_rounding(
    kind: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stands in for `torch.addmm(out_dtype=…)`, which no CPU has, with the same result."""
    calls: list[dict] = []

    def addmm(start: Tensor, a: Tensor, b: Tensor, **how: object) -> Tensor:
        calls.append(how | {"in_place": how["out"] is start, "kind": a.dtype})
        return start.addmm_(a.float(), b.float())

    grad, x = factors(kind)
    start = torch.randn(24, 16)
    exact = start.double() + grad.double().t() @ x.double()
    plain, wide = start.clone(), start.clone()
    add_rounded(plain, grad, x)
    assert not calls
    monkeypatch.setattr(accelerator, "is_accelerator", lambda device: True)
    monkeypatch.setattr(torch, "addmm", addmm)
    supports_wide_addmm.cache_clear()
    add_matmul(wide, grad, x)
    how = {"out_dtype": torch.float32, "in_place": True, "kind": kind}
    # the GEMM is tried once, and then used
    assert [{k: c[k] for k in how} for c in calls] == [how, how]
    assert calls[-1]["out"] is wide
    # A product of about 8 is rounded to the precision of its factors' dtype, or not at all.
    assert (plain - exact).abs().max() > 0.2 * 8 * torch.finfo(kind).eps
    assert (wide - exact).abs().max() < 1e-5


def test_a_product_beyond_fp16_is_finite_in_fp32(monkeypatch: pytest.MonkeyPatch) -> None:
    def addmm(start: Tensor, a: Tensor, b: Tensor, **_: object) -> Tensor:
        return start.addmm_(a.float(), b.float())

    huge = torch.full((4, 2), 200.0, dtype=torch.float16)
    plain, wide = torch.zeros(2, 2), torch.zeros(2, 2)
    add_rounded(plain, huge, huge)
    assert plain.isinf().all()
    add_matmul(wide, huge, huge)
    assert (wide == 160000.0).all()  # a CPU converts fp16 to fp32
    wide.zero_()
    monkeypatch.setattr(accelerator, "is_accelerator", lambda device: True)
    monkeypatch.setattr(torch, "addmm", addmm)
    supports_wide_addmm.cache_clear()
    add_matmul(wide, huge, huge)
    assert (wide == 160000.0).all()


def test_without_the_kernel_rounded_products_are_added(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    grad, x = factors(torch.bfloat16)
    plain, own = torch.zeros(24, 16), torch.zeros(24, 16)
    add_matmul(plain, grad, x)
    monkeypatch.setattr(accelerator, "is_accelerator", lambda device: True)
    assert not supports_wide_addmm(CPU, torch.bfloat16, torch.float32)
    add_matmul(own, grad, x)
    assert torch.equal(own, plain)
