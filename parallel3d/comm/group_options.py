"""Options of a group's backend: gloo's network interface, NCCL's stream priority and CTAs.

A high-priority stream lets short kernels that others wait for (tensor groups, stage messages)
overtake long ones (gradient buckets); a bound on CTAs leaves multiprocessors to the computation
that a reduction overlaps with.
"""

from __future__ import annotations

import datetime
import fnmatch
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch.distributed as dist

from parallel3d.config.checks.parallelism import parse_nccl_settings
from parallel3d.config.schema import ClusterConfig, LaunchConfig
from parallel3d.errors import UserError
from parallel3d.topology.cluster.parts import natural
from parallel3d.topology.layout import DIMENSIONS, Layout
from parallel3d.topology.tiling import RankMapping

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Backend

DEFAULTS = (False, ())  # `nccl_settings` of a group that leaves everything to the backend
BACKWARD = "pp_backward"  # the group of a pipeline's gradients
GLOO_ON = "gloo_on"  # gloo on a chosen interface; torch's own gloo backend ignores its options


@dataclass(frozen=True)
class Interfaces:
    """Network interfaces by kind of group: within one NVLink domain, or across domains.

    `nvlink` and `rail` are names or globs, None for the system's choice. Where a glob matches
    several, a GPU takes the one of its own rail.
    """

    placement: RankMapping
    nvlink: str | None
    rail: str | None

    @classmethod
    def of_run(cls, cluster: ClusterConfig, placement: RankMapping | None) -> Interfaces | None:
        """Returns the configured interfaces; None where the choice is left to the system."""
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
        """Returns the interface of member `rank` of a group, or None. Raises UserError."""
        cluster, slots = self.placement.cluster, self.placement.slots
        members = slots[list(ranks)]
        inside = np.unique(cluster.domain[members]).size == 1
        key, pattern = ("nvlink", self.nvlink) if inside else ("rail", self.rail)
        # Without a spine nothing joins the rails: such a group meets where the world does.
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
    if not hasattr(dist.Backend, GLOO_ON.upper()):  # torch knows it once per process
        dist.Backend.register_backend(GLOO_ON, _create_gloo, extended_api=True, devices=["cpu"])
    options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]  # not in torch's stub
    options._devices = [dist.ProcessGroupGloo.create_device(interface=interface)]
    options._timeout = timeout
    return options


def _create_gloo(asked: Any, options: Any) -> dist.ProcessGroupGloo:
    return dist.ProcessGroupGloo(asked.store, asked.group_rank, asked.group_size, options)


def nccl_options(
    kind: str, launch: LaunchConfig, timeout: datetime.timedelta, backend: Backend
) -> Any:
    """Returns options of the world's class for groups that are split from its `backend`."""
    options_class: Any = type(backend.options)
    options = options_class()
    options._timeout = timeout
    set_nccl_options(options, kind, launch)
    return options


def nccl_settings(kind: str, launch: LaunchConfig) -> tuple[bool, tuple[tuple[str, int], ...]]:
    """Returns (high-priority stream, fields of ncclConfig_t) for a kind of group."""
    kind = {"dp_cp": "dp", "dp_inner": "dp", "dp_outer": "dp", BACKWARD: "pp"}.get(kind, kind)
    settings = parse_nccl_settings(launch.nccl_settings)
    fields = tuple((field, value) for group, field, value in settings if group == kind)
    return kind in launch.nccl_high_priority, fields


def set_nccl_options(options: Any, kind: str, launch: LaunchConfig) -> None:
    """Sets stream priority and ncclConfig_t fields of `kind`; raises UserError for unknown ones."""
    options.is_high_priority_stream, fields = nccl_settings(kind, launch)
    for field, value in fields:
        if not hasattr(getattr(options, "config", None), field):
            raise UserError(
                f"launch.nccl_settings={kind}.{field}:{value} is not known to this torch's NCCL; "
                "leave it out"
            )
        setattr(options.config, field, value)
