"""A rank's communication groups, created from a `Layout` and held by a `DeviceMesh`."""

from __future__ import annotations

import copy
import datetime
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from parallel3d.comm.group import SINGLE, Group, set_groups_of_mesh
from parallel3d.comm.group_options import (
    BACKWARD,
    DEFAULTS,
    GLOO_ON,
    Interfaces,
    gloo_on,
    nccl_options,
    nccl_settings,
)
from parallel3d.comm.operation_log import OperationLog
from parallel3d.comm.shared_memory import SharedCollectives
from parallel3d.config.schema import LaunchConfig
from parallel3d.device import accelerator
from parallel3d.errors import UserError
from parallel3d.estimate.network import two_levels
from parallel3d.topology.layout import Coordinates, Layout, layout_of

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Backend

    from parallel3d.comm.step_timer import StepTimer
    from parallel3d.config.schema import Config
    from parallel3d.topology.tiling import RankMapping


# Groups with enough bytes for an interface of their own; the others carry a few numbers a step and
# cross rails, so they stay on the interface of the rendezvous.
DATA_KINDS = ("tp", "cp", "dp", "dp_cp", "dp_inner", "dp_outer", "pp", BACKWARD, "embedding")

Ranks = list[list[int]]
CPU = torch.device("cpu")


@dataclass
class ProcessGroups:
    """The groups of one rank: six kinds, eight with two levels of dp, ten with context parallelism,
    whatever the world size.

    tp, cp, dp, pp  along one dimension
    dp_cp        dp × cp: the ranks with equal parameters, over which gradients are summed and
                 ZeRO shards; with cp = 1 it is dp
    pp_backward  pp once more, for the gradients that travel back (see `pipeline.p2p`): on NCCL a
                 communicator of its own, elsewhere the same group
    embedding    first and last stage of a pipeline (tied embeddings)
    world        all ranks (loss and gradient norm)
    dp_inner     hierarchical all-reduce: members of dp_cp in one NVLink domain (else of one);
                 HSDP (ddp.shard_size): members that shard one copy of the model
    dp_outer     one member of each domain; HSDP: the replicas
    device       this rank's, on which it communicates
    """

    layout: Layout
    rank: int
    tp: Group
    dp: Group
    pp: Group
    pp_backward: Group
    embedding: Group
    world: Group
    cp: Group = SINGLE
    dp_cp: Group = None  # type: ignore[assignment]  # dp, by `__post_init__`
    dp_inner: Group = SINGLE
    dp_outer: Group = SINGLE
    device: torch.device = CPU
    lazy_mesh: _LazyMesh | None = None  # of an initialised world

    def __post_init__(self) -> None:
        if self.dp_cp is None:
            self.dp_cp = self.dp

    @property
    def mesh(self) -> DeviceMesh:
        """The grid of all ranks, with dimensions pp, dp and tp: `groups.mesh["tp"]`.

        With context parallelism it has cp too, between dp and tp.

        For FSDP2, DTensor, DCP, and the parts of this library. Its communicators are those of the
        groups. Dimensions of one rank share one more, of this rank alone, made when the mesh is
        first used: on NCCL that is collective over the world.

        Raises UserError for groups without a world.
        """
        if self.lazy_mesh is None:
            raise UserError(
                "groups.mesh must have a world of torch.distributed; give the groups of init "
                "instead of ProcessGroups.single()"
            )
        dims = {"pp": self.pp, "dp": self.dp, "cp": self.cp, "tp": self.tp}
        if self.layout.cp == 1:
            del dims["cp"]
        return self.lazy_mesh.get(dims)

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
    def of_run(cls, config: Config, device: str, placement: RankMapping | None) -> ProcessGroups:
        """Creates the groups of a run's layout on this rank, as configured; collective."""
        device_type = device.split(":")[0]
        interfaces = None
        if device_type == "cpu":
            interfaces = Interfaces.of_run(config.cluster, placement)
        levels = None
        if config.ddp.hierarchical and placement is not None:
            levels = two_levels(placement, "dp_cp")
        if config.zero > 1 and config.ddp.shard_size is not None:
            levels = shards_and_replicas(layout_of(config), config.ddp.shard_size)
        layout, timeout_s = layout_of(config), config.launch.timeout_s
        return cls.create(layout, device_type, timeout_s, config.launch, interfaces, levels)

    @classmethod
    def create(
        cls,
        layout: Layout,
        device_type: str,
        timeout_s: float = 600.0,
        launch: LaunchConfig | None = None,
        interfaces: Interfaces | None = None,
        levels: tuple[Ranks, Ranks] | None = None,
    ) -> ProcessGroups:
        """Creates the groups; collective over the world, which must be initialised.

        Every rank creates every kind of group in the same order.

        Args:
            launch: shared memory and NCCL's settings; its defaults if None.
            interfaces: network interfaces of gloo's groups; the system's choice if None.
            levels: inner and outer groups of dp_cp (`links.two_levels`); None: one level.

        Raises:
            ValueError: the world size is not the layout's.
            UserError: an interface or NCCL setting does not exist.
        """
        world = dist.get_world_size()
        if world != layout.world_size:
            raise ValueError(f"world size {world} is not the layout's {layout.world_size}")
        launch = launch or LaunchConfig()
        maker = _Maker(
            torch.device(device_type), datetime.timedelta(seconds=timeout_s), launch, interfaces
        )
        kinds = ["tp", "cp", "dp", *["dp_cp"] * (layout.cp > 1)]
        made = {kind: maker.group(kind, layout.groups(kind)) for kind in kinds}
        pp = maker.group("pp", layout.groups("pp"))
        back = maker.group(BACKWARD, layout.groups("pp"))
        if device_type == "cpu" and launch.shared_memory:
            shared = [kind for kind in kinds if kind != "dp" or layout.cp == 1]  # a few numbers
            made |= {kind: _with_shared_memory(made[kind], timeout_s) for kind in shared}
        inner, outer = levels or ([], [])
        ends = [[g[0], g[-1]] if len(g) > 1 else g for g in layout.groups("pp")]
        return cls(
            layout=layout,
            rank=dist.get_rank(),
            pp=pp,
            **made,
            pp_backward=back,
            embedding=maker.group("embedding", ends),
            world=maker.group("world", [list(range(world))]),
            dp_inner=maker.group("dp_inner", inner) if inner else SINGLE,
            dp_outer=maker.group("dp_outer", outer) if outer else SINGLE,
            device=accelerator.current(torch.device(device_type)),
            lazy_mesh=_LazyMesh(layout, maker),
        )

    @classmethod
    def single(cls) -> ProcessGroups:
        """Returns groups of one: the whole model on this process, whatever world exists."""
        return cls(Layout(), 0, SINGLE, SINGLE, SINGLE, SINGLE, SINGLE, SINGLE)

    def close(self) -> None:
        """Destroys the groups that `create` made; the world stays with its creator."""
        for group in dict.fromkeys((self.tp, self.cp, self.dp, self.dp_cp)):
            if group.shared is not None:
                group.shared.memory.close()
        # In order of creation, alike on all ranks: NCCL's members destroy a communicator together,
        # and ranks that take two of them in different orders would deadlock.
        kinds = (self.tp, self.cp, self.dp, self.dp_cp, self.pp, self.pp_backward, self.embedding)
        handles = [g.handle for g in (*kinds, self.dp_inner, self.dp_outer)]
        if self.lazy_mesh is not None:
            handles.append(self.lazy_mesh.alone)
        for handle in dict.fromkeys(handles):
            if handle not in (None, dist.group.WORLD):
                dist.destroy_process_group(handle)


def shards_and_replicas(layout: Layout, shard_size: int) -> tuple[Ranks, Ranks] | None:
    """Returns inner and outer groups of dp_cp for HSDP (Zhao et al. 2023 §3.2.2).

    A copy of the model is sharded over `shard_size` consecutive members, which are the closest in
    the default order, and replicated over the rest. None where one copy takes all members.
    """
    if shard_size == layout.dp_cp:
        return None
    groups = layout.groups("dp_cp")
    inner = [
        ranks[i : i + shard_size] for ranks in groups for i in range(0, layout.dp_cp, shard_size)
    ]
    outer = [ranks[i::shard_size] for ranks in groups for i in range(shard_size)]
    return inner, outer


def _with_shared_memory(group: Group, timeout_s: float) -> Group:
    if group.handle is None:
        return group
    shared = SharedCollectives.open(group.handle, group.index, group.size, timeout_s)
    return replace(group, shared=shared)


@dataclass
class _Maker:
    """Creates the groups of each kind; kinds with equal ranks and equal settings share one.

    Attributes:
        splits: the world's backend if it can split (NCCL), else None (gloo).
        made: (settings, ranks) of groups → this rank's group.
    """

    device: torch.device
    timeout: datetime.timedelta
    launch: LaunchConfig
    interfaces: Interfaces | None
    splits: Backend | None = field(init=False, default=None)
    made: dict[tuple[Hashable, Hashable], dist.ProcessGroup | None] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if accelerator.is_accelerator(self.device):
            assert dist.group.WORLD is not None  # initialised before the groups
            backend = dist.group.WORLD._get_backend(self.device)
            self.splits = backend if backend.supports_splitting else None

    def group(self, kind: str, all_ranks: Ranks) -> Group:
        """Returns this rank's group among `all_ranks`, a list alike on every rank of the world."""
        rank = dist.get_rank()
        mine = next((ranks for ranks in all_ranks if rank in ranks), [rank])
        handle = self._reuse_or_make(kind, all_ranks) if len(all_ranks[0]) > 1 else None
        return Group(kind, tuple(mine), mine.index(rank), handle if len(mine) > 1 else None)

    def _reuse_or_make(self, kind: str, all_ranks: Ranks) -> dist.ProcessGroup | None:
        """Returns a group of these ranks that `kind` can share with another kind, or a new one."""
        wants, ranks = self._settings(kind), tuple(map(tuple, all_ranks))
        if (wants, ranks) in self.made:
            return self.made[wants, ranks]
        if wants is None and len(all_ranks[0]) == dist.get_world_size():
            return dist.group.WORLD  # the same ranks in the same order need no second group
        others = [key for key in self.made if key[1] == ranks]
        if wants is None and others:
            return self.made[others[0]]
        self.made[wants, ranks] = made = self._make(kind, all_ranks)
        return made

    def alone(self) -> dist.ProcessGroup | None:
        """Returns a group of this rank alone; with NCCL collective over the world."""
        rank, world = dist.get_rank(), dist.get_world_size()
        if world == 1:
            return dist.group.WORLD
        if self.splits is not None:
            return self._make("alone", [[r] for r in range(world)])
        return dist.new_group(
            [rank], self.timeout, use_local_synchronization=True, group_desc="alone"
        )

    def _settings(self, kind: str) -> Hashable:
        """Returns settings that need groups apart from others of the same ranks; None for none."""
        if self.splits is not None:
            settings = nccl_settings(kind, self.launch)
            # What travels beside operations of the same ranks: gradients that are sent back, and
            # those that are reduced while cp gathers keys.
            if kind in (BACKWARD, "dp_cp"):
                return kind, settings
            return None if settings == DEFAULTS else settings
        # Kinds with interfaces of their own are separate from the world's group.
        return GLOO_ON if self.interfaces is not None and kind in DATA_KINDS else None

    def _make(self, kind: str, all_ranks: Ranks) -> dist.ProcessGroup | None:
        if self.splits is not None:
            # One communicator split for all groups of a kind; created one by one, each group would
            # cost every rank of the world a collective call.
            options = nccl_options(kind, self.launch, self.timeout, self.splits)
            return dist.split_group(
                split_ranks=all_ranks, timeout=self.timeout, group_desc=kind, pg_options=options
            )
        rank = dist.get_rank()
        mine = next((ranks for ranks in all_ranks if rank in ranks), [rank])
        backend: str | None = None
        options = None
        if self.interfaces is not None and kind in DATA_KINDS and len(mine) > 1:
            interface = self.interfaces.of_group(mine, rank)
            if interface is not None:
                backend, options = GLOO_ON, gloo_on(interface, self.timeout)
        made, _ = dist.new_subgroups_by_enumeration(
            all_ranks, timeout=self.timeout, backend=backend, pg_options=options, group_desc=kind
        )
        return made


@dataclass
class _LazyMesh:
    """Makes the `DeviceMesh` of the groups when it is first used.

    Attributes:
        alone: the group of this rank alone, for dimensions of one rank, once it is made.
    """

    layout: Layout
    maker: _Maker
    mesh: DeviceMesh | None = None
    alone: dist.ProcessGroup | None = None

    def get(self, by_dim: dict[str, Group]) -> DeviceMesh:
        if self.mesh is None:
            if any(group.handle is None for group in by_dim.values()):
                self.alone = self.maker.alone()
            handles = [h for g in by_dim.values() if (h := g.handle or self.alone) is not None]
            # Explicit ranks, so that FSDP2, DTensor and DCP see the same placement.
            sizes, strides = zip(
                *((self.layout.size(d), self.layout.stride(d)) for d in by_dim), strict=True
            )
            grid = torch.arange(self.layout.world_size).as_strided(sizes, strides).contiguous()
            kind = self.maker.device.type
            self.mesh = DeviceMesh.from_group(handles, kind, grid, mesh_dim_names=tuple(by_dim))
            set_groups_of_mesh(self.mesh, by_dim)
        return self.mesh


def with_timer(groups: ProcessGroups, timer: StepTimer) -> ProcessGroups:
    return _replace_each(groups, lambda group: replace(group, timer=timer))


def with_log(groups: ProcessGroups, log: OperationLog) -> ProcessGroups:
    return _replace_each(groups, lambda group: replace(group, log=log))


def _replace_each(groups: ProcessGroups, change: Callable[[Group], Group]) -> ProcessGroups:
    changed = copy.copy(groups)
    for f in fields(groups):
        if isinstance(group := getattr(groups, f.name), Group):
            setattr(changed, f.name, change(group))
    return changed
