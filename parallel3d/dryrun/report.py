"""The facts of a dry run as a page of text; colours on a terminal alone."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, TextIO

from rich.console import Console
from rich.table import Table
from rich.text import Text

from parallel3d.dryrun.memory import KINDS
from parallel3d.metrics.text import encodable, percent, si, three_digits

Facts = dict[str, Any]
WIDTH = 100
GB, MS, TERA = 1e9, 1e-3, 1e12
PARTS = {
    "gemm_layers": "GEMMs of the layers",
    "gemm_head": "GEMMs of the head",
    "attention": "attention",
    "blocks": "element-wise in blocks",
    "loss": "loss",
    "optimizer": "optimizer, norm, clip, zeroing, copies",
    "other": "other",
    "communication": "communication (no time here)",
}


def print_report(facts: Facts, stream: TextIO) -> None:
    """Rank for rank, then memory, time and communication of the fullest one, then the verdict."""
    width = None if stream.isatty() else WIDTH
    console = Console(file=stream, width=width, highlight=False, legacy_windows=False)
    encoding = console.encoding
    for line in _heading(facts):
        console.print(Text(encodable(line, encoding)))
    style = "bold green" if facts["fits"] else "bold red"
    console.print(Text(encodable(_verdict(facts), encoding), style=style))
    console.print(Text(encodable(_speed(facts), encoding)))
    tables = [_memory(facts), _time(facts)]
    tables += [_groups(facts)] if facts["groups"] else []
    if len(facts["rows"]) > 1:
        tables.insert(0, _ranks(facts))
    for table in tables:
        console.print()
        console.print(table)
    console.print()
    for line in _ending(facts):
        console.print(Text(encodable(line, encoding)))


def _heading(facts: Facts) -> Iterator[str]:
    sizes = " × ".join(f"{name} {n}" for name, n in facts["layout"].items() if n > 1)
    world = facts["world_size"]
    settings = facts["settings"]
    yield (
        f"{facts['model']}, {si(facts['parameters'])}parameters, on {world:,} × {facts['gpu']}"
        + (f" ({sizes})" if sizes else "")
    )
    micro, count = settings["micro_batch_size"], settings["num_microbatches"]
    sequences, length = settings["global_batch_size"], settings["seq_length"]
    yield (
        f"{sequences} sequences of {length} a step: micro-batches of {micro}, {count} a replica; "
        f"{settings['precision']}, zero={settings['zero']}, recompute={settings['recompute']}"
    )
    if facts["compiled"]:
        yield "compile=true: an estimate, of blocks whose element-wise kernels are joined"
    for word in facts.get("assumed", ()):
        yield f"assumed: {word}"


def _table(title: str, *columns: str) -> Table:
    table = Table(
        title=title, title_justify="left", title_style="bold", box=None, pad_edge=False,
        padding=(0, 2, 0, 0),
    )  # fmt: skip
    for i, column in enumerate(columns):
        table.add_column(column, justify="right" if i else "left", no_wrap=True)
    return table


def _gb(nbytes: float) -> str:
    return f"{three_digits(nbytes / GB)}"


def _ranks(facts: Facts) -> Table:
    table = _table(
        "Ranks", "stage", "rank", "peak GB", "peak in", "start GB", "TFLOP", "busy ms", "fits"
    )
    for row in facts["rows"]:
        cells = (_gb(row["peak_bytes"]), row["peak_in"], _gb(row["start_peak_bytes"]))
        speed = (three_digits(row["flops"] / TERA), three_digits(row["seconds"] / MS))
        fits = "yes" if row["fits"] else "no"
        table.add_row(str(row["stage"]), str(row["rank"]), *cells, *speed, fits)
    return table


def _memory(facts: Facts) -> Table:
    where = f"Memory of rank {facts['rank']}, which peaks in: {facts['peak_in']}"
    table = _table(where, "", "at the peak GB", "between steps GB")
    for kind in KINDS:
        at_peak, live = facts[f"{kind}_bytes"], facts["live_bytes"][kind]
        if at_peak or live:
            table.add_row(kind, _gb(at_peak), _gb(live))
    table.add_row("all", _gb(facts["peak_bytes"]), _gb(facts["between_steps_bytes"]))
    table.add_row("most while the trainer is built", _gb(facts["start_peak_bytes"]), "")
    return table


def _time(facts: Facts) -> Table:
    title = f"A step of rank {facts['rank']}"
    table = _table(title, "", "launches", "GB moved", "TFLOP", "ms", "share")
    total = facts["seconds"] or 1.0
    for name, label in PARTS.items():
        part = facts["parts"][name]
        if not part["launches"]:
            continue
        cells = (f"{part['launches']:,.0f}", _gb(part["bytes"]))
        if name == "communication":
            table.add_row(label, *cells, "", "", "")
            continue
        flops = three_digits(part["flops"] / TERA) if part["flops"] else ""
        share = percent(part["seconds"] / total)
        table.add_row(label, *cells, flops, three_digits(part["seconds"] / MS), share)
    sums = (f"{facts['launches']:,.0f}", _gb(facts["bytes"]), three_digits(facts["flops"] / TERA))
    table.add_row("all", *sums, three_digits(facts["seconds"] / MS), "")
    return table


def _groups(facts: Facts) -> Table:
    table = _table("Communication", "group", "calls", "GB sent")
    for name, group in facts["groups"].items():
        table.add_row(name, f"{group['calls']:,.0f}", _gb(group["bytes_sent"]))
    return table


def _ending(facts: Facts) -> Iterator[str]:
    waits = ", ".join(f"{count:.0f} × {why}" for why, count in facts["host_waits"].items())
    yield f"The host waits {facts['host_syncs']:.0f} times a step" + (f": {waits}" if waits else "")
    yield "Assumed shares of the datasheet's peaks, communication hidden: docs/dryrun.md"


def _speed(facts: Facts) -> str:
    bubble = ""
    if facts["layout"]["pp"] > 1:
        bubble = f", {percent(1 - facts['busy_share'])} of it the pipeline's bubble"
    return (
        f"A step takes at best {three_digits(facts['step_seconds'] / MS)} ms{bubble}: "
        f"{si(facts['tokens_per_second'])}tokens/s, MFU {percent(facts['mfu'])} of "
        f"{si(facts['peak_flops'])}FLOP/s ({facts['peak_source']})"
    )


def _verdict(facts: Facts) -> str:
    peak = max(row["peak_bytes"] for row in facts["rows"])
    memory, reserve = facts["gpu_memory_bytes"], facts["reserve_bytes"]
    word = "fits" if facts["fits"] else "does not fit"
    return (
        f"It {word}: {_gb(peak)} GB of {_gb(memory - reserve)} "
        f"({_gb(memory)} less {_gb(reserve)} kept for context, NCCL and fragments)"
    )
