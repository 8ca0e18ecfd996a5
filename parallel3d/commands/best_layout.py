"""Resolves layout=auto: chooses the best layout for a launcher's ranks, or for this host.

The module does not import torch. Under torchrun and srun all ranks read the same cluster file, so
that they choose the same layout.
"""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from parallel3d.blueprint.keys import ClusterConfig
from parallel3d.blueprint.layout import DIMENSIONS
from parallel3d.calibrate.record import check_device, read
from parallel3d.commands.plan import (
    Plan,
    held,
    searched,
    typed_keys,
    with_own_parts,
    without_overlap,
)
from parallel3d.config.fields import check_fields
from parallel3d.errors import UserError, print_line
from parallel3d.estimate.search import best, configure, reason
from parallel3d.host.devices import CPU, choose_device, device_name
from parallel3d.host.quotas import available_cores, cores
from parallel3d.models.survey import OwnModelConfig
from parallel3d.run.launcher_environment import RankAssignment
from parallel3d.run_config import Config, check_config
from parallel3d.topology.assumptions import chosen_keys
from parallel3d.topology.cluster.discover import run_command, with_own_gpus
from parallel3d.trace.own_trace import traces_of
from parallel3d.trace.table import recording_process

if TYPE_CHECKING:
    from parallel3d.loop.own_parts import OwnParts


def take_layout(
    config: Config,
    overrides: Sequence[str],
    place: RankAssignment | None,
    own: OwnParts | None = None,
) -> Config:
    """Returns `config` with the best layout for a launcher's ranks, or for those of this host.

    `place` is this rank's place under a launcher, or None without a launcher, and `own` has the
    parts of a script, or is None without one. Rank 0 logs the layout and the reason for it. Raises
    UserError if the machine's speed is unknown, if no layout divides the batch, or if none fits.
    """
    check_fields(config)
    keys = chosen_keys(overrides)
    typed = math.prod(getattr(config, key) or 1 for key in DIMENSIONS if key in keys)
    ranks = place.world_size if place else config.launch.ranks or _ranks_here(config.device, typed)
    config = replace(config, layout="given", launch=replace(config.launch, ranks=None))
    here = place.local_world_size if place else ranks
    kind = choose_device(config.device, here, launched=place is not None).kind
    _check_known(config.cluster, kind, several=here < ranks)
    described = replace(config, cluster=with_own_gpus(config.cluster, os.environ, run_command))
    plan = searched(with_own_parts(described, own), held(config, keys), ranks)
    recording_process().close()
    if isinstance(config.model, OwnModelConfig):
        traces_of(config.model).close()
    first, found = _first_allowed(plan, keys)
    if place is None or place.rank == 0:
        print_line(f"layout=auto: {_summary(plan, first)}")
    return replace(found, optim=config.optim)


def _ranks_here(asked: str, least: int) -> int:
    """Returns the number of ranks for this host, which is one per GPU or core.

    The number is rounded down to a multiple of `least`, but is at least `least`. `asked` is the
    value of the key `device`.
    """
    device = choose_device(asked, 1)
    most = available_cores() if device.kind == CPU else len(device.gpus)
    return least * max(1, most // least)


def _check_known(cluster: ClusterConfig, kind: str, several: bool) -> None:
    """Raises UserError unless the cluster describes the devices of the ranks.

    Args:
        cluster: the cluster to check.
        kind: the kind of device that the ranks use.
        several: whether the ranks are on several hosts.
    """
    file = cluster.file
    if file is not None:
        machine = read(file)
        # A launcher may have bound this rank to some of the host's cores. All cores therefore
        # count, unless a quota limits all ranks together.
        bound = os.cpu_count() == machine.made.count and available_cores() == cores()
        count = machine.made.count if bound else available_cores()
        check_device(machine, file, kind, device_name(kind), count)
        if several and not machine.has_network:
            raise UserError(
                f"cluster={file} must describe all hosts, but has no measured network, so "
                "layout=auto can use it on one host only; run parallel3d calibrate with a launcher "
                "on two hosts or more, or give a cluster with GPUs, such as cluster=dgx_h100"
            )
    elif kind == CPU:
        raise UserError(
            f"layout=auto needs to know how fast this machine is: cluster={cluster.name} "
            "must be a file written by parallel3d calibrate; run it, then give "
            "cluster=calibrated.yaml"
        )
    elif cluster.gpu is None and cluster.source != "local":
        raise UserError(
            f"layout=auto needs to know the GPUs: cluster={cluster.name} names none; the "
            "nearest is cluster=local, this machine as nvidia-smi reports it"
        )


def _first_allowed(plan: Plan, keys: set[str]) -> tuple[int, Config]:
    """Returns the index and the configuration of the best layout that a run would accept.

    If a run would accept no layout, the UserError about the best one is raised.
    """
    refused: UserError | None = None
    given = {key: getattr(plan.config, key) for key in ("zero", "vpp", "sp") if key in keys}
    for i in plan.priced.order:
        found = replace(configure(plan.config, plan.priced.choices[i]), **given)
        try:
            return i, check_config(found, plan.gpus)
        except UserError as error:
            refused = refused or error
    raise refused or UserError(f"no layout of {plan.gpus} ranks can run")


def _summary(plan: Plan, first: int) -> str:
    """Returns a line about the chosen layout, its price, and the best layout with other sizes."""
    priced, choice = plan.priced, plan.priced.choices[first]
    fit = f"{len(priced.order)} layouts"
    if plan.bounded < len(priced.choices):
        fit = f"the {len(priced.order)} fastest layouts"
    keys = f"{typed_keys(choice)}{without_overlap(plan.config, choice)}"
    line = f"{keys}, chosen from {fit} that fit {plan.gpus} ranks: "
    file = plan.config.cluster.file
    guess = ", a guess since ranks share cores" if file and read(file).shares_cores else ""
    line += f"{float(priced.seconds[first]):.3g} s a step{guess}; "
    line += reason(priced, first, first, plan.gpus)
    for i in best(priced, 3):
        other = priced.choices[i]
        if other.row != choice.row:
            why = reason(priced, i, first, plan.gpus)
            cp = f" cp={other.cp}" if other.cp > 1 else ""
            ep = f" ep={other.ep}" if plan.config.model.num_experts else ""
            return line + f"; next tp={other.tp}{cp} pp={other.pp} dp={other.dp}{ep}: {why}"
    return line
