"""PyTorch's `fully_shard` over `groups.mesh["dp"]`, around and inside the parts of the library."""

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

TOLERANCE = 1e-11
STEPS = 3


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
    """The largest difference of a weight from one process's; 0 where there are none."""
    theirs = one_process()
    if dist.get_rank() > 0:
        return 0.0
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
    """Blocks and the rest as units of their own."""
    groups = p3d.init(**sizes)
    module = net(groups.tp)
    for part in (module[1], module[2], module):
        fully_shard(part, mesh=groups.mesh["dp"], reshard_after_forward=frees)
    inputs, targets = mine(groups.dp)
    worst = trained(module, lambda: loss_of(module(inputs), targets).backward())
    p3d.check_replicated(module, groups.tp)
    return worst


@pytest.mark.parametrize("frees", [True, False])
@pytest.mark.parametrize(
    ("world", "sizes"),
    [
        (2, {}),
        (2, {"tp": 2}),
        (4, {"tp": 2}),
        (8, {"tp": 2}),
        (8, {"tp": 4, "order": "dp-tp-cp-pp"}),
    ],
)
def test_tensor_parallel_layers_are_sharded_over_dp_too(
    world: int, sizes: dict[str, int], frees: bool, pool: Pool
) -> None:
    assert max(pool.run(world, tensor_parallel, sizes, frees)) <= TOLERANCE


def pipelined(sizes: dict[str, int], options: dict[str, Any], after: bool) -> float:
    """Each module a unit of its own, sharded before or after the pipeline takes its own."""
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


@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
@pytest.mark.parametrize(
    "options",
    [
        {"schedule": "gpipe", "num_microbatches": 4},
        {"schedule": "1f1b", "num_microbatches": 4},
        {"schedule": "zb_h1", "num_microbatches": 4},
        {"schedule": "interleaved", "num_microbatches": 4},
        {"schedule": "zbv", "num_microbatches": 4},
    ],
    ids=lambda options: options["schedule"],
)
def test_stages_of_a_pipeline_are_sharded_over_dp(
    options: dict[str, Any], after: bool, pool: Pool
) -> None:
    found = pool.run(4, pipelined, {"pp": 2, "dp": 2}, options, after)
    assert max(found) <= TOLERANCE


def test_all_dimensions_together(pool: Pool) -> None:
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


def test_averaging_what_is_averaged_already_is_refused(pool: Pool) -> None:
    first, second = pool.run(2, refusals)
    assert first == second
    pipeline, ddp = first
    assert pipeline.startswith(
        "UserError: Pipeline(dp=…) must be without modules under fully_shard"
    )
    assert ddp.startswith("ValueError: parameter 0.weight is a DTensor, as fully_shard makes them")
