"""Lists the layouts with a smaller dp, in which a job that has lost nodes may go on.

The global batch stays, and so do the samples and their order: a smaller dp takes more micro-batches
per rank. Whether the model fits on fewer ranks is not asked, as ZeRO's shards grow and only a trace
with torch would tell. A start that runs out of memory counts as any other that fails.
"""

from __future__ import annotations

from collections.abc import Iterator
from operator import attrgetter
from pathlib import Path

from parallel3d.blueprint.layout import Layout
from parallel3d.blueprint.rank_mapping import Tiling
from parallel3d.config.fields import check_conflicts, show
from parallel3d.errors import UserError
from parallel3d.loop.checks import check_profile
from parallel3d.run.directory import NO_CONFIG, newest_config
from parallel3d.run_config import CONFLICTS, Config, check_replicas
from parallel3d.slurm.decide import SmallerLayout
from parallel3d.text import count


def smaller_layouts(config: Config, nodes: int, tasks: int) -> tuple[SmallerLayout, ...]:
    """Returns the layouts for fewer than `nodes` nodes with `tasks` ranks each, the largest first.

    Only dp differs. A layout is listed if the run's own checks allow it.
    """
    return tuple(
        SmallerLayout(number, (f"dp={dp}",))
        for dp, number in _whole_nodes(config, nodes, tasks)
        if refusal(config, dp) is None
    )


def check_shrink(config: Config, run_dir: Path, nodes: int, tasks: int) -> None:
    """Raises UserError if a new job of so many nodes is known to have no smaller layout.

    `config` is the configuration by the words of the job alone.
    """
    if config.layout != "given":
        raise UserError(
            f"recovery.shrink=true needs the sizes of the layout, and layout={config.layout} "
            "chooses others for other nodes; the nearest is layout=given or recovery.shrink=false"
        )
    if not tasks:
        raise UserError(
            "recovery.shrink=true needs the same number of tasks on each node: submit with "
            "--ntasks-per-node; the nearest without it is recovery.shrink=false"
        )
    if config_of_run(config, run_dir, started=False) is None:
        return
    dp, rest = divmod(nodes * tasks, config.replica_size)
    if rest or refusal(config, dp) or smaller_layouts(config, nodes, tasks):
        return  # the ranks themselves refuse what does not work on all nodes
    largest = next((size for size, _ in _whole_nodes(config, nodes, tasks)), None)
    if largest is None:
        raise UserError(
            f"recovery.shrink=true needs a smaller dp whose ranks fill whole nodes, and dp={dp} on "
            f"{count(nodes, 'node')} has none; the nearest is recovery.shrink=false"
        )
    reason = str(refusal(config, largest)).partition("; the nearest")[0].rstrip(".")
    raise UserError(
        f"recovery.shrink=true needs a smaller dp that the other keys allow, but at dp={largest} "
        f"{reason}; the nearest is recovery.shrink=false"
    )


def config_of_run(config: Config, run_dir: Path, started: bool) -> Config | None:
    """Returns the configuration of the run's starts; None if it is not known.

    Args:
        config: that of the words of the job alone.
        started: whether a start of this job has written its own, with values of earlier jobs.
    """
    try:
        if not run_dir.is_dir():
            return config
        return newest_config(run_dir) if started else None
    except (OSError, *NO_CONFIG):
        return None


def refusal(config: Config, dp: int) -> str | None:
    """Returns why the run cannot be trained with this dp, as a sentence; None if it can."""
    of_dp = [row for row in CONFLICTS if "dp" in row.settings]
    try:
        check_conflicts(of_dp, lambda name: dp if name == "dp" else attrgetter(name)(config))
        check_replicas(config, dp)
        check_profile(config.profile, None, config.replica_size * dp)
        _check_placement(config, dp)
    except UserError as error:
        return str(error)
    return None


def _check_placement(config: Config, dp: int) -> None:
    """Raises UserError for a mapping of ranks that names others than those of this dp."""
    if config.placement in ("default", "auto"):
        return
    layout = Layout(tp=config.tp, pp=config.pp, cp=config.cp, dp=dp)
    try:
        if config.placement == "file":
            raise ValueError(f"rank_file={show(config.rank_file)} names each rank")
        Tiling.parse(config.placement, layout)
    except ValueError as error:
        raise UserError(f"placement={show(config.placement)} does not fit, as {error}") from None


def _whole_nodes(config: Config, nodes: int, tasks: int) -> Iterator[tuple[int, int]]:
    """Returns each smaller dp whose ranks fill whole nodes, and the number of these nodes."""
    for number in range(nodes - 1, 0, -1):
        dp, rest = divmod(number * tasks, config.replica_size)
        if dp and not rest:
            yield dp, number
