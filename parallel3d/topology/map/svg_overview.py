"""The overview of a large cluster: a small tile for each domain or unit, a dot for each GPU."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from parallel3d.topology.map.palette import GROUP_COLOURS, SPINE, rail_colour
from parallel3d.topology.map.scene import Tile, byte_text

if TYPE_CHECKING:
    from parallel3d.topology.map.svg_unit import Picture

DOT, PITCH = 6, 8
ROWS = 32  # nodes of a small tile; a longer unit is drawn as several
MAX_TILES = 66
ROOM = 1000  # pixels to the right of the unit drawn in full


@dataclass(frozen=True)
class _Mini:
    """A tile or, of a long one, a part."""

    tile: Tile
    nodes: list[int]


def draw_overview(picture: Picture, every: list[Tile], x: float, top: float) -> float:
    """All tiles in rows under arms of the spine; returns the right border.

    Beyond `MAX_TILES` the ones without a marked rank are left out and counted.
    """
    minis, left_out = _chosen(picture, _cut(every))
    gpus = max(int(picture.gpus[m.nodes].max()) for m in minis)
    step = max(gpus * PITCH + 12, 58) + 14
    per_row = max(1, ROOM // step)
    pitch_y = max(len(m.nodes) for m in minis) * PITCH + 82
    right = x + min(per_row, len(minis)) * step - 14
    seen: set[int] = set()
    arms: list[float] = []
    rows = -(-len(minis) // per_row)
    for row, start in enumerate(range(0, len(minis), per_row)):
        line, y = minis[start : start + per_row], top + 26 + row * pitch_y
        fresh = False
        for unit in dict.fromkeys(m.tile.unit for m in line):
            places = [i for i, m in enumerate(line) if m.tile.unit == unit]
            span = (x + places[0] * step, x + (places[-1] + 1) * step - 14)
            _switches(picture, unit, *span, y, again=unit in seen)
            fresh |= unit not in seen
            seen.add(unit)
        if row and fresh:
            arms.append(y - 4)
        for column, mini in enumerate(line):
            _draw(picture, mini, x + column * step, y + 36, step - 14, gpus)
    if arms and picture.cluster.oversubscription is not None:
        path = f"M{x - 22:g},{top + 20:g}V{arms[-1] + 3.5:g}"
        path += "".join(f"M{x - 22:g},{arm:g}H{right:g}" for arm in arms)
        picture.canvas.path(path, SPINE, 7, cls="spine-arm")
    if left_out:
        word = "unit" if every[0].domain is None else "domain"
        text = f"not drawn: {left_out:,} more {word}s"
        picture.canvas.text(x, top + 26 + rows * pitch_y + 4, text, size=12, fill="#495057")
    return max(right, picture.canvas.right)


def _cut(every: list[Tile]) -> list[_Mini]:
    """Tiles of at most `ROWS` nodes."""
    minis: list[_Mini] = []
    for tile in every:
        nodes = tile.nodes.tolist()
        # Equal parts: 1,024 nodes as 32 times 32, not 28 times 36 and a rest.
        part = -(-len(nodes) // -(-len(nodes) // ROWS))
        minis += [_Mini(tile, nodes[at : at + part]) for at in range(0, len(nodes), part)]
    return minis


def _chosen(picture: Picture, minis: list[_Mini]) -> tuple[list[_Mini], int]:
    """At most `MAX_TILES`: those with the most telling marks first, then the first ones."""
    if len(minis) <= MAX_TILES:
        return minis, 0
    cluster, slots = picture.cluster, picture.placement.slots
    rarity = {"rank": 0, "tp": 1, "cp": 1, "pp": 2, "dp": 3}
    best = np.full(cluster.nodes, 4)
    ranks = np.fromiter(picture.marked, dtype=np.int64)
    weight = np.asarray([rarity[picture.marked[r]] for r in ranks.tolist()])
    np.minimum.at(best, cluster.node[slots[ranks]], weight)
    order = sorted(range(len(minis)), key=lambda i: (int(best[minis[i].nodes].min()), i))
    kept = sorted({*order[: MAX_TILES - 1], len(minis) - 1})
    return [minis[i] for i in kept], len(minis) - len(kept)


def _draw(picture: Picture, mini: _Mini, x: float, y: float, wide: float, gpus: int) -> None:
    canvas, cluster, tile = picture.canvas, picture.cluster, mini.tile
    name = f"unit {tile.unit}" if tile.domain is None else f"domain {tile.domain}"
    if len(mini.nodes) < len(tile.nodes):
        name = f"{mini.nodes[0]}–{mini.nodes[-1]}"
    canvas.text(x + 1, y + 14, name, size=10.5)
    top = y + 20
    place = {"cls": "tile", "unit": tile.unit, "first": mini.nodes[0]}
    height = len(mini.nodes) * PITCH + 6
    canvas.rect(x, top, wide, height, "#f1f3f5", "#adb5bd", radius=4, **place)
    plain: list[str] = []
    left = x + (wide - gpus * PITCH) / 2 + 1
    for row, node in enumerate(mini.nodes):
        first = int(cluster.first_slot[node])
        for local in range(int(picture.gpus[node])):
            rank = int(picture.placement.ranks[first + local])
            px, py = left + local * PITCH, top + 4 + row * PITCH
            kind = picture.marked.get(rank) if rank >= 0 else None
            if kind is None:
                plain.append(f"M{px:g},{py:g}h{DOT}v{DOT}h-{DOT}z")
                continue
            size, colour = DOT + 2, GROUP_COLOURS[kind]
            canvas.rect(px - 1, py - 1, size, size, colour, cls=f"dot {kind}", rank=rank)
    if plain:
        canvas.path("".join(plain), "#ced4da", 0, cls="dots")


def _switches(
    picture: Picture, unit: int, x: float, right: float, y: float, *, again: bool
) -> None:
    """The unit's leaf switches as a coloured strip over its tiles, and its busiest uplink.

    `again`: the unit goes on in a further row, where its strip is repeated without an uplink.
    """
    canvas, cluster = picture.canvas, picture.cluster
    if cluster.oversubscription is not None and not again:
        middle, sent = (x + right) / 2, float(picture.loads.port[unit].max())
        picture.wire("uplink", middle, y, middle, y + 24, SPINE, sent, unit=unit)
    each = (right - x) / cluster.rails
    for rail in range(cluster.rails):
        sent = byte_text(float(picture.loads.uplink[unit, rail]))
        tip = f"leaf switch of rail {rail}, unit {unit}: {sent} a step to the spine"
        cls = "small-leaf again" if again else "small-leaf"
        left, width, place = x + rail * each, max(each - 1, 0.5), {"unit": unit, "rail": rail}
        canvas.rect(left, y + 24, width, 9, rail_colour(rail), tip=tip, cls=cls, **place)
