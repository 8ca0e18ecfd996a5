"""The colours of the map, alike in the terminal and in the SVG: one a rail, one a group."""

from __future__ import annotations

from parallel3d.topology.map.scene import CHOSEN

GROUP_COLOURS = {
    CHOSEN: "#212529",
    "tp": "#d9480f",
    "cp": "#862e9c",
    "pp": "#1864ab",
    "dp": "#2b8a3e",
}
GREY = "#868e96"
NVLINK = "#495057"
SPINE = "#343a40"

RAILS = (
    ("#4e79a7", "#ffffff"),
    ("#f28e2b", "#212529"),
    ("#59a14f", "#ffffff"),
    ("#e15759", "#ffffff"),
    ("#3aa6a0", "#ffffff"),
    ("#d9b520", "#212529"),
    ("#b07aa1", "#ffffff"),
    ("#9c755f", "#ffffff"),
)


def rail_colour(rail: int) -> str:
    """The colour of a rail; after eight they come again."""
    return RAILS[rail % len(RAILS)][0]


def ink_on(rail: int) -> str:
    """A text colour that is legible on the rail's."""
    return RAILS[rail % len(RAILS)][1]
