"""A report as text for a terminal, a pipe or a log: every number comes out of its facts."""

from __future__ import annotations

import shutil
import textwrap
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, TextIO

from parallel3d.topology.map.scene import byte_text
from parallel3d.topology.map.terminal import Line, plain, style_of, terminal_map

if TYPE_CHECKING:
    from parallel3d.config.schema import Config
    from parallel3d.topology.map.report import Report

Facts = dict[str, Any]
LABEL = 11  # columns of the words at the left
LEAST_WIDTH = 40
NARROWEST = 8  # columns of a text in a table
WORTH_SAYING = 0.005  # of the communication: less is lost in what the model leaves out


def width_of(config: Config, stream: TextIO) -> int:
    """Columns to fill: as asked for, else the terminal's (or COLUMNS), else 80."""
    if config.topology.width is not None:
        return config.topology.width
    return max(LEAST_WIDTH, shutil.get_terminal_size((80, 24)).columns)


def write_report(report: Report, facts: Facts, stream: TextIO, width: int) -> None:
    """Print everything; colours on a terminal only."""
    spine = facts["bytes"].get("spine", 0.0)
    tables = (group_table, traffic, search_table, route_lines, warning_lines)
    parts = [
        _lines(heading(facts, width)),
        terminal_map(report.placement, report.rank, width, spine),
        *(_lines(table(facts, width)) for table in tables),
        _lines(file_lines(report, width)),
    ]
    whole = [line for part in parts if part for line in [*part, []]]
    _print(whole[:-1], stream)


def _lines(texts: Sequence[str]) -> list[Line]:
    return [[(text, "")] for text in texts]


def _print(lines: list[Line], stream: TextIO) -> None:
    if not stream.isatty():
        encoding = stream.encoding or "utf-8"
        text = (plain(lines) + "\n").encode(encoding, errors="replace").decode(encoding)
        stream.write(text)
        return
    from rich.console import Console
    from rich.text import Text

    console = Console(file=stream, soft_wrap=True, highlight=False)
    for line in lines:
        pieces = [(text, style_of(name)) for text, name in line]
        console.print(Text.assemble(*pieces), no_wrap=True, crop=False, overflow="ignore")


# --- words -----------------------------------------------------------------------------------


def cluster_line(facts: Facts) -> str:
    """`16 nodes of 8 GPUs = 128 GPUs, 16 NVLink domains of 8, 8 rails, ...`"""
    c = facts["cluster"]
    spine = "no spine"
    if c["oversubscription"] is not None:
        spine = f"spine {c['oversubscription']:g}:1"
    units = f"{_count(c['units'], 'unit')} with {_count(c['leaf_switches'], 'leaf switch')}"
    nodes = f"{_count(c['nodes'], 'node')}, {_count(c['gpus'], 'GPU')}"
    if c["nodes"] * c["gpus_per_node"] == c["gpus"]:
        each = _count(c["gpus_per_node"], "GPU")
        nodes = f"{_count(c['nodes'], 'node')} of {each} = {c['gpus']:,}"
    domains = f"{_count(c['domains'], 'NVLink domain')} of {c['domain_gpus']}"
    return f"{nodes}, {domains}, {_count(c['rails'], 'rail')}, {units}, {spine}"


def job_line(facts: Facts) -> str:
    """`tp=8 pp=4 dp=4 on 128 GPUs, default order; llama3_70b in fp32, 64 sequences a step ...`"""
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
    """What the cluster is, its wires, the job and what was assumed."""
    cluster = facts["cluster"]
    origin = f" ({cluster['origin']})" if cluster["origin"] != "the configuration" else ""
    wires = ", ".join(
        f"{name} {wire['gb_per_s']:g} GB/s {wire['latency_us']:g} µs"
        for name, wire in cluster["wires"].items()
    )
    lines = _labelled("cluster", f"{cluster['name']}{origin}: {cluster_line(facts)}", width)
    lines += _labelled("wires", f"{wires}; of one GPU, one way", width)
    lines += _labelled("job", job_line(facts), width)
    if facts["assumed"]:
        text = f"{' '.join(facts['assumed'])}, as no others were given"
        lines += _labelled("assumed", text, width)
    if facts["job"]["idle_gpus"]:
        job = facts["job"]
        text = f"{job['ranks']:,} of {cluster['gpus']:,} GPUs hold ranks, {job['idle_gpus']:,} idle"
        lines += _labelled("idle", text, width)
    return lines


def group_table(facts: Facts, width: int) -> list[str]:
    """One row a dimension: size, groups, links of its neighbours, algorithm, bytes, time."""
    rows = [("group", "size", "groups", "links of neighbours", "algorithm", "bytes", "ms")]
    for group in facts["groups"]:
        sizes = (f"{group['size']:,}", f"{group['groups']:,}")
        ways = (_pairs(group), ", ".join(group["algorithms"]))
        rows.append((group["dim"], *sizes, *ways, *_bytes_and_ms(group)))
    rows.append(("all", "", "", "", "", *_bytes_and_ms(facts)))
    head = "one step's communication: bytes of all ranks, time if nothing overlaps"
    return [*_wrap(head, width), *_table(rows, "<>><<>>", width)]


def _bytes_and_ms(facts: Facts) -> tuple[str, str]:
    return byte_text(sum(facts["bytes"].values())), _ms(facts["seconds"])


def _pairs(group: Facts) -> str:
    pairs = group.get("pairs")
    if not pairs:
        return "any"
    total = sum(pairs.values())
    return ", ".join(f"{name} {_percent(count / total)}" for name, count in pairs.items())


def traffic(facts: Facts, width: int) -> list[str]:
    """Bytes of a step on each link class, and the busiest ports."""
    classes = ", ".join(f"{name} {byte_text(n)}" for name, n in facts["bytes"].items())
    lines = _labelled("bytes", f"{classes or 'none'} a step", width)
    for port in facts["ports"].values():
        lines += _labelled("busiest", f"{port['name']}: {byte_text(port['bytes'])} a step", width)
    return lines


def search_table(facts: Facts, width: int) -> list[str]:
    """The best placements found, against the default order."""
    rows = facts["search"]
    if not rows:
        return []
    default = next(row for row in rows if row["default"])["seconds"]
    table = [("placement", "predicted ms", "of the default")]
    for row in rows:
        about = "≈ " if row["estimated"] else ""
        table.append((row["placement"], about + _ms(row["seconds"]), _share(row, default)))
    lines = ["placement search, cheapest first", *_table(table, "<>>", width)]
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
    """A message between rails, both ways priced."""
    route = facts["routes"]
    if route is None:
        return []
    (a, b), size = route["rails"], byte_text(route["bytes"])
    ends = f"from {route['from']} (rail {a}) to {route['to']} (rail {b})"
    lines = _wrap(f"between rails, {route['what'] or 'as an example'}, {size} {ends}:", width)
    for way in route["ways"]:
        text = f"{_ms(way['seconds'])} ms  {way['path']}"
        lines += _wrap(text, width, initial_indent="  ", subsequent_indent="    ")
    return lines if route["ways"] else [*lines, "  no way leads there"]


def warning_lines(facts: Facts, width: int) -> list[str]:
    lines: list[str] = []
    for text in facts["warnings"]:
        lines += _wrap(f"warning: {text}", width, subsequent_indent="  ")
    return lines


def file_lines(report: Report, width: int) -> list[str]:
    config = report.config.topology
    return [
        f"wrote {name}"[: max(width, len(name) + 6)] for name in (config.svg, config.json) if name
    ]


# --- numbers and columns ---------------------------------------------------------------------


def _ms(seconds: float | None) -> str:
    """Milliseconds in three digits or more; what has no wire has no time."""
    if seconds is None:
        return "no path"
    ms = seconds * 1e3
    return f"{ms:,.0f}" if ms >= 99.95 else f"{ms:.3g}"


def _percent(share: float) -> str:
    """Whole percents, but nothing that exists is 0 % and only the whole is 100 %."""
    if 0 < share < 0.005 or 0.995 <= share < 1:
        return f"{100 * share:.2f} %"
    return f"{100 * share:.0f} %"


def _count(number: int, word: str) -> str:
    plural = f"{word}es" if word.endswith("ch") else f"{word}s"
    return f"{number:,} {word if number == 1 else plural}"


def _labelled(label: str, text: str, width: int) -> list[str]:
    first = label.ljust(LABEL - 1) + " "
    return _wrap(text, width, initial_indent=first, subsequent_indent=" " * LABEL)


def _wrap(text: str, width: int, **indents: str) -> list[str]:
    """Lines of at most `width` columns; words such as tp-cp-pp-dp stay whole where they fit."""
    return textwrap.wrap(text, width, break_on_hyphens=False, **indents)


def _table(rows: list[tuple[str, ...]], align: str, width: int) -> list[str]:
    """Columns two blanks apart; the widest text columns are wrapped until all fit `width`.

    Where even that is too wide, a row becomes a sentence.
    """
    sizes = [max(len(row[i]) for row in rows) for i in range(len(align))]
    while sum(sizes) + 2 * (len(sizes) - 1) > width:
        widest = max((i for i, a in enumerate(align) if a == "<"), key=lambda i: sizes[i])
        if sizes[widest] <= NARROWEST:
            return _sentences(rows, width)
        sizes[widest] -= 1
    lines: list[str] = []
    for row in rows:
        cells = [_wrap(text, size) or [""] for text, size in zip(row, sizes, strict=True)]
        for at in range(max(len(cell) for cell in cells)):
            parts = [cell[at] if at < len(cell) else "" for cell in cells]
            padded = [f"{p:{a}{s}}" for p, a, s in zip(parts, align, sizes, strict=True)]
            lines.append("  ".join(padded).rstrip())
    return lines


def _sentences(rows: list[tuple[str, ...]], width: int) -> list[str]:
    lines: list[str] = []
    for row in rows[1:]:
        words = [f"{name} {text}" for name, text in zip(rows[0], row, strict=True) if text]
        lines += _wrap(", ".join(words), width, subsequent_indent="  ")
    return lines
