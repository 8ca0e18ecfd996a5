"""Creates a rank's communication groups for a `Layout`, and a `DeviceMesh` over them."""

from __future__ import annotations

import datetime
import fnmatch
import socket
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from parallel3d.blueprint.cluster import natural
from parallel3d.blueprint.keys import ClusterConfig
from parallel3d.blueprint.layout import DIMENSIONS, EXPERT_DIMENSIONS, Coordinates, Layout
from parallel3d.blueprint.rank_mapping import RankMapping
from parallel3d.comm.group import SINGLE, Group, mesh_of_group, set_groups_of_mesh
from parallel3d.comm.shared_memory import SharedCollectives
from parallel3d.config.nccl import parse_nccl_settings
from parallel3d.device import accelerator
from parallel3d.errors import UserError
from parallel3d.private_names import (
    abort_process_group,
    backend_for,
    set_devices,
    set_timeout,
)
from parallel3d.run.keys import LaunchConfig

if TYPE_CHECKING:
    from parallel3d.comm.operation_log import OperationLog
    from parallel3d.comm.step_timer import StepTimer
    from parallel3d.private_names import Backend


DEFAULTS = (False, ())  # result of `nccl_settings` for a kind of group without settings
BACKWARD = "pp_backward"  # kind of the group that carries a pipeline's gradients
# Name of a gloo backend that uses a chosen interface, unlike torch's own gloo backend.
GLOO_ON = "gloo_on"

# Kinds of groups that carry enough bytes for an interface of their own. The other groups carry a
# few numbers per step and cross rails, so they use the interface of the rendezvous.
DATA_KINDS = (
    *("tp", "cp", "dp", "dp_cp", "dp_inner", "dp_outer", "ep", "edp", "pp", BACKWARD, "embedding"),
)

Ranks = list[list[int]]
CPU = torch.device("cpu")


@dataclass
class ProcessGroups:
    """The groups of one rank.

    Attributes:
        tp, cp, dp, pp: the ranks along one dimension of the layout.
        dp_cp: the ranks along dp and cp, which have equal parameters. Gradients are summed over
            them, and ZeRO shards over them. With cp = 1 it is dp.
        pp_backward: the ranks of pp, for the gradients that travel back (see `pipeline.p2p`). On
            NCCL it has a separate communicator; elsewhere it is the same group as pp.
        embedding: the first and the last stage of a pipeline, for tied embeddings.
        world: all ranks, for the loss and the gradient norm.
        dp_inner: with a hierarchical all-reduce the members of dp_cp in one NVLink domain; with
            HSDP (ddp.shard_size) the members that shard one copy of the model.
        dp_outer: with a hierarchical all-reduce one member of each domain; with HSDP the ranks that
            hold the same shard.
        ep: the ranks of a stage that together hold each expert once, and exchange tokens.
        edp: the ranks with the same experts, over which the gradients of experts are summed.
        device: the device on which this rank communicates.
        maker: creates the groups and the mesh; None if there is no world of torch.distributed.
        owns_world: whether `close` also destroys the world, because `init` initialised it.
    """

    layout: Layout
    rank: int
    # These are in the order of their creation, which is the same on all ranks.
    tp: Group = SINGLE
    cp: Group = SINGLE
    dp: Group = SINGLE
    dp_cp: Group = SINGLE
    pp: Group = SINGLE
    pp_backward: Group = SINGLE
    embedding: Group = SINGLE
    world: Group = SINGLE
    dp_inner: Group = SINGLE
    dp_outer: Group = SINGLE
    ep: Group = SINGLE
    edp: Group = SINGLE
    device: torch.device = CPU
    maker: GroupMaker | None = None
    owns_world: bool = False

    def __enter__(self) -> ProcessGroups:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: object
    ) -> None:
        """Closes the groups at the end of a `with` block.

        NCCL destroys a communicator collectively. After an error this rank does not take part, as
        its peers may still wait for it in another collective, and both sides would hang: it aborts
        its communicators.
        """
        failed = error is not None and not (isinstance(error, SystemExit) and not error.code)
        if not (failed and accelerator.is_accelerator(self.device)):
            self.close()
        elif self.owns_world:
            abort_process_group()

    @property
    def mesh(self) -> DeviceMesh:
        """The mesh of all ranks with the dimensions pp, dp and tp, as in `groups.mesh["tp"]`.

        With context parallelism it also has cp, between dp and tp.

        The mesh can be given to FSDP2, DTensor, DCP and the parts of this library. Its
        communicators are those of the groups. Dimensions of size 1 share a communicator of this
        rank alone, which is made when the mesh is first used; on NCCL this first use is collective
        over the world.

        Raises UserError if the groups have no world.
        """
        if self.maker is None:
            raise UserError(
                "groups.mesh must have a world of torch.distributed; give the groups of init "
                "instead of ProcessGroups.single()"
            )
        dims = {"pp": self.pp, "dp": self.dp, "cp": self.cp, "tp": self.tp}
        if self.layout.cp == 1:
            del dims["cp"]
        return self.maker.mesh(self.layout, dims)

    def mesh_of(self, group: Group) -> DeviceMesh:
        """Returns a one-dimensional mesh over one of these groups, which may have only one rank.

        On NCCL the first call for a group of one rank is collective over the world.
        """
        assert self.maker is not None  # a mesh needs a world
        handle = group.handle or self.maker.group_alone()
        assert handle is not None
        return mesh_of_group(replace(group, handle=handle), self.device.type)

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

        Every rank creates all kinds of groups in the same order.

        Args:
            launch: settings of shared memory and NCCL; None takes the defaults.
            interfaces: network interfaces of gloo's groups; None leaves the choice to the system.
            levels: inner and outer groups of dp_cp (see `groups.two_levels`); None for one level.

        Raises:
            ValueError: the world's size is not that of the layout.
            UserError: an interface or an NCCL setting does not exist.
        """
        world = dist.get_world_size()
        if world != layout.world_size:
            raise ValueError(f"world size {world} is not the layout's {layout.world_size}")
        device = torch.device(device_type)
        timeout = datetime.timedelta(seconds=timeout_s)
        maker = GroupMaker(device, timeout, launch or LaunchConfig(), interfaces)
        pipelines = layout.groups("pp")
        wanted = {kind: layout.groups(kind) for kind in ("tp", "cp", "dp")}
        wanted |= {"dp_cp": layout.groups("dp_cp")} if layout.cp > 1 else {}
        wanted |= {"pp": pipelines, BACKWARD: pipelines}
        wanted["embedding"] = [[g[0], g[-1]] if len(g) > 1 else g for g in pipelines]
        wanted["world"] = [list(range(world))]
        wanted |= dict(zip(("dp_inner", "dp_outer"), levels or (), strict=False))
        if layout.ep:
            wanted |= {kind: layout.groups(kind) for kind in EXPERT_DIMENSIONS}
        made = {kind: maker.group(kind, ranks) for kind, ranks in wanted.items()}
        if device_type == "cpu" and maker.launch.shared_memory:
            # With cp > 1, dp only sums a few numbers and needs no shared memory.
            for kind in ("tp", "cp", "dp") if layout.cp == 1 else ("tp", "cp", "dp_cp"):
                made[kind] = _with_shared_memory(made[kind], timeout_s)
            for kind in EXPERT_DIMENSIONS if layout.ep else ():
                made[kind] = _with_shared_memory(made[kind], timeout_s)
        made.setdefault("dp_cp", made["dp"])
        here = accelerator.current(device)
        return cls(layout, dist.get_rank(), **made, device=here, maker=maker, owns_world=False)

    @classmethod
    def single(cls) -> ProcessGroups:
        """Returns groups of one rank each, for a whole model in this process.

        A world of torch.distributed is not used, even if there is one.
        """
        return cls(Layout(), 0)

    def observed(
        self, timer: StepTimer | None = None, log: OperationLog | None = None
    ) -> ProcessGroups:
        """Returns the same groups, with operations timed by `timer` and logged by `log`.

        None keeps the current timer or log.
        """

        def changed(group: Group) -> Group:
            return replace(group, timer=timer or group.timer, log=log or group.log)

        changes: dict[str, Any] = {name: changed(g) for name, g in self._groups().items()}
        return replace(self, **changes)

    def _groups(self) -> dict[str, Group]:
        return {name: value for name, value in vars(self).items() if isinstance(value, Group)}

    def close(self) -> None:
        """Destroys the groups that `create` made, and the world if `init` initialised it.

        Later calls do nothing.
        """
        if self.maker is not None:
            if self.maker.closed:
                return
            self.maker.closed = True
        groups = self._groups().values()
        for group in groups:
            if group.shared is not None:
                group.shared.memory.close()
        if dist.group.WORLD is None:
            return  # the script has closed its world, with all groups
        # All ranks destroy the groups in the order of their creation: the members of an NCCL
        # communicator destroy it together, and would deadlock if their orders differed.
        handles = [group.handle for group in groups]
        if self.maker is not None:
            handles.append(self.maker.alone)
        for handle in dict.fromkeys(handles):
            if handle not in (None, dist.group.WORLD):
                dist.destroy_process_group(handle)
        if self.owns_world:
            dist.destroy_process_group()


def shards_and_replicas(layout: Layout, shard_size: int) -> tuple[Ranks, Ranks] | None:
    """Returns the inner and outer groups of dp_cp for HSDP (Zhao et al. 2023, §3.2.2).

    Each copy of the model is sharded over `shard_size` consecutive members, which are the closest
    ones in the default order of ranks. Returns None if there is only one copy, over all members.
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
class GroupMaker:
    """Creates the groups of each kind; kinds with equal ranks and equal settings share groups.

    Attributes:
        splits: the world's backend if it can split groups (NCCL), else None (gloo).
        made: (settings, ranks of all groups of a kind) → this rank's group.
        alone: the group of this rank alone, for a mesh's dimensions of size 1; None until it is
            made.
        whole_mesh: the mesh of all ranks; None until it is made.
        closed: whether `ProcessGroups.close` has destroyed the groups.
    """

    device: torch.device
    timeout: datetime.timedelta
    launch: LaunchConfig
    interfaces: Interfaces | None
    splits: Backend | None = field(init=False, default=None)
    made: dict[tuple[Hashable, Hashable], dist.ProcessGroup | None] = field(default_factory=dict)
    alone: dist.ProcessGroup | None = None
    whole_mesh: DeviceMesh | None = None
    closed: bool = False

    def __post_init__(self) -> None:
        if accelerator.is_accelerator(self.device):
            assert dist.group.WORLD is not None  # the world is initialised before the groups
            backend = backend_for(dist.group.WORLD, self.device)
            self.splits = backend if backend.supports_splitting else None

    def group(self, kind: str, all_ranks: Ranks) -> Group:
        """Returns this rank's group of a kind.

        `all_ranks`: the ranks of each group of this kind; the list is the same on all ranks.
        """
        rank = dist.get_rank()
        mine = next((ranks for ranks in all_ranks if rank in ranks), [rank])
        handle = None
        if len(all_ranks[0]) > 1:
            handle = self._reuse_or_make(kind, all_ranks, mine)
        return Group(kind, tuple(mine), mine.index(rank), handle if len(mine) > 1 else None)

    def _reuse_or_make(
        self, kind: str, all_ranks: Ranks, mine: list[int]
    ) -> dist.ProcessGroup | None:
        """Returns this rank's group of a kind, which may be new or shared with another kind."""
        wants, ranks = self._settings(kind), tuple(map(tuple, all_ranks))
        if wants is None and len(all_ranks[0]) == dist.get_world_size():
            return dist.group.WORLD  # the same ranks in the same order need no second group
        for key, made in self.made.items():
            if key[1] == ranks and wants in (None, key[0]):
                return made
        self.made[wants, ranks] = made = self.make(kind, all_ranks, mine)
        return made

    def _settings(self, kind: str) -> Hashable:
        """Returns the settings that a kind's groups must have.

        The result is None if the kind can share any group of the same ranks.
        """
        if self.splits is not None:
            settings = nccl_settings(kind, self.launch)
            # These kinds communicate at the same time as other kinds of the same ranks: gradients
            # travel back alongside activations, and are reduced while cp gathers keys.
            if kind in (BACKWARD, "dp_cp", "edp"):
                return kind, settings
            return None if settings == DEFAULTS else settings
        # Kinds with a separate interface cannot share the world's group.
        return GLOO_ON if self.interfaces is not None and kind in DATA_KINDS else None

    def make(self, kind: str, all_ranks: Ranks, mine: list[int]) -> dist.ProcessGroup | None:
        """Creates all groups of a kind on every rank, and returns this rank's group.

        `mine`: the ranks of this rank's group.
        """
        if self.splits is not None:
            # A split makes all groups of a kind at once. If they were created one by one, every
            # rank of the world would have to take part in the creation of each group.
            options = nccl_options(kind, self.launch, self.timeout, self.splits)
            # By torch's annotations the result may be None, which only ranks without a group get.
            made: Any = dist.split_group(
                split_ranks=all_ranks, timeout=self.timeout, group_desc=kind, pg_options=options
            )
            return made
        backend, options = None, None
        if self.interfaces is not None and kind in DATA_KINDS and len(mine) > 1:
            interface = self.interfaces.of_group(mine, dist.get_rank())
            if interface is not None:
                backend, options = GLOO_ON, gloo_on(interface, self.timeout)
        subgroups: Any = dist.new_subgroups_by_enumeration(
            all_ranks, timeout=self.timeout, backend=backend, pg_options=options, group_desc=kind
        )
        return subgroups[0]  # the group of this rank

    def mesh(self, layout: Layout, by_dim: dict[str, Group]) -> DeviceMesh:
        """Returns the mesh of these groups, which is made at the first call."""
        if self.whole_mesh is None:
            handles = [h for g in by_dim.values() if (h := g.handle or self.group_alone())]
            # The ranks are given so that FSDP2, DTensor and DCP see the layout's placement.
            sizes, strides = zip(*((layout.size(d), layout.stride(d)) for d in by_dim), strict=True)
            grid = torch.arange(layout.world_size).as_strided(sizes, strides).contiguous()
            self.whole_mesh = DeviceMesh.from_group(
                handles, self.device.type, grid, mesh_dim_names=tuple(by_dim)
            )
            set_groups_of_mesh(self.whole_mesh, by_dim)
        return self.whole_mesh

    def group_alone(self) -> dist.ProcessGroup | None:
        """Returns a group of this rank alone, which is made at the first call.

        On NCCL the first call is collective over the world.
        """
        rank, world = dist.get_rank(), dist.get_world_size()
        if world == 1:
            return dist.group.WORLD
        if self.alone is None and self.splits is not None:
            self.alone = self.make("alone", [[r] for r in range(world)], [rank])
        elif self.alone is None:
            made: Any = dist.new_group(
                [rank], self.timeout, use_local_synchronization=True, group_desc="alone"
            )
            self.alone = made
        return self.alone


# Options of a group's backend
#
# With a high-priority stream, short kernels that computations wait for (those of tensor groups and
# of messages between stages) overtake long ones (those of gradient buckets). A bound on CTAs leaves
# multiprocessors to the computation that overlaps with a reduction.


@dataclass(frozen=True)
class Interfaces:
    """The network interfaces of gloo's groups.

    If a glob matches several interfaces, a GPU takes the one on its own rail.

    Attributes:
        placement: maps the ranks to the GPUs of the cluster.
        nvlink: name or glob of the interface for groups within one NVLink domain; None leaves the
            choice to the system.
        rail: the same for groups that span several domains.
    """

    placement: RankMapping
    nvlink: str | None
    rail: str | None

    @classmethod
    def of_run(cls, cluster: ClusterConfig, placement: RankMapping | None) -> Interfaces | None:
        """Returns the configured interfaces, or None if the choice is left to the system."""
        if placement is None or not (cluster.nvlink_interface or cluster.rail_interface):
            return None
        return cls(placement, cluster.nvlink_interface, cluster.rail_interface)

    def check(self, layout: Layout, rank: int) -> None:
        """Raises UserError unless this host has the interfaces of this rank's groups."""
        for dim in DIMENSIONS:
            ranks = layout.group_of(rank, dim)
            if len(ranks) > 1:
                self.of_group(ranks, rank)

    def of_group(self, ranks: Sequence[int], rank: int) -> str | None:
        """Returns the interface of rank `rank` for a group, or None for the system's choice.

        Raises UserError if this host has no such interface.
        """
        cluster, slots = self.placement.cluster, self.placement.slots
        members = slots[list(ranks)]
        inside = np.unique(cluster.domain[members]).size == 1
        key, pattern = ("nvlink", self.nvlink) if inside else ("rail", self.rail)
        # Without a spine no switch joins the rails, so a group over several rails uses the world's
        # interface.
        is_joined = (
            inside or cluster.oversubscription or np.unique(cluster.rail_of[members]).size == 1
        )
        if pattern is None or not is_joined:
            return None
        names = [name for _, name in socket.if_nameindex()]
        fitting = sorted(fnmatch.filter(names, pattern), key=natural)
        if not fitting:
            raise UserError(
                f"cluster.{key}_interface={pattern}: host {socket.gethostname()} has no such "
                f"network interface; it must be one of {', '.join(names)}"
            )
        return fitting[int(cluster.rail_of[slots[rank]]) % len(fitting)]


def gloo_on(interface: str, timeout: datetime.timedelta) -> Any:
    """Returns options for a group whose backend, GLOO_ON, uses this interface."""
    if not hasattr(dist.Backend, GLOO_ON.upper()):  # torch registers it once per process
        dist.Backend.register_backend(GLOO_ON, _create_gloo, extended_api=True, devices=["cpu"])
    from parallel3d.private_names import GlooOptions

    options = GlooOptions()
    set_devices(options, [dist.ProcessGroupGloo.create_device(interface=interface)])
    set_timeout(options, timeout)
    return options


def _create_gloo(asked: Any, options: Any) -> dist.ProcessGroupGloo:
    return dist.ProcessGroupGloo(asked.store, asked.group_rank, asked.group_size, options)


def nccl_options(
    kind: str, launch: LaunchConfig, timeout: datetime.timedelta, backend: Backend
) -> Any:
    """Returns the options of groups of `kind` that are split from the world's `backend`.

    Raises UserError for a field of ncclConfig_t that this version of torch lacks.
    """
    options_class: Any = type(backend.options)
    options = options_class()
    set_timeout(options, timeout)
    options.is_high_priority_stream, fields = nccl_settings(kind, launch)
    for name, value in fields:
        if not hasattr(getattr(options, "config", None), name):
            raise UserError(
                f"launch.nccl_settings={kind}.{name}:{value} is not known to this torch's NCCL; "
                "leave it out"
            )
        setattr(options.config, name, value)
    return options


def nccl_settings(kind: str, launch: LaunchConfig) -> tuple[bool, tuple[tuple[str, int], ...]]:
    """Returns the NCCL settings for a kind of group.

    The result is (whether the stream has high priority, fields of ncclConfig_t with their values).
    """
    data = dict.fromkeys(("dp_cp", "dp_inner", "dp_outer", "edp"), "dp")
    kind = (data | {BACKWARD: "pp"}).get(kind, kind)
    settings = parse_nccl_settings(launch.nccl_settings)
    fields = tuple((field, value) for group, field, value in settings if group == kind)
    return kind in launch.nccl_high_priority, fields
