"""Calls DistributedDataParallel with the arguments of PyTorch's class."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import parallel3d as p3d
from parallel3d import DistributedDataParallel
from parallel3d.data_parallel.ddp import NOT_TAKEN
from tests.distributed.pool import Pool

pytestmark = pytest.mark.nightly

THEIRS = inspect.signature(nn.parallel.DistributedDataParallel.__init__).parameters
NOT_BUILT = {
    "dim": 1,
    "init_sync": False,
    "check_reduction": True,
    "static_graph": True,
    "device_mesh": "dp",
    "forward_sync_buffers": False,
    "delay_all_reduce_named_params": [("weight", None)],
    "param_to_hook_all_reduce": "weight",
    "mixed_precision": "fp16",
    "skip_all_reduce_unused_params": True,
    "bucket_cap_mb_list": [1, -2],
    "batched_grad_copy": True,
    "lazy_bucket_allocation": True,
}


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.layer, self.norm = nn.Linear(4, 3), nn.BatchNorm1d(3)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.layer(x))


def grads_of(net: nn.Module) -> list[Tensor]:
    generator = torch.Generator().manual_seed(dist.get_rank())
    net.zero_grad()
    net(torch.randn(5, 4, generator=generator)).pow(3).sum().backward()
    return [p.grad.clone() for p in net.parameters()]


def same(ours: list[Tensor], theirs: list[Tensor]) -> bool:
    return all(torch.allclose(a, b, atol=1e-6) for a, b in zip(ours, theirs, strict=True))


def test_every_argument_of_pytorchs_class_is_taken_or_has_a_sentence() -> None:
    ours = inspect.signature(DistributedDataParallel.__init__).parameters
    assert NOT_BUILT.keys() == NOT_TAKEN.keys()
    assert {*THEIRS} <= {*ours, *NOT_TAKEN}
    # None also means True; before torch 2.13 the default was True.
    same = {"broadcast_buffers": (None, True)}
    for name, theirs in THEIRS.items():
        default = ours[name].default if name in ours else NOT_TAKEN[name][0]
        assert theirs.default in same.get(name, (default,)), name


Found = list[dict[str, Any]]


def everything() -> dict[str, Any]:
    return {"calls": calls(), "ignored": ignored()}


@pytest.fixture(scope="module")
def by_rank(pool: Pool) -> Found:
    """Returns the findings of each of two ranks, in one run for all tests."""
    return pool.run(2, everything)


def called(call: Callable[[], object]) -> str:
    try:
        call()
    except (ValueError, RuntimeError, TypeError) as error:
        return f"{type(error).__name__}: {error}"
    return ""


def calls() -> dict[str, str]:
    """Asserts that both ranks find this."""
    wrap = DistributedDataParallel
    wanted = grads_of(nn.parallel.DistributedDataParallel(Net()))
    usual = {name: p.default for name, p in THEIRS.items() if p.default is not p.empty}
    world = dist.new_group([0, 1])
    for net in (
        wrap(Net(), **usual),
        wrap(Net(), None, None, dim=0, bucket_cap_mb=1.0, find_unused_parameters=True),
        wrap(Net(), process_group=init_device_mesh("cpu", (2,))),
        wrap(Net(), process_group=world),
        wrap(Net(), [torch.device("cpu")], "cpu"),
    ):
        assert same(grads_of(net), wanted)
    for wanted_buffers in (False, True):
        module = Net()
        net = wrap(module, broadcast_buffers=wanted_buffers)
        module.norm.running_mean += dist.get_rank()
        net.eval()(torch.ones(2, 4))
        assert module.norm.running_mean[0] == (0 if wanted_buffers else dist.get_rank())
    said = {
        name: called(lambda n=name, v=v: wrap(Net(), **{n: v})) for name, v in NOT_BUILT.items()
    }
    return said | {
        "a group for devices": called(lambda: wrap(Net(), world)),
        "our group for devices": called(lambda: wrap(Net(), p3d.init().dp)),
        "another device": called(lambda: wrap(Net(), output_device=1)),
        "no argument": called(lambda: wrap(Net(), bucket_cap=1)),
    }


def test_arguments_are_accepted_or_refused_in_a_sentence(by_rank: Found) -> None:
    for said in (found["calls"] for found in by_rank):
        for name in NOT_BUILT:
            assert said[name].startswith(f"ValueError: {name}="), said[name]
            assert "\n" not in said[name]
        assert said["another device"].startswith("ValueError: output_device=[1] must name the one")
        assert said["no argument"].startswith("TypeError: DistributedDataParallel has no argument")
        for name in ("a group for devices", "our group for devices"):
            assert said[name].startswith("TypeError: the second argument must be device_ids")
            assert said[name].endswith("give a group as process_group=groups.dp")


class Ignoring(nn.Module):
    """Has a layer and a buffer that are not shared by the ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.shared, self.own = Net(), nn.Linear(3, 2 + dist.get_rank())
        self.register_buffer("mark", torch.tensor(float(dist.get_rank())))
        self.names = ["own.weight", "own.bias", "mark"]

    def forward(self, x: Tensor) -> Tensor:
        return self.own(self.shared(x))


def ignored() -> None:
    rank = dist.get_rank()
    module = Ignoring()
    theirs = nn.parallel.DistributedDataParallel
    theirs._set_params_and_buffers_to_ignore_for_model(module, module.names)
    net = DistributedDataParallel(module)
    grads_of(net)
    own = [module.own.weight.grad.clone(), module.own.bias.grad.clone()]
    assert module.mark == rank
    assert [n for n, _ in module.named_parameters() if n not in module.names] == net._names
    everyone: list[Any] = [None, None]
    dist.all_gather_object(everyone, module.shared.layer.weight.grad)
    assert torch.equal(*everyone)
    with net.no_sync():
        grads_of(net)
    assert all(torch.equal(p.grad, g) for p, g in zip(module.own.parameters(), own, strict=True))


def test_what_the_module_says_to_ignore_stays_the_ranks_own(by_rank: Found) -> None:
    assert [found["ignored"] for found in by_rank] == [None, None]
