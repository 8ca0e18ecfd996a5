"""Tests gradient buckets: assigned as in PyTorch's DDP, with flat views that the model really
uses."""

from __future__ import annotations

import random
import weakref
from dataclasses import replace
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import nn

from parallel3d.blueprint.blueprint import DataParallelSettings
from parallel3d.blueprint.buckets import MIB, assign, padded_numel
from parallel3d.comm.group import SINGLE, Group
from parallel3d.comm.process_groups import ProcessGroups
from parallel3d.data_parallel import engine as engines
from parallel3d.data_parallel.build import data_parallel_engine
from parallel3d.data_parallel.engine import BucketedDataParallel, build_buckets
from parallel3d.data_parallel.pending_gathers import PendingGathers
from parallel3d.data_parallel.reducer import GradBucket
from parallel3d.parameters.copies import CopyGroups
from parallel3d.parameters.initializer import Initializer
from parallel3d.parameters.spec import ParameterSpec, ShardSpec
from parallel3d.parameters.state import spec_of, state_of
from tests.operators import Operators


@pytest.mark.parametrize("cap", [None, 0.001, 0.5, 1.0, 3.0, 25.0])
def test_assignment_is_that_of_ddp(cap: float | None) -> None:
    rng = random.Random(1)
    for _ in range(20):
        sizes = [rng.randrange(1, 2 * MIB) for _ in range(rng.randrange(1, 40))]
        tensors = [torch.empty(0, dtype=torch.uint8).new_empty(size) for size in sizes]
        caps = [1.0, 25.0] if cap is None else [cap]
        limits = [int(c * MIB) for c in caps]
        expected, _ = dist._compute_bucket_assignment_by_size(tensors, limits, [False] * len(sizes))
        assert assign(sizes, cap) == expected


@pytest.mark.parametrize("shards", [2, 3, 8])
def test_shards_of_a_bucket_are_equal_and_begin_at_a_multiple_of_128_bytes(shards: int) -> None:
    for numel in (1, 33, 128 * shards, 128 * shards + 1):
        padded = padded_numel(numel, shards)
        assert padded % shards == 0 and padded // shards * 4 % 128 == 0
        assert numel <= padded < numel + 32 * shards
    assert padded_numel(33, 1) == 33


def test_an_accelerator_has_larger_buckets_unless_the_cap_is_given() -> None:
    sizes = [2 * MIB, *[20 * MIB] * 10]
    assert [len(b) for b in assign(sizes, None)] == [1, 2, 2, 2, 2, 2]
    assert [len(b) for b in assign(sizes, None, accelerated=True)] == [1, 7, 3]
    assert assign(sizes, 50.0, accelerated=True) == assign(sizes, 50.0)


def test_the_cap_depends_on_the_parameters_device() -> None:
    def buckets() -> int:
        on_meta = [(str(i), nn.Parameter(torch.empty(8 * MIB, device="meta"))) for i in range(9)]
        for _, p in on_meta:
            state_of(p).spec = ParameterSpec(tuple(p.shape), (), replicated=True)
        return len(build_buckets(on_meta, None, torch.float32))

    assert buckets() == 9  # buckets of 32 MiB each
    with patch.object(engines, "is_accelerator", lambda device: True):
        assert buckets() == 3


def parameter(*shape: int, replicated: bool = False, uses: int = 1) -> nn.Parameter:
    made = nn.Parameter(torch.randn(shape))
    decays = len(shape) > 1
    state_of(made).spec = ParameterSpec(shape, (), replicated, uses=uses, decays=decays)
    return made


def named() -> list[tuple[str, nn.Parameter]]:
    return [
        ("first.weight", parameter(8, 4)),
        ("first.norm", parameter(8, replicated=True)),
        ("last.weight", parameter(4, 8)),
    ]


def test_buckets_are_in_reverse_forward_order_and_hold_every_value() -> None:
    parameters = named()
    before = {name: p.detach().clone() for name, p in parameters}
    buckets = build_buckets(parameters, 16 / MIB, torch.float32)
    assert [list(b.params) for b in buckets] == [["last.weight"], ["first.norm"], ["first.weight"]]
    for name, p in parameters:
        assert torch.equal(p, before[name])
    for bucket in buckets:
        bucket.param.zero_()
    assert all(not p.any() for _, p in parameters), "the model must read the flat buffer"


def test_a_parameter_that_stays_in_fp32_has_a_bucket_of_its_own_in_16_bits() -> None:
    def held(dtype: torch.dtype) -> list[tuple[list[str], torch.dtype, torch.dtype]]:
        parameters = named()
        state = state_of(parameters[1][1])
        assert state.spec is not None
        state.spec = replace(state.spec, wide=True)
        before = parameters[1][1].detach().clone()
        buckets = build_buckets(parameters, 1.0, dtype)
        assert torch.equal(parameters[1][1], before)
        return [(sorted(b.params), b.param.dtype, b.grad.dtype) for b in buckets]

    weights, whole = ["first.weight", "last.weight"], torch.float32
    assert held(torch.bfloat16) == [
        (["first.norm"], whole, whole),
        (weights, torch.bfloat16, whole),
    ]
    assert held(whole) == [(["first.norm", *weights], whole, whole)]


def test_segments_separate_parameters_with_different_treatment() -> None:
    (bucket,) = build_buckets(named(), 1.0, torch.float64)
    kinds = [(s.spec.decays, s.spec.replicated, s.param.numel()) for s in bucket.segments]
    assert sorted(kinds) == [(False, True, 8), (True, False, 64)]
    assert bucket.grad.dtype == torch.float64
    assert sum(s.grad.numel() for s in bucket.segments) == bucket.grad.numel()


@pytest.mark.parametrize("shards", [SINGLE, Group("dp", (0, 1, 2), 1, None)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_initial_values_are_drawn_one_parameter_at_a_time(
    dtype: torch.dtype, shards: Group
) -> None:
    parameters, alive, most = named(), [], []
    given = {p: p.detach().clone() for _, p in parameters}
    held = True, lambda spec: CopyGroups(shards)
    expected = build_buckets([(n, clone_of(p)) for n, p in parameters], None, dtype, *held)

    def drawn(p: nn.Parameter) -> torch.Tensor:
        most.append(sum(ref() is not None for ref in alive))
        made = given[p].clone()
        alive.append(weakref.ref(made))
        return made

    for p in given:
        p.data = torch.zeros(()).expand(p.shape)
    found = build_buckets(parameters, None, dtype, *held, values=drawn)
    assert most == [0, 0, 0], "no drawn parameter beside another"
    for ours, theirs in zip(found, expected, strict=True):
        assert torch.equal(ours.param, theirs.param)
        for a, b in zip(ours.segments, theirs.segments, strict=True):
            assert torch.equal(a.master, b.master) and a.spans == b.spans


def clone_of(p: nn.Parameter) -> nn.Parameter:
    made = nn.Parameter(p.detach().clone())
    state_of(made).spec = spec_of(p)
    return made


class Recorded:
    """A comm hook that counts its buckets."""

    def __init__(self) -> None:
        self.calls: list[int] = []

    def __call__(self, group: object, bucket: GradBucket) -> Recorded:
        self.calls.append(bucket.buffer().numel())
        return self

    def wait(self) -> None:
        return None


def two_ranks() -> Group:
    return Group("dp", (0, 1), 0, None)


def engine_of(
    parameters: list[tuple[str, nn.Parameter]],
    cap: float | None,
    group: Group,
    hook: Recorded,
) -> BucketedDataParallel:
    held = CopyGroups(group)
    return BucketedDataParallel(
        [dict(parameters)],
        torch.float32,
        lambda spec: held,
        0,
        bucket_cap_mb=cap,
        hook=hook,
    )


def backward(parameters: list[tuple[str, nn.Parameter]], skip: str = "") -> None:
    total = sum((p * 2.0).sum() for name, p in parameters if name != skip)
    total.backward()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
def test_only_masters_beside_the_parameters_are_copied_to_them(dtype: torch.dtype) -> None:
    """In 16 bits this leaves out a parameter that stays in fp32."""
    held: dict[str, nn.Parameter] = {}
    for name, p in named():
        held[name] = nn.Parameter(p.detach().to(torch.promote_types(p.dtype, dtype)))
        state_of(held[name]).spec = replace(spec_of(p), wide=name == "first.norm")
    engine = BucketedDataParallel([held], dtype, lambda spec: CopyGroups(), 0)
    for segment in engine.segments:
        segment.master.fill_(3.0)  # a step
    with Operators() as ran:
        engine.all_gather_params()
    narrow = [s for s in engine.segments if s.param.dtype != s.master.dtype]
    assert ran.names == ["copy_"] * len(narrow) and bool(narrow) is (dtype == torch.bfloat16)
    assert all(torch.equal(p, torch.full_like(p, 3.0)) for p in held.values())


def test_reduction_starts_only_during_the_last_backward() -> None:
    parameters, hook = named(), Recorded()
    engine = engine_of(parameters, 16 / MIB, two_ranks(), hook)
    engine.start_step(2)
    backward(parameters)
    assert hook.calls == [], "accumulating micro-batches must not communicate"
    backward(parameters)
    assert hook.calls == [32, 8, 32], "every bucket is under way before the step is finished"
    assert engine.finish_step() == []
    assert hook.calls == [32, 8, 32], "one reduction per bucket and step"
    for _, p in parameters:
        assert torch.equal(state_of(p).main_grad, torch.full(p.shape, 4.0))
        assert p.grad is None
    engine.start_step(2)
    assert all(not state_of(p).main_grad.any() for _, p in parameters)


def test_unused_parameter_is_named_and_its_bucket_still_reduced() -> None:
    parameters, hook = named(), Recorded()
    engine = engine_of(parameters, 16 / MIB, two_ranks(), hook)
    engine.start_step(1)
    backward(parameters, skip="last.weight")
    assert hook.calls == [], "bucket 0 waits, and order is kept"
    assert engine.finish_step() == ["last.weight"]
    assert hook.calls == [32, 8, 32]


def test_tied_parameter_is_ready_after_its_last_use() -> None:
    table, hook = parameter(4, 4, uses=2), Recorded()
    engine = engine_of([("table", table)], None, two_ranks(), hook)
    engine.start_step(1)
    state_of(table).register_grad_ready()
    assert hook.calls == []
    state_of(table).register_grad_ready()
    assert hook.calls == [16]


def test_group_of_one_reduces_nothing() -> None:
    parameters, hook = named(), Recorded()
    engine = engine_of(parameters, None, SINGLE, hook)
    engine.start_step(1)
    backward(parameters)
    assert engine.finish_step() == []
    assert hook.calls == []


def test_no_bucket_mixes_parameters_with_copies_on_other_ranks() -> None:
    near, far = Group("dp", (0, 1), 0, None), Group("edp", (0, 2), 0, None)
    names = ["a", "b", "c", "d"]
    parameters = [(name, named()[0][1]) for name in names]
    held = {spec: CopyGroups(far if i % 2 else near) for i, spec in enumerate(marked(parameters))}
    made = build_buckets(parameters, 1.0, torch.float32, True, held.__getitem__, first=3)
    assert [list(bucket.params) for bucket in made] == [["b", "d"], ["a", "c"]]
    assert [bucket.data for bucket in made] == [far, near]
    assert [bucket.shards for bucket in made] == [far, near]
    assert [bucket.index for bucket in made] == [3, 4]
    assert {s.groups.data for bucket in made for s in bucket.segments} == {SINGLE}
    one_each = build_buckets(parameters, 1 / MIB, torch.float32, False, held.__getitem__)
    assert [list(bucket.params) for bucket in one_each] == [["d"], ["c"], ["b"], ["a"]]
    assert [s.groups.data for b in one_each for s in b.segments] == [far, near, far, near]


def marked(parameters: list[tuple[str, nn.Parameter]]) -> list[ParameterSpec]:
    """Returns the specs of parameters, all different."""
    for i, (_, p) in enumerate(parameters):
        state_of(p).spec = replace(spec_of(p), uses=i + 1)
    return [spec_of(p) for _, p in parameters]


@pytest.mark.parametrize("deferred", [False, True])
def test_values_are_drawn_unless_the_parameters_come_with_theirs(deferred: bool) -> None:
    init = Initializer(3, torch.float32, torch.device("cpu"), deferred)
    spec = ParameterSpec((4, 4), (ShardSpec("weight", (4, 4), (0, 0), (4, 4), std=0.02),), False)
    stage = nn.Module()
    stage.weight = init.parameter(spec)
    if not deferred:
        stage.weight.data.fill_(7.0)  # as a model of the user's own has drawn them
    settings = DataParallelSettings(1, False, None, "none", True)
    groups, dtype = ProcessGroups.single(), torch.bfloat16
    engine = data_parallel_engine(settings, [stage], [], init, dtype, groups, PendingGathers())
    wanted = init.values(spec) if deferred else torch.full((4, 4), 7.0)
    (segment,) = engine.segments
    assert torch.equal(segment.master.view(-1)[:16], wanted.view(-1))
    assert torch.equal(stage.weight, wanted.to(dtype))
