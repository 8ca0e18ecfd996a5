"""Checks the number of ranks, NCCL settings and `layout`."""

from __future__ import annotations

from parallel3d.blueprint.keys import ClusterConfig
from parallel3d.config.fields import (
    fits_64_bits,
    show,
)
from parallel3d.config.nccl import GROUP_KINDS, parse_nccl_env, parse_nccl_settings
from parallel3d.errors import UserError, nearest
from parallel3d.run.keys import LaunchConfig


def data_parallel_size(world_size: int | None, *, tp: int, pp: int, cp: int, dp: int | None) -> int:
    """Returns `dp`, or derives it from the world size if `dp` is None.

    If the world size is None, `dp` is 1 unless it is given. Raises UserError if the world size is
    not the product of all dimensions.
    """
    if world_size is None:
        return dp or 1
    if type(world_size) is not int or world_size < 1 or not fits_64_bits(world_size):
        raise UserError(
            f"a world size of {show(world_size)} must be a whole number, at least 1 and of 64 "
            "bits; the nearest is 1."
        )
    replica = tp * pp * cp
    if world_size == replica * (dp or max(1, world_size // replica)):
        return world_size // replica
    factors = f"tp={tp}, pp={pp}, cp={cp}"
    if dp is None:
        wrong = f"must be a multiple of {replica}, the product of {factors}"
        fewer = max(replica, world_size // replica * replica)
    else:
        fewer = replica * dp
        wrong = f"must be {fewer}, the product of {factors} and dp={dp}"
    near = f"dp={world_size // replica} or " if dp and world_size % replica == 0 else ""
    raise UserError(f"a world size of {world_size} {wrong}; the nearest is {near}{fewer} ranks.")


def check_groups(launch: LaunchConfig, cluster: ClusterConfig) -> None:
    """Checks the NCCL settings; raises UserError for a wrong one."""
    for kind in launch.nccl_high_priority:
        if kind not in GROUP_KINDS:
            raise UserError(
                f"launch.nccl_high_priority={show(kind)} must name a kind of group, one of "
                f"{', '.join(GROUP_KINDS)}; the nearest is {nearest(kind, GROUP_KINDS) or 'dp'}."
            )
    parse_nccl_settings(launch.nccl_settings)
    parse_nccl_env(cluster.nccl_env)


def check_given(layout: str, ranks: int | None) -> None:
    """Raises UserError for layout=auto, and for launch.ranks without it.

    `parallel3d train` replaces layout=auto with the planner's layout before this check.
    """
    if layout != "given":
        raise UserError(
            f"layout={layout} only works in parallel3d train, which asks the planner; elsewhere "
            "it must be layout=given; the nearest is parallel3d plan, which lists the best layouts."
        )
    if ranks is not None:
        raise UserError(
            f"launch.ranks={ranks} must be left out without layout=auto: tp, pp and "
            f"dp say how many ranks there are; the nearest is dp={ranks}."
        )
