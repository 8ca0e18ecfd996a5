"""Compares `clip_grad_norm_` with a single process: the norm of the whole model, however it is
split."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard, distribute_tensor

import parallel3d as p3d
from parallel3d.library import grad_norm
from parallel3d.parameters.spec import ParameterSpec, ShardSpec
from parallel3d.parameters.state import state_of
from tests.distributed.pool import Pool

WORDS, WIDTH, SAMPLES = 16, 9, 16
MAX_NORM = 0.05
NORM_TYPES = (2.0, float("inf"), 1.0, 3.5)
TOLERANCE = 1e-9


class Block(nn.Module):
    """A residual MLP, with PyTorch's norm and two layers that may be split."""

    def __init__(self, group: Any = None) -> None:
        super().__init__()
        column, row, more = nn.Linear, nn.Linear, ()
        if group is not None:
            column, row, more = p3d.ColumnParallelLinear, p3d.RowParallelLinear, (group,)
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = column(WIDTH, 4 * WIDTH, *more), row(4 * WIDTH, WIDTH, *more)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


def net(group: Any = None) -> nn.Sequential:
    """Returns the same weights on every rank, in tensor-parallel layers if a group is given, else
    in plain ones."""
    torch.manual_seed(3)
    torch.set_default_dtype(torch.float64)
    words = nn.Embedding(WORDS, WIDTH)
    if group is not None:
        words = p3d.VocabParallelEmbedding.from_embedding(words, group)
    blocks = [words, Block(group), Block(group), nn.Linear(WIDTH, WORDS)]
    torch.set_default_dtype(torch.float32)
    return nn.Sequential(*blocks)


def batch() -> tuple[Tensor, Tensor]:
    words = torch.arange(5 * SAMPLES).view(SAMPLES, 5) * 7 % WORDS
    return words, (3 * words + 1) % WORDS


def loss_of(out: Tensor, words: Tensor) -> Tensor:
    return F.cross_entropy(out.flatten(0, 1), words.flatten())


def one_process(norm_type: float) -> tuple[float, dict[str, Tensor]]:
    """Returns the norm and clipped gradients by PyTorch's own function on the whole model."""
    whole = net()
    inputs, targets = batch()
    loss_of(whole(inputs), targets).backward()
    norm = nn.utils.clip_grad_norm_(whole.parameters(), MAX_NORM, norm_type)
    assert norm > 2 * MAX_NORM
    return float(norm), {n: p.grad.clone() for n, p in whole.named_parameters()}


def mine(dp: Any) -> tuple[Tensor, Tensor]:
    """Returns this replica's samples."""
    return tuple(t.chunk(dp.size)[dp.index] for t in batch())  # type: ignore[return-value]


def tensor_parallel(groups: p3d.ProcessGroups) -> nn.Module:
    module = net(groups.tp)
    inputs, targets = mine(groups.dp)
    wrapped = p3d.DistributedDataParallel(module, process_group=groups.dp)
    loss_of(wrapped(inputs), targets).backward()
    return module


def pipelined(groups: p3d.ProcessGroups, sharded: bool = False) -> nn.Module:
    modules = net(groups.tp)
    if sharded:
        for module in modules:
            fully_shard(module, mesh=groups.mesh["dp"])
    pipe = p3d.Pipeline(
        modules,
        groups.pp,
        loss_fn=loss_of,
        num_microbatches=2,
        **({} if sharded else {"dp": groups.dp}),
    )
    pipe.step(*mine(groups.dp))
    return pipe


def sharded(groups: p3d.ProcessGroups) -> nn.Module:
    """Uses FSDP2 over dp, with tensor-parallel and plain layers."""
    module = net(groups.tp)
    for part in (module[1], module[2], module):
        fully_shard(part, mesh=groups.mesh["dp"])
    inputs, targets = mine(groups.dp)
    loss_of(module(inputs), targets).backward()
    return module


def all_sharded(groups: p3d.ProcessGroups) -> nn.Module:
    return pipelined(groups, sharded=True)


def full(value: Tensor, theirs: Tensor, group: Any) -> Tensor:
    """Returns the whole gradient of a parameter from the shards over dp and tp."""
    local = value.full_tensor() if hasattr(value, "full_tensor") else value
    dims = [i for i, (a, b) in enumerate(zip(local.shape, theirs.shape, strict=True)) if a != b]
    if not dims:
        return local
    parts = [torch.empty_like(local) for _ in group.ranks]
    dist.all_gather(parts, local.contiguous(), group=group.handle)
    return torch.cat(parts, dims[0])


def beside_one_process(make: Callable, sizes: dict[str, int]) -> list[tuple[float, float]]:
    """Returns the relative error of the norm, and of the clipped gradients, by norm type."""
    groups, off = p3d.init(**sizes), []
    for norm_type in NORM_TYPES:
        norm, theirs = one_process(norm_type)
        module = make(groups)
        got = p3d.clip_grad_norm_(module.parameters(), MAX_NORM, norm_type)
        worst = 0.0
        for name, parameter in module.named_parameters():
            clipped = full(parameter.grad, theirs[name], groups.tp)
            worst = max(worst, float((clipped - theirs[name]).abs().max()))
        off.append((abs(float(got) - norm) / norm, worst / MAX_NORM))
    return off


# By number of ranks, so that few runs of the pool suffice. Nine rows over four ranks leave the last
# one without any.
LAYOUTS: dict[int, dict[str, tuple[Callable, dict[str, int]]]] = {
    2: {
        "tp": (tensor_parallel, {"tp": 2}),
        "pp": (pipelined, {"pp": 2}),
        "dp": (tensor_parallel, {"dp": 2}),
    },
    4: {
        "tp of four": (tensor_parallel, {"tp": 4}),
        "zero": (sharded, {"dp": 4}),
        "tp and zero": (sharded, {"tp": 2, "dp": 2}),
    },
    8: {
        "tp, pp and dp": (pipelined, {"tp": 2, "pp": 2, "dp": 2}),
        "tp, pp and zero": (all_sharded, {"tp": 2, "pp": 2, "dp": 2}),
    },
}


def each_beside_one_process(ranks: int) -> dict[str, list[tuple[float, float]]]:
    return {name: beside_one_process(*layout) for name, layout in LAYOUTS[ranks].items()}


@pytest.mark.parametrize(
    "ranks",
    [pytest.param(ranks, marks=[pytest.mark.nightly] * (ranks > 4)) for ranks in LAYOUTS],
)
def test_norm_and_gradients_are_those_of_one_process(ranks: int, pool: Pool) -> None:
    for found in pool.run(ranks, each_beside_one_process, ranks):
        for layout, off in found.items():
            for errors, norm_type in zip(off, NORM_TYPES, strict=True):
                assert max(errors) <= TOLERANCE, (layout, norm_type, errors)


PLANTED = {
    "every rank counts the copies": ("_copy", lambda self, values: self._combined(values)),
    "this rank's parts alone": ("_combined", lambda self, values: values[0]),
    "the largest part": ("_combined", lambda self, values: values.amax()),
}


def with_a_planted_bug(name: str) -> list[tuple[float, float]]:
    attribute, wrong = PLANTED[name]
    with patch.object(grad_norm._Norm, attribute, wrong):
        return beside_one_process(pipelined, {"tp": 2, "pp": 2})


def over_dp_alone() -> list[tuple[float, float]]:
    """Returns the norm in a script that sums over dp, without model parallelism."""

    def over_dp(parameters: Any, max_norm: float, norm_type: float) -> Tensor:
        return nn.utils.clip_grad_norm_(parameters, max_norm, norm_type)

    with patch.object(p3d, "clip_grad_norm_", over_dp):
        return beside_one_process(pipelined, {"tp": 2, "pp": 2})


@pytest.mark.more
@pytest.mark.parametrize("name", PLANTED)
def test_a_planted_bug_is_found(name: str, pool: Pool) -> None:
    found = pool.run(4, with_a_planted_bug, name)
    assert max(errors[0][0] for errors in found) > 1e-3


@pytest.mark.more
def test_a_norm_summed_over_dp_without_need_is_refused(pool: Pool) -> None:
    found = pool.run(4, over_dp_alone)
    assert max(errors[0][0] for errors in found) > 1e-3


def of_new_parameters() -> list[float]:
    """Copies, loaded and moved modules know their groups; a pickled parameter forgets them."""
    groups = p3d.init(tp=2)
    norm, _ = one_process(2.0)
    inputs, targets = batch()
    module = net(groups.tp)
    assigned = net(groups.tp)
    assigned.load_state_dict(module.state_dict(), assign=True)
    on_meta = copy.deepcopy(module).to("meta").to_empty(device="cpu")
    on_meta.load_state_dict(module.state_dict())
    found = []
    for each in (copy.deepcopy(module), assigned, on_meta, module):
        loss_of(each(inputs), targets).backward()
        found.append(float(p3d.clip_grad_norm_(each.parameters(), 1.0)) / norm - 1)
    kept = io.BytesIO()
    torch.save(list(module.parameters()), kept)
    kept.seek(0)
    alone = torch.load(kept, weights_only=True)
    assert all(map(torch.equal, alone, module.parameters()))
    return found


def own_layers() -> list[float]:
    """Tests parameters that the caller splits: `groups` sums them; a rank without any takes
    part."""
    group = p3d.init(pp=2).pp
    first, last = nn.Linear(3, 4).double(), nn.Linear(4, 2).double()
    generator = torch.Generator().manual_seed(1)
    for parameter in (*first.parameters(), *last.parameters()):
        parameter.grad = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
    both = [p.grad for p in (*first.parameters(), *last.parameters())]
    wanted = float(nn.utils.get_total_norm(both)), float(nn.utils.get_total_norm(both[:2]))
    own = (first, last)[group.index].parameters()
    found = float(p3d.clip_grad_norm_(own, 1e9, groups=group))
    mine_alone = list(first.parameters()) if group.index == 0 else []
    alone = float(p3d.clip_grad_norm_(mine_alone, 1e9, groups=[group]))
    return [found - wanted[0], alone - wanted[1]]


def beside_plain_modules() -> float:
    """Tests a pipeline with a module outside of it that every rank holds, which counts once."""
    groups = p3d.init(pp=2)
    pipe, extra = pipelined(groups), nn.Linear(3, 3, bias=False).double()
    norm, _ = one_process(2.0)
    extra.weight.grad = torch.full((3, 3), 0.5, dtype=torch.float64)
    got = p3d.clip_grad_norm_([*extra.parameters(), *pipe.parameters()], 1.0)
    return float(got) - (norm**2 + 9 * 0.25) ** 0.5


def shared_heads() -> list[tuple[float, float]]:
    """A projection of queries and of key-value heads that two ranks of tp share, then over dp."""
    groups = p3d.init(tp=4, dp=2)
    return [shared_heads_of(groups, sharded) for sharded in (False, True)]


def shared_heads_of(groups: p3d.ProcessGroups, sharded: bool) -> tuple[float, float]:
    tp = groups.tp
    generator = torch.Generator().manual_seed(2)
    query, key = (torch.randn(8, 3, generator=generator, dtype=torch.float64) for _ in range(2))
    spec = ParameterSpec(
        (6, 3),
        (
            ShardSpec("q", (8, 3), (2 * tp.index, 0), (2, 3)),
            ShardSpec("k", (8, 3), (tp.index // 2 * 4, 0), (4, 3), row=2, tp_replicas=2),
        ),
        replicated=False,
    )
    parts = zip(spec.shards, (query, key), strict=True)
    values = torch.cat([shard.of_full(full) for shard, full in parts])
    local: Tensor = nn.Parameter(torch.zeros_like(values))
    if sharded:
        local = nn.Parameter(distribute_tensor(local.data, groups.mesh["dp"], [Shard(0)]))
        values = distribute_tensor(values, groups.mesh["dp"], [Shard(0)])
    state_of(local).tp, state_of(local).spec = tp, spec
    local.grad = values
    both = [query, key]
    return tuple(
        float(p3d.clip_grad_norm_(local, 1e9, p) - nn.utils.get_total_norm(both, p))
        for p in (2.0, 1.0)
    )


def test_heads_that_several_ranks_share_count_once(pool: Pool) -> None:
    for found in pool.run(8, shared_heads):
        for off in found:
            assert off == pytest.approx((0.0, 0.0), abs=TOLERANCE)


def partial_under_fsdp() -> list[str]:
    """A norm between two layers; `fully_shard` has averaged its gradient, but nothing has summed
    it."""
    groups = p3d.init(tp=2, dp=2)
    column = p3d.ColumnParallelLinear(4, 4, groups.tp).double()
    between = nn.LayerNorm(2).double()
    layers = nn.Sequential(column, between, p3d.RowParallelLinear(4, 4, groups.tp).double())
    fully_shard(layers, mesh=groups.mesh["dp"])
    layers(torch.arange(8.0, dtype=torch.float64).view(2, 4)).square().sum().backward()
    found = [said(p3d.clip_grad_norm_, layers.parameters(), 1.0)]
    found.append(said(p3d.sum_gradients_over, between, groups.tp))
    for parameter in between.parameters():  # follows the advice in the sentence
        dist.all_reduce(parameter.grad.to_local(), group=groups.tp.handle)
    found.append(said(p3d.clip_grad_norm_, layers.parameters(), 1.0))
    return found


def test_a_partial_gradient_under_fully_shard_is_refused(pool: Pool) -> None:
    for clipped, summed, mended in pool.run(4, partial_under_fsdp):
        assert "whose gradients must be equal on all ranks and differ" in clipped
        assert "sum_gradients_over: weight must not be under fully_shard" in summed
        assert mended == ""


def rounding_alone() -> float:
    """Copies whose gradient is only rounding noise, which may differ between ranks."""
    group = p3d.init(tp=2).tp
    layer, norm = p3d.ColumnParallelLinear(4, 4, group), nn.LayerNorm(4)
    for parameter in (*layer.parameters(), *norm.parameters()):
        parameter.grad = torch.ones_like(parameter)
    norm.weight.grad *= 1e-8 * (1 + group.index)
    norm.bias.grad = None
    return float(p3d.clip_grad_norm_([*layer.parameters(), *norm.parameters()], 1.0))


OF_TWO = (of_new_parameters, own_layers, beside_plain_modules, rounding_alone)


def of_two() -> dict[Callable, Any]:
    return {part: part() for part in OF_TWO}


@pytest.fixture(scope="module")
def by_rank(pool: Pool) -> list[dict[Callable, Any]]:
    """Returns the findings of each of two ranks, in one run for all tests."""
    return pool.run(2, of_two)


def test_new_parameters_know_their_groups(by_rank: list[dict[Callable, Any]]) -> None:
    for found in by_rank:
        assert found[of_new_parameters] == pytest.approx([0.0] * 4, abs=TOLERANCE)


def test_groups_of_the_caller_are_summed(by_rank: list[dict[Callable, Any]]) -> None:
    for found in by_rank:
        assert found[own_layers] == pytest.approx([0.0, 0.0], abs=TOLERANCE)


def test_a_module_outside_of_a_pipeline_counts_once(by_rank: list[dict[Callable, Any]]) -> None:
    for found in by_rank:
        assert found[beside_plain_modules] == pytest.approx(0.0, abs=TOLERANCE)


def test_rounding_of_a_zero_gradient_is_not_an_error(
    by_rank: list[dict[Callable, Any]],
) -> None:
    for found in by_rank:
        assert found[rounding_alone] == pytest.approx(20**0.5)


def said(call: Callable[..., object], *args: Any, **kwargs: Any) -> str:
    try:
        call(*args, **kwargs)
    except (p3d.Parallel3dError, RuntimeError) as error:
        return f"{type(error).__name__}: {error}"
    return ""


def refusals() -> list[str]:
    groups = p3d.init(tp=2)
    rank = groups.rank
    module = tensor_parallel(groups)
    parameters = list(module.parameters())
    clip = p3d.clip_grad_norm_
    found = [
        said(clip, iter(()), 1.0),
        said(clip, parameters, 1.0, -2.0),
        said(clip, parameters, -1.0),
        said(clip, parameters, 1.0, groups="tp"),
        said(clip, module[1].norm.parameters(), 1.0, groups=groups.tp),
    ]
    # The group is known, so the norm is correct.
    found.append(said(clip, parameters, 1.0, groups=groups.tp))
    # the result equals a call without `sum_gradients_over`
    module[1].norm.weight.grad *= 1 + 10 * rank
    found.append(said(clip, parameters, 1.0))
    module[1].norm.weight.grad.fill_(float("nan") if rank else 1.0)
    found.append(said(clip, parameters, 1.0, error_if_nonfinite=True))
    table = nn.Embedding(4, 2, sparse=True)
    table(torch.tensor([1])).sum().backward()
    found.append(said(clip, table.parameters(), 1.0))
    held = nn.Linear(2, 2)
    state_of(held.weight).main_grad = torch.zeros(4)  # like parameters of a Trainer
    found.append(said(clip, held.parameters(), 1.0))
    flat = nn.Linear(2, 2)
    flat.weight._fsdp_flattened = True  # like parameters of FSDP1
    found.append(said(clip, flat.parameters(), 1.0))
    return found


def test_a_norm_that_would_be_wrong_is_refused_on_every_rank(pool: Pool) -> None:
    first, second = pool.run(2, refusals)
    assert first[1:] == second[1:]
    wanted = (
        "Parallel3dError: clip_grad_norm_ got no parameter on rank 0",
        "Parallel3dError: clip_grad_norm_(norm_type=-2.0) must be above 0 or inf",
        "Parallel3dError: clip_grad_norm_(max_norm=-1.0) must be at least 0",
        "Parallel3dError: group='tp' must be a group",
        "Parallel3dError: clip_grad_norm_(groups=…) must be groups over which all parameters are",
        "",
        "Parallel3dError: clip_grad_norm_ got parameters that every rank holds, whose gradients",
        "RuntimeError: the norm of order 2.0 of the gradients is not finite",
        "Parallel3dError: clip_grad_norm_ got a sparse gradient",
        "Parallel3dError: clip_grad_norm_ got parameters of a Trainer",
        "Parallel3dError: clip_grad_norm_ got parameters of FullyShardedDataParallel (FSDP1)",
    )
    for sentence, start in zip(first, wanted, strict=True):
        assert sentence.startswith(start) and bool(sentence) == bool(start), sentence


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("norm_type", [2.0, float("inf"), 3.0])
def test_one_process_equals_pytorch(dtype: torch.dtype, norm_type: float) -> None:
    torch.manual_seed(0)
    ours, theirs = nn.Linear(50, 40, dtype=dtype), nn.Linear(50, 40)
    ours.weight.grad = 30 * torch.randn(40, 50).to(dtype)
    theirs.weight.grad = ours.weight.grad.float().clone()
    wanted = nn.utils.clip_grad_norm_(theirs.parameters(), 0.5, norm_type)
    got = p3d.clip_grad_norm_(ours.parameters(), 0.5, norm_type)
    assert float(got) == pytest.approx(float(wanted), rel=1e-6)
    clipped, rtol = ours.weight.grad.float(), 1e-6 if dtype == torch.float32 else 1e-2
    torch.testing.assert_close(clipped, theirs.weight.grad, rtol=rtol, atol=1e-6)


def test_a_shared_parameter_counts_once_and_one_without_gradient_not_at_all() -> None:
    layer = nn.Linear(3, 4)
    assert float(p3d.clip_grad_norm_([], 1.0)) == 0.0
    assert float(p3d.clip_grad_norm_(layer.bias, 1.0)) == 0.0
    layer.weight.grad = torch.full((4, 3), 2.0)
    layer.bias.grad = torch.full((4,), 2.0, dtype=torch.float32)
    found = p3d.clip_grad_norm_([layer.weight, layer.weight, layer.bias], 4.0)
    assert float(found) == pytest.approx(8.0)
    assert layer.bias.grad.tolist() == pytest.approx([1.0] * 4)
    mixed = nn.Linear(2, 2, dtype=torch.bfloat16), nn.Linear(2, 2).double()
    for module in mixed:
        module.weight.grad = torch.ones_like(module.weight)
    parameters = [p for module in mixed for p in module.parameters()]
    assert float(p3d.clip_grad_norm_(parameters, 1.0)) == pytest.approx(8**0.5)
