"""Builds the data-parallel engine of a rank's stages from the settings of a run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import nn

from parallel3d.blueprint.blueprint import DataParallelSettings
from parallel3d.data_parallel.comm_hooks import HierarchicalAllReduce, InBf16, SideStream
from parallel3d.data_parallel.engine import BucketedDataParallel
from parallel3d.data_parallel.interface import DataParallel, ShardedLayer
from parallel3d.data_parallel.pending_gathers import PendingGathers
from parallel3d.data_parallel.reducer import CommHook, all_reduce, reduce_scatter
from parallel3d.parameters.copies import GroupsOf, copy_groups
from parallel3d.parameters.initializer import Initializer
from parallel3d.parameters.state import spec_of

if TYPE_CHECKING:
    from parallel3d.comm.process_groups import ProcessGroups


def data_parallel_engine(
    settings: DataParallelSettings,
    stages: Sequence[nn.Module],
    layers: Sequence[ShardedLayer],
    initializer: Initializer,
    dtype: torch.dtype,
    groups: ProcessGroups,
    gathers: PendingGathers,
    before_reduction: Callable[[], None] = lambda: None,
) -> DataParallel:
    """Creates the data-parallel engine of a rank's stages, whose parameters are fp32 or better.

    Args:
        layers: the layers of all stages that FSDP2 shards one by one.
        initializer: has created the parameters. If it is `deferred`, each rank draws only the
            values that it keeps; otherwise the parameters have their values already.
        dtype: the compute dtype.
        gathers: gets the all-gathers of stepped parameters. It stays empty under FSDP2, whose own
            hooks gather a layer's parameters.
        before_reduction: as in `BucketedDataParallel`; no layout has it together with FSDP2.
    """
    groups_of = partial(copy_groups, groups=groups)
    if settings.zero > 1 and groups.layout.ep and groups.layout.world_size > 1:
        # On NCCL, making a mesh is collective over the world. So a rank must make the mesh of a
        # group of one rank even if its stages have no experts and do not use that mesh.
        for group in (groups.dp_cp, groups.edp):
            if group.size == 1 < max(groups.dp_cp.size, groups.edp.size):
                groups.mesh_of(group)
    if settings.zero > 1 and _has_copies(stages, groups_of):
        # These are imported only here, because importing FSDP2 and DTensor takes a second.
        from parallel3d.data_parallel.fully_sharded import FullyShardedDataParallel, ShardGroups

        # With two levels (HSDP) the inner group shards a model, and the outer group joins replicas.
        whole = ShardGroups(groups.dp_cp)
        if groups.dp_inner.size > 1:
            whole = ShardGroups(groups.dp_inner, groups.dp_outer)
        experts = ShardGroups(groups.edp)
        return FullyShardedDataParallel(
            stages,
            [
                *((layer.experts, experts) for layer in layers if layer.experts is not None),
                *((layer.module, whole) for layer in layers),
            ],
            whole,
            groups_of,
            initializer,
            dtype,
            settings.zero,
            settings.every_microbatch,
            groups.mesh_of,
            {
                module
                for layer in layers
                if not layer.has_backward
                for module in (layer.module, layer.experts)
                if module is not None
            },
        )

    def values(parameter: nn.Parameter) -> torch.Tensor:
        if initializer.deferred:
            return initializer.values(spec_of(parameter))
        return parameter.detach()

    return BucketedDataParallel(
        parameters_of_chunks(stages),
        dtype,
        groups_of,
        settings.zero,
        bucket_cap_mb=settings.bucket_cap_mb,
        overlap=settings.overlap,
        hook=comm_hook(settings, groups),
        values=values,
        gathers=gathers,
        before_reduction=before_reduction,
    )


def _has_copies(stages: Sequence[nn.Module], groups_of: GroupsOf) -> bool:
    # This is a function so that no reference to a parameter survives, which would keep FSDP2 from
    # freeing the parameters that it shards.
    specs = (spec_of(p) for stage in stages for p in stage.parameters())
    return any(groups_of(spec).data.size > 1 for spec in specs)


def parameters_of_chunks(stages: Sequence[nn.Module]) -> list[dict[str, nn.Parameter]]:
    """Returns the parameters of each stage by name.

    A parameter that several stages share is listed only in the first of them.
    """
    seen: set[nn.Parameter] = set()
    chunks = []
    for stage in stages:
        chunks.append({name: p for name, p in stage.named_parameters() if p not in seen})
        seen.update(chunks[-1].values())
    return chunks


def comm_hook(settings: DataParallelSettings, groups: ProcessGroups) -> CommHook:
    inner, outer = groups.dp_inner, groups.dp_outer
    if settings.zero:
        return reduce_scatter
    if inner.size > 1:
        return SideStream(lambda _, bucket: HierarchicalAllReduce(inner, outer, bucket))
    if settings.comm_hook == "bf16":
        return SideStream(InBf16)
    return all_reduce
