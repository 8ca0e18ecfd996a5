"""Tests pictures of schedules: every box is there, in its place, to scale."""

from __future__ import annotations

import re
from itertools import pairwise
from xml.etree import ElementTree

import pytest

from parallel3d.schedules.draw import render_svg, render_text
from parallel3d.schedules.schedule import IN_ORDER, make
from parallel3d.schedules.walk import Costs, Timeline, time_orders


def timeline_of(name: str, stages: int, microbatches: int) -> Timeline:
    """Returns a timeline in which a backward takes twice as long as a forward."""
    made = make(name, stages, microbatches)
    return time_orders(made.orders, made.assignment, Costs.even(made.assignment))


SVG = "{http://www.w3.org/2000/svg}"


def test_text_of_a_small_plan_by_hand() -> None:
    assert render_text(timeline_of("1f1b", 2, 3)).splitlines() == [
        "        F forward, B backward, · idle; bubble 25.0%, of each rank:",
        "rank 0 |F0 F1 ······B0━━━ F2 B1━━━ ···B2━━━ |  25.0%",
        "rank 1 |···F0 B0━━━ F1 B1━━━ F2 B2━━━ ······|  25.0%",
    ]


@pytest.mark.parametrize("name", IN_ORDER)
def test_text_shows_every_action_once_in_lines_of_one_width(name: str) -> None:
    made = make(name, 11, 13)
    costs = Costs.even(made.assignment, 0.3, 0.355, 0.355, 0.05)
    timeline = time_orders(made.orders, made.assignment, costs)
    _, *rows = render_text(timeline).splitlines()
    assert len(rows) == 11
    assert len({len(row) for row in rows}) == 1
    for row, spans in zip(rows, timeline.spans, strict=True):
        assert re.findall(r"[FB]\d+", row) == [str(span.action) for span in spans]


def test_text_that_fits_is_not_narrowed() -> None:
    timeline = timeline_of("1f1b", 4, 40)
    assert render_text(timeline, 10_000) == render_text(timeline)
    assert {len(row) for row in render_text(timeline, 90).splitlines()[1:]} == {90}


def test_svg_boxes_are_to_scale_and_numbered() -> None:
    made = make("1f1b", 3, 5)
    costs = Costs((1.0, 2.0, 1.5), (1.5,) * 3, (1.5,) * 3, 0.5)
    timeline = time_orders(made.orders, made.assignment, costs)
    root = ElementTree.fromstring(render_svg(timeline, title="a < b & c"))
    boxes = {}
    for rect, text in pairwise(root):
        if (tip := rect.findtext(f"{SVG}title")) is None:
            continue
        name = tip.split(":")[0]
        assert text.text == name[1:]
        boxes[rect.get("y"), name] = (float(rect.get("x", 0)), float(rect.get("width", 0)))
    assert len(boxes) == 3 * 5 * 2
    rows = sorted({y for y, _ in boxes}, key=float)
    origin = boxes[rows[0], "F0"][0]
    scale = boxes[rows[0], "F0"][1] / 1.0
    for y, spans in zip(rows, timeline.spans, strict=True):
        for span in spans:
            x, width = boxes[y, str(span.action)]
            assert x == pytest.approx(origin + span.start * scale, abs=0.3)
            assert width == pytest.approx((span.end - span.start) * scale, abs=0.3)
    texts = [text.text for text in root.iter(f"{SVG}text")]
    assert f"a < b & c: {timeline.bubble_fraction:.1%} bubble" in texts
    assert {"forward", "backward", "idle", "stage 0", "stage 2"} <= set(texts)


def test_svg_leaves_out_numbers_that_would_not_be_legible() -> None:
    root = ElementTree.fromstring(render_svg(timeline_of("gpipe", 4, 60)))
    boxes = [rect for rect in root if rect.find(f"{SVG}title") is not None]
    assert len(boxes) == 4 * 60 * 2
    assert not {t.text for t in root.iter(f"{SVG}text")} & set(map(str, range(60)))
    sizes = [float(t.get("font-size", 14)) for t in root.iter(f"{SVG}text")]
    assert min(sizes) >= 9
