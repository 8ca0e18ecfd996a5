"""Tests prices of models whose layers differ: each rank has the layers that a run gives it."""

from __future__ import annotations

import copy
from collections import Counter
from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np
import pytest

from benchmarks.planner.published_experts import CASES, run_of
from parallel3d.blueprint.dispatch import share_sent
from parallel3d.blueprint.rank import PipelineRank
from parallel3d.cli.overrides import compose
from parallel3d.estimate.fitted_cost import (
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
from parallel3d.estimate.memory import memory_of, peak_stage
from parallel3d.estimate.search import LayoutChoice, configure, layouts, planned, sizes_of, works
from parallel3d.models.declared import LayerKind
from parallel3d.resolve import blueprint_of
from parallel3d.run_config import Config, check_config
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

EVEN = config_of("model=llama_tiny", "model.num_layers=12")


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


def numbers_in(layers: Counter[LayerKind]) -> Counter[tuple[bool, float]]:
    """Returns how many of the layers have experts or not, and a window of which length."""
    found: Counter[tuple[bool, float]] = Counter()
    for kind, count in layers.items():
        found[kind.experts, np.inf if kind.window is None else kind.window] += count
    return found


def counts_of(w: StepWork, index: int, row: int) -> Counter[tuple[bool, float]]:
    """Returns the same of a listed rank of a table's row."""
    found: Counter[tuple[bool, float]] = Counter()
    for kind, count in zip(w.kinds, w.ranks.counts[:, index, row].astype(int), strict=True):
        found[kind["sparse"] > 0, kind["window"]] += int(count)
    return +found


@pytest.mark.parametrize("config", [MIXED, WINDOWS, EVEN], ids=["experts", "windows", "equal"])
def test_first_and_last_rank_have_their_layers_of_the_run(config: Config) -> None:
    places = [(1, 1, "1f1b"), (2, 1, "1f1b"), (4, 1, "1f1b"), (5, 1, "1f1b"), (3, 2, "interleaved")]
    places += [(2, 3, "interleaved"), (2, 2, "zbv")]
    choices = [choice_of(pp=pp, vpp=v, schedule=name) for pp, v, name in places]
    w = work_of(config, *choices)
    for row, choice in enumerate(choices):
        run = held_by(config, choice)
        for index in (0, -1) if choice.pp > 1 else (0,):
            assert counts_of(w, index, row) == numbers_in(run[index])
            turns = choice.schedule == "zbv" or choice.pp == 1
            assert w.ranks.embeds[index, row] == (index == 0)
            assert w.ranks.heads[index, row] == (index == 0 if turns else index == -1)


def test_the_slowest_rank_is_priced_by_its_own_layers() -> None:
    """The first rank has no experts, and the last one has nothing else. A price by the mean layer
    would be too low, as most time goes to the experts."""
    choice, c = choice_of(pp=3, ep=8), load()
    w = work_of(MIXED, choice)
    dense, _, sparse = held_by(MIXED, choice)
    assert [{kind.experts for kind in of} for of in (dense, sparse)] == [{False}, {True}]
    few, many = w.by_kind
    each = layer(many, c)[1]
    batch = 1e-6 * c["engine.megatron.batch_us"]
    last = sparse.total() * each + head(w, c) + batch
    assert step(w, c).compute == pytest.approx(w.microbatches * last)
    assert each > 1.1 * layer(few, c)[1]
    kinds = breakdown(w, c, float(step(w, c).compute[0]))
    of_last = w.microbatches * sparse.total() * layer(many, c)[0]["matmuls"]
    assert kinds["matmuls"] == pytest.approx(float(of_last[0]))


def test_one_rank_has_all_layers() -> None:
    w, c = work_of(MIXED, choice_of()), load()
    batch = 1e-6 * c["engine.megatron.batch_us"]
    layers = sum(n * layer(kind, c)[1] for n, kind in zip(w.ranks.totals, w.by_kind, strict=True))
    assert w.ranks.totals.sum() == 12
    alone = layers + embedding(w, c) + head(w, c) + batch
    assert step(w, c).compute == pytest.approx(w.microbatches * alone)


def test_no_rank_between_the_ends_is_slower_than_the_listed_ones() -> None:
    for config, pp in product((MIXED, WINDOWS), (3, 4, 6, 12)):
        w = work_of(config, choice_of(pp=pp))
        listed = [counts_of(w, index, 0) for index in range(1, w.ranks.layers.shape[0] - 1)]
        for rank in held_by(config, choice_of(pp=pp))[1:-1]:
            assert any(numbers_in(rank) <= other for other in listed)


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


def test_given_stages_are_priced_as_they_are() -> None:
    """Only pipelines of so many stages are searched, and the stage with most layers is slowest."""
    given = config_of("model=llama3_8b", "cluster.nodes=2")
    given.schedule.layers_per_stage = [4, 20, 4, 4]
    sizes, c = sizes_of(given) | {"load": 1.0}, load()
    choices = [*layouts(sizes, 16, 8, BATCH, {})]
    assert {(choice.pp, choice.vpp) for choice in choices} == {(4, 1), (2, 2)}
    choice = choice_of(pp=4, schedule="1f1b")
    w = works([choice], sizes, BATCH)
    assert w.ranks.layers[:, 0].tolist() == [4, 20, 4]
    (kind,) = w.by_kind
    slowest = 20 * layer(kind, c)[1] + 1e-6 * c["engine.megatron.batch_us"]
    assert step(w, c).compute == pytest.approx(w.microbatches * slowest)
    turns = works([choice_of(pp=2, vpp=2, schedule="zbv")], sizes, BATCH).ranks
    assert turns.layers[:, 0].tolist() == [8, 24] and turns.heads[:, 0].tolist() == [1, 0]


def test_frozen_layers_are_priced_without_what_they_do_not_compute() -> None:
    """A forward alone takes a third, so stages of frozen layers have more of them."""
    frozen = config_of("model=llama3_8b", "cluster.nodes=2")
    frozen.optim.freeze = ["embedding.*", *(f"layers.{n}.*" for n in range(16))]
    choice, c = choice_of(pp=4), load()
    w, every = (work_of(config, choice) for config in (frozen, config_of("model=llama3_8b")))
    run = planned(configure(frozen, choice)).layers_per_stage
    assert w.ranks.layers[[0, -1], 0].tolist() == [run[0], run[-1]] and run[0] > 2 * run[2]
    without, trained = w.by_kind
    assert (without.backward, without.trained, trained.trained) == (0, 0, 1)
    one, three = (float(layer(kind, c)[1][0]) for kind in (without, trained))
    assert 2.5 < three / one < 4
    assert stage_parameters(w)[0, 0] == 0 < stage_parameters(w)[-1, 0]
    assert 0.5 < step(w, c).compute / step(every, c).compute < 0.75


def test_a_stage_of_frozen_layers_alone_has_an_estimate_of_its_memory() -> None:
    """It keeps nothing for a backward, and offloads nothing."""
    frozen = config_of("model=llama_tiny", "model.num_layers=4")
    every = copy.deepcopy(frozen)
    frozen.optim.freeze = ["embedding.*", "layers.0.*", "layers.1.*"]
    choice = choice_of(pp=4)
    first = planned(configure(frozen, choice)).stages[0]
    assert first.without_backward == len(first.layers)
    assert 0 < memory_of(frozen, choice) < memory_of(every, choice)


def test_frozen_layers_of_which_two_passes_take_turns_have_an_estimate_of_their_memory() -> None:
    words = ("model=moe_tiny", "pp=1", "dp=2", "ep=2", "moe.overlap=true")
    every, frozen = config_of(*words), config_of(*words)
    frozen.optim.freeze = ["embedding.*", "layers.*"]
    of_every, of_frozen = (
        peak_stage(blueprint_of(check_config(config, 2)))[1].total for config in (every, frozen)
    )
    assert 0 < of_frozen < of_every


def test_a_table_prices_uneven_layouts_as_single_calls_do() -> None:
    choices = list(layouts(sizes_of(MIXED), 32, 8, BATCH, {}))[::97]
    c = load()
    each = [float(step(work_of(MIXED, choice), c).total[0]) for choice in choices]
    assert step(work_of(MIXED, *choices), c).total == pytest.approx(each)


def test_dense_layers_of_a_published_model_are_on_its_first_ranks() -> None:
    """61 layers in 32 stages: the first stage has two of the three dense layers, the next has the
    third, and both are on different ranks."""
    (case,) = (case for case in CASES if case.id == "automodel-deepseek-v3")
    ranks = run_of(case).candidates[0]["ranks"].ranks
    dense = [of.layers[0] for of in ranks]
    assert (dense[0], max(dense[1:-1]), dense[-1]) == (2, 1, 0)
    assert [sum(of.layers) for of in ranks] == [16, 15, 15, 15]


# --- loads -------------------------------------------------------------------------------------


@pytest.mark.parametrize("gathers", [0, 1])
def test_a_rank_moves_no_token_twice_whatever_its_load(gathers: int) -> None:
    """With ep=2, nearly all tokens of 8 experts reach both ranks, so a load of two adds rows to the
    GEMMs and hardly any tokens to the exchange and to the moves before and after it."""
    c = constants()
    one, two = (work(**QWEN, ep=2, load=n, gathers=gathers) for n in (1, 1.9))
    most = 1.0 if gathers else 1 / share_sent(128, 8, 2)
    assert two.load_of_tokens == pytest.approx(most)
    for of in one.layer_products:
        ratio = sum(seconds(of, two, c)) / sum(seconds(of, one, c))
        assert 1.5 < ratio < 1.95 if of.of_experts else ratio == 1
    assert 1 < two.moved(c).forward / one.moved(c).forward < 1.9
