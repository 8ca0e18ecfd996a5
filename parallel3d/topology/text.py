"""Text of `parallel3d topology`."""

from __future__ import annotations

import math
import shutil
import textwrap
from collections.abc import Sequence
from typing import TYPE_CHECKING, TextIO

import numpy as np

from parallel3d.topology.cluster.parts import Cluster
from parallel3d.topology.layout import DIMENSIONS

if TYPE_CHECKING:
    from parallel3d.topology.report import TopologyReport

LABEL = 11  # columns of the words at the left
LEAST_WIDTH = 40
WORTH_SAYING = 0.005  # of the communication: smaller differences are within the model's error


def write_report(report: TopologyReport, written: Sequence[str], stream: TextIO) -> None:
    """Writes everything in the terminal's columns (or COLUMNS), else 80; `written`: the files."""
    width = max(LEAST_WIDTH, shutil.get_terminal_size((80, 24)).columns)
    tables = (heading, group_table, search_table, route_lines, warning_lines)
    parts = [*(table(report, width) for table in tables), [f"wrote {name}" for name in written]]
    stream.write("\n\n".join("\n".join(part) for part in parts if part) + "\n")


def cluster_line(c: Cluster) -> str:
    """Formats `16 nodes of 8 GPUs = 128 GPUs, 16 NVLink domains of 8, 8 rails, ...`"""
    domains = np.unique(c.domain, return_counts=True)[1]
    units, leaves = np.unique(c.unit).size, _count(np.unique(c.leaf).size, "leaf switch")
    spine = "no spine" if c.oversubscription is None else f"spine {c.oversubscription:g}:1"
    nodes = f"{_count(c.nodes, 'node')}, {_count(c.size, 'GPU')}"
    if c.nodes * c.gpus_per_node == c.size:
        nodes = f"{_count(c.nodes, 'node')} of {_count(c.gpus_per_node, 'GPU')} = {c.size:,}"
    return (
        f"{nodes}, {_count(domains.size, c.intra_name + ' domain')} of {domains.max()}, "
        f"{_count(c.rails, 'rail')}, {_count(units, 'unit')} with {leaves}, {spine}"
    )


def job_line(report: TopologyReport) -> str:
    """Formats `tp=8 pp=4 dp=4; llama3_70b in fp32; 64 sequences a step ...; placement: ...`"""
    config, layout = report.config, report.layout
    numbers = {"tp": layout.tp, "cp": layout.cp, "pp": layout.pp, "vpp": config.vpp}
    numbers["dp"] = layout.dp
    sizes = " ".join(f"{d}={n}" for d, n in numbers.items() if n > 1 or d not in ("cp", "vpp"))
    sizes += f" schedule={config.schedule.name}" * (config.vpp > 1)
    return (
        f"{sizes}; {config.model.name} in {config.precision.name}; {config.global_batch_size:,} "
        f"sequences a step = {config.micro_batch_size} × {config.num_microbatches} micro-batches × "
        f"dp; placement: {report.placement.how}"
    )


def heading(report: TopologyReport, width: int) -> list[str]:
    """Returns cluster, wires, job, assumptions, and the chosen rank's groups."""
    c, layout, rank = report.cluster, report.layout, report.config.topology.rank
    origin = f" ({c.origin})" if c.origin != "the configuration" else ""
    wires = {c.intra: c.nvlink, "rail": c.rail}
    if c.oversubscription is not None:
        wires["spine"] = c.spine
    speeds = [f"{k} {w.gb_per_s:g} GB/s {w.latency_us:g} µs" for k, w in wires.items()]
    groups = "".join(
        f"; {dim} group {_members(layout.group_of(rank, dim))}"
        for dim in DIMENSIONS
        if layout.size(dim) > 1
    )
    idle, slot = c.size - layout.world_size, int(report.placement.slots[rank])
    rows = {
        "cluster": f"{c.name}{origin}: {cluster_line(c)}",
        "wires": f"{', '.join(speeds)}; of one GPU, one way"
        + ", NICs by TCP" * (c.network == "socket"),
        "job": job_line(report),
        "assumed": " ".join(report.assumed)
        and f"{' '.join(report.assumed)}, as no others were given",
        "idle": idle and f"{layout.world_size:,} of {c.size:,} GPUs hold ranks, {idle:,} idle",
        "rank": f"{rank} = ({layout.named(rank)}) on {c.slot_name(slot)}{groups}",
    }
    return [line for label, text in rows.items() if text for line in _labelled(label, text, width)]


def group_table(report: TopologyReport, width: int) -> list[str]:
    """Returns a row per dimension: size, groups, links, algorithm, bytes, time."""
    price, label = report.price, report.cluster.label
    rows = [("group", "size", "groups", "links of neighbours", "algorithm", "bytes", "ms")]
    for dim, of_dim in price.dims.items():
        n, links = of_dim.paths.n, report.links.get(dim)
        groups = links.groups if links else report.layout.world_size // n
        pairs = links.pairs if links else {}
        ways = [f"{label(k)} {_percent(c / sum(pairs.values()))}" for k, c in pairs.items()]
        sums = (byte_text(sum(of_dim.nbytes.values())), _ms(of_dim.seconds))
        words = (", ".join(ways) or "any", ", ".join(of_dim.algorithms))
        rows.append((dim, f"{n:,}", f"{groups:,}", *words, *sums))
    total = (byte_text(sum(price.nbytes.values())), _ms(price.seconds))
    rows.append(("all", "", "", "", "", *total))
    head = "one step's communication: bytes of all ranks, time if nothing overlaps"
    by_link = ", ".join(f"{label(kind)} {byte_text(n)}" for kind, n in price.nbytes.items())
    lines = [*_wrap(head, width), *aligned(rows, "<>><<>>")]
    lines += _labelled("bytes", f"{by_link or 'none'} a step", width)
    for name, sent in report.loads.busiest(report.cluster).values():
        lines += _labelled("busiest", f"{name}: {byte_text(sent)} a step", width)
    return lines


def search_table(report: TopologyReport, width: int) -> list[str]:
    """Returns the best placements found, against the default order."""
    rows = report.shown_candidates
    if not rows:
        return []
    default = next(row for row in rows if row.is_default).seconds
    table = [("placement", "predicted ms", "of the default")]
    for row in rows:
        known = math.isfinite(row.seconds) and 0 < default < math.inf
        share = f"{100 * row.seconds / default:.1f} %" if known else "–"
        table.append((str(row), _ms(row.seconds), share))
    lines = ["placement search, cheapest first", *aligned(table, "<>>")]
    best, here = rows[0], report.price.seconds
    if best.seconds < here * (1 - WORTH_SAYING):
        saved = f" saves {_percent(1 - best.seconds / here)} of the communication"
        override = "default" if best.is_default else "auto"
        gain = saved if math.isfinite(here) else ""
        lines += _wrap(f"placement={override}{gain}: {best}", width)
    return lines


def route_lines(report: TopologyReport, width: int) -> list[str]:
    """Returns the priced ways of a message between rails."""
    message, c = report.between_rails, report.cluster
    if message is None:
        return []
    size = byte_text(message.nbytes)
    a, b = (f"{c.slot_name(s)} (rail {c.rail_of[s]})" for s in (message.source, message.target))
    head = f"between rails, {message.what or 'as an example'}, {size} from {a} to {b}:"
    lines = _wrap(head, width)
    for way in message.ways:
        path = c.slot_name(way.slots[0])  # node0 GPU 0 -nvlink- node0 GPU 1 -rail- node1 GPU 1
        for hop, slot in zip(way.hops, way.slots[1:], strict=True):
            path += f" -{c.label(hop)}- {c.slot_name(slot)}"
        lines += _wrap(f"{_ms(way.seconds)} ms  {path}", width, "  ", "    ")
    return lines if message.ways else [*lines, "  no way leads there"]


def warning_lines(report: TopologyReport, width: int) -> list[str]:
    warnings = (f"warning: {text}" for text in report.warnings)
    return [line for text in warnings for line in _wrap(text, width, rest="  ")]


def byte_text(nbytes: float) -> str:
    """Formats `1.25 GB`: three digits, decimal units."""
    sizes = (1e18, 1e15, 1e12, 1e9, 1e6, 1e3)
    for unit, size in zip(("EB", "PB", "TB", "GB", "MB", "kB"), sizes, strict=True):
        if nbytes >= 0.9995 * size:
            value = nbytes / size
            digits = 2 if value < 9.995 else 1 if value < 99.95 else 0
            return f"{value:,.{digits}f} {unit}"
    return f"{nbytes:.0f} B"


def _ms(seconds: float) -> str:
    """Formats milliseconds in three digits or more; infinite: there is no path."""
    if math.isinf(seconds):
        return "no path"
    ms = seconds * 1e3
    return f"{ms:,.0f}" if ms >= 99.95 else f"{ms:.3g}"


def _percent(share: float) -> str:
    """Formats whole percents, but with two digits near 0 % and 100 %."""
    if 0 < share < 0.005 or 0.995 <= share < 1:
        return f"{100 * share:.2f} %"
    return f"{100 * share:.0f} %"


def _count(number: int, word: str) -> str:
    plural = f"{word}es" if word.endswith("ch") else f"{word}s"
    return f"{number:,} {word if number == 1 else plural}"


def _members(group: Sequence[int]) -> str:
    """Formats `0 8 16 … 56`."""
    shown = [*group[:4], "…", group[-1]] if len(group) > 8 else group
    return " ".join(map(str, shown))


def _labelled(label: str, text: str, width: int) -> list[str]:
    return _wrap(text, width, label.ljust(LABEL - 1) + " ", " " * LABEL)


def _wrap(text: str, width: int, first: str = "", rest: str = "") -> list[str]:
    """Wraps to `width` columns after the indents; words such as tp-cp-pp-dp stay whole."""
    return textwrap.wrap(
        text, width, initial_indent=first, subsequent_indent=rest, break_on_hyphens=False
    )


def aligned(rows: Sequence[Sequence[str]], align: str) -> list[str]:
    """Aligns columns, each by its character of `align` (< or >), two blanks apart."""
    sizes = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(f"{cell:{a}{n}}" for cell, a, n in zip(row, align, sizes, strict=True)).rstrip()
        for row in rows
    ]
