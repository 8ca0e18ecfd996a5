"""Tests the picture of a cluster: everything is drawn once, and inside the picture."""

from __future__ import annotations

import functools
import re
from collections import Counter
from itertools import pairwise
from xml.etree import ElementTree

import numpy as np
import pytest

from parallel3d.blueprint.cluster import Cluster, Link
from parallel3d.blueprint.collectives import Transfer
from parallel3d.blueprint.layout import Layout
from parallel3d.blueprint.rank_mapping import RankMapping, Tiling
from parallel3d.estimate.network import StepPrice, price_step
from parallel3d.svg import Canvas
from parallel3d.text import byte_text
from parallel3d.topology.links import Loads, loads_of
from parallel3d.topology.picture import (
    CHOSEN,
    GROUP_NAMES,
    MAX_NODES,
    cluster_svg,
    marks,
    shown_nodes,
)

SVG = "{http://www.w3.org/2000/svg}"
SENT = [
    Transfer("tp", "all_reduce", 64_000_000, 40, "activations"),
    Transfer("pp", "send_recv", 64_000_000, 8, "activations"),
    Transfer("dp", "all_reduce", 25_000_000, 30, "gradient buckets"),
    Transfer("world", "all_reduce", 24, 1, "loss and norm"),
]


def cluster(nodes: int, gpus: int, domain: int, rails: int, **more) -> Cluster:
    wires = {"nvlink": Link(450, 3), "rail": Link(50, 14), "spine": Link(50, 15)}
    return Cluster("test", nodes, gpus, domain, rails, **wires, **more)


def placed(on: Cluster, tp: int, pp: int, order: str = "tp-dp-pp") -> RankMapping:
    layout = Layout(tp=tp, pp=pp, dp=on.size // (tp * pp))
    return RankMapping.tiled(on, layout, Tiling.parse(order, layout))


SMALL = {
    "six GPUs": placed(cluster(3, 2, 2, 2), 2, 3),
    "two H100 nodes": placed(cluster(2, 8, 8, 8), 8, 1),
    "H100, tp4": placed(cluster(4, 8, 8, 8), 4, 2),
    "half domains": placed(cluster(4, 8, 4, 4, unit_nodes=2), 4, 2),
    "no spine": placed(cluster(4, 8, 8, 8, oversubscription=None), 8, 2),
    "NVL72 x 2": placed(cluster(36, 4, 72, 4), 4, 8, "tp-pp-dp"),
    "uneven": placed(cluster(3, 4, 4, 4, node_gpus=(4, 2, 3), node_names=("a", "bb", "c")), 1, 2),
    "two units": placed(cluster(6, 4, 4, 4, unit_nodes=3, oversubscription=4.0), 4, 3),
    "one GPU": placed(cluster(1, 1, 1, 1), 1, 1),
}
LARGE = {
    "H100 pod": placed(cluster(1024, 8, 8, 8, unit_nodes=32), 8, 8),
    "NVL72 x 36": placed(cluster(648, 4, 72, 4), 4, 8),
    "one flat unit": placed(cluster(200, 8, 8, 8), 8, 5, "tp-pp-dp"),
    "small units": placed(cluster(400, 4, 4, 4, unit_nodes=4), 4, 20),
    "rail only": placed(cluster(64, 8, 8, 8, oversubscription=None), 8, 4),
}
EVERY = SMALL | LARGE
RANKS = (0, 1, -1)


@functools.cache
def priced(name: str) -> tuple[StepPrice, Loads]:
    price = price_step(EVERY[name], SENT)
    return price, loads_of(EVERY[name], price)


@functools.cache
def drawn(name: str, rank: int = 0) -> ElementTree.Element:
    """Returns the picture of one of EVERY, which nothing changes."""
    text = cluster_svg(EVERY[name], rank, priced(name)[1], "a < b & c", "words " * 60)
    return ElementTree.fromstring(text)


def of_class(root: ElementTree.Element, name: str) -> list[ElementTree.Element]:
    return [e for e in root.iter() if name in e.get("class", "").split()]


# --- what is shown ---------------------------------------------------------------------------


@pytest.mark.parametrize("name", EVERY)
def test_highlighted_gpus_are_the_groups_of_the_rank(name: str) -> None:
    layout = EVERY[name].layout
    for rank in {r % layout.world_size for r in RANKS}:
        marked = marks(layout, rank)
        assert marked.pop(rank) == CHOSEN
        for dim in GROUP_NAMES:
            group = set(layout.group_of(rank, dim)) - {rank}
            assert {r for r, d in marked.items() if d == dim} == group


def test_shown_nodes_hold_the_ranks_replica() -> None:
    placement = LARGE["H100 pod"]
    for rank in (0, 4321, 8191):
        shown = shown_nodes(placement, rank, 20)
        group = placement.layout.group_of(rank, "tp") + placement.layout.group_of(rank, "pp")
        assert set(placement.cluster.node[placement.slots[group]].tolist()) <= set(shown)
        assert {0, 1023} <= set(shown)
        assert len(shown) <= 20


@pytest.mark.parametrize("name", EVERY)
def test_loads_add_up_to_the_price(name: str) -> None:
    placement = EVERY[name]
    price, loads = priced(name)
    total = {"nvlink": 0.0, "rail": 0.0, "spine": 0.0}
    for dim in price.dims.values():
        for kind, nbytes in dim.nbytes.items():
            total[kind.label] += nbytes
    assert loads.nvlink.sum() == pytest.approx(total["nvlink"])
    assert loads.nic.sum() == pytest.approx(total["rail"] + total["spine"])
    assert loads.uplink.sum() == pytest.approx(total["spine"])
    busiest = loads.busiest(placement.cluster)
    assert ("nic" in busiest, "uplink" in busiest) == (
        total["rail"] + total["spine"] > 0,
        total["spine"] > 0,
    )


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [
        *((0, "0 B"), (999, "999 B"), (1000, "1.00 kB"), (999_499, "999 kB"), (999_500, "1.00 MB")),
        *((12_345_678, "12.3 MB"), (9_996e6, "10.0 GB"), (2.5e15, "2.50 PB")),
    ],
)
def test_bytes_in_three_digits(nbytes: float, text: str) -> None:
    assert byte_text(nbytes) == text


# --- the SVG ---------------------------------------------------------------------------------


@pytest.mark.parametrize("name", SMALL)
def test_svg_draws_every_domain_rail_leaf_and_gpu_once(name: str) -> None:
    placement = SMALL[name]
    on = placement.cluster
    assert on.nodes <= MAX_NODES
    root = drawn(name)
    domains = Counter(int(e.get("data-domain", -1)) for e in of_class(root, "domain"))
    assert domains == Counter(set(on.domain.tolist()))
    both = Counter(zip(on.unit.tolist(), on.rail_of.tolist(), strict=True))
    for kind in ("rail", "leaf"):
        seen = Counter(
            (int(e.get("data-unit", -1)), int(e.get("data-rail", -1))) for e in of_class(root, kind)
        )
        assert seen.keys() == both.keys()
        assert kind == "rail" or max(seen.values()) == 1  # a line for each column of GPUs
    seen = Counter(int(e.get("data-rank", -2)) for e in of_class(root, "gpu"))
    assert seen == Counter(placement.ranks.tolist())


@pytest.mark.parametrize("name", EVERY)
def test_svg_highlights_the_groups_of_the_chosen_rank(name: str) -> None:
    placement = EVERY[name]
    layout = placement.layout
    for rank in {r % layout.world_size for r in RANKS}:
        root = drawn(name, rank)
        expected = marks(layout, rank)
        found = [(kind, e) for kind in (CHOSEN, *GROUP_NAMES) for e in of_class(root, kind)]
        seen = {int(element.get("data-rank", -1)): kind for kind, element in found}
        assert seen.items() <= expected.items()
        if name in SMALL:
            assert seen == expected
        assert {r for r, d in seen.items() if d in (CHOSEN, "tp")} >= set(
            layout.group_of(rank, "tp")
        )


@pytest.mark.parametrize("name", LARGE)
def test_svg_of_a_large_cluster_counts_the_nodes_that_it_leaves_out(name: str) -> None:
    placement = LARGE[name]
    on = placement.cluster
    root = drawn(name)
    texts = [t.text or "" for t in root.iter(f"{SVG}text")]
    shown = {re.match(r"rank \d+ on (\S+) GPU", t.text or "")[1] for t in root.iter(f"{SVG}title")
             if (t.text or "").startswith("rank ")}  # fmt: skip
    assert shown <= set(texts) and len(shown) <= MAX_NODES
    counts = [re.search(r"([\d,]+) more nodes", text) for text in texts]
    hidden = sum(int(count[1].replace(",", "")) for count in counts if count)
    assert len(shown) + hidden == on.nodes


@pytest.mark.parametrize("name", EVERY)
def test_svg_line_widths_grow_with_bytes(name: str) -> None:
    root = drawn(name)
    wires = [
        (float(e.get("data-bytes", -1)), float(e.get("stroke-width", 0)))
        for e in of_class(root, "wire")
    ]
    assert wires
    widths: dict[float, float] = dict(wires)
    assert all(widths[nbytes] == width for nbytes, width in wires)
    for less, more in pairwise(sorted(widths)):
        assert widths[less] <= widths[more]
        if more > 1.05 * less and more > 1e-3 * max(widths):
            assert widths[less] < widths[more]


def boxes(root: ElementTree.Element) -> list[tuple[str, float, float, float, float]]:
    """Returns (words, left, top, right, bottom) of every text, by the widths of common fonts."""
    found = []
    for text in root.iter(f"{SVG}text"):
        size, x, y = (float(text.get(k, 0)) for k in ("font-size", "x", "y"))
        # Arial's and DejaVu's widths differ by a fifth; the canvas overestimates.
        wide = 0.8 * Canvas.measure(text.text or "", size)
        left = x - wide / 2 if text.get("text-anchor") == "middle" else x
        found.append((text.text or "", left, y - 0.75 * size, left + wide, y + 0.2 * size))
    return found


def overlapping(found: list[tuple[str, float, float, float, float]]) -> list[tuple[str, str]]:
    """Returns the pairs of texts whose boxes overlap."""
    places = np.array([place for _, *place in found]).reshape(-1, 4)
    left, top, right, bottom = places.T
    apart = (right[:, None] <= left) | (bottom[:, None] <= top)
    both = np.argwhere(np.triu(~(apart | apart.T), 1))
    return [(found[a][0], found[b][0]) for a, b in both.tolist()]


@pytest.mark.parametrize("name", EVERY)
def test_svg_texts_are_inside_and_do_not_overlap(name: str) -> None:
    root = drawn(name)
    x, y, width, height = map(float, root.get("viewBox", "").split())
    found = boxes(root)
    for words, left, top, right, bottom in found:
        assert x <= left and right <= x + width, words
        assert y <= top and bottom <= y + height, words
    assert overlapping(found) == []


@pytest.mark.parametrize("name", EVERY)
def test_svg_shapes_are_inside(name: str) -> None:
    root = drawn(name)
    _, _, width, height = map(float, root.get("viewBox", "").split())
    for rect in root.iter(f"{SVG}rect"):
        x, y, w, h = (float(rect.get(k, 0)) for k in ("x", "y", "width", "height"))
        assert min(x, y) >= 0 and x + w <= width and y + h <= height
    for line in root.iter(f"{SVG}line"):
        for end in "12":
            assert 0 <= float(line.get(f"x{end}", -1)) <= width
            assert 0 <= float(line.get(f"y{end}", -1)) <= height
    for path in root.iter(f"{SVG}path"):
        for x, y in re.findall(r"M([\d.]+),([\d.]+)", path.get("d", "")):
            assert float(x) <= width and float(y) <= height


def test_svg_has_its_own_background() -> None:
    root = drawn("six GPUs")
    tags = {element.tag.removeprefix(SVG) for element in root.iter()}
    assert tags <= {"svg", "title", "style", "rect", "line", "path", "text"}
    assert not any("href" in k for e in root.iter() for k in e.attrib)
    background = next(root.iter(f"{SVG}rect"))
    _, _, width, height = root.get("viewBox", "").split()
    assert (background.get("width"), background.get("height")) == (width, height)
    assert root.findtext(f"{SVG}title") == "a < b & c"


def test_svg_shows_a_missing_spine_as_missing() -> None:
    root = drawn("no spine")
    assert of_class(root, "spine") == of_class(root, "uplink") == []
    assert len(of_class(root, "no-spine")) == 1
    assert any("no spine" in (t.text or "") for t in root.iter(f"{SVG}text"))
    whole = drawn("two units")
    assert len(of_class(whole, "spine")) == 1
    assert len(of_class(whole, "uplink")) == 8


def test_svg_legend_names_units_and_groups() -> None:
    root = drawn("H100, tp4", 5)
    texts = [t.text or "" for t in root.iter(f"{SVG}text")]
    assert "rank 5 (pp 0, dp 1, tp 1)" in texts
    assert {"its tensor group (tp=4)", "its pipeline group (pp=2)"} <= set(texts)
    assert any("bytes of one step" in text for text in texts)
    assert len(of_class(root, "sample")) == 4


# --- any cluster -----------------------------------------------------------------------------


def random_placement(seed: int) -> RankMapping:
    """Returns a small cluster of any shape: uneven nodes, odd domains, few rails, spare GPUs."""
    draw = np.random.default_rng(seed)
    nodes, gpus = int(draw.integers(1, 9)), int(draw.integers(1, 9))
    divisors = [d for d in range(1, gpus + 1) if gpus % d == 0]
    more: dict = {"oversubscription": [None, 1.0, 4.0][draw.integers(3)]}
    domain = int(draw.choice(divisors))
    if draw.integers(3) == 0:
        domain = gpus * int(draw.integers(1, 4))
    if draw.integers(2):
        more["unit_nodes"] = int(draw.integers(1, nodes + 1))
    if draw.integers(3) == 0:
        more["node_gpus"] = tuple(draw.integers(1, gpus + 1, nodes).tolist())
    if draw.integers(4) == 0:
        more["node_unit"] = tuple(draw.integers(0, 3, nodes).tolist())
    if draw.integers(4) == 0:
        more["node_domain"] = tuple(draw.integers(0, 3, nodes).tolist())
    on = cluster(nodes, gpus, domain, int(draw.integers(1, gpus + 1)), **more)
    tp = int(draw.integers(1, min(5, on.size + 1)))
    pp = int(draw.integers(1, on.size // tp + 1))
    layout = Layout(tp=tp, pp=pp, dp=int(draw.integers(1, on.size // (tp * pp) + 1)))
    slots = draw.permutation(on.size)[: layout.world_size]
    return RankMapping(on, layout, slots, "random")


@pytest.mark.parametrize("first", range(0, 60, 20))
def test_any_cluster_is_drawn_completely_and_without_overlaps(first: int) -> None:
    for seed in range(first, first + 20):
        placement = random_placement(seed)
        on, layout = placement.cluster, placement.layout
        rank = seed % layout.world_size
        zero = np.zeros(on.size)
        ports = np.zeros((int(on.unit.max()) + 1, on.rails))
        loads = Loads(zero, zero, ports, ports)
        root = ElementTree.fromstring(cluster_svg(placement, rank, loads, "any", "cluster"))
        _, _, wide, high = map(float, root.get("viewBox", "").split())
        found_texts = boxes(root)
        for words, left, top, right, bottom in found_texts:
            inside = min(left, top) >= 0 and right <= wide and bottom <= high
            assert inside, (seed, words)
        assert overlapping(found_texts) == [], seed
        seen = Counter(int(e.get("data-rank", -2)) for e in of_class(root, "gpu"))
        assert seen == Counter(placement.ranks.tolist()), seed
