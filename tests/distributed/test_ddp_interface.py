"""Tests DistributedDataParallel's interface: hooks, buffers, names, and its refusals on every
rank."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref
from collections.abc import Callable
from itertools import pairwise

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.func import functional_call
from torch.utils.checkpoint import checkpoint

import parallel3d as p3d
from parallel3d import DistributedDataParallel
from parallel3d.comm.group import GroupLike, group_of
from parallel3d.comm.process_groups import ProcessGroups
from parallel3d.data_parallel.reducer import GradBucket, all_reduce
from tests.distributed.ddp_cases import Case, Mixed, batch_of, loss_of
from tests.distributed.pool import Pool

pytestmark = pytest.mark.nightly

Future = torch.futures.Future
TINY = 1e-3


def net_of(*sizes: int) -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(*(nn.Linear(a, b) for a, b in pairwise(sizes)))


def grads_of(net: nn.Module, seed: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    net.zero_grad()
    net(torch.randn(3, 4, generator=generator)).square().mean().backward()
    return [p.grad.clone() for p in net.parameters()]


def mean_of_ranks(world: int, *sizes: int) -> list[Tensor]:
    everyone = [grads_of(net_of(*sizes), rank) for rank in range(world)]
    return [sum(of_rank) / world for of_rank in zip(*everyone, strict=True)]


def off(ours: list[Tensor], theirs: list[Tensor]) -> float:
    return max((a - b).abs().max().item() for a, b in zip(ours, theirs, strict=True))


def own_hook(seen: list, bucket: GradBucket) -> Future:
    """Doubles the mean, in a buffer of its own."""
    sizes = [g.shape for g in bucket.gradients()]
    assert sizes == [p.shape for p in bucket.parameters()]
    assert sum(g.numel() for g in bucket.gradients()) == bucket.buffer().numel()
    seen.append((bucket.index(), bucket.is_last()))
    bucket.set_buffer(bucket.buffer() * 2 / dist.get_world_size())
    work = dist.all_reduce(bucket.buffer(), async_op=True)
    return work.get_future().then(lambda done: done.value()[0])


def hooked() -> dict[str, object]:
    rank, world = dist.get_rank(), dist.get_world_size()
    sizes = (4, 20, 20, 3)
    true = mean_of_ranks(world, *sizes)
    found: dict[str, object] = {}
    seen: list[tuple[int, bool]] = []
    lossless = powerSGD_hook.PowerSGDState(None, 20, start_powerSGD_iter=2, min_compression_rate=0)
    hooks = {
        "own": (seen, own_hook),
        "allreduce": (None, default_hooks.allreduce_hook),
        "fp16": (None, default_hooks.fp16_compress_hook),
        "powersgd": (lossless, powerSGD_hook.powerSGD_hook),
        # The trainer's hook, which works in place and returns no future.
        "sum": (group_of(None), all_reduce),
    }
    for name, (state, hook) in hooks.items():
        for views in (False, True):
            net = DistributedDataParallel(
                net_of(*sizes), bucket_cap_mb=TINY, gradient_as_bucket_view=views
            )
            net.register_comm_hook(state, hook)
            grads_of(net, rank)
            assert len(net._mean.buckets) > 1
            seen.clear()
            ours = grads_of(net, rank)
            factor = {"own": 2, "sum": world}.get(name, 1)
            found[f"{name} {views}"] = off(ours, [factor * t for t in true])
            if name == "own":
                found["calls"] = list(seen)
    return found


def test_hooks_of_the_user_and_of_pytorch(pool: Pool) -> None:
    for found in pool.run(2, hooked, timeout_s=40):
        calls = found.pop("calls")
        last = len(calls) - 1
        assert calls == [(i, i == last) for i in range(len(calls))]
        rounded = [found.pop(f"fp16 {views}") for views in (False, True)]
        assert 0 < max(rounded) < 1e-3
        assert max(found.values()) < 1e-6, found


class Normed(nn.Module):
    """Has a BatchNorm, and buffers that a forward replaces."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(4)
        self.head = nn.Linear(4, 2)
        self.register_buffer("calls", torch.tensor(0))
        self.register_buffer("last", torch.zeros(4), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        self.calls = self.calls + 1
        self.last = x.detach().mean(0)
        return self.head(self.norm(x))


def buffers(own_group: bool) -> dict[str, object]:
    rank = dist.get_rank()
    generator = torch.Generator().manual_seed(rank)
    module = Normed()
    if rank > 0:
        module.norm.running_mean += 5
    group = dist.new_group([0, 1]) if own_group else None
    net = DistributedDataParallel(module, process_group=group)
    for _ in range(3):
        # With two graphs at once, the tensors that the first one saved must not have changed.
        losses = [net(torch.randn(6, 4, generator=generator)).sum() for _ in range(2)]
        sum(losses).backward()
    before = module.last.tolist()
    with torch.no_grad():
        net.eval()
        net(torch.zeros(2, 4))  # this forward takes the first rank's buffers
        mean, calls = module.norm.running_mean.tolist(), module.calls.item()
        if rank == 0:  # the later ones do not
            net(torch.zeros(2, 4))
    return {"mean": mean, "calls": calls, "before": before}


def each_buffers() -> list[dict[str, object]]:
    return [buffers(own_group) for own_group in (False, True)]


def test_buffers_are_broadcast_from_the_first_rank(pool: Pool) -> None:
    for first, second in zip(*pool.run(2, each_buffers), strict=True):
        assert first["before"] != second["before"]
        assert (first["mean"], first["calls"]) == (second["mean"], second["calls"])
        assert first["calls"] == 7


def names() -> None:
    """Wraps a module as scripts do: alone, in a list, loaded by PyTorch, inside a larger module."""
    module = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3))
    wanted = list(module.state_dict())
    net = DistributedDataParallel(module)
    assert list(net.state_dict()) == wanted
    assert [n for n, _ in net.named_parameters()] == [n for n, _ in module.named_parameters()]
    assert [n for n, _ in net.named_buffers()] == [n for n, _ in module.named_buffers()]
    saved = {name: torch.full_like(value, 2) for name, value in net.state_dict().items()}
    net.load_state_dict(saved)
    theirs = {f"module.{name}": torch.full_like(v, 3) for name, v in saved.items()}
    assert module[0].weight.eq(2).all()
    net.load_state_dict(theirs)
    assert module[0].weight.eq(3).all()
    whole = nn.ModuleDict({"body": net, "head": nn.Linear(3, 1)})
    assert "body.0.weight" in whole.state_dict()
    assert "body.0.weight" in dict(whole.named_parameters())
    whole.load_state_dict({n: torch.full_like(v, 4) for n, v in whole.state_dict().items()})
    assert module[0].weight.eq(4).all()
    net.eval()
    assert not module[1].training
    assert net.module[1].num_features == 3
    module.answer = 42
    assert net.answer == 42
    for name in ("mean", "names", "frozen", "enabled"):  # the wrapper hides none of them
        setattr(module, name, 43)
        assert getattr(net, name) == 43
    assert "absent" in refused(lambda: net.absent, AttributeError)
    net.double()
    assert module[0].weight.dtype == torch.float64


def test_names_are_those_of_the_module(pool: Pool) -> None:
    pool.run(2, names)


def mixed() -> dict[str, float]:
    """Two dtypes of parameters train as close to one process as the narrower dtype allows."""
    torch.set_default_dtype(torch.float64)
    case = Case(Mixed)
    net = DistributedDataParallel(case.made(), bucket_cap_mb=TINY)
    reference = case.made()
    for rank in range(2):
        (loss_of(reference, batch_of(rank, 0)) / 2).backward()
    loss_of(net, batch_of(dist.get_rank(), 0)).backward()
    torch.set_default_dtype(torch.float32)
    types = [bucket.dtype for bucket in net._mean.buckets]
    assert set(types) == {torch.float32, torch.float64}
    return {
        n: (p.grad - q.grad).abs().max().item() / torch.finfo(p.dtype).eps
        for (n, p), q in zip(net.named_parameters(), reference.parameters(), strict=True)
    }


def test_parameters_of_mixed_types(pool: Pool) -> None:
    for found in pool.run(2, mixed):
        assert max(found.values()) < 1e3, found


def refused(call: Callable[[], object], kind: type[Exception]) -> str:
    try:
        call()
    except kind as error:
        assert type(error) is kind
        return str(error)
    raise AssertionError(f"no {kind.__name__}")


class Deeper(nn.Module):
    """Has a layer whose backward runs several times inside the backward."""

    def __init__(self, times: int) -> None:
        super().__init__()
        self.first, self.layer, self.times = nn.Linear(4, 4), nn.Linear(4, 4), times

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for _ in range(self.times):
            x = checkpoint(self.layer, x, use_reentrant=True)
        return x


def wrong_shape(state: int, bucket: GradBucket) -> Future:
    future: Future = Future()
    own = bucket.index() == state
    future.set_result(bucket.buffer()[:-1] if own else bucket.buffer())
    return future


def bad_inputs() -> dict[str, str]:
    rank = dist.get_rank()

    def wrapped(*modules: nn.Module, kind: type = ValueError, **options: object) -> str:
        module = modules[min(rank, len(modules) - 1)]
        return refused(lambda: DistributedDataParallel(module, **options), kind)

    def backward(net: nn.Module) -> str:
        return refused(lambda: net(torch.ones(2, 4)).sum().backward(), RuntimeError)

    frozen = net_of(4, 3).requires_grad_(False)
    other = nn.Sequential(nn.Linear(4, 5), nn.Linear(5, 3))
    named = nn.Sequential()
    named.add_module("0", nn.Linear(4, 5))
    named.add_module("top", nn.Linear(5, 3))
    found = {
        "none": wrapped(nn.ReLU(), kind=RuntimeError),
        "frozen": wrapped(frozen, kind=RuntimeError),
        "none on one": wrapped(net_of(4, 3), nn.ReLU()),
        "shape": wrapped(net_of(4, 5, 3), net_of(4, 6, 3)),
        "name": wrapped(other, named),
        "longer": wrapped(net_of(4, 5, 3), net_of(4, 5)),
        "type": wrapped(net_of(4, 3), net_of(4, 3).double()),
        "trained": wrapped(net_of(4, 3), frozen),
        "buffer": wrapped(nn.BatchNorm1d(3), nn.BatchNorm1d(3, track_running_stats=False)),
        "lazy": wrapped(nn.Sequential(nn.LazyLinear(3), nn.Linear(3, 1))),
        "sparse": wrapped(nn.Embedding(5, 3, sparse=True)),
        "device": wrapped(net_of(4, 3), device_ids=[1]),
        "group": refused(lambda: DistributedDataParallel(net_of(4, 3), "dp"), TypeError),
    }
    twice = Deeper(2)
    found["second gradient"] = backward(DistributedDataParallel(twice))
    net = DistributedDataParallel(net_of(4, 20, 20, 3), bucket_cap_mb=TINY)
    net.register_comm_hook(1, wrong_shape)
    found["hook"] = backward(net)
    found["second hook"] = refused(lambda: net.register_comm_hook(1, wrong_shape), RuntimeError)
    found["no hook"] = refused(lambda: net.register_comm_hook(1, "hook"), TypeError)
    late = DistributedDataParallel(net_of(4, 3))
    found["copy"] = refused(lambda: copy.deepcopy(late), TypeError)
    found["pickle"] = refused(lambda: pickle.dumps(late), TypeError)
    found["join"] = refused(lambda: late.join(), AttributeError)
    found["assign"] = refused(lambda: late.load_state_dict({}, assign=True), ValueError)
    partly = net_of(4, 4, 3)
    partly[0].requires_grad_(False)
    thawed = DistributedDataParallel(partly)
    partly.requires_grad_(True)
    found["thawed"] = refused(lambda: thawed(torch.ones(2, 4)), RuntimeError)
    given = {"module.0.weight": torch.zeros(3, 4, requires_grad=True)}
    functional_call(late, given, torch.ones(2, 4))  # only for this forward
    # All of these groups and memories still work.
    assert off(grads_of(late, rank), mean_of_ranks(2, 4, 3)) < 1e-6
    return found


SENTENCES = {
    "none": "no parameter that requires a gradient",
    "frozen": "no parameter that requires a gradient",
    "none on one": (
        "the ranks' modules differ: rank 0 has parameter 0.weight (shape [3, 4], strides [4, 1], "
        "torch.float32, requires_grad=True), rank 1 has nothing more"
    ),
    "shape": "torch.float32, requires_grad=True), rank 1 has parameter 0.weight (shape [6, 4], ",
    "name": ", rank 1 has parameter top.weight (",
    "longer": "rank 0 has parameter 1.weight (shape [3, 5], ",
    "type": "rank 1 has parameter 0.weight (shape [3, 4], strides [4, 1], torch.float64, ",
    "trained": "strides [4, 1], torch.float32, requires_grad=False)",
    "buffer": "rank 0 has buffer running_mean (",
    "lazy": "parameter 0.weight has no shape yet",
    "sparse": "sparse=False",
    "device": "device_ids=[1] must name the one device of the module, cpu",
    "group": "it is a str",
    "second gradient": "got a second gradient in one backward",
    "hook": "the communication hook returned (",
    "second hook": "already registered",
    "no hook": "must be callable; it is a str",
    "copy": "copy its .module",
    "pickle": "save its state_dict()",
    "join": "give every rank the same number of batches",
    "assign": "load the weights before wrapping",
    "thawed": "0.weight was frozen when the module was wrapped",
}


def test_every_rank_raises_the_same_error(pool: Pool) -> None:
    first, second = pool.run(2, bad_inputs, timeout_s=30)
    assert first == second
    assert first.keys() == SENTENCES.keys()
    for name, sentence in SENTENCES.items():
        assert sentence in first[name], (name, first[name])
        assert "\n" not in first[name]


def failed_in_the_middle(group: GroupLike) -> float:
    """All ranks catch an error that comes after the first bucket was sent."""
    rank, sizes = dist.get_rank(), (4, 20, 20, 3)
    net = DistributedDataParallel(net_of(*sizes), process_group=group, bucket_cap_mb=TINY)
    handle = net.module[0].weight.register_hook(lambda g: 1 / 0)
    refused(net(torch.ones(2, 4)).sum().backward, ZeroDivisionError)
    assert net._mean.works
    handle.remove()
    return off(grads_of(net, rank), mean_of_ranks(2, *sizes))


def ends() -> dict[str, object]:
    """Tests further things that a script does: it catches its own error, and drops the module."""
    rank = dist.get_rank()
    found: dict[str, object] = {}
    net = DistributedDataParallel(net_of(4, 3))
    handles = [p.register_hook(lambda g: 1 / 0) for p in net.parameters()]
    loss = net(torch.ones(2, 4)).sum()
    found["own"] = refused(loss.backward, ZeroDivisionError)
    for handle in handles:
        handle.remove()
    found["after"] = off(grads_of(net, rank), mean_of_ranks(2, 4, 3))
    found["in the middle"] = max(map(failed_in_the_middle, (None, p3d.init().dp)))
    gone = weakref.ref(net._mean)
    del net, handles, loss
    gc.collect()
    found["dropped"] = gone() is None
    return found


def test_a_script_may_fail_and_drop_its_module(pool: Pool) -> None:
    for found in pool.run(2, ends, timeout_s=30):
        assert found["after"] < 1e-6
        assert found["in the middle"] < 1e-6
        assert found["dropped"]


def alone() -> float:
    """Tests a group of one, with and without a hook."""
    found = []
    for hook in (None, default_hooks.allreduce_hook):
        net = DistributedDataParallel(net_of(4, 3), process_group=ProcessGroups.single().dp)
        if hook is not None:
            net.register_comm_hook(None, hook)
        found.append(off(grads_of(net, dist.get_rank()), mean_of_ranks(1, 4, 3)))
    return max(found)


def test_a_group_of_one_changes_nothing(pool: Pool) -> None:
    assert pool.run(1, alone) == [0]
