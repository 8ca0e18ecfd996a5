"""Tests gradients with two readers or writers: each way ends with the mean over the ranks, or is
refused."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import NamedTuple

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.optim import _apply_optimizer_in_backward
from torch.utils.checkpoint import checkpoint

import parallel3d as p3d
from parallel3d.comm.group import Group
from tests.distributed.pool import Pool

pytestmark = pytest.mark.nightly

Wrap = Callable[[nn.Module], nn.Module]
Way = Callable[[Wrap, int], "Found"]


class Found(NamedTuple):
    """A result: the gradients after the backward, and those that a hook saw during it."""

    grads: list[Tensor | None]
    seen: Sequence[Tensor] = ()


def made() -> nn.Sequential:
    torch.manual_seed(5)
    layers = (nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 2))
    return nn.Sequential(*layers).double()


def batch(rank: int, step: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(10 * step + rank)
    return torch.randn(3, 4, generator=generator, dtype=torch.float64)


def loss_of(net: nn.Module, rank: int, step: int = 0) -> Tensor:
    return net(batch(rank, step)).square().sum()


def grads_of(*nets: nn.Module) -> list[Tensor | None]:
    return [None if p.grad is None else p.grad.clone() for n in nets for p in n.parameters()]


def hooks_of_others(wrap: Wrap, rank: int) -> Found:
    """One hook doubles the gradient; others read `.grad` before and after the wrapper's own."""
    net, seen = made(), []
    net[0].weight.register_hook(lambda grad: 2 * grad)

    def read(parameter: Tensor) -> None:
        seen.append(parameter.grad.clone())

    net[0].weight.register_post_accumulate_grad_hook(read)
    wrapped = wrap(net)
    net[0].weight.register_post_accumulate_grad_hook(read)
    loss_of(wrapped, rank).backward()
    return Found(grads_of(net), seen)


def retained_graph(wrap: Wrap, rank: int) -> Found:
    net = wrap(made())
    loss = loss_of(net, rank)
    loss.backward(retain_graph=True)
    loss.backward()
    return Found(grads_of(net))


def gradient_penalty(wrap: Wrap, rank: int) -> Found:
    net, x = wrap(made()), batch(rank).requires_grad_()
    out = net(x).square().sum()
    (slope,) = torch.autograd.grad(out, x, create_graph=True)
    (out + slope.square().sum()).backward()
    return Found(grads_of(net))


def graph_of_the_backward(wrap: Wrap, rank: int) -> Found:
    net = wrap(made())
    loss_of(net, rank).backward(create_graph=True)
    grads = [None if g is None else g.detach() for g in grads_of(net)]
    net.zero_grad()  # breaks the cycle of gradients and graph
    return Found(grads)


class Checkpointed(nn.Module):
    def __init__(self, use_reentrant: bool) -> None:
        super().__init__()
        self.net, self.use_reentrant = made(), use_reentrant

    def forward(self, x: Tensor) -> Tensor:
        x = self.net[:2](x)
        return self.net[4](checkpoint(self.net[2:4], x, use_reentrant=self.use_reentrant))


def checkpointed(wrap: Wrap, rank: int) -> Found:
    nets = [wrap(Checkpointed(kind)) for kind in (True, False)]
    for net in nets:
        loss_of(net, rank).backward()
    return Found(grads_of(*nets))


def two_backwards(wrap: Wrap, rank: int) -> Found:
    net = wrap(made())
    losses = [loss_of(net, rank, step) for step in range(2)]
    for loss in (*losses, loss_of(net, rank, 2)):
        loss.backward()
    return Found(grads_of(net))


def accumulated(wrap: Wrap, rank: int) -> Found:
    net = wrap(made())
    for step in range(4):
        quiet = step % 2 == 0 and hasattr(net, "no_sync")
        with net.no_sync() if quiet else nullcontext():
            loss_of(net, rank, step).backward()
    return Found(grads_of(net))


def encoder_of_two(wrap: Wrap, rank: int) -> Found:
    """Uses one of the two wrappers in a backward, then both in one."""
    whole = made()
    heads = [nn.Linear(6, n).double() for n in (2, 3)]
    nets = [wrap(nn.Sequential(*whole[:2], head)) for head in heads]
    loss_of(nets[0], rank).backward()
    found = grads_of(*nets)
    sum(loss_of(net, rank, step + 1) for step, net in enumerate(nets)).backward()
    return Found(found + grads_of(*nets))


def encoder_of_two_accumulated(wrap: Wrap, rank: int) -> Found:
    """The first wrapper accumulates alone while the second reduces."""
    whole = made()
    nets = [wrap(nn.Sequential(*whole[:2], nn.Linear(6, 2).double())) for _ in range(2)]
    with nets[0].no_sync() if hasattr(nets[0], "no_sync") else nullcontext():
        loss_of(nets[0], rank).backward()
    loss_of(nets[1], rank, 1).backward()
    loss_of(nets[0], rank, 2).backward()
    return Found(grads_of(*nets))


def wrapped_in_a_wrapper(wrap: Wrap, rank: int) -> Found:
    net = wrap(wrap(made()))
    for step in range(3):
        loss_of(net, rank, step).backward()
    return Found(grads_of(net))


def wrapped_again(wrap: Wrap, rank: int) -> Found:
    """Both wrappers are used, and the first one stays alive."""
    net = made()
    first = wrap(net)
    loss_of(first, rank).backward()
    second = wrap(net)
    loss_of(second, rank, 1).backward()
    loss_of(first, rank, 2).backward()
    return Found(grads_of(net))


class UsedTwice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = made()

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.net[2](torch.tanh(self.net[2](self.net[:2](x))))
        return self.net[4](F.linear(hidden, self.net[2].weight))


def used_twice(wrap: Wrap, rank: int) -> Found:
    net = wrap(UsedTwice())
    loss_of(net, rank).backward()
    return Found(grads_of(net))


WAYS = (
    hooks_of_others,
    retained_graph,
    gradient_penalty,
    graph_of_the_backward,
    checkpointed,
    two_backwards,
    accumulated,
    encoder_of_two,
    encoder_of_two_accumulated,
    wrapped_in_a_wrapper,
    wrapped_again,
    used_twice,
)


def off(ours: Sequence[Tensor | None], theirs: Sequence[Tensor | None]) -> float:
    assert [g is None for g in ours] == [g is None for g in theirs]
    pairs = zip(ours, theirs, strict=True)
    return max(((a - b).abs().max().item() for a, b in pairs if a is not None), default=0.0)


def error(way: Way, group: Group) -> float:
    """Returns the largest difference from the mean over the ranks of their own gradients."""
    rank = dist.get_rank()
    torch.manual_seed(5)
    ours = way(
        lambda module: p3d.DistributedDataParallel(module, process_group=group, bucket_cap_mb=1e-4),
        rank,
    )
    alone = []
    for each in range(group.size):
        torch.manual_seed(5)
        alone.append(way(lambda module: module, each))
    pairs = zip(*(found.grads for found in alone), strict=True)
    means = [None if gs[0] is None else sum(gs) / group.size for gs in pairs]
    return max(off(ours.grads, means), off(ours.seen, alone[rank].seen))


def errors(shared_memory: bool) -> dict[str, float]:
    group = p3d.init(shared_memory=shared_memory).dp
    return {way.__name__: error(way, group) for way in WAYS}


@pytest.mark.parametrize("shared_memory", [True, False], ids=["shared_memory", "gloo"])
def test_the_gradient_is_the_mean_once(shared_memory: bool, pool: Pool) -> None:
    for found in pool.run(2, errors, shared_memory):
        assert max(found.values()) < 1e-12, found


def said(call: Callable[..., object], *args: object, **named: object) -> str:
    try:
        call(*args, **named)
    except ValueError as error:
        return str(error)
    return ""


def refusals() -> list[str]:
    group = p3d.init().dp
    found = []
    wrap = p3d.DistributedDataParallel
    for views in ((True, False), (False, True), (True, True)):
        net = made()
        first = wrap(net, process_group=group, gradient_as_bucket_view=views[0])
        found.append(said(wrap, net, process_group=group, gradient_as_bucket_view=views[1]))
        del first
        assert said(wrap, net, process_group=group, gradient_as_bucket_view=views[1]) == ""
    stepping = made()
    _apply_optimizer_in_backward(torch.optim.SGD, stepping.parameters(), {"lr": 0.1})
    found.append(said(wrap, stepping, process_group=group))
    return found


def test_uses_that_would_corrupt_shared_gradients_are_refused(pool: Pool) -> None:
    for found in pool.run(2, refusals):
        for sentence in found[:3]:
            assert "parameter 0.weight is already in another DistributedDataParallel" in sentence
        for sentence in found[3:]:
            assert "parameter 0.weight has an optimizer that steps in the backward" in sentence


def tensor_parallel() -> float:
    """Compares, for tp=2 × dp=2, the weights' gradients with the whole layers' on all inputs."""
    groups = p3d.init(tp=2)
    torch.manual_seed(5)
    whole = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 2)).double()
    made_of_parts = nn.Sequential(
        p3d.ColumnParallelLinear(4, 6, groups.tp), nn.Tanh(), p3d.RowParallelLinear(6, 2, groups.tp)
    ).double()
    made_of_parts.load_state_dict(whole.state_dict())
    net = p3d.DistributedDataParallel(made_of_parts, process_group=groups.dp, bucket_cap_mb=1e-4)
    loss_of(net, groups.dp.index).backward()
    for each in range(groups.dp.size):
        (loss_of(whole, each) / groups.dp.size).backward()
    mine = slice(3 * groups.tp.index, 3 * groups.tp.index + 3)
    wanted = [whole[0].weight.grad[mine], whole[0].bias.grad[mine]]
    wanted += [whole[2].weight.grad[:, mine], whole[2].bias.grad]
    return off(grads_of(net), wanted)


def test_ddp_around_tensor_parallel_layers(pool: Pool) -> None:
    assert max(pool.run(4, tensor_parallel)) < 1e-12
