"""The map of a cluster in the terminal: domains as boxes, rails as columns, the spine above.

A line is a list of (text, style) pieces; `plain` joins them, `report` colours them. Nothing is
wider than the width asked for, unless one node alone with three GPUs a line is.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from parallel3d.topology.cluster.parts import Cluster
from parallel3d.topology.map import scene
from parallel3d.topology.map.palette import GROUP_COLOURS
from parallel3d.topology.tiling import Placement

Line = list[tuple[str, str]]

MARKS = {scene.CHOSEN: "*", "tp": "t", "cp": "c", "pp": "p", "dp": "d"}
RAIL_STYLES = ("blue", "yellow", "green", "red", "cyan", "magenta", "bright_blue", "bright_black")
STYLES = {
    **{kind: f"bold white on {colour}" for kind, colour in GROUP_COLOURS.items()},
    scene.CHOSEN: "bold reverse",  # on a dark terminal and on a light one
    "box": "bold",
    "spine": "bold",
    "quiet": "dim",
}
MAX_NODES = 20  # rows of the map where a node is a domain
MAX_WIDE_NODES = 40  # where several nodes share one: boxes stand side by side


def style_of(name: str) -> str:
    """The rich style behind a piece's style name: `tp`, `box`, `rail3`, ..."""
    if name.startswith("rail"):
        return RAIL_STYLES[int(name[4:]) % len(RAIL_STYLES)]
    return STYLES.get(name, "")


def plain(lines: list[Line]) -> str:
    """The map without colours."""
    return "\n".join("".join(text for text, _ in line).rstrip() for line in lines)


def terminal_map(
    placement: Placement, rank: int, width: int, spine_bytes: float | None = None
) -> list[Line]:
    """The whole map, `width` columns at most; the groups of `rank` carry marks and colours."""
    drawing = _Map(placement, scene.marks(placement.layout, rank), width)
    limit = MAX_WIDE_NODES if scene.domains_span_nodes(placement.cluster) else MAX_NODES
    shown = scene.shown_nodes(placement, rank, limit)
    blocks = drawing.blocks(shown)
    body = _flow(blocks, width)
    widest = max(_length(line) for line in body)
    lines = [*_spine(placement.cluster, spine_bytes, min(width, max(widest, 36))), *body]
    return [*lines, [], *_legend(placement, rank, drawing.marked, shown, width)]


@dataclass
class _Map:
    """The fixed sizes of one map, and how its blocks are drawn."""

    placement: Placement
    marked: dict[int, str]
    width: int

    def __post_init__(self) -> None:
        cluster = self.placement.cluster
        self.digits = max(1, len(str(self.placement.layout.world_size - 1)))
        self.gpus = np.bincount(cluster.node, minlength=cluster.nodes)
        fullest = int(cluster.first_slot[self.gpus.argmax()])
        self.rails = cluster.rail_of[fullest : fullest + int(self.gpus.max())].tolist()

    def blocks(self, shown: scene.Nodes) -> list[list[Line]]:
        """One block a tile that has shown nodes; a line for each run of tiles that has none."""
        visible = set(shown.tolist())
        names = [self.placement.cluster.node_name(n) for n in visible]
        units = [f"unit {tile.unit}" for tile in scene.tiles(self.placement.cluster)[-1:]]
        self.label = max(6, *(len(name) for name in names + units)) + 1
        # The edge, the number and its mark; a blank behind where a whole node then still fits.
        most, room = int(self.gpus.max()), self.width - self.label - 2
        self.cell = self.digits + (3 if most * (self.digits + 3) <= room else 2)
        self.cell = max(4, self.cell)
        self.columns = min(most, max(1, room // self.cell))
        if self.columns < most and self.columns >= 4:
            self.columns -= self.columns % 4
        found: list[list[Line]] = []
        gap: list[scene.Tile] = []
        for tile in scene.tiles(self.placement.cluster):
            if not visible.isdisjoint(tile.nodes.tolist()):
                found += self._gap(gap)
                found.append(self._block(tile, visible))
                gap = []
            else:
                gap.append(tile)
        return found + self._gap(gap)

    def _gap(self, skipped: list[scene.Tile]) -> list[list[Line]]:
        if not skipped:
            return []
        nodes = sum(len(tile.nodes) for tile in skipped)
        if skipped[0].domain is None:
            what = _span("unit", skipped[0].unit, skipped[-1].unit)
        else:
            what = _span("domain", skipped[0].domain, skipped[-1].domain or 0)
        return [[[(f"⋮ {what} ({nodes:,} nodes)"[: self.width], "quiet")]]]

    def _block(self, tile: scene.Tile, visible: set[int]) -> list[Line]:
        domain = None if tile.domain is None else f" domain {tile.domain} "
        lines: list[Line] = [self._leaves(tile.unit), self._border("╭", "─", "╮", domain)]
        skipped = 0
        for place, node in enumerate(tile.nodes.tolist()):
            if node not in visible:
                skipped += 1
                continue
            if skipped:
                lines.append(self._skip(skipped))
            elif place and tile.domain is None:
                lines.append(self._border("├", "─", "┤"))
            lines += self._node(node)
            skipped = 0
        if skipped:
            lines.append(self._skip(skipped))
        lines.append(self._border("╰", "─", "╯"))
        return lines

    def _leaves(self, unit: int) -> Line:
        line: Line = [(f"unit {unit}".ljust(self.label + 1), "box")]
        for column in range(self.columns):
            rail = self.rails[column]
            line.append((f"[r{rail}]".center(self.cell), f"rail{rail}"))
        return [*line, (" ", "")]

    def _border(self, left: str, middle: str, right: str, title: str | None = None) -> Line:
        line: Line = [(" " * self.label, ""), (left, "box")]
        if title and len(title) < self.columns * self.cell:
            return [*line, (title.ljust(self.columns * self.cell, middle), "box"), (right, "box")]
        for column in range(self.columns):
            before = (self.cell - 1) // 2
            line.append((middle * before, "box"))
            line.append(("┼", f"rail{self.rails[column]}"))
            line.append((middle * (self.cell - before - 1), "box"))
        return [*line, (right, "box")]

    def _skip(self, nodes: int) -> Line:
        text = f"⋮ {nodes:,} node{'s' if nodes > 1 else ''}"
        room = self.columns * self.cell
        return [(" " * self.label, ""), ("│", "box"), (text.center(room), "quiet"), ("│", "box")]

    def _node(self, node: int) -> list[Line]:
        cluster = self.placement.cluster
        gpus = int(self.gpus[node])
        lines: list[Line] = []
        for start in range(0, max(gpus, 1), self.columns):
            name = cluster.node_name(node) if start == 0 else f"+{start}"
            line: Line = [(name.ljust(self.label), ""), ("│", "box")]
            for local in range(start, start + self.columns):
                line += self._gpu(node, local) if local < gpus else [(" " * self.cell, "")]
            lines.append([*line, ("│", "box")])
        return lines

    def _gpu(self, node: int, local: int) -> Line:
        cluster = self.placement.cluster
        slot = int(cluster.first_slot[node]) + local
        rank = int(self.placement.ranks[slot])
        edge = " "
        if local and cluster.domain[slot] != cluster.domain[slot - 1]:
            edge = "│"
        if rank < 0:
            return [(edge, "box"), ("–".rjust(self.digits).ljust(self.cell - 1), "quiet")]
        kind = self.marked.get(rank)
        text = f"{rank:>{self.digits}}{MARKS[kind] if kind else ' '}"
        style = kind or f"rail{int(cluster.rail_of[slot])}"
        return [(edge, "box"), (text, style), (" " * (self.cell - len(text) - 1), "")]


def _spine(cluster: Cluster, spine_bytes: float | None, width: int) -> list[Line]:
    if cluster.oversubscription is None:
        text = " no spine: nothing joins the rails "
        return [[(text.center(width, "╌")[:width], "quiet")]]
    text = f" spine, {cluster.oversubscription:g}:1"
    if spine_bytes is not None:
        text += f", {scene.byte_text(spine_bytes)} a step"
    return [[((text + " ").center(width, "═")[:width], "spine")]]


def _flow(blocks: list[list[Line]], width: int) -> list[Line]:
    """Blocks and elisions beside each other while they fit."""
    lines: list[Line] = []
    row: list[list[Line]] = []

    def flush() -> None:
        if not row:
            return
        wide = [max(_length(line) for line in block) for block in row]
        for index in range(max(len(block) for block in row)):
            joined: Line = []
            for block, room in zip(row, wide, strict=True):
                line = block[index] if index < len(block) else []
                joined += [*line, (" " * (room - _length(line) + 2), "")]
            lines.append(joined)
        row.clear()

    for block in blocks:
        taken = sum(max(_length(line) for line in one) + 2 for one in row)
        if taken + max(_length(line) for line in block) > width:
            flush()
        row.append(block)
    flush()
    for line in lines:
        while line and not line[-1][0].strip():
            line.pop()
    return lines


def _legend(
    placement: Placement, rank: int, marked: dict[int, str], shown: scene.Nodes, width: int
) -> list[Line]:
    """What the marks mean, and the members of each group, those not on the map counted."""
    layout = placement.layout
    hidden = scene.hidden_marks(placement, marked, shown)
    place = layout.coordinates(rank)
    head = f"rank {rank} = ({place}) on {placement.cluster.slot_name(int(placement.slots[rank]))}"
    lines: list[Line] = [[("*", scene.CHOSEN), (f" {head}"[: width - 1], "")]]
    for dim in scene.GROUPS:
        if layout.size(dim) == 1:
            continue
        group = layout.group_of(rank, dim)
        text = f" {scene.GROUP_WORDS[dim]} group ({dim}={layout.size(dim)}): "
        away = hidden.get(dim, {})
        if away:
            nodes = f"{len(away):,} node{'s' if len(away) > 1 else ''}"
            tail = f"; {sum(away.values()):,} of them on {nodes} not drawn"
        else:
            tail = ""
        text += _members(group, width - 1 - len(text) - len(tail)) + tail
        lines.append([(MARKS[dim], dim), (text[: width - 1], "")])
    return lines


def _members(group: list[int], room: int) -> str:
    """`0 8 16 … 56`, as many as fit."""
    text = " ".join(map(str, group[: room + 1]))
    if len(group) <= room and len(text) <= room:
        return text
    tail = f" … {group[-1]}"
    kept = ""
    for member in group:
        if len(kept) + len(str(member)) + 1 + len(tail) > max(room, 12):
            break
        kept += f"{member} "
    return kept.rstrip() + tail


def _span(word: str, first: int, last: int) -> str:
    return f"{word} {first}" if first == last else f"{word}s {first} to {last}"


def _length(line: Line) -> int:
    return sum(len(text) for text, _ in line)
