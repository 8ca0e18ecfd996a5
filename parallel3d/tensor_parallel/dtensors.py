"""Shows shards of the tensor-parallel layers as PyTorch's DTensors."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from parallel3d.comm.group import Group, mesh_of_group
from parallel3d.errors import UserError
from parallel3d.parameters.sharding import ParameterSpec, ShardSpec


def _only_shard(spec: ParameterSpec) -> ShardSpec:
    if len(spec.shards) != 1 or spec.shards[0].shape != spec.shape:
        names = " and ".join(shard.name or "matrix" for shard in spec.shards)
        raise UserError(
            f"a parameter that holds {names} is no DTensor, which must have one matrix without "
            "padding; give each matrix a layer of its own, or use full_state_dict instead"
        )
    return spec.shards[0]


def _split_dim(shard: ShardSpec) -> int | None:
    """Returns the dimension that is split over ranks; None: the shard is the whole tensor."""
    sizes = zip(shard.shape, shard.full_shape, strict=True)
    return next((i for i, (mine, whole) in enumerate(sizes) if mine != whole), None)


def dtensor_of(local: Tensor, spec: ParameterSpec, tp: Group) -> Tensor:
    """Returns a shard as a DTensor of the whole shape, on the same memory; not collective.

    `local` may be a DTensor over a mesh of dp already (`fully_shard`), whose ranks share the shard.
    It is then split over tp first and over dp inside, in a mesh of this order: with dp first, rows
    that both split would need PyTorch's private strided placement.
    """
    # Imported here: DTensor takes a second.
    from torch.distributed.tensor import DTensor, Placement, Shard

    if spec.replicated or tp.handle is None:
        return local
    shard = _only_shard(spec)
    dim = _split_dim(shard)
    if dim is None:
        return local
    placements: list[Placement] = [Shard(dim)]
    device_type = local.device.type
    if isinstance(local, DTensor):
        inner = local.device_mesh
        mine = tp.ranks[tp.index]
        grid = torch.stack([inner.mesh + (rank - mine) for rank in tp.ranks])
        handles = [tp.handle, *inner.get_all_groups()]
        names = tuple(handle.group_name for handle in handles)  # see `mesh_of_group`
        mesh = DeviceMesh.from_group(handles, device_type, grid, mesh_dim_names=names)
        placements += local.placements
        local = local.to_local()
    else:
        mesh = mesh_of_group(tp, device_type)
    stride = torch.empty(shard.full_shape, device="meta").stride()
    return DTensor.from_local(
        local, mesh, placements, run_check=False, shape=torch.Size(shard.full_shape), stride=stride
    )


def own_shard(value: Tensor, parameter: Tensor, spec: ParameterSpec) -> Tensor:
    """Returns what `parameter` takes of a DTensor that `dtensor_of` made.

    Raises UserError for a DTensor that is split in another way.
    """
    from torch.distributed.tensor import DTensor

    assert isinstance(value, DTensor)
    local = value.to_local()
    here = parameter.to_local() if isinstance(parameter, DTensor) else parameter
    if local.shape != here.shape:
        raise UserError(
            f"{spec.shards[0].name} has a DTensor of local shape {tuple(local.shape)}, but must "
            f"have {tuple(here.shape)} as in sharded_state_dict of this module; give the whole "
            "tensor instead"
        )
    if not isinstance(parameter, DTensor):
        return local
    return DTensor.from_local(
        local,
        parameter.device_mesh,
        parameter.placements,
        run_check=False,
        shape=parameter.shape,
        stride=parameter.stride(),
    )
