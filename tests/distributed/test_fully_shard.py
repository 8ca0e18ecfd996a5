"""Tests PyTorch's `fully_shard` over `groups.mesh["dp"]`, around and inside the parts of the
library."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

import parallel3d as p3d
from tests.distributed.pool import Pool
from tests.distributed.test_grad_norm import batch, loss_of, mine, net

pytestmark = pytest.mark.nightly

TOLERANCE = 1e-11
STEPS = 2


def one_process(rate: float = 0.1) -> dict[str, Tensor]:
    whole = net()
    optimizer = torch.optim.AdamW(whole.parameters(), lr=rate)
    inputs, targets = batch()
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss_of(whole(inputs), targets).backward()
        nn.utils.clip_grad_norm_(whole.parameters(), 0.5)
        optimizer.step()
    return whole.state_dict()


def off(ours: dict[str, Tensor]) -> float:
    """Returns the largest difference of a weight from one process's; 0 without weights."""
    if dist.get_rank() > 0:
        return 0.0
    theirs = one_process()
    assert list(ours) == list(theirs)
    return max(float((ours[name] - theirs[name]).abs().max()) for name in theirs)


def trained(module: nn.Module, step: Any) -> float:
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.1)
    for _ in range(STEPS):
        optimizer.zero_grad()
        step()
        p3d.clip_grad_norm_(module.parameters(), 0.5)
        optimizer.step()
    return off(p3d.full_state_dict(module))


def tensor_parallel(sizes: dict[str, int], frees: bool) -> float:
    """Shards each block, and the rest, as a unit of its own."""
    groups = p3d.init(**sizes)
    module = net(groups.tp)
    for part in (module[1], module[2], module):
        fully_shard(part, mesh=groups.mesh["dp"], reshard_after_forward=frees)
    inputs, targets = mine(groups.dp)
    worst = trained(module, lambda: loss_of(module(inputs), targets).backward())
    p3d.check_replicated(module, groups.tp)
    return worst


def each_layout(layouts: list[dict[str, Any]]) -> list[float]:
    """Frees memory after the forward in every second case."""
    return [tensor_parallel(sizes, at % 2 == 0) for at, sizes in enumerate(layouts)]


@pytest.mark.parametrize(
    ("world", "layouts"),
    [(2, [{}, {"tp": 2}]), (4, [{"tp": 2, "order": "dp-tp-cp-pp"}, {"tp": 2}])],
)
def test_tensor_parallel_layers_are_sharded_over_dp_too(
    world: int, layouts: list[dict[str, Any]], pool: Pool
) -> None:
    assert max(map(max, pool.run(world, each_layout, layouts))) <= TOLERANCE


def pipelined(sizes: dict[str, int], options: dict[str, Any], after: bool) -> float:
    """Shards each module as a unit of its own, before or after the pipeline takes its stages."""
    groups = p3d.init(**sizes)
    modules = net(groups.tp)
    if not after:
        for part in modules:
            fully_shard(part, mesh=groups.mesh["dp"])
    pipe = p3d.Pipeline(modules, groups.pp, loss_fn=loss_of, **options)
    if after:
        for part in pipe.children():
            fully_shard(part, mesh=groups.mesh["dp"])
    return trained(pipe, lambda: pipe.step(*mine(groups.dp)))


def each_schedule() -> dict[str, float]:
    """Shards before and after, in turn."""
    schedules = ("zb_h1", "1f1b", "interleaved", "zbv")
    return {
        name: pipelined(
            {"pp": 2, "dp": 2}, {"schedule": name, "num_microbatches": 4}, after=bool(at % 2)
        )
        for at, name in enumerate(schedules)
    }


def test_stages_of_a_pipeline_are_sharded_over_dp(pool: Pool) -> None:
    for found in pool.run(4, each_schedule):
        assert max(found.values()) <= TOLERANCE, found


def test_fully_shard_with_tp_pp_and_dp_together(pool: Pool) -> None:
    sizes, options = {"tp": 2, "pp": 2, "dp": 2}, {"num_microbatches": 4}
    assert max(pool.run(8, pipelined, sizes, options, False)) <= TOLERANCE


def refusals() -> list[str]:
    groups = p3d.init(dp=2)
    modules = net(groups.tp)
    for part in modules:
        fully_shard(part, mesh=groups.mesh["dp"])
    said = []
    for call in (
        lambda: p3d.Pipeline(modules, p3d.ProcessGroups.single().pp, dp=groups.dp),
        lambda: p3d.DistributedDataParallel(modules, process_group=groups.dp),
    ):
        try:
            call()
        except Exception as error:
            said.append(f"{type(error).__name__}: {error}")
    return said


def test_averaging_gradients_twice_is_refused(pool: Pool) -> None:
    first, second = pool.run(2, refusals)
    assert first == second
    pipeline, ddp = first
    assert pipeline.startswith(
        "Parallel3dError: Pipeline(dp=…) must be without modules under fully_shard"
    )
    assert ddp.startswith("ValueError: parameter 0.weight is a DTensor, made by fully_shard")
