"""The map of a cluster as one self-contained SVG: domains, rails, leaf switches, the spine above.

Up to `MAX_EXPANDED` nodes every wire is drawn. Of a larger cluster one tile is drawn in full, that
of the chosen rank, beside an overview in which a dot is a GPU.
"""

from __future__ import annotations

from parallel3d.topology.map import scene
from parallel3d.topology.map.canvas import Canvas
from parallel3d.topology.map.palette import GROUP_COLOURS, NVLINK, SPINE, rail_colour
from parallel3d.topology.map.svg_overview import draw_overview
from parallel3d.topology.map.svg_unit import Picture
from parallel3d.topology.price.loads import Loads
from parallel3d.topology.tiling import Placement

MAX_EXPANDED = 40  # nodes
MAX_WIDTH = 1700  # of the units of a small cluster beside each other


def cluster_svg(placement: Placement, rank: int, loads: Loads, title: str, subtitle: str) -> str:
    """The whole picture. `title` and `subtitle` stand above it; `loads` gives the widths."""
    picture = Picture(placement, rank, loads)
    canvas = picture.canvas
    canvas.text(24, 38, title, size=20, weight=600)
    for line, words in enumerate(canvas.wrap(subtitle, 1000, size=13)):
        canvas.text(24, 62 + 18 * line, words, size=13, fill=NVLINK)
    top = canvas.bottom + 22
    every = scene.tiles(placement.cluster)
    if placement.cluster.nodes <= MAX_EXPANDED:
        _small(picture, every, top)
    else:
        _large(picture, every, top)
    _legend(picture, canvas.bottom + 34)
    return canvas.svg(title)


def _spine(picture: Picture, x: float, y: float, width: float) -> None:
    """The spine as a bar, or the hole where there is none."""
    over = picture.cluster.oversubscription
    if over is None:
        text = "no spine: nothing joins the rails, other rails are reached through NVLink"
        if Canvas.measure(text, 12) > width - 16:
            text = "no spine"
        picture.canvas.rect(
            x, y, width, 26, "none", "#c92a2a", radius=6, dash="6 5", cls="no-spine"
        )
        picture.canvas.text(x + width / 2, y + 17, text, size=12, anchor="middle", fill="#c92a2a")
        return
    total = scene.byte_text(float(picture.loads.uplink.sum()))
    rate = "carries all that the NICs send" if over == 1 else f"oversubscribed {over:g}:1"
    text = f"spine: {rate}; {total} a step over it"
    if Canvas.measure(text, 13) > width - 16:
        text = f"spine {over:g}:1; {total} a step"
    picture.canvas.rect(x, y, width, 26, SPINE, radius=6, cls="spine", tip=text)
    picture.canvas.text(x + width / 2, y + 17.5, text, size=13, anchor="middle", fill="#ffffff")


def _small(picture: Picture, every: list[scene.Tile], top: float) -> None:
    """Every node, all units beside each other under one spine."""
    units: dict[int, list[tuple[scene.Tile, list[int]]]] = {}
    for tile in every:
        units.setdefault(tile.unit, []).append((tile, tile.nodes.tolist()))
    widths = [picture.unit_width(own) for own in units.values()]
    if sum(widths) + 40 * (len(widths) - 1) > MAX_WIDTH and len(every) > 1:
        _large(picture, every, top)
        return
    x = 24.0
    for own, width in zip(units.values(), widths, strict=True):
        picture.unit(own, x, top + 34, top + 26)
        x += width + 40
    _spine(picture, 24, top, max(x - 40 - 24, 260))


def _large(picture: Picture, every: list[scene.Tile], top: float) -> None:
    """The tile of the chosen rank in full, and beside it all tiles, a dot a GPU."""
    node = int(picture.cluster.node[picture.placement.slots[picture.rank]])
    mine = next(tile for tile in every if node in tile.nodes)
    wanted = set(scene.shown_nodes(picture.placement, picture.rank, 32).tolist())
    nodes = mine.nodes.tolist()
    if len(nodes) > 32:
        near = [n for n in nodes if n in wanted]
        fill = [n for n in nodes if n not in wanted]
        nodes = sorted(near + fill[: 32 - len(near)])
    own = [(mine, nodes)]
    width = picture.unit_width(own)
    picture.unit(own, 24, top + 34, top + 26)
    right = draw_overview(picture, every, 24 + width + 70, top)
    _spine(picture, 24, top, right - 24)


def _legend(picture: Picture, y: float) -> None:
    """What colours and widths mean, with units."""
    layout, canvas = picture.placement.layout, picture.canvas
    x = 24.0
    place = layout.coordinates(picture.rank)
    entries = [(scene.CHOSEN, f"rank {picture.rank} ({place})")]
    entries += [
        (d, f"its {scene.GROUP_WORDS[d]} group ({d}={layout.size(d)})")
        for d in scene.GROUPS
        if layout.size(d) > 1
    ]
    for kind, words in entries:
        canvas.rect(x, y - 12, 22, 16, GROUP_COLOURS[kind], radius=3)
        canvas.text(x + 30, y + 1, words, size=13)
        x += 30 + Canvas.measure(words, 13) + 26
    x, y = 24.0, y + 32
    words = "line width: bytes of one step, one way (square root)"
    canvas.text(x, y + 1, words, size=13)
    x += Canvas.measure(words, 13) + 20
    largest = picture.loads.largest
    for nbytes in (largest, largest / 4, largest / 16, 0.0) if largest else (0.0,):
        canvas.line(x, y - 4, x + 34, y - 4, NVLINK, picture.width(nbytes), cls="sample")
        words = scene.byte_text(nbytes)
        canvas.text(x + 42, y + 1, words, size=13)
        x += 42 + Canvas.measure(words, 13) + 22
    x, y = 24.0, y + 30
    for colour, words in (
        (NVLINK, "down from a GPU: NVLink"),
        (rail_colour(0), "right of a GPU: its NIC, to its rail's leaf switch; a colour a rail"),
        (SPINE, "above a leaf switch: one of its uplinks"),
    ):
        canvas.line(x, y - 4, x + 26, y - 4, colour, 4)
        canvas.text(x + 34, y + 1, words, size=13)
        x += 34 + Canvas.measure(words, 13) + 26
