"""Tests the page of examples/collectives: its Python blocks run on four gloo ranks and print its
output."""

from __future__ import annotations

import contextlib
import io
import re
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch.distributed as dist

from parallel3d.blueprint.cluster import Link
from parallel3d.blueprint.collectives import OPERATIONS
from parallel3d.estimate import network
from tests.distributed.pool import Pool

pytestmark = pytest.mark.more

PAGE = Path(__file__).parents[2] / "examples" / "collectives" / "README.md"
RANKS = 4


class Example(NamedTuple):
    """A Python block, the line of the page on which it starts, and the output below it."""

    line: int
    code: str
    output: str


def examples() -> list[Example]:
    text = PAGE.read_text(encoding="utf-8")
    blocks = re.finditer(r"^```python\n(.*?)^```\n(?:```text\n(.*?)^```\n)?", text, re.M | re.S)
    return [Example(text[: b.start()].count("\n") + 2, b[1], b[2] or "") for b in blocks]


def run_examples(blocks: list[tuple[int, str]]) -> list[str]:
    """Returns what this rank prints in each block; all blocks share one namespace, like one
    file."""
    namespace: dict[str, Any] = {"__name__": "page"}
    printed = []
    for line, code in blocks:
        out = io.StringIO()
        padded = "\n" * (line - 1) + code  # so that a traceback names the page's line
        with contextlib.redirect_stdout(out):
            exec(compile(padded, str(PAGE), "exec"), namespace)
        printed.append(out.getvalue())
    return printed


def test_every_example_prints_the_output_below_it(pool: Pool) -> None:
    page = examples()
    assert len(page) >= 6, "the blocks of the page are not found"
    by_rank = pool.run(RANKS, run_examples, [(e.line, e.code) for e in page])
    for i, example in enumerate(page):
        printed = "".join(outputs[i] for outputs in by_rank)
        assert printed == example.output, f"{PAGE.name}, line {example.line}"


def test_the_page_shows_the_sums_of_the_numbers_to_sixteen() -> None:
    # The numbers are not from running the page: 1 to 16 in rows of four, added by column.
    sums = [sum(range(first, 17, 4)) for first in (1, 2, 3, 4)]
    assert sums == [28, 32, 36, 40]
    (scattered,) = [e for e in examples() if "reduce_scatter_tensor(part" in e.code]
    assert scattered.output.splitlines() == [
        "  ".join(f"[{total}]" for total in sums),
        "  ".join([str(sums)] * RANKS),
    ]


def test_every_collective_has_a_section_and_an_example() -> None:
    text = PAGE.read_text(encoding="utf-8")
    titles = ", ".join(re.findall(r"^## (.*)$", text, re.M)).lower()
    calls = "\n".join(e.code for e in examples())
    for operation in OPERATIONS:
        word = {"send_recv": "send and receive"}.get(operation, operation.replace("_", "-"))
        assert re.search(rf"(?<![\w-]){word}\b(?!-)", titles), operation
        called = {"send_recv": "isend"}.get(operation, operation)
        assert hasattr(dist, called) and f"dist.{called}" in calls


def milliseconds(row: str) -> float:
    """Returns the last cell of the first table row that begins with these cells."""
    text = PAGE.read_text(encoding="utf-8")
    (line,) = [x for x in text.splitlines() if x.startswith(f"| {row} |")]
    number, unit = re.match(r"([\d.]+) (ms|µs)", line.split("|")[-2].strip()).groups()
    return float(number) * (1e-3 if unit == "µs" else 1)


@pytest.mark.parametrize(
    "row, seconds",
    [
        ("send/receive", lambda link: network.messages(1, 1e9, link)),
        ("broadcast, whole", lambda link: network.broadcast(8, 1e9, link)),
        ("broadcast, S segments", lambda link: network.broadcast(8, 1e9, link, 158)),
        ("reduce", lambda link: network.broadcast(8, 1e9, link, 158)),
        (
            "reduce-scatter, all-gather",
            lambda link: network.ring_time("reduce_scatter", 8, 1e9, link),
        ),
        ("reduce-scatter, all-gather", lambda link: network.ring_time("all_gather", 8, 1e9, link)),
        ("all-reduce | ring", lambda link: network.ring_time("all_reduce", 8, 1e9, link)),
        ("all-reduce | double tree", lambda link: network.tree_all_reduce(8, 1e9, link)),
        (
            "scatter, gather, all-to-all",
            lambda link: network.collective_time("scatter", 8, 1e9, link),
        ),
        (
            "scatter, gather, all-to-all",
            lambda link: network.collective_time("all_to_all", 8, 1e9, link),
        ),
        ("barrier", lambda link: network.collective_time("barrier", 8, 0, link)),
    ],
)
def test_numbers_of_the_table_follow_the_model(row: str, seconds: Any) -> None:
    assert milliseconds(row) == pytest.approx(seconds(Link(48, 5)) * 1e3, rel=0.003)


def test_numbers_of_the_text_follow_the_model() -> None:
    text = " ".join(PAGE.read_text(encoding="utf-8").split())
    nic, nvlink = Link(48, 5), Link(370.8, 2)
    for words, seconds in (
        ("On 64 ranks 1 GB takes {:.1f} ms", network.ring_time("all_reduce", 64, 1e9, nic) * 1e3),
        ("of which latency is {:.1f} ms", network.ring_time("all_reduce", 64, 0, nic) * 1e3),
        ("8 kB takes {:.0f} µs", network.ring_time("all_reduce", 64, 8e3, nic) * 1e6),
        ("8 kB on 64 ranks takes {:.0f} µs", network.tree_all_reduce(64, 8e3, nic) * 1e6),
        ("{:.1f} ms instead of the flat ring's",
         network.two_level_time("all_reduce", 8, 8, 1e9, nvlink, nic) * 1e3),
        ("in bf16 is 67 MB and takes {:.1f} ms", network.messages(1, 4096 * 8192 * 2, nic) * 1e3),
    ):  # fmt: skip
        assert words.format(seconds) in text
