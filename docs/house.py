"""Draws the rooms of parallel3d from its imports: docs/house.svg, the picture of architecture.md.

python docs/house.py    # after a room, an import between rooms or a first docstring has changed

The order is that of the contract in pyproject.toml, which `lint-imports` checks. The code is read,
not run.
"""

from __future__ import annotations

import ast
import re
import tomllib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple
from xml.sax.saxutils import escape

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = "parallel3d"

WIDTH, ROW, TOP = 900, 23, 50  # pixels
CELL, GRID = 11, 572  # a column of the table of imports, and where the first one stands
NAME, FILES, LINES, WORDS = 24, 176, 214, 228
LETTER = 5.6  # width of an average one at 11 px, for what has room

STYLE = """
svg { --ground: #fff; --ink: #1f2328; --pale: #656d76; --row: #f3f5f7; --rule: #d5dae0;
  --dot: #1864ab; --wrong: #c92a2a; --pure: #2b8a3e }
@media (prefers-color-scheme: dark) { svg { --ground: #0d1117; --ink: #e6edf3; --pale: #9aa4b0;
  --row: #161b22; --rule: #3a424c; --dot: #74c0fc; --wrong: #ff8787; --pure: #69db7c } }
.ground { fill: var(--ground) } .row { fill: var(--row) } .rule { stroke: var(--rule) }
text { fill: var(--ink); font-size: 11px } .name { font-weight: 600; font-size: 12px }
.pale { fill: var(--pale) } .right { text-anchor: end } .dot { fill: var(--dot) }
.wrong { fill: var(--wrong) } .pure { fill: var(--pure) } .own { fill: var(--ink) }
"""


class Room(NamedTuple):
    """A room of the contract. lines: to the nearest hundred, so that not every edit is news."""

    name: str
    files: int
    lines: int
    words: str
    imports: frozenset[str]
    is_pure: bool  # no torch, by the contract


def contracts(root: Path = ROOT) -> list[dict]:
    text = (root / "pyproject.toml").read_text(encoding="utf-8")
    return tomllib.loads(text)["tool"]["importlinter"]["contracts"]


def order(root: Path = ROOT) -> list[str]:
    """The rooms from top to bottom."""
    return next(c["layers"] for c in contracts(root) if c.get("containers") == [PACKAGE])


def pure(root: Path = ROOT) -> tuple[str, ...]:
    """Rooms and groups of rooms that import no torch."""
    forbidden = next(c for c in contracts(root) if c["type"] == "forbidden")
    return tuple(name.removeprefix(f"{PACKAGE}.") for name in forbidden["source_modules"])


def files_of(root: Path, room: str) -> list[Path]:
    """The room's files: of its folder, or the one that it is."""
    folder = root / PACKAGE / room.replace(".", "/")
    return sorted(folder.rglob("*.py")) if folder.is_dir() else [folder.with_suffix(".py")]


def imported(path: Path) -> Iterator[str]:
    """Everything of the package that a file imports, anywhere, as a dotted path inside it."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        else:
            continue
        yield from (n.removeprefix(f"{PACKAGE}.") for n in names if n.startswith(f"{PACKAGE}."))


def room_of(module: str, names: Iterable[str]) -> str | None:
    """The room that a module, or a name in it, stands in; None for the front door's names."""
    return next((name for name in names if f"{module}.".startswith(f"{name}.")), None)


def sentence(path: Path, longest: float) -> str:
    """The first sentence of a file's docstring; up to its colon or semicolon if that fits alone.

    Raises ValueError if neither does.
    """
    whole = " ".join((ast.get_docstring(ast.parse(path.read_text("utf-8"))) or "").split())
    first = re.split(r"\.(?: |$)", whole.replace("`", ""))[0]
    said = first if len(first) <= longest else re.split("[;:]", first)[0]
    if not said or len(said) > longest:
        raise ValueError(f"{path}: {said!r} must have 1 to {longest:.0f} letters")
    return said


def rooms(root: Path = ROOT) -> list[Room]:
    names, found = order(root), []
    for place, name in enumerate(names):
        files = files_of(root, name)
        code = sum(len(path.read_text(encoding="utf-8").splitlines()) for path in files)
        others = {room_of(module, names) for path in files for module in imported(path)}
        head = next((path for path in files if path.parent.name == name.split(".")[-1]), files[0])
        words = sentence(head, (GRID - WORDS - 12 + CELL * place) / LETTER)
        is_pure = any(f"{name}.".startswith(f"{group}.") for group in pure(root))
        imports = frozenset(others - {None, name})
        found.append(Room(name, len(files), max(100, round(code, -2)), words, imports, is_pure))
    return found


def text(x: float, y: float, words: str, style: str = "") -> str:
    return f'<text x="{x}" y="{y}" class="{style}">{escape(words)}</text>'


def row(place: int, room: Room, names: list[str]) -> Iterator[str]:
    """A room: what it is, its own square, and a dot in the column of each room that it imports."""
    y = TOP + place * ROW
    base, middle = y + 15.5, y + ROW / 2
    if place % 2 == 0:
        yield f'<rect x="8" y="{y}" width="{WIDTH - 16}" height="{ROW}" rx="3" class="row"/>'
    if room.is_pure:
        yield f'<rect x="10" y="{y + 4}" width="5" height="{ROW - 8}" rx="2" class="pure"/>'
    yield text(NAME, base, room.name, "name")
    yield text(FILES, base, str(room.files), "right pale")
    yield text(LINES, base, f"{room.lines:,}", "right pale")
    yield text(WORDS, base, room.words)
    x = GRID + CELL * place
    yield f'<rect x="{x - 4}" y="{middle - 4}" width="8" height="8" rx="2" class="own"/>'
    for other in sorted(room.imports, key=names.index):
        at = names.index(other)
        style = "dot" if at > place else "wrong"
        yield f'<circle cx="{GRID + CELL * at}" cy="{middle}" r="3.2" class="{style}"/>'


def picture(root: Path = ROOT) -> str:
    """The house as SVG."""
    found = rooms(root)
    names = [room.name for room in found]
    height = TOP + ROW * len(found) + 14
    parts = []
    for place, name in enumerate(names):  # from the first that imports it down to its own square
        users = [at for at, room in enumerate(found) if name in room.imports]
        y = [TOP + ROW * (at + 0.5) for at in (min([place, *users]), max([place, *users]))]
        x = GRID + CELL * place
        parts.append(f'<line x1="{x}" y1="{y[0]}" x2="{x}" y2="{y[1]}" class="rule"/>')
    rows = [part for place, room in enumerate(found) for part in row(place, room, names)]
    bands = [part for part in rows if 'class="row"' in part]
    rest = [part for part in rows if 'class="row"' not in part]
    head = TOP - 10
    heading = [
        text(NAME, head, "room", "pale"),
        text(FILES, head, "files", "right pale"),
        text(LINES, head, "lines", "right pale"),
        text(WORDS, head, "what it is", "pale"),
        '<rect x="10" y="11" width="5" height="13" rx="2" class="pure"/>',
        text(NAME, 22, "imports no torch", "pale"),
        text(WORDS, 22, "a dot: this row imports the room whose square stands below", "pale"),
    ]
    body = "\n".join((*bands, *parts, *heading, *rest))
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" '
        f'font-family="system-ui, sans-serif"><style>{STYLE}</style>\n'
        f'<rect width="{WIDTH}" height="{height}" rx="6" class="ground"/>\n{body}\n</svg>\n'
    )


if __name__ == "__main__":
    (ROOT / "docs" / "house.svg").write_text(picture(), encoding="utf-8")
