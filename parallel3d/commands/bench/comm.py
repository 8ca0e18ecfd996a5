"""Times every collective in every group of the user's layout (`parallel3d bench comm`).

For several message sizes it reports the time, the algorithm bandwidth and the bus bandwidth (busbw)
as defined by nccl-tests, and the time that the model of the cluster predicts (the price). The
groups of a dimension are measured one at a time and all at once. A probe of pairs finds slow ranks
and wires. Neither a data set nor a model to train is needed.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.box import SIMPLE
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn
from rich.progress import Progress as Bar
from rich.table import Table

from parallel3d.blueprint.cluster import Link, LinkClass
from parallel3d.build import groups_of_run
from parallel3d.checkpoint.runs import CONFIG_FILE
from parallel3d.comm.timed_operations import TimedOperation, sites
from parallel3d.commands.bench.measure import (
    ALONE,
    MEASURING_SHARE,
    TOGETHER,
    Measurement,
    Progress,
    all_rows,
    is_trainings,
)
from parallel3d.commands.options import CommandConfig
from parallel3d.estimate.network import ring_time
from parallel3d.faults.probe import Finding, Pair, probe
from parallel3d.metrics.jsonl import write_json
from parallel3d.run.cluster_view import ClusterView
from parallel3d.run.launch import Worker

PIPED = 120  # number of columns without a terminal
FULL = 116  # number of columns of the full table; a narrower one has only bus bandwidths
SHORT = {"shared memory": "shared"}


def make_console() -> Console:
    """Returns a console as wide as the terminal or, without one, wide enough for full tables."""
    console = Console()
    return console if console.is_terminal else Console(width=PIPED)


def table(dim: str, rows: list[dict], width: int) -> Table:
    """Returns the table of one dimension with the columns that fit into `width`.

    Both modes of an operation are side by side. The JSON file has all columns.
    """
    count, measured = rows[0]["groups_of_the_dimension"], rows[0]["groups_measured"]
    groups = f"{count} group{'s' if count > 1 else ''} of {rows[0]['ranks_of_a_group']}"
    some = f", {measured} of them measured alone" if measured < count else ""
    result = Table(title=f"{dim}: {groups}{some}", title_justify="left", box=SIMPLE, pad_edge=False)
    result.padding = (0, 1, 0, 0)
    modes = [mode for mode in (ALONE, TOGETHER) if any(row["mode"] == mode for row in rows)]
    full, headings = width >= FULL, ["bytes"]
    for mode in modes:
        above = f"{mode}\n" if len(modes) > 1 else ""
        headings += [f"{above}time", *(["alg\nGB/s"] if full else []), "bus\nGB/s"]
    headings += [*(["priced"] if full else []), "times\nprice"]
    for place, heading in enumerate(["collective", "path", *headings]):
        result.add_column(heading, justify="left" if place < 2 else "right", no_wrap=True)
    label = ""
    for (op, reduction, *_), by_mode in side_by_side(rows).items():
        alone, name = by_mode[ALONE], TimedOperation(op, reduction).label
        cells = [size(alone["bytes"])]
        for mode in modes:
            row = by_mode[mode]
            rates = [row["algorithm_gb_per_s"], row["bus_gb_per_s"]][0 if full else 1 :]
            cells += [duration(row["seconds"]), *(f"{r:.2g}" * (row["bytes"] > 0) for r in rates)]
        priced, times = alone["priced_s"], alone["times_the_price"]
        cells += ["no wire" if priced is None else duration(priced)] * full
        cells.append("" if times is None else f"{times:.2g}" if times < 100 else f"{times:.0f}")
        path = alone["path"] if full else SHORT.get(alone["path"], alone["path"])
        result.add_row("" if name == label else name, path, *cells)
        label = name
    return result


def side_by_side(rows: Iterable[dict]) -> dict[tuple, dict[str, dict]]:
    """Groups rows by (op, reduction, training_path, size), and within a group by mode."""
    found: dict[tuple, dict[str, dict]] = {}
    for row in rows:
        key = (row["op"], row["reduction"], row["training_path"], row["size"])
        found.setdefault(key, {})[row["mode"]] = row
    return found


def duration(seconds: float) -> str:
    """Formats a time with three digits and a unit, such as `12.3 ms`."""
    for unit, scale in (("s", 1.0), ("ms", 1e-3)):
        if seconds >= 0.9995 * scale:
            return f"{seconds / scale:.3g} {unit}"
    return f"{seconds * 1e6:.3g} µs"


def size(nbytes: int) -> str:
    """Formats a size in whole GiB, MiB or KiB, such as `4 MiB`, or else in bytes, and 0 as ""."""
    if nbytes == 0:
        return ""
    for unit, scale in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if nbytes % scale == 0:
            return f"{nbytes // scale} {unit}"
    return f"{nbytes:,}"


def bench_comm(config: CommandConfig, worker: Worker) -> int:
    """Measures, prints the results and writes `bench.json`. The call is collective.

    Returns the exit code, which is 0 even if something is slow. Raises WrongResult if a collective
    gives a wrong number.
    """
    console = make_console() if worker.rank == 0 else None
    device = torch.device(worker.device)
    worker.phase = "making process groups"
    started = time.perf_counter()
    groups = groups_of_run(config, worker.device, worker.placement)
    where = ClusterView.find(config.cluster, worker, groups.layout)
    mine = sites(groups, device, config.launch)
    rows, left_out = all_rows(mine, config.bench.sizes, groups.layout)
    results: list[dict] = []
    with _progress(console, worker) as progress:
        measurement = Measurement(
            rows,
            mine,
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
        findings, pairs = probe(where, groups, device, config.bench.outlier)
    for site in mine.values():
        site.close()
    groups.close()
    if console:
        path = Path(config.bench.json) if config.bench.json else worker.run_dir / "bench.json"
        seconds = time.perf_counter() - started
        facts = report(
            where, results, left_out, findings, pairs, seconds, config.cluster.rail_gb_per_s
        )
        write_json(path, facts)
        cut = ""
        if measurement.rows_cut:
            cut = f", {measurement.rows_cut} with fewer calls than asked"
        summary = f"{len(results)} rows in {seconds:.0f} s{cut}: {path}"
        for line in [*conclusions(facts, where, findings, config.bench.outlier), summary]:
            console.print(line, soft_wrap=True, highlight=False, markup=False)
    return 0


def _seconds_since_start(worker: Worker) -> float:
    """Returns the seconds since the command line was accepted, which count towards the budget."""
    accepted = worker.run_dir / CONFIG_FILE
    return max(0.0, time.time() - accepted.stat().st_mtime) if accepted.exists() else 0.0


@contextmanager
def _progress(console: Console | None, worker: Worker) -> Iterator[Progress]:
    """Yields a function that sets this rank's phase and, on rank 0's terminal, a progress bar."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    shown = console is not None and console.is_terminal
    with Bar(*columns, console=console, transient=True, disable=not shown) as bar:
        task = bar.add_task("")

        def tell(what: str, done: int, of: int) -> None:
            worker.phase = f"bench comm: {what}"
            bar.update(task, description=what, completed=done, total=of)

        yield tell


# The logarithms of a fitted link's latency in µs and of its ns per byte are between ±LIMIT.
LIMIT = 30.0
# The fit uses only these collectives, by which training sends nearly all of its bytes. Their price
# is a·α + b/B for a link with latency α and bandwidth B, where a and b do not depend on the link.
FITTED = ("all_reduce", "all_gather", "reduce_scatter", "send_recv")


@dataclass(frozen=True)
class MeasuredOperation:
    """One measured operation on `n` ranks.

    `nbytes` is the size of the operation as nccl-tests counts it.
    """

    op: str
    n: int
    nbytes: int
    seconds: float

    def price(self, link: Link) -> float:
        return ring_time(self.op, self.n, self.nbytes, link)


@dataclass(frozen=True)
class Fit:
    """A link that was fitted to measurements.

    Attributes:
        link: the fitted link.
        samples: the number of measurements.
        typical_factor: the median, over the samples, of the factor between price and measurement,
            at least 1.
    """

    link: Link
    samples: int
    typical_factor: float

    def overrides(self, kind: LinkClass, rail_gb_per_s: float) -> dict[str, float]:
        """Returns the link as keys of `cluster`; a spine's bandwidth becomes an oversubscription.

        `kind` is the class of the link, and `rail_gb_per_s` is the bandwidth of a rail.
        """
        speed, latency = _round(self.link.gb_per_s), _round(self.link.latency_us)
        if kind is not LinkClass.SPINE:
            return {
                f"cluster.{kind.label}_gb_per_s": speed,
                f"cluster.{kind.label}_latency_us": latency,
            }
        return {
            "cluster.oversubscription": max(1.0, _round(rail_gb_per_s / self.link.gb_per_s)),
            "cluster.spine_latency_us": latency,
        }


def fit(samples: Sequence[MeasuredOperation]) -> Fit | None:
    """Fits a link that minimizes the sum of the squared logarithms of price over measured time.

    Logarithms give prices that are too high the same weight as prices that are too low, at all
    message sizes, whereas relative differences would favour low prices. If larger messages take no
    longer, the fitted bandwidth is very high. Returns None for fewer than two message sizes.
    """
    samples = [s for s in samples if s.op in FITTED and s.nbytes > 0]
    if len({s.nbytes for s in samples}) < 2:
        return None
    # Each row has a sample's seconds per µs of latency, and per ns/byte of inverse bandwidth.
    each = np.array([[s.price(Link(1e30, 1.0)), s.price(Link(1.0, 0.0))] for s in samples])
    seconds = np.array([s.seconds for s in samples])
    found = np.log((seconds[:, None] / each).min(axis=0))
    for _ in range(200):  # the method is Gauss-Newton on both logarithms, with limited steps
        priced = each @ np.exp(found)
        slopes = each * np.exp(found) / priced[:, None]
        step = np.linalg.lstsq(slopes, np.log(seconds / priced), rcond=1e-6)[0]
        found = (found + step.clip(-0.5, 0.5)).clip(-LIMIT, LIMIT)
    latency, slowness = np.exp(found).tolist()
    link = Link(1 / slowness, latency)
    factors = [max(p := s.price(link) / s.seconds, 1 / p) for s in samples]
    return Fit(link, len(samples), statistics.median(factors))


def _round(value: float) -> float:
    """Returns the value rounded to three significant digits."""
    return float(f"{value:.3g}")


def fits(results: list[dict]) -> dict[str, Fit]:
    """Returns a fit for each link class from the rows of collectives that training calls.

    The keys are the names of link classes. If a dimension has several groups, only rows in which
    all groups work at once count. A row on training's own path replaces that of the backend.
    """
    samples: dict[str, dict[tuple, MeasuredOperation]] = {}
    for row in results:
        several = row["groups_of_the_dimension"] > 1
        if not is_trainings(row["dim"], row["op"], row["reduction"]):
            continue
        if several and row["mode"] != TOGETHER:
            continue
        key = (row["dim"], row["op"], row["size"])
        of_class = samples.setdefault(row["link"], {})
        if row["training_path"] or key not in of_class:
            of_class[key] = MeasuredOperation(
                row["op"], row["ranks_of_a_group"], row["bytes"], row["seconds"]
            )
    found = {kind: fit(list(of_class.values())) for kind, of_class in samples.items()}
    return {kind: fitted for kind, fitted in found.items() if fitted is not None}


def report(
    where: ClusterView,
    results: list[dict],
    left_out: dict[str, str],
    findings: list[Finding],
    pairs: dict[Pair, list[float]],
    seconds: float,
    rail_gb_per_s: float,
) -> dict[str, Any]:
    """Returns the content of bench.json.

    Args:
        where: the rank mapping and the hosts.
        results: the rows.
        left_out: the reasons why dimensions or reductions were not measured.
        findings: the slow ranks and pairs.
        pairs: the seconds of each pair by message size.
        seconds: the duration of the command.
        rail_gb_per_s: the bandwidth of a rail.
    """
    layout = where.placement.layout
    return {
        "layout": {name: layout.size(name) for name in ("tp", "pp", "dp", "cp")},
        "cluster": where.placement.cluster.name,
        "placement": where.placement.how,
        "seconds": seconds,
        "not_measured": left_out,
        "findings": [finding.facts(where) for finding in findings],
        "fitted": {
            kind: found.overrides(LinkClass[kind.upper()], rail_gb_per_s)
            | {"samples": found.samples, "typical_factor": found.typical_factor}
            for kind, found in fits(results).items()
        },
        "ranks": [where.facts(rank) for rank in range(layout.world_size)],
        "pairs": [
            {"ranks": list(pair), "link": where.link_class(*pair).label, "seconds": times}
            for pair, times in pairs.items()
        ],
        "rows": results,
    }


def conclusions(
    facts: dict[str, Any], where: ClusterView, findings: list[Finding], outlier: float
) -> list[str]:
    """Returns the conclusions of a report (`facts`) as lines of text.

    `outlier` is the multiple of the median above which a time counts as slow.
    """
    lines, pairs = [finding.sentence(where) for finding in findings], len(facts["pairs"])
    if pairs == 1:
        lines.append("There is only one pair of ranks, so nothing can be compared.")
    elif not findings:
        lines.append(
            f"No rank and none of the {pairs} pairs takes more than {outlier:g} times the median."
        )
    lines += [f"{what} is not measured: {why}." for what, why in facts["not_measured"].items()]
    for fitted in facts["fitted"].values():
        words = " ".join(f"{k}={v:g}" for k, v in fitted.items() if k.startswith("cluster."))
        lines.append(
            f"Measured here: {words} (with these values, half of the {fitted['samples']} measured "
            "rows of training's collectives are within a factor of "
            f"{fitted['typical_factor']:.2g} of their price)"
        )
    return lines
