"""Report of a dry run: the counts as plain data, and as a page of text."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from statistics import fmean
from typing import Any, NamedTuple, TextIO

from rich.console import Console
from rich.table import Table
from rich.text import Text

from parallel3d.commands.dryrun.counting import COMMUNICATION, KINDS, PARTS, Gpu, Sums
from parallel3d.commands.dryrun.world import Dry
from parallel3d.config.schema import Config
from parallel3d.estimate.balance import recompute_forwards, run_schedule
from parallel3d.estimate.ops import flops_per_token, parameter_count
from parallel3d.metrics.text import encodable, percent, si, three_digits
from parallel3d.schedules.choose import RankWork, measure
from parallel3d.schedules.schedule import IN_ORDER
from parallel3d.topology.layout import Layout

Facts = dict[str, Any]
ROW = (
    *("rank", "stage", "stages", "peak_bytes", "peak_in", "between_steps_bytes"),
    *("start_peak_bytes", "launches", "flops", "seconds"),
)
SETTINGS = (
    *("zero", "vpp", "sp", "recompute"),
    *("micro_batch_size", "global_batch_size", "num_microbatches"),
)


def facts_of(config: Config, layout: Layout, gpu: Gpu, rows: Sequence[Dry]) -> Facts:
    """Returns all facts of the rank with the highest peak memory, and a row of every rank."""
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
    """Returns the seconds of a step of a pipeline of ranks like this one: compute and bubble.

    The optimizer and zeroing run once and do not repeat in the bubble. times: see `stretch`.
    """
    once = row.counts.parts.get("optimizer", Sums()).seconds
    return once + (row.counts.sum("seconds") - once) * times


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


WIDTH = 100
GB = 1e9
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
    """Unit of a column."""

    size: float
    name: str

    def of(self, value: float) -> str:
        return three_digits(value / self.size)


def unit(value: float, units: Sequence[tuple[float, str]]) -> Unit:
    """Returns the first unit that leaves a number of at least one, else the last."""
    return Unit(*next((u for u in units if value >= u[0]), units[-1]))


class Units(NamedTuple):
    """Units of a page."""

    memory: Unit
    moved: Unit
    flops: Unit
    seconds: Unit

    @classmethod
    def of(cls, facts: Facts) -> Units:
        sizes = ((GB, "GB"), (1e6, "MB"), (1e3, "kB"))
        work = ((1e12, "TFLOP"), (1e9, "GFLOP"), (1e6, "MFLOP"))
        return cls(
            unit(facts["peak_bytes"], sizes),
            unit(facts["bytes"], sizes),
            unit(facts["flops"], work),
            unit(facts["seconds"], ((1e-3, "ms"), (1e-6, "µs"))),
        )


def print_report(facts: Facts, stream: TextIO) -> None:
    """Prints the verdict, a row a rank, then memory, time and traffic of the fullest rank."""
    width = None if stream.isatty() else WIDTH
    console = Console(file=stream, width=width, highlight=False, legacy_windows=False)
    units = Units.of(facts)

    def log(line: str, style: str = "") -> None:
        console.print(Text(encodable(line, console.encoding), style=style))

    for line in _heading(facts):
        log(line)
    log(_verdict(facts), "bold green" if facts["fits"] else "bold red")
    log(_speed(facts, units))
    tables = [_ranks(facts, units)] if len(facts["rows"]) > 1 else []
    tables += [_memory(facts, units), _time(facts, units)]
    tables += [_groups(facts, units)] if facts["groups"] else []
    for table in tables:
        console.print()
        console.print(table)
    console.print()
    log(_waits(facts))
    log("Times assume shares of the datasheet's peaks, and communication hidden: docs/dryrun.md")


def _heading(facts: Facts) -> Iterator[str]:
    sizes = " × ".join(f"{name} {n}" for name, n in facts["layout"].items() if n > 1)
    settings = facts["settings"]
    yield (
        f"{facts['model']}, {si(facts['parameters'])}parameters, on {facts['world_size']:,} × "
        f"{facts['gpu']}" + (f" ({sizes})" if sizes else "")
    )
    micro, count = settings["micro_batch_size"], settings["num_microbatches"]
    sequences, length = settings["global_batch_size"], settings["seq_length"]
    order = ""
    if settings["schedule"] not in IN_ORDER:
        order = f", schedule={settings['schedule']} vpp={settings['vpp']}"
    yield (
        f"{sequences} sequences of {length} a step: micro-batches of {micro}, {count} a replica; "
        f"{settings['precision']}, zero={settings['zero']}, recompute={settings['recompute']}"
        f"{order}"
    )
    if facts["compiled"]:
        yield "compile=true is estimated: the blocks' element-wise kernels are joined between GEMMs"
    for word in facts.get("assumed", ()):
        yield f"assumed: {word}"


def _verdict(facts: Facts) -> str:
    peak = max(row["peak_bytes"] for row in facts["rows"])
    memory, reserve = facts["gpu_memory_bytes"], facts["reserve_bytes"]
    word = "fits" if facts["fits"] else "does not fit"
    numbers = [three_digits(n / GB) for n in (peak, memory - reserve, memory, reserve)]
    return "It {}: {} GB of {} ({} less {} kept for context, NCCL and fragments)".format(
        word, *numbers
    )


def _speed(facts: Facts, units: Units) -> str:
    bubble = ""
    if facts["layout"]["pp"] > 1:
        bubble = f", {percent(1 - facts['busy_share'])} of it the pipeline's bubble"
    return (
        f"A step takes at best {units.seconds.of(facts['step_seconds'])} {units.seconds.name}"
        f"{bubble}: {si(facts['tokens_per_second'])}tokens/s, MFU {percent(facts['mfu'])} of "
        f"{si(facts['peak_flops'])}FLOP/s ({facts['peak_source']})"
    )


def _table(title: str, *columns: str) -> Table:
    table = Table(
        title=title,
        title_justify="left",
        title_style="bold",
        box=None,
        pad_edge=False,
        padding=(0, 2, 0, 0),
    )
    for i, column in enumerate(columns):
        table.add_column(column, justify="right" if i else "left", no_wrap=True)
    return table


def _ranks(facts: Facts, units: Units) -> Table:
    memory, work, time = units.memory, units.flops, units.seconds
    names = ("stage", "rank", f"peak {memory.name}", "peaks in", f"start {memory.name}")
    table = _table("Ranks", *names, work.name, time.name, "fits")
    for row in facts["rows"]:
        table.add_row(
            ", ".join(map(str, row["stages"])),
            str(row["rank"]),
            memory.of(row["peak_bytes"]),
            row["peak_in"],
            memory.of(row["start_peak_bytes"]),
            work.of(row["flops"]),
            time.of(row["seconds"]),
            "yes" if row["fits"] else "no",
        )
    return table


def _memory(facts: Facts, units: Units) -> Table:
    name, of = units.memory.name, units.memory.of
    where = f"Memory of rank {facts['rank']}, which peaks in: {facts['peak_in']}"
    table = _table(where, "", f"{name} at the peak", f"{name} between steps")
    for kind in KINDS:
        at_peak, live = facts[f"{kind}_bytes"], facts["live_bytes"][kind]
        if at_peak or live:
            table.add_row(kind, of(at_peak), of(live))
    table.add_row("all", of(facts["peak_bytes"]), of(facts["between_steps_bytes"]))
    table.add_row("most while the trainer is built", of(facts["start_peak_bytes"]), "")
    return table


def _time(facts: Facts, units: Units) -> Table:
    moved, work, time = units.moved, units.flops, units.seconds
    title = f"A step of rank {facts['rank']}"
    table = _table(title, "", "launches", f"{moved.name} moved", work.name, time.name, "share")
    total = facts["seconds"] or 1.0
    for name, label in PART_LABELS.items():
        part = facts["parts"][name]
        if not part["launches"]:
            continue
        cells = (f"{part['launches']:,.0f}", moved.of(part["bytes"]))
        if name == "communication":
            table.add_row(label, *cells, "", "", "")
            continue
        flops = work.of(part["flops"]) if part["flops"] else ""
        table.add_row(
            label, *cells, flops, time.of(part["seconds"]), percent(part["seconds"] / total)
        )
    sums = (f"{facts['launches']:,.0f}", moved.of(facts["bytes"]), work.of(facts["flops"]))
    table.add_row("all", *sums, time.of(facts["seconds"]), "")
    return table


def _groups(facts: Facts, units: Units) -> Table:
    table = _table("Communication", "group", "calls", f"{units.moved.name} sent")
    for name, group in facts["groups"].items():
        sent = units.moved.of(group["bytes_sent"])
        table.add_row(name, f"{group['calls']:,.0f}", sent)
    return table


def _waits(facts: Facts) -> str:
    count = facts["host_syncs"]
    if not count:
        return "The host never waits for the GPU"
    where = ", ".join(f"{n:.0f} × {why}" for why, n in facts["host_waits"].items())
    return f"The host waits for the GPU {count:.0f} time{'s'[: count > 1]} a step: {where}"
