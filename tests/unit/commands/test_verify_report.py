"""Tests the report of `parallel3d verify` on two steps."""

from __future__ import annotations

import pytest

from parallel3d import compose
from parallel3d.blueprint.layout import Layout
from parallel3d.commands.verify import Comparison, ShardDifference, Tolerance, judge, table
from parallel3d.run_config import single_process
from parallel3d.trainer import StepResult


@pytest.mark.parametrize(
    ("layout", "single", "words"),
    [(None, None, None), (None, 2.0, "loss is None under the layout and 2.0 in one process")],
)
def test_a_step_without_a_token_to_learn_is_compared_too(
    layout: float | None, single: float | None, words: str | None
) -> None:
    results = [StepResult(1, loss, 0.0, 1e-3, 64, loss is None) for loss in (layout, single)]
    said = judge(1, *results, [], Tolerance(1e-9, 1e-9, 1e-9), Layout())
    assert said == (words and f"after step 1, {words}")
    row = Comparison("fp64", "adamw", 1, *results, ShardDifference(0.0, "", 0), said)
    assert list(table([row], Layout()).columns[1].cells) == ["none"]


@pytest.mark.slow
@pytest.mark.parametrize("key", ["recompute_layers", "offload_layers"])
def test_one_process_reports_no_numbers_for_stages(key: str) -> None:
    config = compose("pp=2", "recompute=full", f"{key}=[2,1]", "model.num_layers=3")
    assert getattr(single_process(config), key) is None
