"""`parallel3d bench comm`: every collective in every group of the user's own layout, timed.

As nccl-tests does for one group: time, algorithm bandwidth and bus bandwidth over message sizes,
here beside the price of the cluster's model, with the groups of a dimension one at a time and all
at once. A probe of pairs names what is slow. Needs no data and no model.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn
from rich.progress import Progress as Bar

from parallel3d.comm.process_groups import ProcessGroups
from parallel3d.commands.bench import rows as bench_rows
from parallel3d.commands.bench.findings import Finding, Pair
from parallel3d.commands.bench.fit import Fit, MeasuredOperation, fit
from parallel3d.commands.bench.measure import Measurement, Progress
from parallel3d.commands.bench.operations import is_trainings
from parallel3d.commands.bench.probe import Exchange, exchange, probe
from parallel3d.commands.bench.table import make_console, table
from parallel3d.commands.bench.timing import MEASURING_SHARE
from parallel3d.commands.bench.where import Where
from parallel3d.config.schema import Config
from parallel3d.metrics.jsonl import write_json
from parallel3d.run.directory import CONFIG_FILE
from parallel3d.run.launch import Worker
from parallel3d.topology.cluster.parts import LinkClass


def bench_comm(config: Config, worker: Worker, send: Exchange = exchange) -> int:
    """Measures, prints and writes `bench.json`; collective. Returns 0, also when something is slow.

    `send` is how the probe exchanges a message with a rank. Raises WrongResult where a collective
    gives a wrong number.
    """
    console = make_console() if worker.rank == 0 else None
    device = torch.device(worker.device)
    worker.phase = "making process groups"
    started = time.perf_counter()
    groups = ProcessGroups.of_run(config, worker.device, worker.placement)
    where = Where.find(config, worker, groups.layout)
    sites = bench_rows.sites(groups, device, config.launch)
    rows = bench_rows.all_rows(sites, config.bench.sizes, groups.layout)
    results: list[dict] = []
    with _progress(console, worker) as progress:
        measurement = Measurement(
            rows,
            sites,
            where,
            config.bench.warmup,
            config.bench.iterations,
            MEASURING_SHARE * config.bench.budget_s - _seconds_since_start(worker),
            progress,
        )
        for dim, done in measurement.results():
            results += done
            if console:
                console.print(table(dim, done, console.width))
        worker.phase = "bench comm: probing pairs"
        findings, pairs = probe(where, groups, device, config.bench.outlier, send)
    for site in sites.values():
        if site.boxes is not None:
            site.boxes.memory.close()
    groups.close()
    if console:
        path = Path(config.bench.json) if config.bench.json else worker.run_dir / "bench.json"
        fitted = fits(results)
        seconds = time.perf_counter() - started
        write_json(path, report(config, where, results, findings, pairs, fitted, seconds))
        cut = f", {measurement.rows_cut} with fewer calls than asked" * bool(measurement.rows_cut)
        summary = f"{len(results)} rows in {seconds:.0f} s{cut}: {path}"
        for line in [*conclusions(config, where, findings, pairs, fitted, results), summary]:
            console.print(line, soft_wrap=True, highlight=False, markup=False)
    return 0


def _seconds_since_start(worker: Worker) -> float:
    """Since the command line was accepted and the run directory made, as the budget counts."""
    accepted = worker.run_dir / CONFIG_FILE
    return max(0.0, time.time() - accepted.stat().st_mtime) if accepted.exists() else 0.0


@contextmanager
def _progress(console: Console | None, worker: Worker) -> Iterator[Progress]:
    """What is told before each row: the phase of this rank, and on rank 0's terminal a bar."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    shown = console is not None and console.is_terminal
    with Bar(*columns, console=console, transient=True) if shown else nullcontext() as bar:
        task = bar.add_task("") if bar else None

        def tell(what: str, done: int, of: int) -> None:
            worker.phase = f"bench comm: {what}"
            if bar is not None:
                bar.update(task, description=what, completed=done, total=of)

        yield tell


def fits(results: list[dict]) -> dict[str, Fit]:
    """Link class → the speeds that would have priced it right.

    From what training calls, by the way that it takes, with all groups at work as in training.
    """
    samples: dict[str, dict[tuple, MeasuredOperation]] = {}
    for row in results:
        if "not_offered" in row or not is_trainings(row["dim"], row["op"], row["reduction"]):
            continue
        several = row["groups_of_the_dimension"] > 1
        if several and row["mode"] != bench_rows.TOGETHER:
            continue
        key = (row["dim"], row["op"], row["size"])
        of_class = samples.setdefault(row["link"], {})
        if row["training_path"] or key not in of_class:
            of_class[key] = MeasuredOperation(
                row["op"], row["ranks_of_a_group"], row["bytes"], row["seconds"]
            )
    found = {kind: fit(list(of_class.values())) for kind, of_class in samples.items()}
    return {kind: fitted for kind, fitted in found.items() if fitted is not None}


def conclusions(
    config: Config,
    where: Where,
    findings: list[Finding],
    pairs: dict[Pair, list[float]],
    fitted: dict[str, Fit],
    results: list[dict],
) -> list[str]:
    """What the tables come to, a sentence a line."""
    lines = [finding.sentence(where) for finding in findings]
    if len(pairs) == 1:
        lines.append("One pair of ranks: nothing to compare it with, so nothing is called slow.")
    elif not findings:
        lines.append(
            f"No rank and none of {len(pairs)} pairs is slower than {config.bench.outlier:g} "
            "times the median."
        )
    lines += [
        f"{dim} is not measured: {why}."
        for dim, why in bench_rows.dimensions(where.placement.layout)[1].items()
    ]
    refused = {row["not_offered"] for row in results if "not_offered" in row}
    lines += [f"avg is not measured: {why}." for why in refused]
    for kind, fitted_link in fitted.items():
        keys = fitted_link.overrides(LinkClass[kind.upper()], config.cluster.rail_gb_per_s)
        words = " ".join(f"{key}={value:g}" for key, value in keys.items())
        lines.append(
            f"Measured here: {words} (prices half of {fitted_link.samples} rows of training's "
            f"collectives within a factor of {fitted_link.typical_factor:.2g})"
        )
    return lines


def report(
    config: Config,
    where: Where,
    results: list[dict],
    findings: list[Finding],
    pairs: dict[Pair, list[float]],
    fitted: dict[str, Fit],
    seconds: float,
) -> dict:
    """What bench.json holds."""
    layout = where.placement.layout
    return {
        "layout": {name: layout.size(name) for name in ("tp", "pp", "dp", "cp")},
        "cluster": where.placement.cluster.name,
        "placement": where.placement.how,
        "seconds": seconds,
        "not_measured": bench_rows.dimensions(layout)[1],
        "findings": [finding.facts(where) for finding in findings],
        "fitted": {
            kind: found.overrides(LinkClass[kind.upper()], config.cluster.rail_gb_per_s)
            | {"samples": found.samples, "typical_factor": found.typical_factor}
            for kind, found in fitted.items()
        },
        "ranks": [where.facts(rank) for rank in range(layout.world_size)],
        "pairs": [
            {"ranks": list(pair), "link": where.link_class(*pair).label, "seconds": times}
            for pair, times in pairs.items()
        ],
        "rows": results,
    }
