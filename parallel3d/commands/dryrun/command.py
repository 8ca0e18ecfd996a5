"""`parallel3d dryrun`: memory, kernels and traffic of a step of this configuration, without a GPU.

The trainer runs on tensors without values, as one rank of a world without its other ranks, and its
allocations, launches and collectives are counted.
"""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Iterator, Sequence
from statistics import fmean
from typing import Any, NamedTuple, TextIO

from rich.console import Console
from rich.table import Table
from rich.text import Text

from parallel3d.config.checks.whole import check_config
from parallel3d.config.schema import ClusterConfig, Config
from parallel3d.errors import UserError
from parallel3d.estimate.balance import layout_with_loops, recompute_forwards, run_schedule
from parallel3d.estimate.ops import flops_per_token, parameter_count
from parallel3d.estimate.traffic import transfers
from parallel3d.metrics.text import percent, si, three_digits
from parallel3d.schedules.choose import measure
from parallel3d.schedules.costs import RankWork
from parallel3d.schedules.schedule import IN_ORDER
from parallel3d.topology.assumptions import check_free, chosen_keys, preset, write
from parallel3d.topology.cluster.parts import cluster_from_config
from parallel3d.topology.layout import layout_of
from parallel3d.topology.placement.search import place

MADE_BY = "parallel3d dryrun"
ASSUMED_CLUSTER = "dgx_h100"
ROW = (
    *("rank", "stage", "stages", "peak_bytes", "peak_in", "between_steps_bytes"),
    *("start_peak_bytes", "host_bytes", "launches", "flops", "seconds"),
)
SETTINGS = (
    *("zero", "vpp", "sp", "recompute"),
    *("micro_batch_size", "global_batch_size", "num_microbatches"),
)
Facts = dict[str, Any]


def dryrun(config: Config, typed: Sequence[str] | None = None) -> int:
    """Prints the report and writes the file asked for. Returns the exit code, 0.

    `typed`: the command line's overrides, i.e. the user's own choices; None counts as all chosen.
    Raises UserError for what cannot work.
    """
    wanted = config.dryrun.json
    check_free("dryrun.json", wanted, f'"made_by": "{MADE_BY}"', MADE_BY)
    config, assumed = assume_cluster(config, typed)
    facts = find_facts(config) | {"assumed": assumed}
    if wanted:
        text = json.dumps({"made_by": MADE_BY} | facts, indent=1, allow_nan=False)
        write("dryrun.json", wanted, text + "\n")
    print_report(facts, sys.stdout)
    return 0


def assume_cluster(config: Config, typed: Sequence[str] | None) -> tuple[Config, list[str]]:
    """Returns the configuration with a cluster of GPUs if none was chosen, and the assumption."""
    keys = {"cluster"} if typed is None else chosen_keys(typed)
    chosen = any(k in ("cluster", "experiment") or k.startswith("cluster.") for k in keys)
    if chosen or config.cluster.gpu is not None:
        return config, []
    cluster = ClusterConfig(**preset("cluster", ASSUMED_CLUSTER))
    return dataclasses.replace(config, cluster=cluster), [f"cluster={ASSUMED_CLUSTER}"]


def find_facts(config: Config) -> Facts:
    """Returns all of the rank with the highest peak memory, and a row of every rank that ran.

    Enables the simulated device in this process. Raises UserError for what cannot work.
    """
    config = check_config(config, own_samples=True)
    # No data is read that would say how many steps an epoch has, and two are played.
    config = dataclasses.replace(config, train=dataclasses.replace(config.train, epochs=None))
    layout, ranks = layout_of(config), _ranks(config)
    from parallel3d.commands.dryrun.counting import gpu_of  # imports torch
    from parallel3d.commands.dryrun.world import dry_step

    gpu, placement = gpu_of(config), None
    if config.ddp.hierarchical:  # the rank mapping decides the two levels of dp
        looped = layout_with_loops(config)
        cluster = cluster_from_config(config.cluster, layout.world_size)
        placement = place(config, cluster, looped, transfers(config, looped))
    rows = [dry_step(config, rank, gpu, placement) for rank in ranks]
    reserve = 1e9 * config.dryrun.reserve_gb
    for row in rows:
        row["fits"] = row["peak_bytes"] <= gpu.memory - reserve
    times = stretch(config)
    step = max(step_seconds(row, times) for row in rows)
    tokens = config.global_batch_size * config.model.seq_length
    model_flops = tokens * flops_per_token(config.model, config.model.seq_length)
    return {
        "model": config.model.name,
        "parameters": parameter_count(config.model),
        "layout": {"tp": config.tp, "pp": config.pp, "cp": config.cp, "dp": config.dp},
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


def _ranks(config: Config) -> list[int]:
    """Returns the rank asked for, or the first ranks of the first, a middle and the last stage."""
    world, pp = layout_of(config).world_size, config.pp
    rank = config.dryrun.rank
    if rank is None:
        first_pipeline = layout_of(config).groups("pp")[0]
        return [first_pipeline[stage] for stage in sorted({0, pp // 2, pp - 1})]
    if rank >= world:
        raise UserError(
            f"dryrun.rank={rank} must be below the {world} ranks of this layout; the nearest is "
            f"dryrun.rank={world - 1}."
        )
    return [rank]


def step_seconds(row: Facts, times: float) -> float:
    """Returns the seconds of a step of a pipeline of ranks like this one: compute and bubble.

    The optimizer and zeroing run once and do not repeat in the bubble. times: see `stretch`.
    """
    once = row["parts"]["optimizer"]["seconds"]
    return once + (row["seconds"] - once) * times


def stretch(config: Config) -> float:
    """Returns the time of a pipeline of equal ranks over the compute of one.

    The bubble of 1F1B and GPipe is pp - 1 micro-batches (Narayanan et al. 2021, §2.2.1); other
    schedules are simulated with `schedule.costs`, average recomputation and no message latency.
    """
    count = config.num_microbatches
    if config.schedule.name in IN_ORDER:
        return (count + config.pp - 1) / count
    forward, gradient, weight = config.schedule.costs
    again = forward * fmean(recompute_forwards(config))
    return 1 + measure(run_schedule(config), RankWork(forward, gradient + again, weight)).overhead


WIDTH = 100
GB = 1e9
SIZES = ((GB, "GB"), (1e6, "MB"), (1e3, "kB"))
WORK = ((1e12, "TFLOP"), (1e9, "GFLOP"), (1e6, "MFLOP"))
TIMES = ((1e-3, "ms"), (1e-6, "µs"))
PART_LABELS = {
    "gemm_layers": "GEMMs of the layers",
    "gemm_head": "GEMMs of the head",
    "attention": "attention",
    "blocks": "element-wise in blocks",
    "loss": "loss",
    "optimizer": "optimizer, norm, clip, zeroing, copies",
    "sharding": "FSDP2's copies of parameters and gradients",
    "other": "other",
    "communication": "communication (its time is not known)",
}


class Unit(NamedTuple):
    """Unit of a column; called with a value, it formats three digits."""

    size: float
    name: str

    def __call__(self, value: float) -> str:
        return three_digits(value / self.size)


def _unit(value: float, *units: tuple[float, str]) -> Unit:
    """Returns the first unit that leaves a number of at least one, else the last."""
    return Unit(*next((u for u in units if value >= u[0]), units[-1]))


def print_report(facts: Facts, stream: TextIO) -> None:
    """Prints the verdict, a row a rank, then memory, time and traffic of the fullest rank."""
    width = None if stream.isatty() else WIDTH
    console = Console(file=stream, width=width, highlight=False, legacy_windows=False)

    def log(line: str, style: str = "") -> None:
        console.print(Text(line, style=style))

    for line in _heading(facts):
        log(line)
    log(_verdict(facts), "bold green" if facts["fits"] else "bold red")
    log(_speed(facts))
    look: dict[str, Any] = {"title_justify": "left", "title_style": "bold", "box": None}
    for title, head, rows in _tables(facts):
        table = Table(title=title, pad_edge=False, padding=(0, 2, 0, 0), **look)
        for i, column in enumerate(head):
            table.add_column(column, justify="right" if i else "left", no_wrap=True)
        for row in rows:
            table.add_row(*row)
        console.print()
        console.print(table)
    console.print()
    if facts["offloaded"]:
        sizes = [_unit(n, *SIZES) for n in facts["offloaded"].values()]
        amounts = zip(sizes, facts["offloaded"].items(), strict=True)
        log("Offload: " + ", ".join(f"{u(n)} {u.name} by {name}" for u, (name, n) in amounts))
    log(_waits(facts))
    log("Times assume shares of the datasheet's peaks, and communication hidden: docs/dryrun.md")


def _heading(facts: Facts) -> Iterator[str]:
    sizes = " × ".join(f"{name} {n}" for name, n in facts["layout"].items() if n > 1)
    yield (
        f"{facts['model']}, {si(facts['parameters'])}parameters, on {facts['world_size']:,} × "
        f"{facts['gpu']}" + (f" ({sizes})" if sizes else "")
    )
    plain = facts["settings"]["schedule"] in IN_ORDER
    yield (
        "{global_batch_size} sequences of {seq_length} a step: micro-batches of {micro_batch_size},"
        " {num_microbatches} a replica; {precision}, zero={zero}, recompute={recompute}"
        + ("" if plain else ", schedule={schedule} vpp={vpp}")
    ).format(**facts["settings"])
    if facts["compiled"]:
        yield "compile=true is estimated: the blocks' element-wise kernels are joined between GEMMs"
    for word in facts.get("assumed", ()):
        yield f"assumed: {word}"


def _verdict(facts: Facts) -> str:
    memory, reserve = facts["gpu_memory_bytes"], facts["reserve_bytes"]
    peak, usable, memory, reserve = (
        three_digits(n / GB) for n in (facts["peak_bytes"], memory - reserve, memory, reserve)
    )
    return (
        f"It {'fits' if facts['fits'] else 'does not fit'}: {peak} GB of {usable} ({memory} less "
        f"{reserve} kept for context, NCCL and fragments)"
    )


def _speed(facts: Facts) -> str:
    bubble, time = "", _unit(facts["seconds"], *TIMES)
    if facts["layout"]["pp"] > 1:
        bubble = f", {percent(1 - facts['busy_share'])} of it the pipeline's bubble"
    return (
        f"A step takes at best {time(facts['step_seconds'])} {time.name}"
        f"{bubble}: {si(facts['tokens_per_second'])}tokens/s, MFU {percent(facts['mfu'])} of "
        f"{si(facts['peak_flops'])}FLOP/s ({facts['peak_source']})"
    )


def _waits(facts: Facts) -> str:
    count = facts["host_syncs"]
    if not count:
        return "The host never waits for the GPU"
    where = ", ".join(f"{n:.0f} × {why}" for why, n in facts["host_waits"].items())
    return f"The host waits for the GPU {count:.0f} time{'s'[: count > 1]} a step: {where}"


def _tables(facts: Facts) -> Iterator[tuple[str, list[str], list[list[str]]]]:
    """Yields (title, head, rows) of every table."""
    memory, moved = _unit(facts["peak_bytes"], *SIZES), _unit(facts["bytes"], *SIZES)
    work, time = _unit(facts["flops"], *WORK), _unit(facts["seconds"], *TIMES)
    total = facts["seconds"] or 1.0
    if len(facts["rows"]) > 1:
        head = ["stage", "rank", f"peak {memory.name}", "peaks in", f"start {memory.name}"]
        yield (
            "Ranks",
            [*head, work.name, time.name, "fits"],
            [
                [
                    *(", ".join(map(str, row["stages"])), str(row["rank"])),
                    *(memory(row["peak_bytes"]), row["peak_in"], memory(row["start_peak_bytes"])),
                    *(work(row["flops"]), time(row["seconds"]), "yes" if row["fits"] else "no"),
                ]
                for row in facts["rows"]
            ],
        )
    kinds = {kind: (facts[f"{kind}_bytes"], live) for kind, live in facts["live_bytes"].items()}
    kinds["all"] = facts["peak_bytes"], facts["between_steps_bytes"]
    yield (
        f"Memory of rank {facts['rank']}, which peaks in: {facts['peak_in']}",
        ["", f"{memory.name} at the peak", f"{memory.name} between steps"],
        [[kind, memory(peak), memory(live)] for kind, (peak, live) in kinds.items() if peak or live]
        + [["most while the trainer is built", memory(facts["start_peak_bytes"]), ""]]
        + [["pinned host memory", memory(n), memory(n)] for n in [facts["host_bytes"]] if n],
    )
    rows = []
    for name, label in PART_LABELS.items():
        part = facts["parts"][name]
        if not part["launches"]:
            continue
        row = [label, f"{part['launches']:,.0f}", moved(part["bytes"]), "", "", ""]
        if name != "communication":
            row[3] = work(part["flops"]) if part["flops"] else ""
            row[4:] = time(part["seconds"]), percent(part["seconds"] / total)
        rows.append(row)
    sums = f"{facts['launches']:,.0f}", moved(facts["bytes"]), work(facts["flops"])
    rows.append(["all", *sums, time(facts["seconds"]), ""])
    head = ["", "launches", f"{moved.name} moved", work.name, time.name, "share"]
    yield f"A step of rank {facts['rank']}", head, rows
    if facts["groups"]:
        yield (
            "Communication",
            ["group", "calls", f"{moved.name} sent"],
            [
                [name, f"{group['calls']:,.0f}", moved(group["bytes_sent"])]
                for name, group in facts["groups"].items()
            ],
        )
