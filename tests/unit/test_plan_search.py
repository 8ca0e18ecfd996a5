"""The planner's search: what is searched, what is held, and what stands first."""

from __future__ import annotations

import time

import numpy as np
import pytest

from benchmarks.published_memory import memory
from parallel3d.estimate.fitted_cost import load, step
from parallel3d.estimate.search import (
    TIGHT,
    LayoutChoice,
    Priced,
    best,
    complexity,
    divisors,
    layouts,
    price,
    reason,
    works,
)
from tests.unit.plan_work import work

ONE = work(layers=80, hidden=8192, heads=64, ffn=28672, seq=8192, overlap_dp=1, compiled=1)
SIZES = {name: float(getattr(ONE, name)) for name in ONE.__dataclass_fields__}


def priced_of(gpus: int, batch: int, choices: list[LayoutChoice] | None = None) -> Priced:
    """Priced with the memory of the fitted formulas' guesses, which any other would do."""
    choices = choices or list(layouts(SIZES, gpus, 8, batch, {}))
    held = memory(works(choices, SIZES, batch), {}).total
    return price(choices, SIZES, batch, load(), held)


def test_layouts_use_every_gpu_and_divide_the_batch() -> None:
    found = list(layouts(SIZES, 96, 8, 96, {}))
    assert {c.tp * c.pp * c.dp for c in found} == {96}
    assert all(96 % (c.dp * c.micro_batch_size) == 0 and c.tp <= 8 for c in found)
    assert {c.pp for c in found} >= {1, 2, 3, 4, 6, 12}
    assert all(c.zero < 2 for c in found if "zb" in c.schedule or c.vpp > 1)
    assert len(set(found)) == len(found)


def test_what_the_user_holds_is_held() -> None:
    held = {"tp": 4, "pp": 2, "zero": 1, "recompute": "full", "schedule": "zb_h1"}
    held["micro_batch_size"] = 2
    found = list(layouts(SIZES, 64, 8, 64, held))
    assert len(found) == 1 and found[0] == LayoutChoice(4, 2, 1, 8, 2, "zb_h1", "full", 1)


def test_the_table_prices_each_layout_as_a_single_call_does() -> None:
    choices = list(layouts(SIZES, 32, 8, 64, {"recompute": "none"}))[::17]
    priced = priced_of(32, 64, choices)
    each = [float(step(works([c], SIZES, 64), load()).total[0]) for c in choices]
    assert priced.seconds == pytest.approx(each)


def test_the_simpler_of_equal_layouts_stands_first_and_none_that_does_not_fit() -> None:
    priced = priced_of(64, 256)
    assert 0 < len(priced.order) < len(priced.choices)
    assert all(priced.memory[i] <= SIZES["memory_bytes"] for i in priced.order)
    risked = priced.seconds * np.where(priced.tight, TIGHT, 1.0)
    for a, b in zip(priced.order, priced.order[1:], strict=False):
        faster = risked[a] <= risked[b]
        assert faster or complexity(priced.choices[a]) <= complexity(priced.choices[b])


def test_a_nearly_full_gpu_comes_after_a_safe_one_that_is_about_as_fast() -> None:
    choices = list(layouts(SIZES, 64, 8, 256, {"tp": 8, "pp": 2, "recompute": "none"}))[:2]
    room = SIZES["memory_bytes"]
    full = price(choices, SIZES, 256, load(), np.array([0.95, 0.5]) * room)
    free = price(choices, SIZES, 256, load(), np.array([0.5, 0.95]) * room)
    a, b = full.seconds.tolist()
    assert 1 / TIGHT < a / b < TIGHT
    assert (full.order[0], free.order[0]) == (1, 0)


def test_rows_are_layouts_and_not_variants_and_each_has_its_reason() -> None:
    priced = priced_of(512, 1024)
    rows = best(priced, 10)
    assert len({(priced.choices[i].tp, priced.choices[i].pp) for i in rows}) == len(rows) == 10
    said = [reason(priced, i, rows[0], 8) for i in rows]
    assert "of the step computes" in said[0]
    assert all("%" in words or "as fast" in words for words in said)


def test_a_heavy_head_takes_layers_from_its_stage() -> None:
    sizes = SIZES | {"vocab": 16 * 8192 * 3.0}
    choice = LayoutChoice(2, 4, 1, 1, 1, "1f1b", "none", 0)
    w = works([choice], sizes, 64)
    assert w.last < w.first and w.first + 2 * w.middle + w.last >= SIZES["layers"]


@pytest.mark.parametrize("n", [1, 12, 97, 4096, 16384, 30030])
def test_divisors(n: int) -> None:
    assert divisors(n) == [d for d in range(1, n + 1) if n % d == 0]


def test_sixteen_thousand_gpus_take_no_time() -> None:
    """The promise is 30 s; a search that priced layouts one by one would take minutes."""
    began = time.process_time()
    priced_of(16384, 16384)
    assert time.process_time() - began < 20
