"""Tests how often a step of the library's parts waits for the simulated accelerator."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from parallel3d import DistributedDataParallel
from parallel3d.comm.group import group_of
from parallel3d.data_parallel.gradient_mean import GradientMean
from tests.distributed.simulated import SimulatedPool, here
from tests.distributed.simulated_runs import waits

pytestmark = pytest.mark.nightly


class Net(nn.Module):
    """Has two layers, and one that only takes part if `uses` is set."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))

    def forward(self, x: Tensor, uses: bool) -> Tensor:
        x = self.layers[1](self.layers[0](x).relu())
        return (self.layers[2](x) if uses else x).square().mean()


def gradients(net: nn.Module) -> list[list[float] | None]:
    return [None if p.grad is None else p.grad.flatten().tolist() for p in net.parameters()]


def alone(uses: list[bool]) -> list[list[float] | None]:
    """Returns the mean over the ranks, on the host; None where no rank has a gradient."""
    found = []
    for rank, here_used in enumerate(uses):
        net = Net()
        net(torch.full((2, 4), 1.0 + rank), here_used).backward()
        found.append([p.grad for p in net.parameters()])
    means = []
    for of_ranks in zip(*found, strict=True):
        there = [grad for grad in of_ranks if grad is not None]
        means.append((sum(there) / len(uses)).flatten().tolist() if there else None)
    return means


def waits_of_backwards(uses: list[bool]) -> tuple[list[str], list[list[float] | None]]:
    """Returns the waits of two backwards after the first one, and the gradients of the last."""
    net = DistributedDataParallel(Net().to(here()), bucket_cap_mb=0.0)
    x = torch.full((2, 4), 1.0 + dist.get_rank()).to(here())
    loss = net(x, uses[dist.get_rank()])
    loss.backward()
    found: list[str] = []
    for _ in range(2):
        net.zero_grad()
        loss = net(x, uses[dist.get_rank()])
        with waits() as seen:
            loss.backward()
        found += seen
    return found, gradients(net)


def waits_of_replicas(uses: list[bool]) -> tuple[list[str], list[list[float] | None]]:
    """Returns the waits of an average after the backward in three buckets, and its result."""
    net = Net().to(here())
    net(torch.full((2, 4), 1.0 + dist.get_rank()).to(here()), uses[dist.get_rank()]).backward()
    mean = GradientMean(list(net.parameters()), group_of(None), 80 / (1 << 20))
    with waits() as seen:
        mean.average()
    return seen, gradients(net)


def encoder_of_two_wrappers() -> list[list[float] | None]:
    """Returns the gradients after two backwards in two nets with a common first layer."""
    nets = [Net().to(here()) for _ in range(2)]
    nets[1].layers[0] = nets[0].layers[0]
    wrapped = [DistributedDataParallel(net, bucket_cap_mb=0.0) for net in nets]
    x = torch.full((2, 4), 1.0 + dist.get_rank()).to(here())
    wrapped[0](x, True).backward()
    wrapped[0](x, True).backward()
    return gradients(nets[0])


def same(ours: list[list[float] | None], theirs: list[list[float] | None]) -> None:
    for a, b in zip(ours, theirs, strict=True):
        assert (a is None) == (b is None)
        assert a is None or a == pytest.approx(b, abs=1e-6)


@pytest.mark.parametrize("uses", [[True, True], [True, False], [False, False]], ids=str)
def test_a_backward_of_ddp_makes_no_copy_that_waits(
    uses: list[bool], simulated: SimulatedPool
) -> None:
    """It waits only if a gradient is missing, for the ranks that have it."""
    for used, (seen, grads) in zip(uses, simulated.run(2, waits_of_backwards, uses), strict=True):
        same(grads, alone(uses))
        flags = [why for why in seen if why.startswith("tolist") and "finish" in why]
        assert len(seen) == len(flags) == (0 if used else 2), seen


def test_a_layer_under_two_wrappers_gets_the_mean_once(simulated: SimulatedPool) -> None:
    twice = [[2 * value for value in grad] for grad in alone([True, True])]
    for grads in simulated.run(2, encoder_of_two_wrappers):
        same(grads, twice)


@pytest.mark.parametrize("uses", [[True, True], [True, False], [False, False]], ids=str)
def test_the_mean_of_pipelines_waits_once_at_most(
    uses: list[bool], simulated: SimulatedPool
) -> None:
    """It waits once, whatever the number of buckets, and also if only this rank lacks a
    gradient."""
    for used, (seen, grads) in zip(uses, simulated.run(2, waits_of_replicas, uses), strict=True):
        same(grads, alone(uses))
        assert len(seen) == (0 if used else 1), seen
