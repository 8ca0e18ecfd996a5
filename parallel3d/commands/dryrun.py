"""Reports memory, kernels and traffic of a step without a GPU (`parallel3d dryrun`).

The trainer runs as one rank of a world whose other ranks do not exist, with tensors that have no
values. Its allocations, kernel launches and collectives are counted.
"""

from __future__ import annotations

import dataclasses
import json
import os
import sys
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, TextIO

from rich.console import Console
from rich.table import Table
from rich.text import Text

from parallel3d.blueprint.keys import ClusterConfig
from parallel3d.commands.dry_ranks import find_facts
from parallel3d.commands.options import CommandConfig
from parallel3d.config.user_files import check_free, write
from parallel3d.schedules.schedule import IN_ORDER
from parallel3d.text import byte_text, percent, si, three_digits
from parallel3d.topology.assumptions import chosen_keys, preset
from parallel3d.topology.cluster.discover import run_command, with_own_gpus

if TYPE_CHECKING:
    from parallel3d.dryrun.facts import Facts
    from parallel3d.loop.own_parts import OwnParts

MADE_BY = "parallel3d dryrun"
ASSUMED_CLUSTER = "dgx_h100"


def dryrun(
    config: CommandConfig, typed: Sequence[str] | None = None, own: OwnParts | None = None
) -> int:
    """Prints the report and writes the requested file. Returns the exit code, 0.

    `typed` lists the command-line overrides, whose keys count as chosen by the user. If it is None,
    the cluster counts as chosen. `own`: the parts of a script, or None without a script. Raises
    UserError for an impossible configuration.
    """
    wanted, options = config.dryrun.json, config.dryrun
    check_free("dryrun.json", wanted, f'"made_by": "{MADE_BY}"', MADE_BY)
    here = with_own_gpus(config.cluster, os.environ, run_command)
    cluster, assumed = assumed_cluster(here, typed)
    config = dataclasses.replace(config, cluster=cluster)
    if own is not None:
        from parallel3d.loop.own_parts import with_example  # imports torch

        config = with_example(config, own)
    optimizer = None if own is None else own.optimizer
    facts = find_facts(config, options.rank, options.reserve_gb, optimizer) | {"assumed": assumed}
    if wanted:
        text = json.dumps({"made_by": MADE_BY} | facts, indent=1, allow_nan=False)
        write("dryrun.json", wanted, text + "\n")
    print_report(facts, sys.stdout)
    return 0


def assumed_cluster(
    own: ClusterConfig, typed: Sequence[str] | None
) -> tuple[ClusterConfig, list[str]]:
    """Returns the cluster to use, and the overrides that were assumed for it.

    ASSUMED_CLUSTER replaces `own` if `own` has no known GPU and the user chose no cluster. `typed`
    lists the command-line overrides. If it is None, the cluster counts as chosen.
    """
    keys = {"cluster"} if typed is None else chosen_keys(typed)
    chosen = any(k in ("cluster", "experiment") or k.startswith("cluster.") for k in keys)
    if chosen or own.gpu is not None:
        return own, []
    return ClusterConfig(**preset("cluster", ASSUMED_CLUSTER)), [f"cluster={ASSUMED_CLUSTER}"]


WIDTH = 100
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
    "all": "all",
}
Row = tuple[str, ...]


def _ms(seconds: float) -> str:
    return f"{three_digits(1e3 * seconds)} ms"


def print_report(facts: Facts, stream: TextIO) -> None:
    """Prints whether the model fits, a row per rank, and details of the rank with the highest peak.

    The details are the memory, time and traffic of a step.
    """
    width = None if stream.isatty() else WIDTH
    console = Console(file=stream, width=width, highlight=False, legacy_windows=False)
    for line in _heading(facts):
        console.print(Text(line))
    peak, whole, kept = (facts[f"{n}_bytes"] for n in ("peak", "gpu_memory", "reserve"))
    said = (
        f"It {'fits' if facts['fits'] else 'does not fit'}: {byte_text(peak)} of "
        f"{byte_text(whole - kept)} ({byte_text(whole)} less {byte_text(kept)} kept for context, "
        "NCCL and fragments)"
    )
    console.print(Text(said, style="bold green" if facts["fits"] else "bold red"))
    bubble = ""
    if facts["layout"]["pp"] > 1:
        bubble = f", {percent(1 - facts['busy_share'])} of it the pipeline's bubble"
    said = (
        f"A step takes at best {_ms(facts['step_seconds'])}{bubble}: "
        f"{si(facts['tokens_per_second'])}tokens/s, MFU {percent(facts['mfu'])} of "
        f"{si(facts['peak_flops'])}FLOP/s ({facts['peak_source']})"
    )
    console.print(Text(said))
    for title, head, rows in _tables(facts):
        table = Table(
            title=title,
            title_justify="left",
            title_style="bold",
            box=None,
            pad_edge=False,
            padding=(0, 2, 0, 0),
        )
        for i, column in enumerate(head):
            table.add_column(column, justify="right" if i else "left", no_wrap=True)
        for row in rows:
            table.add_row(*row)
        console.print()
        console.print(table)
    console.print()
    for line in _notes(facts):
        console.print(Text(line))


def _heading(facts: Facts) -> Iterator[str]:
    sizes = " × ".join(f"{name} {n}" for name, n in facts["layout"].items() if n > 1)
    total, active = facts["parameters"], facts["active_parameters"]
    used = f" ({si(active).strip()} active)" if active < total else ""
    yield (
        f"{facts['model']}, {si(total)}parameters{used}, on {facts['world_size']:,} × "
        f"{facts['gpu']}" + (f" ({sizes})" if sizes else "")
    )
    plain = facts["settings"]["schedule"] in IN_ORDER
    yield (
        "{global_batch_size} sequences of {seq_length} a step: micro-batches of {micro_batch_size},"
        " {num_microbatches} per replica; {precision}, zero={zero}, recompute={recompute}"
        + ("" if plain else ", schedule={schedule} vpp={vpp}")
    ).format(**facts["settings"])
    if facts["compiled"]:
        yield "compile=true counts as eager: TorchInductor's kernels are not known"
    for word in facts.get("assumed", ()):
        yield f"assumed: {word}"


def _notes(facts: Facts) -> Iterator[str]:
    if facts["offloaded"]:
        amounts = (f"{byte_text(n)} by {name}" for name, n in facts["offloaded"].items())
        yield f"Offload: {', '.join(amounts)}"
    if count := facts["host_syncs"]:
        where = ", ".join(f"{n:.0f} × {why}" for why, n in facts["host_waits"].items())
        times = "times" if count > 1 else "time"
        yield f"The host waits for the GPU {count:.0f} {times} a step: {where}"
    else:
        yield "The host never waits for the GPU"
    yield "Times assume shares of the datasheet's peaks and hidden communication (docs/dryrun.md)"


def _tables(facts: Facts) -> Iterator[tuple[str, Row, list[Row]]]:
    """Yields the title, the headings and the rows of every table."""
    rows: list[Row]
    if len(facts["rows"]) > 1:
        rows = [
            (
                *(", ".join(map(str, row["stages"])), str(row["rank"])),
                *(byte_text(row["peak_bytes"]), row["peak_in"], byte_text(row["start_peak_bytes"])),
                *(f"{si(row['flops'])}FLOP", _ms(row["seconds"]), "yes" if row["fits"] else "no"),
            )
            for row in facts["rows"]
        ]
        head: Row = ("stage", "rank", "peak", "peaks in", "start", "work", "time", "fits")
        yield "Ranks", head, rows
    kinds = {kind: (facts[f"{kind}_bytes"], live) for kind, live in facts["live_bytes"].items()}
    kinds["all"] = facts["peak_bytes"], facts["between_steps_bytes"]
    host = facts["host_bytes"]
    rows = [(kind, *map(byte_text, both)) for kind, both in kinds.items() if any(both)]
    rows += [("most while the trainer is built", byte_text(facts["start_peak_bytes"]), "")]
    if host:
        rows += [("pinned host memory", byte_text(host), byte_text(host))]
    title = f"Memory of rank {facts['rank']}, which peaks in: {facts['peak_in']}"
    yield title, ("", "at the peak", "between steps"), rows
    rows = []
    parts = facts["parts"] | {"all": {what: facts[what] for what in ("launches", "bytes", "flops")}}
    for name, label in PART_LABELS.items():
        part = parts[name]
        if part["launches"]:
            work = f"{si(part['flops'])}FLOP" if part["flops"] else ""
            time = part.get("seconds", facts["seconds"])
            share = percent(time / (facts["seconds"] or 1.0))
            timed = ("", "") if name == "communication" else (_ms(time), share)
            rows.append((label, f"{part['launches']:,.0f}", byte_text(part["bytes"]), work, *timed))
    head = ("", "launches", "moved", "work", "time", "share")
    yield f"A step of rank {facts['rank']}", head, rows
    if facts["groups"]:
        rows = [
            (name, f"{group['calls']:,.0f}", byte_text(group["bytes_sent"]))
            for name, group in facts["groups"].items()
        ]
        yield "Communication", ("group", "calls", "sent"), rows
