"""Counts the planner's work on models of thousands of layers, and tests its progress messages."""

from __future__ import annotations

import io
from dataclasses import replace
from types import SimpleNamespace

import pytest

from parallel3d.cli.overrides import compose
from parallel3d.commands import plan
from parallel3d.commands.plan import progress
from parallel3d.errors import UserError
from parallel3d.estimate import memory
from parallel3d.estimate.search import MOST_STAGES, MOST_V_HALF, LayoutChoice, layouts
from parallel3d.run_config import Config


def planned(*words: str) -> Config:
    config = compose("cluster=dgx_h100", *words)
    return replace(config, precision=replace(config.precision, name="bf16"))


def choices_of(config: Config, gpus: int, batch: int) -> list[LayoutChoice]:
    return list(layouts(plan.sizes_of(config), gpus, 8, batch, {}))


@pytest.mark.nightly
def test_nodes_for_4096_layers_are_found_with_few_layouts_looked_at(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    config = planned("model=llama3_8b", "model.num_layers=4096", "global_batch_size=64")
    looked_at, real = [], memory.peak_memories
    monkeypatch.setattr(
        memory,
        "peak_memories",
        lambda c, some: looked_at.extend(some) or real(c, some),
    )
    found = SimpleNamespace(config=config, sizes=plan.sizes_of(config), reserve_gb=4.0, load=1.0)
    words = plan._nodes_that_fit(found, {}, 1, float("inf"))
    assert words == "and the nearest that suffices is cluster.nodes=64 global_batch_size=512"
    # There are 23,208 layouts on 2, 4, … 64 nodes, of up to five ranks each.
    assert len(looked_at) < 4000


@pytest.mark.nightly
def test_pipelines_deeper_than_anyone_trains_are_not_looked_at() -> None:
    config = planned("model=llama3_8b", "model.num_layers=4096", "global_batch_size=64")
    found = choices_of(config, 8192, 8192)
    assert max(c.pp for c in found) == MOST_STAGES == 512
    assert max(c.pp for c in found if c.schedule == "v_half") == MOST_V_HALF == 64
    typed = layouts(plan.sizes_of(config), 8192, 8, 8192, {"pp": 1024})
    assert {c.pp for c in typed} == {1024}
    with pytest.raises(UserError, match="pp=128 must be at most 64 with schedule=v_half"):
        plan.searched(config, {"pp": 128, "schedule": "v_half"}, 8192)


def test_a_long_search_reports_its_progress_now_and_then() -> None:
    now, log = [0.0], io.StringIO()
    tell = progress(log, lambda: now[0])
    for done in range(25):
        now[0] = float(done)
        tell(f"layout {done}")
    assert log.getvalue() == "plan: layout 10 …\nplan: layout 20 …\n"
