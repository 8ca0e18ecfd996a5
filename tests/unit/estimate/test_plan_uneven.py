"""Tests prices of models whose layers differ: each rank has the layers that a run gives it."""

from __future__ import annotations

from collections import Counter
from dataclasses import fields, replace
from itertools import product
from typing import Any

import numpy as np
import pytest

from benchmarks.planner.published_experts import CASES, run_of
from parallel3d.blueprint.dispatch import share_sent
from parallel3d.blueprint.rank import PipelineRank
from parallel3d.cli.overrides import compose
from parallel3d.estimate.fitted_cost import (
    PASSES,
    StepWork,
    breakdown,
    embedding,
    expert_parameters,
    head,
    layer,
    load,
    move,
    seconds,
    stage_parameters,
    step,
)
from parallel3d.estimate.search import LayoutChoice, configure, layouts, planned, sizes_of, works
from parallel3d.models.declared import LayerKind
from parallel3d.run_config import Config
from tests.unit.estimate.plan_work import constants, work
from tests.unit.estimate.test_plan_experts import QWEN

BATCH = 64


def config_of(*words: str) -> Config:
    config = compose("cluster=dgx_h100", f"global_batch_size={BATCH}", *words)
    return replace(config, precision=replace(config.precision, name="bf16"))


# A first third without experts, whose MLPs have as many FLOPs as a token's experts.
MIXED = config_of(
    *("model=moe_tiny", "model.num_layers=12", "model.hidden_size=2048", "model.num_experts=64"),
    *("model.experts_per_token=4", "model.expert_ffn_size=1024", "model.ffn_hidden_size=4096"),
    *("model.dense_layers=[0,1,2,3]", "model.seq_length=4096"),
)
WINDOWS = config_of(
    *("model=llama_tiny", "model.num_layers=12", "model.seq_length=32768"),
    *("model.layer_types=[sliding,sliding,full]", "model.sliding_window=64"),
)


def choice_of(**keys: Any) -> LayoutChoice:
    usual: dict[str, Any] = dict(tp=1, pp=1, vpp=1, dp=8, micro_batch_size=1, schedule="1f1b")
    return LayoutChoice(**usual | {"recompute": "none", "zero": 0} | keys)


def work_of(config: Config, *choices: LayoutChoice) -> StepWork:
    return works([*choices], sizes_of(config) | {"load": 1.0}, BATCH)


def held_by(config: Config, choice: LayoutChoice) -> list[Counter[LayerKind]]:
    """Returns the kinds of layers of each rank in a run."""
    blueprint = planned(configure(config, choice))
    return [
        Counter({of.kind: of.layers for of in PipelineRank(blueprint, index).kinds})
        for index in range(choice.pp)
    ]


@pytest.mark.parametrize("config", [MIXED, WINDOWS], ids=["experts", "windows"])
def test_first_and_last_rank_have_their_layers_of_the_run(config: Config) -> None:
    places = [(1, 1, "1f1b"), (2, 1, "1f1b"), (4, 1, "1f1b"), (5, 1, "1f1b"), (3, 2, "interleaved")]
    places += [(2, 3, "interleaved"), (2, 2, "zbv")]
    choices = [choice_of(pp=pp, vpp=v, schedule=name) for pp, v, name in places]
    ranks = work_of(config, *choices).ranks
    for row, choice in enumerate(choices):
        run = held_by(config, choice)
        for index in (0, -1) if choice.pp > 1 else (0,):
            layers, sparse, sliding, embeds, heads = (of[index, row] for of in ranks)
            assert layers == run[index].total()
            assert layers * sparse == sum(n for kind, n in run[index].items() if kind.experts)
            if config is WINDOWS:
                windows = sum(n for kind, n in run[index].items() if kind.window)
                assert layers * sliding == pytest.approx(windows)
            turns = choice.schedule == "zbv" or choice.pp == 1
            assert embeds == (index == 0)
            assert heads == (index == 0 if turns else index == -1)


def test_the_slowest_rank_is_priced_by_its_own_layers() -> None:
    """The first rank has no experts, and the last one has nothing else. A price by the mean layer
    would be too low, as most time goes to the experts."""
    choice, c = choice_of(pp=3, ep=8), load()
    w = work_of(MIXED, choice)
    dense, _, sparse = held_by(MIXED, choice)
    assert [{kind.experts for kind in of} for of in (dense, sparse)] == [{False}, {True}]
    each = layer(replace(w, sparse=np.ones(1)), c)[1]
    batch = 1e-6 * c["engine.megatron.batch_us"]
    last = sparse.total() * each + head(w, c) + batch
    assert step(w, c).compute == pytest.approx(w.microbatches * last)
    assert each > 1.1 * layer(w, c)[1]
    kinds = breakdown(w, c, float(step(w, c).compute[0]))
    of_last = (
        w.microbatches * sparse.total() * layer(replace(w, sparse=np.ones(1)), c)[0]["matmuls"]
    )
    assert kinds["matmuls"] == pytest.approx(float(of_last[0]))


def test_one_rank_has_the_mean_of_all_layers() -> None:
    w, c = work_of(MIXED, choice_of()), load()
    batch = 1e-6 * c["engine.megatron.batch_us"]
    alone = 12 * layer(w, c)[1] + embedding(w, c) + head(w, c) + batch
    assert step(w, c).compute == pytest.approx(w.microbatches * alone)


def test_no_rank_between_the_ends_is_slower_than_the_listed_ones() -> None:
    for config, pp in product((MIXED, WINDOWS), (3, 4, 6, 12)):
        listed = work_of(config, choice_of(pp=pp)).ranks
        records = list(zip(*(of[1:-1, 0] for of in listed), strict=True))
        for rank in held_by(config, choice_of(pp=pp))[1:-1]:
            layers = rank.total()
            sparse = sum(n for kind, n in rank.items() if kind.experts)
            sliding = layers * (config is MIXED) + sum(n for k, n in rank.items() if k.window)
            assert any(
                n * of >= sparse and n * (1 - of) >= layers - sparse
                and round(n * w) >= sliding and round(n * (1 - w)) >= layers - sliding
                for n, of, w, *_ in records
            )  # fmt: skip


def test_states_are_those_of_the_rank_with_most_of_them() -> None:
    """The rank with wide MLPs has no experts, so no rank has the most elements of both."""
    wide = replace(MIXED, model=replace(MIXED.model, ffn_hidden_size=32768))
    choice, c = choice_of(pp=3, ep=8), load()
    w = work_of(wide, choice)
    others, experts = stage_parameters(w), expert_parameters(w)
    assert np.argmax(others) != np.argmax(experts)
    blueprint = planned(configure(wide, choice))
    elements = [sum(p.numel for p in PipelineRank(blueprint, i).trained) for i in range(3)]
    assert (others + experts)[:, 0] == pytest.approx(elements, rel=1e-3)
    assert step(w, c).optimizer == move(w, c, (others + experts).max() * c["optimizer.bytes"])


@pytest.mark.parametrize("name", ["llama3_8b", "qwen3_30b_a3b", "mistral_7b"])
def test_a_model_of_equal_layers_is_priced_as_one_without_a_list_of_layers(name: str) -> None:
    config = config_of(f"model={name}", "cluster.nodes=2")
    sizes = sizes_of(config) | {"load": 1.0}
    choices = list(layouts(sizes, 16, 8, BATCH, {}))[::23]
    listed = step(works(choices, sizes, BATCH), load())
    del sizes["model"]
    alike = step(works(choices, sizes, BATCH), load())
    for part in fields(listed):
        assert np.array_equal(getattr(listed, part.name), getattr(alike, part.name))


def test_a_table_prices_uneven_layouts_as_single_calls_do() -> None:
    choices = list(layouts(sizes_of(MIXED), 32, 8, BATCH, {}))[::97]
    c = load()
    each = [float(step(work_of(MIXED, choice), c).total[0]) for choice in choices]
    assert step(work_of(MIXED, *choices), c).total == pytest.approx(each)


def test_dense_layers_of_a_published_model_are_on_its_first_ranks() -> None:
    """61 layers in 32 stages: the first stage has two of the three dense layers, the next has the
    third, and both are on different ranks."""
    (case,) = (case for case in CASES if case.id == "automodel-deepseek-v3")
    ranks = run_of(case).candidates[0]["ranks"]
    dense = [round(of.layers * (1 - of.sparse)) for of in ranks]
    assert (dense[0], max(dense[1:-1]), dense[-1]) == (2, 1, 0)
    assert [of.layers for of in ranks] == [16, 15, 15, 15]


# --- loads -------------------------------------------------------------------------------------


@pytest.mark.parametrize("gathers", [0, 1])
def test_a_rank_moves_no_token_twice_whatever_its_load(gathers: int) -> None:
    """With ep=2, nearly all tokens of 8 experts reach both ranks, so a load of two adds rows to the
    GEMMs and hardly any tokens to the exchange and to the moves before and after it."""
    c = constants()
    one, two = (work(**QWEN, ep=2, load=n, gathers=gathers) for n in (1, 1.9))
    most = 1.0 if gathers else 1 / share_sent(128, 8, 2)
    for op in one.expert_ops:
        ratio = sum(seconds(op, two, c)) / sum(seconds(op, one, c))
        if op.name in PASSES:
            assert ratio == pytest.approx(most)
        elif op.name == "mlp.experts.activation":
            assert ratio == pytest.approx(1.9)
