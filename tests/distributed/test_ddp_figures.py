"""Tests the DDP figures on real ranks, with tables and pictures, and the prices of more ranks."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ET
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import nn

from benchmarks.figures.ddp import figures as ddp
from benchmarks.figures.ddp import nets as ddp_nets
from benchmarks.figures.ddp.measures import PARTS, Trial, priced_step
from parallel3d.blueprint.cluster import Link
from parallel3d.commands.bench.keys import BenchConfig
from parallel3d.commands.options import CommandConfig
from parallel3d.errors import UserError
from parallel3d.run.launch import Worker
from parallel3d.run_config import Config
from tests.distributed.pool import Pool
from tests.distributed.simulated import here

pytestmark = pytest.mark.more

CONFIG = CommandConfig(dp=2, bench=BenchConfig(iterations=1, warmup=0, budget_s=0.001))


def tiny() -> dict:
    shapes = {"convolutions": 3 * 32 * 32, "matrices": ddp_nets.LENGTH * 64}
    return {
        name: lambda width=width: nn.Sequential(
            nn.Flatten(), nn.Linear(width, 4), nn.Linear(4, ddp_nets.CLASSES)
        )
        for name, width in shapes.items()
    }


def labels(name: str, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    made, _ = SOUND_INPUTS(name, rank)
    return made, torch.zeros(made.shape[0], dtype=torch.long)


SOUND_INPUTS = ddp_nets.inputs


@contextmanager
def shrunk() -> Iterator[None]:
    """Uses smaller nets, and fewer points of each figure."""
    with (
        patch.dict(ddp_nets.NETS, tiny()),
        patch("benchmarks.figures.ddp.measures.inputs", labels),
        patch.object(ddp, "BUCKETS_MB", [0.0, 25.0]),
        patch.object(ddp, "EVERY", [1, 2]),
        patch.object(ddp, "GROUPS", [1, 2]),
        patch.object(ddp, "PER_CALL", [1 << 12, 1 << 16]),
        patch.object(ddp, "TOTAL", 1 << 16),
    ):
        yield


def measured(folder: Path) -> None:
    worker = SimpleNamespace(
        phase="", device=str(here()), rank=dist.get_rank(), run_dir=folder, placement=None
    )
    phases: list[str] = []

    def tried(*args: Any, **options: Any) -> Trial:
        phases.append(worker.phase)
        return Trial(*args, **options)

    with shrunk(), patch.object(ddp, "Trial", tried):
        assert ddp.ddp_figures(CONFIG, worker) == 0
    assert all(phase.startswith("DDP figures: ") for phase in phases), phases


def check_report(folder: Path, ways: set[str]) -> None:
    """Asserts that every figure has its rows and its picture."""
    figures = json.loads((folder / "ddp_figures.json").read_text())
    assert {(row["way"], row["parameters"]) for row in figures["2ab"]} == {
        (way, size) for way in ways for size in (4096, 65536)
    }
    for row in figures["6"]:
        assert row["step"] > 0
        assert all(row[part] >= 0 for part in PARTS)
    assert {(r["net"], r["way"], r["overlap"]) for r in figures["6"]} == {
        (net, way, overlap) for net in ddp_nets.NETS for way in ways for overlap in (True, False)
    }
    assert {row["bucket_cap_mb"] for row in figures["7"]} == {0.0, 25.0}
    assert {row["every"] for row in figures["10"]} == {1, 2}
    assert {row["groups"] for row in figures["12"]} == {1, 2}
    assert {row["ranks"] for row in figures["9"] if row["way"] in ways} == {2}
    assert max(row["ranks"] for row in figures["9"] if row["way"] == "priced") == 256
    ready = [row for row in figures["2cd"] if row["net"] == "matrices"]
    assert [row["ready"] for row in ready] == sorted(row["ready"] for row in ready)
    assert ready[-1]["ready"] == sum(p.numel() for p in tiny()["matrices"]().parameters())
    table = (folder / "ddp_figures.md").read_text()
    for figure in ("2ab", "2cd", "6", "7", "9", "10", "12"):
        assert f"Figure {figure}:" in table
        pictures = list(folder.glob(f"figure_{figure}*.svg"))
        assert pictures
        for picture in pictures:
            ET.parse(picture)


def test_every_figure_has_its_rows_and_its_picture(pool: Pool, tmp_path: Path) -> None:
    pool.run(2, measured, tmp_path)
    check_report(tmp_path, {"backend", "shared memory"})


def test_the_price_of_a_step_on_more_ranks() -> None:
    parts = {"forward": 1.0, "backward": 2.0, "optimizer": 0.5}
    link = Link(gb_per_s=1.0, latency_us=0.0)
    gigabyte = 10**9  # two ranks exchange it in a second
    assert priced_step(parts, [(0.5, 0), (1.0, 0)], 2, link) == pytest.approx(3.5)
    # One bucket is ready at 2 and sent by 3, the other is ready at 3 and sent by 3.5.
    assert priced_step(parts, [(0.5, gigabyte), (1.0, gigabyte // 2)], 2, link) == pytest.approx(4)
    # The second bucket waits for the first, which ends at 4.
    assert priced_step(parts, [(0.5, 2 * gigabyte), (1.0, gigabyte)], 2, link) == pytest.approx(5.5)


def test_other_dimensions_are_refused() -> None:
    with pytest.raises(UserError, match=r"tp=2 must be 1, .* the nearest is tp=1"):
        ddp.ddp_figures(Config(tp=2), Worker(0, 0, 2, 2, Path(), "local"))
