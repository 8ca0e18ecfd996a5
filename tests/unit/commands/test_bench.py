"""Tests the results that `bench comm` computes: the plan of calls, the fit, the verdicts, the
table."""

from __future__ import annotations

import dataclasses
import random
import socket

import numpy as np
import pytest
from rich.console import Console

from parallel3d.blueprint.cluster import Cluster, Link, LinkClass
from parallel3d.blueprint.layout import Layout
from parallel3d.blueprint.rank_mapping import RankMapping, Tiling
from parallel3d.comm.timed_operations import TimedOperation, dimensions, pattern, reduced
from parallel3d.commands.bench.checks import check_communication
from parallel3d.commands.bench.comm import (
    FITTED,
    MeasuredOperation,
    duration,
    fit,
    size,
    table,
)
from parallel3d.commands.bench.keys import BenchConfig
from parallel3d.commands.bench.measure import CallCounts, slowest_rank
from parallel3d.commands.options import CommandConfig
from parallel3d.errors import UserError
from parallel3d.estimate.network import ring_time
from parallel3d.faults.probe import (
    Finding,
    ProbedGroup,
    findings_in,
    judge,
    off_the_price,
    pairs_to_probe,
    turns,
)
from parallel3d.models.keys import ModelConfig
from parallel3d.run.cluster_view import ClusterView
from parallel3d.run_config import check_config

# --- the plan --------------------------------------------------------------------------------


def follow(plan: CallCounts, real: list[float]) -> tuple[list[int], float]:
    """Returns the timed calls of each row and the seconds in all, if a call of row i really takes
    real[i]."""
    calls, total = [], 0.0
    for seconds in real:
        warmup, timed = plan.next()
        plan.done((warmup + timed) * seconds)
        total += (warmup + timed) * seconds
        calls.append(timed)
    return calls, total


def test_with_time_enough_every_row_has_all_calls() -> None:
    plan = CallCounts([0.01] * 40, 100.0, 2, 5)
    assert follow(plan, [0.01] * 40)[0] == [5] * 40
    assert plan.cut == 0


@pytest.mark.parametrize("times", [0.5, 1.0, 3.0])
def test_calls_are_cut_to_hold_the_budget_even_if_rows_take_longer_than_foreseen(
    times: float,
) -> None:
    estimates = [random.Random(0).choice([0.001, 0.02, 0.1]) for _ in range(200)]
    real = [times * e for e in estimates]
    budget = 3.5 * sum(real)  # half of the time of 2 + 5 calls of every row
    plan = CallCounts(estimates, budget, 2, 5)
    calls, total = follow(plan, real)
    assert min(calls) >= 1
    assert 0.6 * budget < total < 1.05 * budget
    assert plan.cut > 0


def test_no_time_at_all_still_leaves_one_call() -> None:
    assert follow(CallCounts([1.0] * 20, 0.0, 2, 5), [1.0] * 20)[0] == [1] * 20


def test_a_rows_time_is_the_median_over_calls_of_the_slowest_rank() -> None:
    assert slowest_rank([[1.0, 5.0, 2.0], [3.0, 4.0, 9.0]]) == 5.0  # the median of 3, 5 and 9


# --- what is compared ------------------------------------------------------------------------


def test_rows_cover_the_groups_of_training() -> None:
    dims = [dimensions(Layout(**sizes))[0] for sizes in (
        {"tp": 2, "dp": 2}, {"tp": 2, "cp": 2, "dp": 2}, {"cp": 2, "pp": 2}, {"cp": 4},
    )]  # fmt: skip
    assert dims == [
        ["tp", "dp", "world"], ["tp", "cp", "dp_cp", "world"], ["cp", "pp", "world"], ["cp"],
    ]  # fmt: skip


def test_patterns_distinguish_members_and_positions() -> None:
    assert pattern(2, 3).tolist() == [3, 6, 9]
    assert pattern(0, 3, start=250).tolist() == [251, 1, 2]
    for reduction, expected in (
        ("sum", [6, 12]),
        ("avg", [2, 4]),
        ("max", [3, 6]),
        ("min", [1, 2]),
    ):
        assert reduced(reduction, 3, 2).tolist() == expected


def test_every_kind_of_group_is_measured_or_has_a_reason() -> None:
    every = {"tp", "dp", "pp", "world"}
    for layout in (Layout(tp=2, dp=2), Layout(cp=2), Layout(cp=2, dp=2), Layout(tp=2, cp=2, pp=2)):
        measured, left_out = dimensions(layout)
        assert not left_out.keys() & set(measured)
        kinds = every | ({"cp", "dp_cp"} if layout.cp > 1 else set())
        assert left_out.keys() | set(measured) == kinds
    assert dimensions(Layout(cp=2, dp=2))[0] == ["cp", "dp_cp"]


# --- the fit ---------------------------------------------------------------------------------


def samples(link: Link) -> list[MeasuredOperation]:
    return [
        MeasuredOperation(op, n, nbytes, ring_time(op, n, nbytes, link))
        for op in FITTED
        for n in (2, 8)
        for nbytes in (4096, 262144, 4194304)
    ]


@pytest.mark.parametrize("link", [Link(0.8, 50.0), Link(400.0, 2.0), Link(10.0, 0.0)])
def test_the_fit_finds_the_link_that_made_the_times(link: Link) -> None:
    found = fit(samples(link))
    assert found is not None
    assert found.link.gb_per_s == pytest.approx(link.gb_per_s, rel=1e-4)
    assert found.link.latency_us == pytest.approx(link.latency_us, rel=1e-4, abs=1e-4)
    assert found.typical_factor == pytest.approx(1, rel=1e-4)


def test_a_noisy_fit_prices_neither_too_high_nor_too_low() -> None:
    noise = random.Random(2)
    link = Link(0.8, 50.0)
    true = samples(link) * 20
    noisy = [dataclasses.replace(s, seconds=s.seconds * 4 ** noise.uniform(-1, 1)) for s in true]
    found = fit(noisy)
    assert found is not None
    assert found.link.gb_per_s == pytest.approx(link.gb_per_s, rel=0.25)
    assert found.link.latency_us == pytest.approx(link.latency_us, rel=0.25)
    assert 1.8 < found.typical_factor < 2.2  # half of 4 ** uniform(-1, 1) is within 4 ** 0.5


def test_a_fit_needs_two_sizes_and_gives_possible_values() -> None:
    assert fit([MeasuredOperation("all_reduce", 2, 4096, 1e-3)] * 5) is None
    # Large messages are cheaper than small ones, which no α ≥ 0 and B ≥ 0 explain.
    odd = fit(
        [
            MeasuredOperation("send_recv", 2, 4096, 2e-3),
            MeasuredOperation("send_recv", 2, 1 << 20, 1e-3),
        ]
    )
    assert odd is not None
    assert odd.link.gb_per_s > 0
    assert odd.link.latency_us >= 0


def test_fitted_speeds_are_spelled_as_the_clusters_keys() -> None:
    found = fit(samples(Link(5.0, 8.0)))
    assert found is not None
    assert found.overrides(LinkClass.RAIL, 10.0) == {
        "cluster.rail_gb_per_s": 5.0,
        "cluster.rail_latency_us": 8.0,
    }
    assert found.overrides(LinkClass.SPINE, 10.0) == {
        "cluster.oversubscription": 2.0,
        "cluster.spine_latency_us": 8.0,
    }


# --- verdicts --------------------------------------------------------------------------------

PAIRS = pairs_to_probe(Layout(tp=2, pp=2, dp=2))


def judged(seconds: dict[tuple[int, int], float], pairs: list[tuple[int, int]] = PAIRS) -> list:
    """Returns the ranks of the findings if pairs take 1 ms, except those in `seconds`."""
    times = np.array([[seconds.get(pair, 1e-3) for pair in pairs]] * 2)
    classes = np.ones(len(pairs), dtype=np.int64)
    found = findings_in(times, pairs, classes, (4096, 1 << 20), 1.5, 1e-4)
    return [finding.ranks for finding in found]


def test_a_rank_is_slow_when_all_its_pairs_are() -> None:
    of_5 = [pair for pair in PAIRS if 5 in pair]
    assert judged(dict.fromkeys(of_5, 4e-3)) == [(5,)]
    assert (
        judged(dict.fromkeys(of_5[1:], 4e-3)) == of_5[1:]
    )  # one pair is fast, so the wires are slow
    of_both = [pair for pair in PAIRS if {1, 6} & set(pair)]
    assert judged(dict.fromkeys(of_both, 4e-3)) == [(1,), (6,)]
    assert judged(dict.fromkeys([*of_5, (0, 1)], 4e-3)) == [(5,), (0, 1)]


def test_a_little_slower_is_not_slow() -> None:
    of_5 = [pair for pair in PAIRS if 5 in pair]
    assert judged(dict.fromkeys(of_5, 1.49e-3)) == []
    assert judged(dict.fromkeys(PAIRS, 4e-3)) == []  # all pairs are equally fast


def test_among_three_ranks_the_slow_one_is_found_and_among_two_nothing() -> None:
    assert judged({(0, 2): 5e-3, (1, 2): 5e-3}, [(0, 1), (0, 2), (1, 2)]) == [(2,)]
    assert judged({(0, 1): 5e-3}, [(0, 1)]) == []


def test_slow_wires_are_compared_with_wires_of_their_kind() -> None:
    pairs = [(0, 1), (2, 3), (4, 5), (6, 7), (0, 2), (2, 4), (4, 6), (0, 6)]
    classes = np.array([1, 1, 1, 1, 2, 2, 2, 2])
    times = np.array([[1e-3] * 4 + [5e-3] * 4])
    assert findings_in(times, pairs, classes, (4096,), 1.5, 1e-4) == []
    times[0, 5] = 9e-3
    (found,) = findings_in(times, pairs, classes, (4096,), 1.5, 1e-4)
    assert found.ranks == (2, 4)


def test_pairs_cover_every_rank_and_take_turns() -> None:
    layout = Layout(tp=8, pp=2, dp=4)
    pairs = pairs_to_probe(layout)
    groups = [set(g) for dim in ("tp", "dp", "pp") for g in layout.groups(dim)]
    ring = {frozenset((r, (r + 1) % 64)) for r in range(64)}
    assert all(any(set(pair) <= g for g in groups) or frozenset(pair) in ring for pair in pairs)
    assert sum(set(pair) <= groups[0] for pair in pairs) == 28  # every pair of eight ranks
    by_rank = turns(pairs, lambda rank: rank)
    assert sorted(pair for turn in by_rank for pair in turn) == pairs
    for turn in by_rank:
        ranks = [rank for pair in turn for rank in pair]
        assert len(ranks) == len(set(ranks))
    assert all(len(turn) == 1 for turn in turns(pairs, lambda rank: "one host"))
    large = pairs_to_probe(Layout(dp=64))
    assert len(large) == 64  # only neighbours in the ring of a larger group


def test_a_finding_names_rank_coordinates_host_and_rail() -> None:
    link = Link(1.0, 1.0)
    cluster = Cluster("two", 2, 2, 2, 2, link, link, link)
    layout = Layout(tp=2, dp=2)
    placement = RankMapping.tiled(cluster, layout, Tiling.parse("tp-cp-dp-pp", layout))
    where = ClusterView(placement, ("alpha", "alpha", "beta", "beta"))
    sentence = Finding((3,), 4096, 4e-3, 1e-3).sentence(where)
    assert "rank 3 (pp 0, dp 1, tp 1) on beta, node1 GPU 1, rail 1" in sentence
    assert "4.0 times the median (4 ms instead of 1 ms" in sentence
    assert "by rail" in Finding((1, 3), 4096, 4e-3, 1e-3).sentence(where)
    assert socket.gethostname() not in sentence


def group(dim: str, ranks: tuple[int, ...], seconds: float, priced: float | None) -> ProbedGroup:
    return ProbedGroup(dim, ranks, TimedOperation("all_reduce", "sum"), 1 << 20, seconds, priced)


def test_preflight_compares_each_group_with_its_price() -> None:
    # The third one takes twice as long, as its wires predict.
    even = [group("dp", (i, i + 4), s, s / 3) for i, s in enumerate((1e-3, 1e-3, 2e-3, 1e-3))]
    assert judge(even, 1.5, 1e-4) == []
    slow = [*even[:3], dataclasses.replace(even[3], seconds=2e-3)]
    assert [slow.ranks for slow, _ in judge(slow, 1.5, 1e-4)] == [(3, 7)]
    # two groups are too few to tell the usual from the unusual
    assert judge(slow[2:], 1.5, 1e-4) == []
    # A path without a wire has no price.
    assert judge([group("dp", (0, 1), 1.0, None)] * 3, 1.5, 1e-4) == []


def test_on_gpus_a_dimension_far_off_its_price_is_reported() -> None:
    groups = [group("dp", (i, i + 4), 3e-3, 1e-3) for i in range(4)]
    (line,) = off_the_price(groups, 1.5)
    assert "dp groups" in line
    assert "3.0 times its price" in line
    assert off_the_price([dataclasses.replace(g, seconds=1.4e-3) for g in groups], 1.5) == []


# --- the table -------------------------------------------------------------------------------


def row(mode: str, **more: object) -> dict:
    made = {"dim": "tp", "op": "reduce_scatter", "reduction": "sum", "training_path": True}
    made |= {"size": 4 << 20, "mode": mode, "bytes": 4 << 20, "path": "shared memory"}
    made |= {"groups_measured": 4, "groups_of_the_dimension": 4, "ranks_of_a_group": 2}
    made |= {"seconds": 0.0123, "priced_s": 0.00534, "times_the_price": 2.3}
    return made | {"algorithm_gb_per_s": 0.00068, "bus_gb_per_s": 0.00034} | more


@pytest.mark.parametrize("width", [80, 100, 120, 200])
def test_the_table_is_never_cut_off(width: int) -> None:
    console = Console(width=width)
    with console.capture() as captured:
        console.print(table("tp", [row("alone"), row("together", seconds=0.2)], width))
    text = captured.get()
    assert "…" not in text
    for cell in ("reduce-scatter sum", "4 MiB", "12.3 ms", "200 ms", "0.00034", "2.3"):
        assert cell in text
    assert ("5.34 ms" in text) == (width >= 120)
    assert ("0.00068" in text) == (width >= 120)


def test_durations_and_sizes_are_short() -> None:
    assert [duration(s) for s in (1.5, 0.0123, 52.6e-6, 0.99999e-3)] == [
        *("1.5 s", "12.3 ms", "52.6 µs", "1 ms")
    ]
    assert [size(n) for n in (0, 4096, 6000, 4 << 20)] == ["", "4 KiB", "6,000", "4 MiB"]


# --- the configuration -----------------------------------------------------------------------


def test_bench_comm_needs_no_model_batch_or_data() -> None:
    odd = CommandConfig(tp=3, dp=2, global_batch_size=7, model=ModelConfig(num_layers=1), pp=2)
    with pytest.raises(UserError):
        check_config(odd, 12)
    assert check_communication(dataclasses.replace(odd, dp=None), 12).dp == 2
    with pytest.raises(UserError, match="world size of 8"):
        check_communication(odd, 8)
    with pytest.raises(UserError, match="must have at least one size"):
        bench = BenchConfig(sizes=[])
        check_communication(dataclasses.replace(odd, bench=bench), 12)
