"""Tests prices by measured rates."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from parallel3d.blueprint.collectives import bus_factor
from parallel3d.calibrate.record import GroupTime, MeasuredRates
from parallel3d.estimate import fitted_cost
from parallel3d.estimate.fitted_cost import StepWork, step
from parallel3d.estimate.search import LayoutChoice, constants_of, sizes_of, works
from parallel3d.models.keys import ModelConfig
from parallel3d.run_config import Config
from tests.unit.estimate.measured_machine import GPUS, machine

MODEL = ModelConfig(
    num_layers=8, hidden_size=1024, num_attention_heads=8, seq_length=1024, norm="rmsnorm",
    bias=False, activation="swiglu",
)  # fmt: skip
SPARSE = dataclasses.replace(MODEL, num_experts=8, experts_per_token=2, expert_ffn_size=512)
GPU = machine(GPUS, most=16, gb_per_s=300.0)


def config(path: Path, of: MeasuredRates, model: ModelConfig = MODEL, **keys: Any) -> Config:
    (path / "here.yaml").write_text(of.text())
    made = Config(global_batch_size=64, model=model, **keys)
    made.cluster.file, made.precision.name = str(path / "here.yaml"), of.made.type
    return made


def work(made: Config, *choices: LayoutChoice) -> StepWork:
    first = choices[0]
    ranks = first.tp * first.cp * first.pp * first.dp
    return works([*choices], sizes_of(made, ranks), made.global_batch_size)


def choice(**keys: Any) -> LayoutChoice:
    usual = dict(tp=1, pp=1, vpp=1, dp=1, micro_batch_size=1, schedule="1f1b", recompute="none")
    return LayoutChoice(**(usual | {"zero": 0} | keys))  # type: ignore[arg-type]


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_a_collective_inside_a_node_takes_its_measured_time(tmp_path: Path, ranks: int) -> None:
    made = config(tmp_path, GPU)
    w, c, nbytes = work(made, choice(tp=8)), constants_of(made), 1e8
    for op in ("all_gather", "reduce_scatter"):
        wanted = GPU.groups[op][ranks].seconds(op, ranks, nbytes)
        assert fitted_cost.gather(w, c, nbytes, float(ranks), 1, op) == pytest.approx(wanted)
    wanted = GPU.groups["all_reduce"][ranks].seconds("all_reduce", ranks, nbytes)
    assert fitted_cost.reduce(w, c, nbytes, float(ranks), 1) == pytest.approx(wanted)


def test_between_measured_sizes_a_group_is_between_their_rates(tmp_path: Path) -> None:
    of = dict(GPU.groups)
    of["all_gather"] = {2: GroupTime(10.0, 400.0), 8: GroupTime(30.0, 200.0)}  # not 4
    made = config(tmp_path, dataclasses.replace(GPU, groups=of))
    rate, wait = constants_of(made).inside("all_gather", np.array([2.0, 4.0, 8.0]), np.array(1.0))
    assert rate == pytest.approx([400e9, 300e9, 200e9])
    assert wait == pytest.approx([10e-6, 20e-6, 30e-6])


def test_between_nodes_a_group_shares_the_measured_network(tmp_path: Path) -> None:
    """A group with one rank in each node has an eighth of what the whole node has."""
    made = config(tmp_path, GPU)
    w, c = work(made, choice(dp=16)), constants_of(made)
    whole, one = (
        fitted_cost.ring_rate(w, c, "all_gather", ranks, stride)
        for ranks, stride in ((16.0, 1.0), (2.0, 8.0))
    )
    assert whole == pytest.approx(150e9) and one == pytest.approx(150e9 / 8)
    nbytes = 1e9
    wanted = bus_factor("all_gather", 16) * nbytes / 150e9
    assert fitted_cost.gather(w, c, nbytes, 16.0, 1.0) == pytest.approx(wanted, rel=0.02)


def test_a_large_product_and_attention_reach_their_measured_rates(tmp_path: Path) -> None:
    made = config(tmp_path, machine())
    w, c, n = work(made, choice(dp=2)), constants_of(made), 4096.0
    assert fitted_cost.gemm(w, c, n, n, n) == pytest.approx(2 * n**3 / 0.05e12, rel=0.02)
    flops = 2 * 1024**2 * MODEL.hidden_size  # the causal half
    assert fitted_cost.attention(w, c)[0] == pytest.approx(flops / 0.02e12, rel=0.02)


LAYOUTS = {
    "product_tflops": choice(dp=8),
    "attention_tflops": choice(dp=8),
    "memory_gb_per_s": choice(dp=8),
    "all_reduce": choice(dp=8),
    "reduce_scatter": choice(dp=8, zero=1),
    "all_gather": choice(dp=2, tp=4),
    "send_recv": choice(dp=2, pp=4),
    "all_to_all": choice(dp=8, ep=8),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_faster_rate_makes_the_layout_that_needs_it_faster(tmp_path: Path, name: str) -> None:
    seconds = []
    for factor in (1.0, 2.0):
        of = GPU
        if name in of.rates:
            of = dataclasses.replace(of, rates={**of.rates, name: factor * of.rates[name]})
        else:
            times = {
                n: GroupTime(t.latency_us / factor, t.gb_per_s * factor)
                for n, t in of.groups[name].items()
            }
            of = dataclasses.replace(of, groups={**of.groups, name: times})
        made = config(tmp_path, of, SPARSE if name == "all_to_all" else MODEL)
        seconds.append(float(step(work(made, LAYOUTS[name]), constants_of(made)).total[0]))
    assert seconds[1] < 0.9999 * seconds[0]


def test_slower_launches_make_a_small_model_slower(tmp_path: Path) -> None:
    small = dataclasses.replace(MODEL, hidden_size=128, seq_length=128)
    seconds = []
    for launch in (1.0, 50.0):
        made = config(tmp_path, machine(GPUS, launch_us=launch), small)
        seconds.append(float(step(work(made, choice(dp=8)), constants_of(made)).total[0]))
    assert seconds[1] > 1.5 * seconds[0]


def test_ranks_on_shared_cores_have_a_share_of_them(tmp_path: Path) -> None:
    """Four ranks on two cores compute as much in all as two, and nothing overlaps."""
    made = config(tmp_path, machine())
    two, four = (sizes_of(made, ranks) for ranks in (2, 4))
    assert 2 * four["peak"] == two["peak"] == 0.05e12
    assert 2 * four["memory_bytes"] == two["memory_bytes"] == 4e9
    assert two["overlap_tp"] == two["overlap_dp"] == 0
    gpus = sizes_of(config(tmp_path, GPU), 16)
    assert gpus["peak"] == 700e12 and gpus["gpus_per_node"] == 8 and gpus["overlap_tp"] == 1


def test_parameters_that_zero_3_gathers_are_not_hidden_on_shared_cores(tmp_path: Path) -> None:
    """A layout on a laptop must not look faster because each rank keeps less."""
    made = config(tmp_path, machine())
    none, three = (
        float(step(work(made, choice(dp=2, zero=zero)), constants_of(made)).compute[0])
        for zero in (0, 3)
    )
    gathers = machine().groups["all_gather"][2]
    layers = 64 / 2 * 8  # of the micro-batches of a rank
    least = layers * 3 * gathers.seconds("all_gather", 2, 4 * 8 * 1024**2)
    assert three - none > least


def test_hidden_states_of_fp32_are_twice_as_many_bytes(tmp_path: Path) -> None:
    seconds = []
    for type in ("bf16", "fp32"):
        made = config(tmp_path, machine(dataclasses.replace(GPUS, type=type)))
        w, c = work(made, choice(pp=4, dp=2)), constants_of(made)
        seconds.append(float(fitted_cost.hop(w, c)[0]) - 12e-6)  # without the latency of 2 ranks
    assert seconds[1] == pytest.approx(2 * seconds[0])
