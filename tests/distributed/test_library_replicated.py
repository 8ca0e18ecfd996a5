"""Tests parameters between tensor-parallel layers: compares norms of queries and keys with one
process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import parallel3d as p3d
from parallel3d.library.split_backward import SplitBackward
from parallel3d.parameters.state import WeightGradients, state_of
from tests.distributed.pool import Pool

pytestmark = pytest.mark.nightly

HEADS, SIZE, WIDTH = 4, 6, 10


class Attention(nn.Module):
    """Normalizes queries and keys of each head by one weight for all heads, like Qwen3."""

    def __init__(self, group: Any = None) -> None:
        super().__init__()
        column, row, more = nn.Linear, nn.Linear, ()
        if group is not None:
            column, row, more = p3d.ColumnParallelLinear, p3d.RowParallelLinear, (group,)
        self.q, self.k, self.v = (column(WIDTH, HEADS * SIZE, *more) for _ in range(3))
        self.q_norm, self.k_norm = nn.RMSNorm(SIZE), nn.RMSNorm(SIZE)
        self.out = row(HEADS * SIZE, WIDTH, *more)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (f(x).unflatten(-1, (-1, SIZE)).transpose(1, 2) for f in (self.q, self.k, self.v))
        y = F.scaled_dot_product_attention(self.q_norm(q), self.k_norm(k), v, is_causal=True)
        return x + self.out(y.transpose(1, 2).flatten(2))


def made(group: Any = None) -> nn.Sequential:
    torch.manual_seed(7)
    torch.set_default_dtype(torch.float64)
    net = nn.Sequential(Attention(group), nn.RMSNorm(WIDTH), Attention(group))
    torch.set_default_dtype(torch.float32)
    return net


def norms(net: nn.Sequential) -> list[nn.Module]:
    return [norm for layer in (net[0], net[2]) for norm in (layer.q_norm, layer.k_norm)]


def trained(net: nn.Module, batches: list[list[int]]) -> dict[str, Tensor]:
    """Returns the weights after a step on the mean over each list's inputs."""
    optimizer = torch.optim.SGD(net.parameters(), lr=0.5)
    for seeds in batches:
        optimizer.zero_grad()
        for seed in seeds:
            generator = torch.Generator().manual_seed(seed)
            x = torch.randn(2, 5, WIDTH, generator=generator, dtype=torch.float64)
            (net(x).square().mean() / len(seeds)).backward()
        optimizer.step()
    return net.state_dict()


def off(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> float:
    assert ours.keys() == theirs.keys()
    return max(float((ours[k] - theirs[k]).abs().max() / theirs[k].abs().max()) for k in theirs)


def beside_one_process(tp: int) -> dict[str, Any]:
    groups = p3d.init(tp=tp)
    seeds = [[2 * step, 2 * step + 1][: groups.dp.size] for step in range(3)]
    theirs = trained(made(), seeds)
    found: dict[str, Any] = {}
    for summed in (True, False):
        net = made(groups.tp)
        for norm in norms(net) if summed else ():
            p3d.sum_gradients_over(norm, groups.tp)
        wrapped = p3d.DistributedDataParallel(net, process_group=groups.dp)
        mine = [[of_step[groups.dp.index]] for of_step in seeds]
        found[f"summed {summed}"] = off(trained(wrapped, mine), theirs)
        try:
            p3d.check_replicated(net, groups.tp)
        except RuntimeError as error:
            found[f"drift {summed}"] = str(error)
    return found


@pytest.mark.parametrize(("world", "tp"), [(4, 2), (4, 4)], ids=str)
def test_norms_of_heads_train_like_one_process(world: int, tp: int, pool: Pool) -> None:
    for found in pool.run(world, beside_one_process, tp):
        assert found.keys() == {"summed True", "summed False", "drift False"}
        assert found["summed True"] <= 1e-12
        assert found["summed False"] > 1e-4  # otherwise the line under test would have no effect
        assert "parameter 0.q_norm.weight differs by" in found["drift False"]


def deferred() -> float:
    """A linear layer between the two, whose weight gradient a schedule would defer."""
    group = p3d.init(tp=2).tp
    torch.manual_seed(3)
    layer = nn.Linear(4, 4, bias=False)
    state_of(layer.weight).weight_gradients = queue = (
        WeightGradients()
    )  # a stage of a pipeline does the same
    p3d.sum_gradients_over(layer, group)
    with SplitBackward():
        y = layer(torch.ones(3, 4) * (1 + group.index))
    with queue.deferred() as jobs:
        y.sum().backward()
    for job in jobs:
        job()
    return float((layer.weight.grad - 9).abs().max())


def test_a_deferred_gradient_is_summed_too(pool: Pool) -> None:
    assert pool.run(2, deferred) == [0.0, 0.0]


def graph_of_a_gradient() -> float:
    """Runs a backward through the summed gradient."""
    group = p3d.init(tp=2).tp
    layer = nn.Linear(1, 1, bias=False).double()
    p3d.sum_gradients_over(layer, group)
    x = torch.tensor([[1.0 + group.index]], dtype=torch.float64)
    layer(x).square().sum().backward(create_graph=True)  # 2 w (1 + 4)
    (slope,) = torch.autograd.grad(layer.weight.grad.sum(), layer.weight)
    layer.zero_grad()
    return float((slope - 10).abs())


def test_a_gradient_of_the_gradient_is_summed(pool: Pool) -> None:
    assert pool.run(2, graph_of_a_gradient) == [0.0, 0.0]


def said(call: Callable[..., object], *args: object) -> str:
    try:
        call(*args)
    except p3d.Parallel3dError as error:
        return str(error)
    return ""


def refusals() -> list[str]:
    group = p3d.init(tp=2).tp
    norm = nn.RMSNorm(4)
    p3d.sum_gradients_over(norm, group)
    mixed = nn.Sequential(nn.RMSNorm(4), p3d.RowParallelLinear(4, 4, group))
    found = [said(p3d.sum_gradients_over, m, group) for m in (norm, mixed, nn.ReLU())]
    assert not mixed[0].weight._backward_hooks  # nothing has changed
    nan = nn.RMSNorm(4)
    nn.init.constant_(nan.weight, float("nan") if dist.get_rank() else 1.0)
    try:
        p3d.check_replicated(nan, group)
    except RuntimeError as error:
        found.append(str(error))
    return found


def test_parameters_with_complete_gradients_are_refused(pool: Pool) -> None:
    first, second = pool.run(2, refusals)
    assert first == second
    again, whole, none, nan = first
    assert "weight is summed over a group already" in again
    assert "1.weight belongs to a tensor-parallel layer" in whole
    assert "must have a parameter that requires a gradient" in none
    assert "parameter weight differs by nan between ranks 0 and 1" in nan
