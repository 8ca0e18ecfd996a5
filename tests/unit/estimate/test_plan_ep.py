"""Tests plans of models with experts: sizes of ep, their memory, the load, and the output."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from parallel3d.blueprint.dispatch import most_load
from parallel3d.cli.overrides import compose
from parallel3d.commands.best_layout import take_layout
from parallel3d.commands.plan import ROWS, Plan, searched, typed_keys
from parallel3d.errors import UserError
from parallel3d.estimate.fitted_cost import load_own, step
from parallel3d.estimate.memory import bounded, load_that_fits, memory_of, peak_memory
from parallel3d.estimate.search import (
    LayoutChoice,
    PricedLayouts,
    best,
    configure,
    expert_sizes,
    layouts,
    planned,
    ranked,
    reason,
    sizes_of,
    works,
)
from parallel3d.resolve import layout_of
from parallel3d.run.launcher_environment import RankAssignment
from parallel3d.run_config import Config, check_config
from parallel3d.trace.wanted import WantedTrace

pytestmark = pytest.mark.nightly

GB = 1e9


def config_of(*words: str) -> Config:
    config = compose("cluster=dgx_h100", *words)
    return replace(config, precision=replace(config.precision, name="bf16"))


QWEN = config_of("model=qwen3_30b_a3b", "cluster.nodes=2", "global_batch_size=64")


def choice_of(**keys: Any) -> LayoutChoice:
    usual: dict[str, Any] = dict(tp=1, pp=1, vpp=1, dp=16, micro_batch_size=1, schedule="1f1b")
    return LayoutChoice(**usual | {"recompute": "none", "zero": 3} | keys)


def test_ep_takes_every_size_that_divides_the_experts_and_the_ranks_of_a_stage() -> None:
    sizes = {"experts": 24.0}
    assert expert_sizes(sizes, 16, {}) == [1, 2, 4, 8]
    assert expert_sizes(sizes, 9, {}) == [1, 3]
    assert expert_sizes(sizes, 16, {"ep": 4}) == [4]
    assert expert_sizes(sizes, 9, {"ep": 4}) == []
    assert expert_sizes({"experts": 0.0}, 16, {}) == [1]


def test_every_layout_with_experts_passes_the_checks_of_a_run() -> None:
    found = list(layouts(sizes_of(QWEN), 16, 8, 64, {}))
    assert len(set(found)) == len(found)
    assert {c.ep for c in found} == {1, 2, 4, 8, 16}
    for choice in found[::97]:
        made = check_config(configure(QWEN, choice), 16, own_samples=True)
        assert made.sp is (choice.tp > 1) and layout_of(made).ep == choice.ep


def test_states_of_experts_are_divided_over_tensor_ranks_too() -> None:
    """A stage of eight tensor ranks has eight copies of its experts, although dp is 1."""
    found = list(layouts(sizes_of(QWEN), 8, 8, 64, {"tp": 8, "dp": 1, "schedule": "1f1b"}))
    assert {c.zero for c in found if c.ep == 1} == {0, 1, 2, 3}
    assert {c.zero for c in found if c.ep == 8} == {0}
    one, other = (choice_of(tp=8, dp=1, zero=zero) for zero in (0, 1))
    assert memory_of(QWEN, other) < memory_of(QWEN, one) / 2


def test_dense_models_have_no_ep() -> None:
    dense = config_of("model=llama3_8b")
    assert {c.ep for c in layouts(sizes_of(dense), 16, 8, 64, {})} == {1}
    with pytest.raises(UserError, match=r"ep=2 must be 1 for model=llama3_8b.*nearest is ep=1"):
        searched(dense, {"ep": 2}, 16)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("model.expert_bias=true", r"model\.expert_bias=true.* model\.num_experts=0"),
        ("model.delta_key_heads=2", r"model\.delta_key_heads=2 belongs to gated_deltanet"),
        ("delta_kernel=torch", r"delta_kernel=torch is a kernel of gated_deltanet"),
    ],
)
def test_parts_of_layers_that_a_model_lacks_are_refused_as_by_a_run(words: str, said: str) -> None:
    with pytest.raises(UserError, match=said):
        searched(config_of("model=llama3_8b", words), {}, 16)


@pytest.mark.parametrize(
    ("fixed", "said"),
    [
        ({"ep": 3}, "ep=3 must divide tp · cp · dp=16; the nearest is ep=2"),
        ({"ep": 16, "pp": 2}, "ep=16 must divide tp · cp · dp=8; the nearest is ep=8"),
    ],
)
def test_an_ep_that_divides_nothing_is_refused(fixed: dict[str, int], said: str) -> None:
    with pytest.raises(UserError, match=said):
        searched(QWEN, fixed, 16)


def everything(config: Config, choices: list[LayoutChoice], most: float) -> PricedLayouts:
    """Returns the layouts with the memory of each."""
    times = times_of(config, choices)
    memory = np.array([memory_of(config, choice) + 4 * GB for choice in choices])
    return ranked(choices, times, memory, most)


def times_of(config: Config, choices: list[LayoutChoice]) -> Any:
    work = works(choices, sizes_of(config) | {"load": 1.0}, config.global_batch_size)
    return step(work, load_own("h100"))


@pytest.mark.parametrize("room", [40, 70, 400])
def test_the_fastest_layouts_suffice_for_the_table(room: int) -> None:
    """The memory of a layout is calculated only if it may be in the table, which is the same."""
    fixed = {"micro_batch_size": 2, "schedule": "1f1b", "vpp": 1}
    choices = list(layouts(sizes_of(QWEN), 16, 8, 64, fixed))
    most = room * GB
    unknown = np.full(len(choices), np.nan)
    started = PricedLayouts(choices, times_of(QWEN, choices), unknown, np.array(False), [])
    some, every = bounded(QWEN, started, 4, most, 4 * GB), everything(QWEN, choices, most)
    assert best(some, 4) == best(every, 4)
    known = np.isfinite(some.memory)
    assert known.sum() < len(choices) and (some.memory == every.memory)[known].all()
    # The next layouts are calculated when the best ones turn out not to fit.
    memory = np.array(some.memory)
    memory[best(some, 4)] = math.inf
    again = bounded(QWEN, ranked(choices, some.time, memory, most), 4, most, 4 * GB)
    assert len(best(again, 4)) == 4 and not {*best(again, 4)} & {*best(some, 4)}


def test_memory_grows_with_the_load_up_to_all_tokens_on_one_rank() -> None:
    choice = choice_of(ep=8, micro_batch_size=4)
    needs = [memory_of(QWEN, choice, load) for load in (1.0, 1.5, 2.0, 8.0, 9.0)]
    assert needs == sorted(needs) and needs[0] < needs[2] and needs[3] == needs[4]
    assert most_load(QWEN.model, 8) == 8.0
    alone = choice_of(ep=1)
    assert memory_of(QWEN, alone, 2.0) == memory_of(QWEN, alone)
    config = configure(QWEN, choice)
    assert peak_memory(config, 0, 2.0).total == needs[2]
    # Only tensors of the experts' rows grow.
    kept = [peak_memory(config, 0, load).activations for load in (1.0, 2.0)]
    assert kept[0] < kept[1] < 2 * kept[0]


@pytest.mark.parametrize(("experts", "chosen", "ep", "most"), [(8, 2, 8, 4.0), (8, 2, 2, 2.0)])
def test_no_rank_has_more_than_the_tokens_of_its_group(
    experts: int, chosen: int, ep: int, most: float
) -> None:
    """With one expert on each rank, a rank gets each token at most once."""
    words = f"model.num_experts={experts}", f"model.experts_per_token={chosen}"
    words += ("global_batch_size=32", "moe.dispatch=all_to_all")
    config = config_of("model=moe_tiny", *words, f"ep={ep}", "dp=8")
    assert most_load(config.model, ep) == most
    blueprint = replace(planned(config), load=100.0)
    last = config.model.num_layers - 1
    assert WantedTrace.of(blueprint, last, recomputed=False).blueprint.load == most


def test_the_largest_load_that_fits_is_found() -> None:
    choice = choice_of(ep=8, micro_batch_size=4)
    room = memory_of(QWEN, choice, 1.7) - memory_of(QWEN, choice)
    assert load_that_fits(QWEN, choice, room) == pytest.approx(1.7, abs=0.01)
    assert load_that_fits(QWEN, choice, 1e15) == math.inf
    assert load_that_fits(QWEN, choice, 0.0) == 1.0


@pytest.fixture(scope="module")
def found() -> Plan:
    return searched(QWEN, {"tp": 1, "schedule": "1f1b"}, 16)


def test_the_table_has_a_column_of_ep_and_counts_parameters(found: Plan) -> None:
    title, _, head, *lines = found.table().splitlines()
    assert title.startswith("qwen3_30b_a3b (30.5 B parameters, 3.35 B active) on 16 GPUs")
    assert "of the fastest" in title and "ep" in head.split()
    assert len(found.rows) == ROWS
    rows = {found.priced.choices[i].row for i in found.rows}
    assert len(rows) == ROWS and len({ep for *_, ep in rows}) > 1
    assert all(found.priced.memory[i] <= 80 * 2**30 for i in found.rows)
    first = found.priced.choices[found.rows[0]]
    assert lines[-1].endswith(typed_keys(first)) and f"ep={first.ep}" in lines[-1]


def test_the_first_row_says_up_to_which_load_it_fits(found: Plan) -> None:
    some = searched(QWEN, {"tp": 1, "schedule": "1f1b", "ep": 8}, 16)
    assert some.table().count("The first fits ") == 1
    first = some.rows[0]
    choice, memory = some.priced.choices[first], np.array(some.priced.memory)
    more = memory_of(QWEN, choice, 1.5) - memory_of(QWEN, choice)
    memory[first] = some.sizes["memory_bytes"] - more
    full = replace(some, priced=replace(some.priced, memory=memory))
    assert "The first fits up to a load of 1.5 (" in full.loads()
    free = replace(some, priced=replace(some.priced, memory=memory - 1e12))
    assert "The first fits with any load (" in free.loads()
    alone = searched(QWEN, {"tp": 1, "schedule": "1f1b", "ep": 1}, 16)
    assert alone.loads() == ""


def test_a_slower_row_names_what_its_ep_costs() -> None:
    choices = [choice_of(ep=ep) for ep in (1, 8)]
    for slower, words in (
        (0, "fewer rows for each of a rank's experts at ep=1"),
        (1, "the exchange of tokens between the ranks of ep=8"),
    ):
        compute = np.where(np.arange(2) == slower, 3.0, 2.0)
        times = replace(times_of(QWEN, choices), compute=compute)
        priced = ranked(choices, times, np.full(2, GB), 80 * GB)
        assert reason(priced, slower, 1 - slower, 8).endswith(words)


def test_layout_auto_takes_the_best_layout_that_a_run_accepts(
    capsys: pytest.CaptureFixture[str],
) -> None:
    config = replace(QWEN, device="simulated", layout="auto", tp=2, ep=4)
    for rank in (0, 9):
        place = RankAssignment("torchrun", rank, rank % 8, 16, 8, "host", 29500)
        found = take_layout(config, ["tp=2", "ep=4", "layout=auto"], place)
        assert found.layout == "given" and found.world_size == 16
        assert (found.tp, found.sp, found.ep) == (2, True, 4)
        said = "".join(capsys.readouterr())
        assert ("layouts that fit 16 ranks" in said and "ep=4" in said) is (rank == 0)


def test_a_given_load_costs_memory(found: Plan) -> None:
    loaded = searched(QWEN, {"tp": 1, "schedule": "1f1b", "ep": 8}, 16, load=2.0)
    by_choice = {c: i for i, c in enumerate(found.priced.choices)}
    for i in loaded.rows:
        even = float(found.priced.memory[by_choice[loaded.priced.choices[i]]])
        assert math.isnan(even) or loaded.priced.memory[i] > even
    assert "all rows are priced with a load of 2" in loaded.table()
    first = loaded.rows[0]
    choice = loaded.priced.choices[first]
    more = memory_of(QWEN, choice, 2.0) - memory_of(QWEN, choice)
    assert loaded.of_load(first) == more > 0 == found.of_load(found.rows[0])
