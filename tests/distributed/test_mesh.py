"""Tests `groups.mesh`, the grid of all ranks as a DeviceMesh, and parts that take one of its
rows."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

import parallel3d as p3d
from parallel3d.comm.group import GroupLike, group_of
from tests.distributed.pool import Pool

pytestmark = pytest.mark.nightly

Part = Callable[[GroupLike], nn.Module]


def number_of_groups() -> int:
    return len(dist.distributed_c10d._world.pg_map)


def grid(sizes: dict[str, int], order: str) -> dict[str, object]:
    """Compares this rank's mesh with its groups."""
    groups = p3d.init(**sizes, order=order)
    before = number_of_groups()
    mesh = groups.mesh
    new = number_of_groups() - before
    for name in ("pp", "dp", "tp"):
        group, row = getattr(groups, name), mesh[name]
        assert row.mesh.tolist() == list(group.ranks)
        assert mesh.get_local_rank(name) == group.index
        assert group_of(row) is group
        if group.size > 1:
            assert row.get_group() is group.handle
        split = distribute_tensor(torch.arange(24.0), row, [Shard(0)])
        assert split.to_local().numel() == 24 / group.size
        assert split.full_tensor().tolist() == list(range(24))
    assert groups.mesh is mesh
    names, shape = mesh.mesh_dim_names, tuple(mesh.shape)
    groups.close()
    return {"names": names, "shape": shape, "new": new, "left": number_of_groups()}


LAYOUTS = {
    "one rank": (1, {}, (1, 1, 1), 0),
    "tp and dp": (4, {"tp": 2}, (1, 2, 2), 1),
    "all": (8, {"tp": 2, "pp": 2}, (2, 2, 2), 0),
}


def grids(sizes: dict[str, int]) -> list[dict[str, object]]:
    return [grid(sizes, order) for order in ("tp-cp-dp-pp", "pp-dp-cp-tp")]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_mesh_is_the_grid_of_the_groups(layout: str, pool: Pool) -> None:
    world, sizes, shape, new = LAYOUTS[layout]
    wanted = {"names": ("pp", "dp", "tp"), "shape": shape, "new": new, "left": 1}
    assert pool.run(world, grids, sizes) == [[wanted] * 2] * world


def one_rank_asks() -> int:
    """With gloo the mesh is not collective, so a single rank may ask for it."""
    groups = p3d.init(tp=2)
    size = groups.mesh.size() if groups.rank == 0 else 0
    dist.barrier()
    return size


def test_a_single_rank_may_ask_for_its_mesh(pool: Pool) -> None:
    assert pool.run(2, one_rank_asks) == [2, 0]


def column(group: GroupLike) -> nn.Module:
    return p3d.ColumnParallelLinear(4, 4, group, gather_output=True)


def row(group: GroupLike) -> nn.Module:
    return nn.Sequential(p3d.ColumnParallelLinear(4, 4, group), p3d.RowParallelLinear(4, 4, group))


def column_of_linear(group: GroupLike) -> nn.Module:
    return p3d.ColumnParallelLinear.from_linear(nn.Linear(4, 4), group, gather_output=True)


def summed(group: GroupLike) -> nn.Module:
    layer = nn.Linear(4, 4)
    p3d.sum_gradients_over(layer, group)
    p3d.check_replicated(layer, group)
    return layer


def replicated(group: GroupLike) -> nn.Module:
    return p3d.DistributedDataParallel(nn.Linear(4, 4), process_group=group)


def pipelined(group: GroupLike) -> nn.Module:
    return p3d.Pipeline([nn.Linear(4, 4), nn.Linear(4, 4)], group, num_microbatches=2)


def averaged(group: GroupLike) -> nn.Module:
    return p3d.Pipeline([nn.Linear(4, 4)], p3d.ProcessGroups.single().pp, dp=group)


PARTS: tuple[Part, ...] = (
    column,
    row,
    column_of_linear,
    summed,
    replicated,
    pipelined,
    averaged,
)


def outputs(part: Part, group: GroupLike) -> list[Tensor]:
    """Returns outputs and gradients of a part over the group."""
    torch.manual_seed(1)
    module, x = part(group), torch.arange(32.0).view(8, 4) / 32 + dist.get_rank()
    if isinstance(module, p3d.Pipeline):
        module.loss_fn = F.mse_loss
        found = [module.step(x, x)]
    else:
        found = [module(x)]
        found[0].square().sum().backward()
    norm = p3d.clip_grad_norm_(module.parameters(), 1e9)
    return [*found, norm, *(p.grad for p in module.parameters())]


def every_kind_of_group() -> None:
    groups = p3d.init(dp=2)
    foreign = init_device_mesh("cpu", (2,), mesh_dim_names=("workers",))
    square = init_device_mesh("cpu", (1, 2), mesh_dim_names=("a", "b"))
    kinds = (groups.mesh["dp"], groups.dp.handle, foreign, foreign["workers"], square["b"], None)
    for part in PARTS:
        wanted = outputs(part, groups.dp)
        for kind in kinds:
            for a, b in zip(outputs(part, kind), wanted, strict=True):
                torch.testing.assert_close(a, b)
    net = p3d.DistributedDataParallel(nn.Linear(2, 2), process_group=groups.mesh["dp"])
    assert net.group.shared is not None  # our group, with its shared memory
    try:
        group_of(square)
    except p3d.Parallel3dError as error:
        assert "must be a mesh of one dimension; select one of them, such as mesh['b']" in str(
            error
        )
    else:
        raise AssertionError("a square mesh was taken")


def test_every_part_accepts_a_mesh_a_process_group_or_our_group(pool: Pool) -> None:
    pool.run(2, every_kind_of_group)


def with_fsdp(world: int) -> None:
    """Applies `fully_shard` over a dimension of one rank, and over two dimensions at once."""
    groups = p3d.init(tp=world)
    layer, twin = nn.Linear(4, 4), nn.Linear(4, 4)
    twin.load_state_dict(layer.state_dict())
    fully_shard(layer, mesh=groups.mesh["dp"])
    for module in (layer, twin):
        module(torch.ones(2, 4)).sum().backward()
    grad = layer.weight.grad
    assert isinstance(grad, DTensor)
    assert torch.equal(grad.full_tensor(), twin.weight.grad)
    assert isinstance(groups.mesh["dp", "tp"], DeviceMesh)


def test_a_dimension_of_one_rank_is_a_mesh(pool: Pool) -> None:
    pool.run(2, with_fsdp, 2)


def test_groups_without_a_world_have_no_mesh() -> None:
    with pytest.raises(p3d.Parallel3dError, match=r"must have a world of torch\.distributed"):
        _ = p3d.ProcessGroups.single().mesh
