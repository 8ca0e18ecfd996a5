"""Tests the planner's search: the searched and the fixed keys, and the order of layouts."""

from __future__ import annotations

import dataclasses
import time
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from benchmarks.planner.published_run import load_all
from parallel3d.blueprint.keys import ClusterConfig
from parallel3d.blueprint.sizes import STYLES
from parallel3d.context_parallel.checks import check_context_parallel
from parallel3d.context_parallel.keys import ContextParallelConfig
from parallel3d.estimate.fitted_cost import (
    StepWork,
    context_parallel,
    load,
    stage_parameters,
    step,
)
from parallel3d.estimate.search import (
    TIGHT,
    LayoutChoice,
    PricedLayouts,
    best,
    complexity,
    divisors,
    layouts,
    ranked,
    reason,
    sizes_of,
    style_seconds,
    with_style,
    works,
)
from parallel3d.models.keys import ModelConfig
from parallel3d.run_config import Config
from parallel3d.topology.assumptions import preset
from tests.unit.estimate.plan_work import work

CONFIG = Config(
    model=ModelConfig(**preset("model", "llama3_70b") | {"vocab_size": 128256, "seq_length": 8192}),
    cluster=ClusterConfig(**preset("cluster", "dgx_h100")),
)
CONFIG.precision.name = "bf16"
SIZES = sizes_of(CONFIG) | {"load": 1.0}


def price(choices: list[LayoutChoice], batch: int, held: NDArray[np.float64]) -> PricedLayouts:
    times = step(works(choices, SIZES, batch), load())
    return ranked(choices, times, held, SIZES["memory_bytes"])


def priced_of(gpus: int, batch: int, choices: list[LayoutChoice] | None = None) -> PricedLayouts:
    """Prices layouts; the memory is that of states and activations, and any other would do."""
    choices = choices or list(layouts(SIZES, gpus, 8, batch, {}))
    w = works(choices, SIZES, batch)
    states = stage_parameters(w).max(axis=0)
    shards = np.where(w.zero > 0, w.dp * w.cp, 1.0)
    kept = np.where(w.recompute_layer > 0, 2.0, 34.0) * w.tokens * w.hidden / w.tp * w.layers
    return price(choices, batch, 6 * states + 12 * states / shards + kept)


def test_layouts_use_every_gpu_and_divide_the_batch() -> None:
    found = list(layouts(SIZES, 96, 8, 96, {}))
    assert {c.tp * c.pp * c.dp for c in found} == {96}
    assert all(96 % (c.dp * c.micro_batch_size) == 0 and c.tp <= 8 for c in found)
    assert {c.pp for c in found} >= {1, 2, 3, 4, 6, 12}
    assert all(c.zero < 2 for c in found if "zb" in c.schedule or c.vpp > 1)
    assert len(set(found)) == len(found)


def test_values_fixed_by_the_user_are_kept() -> None:
    held = {"tp": 4, "pp": 2, "zero": 1, "recompute": "full", "schedule": "zb_h1"}
    held["micro_batch_size"] = 2
    found = list(layouts(SIZES, 64, 8, 64, held))
    assert len(found) == 1 and found[0] == LayoutChoice(4, 2, 1, 8, 2, "zb_h1", "full", 1)


@pytest.mark.nightly
def test_the_table_prices_each_layout_as_a_single_call_does() -> None:
    choices = list(layouts(SIZES, 32, 8, 64, {"recompute": "none"}))[::17]
    priced = priced_of(32, 64, choices)
    each = [float(step(works([c], SIZES, 64), load()).total[0]) for c in choices]
    assert priced.seconds == pytest.approx(each)


def test_equal_layouts_are_sorted_by_simplicity_and_must_fit() -> None:
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
    full = price(choices, 256, np.array([0.95, 0.5]) * room)
    free = price(choices, 256, np.array([0.5, 0.95]) * room)
    a, b = full.seconds.tolist()
    assert 1 / TIGHT < a / b < TIGHT
    assert (full.order[0], free.order[0]) == (1, 0)


def test_rows_are_layouts_and_not_variants_and_each_has_its_reason() -> None:
    priced = priced_of(512, 1024)
    rows = best(priced, 10)
    assert len({(priced.choices[i].tp, priced.choices[i].pp) for i in rows}) == len(rows) == 10
    said = [reason(priced, i, rows[0], 8) for i in rows]
    assert "of the step is computation" in said[0]
    assert all("%" in words or "as fast" in words for words in said)


def test_a_heavy_head_takes_layers_from_its_stage() -> None:
    model = dataclasses.replace(CONFIG.model, vocab_size=16 * 8192 * 3)
    sizes = sizes_of(dataclasses.replace(CONFIG, model=model)) | {"load": 1.0}
    choice = LayoutChoice(2, 4, 1, 1, 1, "1f1b", "none", 0)
    w = works([choice], sizes, 64)
    first, middle, last = w.ranks.layers
    assert last < first and first + 2 * middle + last >= SIZES["layers"]


@pytest.mark.parametrize("n", [1, 12, 97, 4096, 16384, 30030])
def test_divisors(n: int) -> None:
    assert divisors(n) == [d for d in range(1, n + 1) if n % d == 0]


def test_sixteen_thousand_gpus_take_no_time() -> None:
    """Tests the promise of 30 s; a search that prices layouts one by one would take minutes."""
    began = time.process_time()
    priced_of(16384, 16384)
    assert time.process_time() - began < 20


LONG = SIZES | {"seq": 131072.0}


def test_long_sequences_are_split_and_short_ones_are_not() -> None:
    found = list(layouts(LONG, 128, 8, 64, {}))
    assert {c.cp for c in found} == {1, 2, 4, 8, 16}
    assert all(c.tp * c.cp * c.pp * c.dp == 128 for c in found)
    assert all(c.micro_batch_size == 1 for c in found if c.cp > 1)
    assert {c.cp for c in layouts(SIZES, 128, 8, 64, {})} == {1}
    assert {c.cp for c in layouts(SIZES, 128, 8, 64, {"cp": 4})} == {4}


def test_split_sequences_share_gradients_with_the_replicas() -> None:
    """The same ranks along cp have the same reductions as along dp, and shards of the same size."""
    split, whole = (
        step(work(dp=dp, cp=cp, zero=1, microbatches=8), load_all()) for dp, cp in ((2, 4), (8, 1))
    )
    assert split.optimizer == whole.optimizer
    # A shorter backward hides them.
    assert split.gradients == pytest.approx(whole.gradients, rel=0.3)


@pytest.mark.parametrize("style", range(3))
def test_a_style_waits_less_within_a_node_and_for_shorter_sequences(style: int) -> None:
    given = {"cp": 8, "seq": 131072, "heads": 64, "kv_heads": 64, "cp_style": style}
    near, far = (work(**given, gpus_per_node=n) for n in (8, 4))
    c, alone = load_all(), np.array(0.0)
    assert 0 < context_parallel(near, c, alone) < context_parallel(far, c, alone)
    assert context_parallel(work(**given | {"seq": 32768}), c, alone) < context_parallel(
        near, c, alone
    )
    assert context_parallel(work(**given | {"cp": 1}), c, alone) == 0


def sent_in_a_layer(one: StepWork, style: str) -> float:
    """Returns the seconds of the formulas of context_parallel/attention.py over NVLink."""
    whole = 2 * 2 * one.seq * one.kv_heads * one.head_size  # K, in bf16
    queries, p = 2 * one.seq * one.heads * one.head_size, one.cp
    nbytes = {
        "gather": 3 * whole,
        "ring": (1 + 1 + 4 / 2) * whole,
        "heads": 2 * (2 * queries + whole) / p,
    }[style]
    return (p - 1) / p * nbytes / (one.link_rate * load_all()["link.rate"])


def test_attention_hides_gathers_and_a_ring_but_no_all_to_all() -> None:
    c, given = load_all(), {"cp": 8, "seq": 65536, "heads": 64, "kv_heads": 64}
    for style, hides in (("gather", True), ("heads", False), ("ring", True)):
        one = work(**given, cp_style=STYLES.index(style))
        bare, behind = (float(context_parallel(one, c, np.array(t))) for t in (0.0, 1.0))
        assert behind == pytest.approx(bare * (c["cp.exposed"] if hides else 1.0))
        # the difference is latency
        assert bare == pytest.approx(float(sent_in_a_layer(one, style)), rel=0.03)
    cheapest = float(context_parallel(work(**given, cp_style=3), c, np.array(0.0)))
    assert cheapest == min(
        float(context_parallel(work(**given, cp_style=i), c, np.array(0.0))) for i in range(3)
    )


def config_of(cluster: str, **keys: Any) -> Config:
    model = preset("model", "llama3_8b") | {"seq_length": keys.pop("seq_length", 131072)}
    config = Config(
        model=ModelConfig(**model | keys.pop("model", {})),
        cluster=ClusterConfig(**preset("cluster", cluster)),
        context_parallel=ContextParallelConfig(style="auto"),
        micro_batch_size=1, global_batch_size=1, dp=1, **keys,
    )  # fmt: skip
    config.precision.name = "bf16"
    return config


def test_the_cheapest_style_is_one_that_the_checks_allow() -> None:
    few = {"num_attention_heads": 8, "num_query_groups": 8, "head_dim": 128}
    assert with_style(config_of("dgx_h100", cp=1)).context_parallel.style == "auto"
    for cluster in ("dgx_h100", "laptop"):  # by the planner's prices, and only by the network's
        for model in (few, few | {"dropout": 0.1}, few | {"num_attention_heads": 9}):
            config = config_of(cluster, cp=8, model=model | {"num_query_groups": None})
            chosen, seconds = with_style(config), style_seconds(config)
            style, attention = chosen.context_parallel.style, chosen.tensor_parallel.attention
            check_context_parallel(chosen.model, style, attention, tp=chosen.tp, cp=chosen.cp)
            allowed = {"gather", "ring", "heads"}
            allowed -= {"ring"} if "dropout" in model else set()
            allowed -= {"heads"} if model["num_attention_heads"] == 9 else set()
            assert set(seconds) == allowed
            assert chosen.context_parallel.style == min(seconds, key=seconds.__getitem__)
            assert all(0 < value < float("inf") for value in seconds.values())
