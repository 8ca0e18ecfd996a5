"""Tests the fit of the planner's constants: independent folds, and a fit that recovers the
constants of made data."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from benchmarks.planner.published import Seen, folds
from benchmarks.planner.published_fit import fit
from benchmarks.planner.published_newer import READERS
from benchmarks.planner.published_rows import Run, hardware_seconds
from benchmarks.planner.published_scores import balanced, choose, errors, null, rank_correlation

pytestmark = pytest.mark.more

PLAYBOOK = {
    "id": "x", "model": "1B", "layers": 16, "hidden": 2048, "heads": 32, "ffn": 8192, "tied": True,
    "vocab": 131072, "kv_heads": 32, "seq": 4096, "nodes": 2, "gpus": 16, "tp": 2, "pp": 2,
    "dp": 4, "mb": 1, "grad_acc": 64, "global_batch": 256, "zero": 1,
}  # fmt: skip


def run(name: str, group: str) -> Run:
    return Run(name, "s", group, [])


def test_a_group_is_never_on_both_sides() -> None:
    runs = [run(f"{g}{i}", g) for g in "abcdefgh" for i in range(3)]
    found = dict(zip([r.id for r in runs], folds(runs), strict=True))
    assert all(len({found[f"{g}{i}"] for i in range(3)}) == 1 for g in "abcdefgh")
    assert len(set(found.values())) > 1


def test_folds_do_not_follow_ids_or_order() -> None:
    runs = [run(f"{i}", f"g{i % 5}") for i in range(20)]
    there = {r.group: f for r, f in zip(runs, folds(runs), strict=True)}
    back = {r.group: f for r, f in zip(runs[::-1], folds(runs[::-1]), strict=True)}
    assert there == back


def test_the_fit_recovers_true_constants_despite_outliers() -> None:
    x = np.linspace(1, 9, 40)
    target = 3.0 * x**1 + 0.5
    target[::9] *= 6
    found = fit(
        lambda v: v["slope"] * x + v["fixed"],
        target,
        np.full(40, 20.0),
        {"slope": (1.0, 2.0), "fixed": (1.0, 2.0)},
    )
    assert found["slope"] == pytest.approx(3.0, rel=0.05)


def test_without_rows_a_constant_keeps_its_guess() -> None:
    found = fit(lambda v: np.full(3, v["a"]), np.full(3, 2.0), np.ones(3) * 9,
                {"a": (1.0, 1.0), "unused": (7.0, 0.5)})  # fmt: skip
    assert found["unused"] == pytest.approx(7.0)


def test_an_answer_in_a_row_does_not_reach_its_prediction() -> None:
    told = {**PLAYBOOK, "status": "ok", "iter_s": 1.0, "mem_GB": 2.0}
    assert READERS["nanotron_playbook"](told).candidates == (
        READERS["nanotron_playbook"](PLAYBOOK).candidates
    )
    other = {**PLAYBOOK, "id": "y"}
    assert READERS["nanotron_playbook"](other).candidates == (
        READERS["nanotron_playbook"](PLAYBOOK).candidates
    )


def test_layouts_that_an_engine_cannot_run() -> None:
    read = READERS["nanotron_playbook"]
    assert read(PLAYBOOK).runs
    assert not read({**PLAYBOOK, "zero": 0}).runs
    assert not read({**PLAYBOOK, "pp": 16, "dp": 1, "tp": 1}).runs


def test_scores() -> None:
    measured = np.array([1.0, 2.0, 4.0])
    assert errors(np.array([1.1, 2.0, 3.0]), measured) == pytest.approx([10, 0, 25])
    assert rank_correlation(measured**2, measured) == 1
    assert rank_correlation(np.array([1.0, 1.0, 2.0]), measured) == pytest.approx(0.866, abs=1e-3)
    assert balanced([True, True, False, True], [True, True, False, False]) == 0.75


def test_a_choice_costs_its_slowdown_and_a_failing_one_is_infinitely_bad() -> None:
    one = READERS["nanotron_playbook"]({**PLAYBOOK, "status": "ok", "iter_s": 1.0})
    runs = [replace(one, seconds=s, fits=s is not None) for s in (1.0, 2.0, 4.0, None)]
    said, well = np.array([3.0, 1.0, 2.0, 0.5]), np.array([True, True, True, False])
    (found,) = choose(runs, said, well)
    assert found.regret == pytest.approx(100) and found.correlation == -0.5
    assert choose(runs, said, ~well)[0].regret == np.inf
    assert choose(runs[1:], said[1:], well[1:]) == []


def test_rows_outside_the_measured_runs_are_marked() -> None:
    row = READERS["nanotron_playbook"](PLAYBOOK).candidates[0]
    seen = Seen.of([row])
    assert seen.novelty(row) == "known"
    assert seen.novelty({**row, "hidden": 9}) == seen.novelty({**row, "dp": 999}) == "size"
    assert seen.novelty({**row, "engine": 0}) == seen.novelty({**row, "speed": 0}) == "place"


def test_hardware_rate_and_seconds_are_one() -> None:
    shape = {"seq": 2048, "hidden": 12288, "layers": 96, "vocab": 51200}
    row = {"global_batch": 1536, "gpus": 1024}
    flops = hardware_seconds(row, shape, 1.0) * 1024e12
    # 8 FLOPs per parameter and token
    assert flops == pytest.approx(1536 * 2048 * 8 * 174.6e9, rel=0.03)


def test_the_null_model_knows_the_bubble() -> None:
    one = READERS["nanotron_playbook"]({**PLAYBOOK, "pp": 1, "dp": 8, "grad_acc": 32})
    two = READERS["nanotron_playbook"](PLAYBOOK)
    flat, deep = null([one, two])
    assert deep / flat == pytest.approx(1 + 1 / 64)
