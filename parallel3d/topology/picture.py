"""Draws a cluster with its ranks, domains, rails and spine.

Each row is a node. Each cell is a GPU with its rank, in the colour of the group that it shares with
the chosen rank. The GPU's NVLink is drawn below the cell; its NIC, and the line from there up to
the leaf switch of its rail, are drawn to the right of the cell. One uplink of each leaf switch is
drawn, to the spine on the right. The width of a line grows with its bytes.
"""

from __future__ import annotations

import textwrap

import numpy as np

from parallel3d.blueprint.cluster import Slots
from parallel3d.blueprint.layout import Layout
from parallel3d.blueprint.rank_mapping import RankMapping
from parallel3d.svg import DARK, GREY, INK, PALETTE, Canvas
from parallel3d.text import byte_text
from parallel3d.topology.links import Loads

SPINE, WARNING = "#343a40", "#c92a2a"
INTRA = {"nvlink": DARK, "pcie": "#a0522d"}  # colour of a domain's lines
CHOSEN = "rank"  # mark of the chosen rank itself
# Colours of the chosen rank and of its groups.
GROUPS = {CHOSEN: INK, "tp": "#d9480f", "cp": "#862e9c", "pp": "#1864ab", "dp": "#2b8a3e"}
EXPERTS = "#c2255c"  # colour of the frames around the expert group of the chosen rank
GROUP_NAMES = {"tp": "tensor", "cp": "context", "pp": "pipeline", "dp": "data"}
# Beyond this number, only the nodes most relevant to the chosen rank are drawn.
MAX_NODES = 40

# Sizes are in pixels; GAP lies between the cells of a row.
CELL_H = 22
GAP = 28
STUB = 9
ROW = 50
LEAF, BAR = 17, 13  # distance between leaf switches, and their height
THICKEST = 9.0


def cluster_svg(placement: RankMapping, rank: int, loads: Loads, title: str, subtitle: str) -> str:
    """Returns the picture as SVG; `loads` determines the widths of the lines."""
    canvas = Canvas()
    canvas.text(24, 38, title, size=20, weight=600)
    for line, words in enumerate(textwrap.wrap(subtitle, 120)):
        canvas.text(24, 62 + 18 * line, words, size=13, fill=DARK)
    picture = _Picture(canvas, placement, rank, loads)
    picture.draw(canvas.bottom + 22)
    picture.legend(canvas.bottom + 34)
    return canvas.svg(title)


def marks(layout: Layout, rank: int) -> dict[int, str]:
    """Returns, for each rank in a group of the chosen rank, the dimension of that group."""
    shared = ((dim, layout.group_of(rank, dim)) for dim in GROUP_NAMES if layout.size(dim) > 1)
    return {member: dim for dim, group in shared for member in group} | {rank: CHOSEN}


def expert_group(layout: Layout, rank: int) -> list[int]:
    """Returns the ranks that hold all experts together with the chosen rank, or [] without ep."""
    return layout.group_of(rank, "ep") if layout.ep > 1 else []


def shown_nodes(placement: RankMapping, rank: int, limit: int = MAX_NODES) -> list[int]:
    """Returns at most `limit` nodes to draw, ascending.

    If the cluster has more nodes, the result has those of the rank and of its groups (only some of
    a large cp, pp, dp or ep group), the first two nodes and the last node.
    """
    cluster, layout = placement.cluster, placement.layout
    if cluster.nodes <= limit:
        return list(range(cluster.nodes))

    def nodes_of(dim: str) -> list[int]:
        nodes = cluster.node[placement.slots[layout.group_of(rank, dim)]].tolist()
        return list(dict.fromkeys(nodes))

    chosen = [int(cluster.node[placement.slots[rank]]), *nodes_of("tp")]
    chosen += [*nodes_of("cp")[: limit // 4], *nodes_of("pp")[: limit // 2]]
    chosen += nodes_of("ep")[: limit // 4] if layout.ep > 1 else []
    chosen += [0, 1, cluster.nodes - 1, *nodes_of("dp")[: limit // 4]]
    return sorted(list(dict.fromkeys(chosen))[:limit])


class _Picture:
    """Draws one picture; `left` and `right` are the borders of the GPUs and leaf switches."""

    def __init__(self, canvas: Canvas, placement: RankMapping, rank: int, loads: Loads) -> None:
        self.canvas = canvas
        self.placement = placement
        self.rank = rank
        self.loads = loads
        self.cluster = placement.cluster
        self.marked = marks(placement.layout, rank)
        self.experts = {*expert_group(placement.layout, rank)}
        self.cell = max(30, 8 * len(str(placement.layout.world_size - 1)) + 12)
        shown = shown_nodes(placement, rank)
        names = [Canvas.measure(self.cluster.node_name(node), 12) for node in shown]
        self.left = 24 + 18 + max(names)
        self.right = self.column(max(len(self.gpus(node)) for node in shown)) + 8
        self.hidden = self.cluster.nodes - len(shown)
        # The nodes of each unit that is drawn, ordered by domain.
        first = np.minimum(self.cluster.first_slot, self.cluster.size - 1)
        unit, domain = self.cluster.unit[first], self.cluster.domain[first]
        self.units: dict[int, list[int]] = {}
        for node in sorted(shown, key=lambda n: (int(unit[n]), int(domain[n]), n)):
            self.units.setdefault(int(unit[node]), []).append(node)

    def draw(self, top: float) -> None:
        """Draws all units, and the spine above them and to their right."""
        over, sent = self.cluster.oversubscription, byte_text(float(self.loads.uplink.sum()))
        words = "no spine: the rails are not connected"
        if self.cluster.forwards:
            words += "; NVLink reaches the other rails"
        if over is not None:
            rate = "carries all that the NICs send" if over == 1 else f"oversubscribed {over:g}:1"
            words = f"spine: {rate}; {sent} a step over it"
        fill, edge, ink = (SPINE, "", "#ffffff") if over is not None else ("none", WARNING, WARNING)
        kind, dash = ("spine", "") if over is not None else ("no-spine", "6 5")
        wide = max(self.right + 44 - 24, Canvas.measure(words, 12) + 20)
        self.canvas.rect(24, top, wide, 26, fill, edge, radius=6, dash=dash, cls=kind)
        self.canvas.text(34, top + 17.5, words, size=12, fill=ink)
        bottom = top + 26
        for unit, nodes in self.units.items():
            bottom = self.unit(unit, nodes, bottom + 8)
        if over is not None:
            last = bottom - ROW * len(nodes)
            self.canvas.rect(self.right + 30, top + 20, 14, last - top - 20, SPINE, radius=6)
        if self.hidden:
            text = f"not drawn: {self.hidden:,} more nodes"
            self.canvas.text(24, bottom + 16, text, size=12, fill=DARK)

    def gpus(self, node: int) -> Slots:
        """Returns the slots of a node."""
        return np.arange(*np.searchsorted(self.cluster.node, (node, node + 1)))

    def column(self, local: int) -> float:
        """Returns the x coordinate of a GPU's cell, with a gap between the domains of a node."""
        inside = min(self.cluster.domain_gpus, self.cluster.gpus_per_node)
        return self.left + 12 + local * (self.cell + GAP) + local // inside * 16

    def unit(self, unit: int, nodes: list[int], top: float) -> float:
        """Draws a unit's nodes and bars for its leaf switches, and returns the unit's bottom."""
        self.canvas.text(24, top + 18, f"unit {unit}", size=13, weight=600)
        bars = top + 28
        first = bars + self.cluster.rails * LEAF + 14
        self.domains(nodes, first)
        lines: dict[tuple[int, float], float] = {}  # (rail, x) -> lower end
        for row, node in enumerate(nodes):
            y = first + row * ROW
            self.canvas.text(32, y + 15, self.cluster.node_name(node), size=12)
            for slot in self.gpus(node).tolist():
                x = self.column(int(self.cluster.local[slot]))
                self.gpu(slot, x, y)
                rail = int(self.cluster.rail_of[slot])
                lines[rail, x + self.cell + GAP / 2] = y + CELL_H / 2
        for (rail, x), end in lines.items():
            colour, y = PALETTE[rail % 8][0], bars + rail * LEAF + BAR
            self.canvas.line(x, y, x, end, colour, 2, cls="rail", unit=unit, rail=rail)
        for rail in sorted({rail for rail, _ in lines}):  # drawn last, on top of the lines
            self.leaf(unit, rail, bars + rail * LEAF)
        return first + len(nodes) * ROW

    def domains(self, nodes: list[int], first: float) -> None:
        """Draws a frame around each domain, and the line that joins its GPUs."""
        found: dict[int, list[tuple[int, int]]] = {}  # domain -> (row, local index)
        for row, node in enumerate(nodes):
            for slot in self.gpus(node):
                place = row, int(self.cluster.local[slot])
                found.setdefault(int(self.cluster.domain[slot]), []).append(place)
        kind, bus = self.cluster.intra, CELL_H + STUB
        for domain, places in found.items():
            rows, columns = ({place[i] for place in places} for i in (0, 1))
            left, right = self.column(min(columns)), self.column(max(columns)) + self.cell
            y, last = first + min(rows) * ROW, first + max(rows) * ROW
            tip = f"{self.cluster.intra_name} domain {domain}"
            frame = (left - 8, y - 8, right - left + 16, last - y + ROW - 6, "#f1f3f5", "#adb5bd")
            self.canvas.rect(*frame, radius=7, tip=tip, cls="domain", domain=domain)
            if len(rows) > 1:
                ends = (left - 4, y + bus, left - 4, last + bus)
                self.canvas.line(*ends, INTRA[kind], 2.5, cls=kind)
            for row in rows if len(places) > 1 else ():
                begin = left - 4 if len(rows) > 1 else left
                end = self.column(max(local for r, local in places if r == row)) + self.cell
                ends = (begin, first + row * ROW + bus, end, first + row * ROW + bus)
                self.canvas.line(*ends, INTRA[kind], 2.5, cls=kind)

    def gpu(self, slot: int, x: float, y: float) -> None:
        rank, rail = int(self.placement.ranks[slot]), int(self.cluster.rail_of[slot])
        kind = self.marked.get(rank) if rank >= 0 else None
        sent, network = float(self.loads.nvlink[slot]), float(self.loads.nic[slot])
        middle = x + self.cell / 2
        right = x + self.cell
        half = y + CELL_H / 2
        intra, bottom = self.cluster.intra, y + CELL_H
        self.wire(intra, middle, bottom, middle, bottom + STUB, INTRA[intra], sent)
        self.wire("nic", right, half, right + GAP / 2, half, PALETTE[rail % 8][0], network)
        tip = (
            f"{f'rank {rank}' if rank >= 0 else 'no rank'} on {self.cluster.slot_name(slot)}, rail "
            f"{rail}: {self.cluster.intra_name} {byte_text(sent)}, {self.cluster.nic_name} "
            f"{byte_text(network)} a step"
        )
        fill, name = GROUPS[kind] if kind else "#ffffff", f"gpu {kind or ''}".strip()
        box = (x, y, self.cell, CELL_H, fill, fill if kind else GREY)
        self.canvas.rect(*box, radius=4, tip=tip, cls=name, rank=rank)
        if rank in self.experts:
            frame = (x - 3, y - 3, self.cell + 6, CELL_H + 6, "none", EXPERTS)
            self.canvas.rect(*frame, radius=6, cls="experts", rank=rank)
        words = str(rank) if rank >= 0 else "–"
        ink, weight = ("#ffffff", 600) if kind else (INK, 400)
        self.canvas.text(middle, y + 15.5, words, size=12, anchor="middle", fill=ink, weight=weight)

    def leaf(self, unit: int, rail: int, y: float) -> None:
        """Draws a leaf switch and one of its uplinks."""
        colour, ink = PALETTE[rail % 8]
        sent, port = float(self.loads.uplink[unit, rail]), float(self.loads.port[unit, rail])
        if self.cluster.oversubscription is not None:
            middle = y + BAR / 2
            self.wire("uplink", self.right, middle, self.right + 30, middle, colour, port)
        tip = (
            f"leaf switch of rail {rail}, unit {unit}: {byte_text(sent)} a step to the spine, "
            f"{byte_text(port)} an uplink"
        )
        box = (self.left, y, self.right - self.left, BAR, colour)
        self.canvas.rect(*box, radius=4, tip=tip, cls="leaf", unit=unit, rail=rail)
        self.canvas.text(self.left + 8, y + 10.5, f"r{rail}", size=10, fill=ink, weight=600)

    def wire(
        self, kind: str, x1: float, y1: float, x2: float, y2: float, colour: str, nbytes: float
    ) -> None:
        """Draws a line whose width grows with its bytes per step."""
        width = self.thickness(nbytes)
        self.canvas.line(x1, y1, x2, y2, colour, width, cls=f"wire {kind}", bytes=f"{nbytes:.0f}")

    def thickness(self, nbytes: float) -> float:
        """Returns a line's width in pixels, which grows with the square root of its bytes."""
        share = nbytes / self.loads.largest if nbytes > 0 else 0.0
        return 1.2 + (THICKEST - 1.2) * share**0.5 if share else 0.6

    def legend(self, y: float) -> None:
        """Draws the legend of colours and widths."""
        layout = self.placement.layout
        canvas = self.canvas
        x = 24.0
        entries = {CHOSEN: f"rank {self.rank} ({layout.named(self.rank)})"}
        for dim, word in GROUP_NAMES.items():
            if layout.size(dim) > 1:
                entries[dim] = f"its {word} group ({dim}={layout.size(dim)})"
        for kind, words in entries.items():
            canvas.rect(x, y - 12, 22, 16, GROUPS[kind], radius=3)
            canvas.text(x + 30, y + 1, words, size=13)
            x += 30 + Canvas.measure(words, 13) + 26
        if layout.ep > 1:
            canvas.rect(x, y - 12, 22, 16, "none", EXPERTS, radius=3)
            canvas.text(x + 30, y + 1, f"framed: its expert group (ep={layout.ep})", size=13)
        x = 24.0
        y = y + 32
        largest = self.loads.largest
        words = "line width: bytes of one step, one way (square root)"
        canvas.text(x, y + 1, words, size=13)
        x += Canvas.measure(words, 13) + 20
        for nbytes in (largest, largest / 4, largest / 16, 0.0) if largest else (0.0,):
            canvas.line(x, y - 4, x + 34, y - 4, DARK, self.thickness(nbytes), cls="sample")
            canvas.text(x + 42, y + 1, byte_text(nbytes), size=13)
            x += 42 + Canvas.measure(byte_text(nbytes), 13) + 22
        words = (
            f"down from a GPU: its {self.cluster.intra_name}; right of it: its "
            f"{self.cluster.nic_name}, in the colour of its rail; "
        )
        canvas.text(24, y + 31, words + "right of a leaf switch: one of its uplinks", size=13)
