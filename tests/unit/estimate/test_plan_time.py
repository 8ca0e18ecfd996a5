"""Tests the planner's seconds: its closed form agrees with the clock, and each part changes as it
must."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from benchmarks.planner.published_fit import time_guesses
from benchmarks.planner.published_rows import (
    recomputed,
    split_by_cost,
    split_evenly,
    stages_by_cost,
)
from benchmarks.planner.published_run import is_of_others, load_all
from parallel3d.context_parallel.split import SequenceSplit
from parallel3d.estimate import fitted_cost
from parallel3d.estimate.attention_traffic import halo_sends, halo_tokens
from parallel3d.estimate.fitted_cost import (
    attention,
    gemm,
    layer,
    load,
    move,
    pipeline_time,
    seconds,
    step,
)
from parallel3d.schedules.schedule import make
from parallel3d.schedules.walk import Costs, time_orders
from tests.unit.estimate.plan_work import constants, table, work


@pytest.mark.parametrize("stages", [1, 2, 3, 5, 8])
@pytest.mark.parametrize("microbatches", [1, 4, 8, 24])
def test_closed_form_equals_the_clock(stages: int, microbatches: int) -> None:
    schedule = make("1f1b", stages, microbatches)
    costs = Costs.even(schedule.assignment, 1.0, 0.8, 1.2)
    clocked = time_orders(schedule.orders, schedule.assignment, costs).makespan
    form = pipeline_time(3.0, 3.0 * stages, microbatches, 1)
    assert form == pytest.approx(clocked)


def test_closed_form_of_interleaved_stages_equals_the_clock() -> None:
    for chunks in (2, 4):
        schedule = make("interleaved", 4, 16, chunks)
        costs = Costs.even(schedule.assignment, 1.0, 0.8, 1.2)
        clocked = time_orders(schedule.orders, schedule.assignment, costs).makespan
        assert pipeline_time(3.0, 12.0, 16, chunks) == pytest.approx(clocked, rel=0.01)


def test_closed_form_bounds_the_clock_where_the_last_stage_is_slow() -> None:
    """The slowest stage always works, the others fill and drain: the result never exceeds the clock
    by more than a micro-batch of another stage, and is never below it."""
    schedule = make("1f1b", 4, 12)
    costs = Costs((1.0, 1.0, 1.0, 2.0), (1.0, 1.0, 1.0, 2.0), (1.0, 1.0, 1.0, 2.0))
    clocked = time_orders(schedule.orders, schedule.assignment, costs).makespan
    assert pipeline_time(6.0, 15.0, 12, 1) == pytest.approx(clocked, rel=0.02)


def test_splits() -> None:
    assert split_evenly(10, 4) == [3, 3, 2, 2]
    assert split_evenly(70, 12, ends=True) == [5, *[6] * 10, 5]
    # A head of 4 layers with 16 layers: four stages of cost 5.
    assert split_by_cost(16, 4.0, 4) == [5, 5, 5, 1]
    assert stages_by_cost(16, 4.0, 8) == 8 and stages_by_cost(16, 4.0, 16) < 16


def test_a_product_is_faster_than_its_peak_never_and_near_it_when_large() -> None:
    w, c = work(), constants()
    large = gemm(w, c, 16384, 16384, 16384)
    small = gemm(w, c, 128, 128, 64)
    least = 2 * 16384.0**3 / w.peak
    assert least < large < 2 * least
    assert small > 20 * 2 * 128 * 128 * 64 / w.peak


def test_a_last_wave_with_idle_units_costs() -> None:
    w, c = work(), constants(**{"gemm.wave": 1.0})
    rows = 256 * 11  # with twelve columns of tiles, there is one tile for each of 132 units
    full, over = (gemm(w, c, m, 128 * 12, 1024) for m in (rows, rows + 256))
    assert over > 1.25 * full  # splitting k into parts cannot save all of it


def test_heads_of_odd_width_are_slow_where_scores_are_written() -> None:
    plain = replace(work(flash=0, heads=32), head_size=np.array(128.0))
    odd = replace(plain, head_size=np.array(130.0))
    a, b = (layer(w, constants())[0]["attention"] for w in (odd, plain))
    assert a > b


def test_recomputation_costs_the_forward_of_its_operations() -> None:
    """Other frameworks repeat a layer up to its end, and parallel3d up to its last product."""
    c = constants()
    none, full = (float(layer(w, c)[0]["recomputed"]) for w in (work(), work(**recomputed("full"))))
    products = {of.name: float(seconds(of, work(), c)[0]) for of in work().layer_products}
    attends, moved = float(attention(work(), c)[0]), work().tokens * work().moved(c).forward
    forward = sum(products.values()) + attends + float(move(work(), c, moved))
    assert none == 0 and full == pytest.approx(forward)
    ours = float(layer(work(recompute_layer=1), c)[0]["recomputed"])
    assert products["mlp.down"] < full - ours < 1.3 * products["mlp.down"]
    parts = {"recompute_norm": 1}, {"recompute_activation": 1}, {"recompute_mlp": 1}
    each = [float(layer(work(**part), c)[0]["recomputed"]) for part in parts]
    assert 0 < each[0] < each[1] < each[2] < full


def test_a_ring_that_leaves_the_node_runs_at_its_networks_rate() -> None:
    w, c = work(), constants()
    inside = fitted_cost.ring_rate(w, c, "all_gather", 8.0, 1.0)
    # One member in each node, eight such rings.
    alone = fitted_cost.ring_rate(w, c, "all_gather", 4.0, 8.0)
    assert inside == pytest.approx(w.link_rate * c["link.rate"])
    assert alone == pytest.approx(w.fabric_rate * c["network.ndr.rate"])
    whole = fitted_cost.ring_rate(w, c, "all_gather", 16.0, 1.0)
    assert whole == pytest.approx(float(min(inside, 8 * alone)))


def test_more_pipeline_is_more_bubble_and_less_memory_traffic() -> None:
    c = constants()
    flat, deep = step(work(pp=1), c), step(work(pp=4), c)
    assert flat.bubble == 0 < deep.bubble
    assert deep.messages > flat.messages == 0
    assert deep.optimizer < flat.optimizer


def test_each_layer_of_gradients_pays_the_latency_of_all_its_replicas() -> None:
    c = constants(**{"engine.megatron.dp_messages": 10.0, "network.ndr.latency_us": 50.0})
    few, many = (float(step(work(dp=dp, zero=1), c).gradients) for dp in (64, 512))
    assert many - few > 32 * 2 * 10 * 448 * 40e-6


def test_zero_3_without_bandwidth_waits_for_its_parameters() -> None:
    c = constants()
    slow = replace(work(zero=3, dp=64), fabric_rate=np.array(1e8))
    assert step(slow, c).total > 5 * step(work(zero=3, dp=64), c).total


def test_one_call_prices_many_layouts_as_single_calls_do() -> None:
    one = [work(tp=tp, pp=pp) for tp in (1, 2, 8) for pp in (1, 4)]
    c = load_all()
    assert step(table(one), c).total == pytest.approx([float(step(w, c).total) for w in one])


def test_constants_in_the_repository_have_the_names_of_the_code() -> None:
    """Those of other software are not in the package."""
    c = load_all()
    assert {*time_guesses()} <= {*c.values}
    assert all(value > 0 for value in c.values.values())
    assert not any(map(is_of_others, load().values)) and "memory.rate" in load().values


def test_attention_is_the_mean_of_sliding_and_full_layers() -> None:
    fitted, window = constants(), 512.0
    full, sliding, mixed = (
        fitted_cost.attention(work(window=window, sliding=share), fitted)[0]
        for share in (0.0, 1.0, 0.75)
    )
    assert full == fitted_cost.attention(work(), fitted)[0]
    assert sliding == fitted_cost.attention(work(window=window), fitted)[0]
    assert sliding < full / 3  # 512 keys of 2048 on average, and the cost of each call
    assert mixed == pytest.approx(0.25 * full + 0.75 * sliding)


@pytest.mark.parametrize(("cp", "window"), [(4, 512), (8, 512), (8, 100_000)])
def test_layers_with_a_window_send_the_keys_that_it_reaches(cp: int, window: int) -> None:
    """A run's halo (`attention_traffic.halo_tokens`) is sent in the forward, and its gradients
    in the backward."""
    seq, c = 1 << 17, constants(**{"link.latency_us": 1e-9})
    w = work(cp=cp, seq=seq, window=window, kv_heads=8, gpus_per_node=8)
    sent, received = halo_tokens(SequenceSplit(seq, cp, window=window), 1, window)
    calls = halo_sends(w.head_widths, max(sent), max(received), 2)
    nbytes = sum(call.count * call.nbytes for call in calls)
    found = float(fitted_cost.context_parallel(w, c, 0.0))
    wanted = nbytes / float(w.link_rate * c["link.rate"])
    assert found == pytest.approx(wanted, rel=0.02 if window < seq / cp / 2 else 0.3)
    every = float(fitted_cost.context_parallel(work(cp=cp, seq=seq), c, 0.0))
    assert (found < every / 4) == (window == 512)


def test_layers_with_a_window_send_all_heads_as_others_do() -> None:
    of = {"cp": 4, "cp_style": fitted_cost.STYLES.index("heads")}
    some, every = (
        fitted_cost.context_parallel(work(window=window, **of), constants(), 0.0)
        for window in (512.0, float("inf"))
    )
    assert some == every
