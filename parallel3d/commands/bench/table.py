"""`bench comm` on the screen: a table a dimension, and what it all comes to."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial

from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table

from parallel3d.commands.bench.operations import BenchOperation
from parallel3d.commands.bench.rows import ALONE, TOGETHER

PIPED = 120  # columns where nobody looks at them
# Columns that the table takes with everything, and with bus bandwidth alone.
FULL, MEDIUM = 116, 98
SHORT = {"shared memory": "shared", "pair exchange": "pair"}

Column = tuple[str, Callable[[dict[str, dict]], str]]  # heading, cell


def make_console() -> Console:
    """Of the terminal's width, or wide enough for the tables where nobody looks at it."""
    console = Console()
    return console if console.is_terminal else Console(width=PIPED)


def table(dim: str, rows: list[dict], width: int) -> Table:
    """The rows of one dimension; both modes of an operation side by side."""
    first = next(row for row in rows if "not_offered" not in row)
    count = first["groups_of_the_dimension"]
    groups = f"{count} group{'s' if count > 1 else ''} of {first['ranks_of_a_group']}"
    alone = first["groups_measured"]
    some = f", {alone} of them alone" if alone < count else ""
    result = Table(
        title=f"{dim}: {groups}{some}",
        title_justify="left",
        box=SIMPLE,
        pad_edge=False,
        padding=(0, 1, 0, 0),
    )
    result.add_column("collective", no_wrap=True)
    result.add_column("path", no_wrap=True)
    shown = columns(any(row["mode"] == TOGETHER for row in rows), width)
    for heading, _ in shown:
        result.add_column(heading, justify="right", no_wrap=True)
    label = ""
    for key, modes in side_by_side(rows).items():
        alone = modes[ALONE]
        name = BenchOperation(*key[:2]).label
        if "not_offered" in alone:
            result.add_row(name, "not offered")
            continue
        path = alone["path"] if width >= MEDIUM else SHORT.get(alone["path"], alone["path"])
        cells = (cell(modes) for _, cell in shown)
        result.add_row("" if name == label else name, path, *cells)
        label = name
    return result


def columns(both: bool, width: int) -> list[Column]:
    """What there is room for; the JSON file has everything."""
    found: list[Column] = [("bytes", lambda modes: size(modes[ALONE]["bytes"]))]
    for mode in (ALONE, TOGETHER) if both else (ALONE,):
        head = f"{mode}\n" if both else ""
        found.append((f"{head}time", partial(_duration, mode, "seconds")))
        if width >= FULL:
            found.append(("alg\nGB/s", partial(_rate, mode, "algorithm_gb_per_s")))
        found.append(("bus\nGB/s", partial(_rate, mode, "bus_gb_per_s")))
    if width >= MEDIUM:
        found.append(("priced", partial(_duration, ALONE, "priced_s")))
    found.append(("times\nprice", _times_the_price))
    return found


def _duration(mode: str, key: str, modes: dict[str, dict]) -> str:
    seconds = modes[mode][key]
    return "no wire" if seconds is None else duration(seconds)


def _rate(mode: str, key: str, modes: dict[str, dict]) -> str:
    return f"{modes[mode][key]:.2g}" if modes[mode]["bytes"] else ""


def _times_the_price(modes: dict[str, dict]) -> str:
    times = modes[ALONE]["times_the_price"]
    return "" if times is None else f"{times:.2g}" if times < 100 else f"{times:.0f}"


def side_by_side(rows: Iterable[dict]) -> dict[tuple, dict[str, dict]]:
    """(op, reduction, training's way, size) → mode → row."""
    found: dict[tuple, dict[str, dict]] = {}
    for row in rows:
        key = (row["op"], row["reduction"], row["training_path"], row["size"])
        found.setdefault(key, {})[row["mode"]] = row
    return found


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
