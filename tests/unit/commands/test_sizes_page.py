"""Tests that the tables of sizes in docs/dryrun.md equal the code's counts."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

pytestmark = pytest.mark.more

PAGE = Path(__file__).resolve().parents[3] / "docs" / "dryrun.md"
made = runpy.run_path(str(PAGE.with_name("sizes.py")))


def test_the_committed_part_is_the_generated_one() -> None:
    text = PAGE.read_text("utf-8")
    inside = text.split("<!-- python docs/sizes.py -->\n")[1].split("<!-- end -->")[0]
    assert inside == made["part"](), "put what `python docs/sizes.py` prints between the comments"


def test_gpt3s_sizes_follow_its_formulas() -> None:
    counted = {part: count for part, _, count in made["rows_of_sizing"](made["gpt3"]())}
    square, layers = 12288**2, 96
    attention, mlp, blocks, embedding, positions, rest, total = counted.values()
    assert (attention, mlp) == (4 * square, 8 * square) == (603_979_776, 1_207_959_552)
    assert blocks == layers * 12 * square
    assert (embedding, positions) == (50_257 * 12_288, 2_048 * 12_288)
    assert rest == (layers * (4 + 3 + 1 + 4 + 1) + 2) * 12_288  # norms, qkv, out, up, down; last
    assert total == blocks + embedding + positions + rest
    assert round(total / 1e9, 1) == 174.6


def test_tp_divides_the_split_side_of_every_matrix_and_the_heads() -> None:
    rows = [line for line in made["shapes"](made["gpt3"]()).splitlines() if line.startswith("| `")]
    cells = {row.split("`")[1]: [c.strip() for c in row.split("|")[2:-1]] for row in rows}
    assert cells["attention.qkv"][1] == "12288 × 36864"
    assert cells["attention.qkv"][4] == "12288 × 4608"
    assert cells["mlp.down"][1:6] == [
        *("49152 × 12288", "b · s × 12288", "b · s × 6144", "6144 × 12288", "b · s × 12288"),
    ]
    assert "96 × s × s" in cells["attention"][1] and "12 × s × s" in cells["attention"][4]
