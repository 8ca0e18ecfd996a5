"""What was counted, as plain data: the report and the JSON show this and nothing else."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from statistics import fmean
from typing import Any

from parallel3d.commands.dryrun.counting import COMMUNICATION, PARTS, Sums
from parallel3d.commands.dryrun.memory import KINDS
from parallel3d.commands.dryrun.roofline import Gpu
from parallel3d.commands.dryrun.world import Dry
from parallel3d.config.schema import Config
from parallel3d.schedules.choose import RankWork, measure
from parallel3d.schedules.schedule import IN_ORDER
from parallel3d.sizes.flops import flops_per_token, parameter_count
from parallel3d.sizes.run_schedule import run_schedule
from parallel3d.sizes.stages import forwards_again
from parallel3d.topology.layout import Layout

Facts = dict[str, Any]
ROW = (
    "rank",
    "stage",
    "stages",
    "peak_bytes",
    "peak_in",
    "between_steps_bytes",
    "start_peak_bytes",
)
ROW += ("launches", "flops", "seconds")
SETTINGS = (
    "zero",
    "vpp",
    "sp",
    "recompute",
    "micro_batch_size",
    "global_batch_size",
    "num_microbatches",
)


def facts_of(config: Config, layout: Layout, gpu: Gpu, rows: Sequence[Dry]) -> Facts:
    """Of the rank whose memory peaks highest in full, of the others a row each."""
    worst = max(rows, key=lambda row: row.peak)
    usable = gpu.memory - 1e9 * config.dryrun.reserve_gb
    busy = max(row.counts.sum("seconds") for row in rows)
    times = stretch(config)
    step = max(step_seconds(row, times) for row in rows)
    tokens = config.global_batch_size * config.model.seq_length
    model_flops = tokens * flops_per_token(config.model, config.model.seq_length)
    return {
        "model": config.model.name,
        "parameters": parameter_count(config.model),
        "layout": {"tp": config.tp, "pp": config.pp, "cp": config.cp, "dp": config.dp},
        "world_size": layout.world_size,
        "settings": _settings(config),
        "compiled": config.compile,
        "gpu": gpu.name,
        "gpu_memory_bytes": gpu.memory,
        "reserve_bytes": 1e9 * config.dryrun.reserve_gb,
        "peak_flops": gpu.peak.flops,
        "peak_source": gpu.peak.source,
        **_of_rank(worst),
        "fits": max(row.peak for row in rows) <= usable,
        "step_seconds": step,
        "busy_share": busy / step if step else 0.0,
        "tokens": tokens,
        "tokens_per_second": tokens / step if step else 0.0,
        "mfu": model_flops / (layout.world_size * step * gpu.peak.flops) if step else 0.0,
        "rows": [_row(row, usable) for row in rows],
    }


def step_seconds(row: Dry, times: float) -> float:
    """A step of a pipeline of ranks like this one, with nothing to wait for but its bubble.

    What a step does once, its optimizer and zeroing, does not repeat in the bubble. times: see
    `stretch`.
    """
    once = row.counts.parts.get("optimizer", Sums()).seconds
    return once + (row.counts.sum("seconds") - once) * times


def stretch(config: Config) -> float:
    """How many times longer than its ranks compute a pipeline of equal ranks takes.

    The bubble of 1F1B is pp - 1 micro-batches (Narayanan et al. 2021, §2.2.1), and so is GPipe's;
    others are timed with `schedule.costs`, what an average rank computes again beside them, and
    messages that take no time.
    """
    count = config.num_microbatches
    if config.schedule.name in IN_ORDER:
        return (count + config.pp - 1) / count
    forward, gradient, weight = config.schedule.costs
    again = forward * fmean(forwards_again(config))
    return 1 + measure(run_schedule(config), RankWork(forward, gradient + again, weight)).overhead


def _settings(config: Config) -> dict[str, Any]:
    return {
        "precision": config.precision.name,
        **{name: getattr(config, name) for name in SETTINGS},
        "seq_length": config.model.seq_length,
        "schedule": config.schedule.name,
        "optimizer": config.optim.name,
    }


def _of_rank(row: Dry) -> Facts:
    counts = row.counts
    parts = {name: asdict(counts.parts.get(name, Sums())) for name in (*PARTS, COMMUNICATION)}
    return {
        "rank": row.rank,
        "stage": row.stage,
        "stages": row.stages,
        **{f"{kind}_bytes": row.at_peak[kind] for kind in KINDS},
        "peak_bytes": row.peak,
        "peak_in": row.peak_phase,
        "live_bytes": {kind: row.live[kind] for kind in KINDS},
        "between_steps_bytes": sum(row.live.values()),
        "start_peak_bytes": row.start_peak,
        "launches": counts.sum("launches"),
        "bytes": counts.sum("bytes") - parts[COMMUNICATION]["bytes"],
        "flops": counts.sum("flops"),
        "seconds": counts.sum("seconds"),
        "host_syncs": sum(counts.waits.values()),
        "host_waits": dict(counts.waits),
        "groups": {
            kind: {"bytes_sent": counts.sent[kind], "calls": counts.calls[kind]}
            for kind in counts.calls
        },
        "parts": parts,
    }


def _row(row: Dry, usable: float) -> Facts:
    facts = _of_rank(row)
    return {name: facts[name] for name in ROW} | {"fits": row.peak <= usable}
