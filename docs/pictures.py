"""Draws the pictures of README and docs from the objects that a run executes.

python docs/pictures.py    # writes layout.svg, schedule*.svg and topology_*.svg beside this file
"""

from __future__ import annotations

import contextlib
import io
from itertools import pairwise
from pathlib import Path

from parallel3d.blueprint.layout import Coordinates, Layout
from parallel3d.cli import command_line
from parallel3d.schedules.draw import render_svg
from parallel3d.schedules.schedule import make
from parallel3d.schedules.walk import Costs, time_orders

HERE = Path(__file__).resolve().parent
COLOURS = {"tp": "#d9480f", "pp": "#1864ab", "dp": "#2b8a3e"}
WORDS = {
    "tp": ("tensor", "splits every matrix; all-reduces in each layer"),
    "pp": ("pipeline", "splits the layers; activations pass between stages"),
    "dp": ("data", "splits the batch; gradient buckets, once a step"),
}

# Pictures of docs/topology.md, with the words of the command that draws each.
MAPS = {
    "six": "cluster=rails_3x2 tp=2 pp=3",
    "h100": "cluster=dgx_h100 cluster.nodes=16 tp=8 pp=4 topology.rank=37",
    "mixed": "cluster=dgx_h100 cluster.nodes=4 tp=4 pp=2 topology.rank=4",
    "nvl72": "cluster=gb200_nvl72 cluster.nodes=36 tp=4 pp=8 placement=tp-cp-pp-dp",
}

# docs/schedules.md shows each picture next to its command, `parallel3d schedule` and these words.
TIMELINES = {
    "1f1b": "pp=4 num_microbatches=8 schedule=1f1b",
    "zb_h1": "pp=4 num_microbatches=8 schedule=zb_h1",
    "interleaved_zb": "pp=4 vpp=2 num_microbatches=8 schedule=interleaved_zb",
    "zbv": "pp=4 vpp=2 num_microbatches=8 schedule=zbv",
    "v_half": "pp=4 vpp=2 num_microbatches=8 schedule=v_half",
    "auto": "pp=4 vpp=2 num_microbatches=10 schedule=auto schedule.costs=[1,1.2,0.8] "
    "schedule.hop=0.2 schedule.memory=1.25",
    "64": "pp=64 num_microbatches=96 schedule=zb_h1",
}


def centre(place: Coordinates) -> tuple[float, float]:
    """Returns the place of a rank: pp to the right, tp down, dp into the depth."""
    return 80 + 250 * place.pp + 92 * place.dp, 120 + 120 * place.tp - 58 * place.dp


def link(layout: Layout, a: int, b: int, dim: str) -> str:
    (x1, y1), (x2, y2) = (centre(layout.coordinates(r)) for r in (a, b))
    return (
        f'<line x1="{x1}" y1="{y1}" x2="{x2}" y2="{y2}" stroke="{COLOURS[dim]}" '
        f'stroke-width="{5 if dim == "tp" else 3}" stroke-linecap="round"/>'
    )


def box(layout: Layout, rank: int) -> str:
    place = layout.coordinates(rank)
    x, y = centre(place)
    return (
        f'<rect x="{x - 48}" y="{y - 22}" width="96" height="44" rx="8" fill="#fff" '
        f'stroke="#495057" stroke-width="1.5"/>'
        f'<text x="{x}" y="{y - 2}" text-anchor="middle" font-size="14" font-weight="600">'
        f"rank {rank}</text>"
        f'<text x="{x}" y="{y + 14}" text-anchor="middle" font-size="10" fill="#495057">'
        f"tp {place.tp} · pp {place.pp} · dp {place.dp}</text>"
    )


def layout_svg(layout: Layout) -> str:
    """Draws the grid of ranks with its tensor, pipeline and data groups as coloured lines."""
    parts = []
    for dim in ("dp", "pp", "tp"):
        for group in layout.groups(dim):
            parts += [link(layout, a, b, dim) for a, b in pairwise(group)]
    # The front replica is drawn last, above the others.
    ranks = sorted(range(layout.world_size), key=lambda r: -layout.coordinates(r).dp)
    parts += [box(layout, rank) for rank in ranks]
    for i, (dim, (name, text)) in enumerate(WORDS.items()):
        y = 92 + 62 * i
        parts.append(
            f'<line x1="560" y1="{y}" x2="590" y2="{y}" stroke="{COLOURS[dim]}" stroke-width="5"/>'
            f'<text x="602" y="{y + 1}" font-size="15" font-weight="600">{name} parallel · {dim}='
            f'{layout.size(dim)}</text><text x="602" y="{y + 19}" font-size="12" fill="#495057">'
            f"{text}</text>"
        )
    return (
        '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 960 300" '
        'font-family="system-ui, sans-serif"><rect width="960" height="300" fill="#f8f9fa"/>'
        + "".join(parts)
        + "</svg>\n"
    )


def main() -> None:
    (HERE / "layout.svg").write_text(layout_svg(Layout(tp=2, pp=2, dp=2)))
    made = make("1f1b", 4, 8)
    timeline = time_orders(made.orders, made.assignment, Costs.even(made.assignment))
    (HERE / "schedule.svg").write_text(render_svg(timeline, "1F1B, 4 stages, 8 micro-batches"))
    drawn = [("topology", f"topology_{name}.svg", words) for name, words in MAPS.items()]
    drawn += [("schedule", f"schedules_{name}.svg", words) for name, words in TIMELINES.items()]
    for command, file, words in drawn:
        given = [command, *words.split(), f"{command}.svg={HERE / file}"]
        with contextlib.redirect_stdout(io.StringIO()):
            code = command_line.main(given)
        if code:
            raise SystemExit(f"parallel3d {' '.join(given)}: exit code {code}")


if __name__ == "__main__":
    main()
