"""Calls DistributedDataParallel like PyTorch's class: arguments, copies and files."""

from __future__ import annotations

import copy
import inspect
import io
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.device_mesh import init_device_mesh

import parallel3d as p3d
from parallel3d import DistributedDataParallel
from tests.distributed.pool import Pool

pytestmark = pytest.mark.nightly

THEIRS = inspect.signature(nn.parallel.DistributedDataParallel.__init__).parameters
NOT_BUILT = {
    "dim": 1,
    "delay_all_reduce_named_params": [("weight", None)],
    "param_to_hook_all_reduce": "weight",
    "mixed_precision": "fp16",
    "skip_all_reduce_unused_params": True,
    "bucket_cap_mb_list": [1, -2],
    "batched_grad_copy": True,
    "lazy_bucket_allocation": True,
    "output_device": 1,
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


def test_the_arguments_have_pytorchs_order_and_defaults() -> None:
    ours = inspect.signature(DistributedDataParallel.__init__).parameters
    assert [*ours][: len(THEIRS)] == [*THEIRS]
    # None, which warns of nothing, also means True; before torch 2.13 the default was True.
    same = {"broadcast_buffers": (None, True)}
    for name, theirs in THEIRS.items():
        assert theirs.default in same.get(name, (ours[name].default,)), name


Found = list[dict[str, Any]]


def everything() -> dict[str, Any]:
    return {
        "calls": calls(),
        "warned": warned(),
        "copies": copies(),
        "half public": half_public(),
    }


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
    mesh = init_device_mesh("cpu", (2,))
    for net in (
        wrap(Net(), **usual),
        wrap(Net(), None, None, 0, True, True, world, 1.0, True),
        wrap(Net(), process_group=mesh),
        wrap(Net(), process_group=world),
        wrap(Net(), [torch.device("cpu")], "cpu"),
        wrap(Net(), device_mesh=mesh, check_reduction=True),
    ):
        assert same(grads_of(net), wanted)
    for init, forward, first in ((False, True, 0), (True, False, 0), (False, None, 1)):
        module = Net()
        module.norm.running_mean += dist.get_rank()
        net = wrap(module, broadcast_buffers=init, forward_sync_buffers=forward)
        assert net.forward_sync_buffers == bool(forward)
        assert module.norm.running_mean[0] == first * dist.get_rank()
    square = init_device_mesh("cpu", (2, 1))
    said = {
        name: called(lambda n=name, v=v: wrap(Net(), **{n: v})) for name, v in NOT_BUILT.items()
    }
    return said | {
        "two groups": called(lambda: wrap(Net(), process_group=world, device_mesh=mesh)),
        "a group for devices": called(lambda: wrap(Net(), world)),
        "our group for devices": called(lambda: wrap(Net(), p3d.init().dp)),
        "square": called(lambda: wrap(Net(), device_mesh=square)),
    }


def test_arguments_are_accepted_or_refused_in_a_sentence(by_rank: Found) -> None:
    for said in (found["calls"] for found in by_rank):
        for name in NOT_BUILT:
            assert said[name].startswith(f"ValueError: {name}="), said[name]
            assert "\n" not in said[name]
        for name in ("two groups", "square"):
            assert said[name].startswith("RuntimeError: "), said[name]
        for name in ("a group for devices", "our group for devices"):
            assert said[name].startswith("TypeError: the second argument must be device_ids")
            assert said[name].endswith("give a group as process_group=groups.dp")


def warned() -> list[list[str]]:
    found = []
    for given in (
        {},
        {"forward_sync_buffers": False},
        {"broadcast_buffers": True},
        {"broadcast_buffers": False, "forward_sync_buffers": True},
        {"check_reduction": True},
    ):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            DistributedDataParallel(Net(), **given)
        assert all(w.category is FutureWarning and w.filename == __file__ for w in caught)
        found.append([str(w.message).partition(" is ")[0] for w in caught])
    return found


def test_arguments_that_pytorch_deprecates_give_a_warning(by_rank: Found) -> None:
    given = [[], [], ["broadcast_buffers"], ["broadcast_buffers"], ["check_reduction"]]
    assert [found["warned"] for found in by_rank] == [given, given]


def copied(net: nn.Module) -> nn.Module:
    return copy.deepcopy(net)


def loaded(net: nn.Module) -> nn.Module:
    file = io.BytesIO()
    torch.save(net, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


def copies() -> dict[str, Any]:
    found: dict[str, Any] = {}
    half = dist.new_group([0]), dist.new_group([1])
    for make in (copied, loaded):
        net = DistributedDataParallel(Net(), find_unused_parameters=True, bucket_cap_mb=1e-5)
        wanted = grads_of(net)
        if dist.get_rank() == 0:  # alone: copies are for averages and files, on one rank
            twin = make(net)
            with torch.no_grad():
                twin.eval()(torch.ones(2, 4))
        twin = make(net)
        with torch.no_grad():
            for parameter in twin.parameters():
                parameter.mul_(1)
        assert not {id(p) for p in twin.parameters()} & {id(p) for p in net.parameters()}
        assert same(grads_of(twin), wanted)
        assert twin.find_unused_parameters
        assert len(twin.averager.buckets) > 1
        assert same(grads_of(net), wanted)
        hooked, joined = make(net), make(net)
        hooked.register_comm_hook(None, default_hooks.allreduce_hook)
        assert same(grads_of(hooked), wanted)
        with joined.join():
            assert same(grads_of(joined), wanted)
    whole = copy.deepcopy(DistributedDataParallel(Net(), process_group=half[dist.get_rank()]))
    found["own"] = called(lambda: loaded(whole))
    return found


def test_copies_and_loaded_files_train_like_the_original(by_rank: Found) -> None:
    for found in (of_rank["copies"] for of_rank in by_rank):
        assert found["own"].startswith("RuntimeError: a DistributedDataParallel over 1 of 2 ranks")


class Ignoring(nn.Module):
    """Has a layer and a buffer that are not shared by the ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.shared, self.own = Net(), nn.Linear(3, 2 + dist.get_rank())
        self.register_buffer("mark", torch.tensor(float(dist.get_rank())))
        self.names = ["own.weight", "own.bias", "mark"]

    def forward(self, x: Tensor) -> Tensor:
        return self.own(self.shared(x))


def half_public() -> dict[str, str]:
    rank = dist.get_rank()
    module = Ignoring()
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(module, module.names)
    net = DistributedDataParallel(module)
    grads_of(net)
    own = [module.own.weight.grad.clone(), module.own.bias.grad.clone()]
    assert module.mark == rank
    assert [n for n, _ in module.named_parameters() if n not in module.names] == net.averager.names
    everyone: list[Any] = [None, None]
    dist.all_gather_object(everyone, module.shared.layer.weight.grad)
    assert torch.equal(*everyone)
    with net.no_sync():
        grads_of(net)
    assert all(torch.equal(p.grad, g) for p, g in zip(module.own.parameters(), own, strict=True))
    static = DistributedDataParallel(Net())
    static._set_static_graph()
    wanted = grads_of(DistributedDataParallel(Net(), static_graph=True))
    for _ in range(2):
        assert same(grads_of(static), wanted)
    assert static.averager.static
    return {"late": called(static._set_static_graph)}


def test_a_late_set_static_graph_is_refused(by_rank: Found) -> None:
    for said in (found["half public"] for found in by_rank):
        assert said["late"].startswith("RuntimeError: _set_static_graph should be called before")


TINY = 1e-6  # MiB: one bucket per parameter


class Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.first, self.middle, self.last = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.middle(self.first(x)))


def step(net: nn.Module) -> list[Tensor]:
    net.zero_grad()
    net(torch.full((3, 4), 1.0 + dist.get_rank())).pow(2).sum().backward()
    return [p.grad.clone() for p in net.parameters()]


def listed() -> None:
    """Gives buckets their own sizes, which override `bucket_cap_mb`."""
    caps = [1e-6, 80 / (1 << 20), 1e-6]
    net = DistributedDataParallel(Layers(), bucket_cap_mb=25, bucket_cap_mb_list=caps)
    wanted = step(DistributedDataParallel(Layers()))
    assert [bucket.flat.nbytes for bucket in net.averager.buckets] == [8, 112, 16, 64]
    for _ in range(2):
        assert all(torch.equal(a, b) for a, b in zip(step(net), wanted, strict=True))
    filled = [(len(bucket.members), bucket.flat.nbytes >= 80) for bucket in net.averager.buckets]
    assert filled[0] == (1, False)
    assert filled[1][1]
    assert [members for members, _ in filled[2:]] == [1] * len(filled[2:])
    assert net.bucket_bytes_cap_list == [int(cap * (1 << 20)) for cap in caps]
    assert step(copy.deepcopy(net))
    for none in (None, [], ()):
        usual = DistributedDataParallel(Layers(), bucket_cap_mb=TINY, bucket_cap_mb_list=none)
        assert usual.bucket_bytes_cap_list == []
        assert len(usual.averager.buckets) == 6
    for wrong in ([1, -1], [1, "2"], [True], [float("nan")]):
        with pytest.raises(ValueError, match="must hold numbers of MiB"):
            DistributedDataParallel(Layers(), bucket_cap_mb_list=wrong)


def test_each_bucket_may_have_its_own_size(pool: Pool) -> None:
    pool.run(2, listed)
