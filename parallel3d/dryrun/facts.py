"""Makes dry runs of a configuration's ranks, and collects the facts about a step.

This module does not use the planner, whose bounds it verifies. Its caller therefore has to resolve
context_parallel.style=auto.
"""

from __future__ import annotations

from statistics import fmean
from typing import TYPE_CHECKING, Any

from parallel3d.blueprint.blueprint import Blueprint
from parallel3d.blueprint.parameters import (
    active_parameter_count,
    parameter_count,
    trained_shares,
)
from parallel3d.blueprint.rank_mapping import RankMapping
from parallel3d.dryrun.counting import dry_step, gpu_of
from parallel3d.models.flops import flops_per_token
from parallel3d.resolve import blueprint_of, layout_of
from parallel3d.run_config import Config
from parallel3d.schedules.choose import measure
from parallel3d.schedules.schedule import IN_ORDER
from parallel3d.schedules.walk import RankWork

if TYPE_CHECKING:
    from parallel3d.optim.own import OptimizerFactory

ROW = (
    *("rank", "stage", "stages", "peak_bytes", "peak_in", "between_steps_bytes"),
    *("start_peak_bytes", "host_bytes", "launches", "flops", "seconds"),
)
SETTINGS = (
    *("zero", "vpp", "sp", "recompute"),
    *("micro_batch_size", "global_batch_size", "num_microbatches"),
)
Facts = dict[str, Any]


def facts_of(
    config: Config,
    ranks: list[int],
    placement: RankMapping | None,
    reserve_gb: float,
    optimizer: OptimizerFactory | None = None,
) -> Facts:
    """Returns all facts about the rank with the highest memory peak, and a row for each rank.

    The call enables the simulated device in this process. Raises UserError for an unknown GPU.

    Args:
        config: a checked configuration in which context_parallel.style is not auto.
        ranks: the ranks to run.
        placement: the rank mapping if the dp groups have two levels, or else None.
        reserve_gb: GPU memory that must stay free, in 1e9 bytes.
        optimizer: makes the optimizer with `optim.name=own`.
    """
    gpu = gpu_of(config.cluster, config.precision.name, config.launch.peak_tflops)
    layout = layout_of(config)
    rows = [dry_step(config, rank, gpu, placement, optimizer=optimizer) for rank in ranks]
    reserve = 1e9 * reserve_gb
    for row in rows:
        row["fits"] = row["peak_bytes"] <= gpu.memory - reserve
    times = stretch(blueprint_of(config))
    step = max(step_seconds(row, times) for row in rows)
    tokens = config.global_batch_size * config.model.seq_length
    model, shares = config.model, trained_shares(config.model, config.optim)
    model_flops = tokens * flops_per_token(model, model.seq_length, shares)
    return {
        "model": config.model.name,
        "parameters": parameter_count(config.model),
        "active_parameters": active_parameter_count(config.model),
        "layout": {d: getattr(config, d) for d in ("tp", "pp", "cp", "dp", "ep")},
        "world_size": layout.world_size,
        "settings": {
            "precision": config.precision.name,
            **{name: getattr(config, name) for name in SETTINGS},
            "seq_length": config.model.seq_length,
            "schedule": config.schedule.name,
            "optimizer": config.optim.name,
        },
        "compiled": config.compile,
        "gpu": gpu.name,
        "gpu_memory_bytes": gpu.memory,
        "reserve_bytes": reserve,
        "peak_flops": gpu.peak.flops,
        "peak_source": gpu.peak.source,
        **max(rows, key=lambda row: row["peak_bytes"]),
        "fits": all(row["fits"] for row in rows),
        "step_seconds": step,
        "busy_share": max(row["seconds"] for row in rows) / step if step else 0.0,
        "tokens": tokens,
        "tokens_per_second": tokens / step if step else 0.0,
        "mfu": model_flops / (layout.world_size * step * gpu.peak.flops) if step else 0.0,
        "rows": [{name: row[name] for name in (*ROW, "fits")} for row in rows],
    }


def step_seconds(row: Facts, times: float) -> float:
    """Returns the seconds of a step, with its bubble, if all pipeline ranks take as long as this.

    The optimizer and the zeroing of gradients run once per step, so the bubble does not stretch
    them. `times` is the result of `stretch`.
    """
    once = row["parts"]["optimizer"]["seconds"]
    return once + (row["seconds"] - once) * times


def stretch(blueprint: Blueprint) -> float:
    """Returns the time of a pipeline of equal ranks, divided by the compute time of one rank.

    The bubble of 1F1B and GPipe is pp - 1 micro-batches (Narayanan et al. 2021, §2.2.1). Other
    schedules are simulated with `schedule.costs`, the mean recomputation of all stages, and
    messages that take no time.
    """
    pipeline, count = blueprint.pipeline, blueprint.microbatches
    if pipeline.name in IN_ORDER:
        return (count + pipeline.ranks - 1) / count
    costs = pipeline.work
    again = costs.forward * fmean(blueprint.recompute_forwards())
    work = RankWork(costs.forward, costs.input + again, costs.weight)
    return 1 + measure(pipeline.schedule(), work).overhead
