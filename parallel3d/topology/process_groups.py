"""This rank's communication groups, made from a `Layout` and held by a `DeviceMesh`."""

from __future__ import annotations

import datetime
from dataclasses import dataclass, field, replace

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from parallel3d.shared_collectives import SharedCollectives
from parallel3d.topology.layout import Coordinates, Layout


@dataclass(frozen=True)
class Group:
    """Ranks that communicate along one dimension.

    `handle` is None for a group of one: nothing may be sent there, so nothing is.
    """

    name: str
    ranks: tuple[int, ...]
    index: int  # this rank's place in `ranks`
    handle: dist.ProcessGroup | None
    shared: SharedCollectives | None = field(default=None, compare=False)  # CPU ranks of one host

    @property
    def size(self) -> int:
        return len(self.ranks)


SINGLE = Group("single", (0,), 0, None)  # layers built outside of any cluster are unsharded


@dataclass
class ProcessGroups:
    """The groups of one rank: six kinds at most, whatever the world size.

    tp, dp, pp   along one dimension
    model        tp × pp: everything that holds one replica of the model (gradient norm)
    embedding    first and last stage of a pipeline (tied embeddings)
    world        all ranks
    """

    layout: Layout
    rank: int
    mesh: DeviceMesh | None
    tp: Group
    dp: Group
    pp: Group
    model: Group
    embedding: Group
    world: Group

    @property
    def coordinates(self) -> Coordinates:
        return self.layout.coordinates(self.rank)

    @property
    def is_first_stage(self) -> bool:
        return self.coordinates.pp == 0

    @property
    def is_last_stage(self) -> bool:
        return self.coordinates.pp == self.layout.pp - 1

    @classmethod
    def create(cls, layout: Layout, device_type: str, timeout_s: float = 600.0) -> ProcessGroups:
        """Makes the groups; collective over the world, which must be initialised.

        Every rank makes every group in the same order (creation is a collective of the world);
        the mesh is assembled from the finished groups with explicit ranks, so that FSDP2, DTensor
        and distributed checkpoints see the same placement.

        Raises:
            ValueError: the world size is not the layout's.
        """
        world = dist.get_world_size()
        if world != layout.world_size:
            raise ValueError(f"world size {world} is not the layout's {layout.world_size}")
        rank = dist.get_rank()
        timeout = datetime.timedelta(seconds=timeout_s)

        made: dict[tuple, dist.ProcessGroup | None] = {}

        def group(name: str, all_ranks: list[list[int]]) -> Group:
            mine = next((r for r in all_ranks if rank in r), [rank])
            key = tuple(map(tuple, all_ranks))
            if key not in made:  # equal ranks share one group: with dp=1, `model` is the world
                made[key] = _make(all_ranks, world, timeout, name)
            handle = made[key] if len(mine) > 1 else None
            return Group(name, tuple(mine), mine.index(rank), handle)

        tp, dp, pp = (group(d, layout.groups(d)) for d in ("tp", "dp", "pp"))
        if device_type == "cpu":
            tp, dp = (_with_shared_memory(g, timeout_s) for g in (tp, dp))
        ends = [[g[0], g[-1]] if len(g) > 1 else g for g in layout.groups("pp")]
        return cls(
            layout=layout,
            rank=rank,
            mesh=_mesh(layout, device_type, {"pp": pp, "dp": dp, "tp": tp}),
            tp=tp,
            dp=dp,
            pp=pp,
            model=group("model", layout.groups("tp", "pp")),
            embedding=group("embedding", ends),
            world=group("world", [list(range(world))]),
        )

    @classmethod
    def single(cls) -> ProcessGroups:
        """Groups of one: the whole model on this process, whatever world is initialised."""
        return cls(Layout(), 0, None, SINGLE, SINGLE, SINGLE, SINGLE, SINGLE, SINGLE)

    def close(self) -> None:
        """Destroys the groups that `create` made; the world stays with whoever initialised it."""
        for group in (self.tp, self.dp):
            if group.shared is not None:
                group.shared.memory.close()
        made = {g.handle for g in (self.tp, self.dp, self.pp, self.model, self.embedding)}
        for handle in made - {None, dist.group.WORLD}:
            dist.destroy_process_group(handle)


def _with_shared_memory(group: Group, timeout_s: float) -> Group:
    """The same group, with shared memory where its ranks can have it; collective."""
    if group.handle is None:
        return group
    shared = SharedCollectives.open(group.handle, group.index, group.size, timeout_s)
    return replace(group, shared=shared)


def _make(
    all_ranks: list[list[int]], world: int, timeout: datetime.timedelta, name: str
) -> dist.ProcessGroup | None:
    """The group of this rank among `all_ranks`; every rank of the world makes all of them."""
    if len(all_ranks[0]) == 1:
        return None
    if len(all_ranks[0]) == world:
        return dist.group.WORLD  # the same ranks in the same order need no second group
    mine, _ = dist.new_subgroups_by_enumeration(all_ranks, timeout=timeout, group_desc=name)
    return mine


def _mesh(layout: Layout, device_type: str, by_dim: dict[str, Group]) -> DeviceMesh | None:
    """A (pp, dp, tp) mesh over the groups that exist; None for a single rank or with cp."""
    if layout.world_size == 1 or layout.cp > 1:
        return None
    dims = {name: g for name, g in by_dim.items() if g.handle is not None}
    handles = [g.handle for g in dims.values()]
    if len(handles) == 1:
        return DeviceMesh.from_group(handles[0], device_type, mesh_dim_names=tuple(dims))
    sizes = tuple(layout.size(d) for d in dims)
    strides = tuple(layout.stride(d) for d in dims)
    grid = torch.arange(layout.world_size).as_strided(sizes, strides).contiguous()
    return DeviceMesh.from_group(handles, device_type, grid, mesh_dim_names=tuple(dims))
