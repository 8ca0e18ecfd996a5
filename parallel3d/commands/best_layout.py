"""Chooses layout=auto: the best layout of the launcher's ranks, or of this host's.

Imports no torch. Under torchrun and srun each rank reads the same file, so all choose the same.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace

from parallel3d.commands.plan import check_divides, fits_nowhere, held, searched
from parallel3d.config.checks.whole import check_config
from parallel3d.config.fields import check_fields
from parallel3d.config.schema import Config
from parallel3d.errors import UserError, print_line
from parallel3d.estimate.profiled_cost import check_device, configure, read
from parallel3d.estimate.search import Priced, reason
from parallel3d.host.devices import CPU, choose_device, device_name, gpu_count
from parallel3d.host.memory import cores
from parallel3d.run.launch import RankAssignment
from parallel3d.schedules.schedule import NAMED_SCHEDULES
from parallel3d.topology.assumptions import chosen_keys


def take_layout(config: Config, overrides: Sequence[str], place: RankAssignment | None) -> Config:
    """Returns the configuration with the best layout of the launcher's ranks, or of this host's.

    Rank 0 logs the layout and the reason. Raises UserError if the machine's speed is unknown, if no
    layout divides the batch, or if none fits.
    """
    check_fields(config)
    keys = chosen_keys(overrides)
    ranks = place.world_size if place else config.launch.ranks or _ranks_here(config, keys)
    config = replace(config, layout="given", launch=replace(config.launch, ranks=None))
    here = place.local_world_size if place else ranks
    kind = choose_device(config.device, here, one_gpu_each=place is not None).kind
    _check_known(config, kind, several=here < ranks)
    fixed = held(config, keys)
    _check_held(fixed, ranks)
    priced, sizes = searched(config, fixed, ranks)
    if not priced.order:
        raise UserError(fits_nowhere(config, sizes, priced, fixed, 1))
    best, found = _first_allowed(config, keys, priced, ranks)
    if place is None or place.rank == 0:
        print_line(f"layout=auto: {_summary(priced, best, ranks, keys)}")
    return found


def _ranks_here(config: Config, keys: set[str]) -> int:
    """Returns as many ranks as this host has GPUs or cores, in multiples of the typed sizes."""
    least = 1
    for key in ("tp", "pp", "dp"):
        least *= (getattr(config, key) or 1) if key in keys else 1
    kind = choose_device(config.device, 1).kind
    most = cores() if kind == CPU else gpu_count()
    return least * max(1, most // least)


def _check_known(config: Config, kind: str, several: bool) -> None:
    """Raises UserError unless `cluster` describes the devices of the ranks; `several` hosts."""
    file = config.cluster.file
    if file is not None:
        machine = read(file)
        # This rank may be bound to some of the host's cores.
        whole = os.cpu_count() == machine.made.count
        count = machine.made.count if whole else cores()
        check_device(machine, file, kind, device_name(kind), count)
        if several:
            raise UserError(
                f"cluster={file} must be of all hosts, and no network was measured in it: "
                "layout=auto works with it on one host; the nearest is a cluster with a GPU, as "
                "in cluster=dgx_h100"
            )
    elif kind == CPU:
        raise UserError(
            f"layout=auto needs to know how fast this machine is: cluster={config.cluster.name} "
            "must be a file of parallel3d calibrate; the nearest is cluster=calibrated.yaml, which "
            "parallel3d calibrate makes here"
        )


def _check_held(fixed: dict[str, int | str], ranks: int) -> None:
    """Raises UserError for typed values that no layout of so many ranks has."""
    name = fixed.get("schedule", "1f1b")
    if name not in NAMED_SCHEDULES:
        raise UserError(
            f"schedule={name} must be one of {', '.join(NAMED_SCHEDULES)} with layout=auto, "
            "which chooses among them where none is typed; the nearest is schedule=1f1b"
        )
    check_divides(fixed, ranks, "ranks of layout=auto")


def _first_allowed(
    config: Config, keys: set[str], priced: Priced, ranks: int
) -> tuple[int, Config]:
    """Returns the best layout that passes the run's checks. Raises the best one's UserError."""
    refused: UserError | None = None
    for i in priced.order:
        found = configure(config, priced.choices[i])
        found = replace(
            found, **{key: getattr(config, key) for key in ("zero", "vpp") if key in keys}
        )
        if "sp" not in keys and config.cluster.file is None:
            found = replace(found, sp=found.tp > 1)  # as it was priced
        try:
            return i, check_config(found, ranks)
        except UserError as error:
            refused = refused or error
    raise refused or UserError(f"no layout of {ranks} ranks can run")


def _summary(priced: Priced, best: int, ranks: int, keys: set[str]) -> str:
    """Returns one line with the chosen layout, its price, and the runner-up."""
    c = priced.choices[best]
    words = [f"tp={c.tp} pp={c.pp} dp={c.dp} micro_batch_size={c.micro_batch}"]
    words += [f"schedule={c.schedule}"] * (c.pp > 1) + [f"vpp={c.vpp}"] * (c.vpp > 1)
    words += [f"zero={c.zero}"] * (c.zero > 0)
    words += [f"recompute={c.recompute}"] * (c.recompute != "none")
    line = f"{' '.join(words)} of {len(priced.order)} layouts that fit {ranks} ranks, "
    line += f"{float(priced.seconds[best]):.3g} s a step; {reason(priced, best, best, ranks)}"
    other = next((i for i in priced.order if _shape(priced, i) != _shape(priced, best)), None)
    if other is not None:
        o = priced.choices[other]
        why = reason(priced, other, best, ranks)
        line += f"; next tp={o.tp} pp={o.pp} dp={o.dp}: {why}"
    return line


def _shape(priced: Priced, index: int) -> tuple[int, int]:
    choice = priced.choices[index]
    return choice.tp, choice.pp
