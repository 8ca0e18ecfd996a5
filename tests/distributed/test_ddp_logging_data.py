"""What `_get_ddp_logging_data` tells is what the class did, and what PyTorch's class tells."""

from __future__ import annotations

import copy
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

from parallel3d import DistributedDataParallel
from parallel3d.comm.process_groups import ProcessGroups
from tests.distributed.pool import Pool

TINY = 1e-6  # MiB: a bucket for each parameter
DELAY_S = 0.1
MILLISECOND = 1_000_000  # ns
OTHERWISE = {  # why a key of PyTorch's has another value here
    "bucket_cap_bytes",  # 1 MiB in shared memory
    "can_set_static_graph",  # PyTorch's tells it when it is deleted
}


class Delay(torch.autograd.Function):
    """Sleeps in the backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, seconds: float) -> Tensor:
        ctx.seconds = seconds
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        time.sleep(ctx.seconds)
        return grad, None


class Net(nn.Module):
    """Three layers, of which one may be left out."""

    def __init__(self, forward_s: float = 0, backward_s: float = 0) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.first, self.middle, self.last = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 2)
        self.skip, self.forward_s, self.backward_s = False, forward_s, backward_s

    def forward(self, x: Tensor) -> Tensor:
        time.sleep(self.forward_s)
        x = self.first(x)
        if not self.skip:
            x = self.middle(x)
        return self.last(Delay.apply(x, self.backward_s) if self.backward_s else x)


def step(net: nn.Module) -> list[Tensor]:
    net.zero_grad()
    net(torch.full((3, 4), 1.0 + dist.get_rank())).pow(2).sum().backward()
    return [p.grad.clone() for p in net.parameters() if p.grad is not None]


@contextmanager
def environment(**variables: str) -> Iterator[None]:
    before = dict(os.environ)
    os.environ.update(variables)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def mixed() -> nn.Module:
    module = nn.Sequential(
        nn.Linear(4, 5), nn.Linear(5, 3).double(), nn.Linear(5, 3).half(), nn.BatchNorm1d(3)
    )
    module.register_parameter("top", nn.Parameter(torch.zeros(3, dtype=torch.bfloat16)))
    module[0].bias.requires_grad_(False)
    return module


def of_both() -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """What both classes tell, ours first: of arguments, of three steps."""
    found = []
    with environment(MASTER_PORT="1234", GLOO_SOCKET_IFNAME="lo"):
        for static in (False, True):
            classes = (DistributedDataParallel, nn.parallel.DistributedDataParallel)
            options = {"static_graph": static, "forward_sync_buffers": static}
            ours, theirs = (kind(mixed(), **options) for kind in classes)
            found.append((ours._get_ddp_logging_data(), theirs._get_ddp_logging_data()))
            nets = [kind(Net(), gradient_as_bucket_view=static) for kind in classes]
            nets[0].register_comm_hook(None, default_hooks.allreduce_hook)
            nets[1].register_comm_hook(None, default_hooks.allreduce_hook)
            for net in nets:
                for _ in range(3):
                    step(net)
            found.append(tuple(net._get_ddp_logging_data() for net in nets))
    return found


def is_time(key: str) -> bool:
    return "_time" in key


def test_it_is_what_pytorchs_class_tells(pool: Pool) -> None:
    for rank, pairs in enumerate(pool.run(2, of_both)):
        for ours, theirs in pairs:
            assert ours["rank"] == rank
            assert ours["master_port"] == "1234"
            assert ours.keys() - OTHERWISE == theirs.keys() - OTHERWISE
            for key in ours.keys() - OTHERWISE:
                assert ours[key] == theirs[key] or is_time(key), key
        assert any(is_time(key) for key in pairs[1][0])
        assert pairs[1][0]["iteration"] == 2


def buckets() -> None:
    """Of several buckets, and layers that are left out."""
    net = DistributedDataParallel(Net(), bucket_cap_mb=TINY)
    data = net._get_ddp_logging_data()
    assert data["bucket_cap_bytes"] == int(TINY * (1 << 20))
    assert data["bucket_sizes"] == "8, 32, 16, 64, 16, 64"
    for key in (
        "has_rebuilt_buckets",
        "rebuilt_bucket_sizes",
        "num_buckets_reduced",
        "avg_forward_compute_time",
    ):
        assert key not in data
    step(net)
    data = net._get_ddp_logging_data()
    order = net.reducer.order
    sizes = [net.reducer.parameters[n].nbytes for n in order]
    assert data["has_rebuilt_buckets"] == 1
    assert data["num_buckets_reduced"] == 6
    assert data["rebuilt_bucket_sizes"] == ", ".join(map(str, sizes))
    assert data["rebuilt_per_bucket_param_indices"] == ", ".join(map(str, order))
    assert data["unused_parameter_size"] == 0
    assert net.reducer._ddp_graph_static()
    with net.no_sync():
        step(net)
    assert net._get_ddp_logging_data()["iteration"] == 0
    net.module.skip = True
    step(net)
    data = net._get_ddp_logging_data()
    assert data["iteration"] == 1
    assert data["unused_parameter_size"] == 64 + 16
    indices = data["prev_iteration_grad_ready_order_indices"].split(", ")
    assert sorted(indices) == ["0", "1", "4", "5"]
    assert not data["can_set_static_graph"]
    assert not net.reducer._ddp_graph_static()
    finding = DistributedDataParallel(net.module, find_unused_parameters=True)
    for _ in range(3):
        step(finding)
    data = finding._get_ddp_logging_data()
    assert "has_rebuilt_buckets" not in data
    assert data["can_set_static_graph"]
    twin = copy.deepcopy(net)
    assert "bucket_sizes" not in twin._get_ddp_logging_data()
    assert twin._get_ddp_logging_data()["iteration"] == 0
    joined = DistributedDataParallel(Net())
    assert "join_uneven_inputs" not in joined._get_ddp_logging_data()
    with joined.join():
        for _ in range(1 + dist.get_rank()):
            step(joined)
    data = joined._get_ddp_logging_data()
    assert data["join_uneven_inputs"] == 1
    assert data["num_buckets_reduced"] == 1
    synced = nn.SyncBatchNorm.convert_sync_batchnorm(nn.Sequential(nn.BatchNorm1d(3)))
    assert DistributedDataParallel(synced)._get_ddp_logging_data()["has_sync_bn"] == 1
    placed = DistributedDataParallel(Net(), [torch.device("cpu")])
    assert placed._get_ddp_logging_data()["device_ids"] == ""


def test_buckets_and_steps_are_the_true_ones(pool: Pool) -> None:
    pool.run(2, buckets)


def after_the_other(store: dist.Store, bucket: dist.GradBucket) -> torch.futures.Future:
    """All-reduces, and lets the backward of the other rank go on."""
    store.set(f"left {dist.get_rank()}", "")
    return default_hooks.allreduce_hook(None, bucket)


def times() -> dict[str, int]:
    """Of a step whose forward and backward are long, and in which the first rank must wait."""
    late = dist.get_rank() == 1
    store = dist.distributed_c10d._get_default_store()
    net = DistributedDataParallel(Net(DELAY_S, DELAY_S if late else 0))
    net.register_comm_hook(store, after_the_other)
    loss = net(torch.ones(3, 4)).sum()
    if late:
        loss.register_hook(lambda _: store.wait(["left 0"]))
    loss.backward()
    return net._get_ddp_logging_data()


def test_times_are_measured(pool: Pool) -> None:
    began = time.time_ns()
    first, second = pool.run(2, times)
    ended = time.time_ns()
    delay = int(DELAY_S * 1e9)
    for data in (first, second):
        for key in ("forward_compute_time", "avg_forward_compute_time"):
            assert delay <= data[key] < ended - began
        marks = [
            data[f"{name}_time_{which}"]
            for name, which in (
                ("forward_compute", "start"),
                ("backward_compute", "start"),
                ("backward_compute", "end"),
                ("backward_comm", "start"),
                ("backward_comm", "end"),
            )
        ]
        assert began - MILLISECOND < marks[0]
        assert marks[-1] < ended + MILLISECOND
        assert marks == sorted(marks)  # of one bucket, which leaves at the end
        assert marks[1] - marks[0] == data["forward_compute_time"]
        assert marks[2] - marks[1] == data["backward_compute_time"]
        assert marks[4] - marks[3] == data["backward_comm_time"]
        assert data["backward_compute_comm_overlap_time"] == 0
    assert second["backward_compute_time"] >= delay
    assert first["backward_comm_time"] >= delay  # it waits for the second rank


def overlapped() -> dict[str, int]:
    net = DistributedDataParallel(Net(0, DELAY_S), bucket_cap_mb=TINY)
    step(net)
    return net._get_ddp_logging_data()


def test_overlap_is_the_backward_beside_the_first_bucket(pool: Pool) -> None:
    delay = int(DELAY_S * 1e9)
    for data in pool.run(2, overlapped):
        overlap = data["backward_compute_comm_overlap_time"]
        assert delay <= overlap <= data["backward_compute_time"]
        assert overlap <= data["backward_comm_time"]


def no_future(_: None, bucket: dist.GradBucket) -> Tensor:
    return bucket.buffer()


def errors() -> dict[str, str]:
    """What is told after each error, by what raised it."""
    found = {}

    def noted(name: str, net: DistributedDataParallel) -> None:
        data = net._get_ddp_logging_data()
        assert data["has_error"] == 1
        found[name] = data["error"]

    net = DistributedDataParallel(Net())
    assert "has_error" not in net._get_ddp_logging_data()
    with pytest.raises(TypeError):
        net.register_comm_hook(None, "hook")
    noted("hook", net)
    step(net)
    with pytest.raises(RuntimeError):
        net._set_static_graph()
    noted("static", net)
    with pytest.raises(ValueError, match="ALLREDUCE"):
        net._register_builtin_comm_hook("sum")
    noted("builtin", net)
    static = DistributedDataParallel(Net(), static_graph=True)
    step(static)
    static.module.skip = dist.get_rank() == 1
    with pytest.raises(RuntimeError):
        step(static)
    noted("backward", static)
    hooked = DistributedDataParallel(Net())
    hooked.register_comm_hook(None, no_future)
    assert hooked._get_ddp_logging_data()["comm_hook"] == "no_future"
    with pytest.raises(TypeError):
        step(hooked)
    noted("future", hooked)
    partly = Net()
    partly.first.requires_grad_(False)
    thawed = DistributedDataParallel(partly)
    partly.requires_grad_(True)
    with pytest.raises(RuntimeError):
        step(thawed)
    noted("forward", thawed)
    return found


def test_errors_are_noted(pool: Pool) -> None:
    for found in pool.run(2, errors):
        assert found["hook"].startswith("TypeError: the communication hook must be callable")
        assert found["static"].startswith("RuntimeError: _set_static_graph should be called before")
        assert found["builtin"].startswith("ValueError: comm_hook_type='sum' must be one of")
        assert found["backward"].startswith("RuntimeError: rank 1: static_graph=True")
        assert found["future"].startswith("TypeError: the communication hook must return")
        assert found["forward"].startswith("RuntimeError: first.weight was frozen")


def builtin_hooks() -> None:
    """Their means are those of PyTorch's."""
    kinds = dist.BuiltinCommHookType
    for kind in (kinds.ALLREDUCE, kinds.FP16_COMPRESS):
        nets = [
            DistributedDataParallel(Net(), dist.new_group([0, 1])),
            nn.parallel.DistributedDataParallel(Net()),
        ]
        for net in nets:
            net._register_builtin_comm_hook(kind)
            assert net._get_ddp_logging_data()["comm_hook"] == str(kind)
        single = DistributedDataParallel(Net(), ProcessGroups.single().dp)
        single._register_builtin_comm_hook(kind)
        assert all(torch.equal(a, b) for a, b in zip(step(single), step(Net()), strict=True))
        plain = step(DistributedDataParallel(Net()))
        ours, theirs = (step(net) for net in nets)
        assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))
        exact = all(torch.equal(a, b) for a, b in zip(ours, plain, strict=True))
        assert exact == (kind == kinds.ALLREDUCE)


def test_builtin_hooks_are_pytorchs(pool: Pool) -> None:
    pool.run(2, builtin_hooks)


def listed() -> None:
    """Buckets of sizes of their own, which go before `bucket_cap_mb`."""
    caps = [1e-6, 80 / (1 << 20), 1e-6]
    net = DistributedDataParallel(Net(), bucket_cap_mb=25, bucket_cap_mb_list=caps)
    wanted = step(DistributedDataParallel(Net()))
    assert [bucket.flat.nbytes for bucket in net.reducer.buckets] == [8, 112, 16, 64]
    for _ in range(2):
        assert all(torch.equal(a, b) for a, b in zip(step(net), wanted, strict=True))
    filled = [(len(bucket.members), bucket.flat.nbytes >= 80) for bucket in net.reducer.buckets]
    assert filled[0] == (1, False)
    assert filled[1][1]
    assert [members for members, _ in filled[2:]] == [1] * len(filled[2:])
    assert net.bucket_bytes_cap_list == [int(cap * (1 << 20)) for cap in caps]
    assert net._get_ddp_logging_data()["bucket_cap_bytes"] == 80
    assert step(copy.deepcopy(net))
    for none in (None, [], ()):
        usual = DistributedDataParallel(Net(), bucket_cap_mb=TINY, bucket_cap_mb_list=none)
        assert usual.bucket_bytes_cap_list == []
        assert len(usual.reducer.buckets) == 6
    for wrong in ([1, -1], [1, "2"], [True], [float("nan")]):
        with pytest.raises(ValueError, match="must hold numbers of MiB"):
            DistributedDataParallel(Net(), bucket_cap_mb_list=wrong)


def test_each_bucket_may_have_a_size_of_its_own(pool: Pool) -> None:
    pool.run(2, listed)


def names() -> None:
    module = Net()
    module.middle.bias.requires_grad_(False)
    module.tied = module.first
    ignored = ["last.bias"]
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(module, ignored)
    ours, theirs = DistributedDataParallel(module), nn.parallel.DistributedDataParallel(module)
    parameters, sparse = ours._build_params_for_reducer()
    wanted, wanted_sparse = theirs._build_params_for_reducer()
    assert [*map(id, parameters)] == [*map(id, wanted)]
    assert sparse == wanted_sparse
    mapping = ours._build_debug_param_to_name_mapping(parameters)
    assert mapping == dict(enumerate(ours.reducer.names))
    assert ours._build_debug_param_to_name_mapping(parameters[::-1])[0] == "last.weight"
    with pytest.raises(ValueError, match=r"Param with name first\.weight"):
        ours._build_debug_param_to_name_mapping(parameters[1:])
    with pytest.raises(ValueError, match="5 are given, 4 are reduced"):
        ours._build_debug_param_to_name_mapping([*parameters, nn.Parameter(torch.ones(1))])


def test_the_parameters_that_are_reduced_have_their_names(pool: Pool) -> None:
    pool.run(2, names)


def alone() -> dict[str, Any]:
    net = DistributedDataParallel(Net())
    step(net)
    return net._get_ddp_logging_data()


def test_a_group_of_one_tells_of_no_buckets(pool: Pool) -> None:
    (data,) = pool.run(1, alone)
    assert (data["world_size"], data["rank"], data["module_name"]) == (1, 0, "Net")
    assert "bucket_sizes" not in data
