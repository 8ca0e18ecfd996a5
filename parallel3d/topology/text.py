"""Text of `parallel3d topology`."""

from __future__ import annotations

import shutil
import textwrap
from collections.abc import Sequence
from typing import Any, TextIO

from parallel3d.topology.layout import DIMENSIONS, Coordinates

Facts = dict[str, Any]
LABEL = 11  # columns of the words at the left
LEAST_WIDTH = 40
WORTH_SAYING = 0.005  # of the communication: smaller differences are within the model's error


def write_report(facts: Facts, written: Sequence[str], stream: TextIO) -> None:
    """Writes everything in the terminal's columns (or COLUMNS), else 80; `written`: the files."""
    width = max(LEAST_WIDTH, shutil.get_terminal_size((80, 24)).columns)
    tables = (heading, group_table, search_table, route_lines, warning_lines)
    parts = [*(table(facts, width) for table in tables), [f"wrote {name}" for name in written]]
    stream.write("\n\n".join("\n".join(part) for part in parts if part) + "\n")


def cluster_line(facts: Facts) -> str:
    """Formats `16 nodes of 8 GPUs = 128 GPUs, 16 NVLink domains of 8, 8 rails, ...`"""
    c = facts["cluster"]
    spine = "no spine"
    if c["oversubscription"] is not None:
        spine = f"spine {c['oversubscription']:g}:1"
    units = f"{_count(c['units'], 'unit')} with {_count(c['leaf_switches'], 'leaf switch')}"
    nodes = f"{_count(c['nodes'], 'node')}, {_count(c['gpus'], 'GPU')}"
    if c["nodes"] * c["gpus_per_node"] == c["gpus"]:
        each = _count(c["gpus_per_node"], "GPU")
        nodes = f"{_count(c['nodes'], 'node')} of {each} = {c['gpus']:,}"
    domains = f"{_count(c['domains'], c['intra'] + ' domain')} of {c['domain_gpus']}"
    return f"{nodes}, {domains}, {_count(c['rails'], 'rail')}, {units}, {spine}"


def job_line(facts: Facts) -> str:
    """Formats `tp=8 pp=4 dp=4; llama3_70b in fp32; 64 sequences a step ...; placement: ...`"""
    job = facts["job"]
    shown = [d for d in ("tp", "cp", "pp", "vpp", "dp") if d not in ("cp", "vpp") or job[d] > 1]
    sizes = " ".join(f"{d}={job[d]}" for d in shown)
    if job["vpp"] > 1:
        sizes += f" schedule={job['schedule']}"
    batch = (
        f"{job['global_batch_size']:,} sequences a step = {job['micro_batch_size']} × "
        f"{job['num_microbatches']} micro-batches × dp"
    )
    return (
        f"{sizes}; {job['model']} in {job['precision']}; {batch}; placement: {facts['placement']}"
    )


def heading(facts: Facts, width: int) -> list[str]:
    """Returns cluster, wires, job, assumptions, and the chosen rank's groups."""
    cluster, job, rank = facts["cluster"], facts["job"], facts["rank"]
    origin = f" ({cluster['origin']})" if cluster["origin"] != "the configuration" else ""
    wires = ", ".join(
        f"{name} {wire['gb_per_s']:g} GB/s {wire['latency_us']:g} µs"
        for name, wire in cluster["wires"].items()
    )
    groups = "".join(
        f"; {dim} group {_members(rank['groups'][dim])}"
        for dim in DIMENSIONS
        if dim in rank["groups"]
    )
    place = Coordinates(**rank["coordinates"]).named("cp" in rank["groups"])
    rows = {
        "cluster": f"{cluster['name']}{origin}: {cluster_line(facts)}",
        "wires": f"{wires}; of one GPU, one way"
        + ", NICs by TCP" * (cluster["network"] == "socket"),
        "job": job_line(facts),
        "assumed": " ".join(facts["assumed"])
        and f"{' '.join(facts['assumed'])}, as no others were given",
        "idle": job["idle_gpus"]
        and f"{job['ranks']:,} of {cluster['gpus']:,} GPUs hold ranks, {job['idle_gpus']:,} idle",
        "rank": f"{rank['rank']} = ({place}) on {rank['gpu']}{groups}",
    }
    return [line for label, text in rows.items() if text for line in _labelled(label, text, width)]


def group_table(facts: Facts, width: int) -> list[str]:
    """Returns a row per dimension: size, groups, links, algorithm, bytes, time."""
    rows = [("group", "size", "groups", "links of neighbours", "algorithm", "bytes", "ms")]
    for group in facts["groups"]:
        sizes = (f"{group['size']:,}", f"{group['groups']:,}")
        ways = (_pairs(group), ", ".join(group["algorithms"]))
        rows.append((group["dim"], *sizes, *ways, *_bytes_and_ms(group)))
    rows.append(("all", "", "", "", "", *_bytes_and_ms(facts)))
    head = "one step's communication: bytes of all ranks, time if nothing overlaps"
    classes = ", ".join(f"{name} {byte_text(n)}" for name, n in facts["bytes"].items())
    lines = [*_wrap(head, width), *aligned(rows, "<>><<>>")]
    lines += _labelled("bytes", f"{classes or 'none'} a step", width)
    for port in facts["ports"].values():
        lines += _labelled("busiest", f"{port['name']}: {byte_text(port['bytes'])} a step", width)
    return lines


def _bytes_and_ms(facts: Facts) -> tuple[str, str]:
    return byte_text(sum(facts["bytes"].values())), _ms(facts["seconds"])


def _pairs(group: Facts) -> str:
    pairs = group.get("pairs")
    if not pairs:
        return "any"
    total = sum(pairs.values())
    return ", ".join(f"{name} {_percent(count / total)}" for name, count in pairs.items())


def search_table(facts: Facts, width: int) -> list[str]:
    """Returns the best placements found, against the default order."""
    rows = facts["search"]
    if not rows:
        return []
    default = next(row for row in rows if row["default"])["seconds"]
    table = [("placement", "predicted ms", "of the default")]
    for row in rows:
        table.append((row["placement"], _ms(row["seconds"]), _share(row, default)))
    lines = ["placement search, cheapest first", *aligned(table, "<>>")]
    best, here = rows[0]["seconds"], facts["seconds"]
    if best is not None and (here is None or best < here * (1 - WORTH_SAYING)):
        gain = "" if here is None else f" saves {_percent(1 - best / here)} of the communication"
        lines += _wrap(f"placement={rows[0]['override']}{gain}: {rows[0]['placement']}", width)
    return lines


def _share(row: Facts, default: float | None) -> str:
    if row["seconds"] is None or not default:
        return "–"
    return f"{100 * row['seconds'] / default:.1f} %"


def route_lines(facts: Facts, width: int) -> list[str]:
    """Returns the priced ways of a message between rails."""
    route = facts["routes"]
    if route is None:
        return []
    (a, b), size = route["rails"], byte_text(route["bytes"])
    ends = f"from {route['from']} (rail {a}) to {route['to']} (rail {b})"
    lines = _wrap(f"between rails, {route['what'] or 'as an example'}, {size} {ends}:", width)
    for way in route["ways"]:
        lines += _wrap(f"{_ms(way['seconds'])} ms  {way['path']}", width, "  ", "    ")
    return lines if route["ways"] else [*lines, "  no way leads there"]


def warning_lines(facts: Facts, width: int) -> list[str]:
    warnings = (f"warning: {text}" for text in facts["warnings"])
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


def _ms(seconds: float | None) -> str:
    """Formats milliseconds in three digits or more; None: there is no path."""
    if seconds is None:
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
