"""Tests prices by measured rates, and the file in which `calibrate` keeps them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from parallel3d.blueprint.collectives import bus_factor
from parallel3d.errors import UserError
from parallel3d.estimate import fitted_cost
from parallel3d.estimate.fitted_cost import StepWork, step
from parallel3d.estimate.measured_rates import (
    MEASURED,
    GroupTime,
    MeasuredRates,
    check_device,
    check_nodes,
    check_type,
    read,
)
from parallel3d.estimate.search import LayoutChoice, constants_of, sizes_of, works
from parallel3d.models.keys import ModelConfig
from parallel3d.run_config import Config
from tests.unit.estimate.measured_machine import GPUS, MADE, machine

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


def test_a_file_gives_the_rates_again(tmp_path: Path) -> None:
    path = tmp_path / "here.yaml"
    path.write_text(GPU.text())
    assert read(str(path)) == GPU


def replaced(old: str, new: str) -> Callable[[str], str]:
    return lambda text: text.replace(old, new, 1)


DAMAGED = {
    "another format": (replaced("parallel3d calibration", "torch"), "must be a file written by"),
    "a later version": (replaced("version: 5", "version: 7"), "has version 7"),
    "no yaml": (lambda text: "{" + text, "calibrate, but is not: while parsing"),
    "an object of Python": (
        lambda text: "a: !!python/object:os.system {}\n" + text,
        "must be a file written by",
    ),
    "an alias": (lambda text: "a: &x [1]\nb: *x\n" + text, "aliases are not read"),
    "an operation less": (replaced("all_gather:", "gather:"), "is damaged"),
    "a rate less": (replaced("launch_us:", "lunch_us:"), r"is damaged \('launch_us'\)"),
    "no number": (replaced("memory_gb: 8", "memory_gb: many"), "memory_gb is not a number"),
    "an endless time": (replaced("rank_gb: 0.2", "rank_gb: .inf"), "positive and finite"),
    "times of blocks": (
        replaced("version: 5", "version: 4"),
        "has version 4, .* reads version 5: calibrate again",
    ),
    "no count": (replaced("count: 2", "count: 0"), "made.count must be positive"),
    "a list": (lambda text: "- 1", "must be a file written by"),
    "half of it": (lambda text: text[: len(text) // 2], "is damaged|but is not: "),
    "too much": (lambda text: text + "#" * (5 << 20), "bytes, more than"),
}


@pytest.mark.parametrize("how", DAMAGED)
def test_a_damaged_file_is_refused_in_one_sentence(tmp_path: Path, how: str) -> None:
    damage, said = DAMAGED[how]
    path = tmp_path / "here.yaml"
    path.write_text(damage(machine().text()))
    with pytest.raises(UserError, match=said) as refused:
        read(str(path))
    assert "\n" not in str(refused.value) and "cluster=" in str(refused.value)


def test_a_file_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"cannot be read: No such file"):
        read(str(tmp_path / "none.yaml"))


def test_another_device_and_another_type_are_refused() -> None:
    here = machine()
    check_device(here, "f.yaml", "cpu", "test", 2)
    check_type(here, "f.yaml", "fp32")
    for kind, name, count in (("cuda", None, 1), ("cpu", "other", 2), ("cpu", "test", 4)):
        with pytest.raises(UserError, match="must have been measured on this device"):
            check_device(here, "f.yaml", kind, name, count)
    with pytest.raises(UserError, match="must be fp32, in which"):
        check_type(here, "f.yaml", "bf16")


def test_nodes_without_a_measured_network_are_refused() -> None:
    check_nodes(GPU, "f.yaml", 2)
    assert GPU.has_network and not machine(GPUS, most=8).has_network
    assert not machine(MADE, most=8).has_network, "eight ranks on two cores have no network"
    with pytest.raises(UserError, match=r"cluster.nodes=2 must be 1 .*on two nodes or more"):
        check_nodes(machine(GPUS), "f.yaml", 2)


def test_every_operation_is_measured() -> None:
    assert {*machine().groups} == {*MEASURED}
