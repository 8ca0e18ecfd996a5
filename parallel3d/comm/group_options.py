"""What a group's backend is told: gloo its network interface, NCCL its stream and its CTAs.

NCCL's documentation leaves both to the user: a priority stream lets short kernels that others wait
for (tensor groups, stage messages) overtake long ones (gradient buckets), and a bound on CTAs
leaves multiprocessors to the computation that a reduction overlaps with.
"""

from __future__ import annotations

import datetime
import fnmatch
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch.distributed as dist

from parallel3d.config.checks.parallelism import parse_nccl_settings
from parallel3d.config.schema import ClusterConfig, LaunchConfig
from parallel3d.errors import UserError
from parallel3d.topology.cluster.parts import natural
from parallel3d.topology.layout import Layout
from parallel3d.topology.tiling import RankMapping

NOTHING = (False, ())  # of `nccl_settings`: the backend's defaults
BACKWARD = "pp_backward"  # the group of a pipeline's gradients
GLOO_ON = "gloo_on"  # gloo whose options name the interface; plain gloo ignores its options


@dataclass(frozen=True)
class Interfaces:
    """Network interfaces by kind of group: inside one NVLink domain, or beyond.

    `nvlink` and `rail` are names or globs, None for the system's choice. Where a glob finds several
    (a host whose NICs are all in one namespace), a GPU takes the one of its own rail.
    """

    placement: RankMapping
    nvlink: str | None
    rail: str | None

    @classmethod
    def of_run(cls, cluster: ClusterConfig, placement: RankMapping | None) -> Interfaces | None:
        """None where the configuration leaves the choice to the system."""
        if placement is None or not (cluster.nvlink_interface or cluster.rail_interface):
            return None
        return cls(placement, cluster.nvlink_interface, cluster.rail_interface)

    def check(self, layout: Layout, rank: int) -> None:
        """Looks for the interfaces that this rank's groups will take, before anything connects.

        Raises:
            UserError: this host has no such interface.
        """
        for dim in ("tp", "dp", "pp"):
            ranks = layout.group_of(rank, dim)
            if len(ranks) > 1:
                self.of_group(ranks, rank)

    def of_group(self, ranks: Sequence[int], rank: int) -> str | None:
        """The interface by which member `rank` of a group talks; None for the system's choice.

        Raises:
            UserError: this host has no such interface.
        """
        cluster, slots = self.placement.cluster, self.placement.slots
        inside = np.unique(cluster.domain[slots[list(ranks)]]).size == 1
        key, pattern = ("nvlink", self.nvlink) if inside else ("rail", self.rail)
        if pattern is None:
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
    """Options of the backend `GLOO_ON` for groups that talk by `interface`."""
    if not hasattr(dist.Backend, GLOO_ON.upper()):  # torch knows it once per process
        dist.Backend.register_backend(GLOO_ON, _create_gloo, extended_api=True, devices=["cpu"])
    options = dist.ProcessGroupGloo._Options()
    options._devices = [dist.ProcessGroupGloo.create_device(interface=interface)]
    options._timeout = timeout
    return options


def _create_gloo(asked: Any, options: Any) -> dist.ProcessGroupGloo:
    return dist.ProcessGroupGloo(asked.store, asked.group_rank, asked.group_size, options)


def nccl_options(
    kind: str, launch: LaunchConfig, timeout: datetime.timedelta, backend: dist.Backend
) -> Any:
    """Options for groups of a kind (tp, pp, …) that are split from the world's `backend`.

    Of the class that the world's own are of: `ProcessGroupNCCL.Options`, or what another backend
    that splits calls by the same names.

    Raises:
        UserError: this torch's NCCL lacks a setting that the configuration asks for.
    """
    options = type(backend.options)()
    options._timeout = timeout
    set_nccl_options(options, kind, launch)
    return options


def nccl_settings(kind: str, launch: LaunchConfig) -> tuple[bool, tuple[tuple[str, int], ...]]:
    """(priority stream, fields of ncclConfig_t) that `launch` asks for; `NOTHING` for NCCL's own.

    The two levels of dp are dp, and both directions of pp are pp.
    """
    kind = {"dp_inner": "dp", "dp_outer": "dp", BACKWARD: "pp"}.get(kind, kind)
    settings = parse_nccl_settings(launch.nccl_settings)
    fields = tuple((field, value) for group, field, value in settings if group == kind)
    return kind in launch.nccl_high_priority, fields


def set_nccl_options(options: Any, kind: str, launch: LaunchConfig) -> None:
    """Stream priority and ncclConfig_t fields of `kind`, as `launch` asks for them."""
    options.is_high_priority_stream, fields = nccl_settings(kind, launch)
    for field, value in fields:
        if not hasattr(getattr(options, "config", None), field):
            raise UserError(
                f"launch.nccl_settings={kind}.{field}:{value} is not known to this torch's NCCL; "
                "leave it out"
            )
        setattr(options.config, field, value)
