"""`bench comm` on the screen: a table a dimension, and what it all comes to."""

from __future__ import annotations

from collections.abc import Iterable

from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table

from parallel3d.bench.operations import Operation
from parallel3d.bench.rows import ALONE, TOGETHER

NARROW = 96  # columns; on less, algorithm bandwidth is left to the JSON file
PIPED = 110


def make_console() -> Console:
    """Of the terminal's width, or wide enough for the tables where nobody looks at it."""
    console = Console()
    return console if console.is_terminal else Console(width=PIPED)


def table(dim: str, rows: list[dict], width: int) -> Table:
    """The rows of one dimension; both modes of an operation side by side."""
    first = rows[0]
    count = first["groups_of_the_dimension"]
    groups = f"{count} group{'s' if count > 1 else ''} of {first['ranks_of_a_group']}"
    alone = min(row["groups_measured"] for row in rows if "groups_measured" in row)
    some = f", {alone} of them alone" if alone < count else ""
    result = Table(title=f"{dim}: {groups}{some}", title_justify="left", box=SIMPLE, pad_edge=False)
    both = count > 1
    result.add_column("collective", no_wrap=True)
    result.add_column("path", no_wrap=True)
    for name in ("bytes", *_columns("alone" if both else "", width)):
        result.add_column(name, justify="right", no_wrap=True)
    for name in _columns("together", width) if both else ():
        result.add_column(name, justify="right", no_wrap=True)
    result.add_column("priced", justify="right", no_wrap=True)
    result.add_column("times\nprice", justify="right", no_wrap=True)
    label = ""
    for key, modes in side_by_side(rows).items():
        cells = _cells(modes, both, width)
        name = Operation(*key[:2]).label
        result.add_row("" if name == label else name, *cells)
        label = name
    return result


def side_by_side(rows: Iterable[dict]) -> dict[tuple, dict[str, dict]]:
    """(op, reduction, training's way, size) → mode → row."""
    found: dict[tuple, dict[str, dict]] = {}
    for row in rows:
        key = (row["op"], row["reduction"], row["training_path"], row["size"])
        found.setdefault(key, {})[row["mode"]] = row
    return found


def _columns(mode: str, width: int) -> list[str]:
    names = ["time", "alg GB/s", "bus GB/s"] if width >= NARROW else ["time", "bus GB/s"]
    return [f"{mode}\n{names[0]}", *(name.replace(" ", "\n") for name in names[1:])]


def _cells(modes: dict[str, dict], both: bool, width: int) -> list[str]:
    alone = modes[ALONE]
    if "not_offered" in alone:
        return [alone["not_offered"]]
    cells = [alone["path"], size(alone["bytes"])]
    for row in (alone, modes[TOGETHER]) if both else (alone,):
        rates = [row["algorithm_gb_per_s"], row["bus_gb_per_s"]]
        shown = [f"{rate:.3g}" if row["bytes"] else "" for rate in rates]
        cells += [duration(row["seconds"]), *(shown if width >= NARROW else shown[1:])]
    if alone["priced_s"] is None:
        return [*cells, "no wire", ""]
    return [*cells, duration(alone["priced_s"]), f"{alone['times_the_price']:.3g}"]


def duration(seconds: float) -> str:
    """Three digits and a unit: `12.3 ms`."""
    for unit, scale in (("s", 1.0), ("ms", 1e-3)):
        if seconds >= 0.9995 * scale:
            return f"{seconds / scale:.3g} {unit}"
    return f"{seconds * 1e6:.3g} µs"


def size(nbytes: int) -> str:
    """`4 MiB` where it is a whole number of them, else with thousands apart."""
    if nbytes == 0:
        return ""
    for unit, scale in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if nbytes % scale == 0:
            return f"{nbytes // scale} {unit}"
    return f"{nbytes:,}"
