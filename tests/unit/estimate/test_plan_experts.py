"""Prices of layers with experts: GEMMs of groups, exchanges of tokens, states and latents."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from benchmarks.planner.published_models import named
from benchmarks.planner.published_run import COPIES
from parallel3d.blueprint.dispatch import share_sent
from parallel3d.blueprint.keys import ClusterConfig
from parallel3d.blueprint.parameters import active_parameter_count, parameter_count
from parallel3d.estimate.fitted_cost import (
    StepWork,
    exchange,
    gemm,
    layer,
    step,
)
from parallel3d.estimate.search import LayoutChoice, sizes_of, works
from parallel3d.run_config import Config
from tests.unit.estimate.plan_work import constants, table, work
from tests.unit.metrics.test_flops import preset

QWEN = dict(
    layers=48, hidden=2048, heads=32, kv_heads=4, head_size=128, ffn=6144, vocab=151936,
    sparse=1, experts=128, active_experts=8, expert_ffn=768,
)  # fmt: skip
DEEPSEEK = dict(
    sparse=1, experts=256, active_experts=8, expert_ffn=2048, ep=64, hidden=7168, dp=64
)  # fmt: skip


def of_published(name: str, **over: float) -> StepWork:
    return work(**{**named(name), **over})


def of_layers(w: StepWork, of: Callable[[StepWork], float]) -> float:
    """Returns the sum of a value over the layers without and with experts."""
    dense, sparse = (of(kind) for kind in w.by_kind)
    return float(w.layers * (dense + w.sparse * (sparse - dense)))


def in_all(w: StepWork) -> float:
    """Returns a model's parameters in billions, at ep=1 and tp=1."""
    layers = of_layers(w, lambda kind: kind.parameters + kind.expert_parameters)
    return (layers + float(2 * w.vocab * w.hidden)) / 1e9


@pytest.mark.parametrize(
    ("name", "billions"),
    [
        ("DeepSeekV3", 671.0),
        ("Kimi_K2", 1026.0),
        ("Qwen3_30B_a3B", 30.5),
        ("Qwen3_235B_a22B", 235.0),
        ("GPT OSS 120B", 117.0),
        ("GPT OSS 20B", 20.9),
        ("Mixtral-8x22B", 140.6),
    ],
)
def test_published_models_have_their_parameters(name: str, billions: float) -> None:
    assert in_all(of_published(name)) == pytest.approx(billions, rel=0.01)


@pytest.mark.parametrize(
    ("name", "billions"), [("DeepSeekV3", 37.0), ("Kimi_K2", 32.0), ("Qwen3_235B_a22B", 22.0)]
)
def test_a_token_uses_the_active_parameters(name: str, billions: float) -> None:
    w = of_published(name)
    layers = of_layers(w, lambda kind: kind.multiplied)
    active = (layers + float(w.vocab * w.hidden)) / 1e9
    assert active == pytest.approx(billions, rel=0.03)


@pytest.mark.parametrize("name", ["qwen3_30b_a3b", "olmoe_1b_7b", "mixtral_8x7b", "dots1"])
def test_products_of_a_preset_agree_with_the_parameters_of_its_tensors(name: str) -> None:
    config = Config(model=preset(name), cluster=ClusterConfig(gpu="h100"))
    config.precision.name = "bf16"
    choice = LayoutChoice(1, 1, 1, 1, 1, "1f1b", "none", 0)
    w = works([choice], sizes_of(config) | {"load": 1.0}, 8)

    def in_layers(of: Callable[[StepWork], Any]) -> float:
        each = zip(w.ranks.totals[:, 0], w.by_kind, strict=True)
        return float(sum(n * np.ravel(of(kind))[0] for n, kind in each))

    tables = float((2 * w.vocab * w.hidden)[0])
    every = in_layers(lambda kind: kind.parameters + kind.expert_parameters) + tables
    assert every == pytest.approx(parameter_count(config.model), rel=1e-3)
    active = active_parameter_count(config.model)
    assert in_layers(lambda kind: kind.multiplied) + tables == pytest.approx(active, rel=1e-3)


def test_a_model_without_experts_costs_the_same_beside_one_with_experts() -> None:
    """A table of both kinds, and of latent attention, prices each row as it does alone."""
    c = constants()
    rows: list[dict[str, float]] = [
        dict(tp=4, sequence_parallel=1),
        {**QWEN, "ep": 8},
        {**named("DeepSeekV3"), "ep": 64, "dp": 64},
    ]
    alone = [float(step(work(**row), c).total) for row in rows]
    together = table([work(**row) for row in rows])
    assert step(together, c).total.tolist() == pytest.approx(alone, rel=1e-12)
    assert float(step(work(tp=4, sequence_parallel=1), c).total) == alone[0]


def test_gemms_of_groups_cost_more_than_one_of_all_rows() -> None:
    w, c = work(), constants()
    whole = float(gemm(w, c, 32768, 1536, 2048))
    few, many = (float(gemm(w, c, 32768 / n, 1536, 2048, n)) for n in (8, 1024))
    assert float(gemm(w, c, 32768, 1536, 2048, 1)) == whole
    assert whole <= few < 1.2 * whole
    assert many > 2 * whole, "32 rows in tiles of 128"


def sent(**over: float) -> float:
    """Returns the seconds of a pass less its latency and wait, for a token of a byte a copy."""
    c = constants(**{"experts.wait_us": 1e-9, "link.latency_us": 1e-9})
    return float(exchange(work(**{**DEEPSEEK, **over}), c))


def test_a_token_goes_once_to_a_rank_in_a_node() -> None:
    """On eight ranks of a node, 7 · p copies go over the link."""
    w, c = work(**{**DEEPSEEK, "ep": 8}), constants(**{"experts.wait_us": 1e-9})
    copies = 7 * share_sent(256, 8, 8)
    rate = float(w.link_rate) * c["link.rate"] * c["experts.link"]
    seconds = copies * 2 * 7168 * float(w.tokens) / rate + 1e-6 * c["link.latency_us"]
    assert float(exchange(w, c)) == pytest.approx(seconds)


def test_the_slower_of_link_and_network_counts() -> None:
    by = {name: sent(copies=i) for i, name in enumerate(COPIES)}
    assert by["node"] < by["rank"] < by["expert"]
    away = {
        "rank": 56 * share_sent(256, 8, 64),
        "expert": 56 / 8,
        "node": 7 * share_sent(256, 8, 8),
    }
    delay = sent(load=1e-12)
    for name in ("rank", "expert"):
        ratio = (by[name] - delay) / (by["node"] - delay)
        assert ratio == pytest.approx(away[name] / away["node"], rel=1e-6)


def test_a_load_slows_the_experts_alone() -> None:
    c = constants()
    one, two = (layer(work(**QWEN, ep=16, dp=16, load=load), c)[0] for load in (1.0, 2.0))
    assert one["attention"] == two["attention"]
    assert two["exchange of tokens"] > 1.5 * one["exchange of tokens"]
    assert 1.3 < two["matmuls"] / one["matmuls"] < 2


def test_a_rank_gets_a_token_once_whatever_the_load() -> None:
    """With 8 of 128 experts nearly every token has one on each of two ranks."""
    c = constants(**{"experts.wait_us": 1e-9, "link.latency_us": 1e-9})
    even, uneven = (float(exchange(work(**QWEN, ep=2, load=load), c)) for load in (1.0, 1.9))
    assert uneven == pytest.approx(even / share_sent(128, 8, 2))


def test_gather_sends_every_token_to_every_rank() -> None:
    c = constants(**{"experts.wait_us": 1e-9, "link.latency_us": 1e-9})
    gathered, sent = (float(exchange(work(**QWEN, ep=8, gathers=flag), c)) for flag in (1, 0))
    assert sent == pytest.approx(gathered * share_sent(128, 8, 8))


def test_overlap_hides_exchanges_but_not_the_waits_for_the_host() -> None:
    c = constants()
    plain, hidden = (
        layer(work(**QWEN, ep=8, overlap_ep=flag, microbatches=1e9), c)[0]["exchange of tokens"]
        for flag in (0, 1)
    )
    waits = 4e-6 * c["experts.wait_us"]
    share = 16 / 132
    assert float(hidden) == pytest.approx(waits + share * (float(plain) - waits))


def test_one_rank_exchanges_nothing() -> None:
    assert float(exchange(work(**QWEN, ep=1), constants())) == 0


def test_gradients_of_experts_are_summed_over_edp() -> None:
    """With ep = dp there is no other copy of an expert, and ZeRO divides nothing of it."""
    c = constants()
    one, eight = (step(work(**QWEN, ep=ep, zero=1), c) for ep in (1, 8))
    assert float(eight.gradients) < float(one.gradients) / 4
    assert float(eight.optimizer) == pytest.approx(float(one.optimizer))


def test_tensor_parallelism_leaves_the_experts_whole() -> None:
    """Experts are divided by ep alone (etp = 1), and each tensor rank routes its own tokens."""
    one, two = (work(**QWEN, ep=8, tp=tp, sequence_parallel=1) for tp in (1, 2))
    assert float(one.expert_parameters) == float(two.expert_parameters)
    c = constants()
    halves = [float(exchange(w, c)) for w in (one, two)]
    assert halves[1] < halves[0]


def test_recomputing_experts_repeats_the_dispatch() -> None:
    c = constants()
    plain, again = (
        layer(work(**QWEN, ep=8, recompute_mlp=flag), c)[0]["exchange of tokens"] for flag in (0, 1)
    )
    assert float(again / plain) == pytest.approx(5 / 4)
