"""Tests mesh, gradient norm and checkpoints of the library on the simulated accelerator."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

import parallel3d as p3d
from parallel3d.comm.group import group_of
from tests.distributed.simulated import SimulatedPool, here
from tests.distributed.simulated_runs import waits
from tests.distributed.test_grad_norm import MAX_NORM, batch, loss_of, mine, net, one_process

pytestmark = pytest.mark.nightly


def mesh() -> list[str]:
    """The mesh is collective here, because a dimension of one rank needs a split of the world."""
    groups = p3d.init(tp=2, device="simulated")
    assert groups.mesh.mesh_dim_names == ("pp", "dp", "tp")
    assert groups.mesh["tp"].device_type == here().type
    for name in ("pp", "dp", "tp"):
        assert group_of(groups.mesh[name]) is getattr(groups, name)
    alone = groups.mesh["pp"].get_group()
    assert dist.get_process_group_ranks(alone) == [groups.rank]
    world = dist.group.WORLD._get_backend(here())
    groups.close()
    return [group.description for group in world.ended]


def test_the_mesh_makes_one_more_communicator(simulated: SimulatedPool) -> None:
    assert simulated.run(4, mesh) == [["tp", "dp", "alone"]] * 4


def clipped(layout: dict[str, int]) -> tuple[float, int]:
    """Compares the norm with one process's on a CPU, and counts the waits of the host."""
    norm, _ = one_process(2.0)
    groups = p3d.init(**layout, device="simulated")
    module: nn.Module = net(groups.tp).to(here())
    inputs, targets = (t.to(here()) for t in mine(groups.dp))
    if groups.pp.size > 1:
        pipe = module = p3d.Pipeline(module, groups.pp, loss_fn=loss_of, num_microbatches=2)
        pipe.step(inputs, targets)
    else:
        wrapped = p3d.DistributedDataParallel(module, process_group=groups.dp)
        loss_of(wrapped(inputs), targets).backward()
    found = float(p3d.clip_grad_norm_(module.parameters(), MAX_NORM))
    with waits() as seen:
        p3d.clip_grad_norm_(module.parameters(), MAX_NORM)
    return found / norm - 1, len(seen)


@pytest.mark.parametrize(
    ("layout", "wanted"),
    [({"dp": 2}, 0), ({"tp": 2}, 1), ({"pp": 2}, 1)],
    ids=["dp", "tp", "pp"],
)
def test_the_norm_is_that_of_one_process_and_the_host_waits_once(
    layout: dict[str, int], wanted: int, simulated: SimulatedPool
) -> None:
    for off, count in simulated.run(2, clipped, layout):
        assert abs(off) <= 1e-9
        assert count == wanted


def saved_and_loaded(folder: str) -> None:
    groups = p3d.init(tp=2, device="simulated")
    module = net(groups.tp).to(here())
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.1)
    inputs, targets = (t.to(here()) for t in batch())
    loss_of(module(inputs), targets).backward()
    optimizer.step()
    state = {"model": module, "optimizer": optimizer}
    p3d.save(state, checkpoint_id=folder, step=1)
    wanted = {k: v.cpu() for k, v in module.state_dict().items()}
    moment = optimizer.state[module[1].up.weight]["exp_avg"].cpu()
    other = net(groups.tp).to(here())
    fresh = torch.optim.AdamW(other.parameters(), lr=0.2)
    assert p3d.load({"model": other, "optimizer": fresh}, checkpoint_id=folder) == 1
    assert all(torch.equal(v.cpu(), wanted[k]) for k, v in other.state_dict().items())
    assert torch.equal(fresh.state[other[1].up.weight]["exp_avg"].cpu(), moment)
    assert fresh.param_groups[0]["lr"] == 0.1


def test_a_checkpoint_of_device_memory_is_loaded_again(
    simulated: SimulatedPool, tmp_path: Path
) -> None:
    simulated.run(2, saved_and_loaded, str(tmp_path))
