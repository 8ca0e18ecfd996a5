"""One unit of a cluster as SVG: nodes with their GPUs, domains, rails, leaf switches and wires."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from parallel3d.topology.cluster.parts import Cluster
from parallel3d.topology.map.canvas import Canvas
from parallel3d.topology.map.palette import GREY, GROUP_COLOURS, NVLINK, ink_on, rail_colour
from parallel3d.topology.map.scene import Tile, byte_text, marks
from parallel3d.topology.price.loads import Loads
from parallel3d.topology.tiling import Placement

CELL_H = 22  # a GPU
GAP = 28  # between GPUs: room for the NIC's wire and the rail
STUB = 9  # a GPU's wire to its NVLink
ROW = 50  # from node to node
LEAF = 18  # height of a leaf switch
THICKEST = 9.0


class Picture:
    """One drawing under way: what is drawn, where, and in which sizes."""

    def __init__(self, placement: Placement, rank: int, loads: Loads) -> None:
        self.placement, self.rank, self.loads = placement, rank, loads
        self.cluster: Cluster = placement.cluster
        self.marked: Mapping[int, str] = marks(placement.layout, rank)
        self.canvas = Canvas()
        self.gpus = np.bincount(self.cluster.node, minlength=self.cluster.nodes)
        digits = len(str(placement.layout.world_size - 1))
        self.cell = max(30, 8 * digits + 12)
        # Where the line of each (unit, rail, x) ends below; filled while a unit is drawn.
        self._lowest: dict[tuple[int, int, float], float] = {}

    def width(self, nbytes: float) -> float:
        """Line width in pixels: a hairline for nothing, then with the square root of the bytes."""
        largest = self.loads.largest
        return 0.6 if nbytes <= 0 else 1.2 + (THICKEST - 1.2) * float(np.sqrt(nbytes / largest))

    def wire(
        self,
        kind: str,
        x1: float,
        y1: float,
        x2: float,
        y2: float,
        colour: str,
        nbytes: float,
        **marks: object,
    ) -> None:
        """A line as wide as its bytes of a step say."""
        size = f"{nbytes:.0f}"
        cls, width = f"wire {kind}", self.width(nbytes)
        self.canvas.line(x1, y1, x2, y2, colour, width, cls=cls, bytes=size, **marks)

    def column(self, local: int) -> float:
        """Offset of a GPU's cell from its node's left edge; domains inside a node stand apart."""
        inside = min(self.cluster.domain_gpus, self.cluster.gpus_per_node)
        return 12 + local * (self.cell + GAP) + local // inside * 16

    def label_width(self, nodes: list[int]) -> float:
        return 18 + max(Canvas.measure(self.cluster.node_name(n), 12) for n in nodes)

    def tile_width(self, nodes: list[int]) -> float:
        most = max(int(self.gpus[n]) for n in nodes)
        return self.label_width(nodes) + self.column(max(most, 1)) + 2

    def tile(self, tile: Tile, nodes: list[int], x: float, y: float) -> dict[int, list[float]]:
        """The nodes of a tile below each other; returns the x of each rail's lines.

        Domains are boxes, GPUs cells with their rank; a wire leads from each GPU down to its
        domain's NVLink and right to its rail.
        """
        left = x + self.label_width(nodes)
        if tile.domain is not None:
            more = 20 if len(nodes) < len(tile.nodes) else 0
            height = len(nodes) * ROW + more
            self._domain(tile.domain, x, y - 8, self.tile_width(nodes), height)
            last = y + (len(nodes) - 1) * ROW + CELL_H + STUB
            self.canvas.line(left + 4, y + CELL_H + STUB, left + 4, last, NVLINK, 2.5, cls="nvlink")
        ends: dict[tuple[int, float], float] = {}
        hidden = len(tile.nodes) - len(nodes)
        for row, node in enumerate(nodes):
            top = y + row * ROW
            self.canvas.text(x + 8, top + 15, self.cluster.node_name(node), size=12)
            self._node(tile, node, left, top, ends)
        if hidden:
            what = "unit" if tile.domain is None else "domain"
            text = f"… and {hidden:,} more nodes of this {what}"
            self.canvas.text(left + 12, y + len(nodes) * ROW + 4, text, size=12, fill=NVLINK)
        by_rail: dict[int, list[float]] = {}
        for (rail, at), lowest in ends.items():
            by_rail.setdefault(rail, []).append(at)
            self._lowest[(tile.unit, rail, at)] = lowest
        return by_rail

    def _node(
        self, tile: Tile, node: int, left: float, top: float, ends: dict[tuple[int, float], float]
    ) -> None:
        cluster, first = self.cluster, int(self.cluster.first_slot[node])
        slots = np.arange(first, first + int(self.gpus[node]))
        for domain in np.unique(cluster.domain[slots]).tolist():
            local = cluster.local[slots[cluster.domain[slots] == domain]].tolist()
            start, end = left + self.column(local[0]), left + self.column(local[-1]) + self.cell
            if tile.domain is None:
                self._domain(domain, start - 8, top - 8, end - start + 16, ROW - 6)
            bus = top + CELL_H + STUB
            if len(local) > 1 or tile.domain is not None:
                begin = start if tile.domain is None else left + 4
                self.canvas.line(begin, bus, end, bus, NVLINK, 2.5, cls="nvlink")
        for slot in slots.tolist():
            x = left + self.column(int(cluster.local[slot]))
            self._gpu(slot, x, top)
            rail = int(cluster.rail_of[slot])
            ends[(rail, x + self.cell + GAP / 2)] = top + CELL_H / 2

    def _domain(self, domain: int, x: float, y: float, width: float, height: float) -> None:
        place = {"cls": "domain", "domain": domain, "tip": f"NVLink domain {domain}"}
        self.canvas.rect(x, y, width, height, "#f1f3f5", "#adb5bd", radius=7, **place)

    def _gpu(self, slot: int, x: float, y: float) -> None:
        rank = int(self.placement.ranks[slot])
        kind = self.marked.get(rank) if rank >= 0 else None
        sent, network = float(self.loads.nvlink[slot]), float(self.loads.nic[slot])
        rail = int(self.cluster.rail_of[slot])
        middle = x + self.cell / 2
        bottom, right, half = y + CELL_H, x + self.cell, y + CELL_H / 2
        self.wire("nvlink", middle, bottom, middle, bottom + STUB, NVLINK, sent)
        self.wire("nic", right, half, right + GAP / 2, half, rail_colour(rail), network)
        place = f"rank {rank}" if rank >= 0 else "no rank"
        tip = (
            f"{place} on {self.cluster.slot_name(slot)}, rail {rail}: NVLink {byte_text(sent)}, "
            f"NIC {byte_text(network)} a step"
        )
        fill = GROUP_COLOURS[kind] if kind else "#ffffff"
        edge, cls = (fill, f"gpu {kind}") if kind else (GREY, "gpu")
        self.canvas.rect(x, y, self.cell, CELL_H, fill, edge, radius=4, tip=tip, cls=cls, rank=rank)
        word, ink = str(rank) if rank >= 0 else "–", "#ffffff" if kind else "#212529"
        weight = 600 if kind else 400
        self.canvas.text(middle, y + 15.5, word, size=12, anchor="middle", fill=ink, weight=weight)

    def unit(self, own: list[tuple[Tile, list[int]]], x: float, top: float, spine: float) -> None:
        """One unit's tiles beside each other, its leaf switches above them, wires to the spine.

        A leaf switch is as wide as the columns of its rail. Where they overlap, each has a height
        of its own, the lower ones longer, so that no uplink crosses another switch.
        """
        columns: dict[int, list[float]] = {}
        levels = self.leaf_levels(own)
        y = top + levels * (LEAF + 6) + 40
        left = x
        for tile, nodes in own:
            for rail, at in self.tile(tile, nodes, left, y).items():
                columns.setdefault(rail, []).extend(at)
            left += self.tile_width(nodes) + 24
        unit = own[0][0].unit
        right = max(max(at) for at in columns.values()) + 16
        for rail, at in sorted(columns.items()):
            level = rail if levels > 1 else 0
            leaf = top + 16 + level * (LEAF + 6)
            half = min(17.0, (self.cell + GAP) / 2 - 3)
            end = max(at) + half if levels == 1 else right + rail * 12 + 14
            self._rail(unit, rail, at, leaf + LEAF)
            uplink = max(at) if levels == 1 else end - 6
            self._leaf(unit, rail, min(at) - half, leaf, end, uplink, spine)
        self.canvas.text(x, y - 20, f"unit {unit}", size=13, weight=600)

    def leaf_levels(self, own: list[tuple[Tile, list[int]]]) -> int:
        """Heights that the leaf switches need: one if every rail is a single column."""
        most = max(int(self.gpus[n]) for _, nodes in own for n in nodes)
        return 1 if len(own) == 1 and most <= self.cluster.rails else self.cluster.rails

    def unit_width(self, own: list[tuple[Tile, list[int]]]) -> float:
        extra = 0 if self.leaf_levels(own) == 1 else 12 * self.cluster.rails + 20
        return sum(self.tile_width(nodes) + 24 for _, nodes in own) - 24 + extra

    def _rail(self, unit: int, rail: int, columns: list[float], top: float) -> None:
        path = "".join(
            f"M{at:g},{self._lowest[(unit, rail, at)]:g}V{top:g}" for at in sorted(columns)
        )
        self.canvas.path(path, rail_colour(rail), 2.5, cls="rail", unit=unit, rail=rail)

    def _leaf(
        self, unit: int, rail: int, x: float, y: float, end: float, uplink: float, spine: float
    ) -> None:
        colour = rail_colour(rail)
        sent, port = float(self.loads.uplink[unit, rail]), float(self.loads.port[unit, rail])
        if self.cluster.oversubscription is not None:
            self.wire("uplink", uplink, y, uplink, spine, colour, port)
        tip = (
            f"leaf switch of rail {rail}, unit {unit}: {byte_text(sent)} a step to the spine, "
            f"{byte_text(port)} an uplink"
        )
        place = {"cls": "leaf", "unit": unit, "rail": rail}
        self.canvas.rect(x, y, end - x, LEAF, colour, radius=4, tip=tip, **place)
        wide = end - x
        name = f"leaf r{rail}" if wide > 60 else f"r{rail}"
        at, ink = x + (wide / 2 if wide < 60 else 34), ink_on(rail)
        self.canvas.text(at, y + 13, name, size=11, anchor="middle", fill=ink, weight=600)
