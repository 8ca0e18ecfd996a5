"""The map of a cluster, in the terminal and as SVG: everything is there, once, and inside."""

from __future__ import annotations

import re
from collections import Counter
from itertools import combinations, pairwise
from xml.etree import ElementTree

import numpy as np
import pytest

from parallel3d.sizes.transfer import Transfer
from parallel3d.topology.cluster.parts import Cluster, Link
from parallel3d.topology.layout import Layout
from parallel3d.topology.map.canvas import Canvas
from parallel3d.topology.map.scene import CHOSEN, GROUPS, byte_text, marks, shown_nodes, tiles
from parallel3d.topology.map.svg import MAX_EXPANDED, cluster_svg
from parallel3d.topology.map.terminal import MARKS, plain, style_of, terminal_map
from parallel3d.topology.price.links import Wiring
from parallel3d.topology.price.loads import Loads, loads_of
from parallel3d.topology.price.step import StepPrice, price_step
from parallel3d.topology.tiling import Placement, Tiling

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


def placed(on: Cluster, tp: int, pp: int, order: str = "tp-dp-pp") -> Placement:
    layout = Layout(tp=tp, pp=pp, dp=on.size // (tp * pp))
    return Placement.tiled(on, layout, Tiling.parse(order, layout))


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


def priced(placement: Placement) -> tuple[StepPrice, Loads]:
    price = price_step(placement, SENT)
    return price, loads_of(placement, price)


def drawn(placement: Placement, rank: int = 0) -> ElementTree.Element:
    text = cluster_svg(placement, rank, priced(placement)[1], "a < b & c", "words " * 60)
    return ElementTree.fromstring(text)


def of_class(root: ElementTree.Element, name: str) -> list[ElementTree.Element]:
    return [e for e in root.iter() if name in e.get("class", "").split()]


# --- what is shown ---------------------------------------------------------------------------


@pytest.mark.parametrize("name", EVERY)
def test_marks_are_the_groups_of_the_rank(name: str) -> None:
    layout = EVERY[name].layout
    for rank in {r % layout.world_size for r in RANKS}:
        marked = marks(layout, rank)
        assert marked.pop(rank) == CHOSEN
        for dim in GROUPS:
            group = set(layout.group_of(rank, dim)) - {rank}
            assert {r for r, d in marked.items() if d == dim} == group


@pytest.mark.parametrize("name", EVERY)
def test_tiles_hold_every_node_once_and_one_unit_each(name: str) -> None:
    on = EVERY[name].cluster
    made = tiles(on)
    assert sorted(n for tile in made for n in tile.nodes.tolist()) == list(range(on.nodes))
    for tile in made:
        slots = np.isin(on.node, tile.nodes)
        assert set(on.unit[slots].tolist()) == {tile.unit}
        if tile.domain is not None:
            assert set(on.domain[slots].tolist()) == {tile.domain}


def test_shown_nodes_hold_the_model_group_of_the_rank() -> None:
    placement = LARGE["H100 pod"]
    for rank in (0, 4321, 8191):
        shown = shown_nodes(placement, rank, 20)
        group = placement.layout.group_of(rank, "tp") + placement.layout.group_of(rank, "pp")
        assert set(placement.cluster.node[placement.slots[group]].tolist()) <= set(shown.tolist())
        assert {0, 1023} <= set(shown.tolist())
        assert len(shown) <= 20


@pytest.mark.parametrize("name", EVERY)
def test_loads_add_up_to_the_price(name: str) -> None:
    placement = EVERY[name]
    price, loads = priced(placement)
    total = {"nvlink": 0.0, "rail": 0.0, "spine": 0.0}
    for dim in price.dims.values():
        for kind, nbytes in dim.nbytes.items():
            total[kind.label] += nbytes
    assert loads.nvlink.sum() == pytest.approx(total["nvlink"])
    assert loads.nic.sum() == pytest.approx(total["rail"] + total["spine"])
    assert loads.uplink.sum() == pytest.approx(total["spine"])
    wiring = Wiring.of(placement.cluster, np.arange(placement.cluster.size))
    nics = np.bincount(wiring.nic, loads.nic)
    assert nics.max() == pytest.approx(price.nic.nbytes if price.nic else 0.0)
    assert loads.port.max() == pytest.approx(price.leaf_up.nbytes if price.leaf_up else 0.0)


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [
        *((0, "0 B"), (999, "999 B"), (1000, "1.00 kB"), (999_499, "999 kB"), (999_500, "1.00 MB")),
        *((12_345_678, "12.3 MB"), (9_996e6, "10.0 GB"), (2.5e15, "2.50 PB"), (3e21, "3,000 EB")),
    ],
)
def test_bytes_in_three_digits(nbytes: float, text: str) -> None:
    assert byte_text(nbytes) == text


# --- the terminal ----------------------------------------------------------------------------


def cells(text: str) -> list[tuple[int, str]]:
    """(rank, mark) of every GPU in the boxes of a map."""
    found = []
    for line in text.splitlines():
        for box in re.findall(r"│(.*)│", line):
            inside = re.sub(r"⋮[^│]*", " ", box)
            # Between boxes beside each other stands the name of a node.
            inside = re.sub(r"│\s+(node\d+|a|bb|c)?\s*│|│", " ", inside)
            found += [(int(n), m) for n, m in re.findall(r"(?<!\S)(\d+)([*tcpd]?)(?!\S)", inside)]
    return found


@pytest.mark.parametrize("name", SMALL)
@pytest.mark.parametrize("width", [40, 80, 200])
def test_terminal_shows_every_rank_of_a_small_cluster_once(name: str, width: int) -> None:
    placement = SMALL[name]
    layout = placement.layout
    for rank in {r % layout.world_size for r in RANKS}:
        text = plain(terminal_map(placement, rank, width))
        body = text.split("\n\n")[0]
        found = cells(body)
        assert Counter(r for r, _ in found) == Counter(range(layout.world_size))
        marked = {r: MARKS[kind] for r, kind in marks(layout, rank).items()}
        assert {r: m for r, m in found if m} == marked


@pytest.mark.parametrize("name", EVERY)
@pytest.mark.parametrize("width", [40, 80, 120, 200])
def test_terminal_holds_its_width(name: str, width: int) -> None:
    text = plain(terminal_map(EVERY[name], 0, width, 1.5e9))
    assert max(map(len, text.splitlines())) <= width
    assert "\x1b" not in text


@pytest.mark.parametrize("name", LARGE)
@pytest.mark.parametrize("width", [80, 200])
def test_terminal_elides_and_counts_what_it_leaves_out(name: str, width: int) -> None:
    placement = LARGE[name]
    layout, rank = placement.layout, placement.layout.world_size // 3
    body, legend = plain(terminal_map(placement, rank, width)).split("\n\n")
    names = set(re.findall(r"\bnode\d+\b", body))
    skipped = [int(n.replace(",", "")) for n in re.findall(r"⋮ ([\d,]+) nodes?", body)]
    skipped += [int(n.replace(",", "")) for n in re.findall(r"\(([\d,]+) nodes\)", body)]
    assert len(names) + sum(skipped) == placement.cluster.nodes
    assert body.count("\n") < 120
    found = dict(cells(body))
    assert found[rank] == "*"
    assert {r for r, m in found.items() if m == "t"} == set(layout.group_of(rank, "tp")) - {rank}
    for dim in ("pp", "dp"):
        shown = {r for r, m in found.items() if m == MARKS[dim]}
        assert shown < set(layout.group_of(rank, dim)) | {-1}
        line = next(x for x in legend.splitlines() if x.startswith(MARKS[dim]))
        away = re.search(r"([\d,]+) of them on", line)
        gone = int(away[1].replace(",", "")) if away else 0
        assert len(shown) + 1 + gone == layout.size(dim)


def test_terminal_colours_rails_and_groups_apart() -> None:
    lines = terminal_map(SMALL["H100, tp4"], 0, 80)
    names = {style for line in lines for _, style in line}
    assert {"rail0", "rail7", "tp", "pp", "dp", CHOSEN} <= names
    colours = [style_of(f"rail{r}") for r in range(8)] + [style_of(d) for d in ("tp", "pp", "dp")]
    assert len(set(colours)) == len(colours)


def test_terminal_says_that_there_is_no_spine() -> None:
    assert "no spine" in plain(terminal_map(SMALL["no spine"], 0, 80))
    assert "spine, 4:1, 1.50 GB" in plain(terminal_map(SMALL["two units"], 0, 80, 1.5e9))


# --- the SVG ---------------------------------------------------------------------------------


@pytest.mark.parametrize("name", SMALL)
def test_svg_draws_every_domain_rail_leaf_and_gpu_once(name: str) -> None:
    placement = SMALL[name]
    on = placement.cluster
    assert on.nodes <= MAX_EXPANDED
    root = drawn(placement)
    domains = Counter(int(e.get("data-domain", -1)) for e in of_class(root, "domain"))
    assert domains == Counter(set(on.domain.tolist()))
    both = Counter(zip(on.unit.tolist(), on.rail_of.tolist(), strict=True))
    for kind in ("rail", "leaf"):
        seen = Counter(
            (int(e.get("data-unit", -1)), int(e.get("data-rail", -1))) for e in of_class(root, kind)
        )
        assert seen == Counter(set(both))
    seen = Counter(int(e.get("data-rank", -2)) for e in of_class(root, "gpu"))
    assert seen == Counter(placement.ranks.tolist())


@pytest.mark.parametrize("name", EVERY)
def test_svg_highlights_the_groups_of_the_chosen_rank(name: str) -> None:
    placement = EVERY[name]
    layout = placement.layout
    for rank in {r % layout.world_size for r in RANKS}:
        root = drawn(placement, rank)
        expected = marks(layout, rank)
        seen = {}
        for kind in (CHOSEN, *GROUPS):
            for element in of_class(root, kind):
                seen[int(element.get("data-rank", -1))] = kind
        if of_class(root, "tile"):
            drawn_nodes = not any("not drawn" in (t.text or "") for t in root.iter(f"{SVG}text"))
            assert seen == expected if drawn_nodes else seen.items() <= expected.items()
        else:
            assert seen == expected
        assert {r for r, d in seen.items() if d in (CHOSEN, "tp")} >= set(
            layout.group_of(rank, "tp")
        )


@pytest.mark.parametrize("name", LARGE)
def test_svg_of_a_large_cluster_has_all_units_and_one_tile_in_full(name: str) -> None:
    placement = LARGE[name]
    on = placement.cluster
    root = drawn(placement)
    assert len({e.get("data-unit") for e in of_class(root, "leaf")}) == 1
    small = [
        (e.get("data-unit"), e.get("data-rail"))
        for e in of_class(root, "small-leaf")
        if "again" not in e.get("class", "").split()
    ]
    assert len(small) == len(set(small))
    missing = [t.text for t in root.iter(f"{SVG}text") if "not drawn" in (t.text or "")]
    gone = int(re.findall(r"[\d,]+", missing[0] or "")[0].replace(",", "")) if missing else 0
    units = int(on.unit.max()) + 1
    assert len({unit for unit, _ in small}) + gone == units
    if not gone:
        dots = sum((e.get("d") or "").count("z") for e in of_class(root, "dots"))
        assert dots + len(of_class(root, "dot")) == on.size


@pytest.mark.parametrize("name", EVERY)
def test_svg_line_widths_grow_with_bytes(name: str) -> None:
    root = drawn(EVERY[name])
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
    """(words, left, top, right, bottom) of every text, by the widths of common fonts."""
    found = []
    for text in root.iter(f"{SVG}text"):
        size, x, y = (float(text.get(k, 0)) for k in ("font-size", "x", "y"))
        # Arial's and DejaVu's widths differ by a fifth; the canvas measures on the wide side.
        wide = 0.8 * Canvas.measure(text.text or "", size)
        left = x - wide / 2 if text.get("text-anchor") == "middle" else x
        found.append((text.text or "", left, y - 0.75 * size, left + wide, y + 0.2 * size))
    return found


@pytest.mark.parametrize("name", EVERY)
def test_svg_texts_are_inside_and_apart(name: str) -> None:
    root = drawn(EVERY[name])
    x, y, width, height = map(float, root.get("viewBox", "").split())
    found = boxes(root)
    for words, left, top, right, bottom in found:
        assert x <= left and right <= x + width, words
        assert y <= top and bottom <= y + height, words
    for (a, *p), (b, *q) in combinations(found, 2):
        apart = p[2] <= q[0] or q[2] <= p[0] or p[3] <= q[1] or q[3] <= p[1]
        assert apart, (a, b)


@pytest.mark.parametrize("name", EVERY)
def test_svg_shapes_are_inside(name: str) -> None:
    root = drawn(EVERY[name])
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


def test_svg_stands_alone_on_a_background_of_its_own() -> None:
    root = drawn(SMALL["six GPUs"])
    tags = {element.tag.removeprefix(SVG) for element in root.iter()}
    assert tags <= {"svg", "title", "rect", "line", "path", "text"}
    assert not any("href" in k for e in root.iter() for k in e.attrib)
    background = next(root.iter(f"{SVG}rect"))
    _, _, width, height = root.get("viewBox", "").split()
    assert (background.get("width"), background.get("height")) == (width, height)
    assert root.findtext(f"{SVG}title") == "a < b & c"


def test_svg_shows_a_missing_spine_as_missing() -> None:
    root = drawn(SMALL["no spine"])
    assert of_class(root, "spine") == of_class(root, "uplink") == []
    assert len(of_class(root, "no-spine")) == 1
    assert any("no spine" in (t.text or "") for t in root.iter(f"{SVG}text"))
    whole = drawn(SMALL["two units"])
    assert len(of_class(whole, "spine")) == 1
    assert len(of_class(whole, "uplink")) == 8


def test_svg_legend_names_units_and_groups() -> None:
    root = drawn(SMALL["H100, tp4"], 5)
    texts = [t.text or "" for t in root.iter(f"{SVG}text")]
    assert "rank 5 (pp 0, dp 1, tp 1)" in texts
    assert {"its tensor group (tp=4)", "its pipeline group (pp=2)"} <= set(texts)
    assert any("bytes of one step" in text for text in texts)
    assert len(of_class(root, "sample")) == 4


# --- any cluster -----------------------------------------------------------------------------


def random_placement(seed: int) -> Placement:
    """A small cluster of any shape: uneven nodes, odd domains, few rails, GPUs to spare."""
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
    return Placement(on, layout, slots, "random")


@pytest.mark.parametrize("seed", range(60))
def test_any_cluster_is_drawn_whole_inside_and_apart(seed: int) -> None:
    placement = random_placement(seed)
    on, layout = placement.cluster, placement.layout
    rank = seed % layout.world_size
    for width in (40, 100):
        text = plain(terminal_map(placement, rank, width))
        found = cells(text.split("\n\n")[0])
        assert Counter(r for r, _ in found) == Counter(range(layout.world_size))
        assert max(map(len, text.splitlines())) <= width
    zero = np.zeros(on.size)
    ports = np.zeros((int(on.unit.max()) + 1, on.rails))
    loads = Loads(zero, zero, ports, ports)
    root = ElementTree.fromstring(cluster_svg(placement, rank, loads, "any", "cluster"))
    _, _, wide, high = map(float, root.get("viewBox", "").split())
    found_texts = boxes(root)
    for words, left, top, right, bottom in found_texts:
        assert min(left, top) >= 0 and right <= wide and bottom <= high, words
    for (a, *p), (b, *q) in combinations(found_texts, 2):
        assert p[2] <= q[0] or q[2] <= p[0] or p[3] <= q[1] or q[3] <= p[1], (a, b)
    if not of_class(root, "tile"):
        seen = Counter(int(e.get("data-rank", -2)) for e in of_class(root, "gpu"))
        assert seen == Counter(placement.ranks.tolist())
