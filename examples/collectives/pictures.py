"""Draws the pictures of README.md from the messages that the textbook forms send.

    python -m examples.collectives.pictures

writes collectives_shapes.svg, collectives_rounds.svg and collectives_barrier.svg beside this file.

Three processes run the barrier: one reaches it at once, one after a second and one after two. Their
times are printed.
"""

from __future__ import annotations

import math
import multiprocessing
import tempfile
import time
from datetime import timedelta
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist

from examples.collectives.forms import rounds_of
from examples.collectives.messages import Message, Rounds
from examples.collectives.run import run

HERE = Path(__file__).resolve().parent
LATE_S = (0.0, 1.0, 2.0)  # when each rank reaches the barrier
COUNT = 64  # elements of the drawn buffer
STYLE = """
svg { --ground: #fff; --ink: #1f2328; --pale: #656d76; --rule: #d5dae0; --even: #1864ab;
  --odd: #d9480f; --node: #f3f5f7; --work: #2b8a3e; --wait: #e9c46a }
@media (prefers-color-scheme: dark) { svg { --ground: #0d1117; --ink: #e6edf3; --pale: #9aa4b0;
  --rule: #3a424c; --even: #74c0fc; --odd: #ffa94d; --node: #21262d; --work: #69db7c;
  --wait: #b08900 } }
.ground { fill: var(--ground) } text { fill: var(--ink); font-size: 11px; text-anchor: middle }
.title { font-weight: 600; font-size: 13px; text-anchor: start }
.left { text-anchor: start } .pale { fill: var(--pale) } .rule { stroke: var(--rule) }
.node { fill: var(--node); stroke: var(--pale) } .even, .odd { fill: none; stroke-width: 1.6 }
.even { stroke: var(--even) } .odd { stroke: var(--odd) }
.headeven { fill: var(--even) } .headodd { fill: var(--odd) }
.work { fill: var(--work) } .wait { fill: var(--wait) }
"""
HEADS = "".join(
    f'<marker id="{kind}" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="6" markerHeight="6" '
    f'orient="auto"><path d="M0 0 8 4 0 8z" class="head{kind}"/></marker>'
    for kind in ("even", "odd")
)


class Point(NamedTuple):
    x: float
    y: float


def page(width: int, height: int, parts: list[str]) -> str:
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
        f'font-family="system-ui, sans-serif"><style>{STYLE}</style><defs>{HEADS}</defs>'
        f'<rect class="ground" width="{width}" height="{height}"/>' + "\n".join(parts) + "</svg>\n"
    )


def kind_of(turn: int) -> str:
    return "odd" if turn % 2 else "even"


def arrow(a: Point, b: Point, gap: float, turn: int, label: str = "") -> str:
    """Draws an arrow from `a` to `b` in the colour of the round, with its number next to it."""
    long = math.dist(a, b)
    dx, dy = (b.x - a.x) / long, (b.y - a.y) / long
    kind = kind_of(turn)
    line = (
        f'<path class="{kind}" marker-end="url(#{kind})" d="M{a.x + gap * dx:.1f} '
        f'{a.y + gap * dy:.1f} {b.x - gap * dx:.1f} {b.y - gap * dy:.1f}"/>'
    )
    if label:
        x, y = a.x + 0.6 * (b.x - a.x) - 8 * dy, a.y + 0.6 * (b.y - a.y) + 8 * dx + 3
        line += f'<text class="pale" x="{x:.1f}" y="{y:.1f}">{label}</text>'
    return line


# --- who talks to whom --------------------------------------------------------------------------


def first_rounds(rounds: Rounds) -> dict[tuple[int, int], int]:
    """Returns (from, to) → the first round with a message in that direction."""
    found: dict[tuple[int, int], int] = {}
    for turn, messages in enumerate(rounds):
        for m in messages:
            found.setdefault((m.source, m.target), turn)
    return found


def circle(n: int, corner: Point, size: float) -> list[Point]:
    middle = Point(corner.x + size / 2, corner.y + size / 2)
    angles = [2 * math.pi * r / n - math.pi / 2 for r in range(n)]
    far = size / 2 - 14
    return [Point(middle.x + far * math.cos(a), middle.y + far * math.sin(a)) for a in angles]


def tree(links: dict[tuple[int, int], int], n: int, corner: Point, size: float) -> list[Point]:
    """Places rank 0 on top, its receivers below it, and leaves side by side."""
    children = {r: [b for a, b in links if a == r] for r in range(n)}
    column: dict[int, float] = {}
    depth = {0: 0}

    def place(rank: int) -> float:
        for child in children[rank]:
            depth[child] = depth[rank] + 1
        below = [place(child) for child in children[rank]]
        used = sum(r in column and not children[r] for r in column)
        column[rank] = sum(below) / len(below) if below else float(used)
        return column[rank]

    place(0)
    wide, deep = max(column.values()) or 1, max(depth.values()) or 1
    return [
        Point(
            corner.x + 14 + (size - 28) * (column[r] / wide if max(column.values()) else 0.5),
            corner.y + 14 + (size - 28) * depth[r] / deep,
        )
        for r in range(n)
    ]


def shape(title: str, words: str, rounds: Rounds, corner: Point, size: float = 170) -> list[str]:
    """Draws ranks as circles, and messages as arrows with the number of their first round."""
    links = first_rounds(rounds)
    n = 1 + max(max(pair) for pair in links)
    top = Point(corner.x, corner.y + 44)
    is_tree = len(links) == n - 1 and max(sum(a == r for a, _ in links) for r in range(n)) > 1
    places = tree(links, n, top, size) if is_tree else circle(n, top, size)
    parts = [
        f'<text class="title" x="{corner.x}" y="{corner.y + 14}">{title}</text>',
        f'<text class="left pale" x="{corner.x}" y="{corner.y + 30}">{words}</text>',
    ]
    for (a, b), turn in links.items():
        parts.append(arrow(places[a], places[b], 12, turn, str(turn + 1)))
    for rank, (x, y) in enumerate(places):
        parts.append(
            f'<circle class="node" cx="{x:.1f}" cy="{y:.1f}" r="10"/>'
            f'<text x="{x:.1f}" y="{y + 4:.1f}">{rank}</text>'
        )
    return parts


def half_of(rounds: Rounds, second: bool) -> Rounds:
    """Returns the messages that carry the first or the second half of the buffer."""
    return [[m for m in turn if (m.start >= COUNT // 2) == second] for turn in rounds]


def shapes() -> str:
    both = rounds_of("broadcast", "double_tree", 8, COUNT)
    drawn = [
        ("Naive broadcast", "one after the other", rounds_of("broadcast", "naive", 8, COUNT)),
        ("Chain", "each tells the next", rounds_of("broadcast", "chain", 8, COUNT)),
        ("Binomial tree", "all who know tell one", rounds_of("broadcast", "tree", 8, COUNT)),
        ("Double tree, first half", "inner: 2 4 6", half_of(both, False)),
        ("Double tree, second half", "inner: 3 5 7", half_of(both, True)),
        ("Ring", "all at once, every round", rounds_of("reduce_scatter", "ring", 8, COUNT)),
    ]
    parts = []
    for i, (title, words, rounds) in enumerate(drawn):
        parts += shape(title, words, rounds, Point(24 + i % 3 * 230, 10 + i // 3 * 240))
    return page(710, 480, parts)


# --- round by round -----------------------------------------------------------------------------


def panel(title: str, words: str, rounds: Rounds, corner: Point) -> tuple[list[str], float]:
    """Draws a line for each rank and a column for each round; returns the width, too."""
    n = 1 + max(max(m.source, m.target) for turn in rounds for m in turn)
    step, row = 34.0, 20.0
    top, left = corner.y + 50, corner.x + 20
    wide = max(step * len(rounds) + 20, 200)
    parts = [
        f'<text class="title" x="{corner.x}" y="{corner.y + 14}">{title}</text>',
        f'<text class="left pale" x="{corner.x}" y="{corner.y + 30}">{words}</text>',
    ]
    for r in range(n):
        y = top + row * r
        parts.append(
            f'<text class="pale" x="{left - 12}" y="{y + 4}">{r}</text><line class="rule" '
            f'x1="{left}" y1="{y}" x2="{left + step * len(rounds)}" y2="{y}"/>'
        )
    for turn, messages in enumerate(rounds):
        parts += [across(m, turn, left + step * turn, top, step, row) for m in messages]
    return parts, wide


def across(m: Message, turn: int, x: float, top: float, step: float, row: float) -> str:
    here = Point(x + 3, top + row * m.source)
    return arrow(here, Point(x + step - 3, top + row * m.target), 0, turn)


def by_round() -> str:
    drawn = [
        ("Chain, 4 segments", "S + n − 2 rounds", ("broadcast", "segmented", 8, COUNT, 4)),
        ("Double tree, 3 pieces", "2 rounds a piece", ("broadcast", "double_tree", 8, COUNT, 3)),
        ("Binomial tree, up and down", "2⌈log₂ n⌉", ("all_reduce", "tree", 8, COUNT)),
        ("Recursive doubling", "n = 8: log₂ n", ("all_reduce", "recursive_doubling", 8, COUNT)),
        ("Recursive doubling", "n = 6: two fold", ("all_reduce", "recursive_doubling", 6, COUNT)),
        ("Ring all-reduce", "2(n − 1), of 1/n each", ("all_reduce", "ring", 8, COUNT)),
    ]
    parts, x, y = [], 24.0, 10.0
    for title, words, what in drawn:
        rounds = rounds_of(*what)
        wide = panel(title, words, rounds, Point(x, y))[1]
        if x + wide > 800:
            x, y = 24.0, y + 225
        parts += panel(title, words, rounds, Point(x, y))[0]
        x += wide + 30
    return page(800, int(y + 225), parts)


# --- a barrier ----------------------------------------------------------------------------------


def come_late(rank: int, store: str, found: multiprocessing.Queue) -> None:
    """Runs one rank: joins the others, reaches the barrier late, reports when it came and left."""
    n = len(LATE_S)
    dist.init_process_group(
        "gloo",
        store=dist.FileStore(store, n),
        rank=rank,
        world_size=n,
        timeout=timedelta(seconds=60),
    )
    run("barrier", "tree", torch.ones(1))  # times count from here on
    begun = time.monotonic()
    time.sleep(LATE_S[rank])
    came = time.monotonic() - begun
    run("barrier", "recursive_doubling", torch.ones(1))
    found.put((rank, came, time.monotonic() - begun))
    dist.destroy_process_group()


def measured_barrier() -> list[tuple[int, float, float]]:
    """Returns (rank, came, left) in seconds."""
    context = multiprocessing.get_context("fork")
    found = context.Queue()
    with tempfile.TemporaryDirectory() as folder:
        ranks = [
            context.Process(target=come_late, args=(rank, f"{folder}/store", found))
            for rank in range(len(LATE_S))
        ]
        for process in ranks:
            process.start()
        times = sorted(found.get(timeout=120) for _ in ranks)
        for process in ranks:
            process.join()
    return times


def barrier(times: list[tuple[int, float, float]]) -> str:
    second, left = 220.0, 70.0
    parts = [
        '<text class="title" x="24" y="24">A barrier waits for the last: three ranks, which come '
        "after 0, 1 and 2 s</text>"
    ]
    for rank, came, gone in times:
        y = 44 + 34 * rank
        parts += [
            f'<text class="left" x="24" y="{y + 16}">rank {rank}</text>',
            f'<rect class="work" x="{left}" y="{y}" width="{second * came:.1f}" height="22"/>',
            f'<rect class="wait" x="{left + second * came:.1f}" y="{y}" '
            f'width="{second * (gone - came):.1f}" height="22"/>',
            f'<text class="left" x="{left + second * gone + 8:.1f}" y="{y + 16}">came {came:.2f} s,'
            f" left {gone:.2f} s</text>",
        ]
    for tick in range(3):
        x = left + second * tick
        parts.append(
            f'<line class="rule" x1="{x}" y1="38" x2="{x}" y2="150"/>'
            f'<text class="pale" x="{x}" y="164">{tick} s</text>'
        )
    parts.append(
        '<rect class="work" x="250" y="176" width="12" height="12"/><text class="left" x="268" '
        'y="186">on its way</text><rect class="wait" x="350" y="176" width="12" height="12"/>'
        '<text class="left" x="368" y="186">in the barrier</text>'
    )
    return page(690, 200, parts)


def main() -> None:
    (HERE / "collectives_shapes.svg").write_text(shapes(), encoding="utf-8")
    (HERE / "collectives_rounds.svg").write_text(by_round(), encoding="utf-8")
    times = measured_barrier()
    for rank, came, left in times:
        print(f"rank {rank}: came after {came:.2f} s, left after {left:.2f} s")
    (HERE / "collectives_barrier.svg").write_text(barrier(times), encoding="utf-8")


if __name__ == "__main__":
    main()
