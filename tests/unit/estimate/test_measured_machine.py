"""Tests the planner on a measured machine: tables, the clock of shared cores, steps, and its
file."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from math import prod
from pathlib import Path

import numpy as np
import pytest

from parallel3d.blueprint.layout import Layout
from parallel3d.blueprint.ops import layer_flops
from parallel3d.errors import UserError
from parallel3d.estimate.profiled_cost import (
    Table,
    check_device,
    check_type,
    measured_sizes,
    passes,
    price_measured,
    read,
    scaled,
    shared_clock,
    speed_of,
    step_time,
)
from parallel3d.estimate.search import layouts
from parallel3d.estimate.traffic import transfers
from parallel3d.models.keys import ModelConfig
from parallel3d.run_config import Config, check_config
from parallel3d.schedules.schedule import NAMED_SCHEDULES, make
from parallel3d.schedules.walk import Costs, ScheduleError, walk
from tests.unit.estimate.measured_machine import BLOCK_FLOPS, MADE, RATE, machine, seconds
from tests.unit.estimate.measured_machine import MODEL as MEASURED

MODEL = {"num_layers": 4, "hidden_size": 256, "num_attention_heads": 4, "seq_length": 256}


def config(ranks: int = 1, **keys: object) -> Config:
    given = {"global_batch_size": 8, "micro_batch_size": 1, "dp": 1} | keys
    model = ModelConfig(**(MODEL | given.pop("model", {})))  # type: ignore[operator]
    schedule = given.pop("schedule", "1f1b")
    made = Config(**given, model=model)  # type: ignore[arg-type]
    made.schedule.name = schedule  # type: ignore[assignment]
    return check_config(made, ranks, own_samples=True)


def test_a_table_of_powers_is_exact_between_and_beyond_its_points() -> None:
    def power(m: float, n: float) -> float:
        return 3e-9 * m**1.0 * n**1.5

    table = Table(((2, 16, 64), (8, 32)), tuple(power(m, n) for m in (2, 16, 64) for n in (8, 32)))
    for at in ((2, 8), (5, 20), (40, 31), (1000, 900), (1, 4)):
        assert table(*at) == pytest.approx(power(*at))
    assert table(0, 8) == 0


@pytest.mark.parametrize("bad", [((2, 1), (1e-3, 1e-3)), ((1, 2), (1e-3,)), ((1, 2), (1e-3, -1))])
def test_a_table_that_is_none_is_refused(bad: tuple[tuple[int, ...], tuple[float, ...]]) -> None:
    with pytest.raises(ValueError, match=r"axis|times"):
        Table((bad[0],), bad[1])


@pytest.mark.parametrize("name", NAMED_SCHEDULES)
def test_with_a_core_for_each_rank_the_clock_is_the_schedules_own(name: str) -> None:
    vpp = {"interleaved": 2, "interleaved_zb": 2, "zbv": 2, "v_half": 2}.get(name, 1)
    schedule = make(name, 3, 6, vpp)
    stages = schedule.assignment.stages
    costs = Costs(
        tuple(1.0 + 0.1 * s for s in range(stages)),
        tuple(1.2 + 0.05 * s for s in range(stages)),
        (0.8,) * stages,
    )
    apart = shared_clock(schedule.orders, schedule.assignment, costs, 1, lambda busy: 1.0)
    assert apart == pytest.approx(walk(schedule.orders, schedule.assignment, costs).seconds)


def test_on_one_core_a_pipeline_takes_the_sum_of_its_work() -> None:
    schedule = make("1f1b", 4, 8)
    costs = Costs.even(schedule.assignment, 1.0, 1.0, 1.0, hop=0.5)
    ends = [1.0, 2.0, 3.0, 4.0]
    alone = shared_clock(
        schedule.orders, schedule.assignment, costs, 2, lambda busy: 1 / busy, ends
    )
    # for two replicas; a message has two ends, and crosses 3 boundaries both ways
    assert alone == pytest.approx(2 * (4 * 8 * 3 + 8 * 3 * 2 * 0.5 + sum(ends)))


def test_two_ranks_on_two_cores_idle_as_alone_and_four_fill_each_others_gaps() -> None:
    schedule = make("1f1b", 4, 4)
    costs = Costs.even(schedule.assignment)
    cores = speed_of(machine(), 4)
    shared = shared_clock(schedule.orders, schedule.assignment, costs, 1, cores)
    apart = walk(schedule.orders, schedule.assignment, costs).seconds
    work = 4 * 4 * 3.0
    assert max(work / 2, apart) < shared < 2 * apart


def test_ranks_that_wait_for_each_other_are_no_time() -> None:
    schedule = make("gpipe", 2, 2)
    backwards_first = [list(reversed(order)) for order in schedule.orders]
    with pytest.raises(ScheduleError):
        shared_clock(
            backwards_first, schedule.assignment, Costs.even(schedule.assignment), 1, lambda n: 1.0
        )


def blocks_alone(name: str, at: tuple[float, ...]) -> float:
    """Returns a machine on which all other pieces take almost no time."""
    plain = name.startswith(("block", "head", "together", "threads"))
    return seconds(name, at) if plain else 1e-12


def test_a_step_of_blocks_and_head_takes_their_flops() -> None:
    made = config(model={"vocab_size": 8000, "num_layers": 6})
    head = 2 * 256 * made.model.padded_vocab_size
    flops = 3.0 * (6 * BLOCK_FLOPS + head) * 8 * 256
    parts = step_time(made, machine(blocks_alone, dataclasses.replace(MADE, count=1)))
    assert parts.core == pytest.approx(flops / RATE, rel=0.01)
    assert parts.total == pytest.approx(flops / RATE, rel=0.01)


@pytest.mark.parametrize(
    "changes",
    [
        {"hidden_size": 512, "num_attention_heads": 8},
        {"ffn_hidden_size": 700, "activation": "swiglu"},
        {"seq_length": 512},
        {"num_query_groups": 1},
    ],
)
def test_a_model_that_was_not_measured_is_scaled_by_flops_and_said_so(
    changes: dict[str, object],
) -> None:
    made, here = config(model=changes), machine(blocks_alone)
    flops = layer_flops(made.model)
    tokens = made.micro_batch_size * made.model.seq_length
    assert passes(here, made, "block")[0] == pytest.approx(flops * tokens / RATE)
    said = scaled(here, "here.yaml", made.model)
    assert f"{flops / BLOCK_FLOPS:.3g} times its FLOPs" in said and "\n" not in said
    assert scaled(here, "here.yaml", config(model={"num_layers": 6, "vocab_size": 512}).model) == ""


@pytest.mark.parametrize("op", ["all_reduce", "all_gather", "reduce_scatter", "send_recv"])
@pytest.mark.parametrize("keys", [{"tp": 2, "sp": True}, {"dp": 2, "zero": 1}, {"pp": 2, "dp": 2}])
def test_each_collective_and_message_is_priced(op: str, keys: dict[str, int]) -> None:
    """Compares with `traffic.transfers`, which tests/distributed/test_traffic.py compares with real
    runs."""

    def of(name: str, at: tuple[float, ...]) -> float:
        plain = name.startswith(("together", "threads"))
        return 1.0 if plain or name.removesuffix(".shared") == op else 1e-12

    ranks = prod(keys.get(dim, 1) for dim in ("tp", "pp", "dp"))
    made = config(ranks, **keys)
    calls = step_time(made, machine(of, **{"launch.action": 1e-12})).core
    layout = Layout(**{dim: keys.get(dim, 1) for dim in ("tp", "pp", "dp")})
    sent = [t for index in range(made.pp) for t in transfers(made, layout, index) if t.op == op]
    assert calls == pytest.approx(sum(t.count for t in sent) * ranks / made.pp, abs=1e-6)


def test_recomputation_costs_a_forward_more() -> None:
    ways = ("none", "[norm]", "[norm,activation]", "[norm,mlp]", "[norm,attention,mlp]", "full")
    seconds = [step_time(config(recompute=way), machine()).core for way in ways]
    assert seconds == sorted({*seconds})
    assert 1.25 < seconds[-1] / seconds[0] < 1.4


def test_layouts_on_shared_cores_are_distinguished() -> None:
    here = machine()
    dp2, tp2, pp2 = (
        step_time(config(2, **sizes), here).total
        for sizes in ({"dp": 2}, {"tp": 2}, {"pp": 2, "global_batch_size": 8})
    )
    one = step_time(config(), here).total
    assert dp2 < tp2 < 2 * one and dp2 < pp2 < one * 1.3
    four = step_time(config(4, dp=4), here).total
    assert four == pytest.approx(dp2, rel=0.1), "four ranks have no more cores than two"


def test_parts_add_up_to_the_step() -> None:
    parts = step_time(config(4, pp=2, dp=2, schedule="zb_h1"), machine())
    assert parts.total == pytest.approx(
        parts.compute + parts.bubble + parts.messages + parts.gradients + parts.optimizer
        + parts.fixed
    )  # fmt: skip
    assert min(parts.compute, parts.bubble + 1e-9, parts.gradients, parts.optimizer) > 0


@pytest.mark.nightly
def test_the_search_keeps_given_keys_and_stays_within_memory() -> None:
    here, made = machine(), config()
    sizes = measured_sizes(made, here, 4)
    choices = list(layouts(sizes, 4, 4, 8, {"tp": 2, "schedule": "zbv"}))
    assert choices and all(c.tp == 2 and (c.pp == 1 or c.schedule == "zbv") for c in choices)
    free = list(layouts(sizes, 4, 4, 8, {}, (0, 1)))
    priced = price_measured(free, sizes, made, here)
    names = {c.schedule for c in free}
    assert names >= {"1f1b", "zb_h1", "interleaved", "zbv"}
    assert priced.order and np.isfinite(priced.seconds[priced.order]).all()
    times = [priced.seconds[i] for i in priced.order]
    assert times[0] <= min(times) * 1.005
    small = machine(memory_gb=0.9, rank_gb=0.2)
    tight = price_measured(free, measured_sizes(made, small, 4), made, small)
    assert len(tight.order) < len(priced.order)


def test_a_file_gives_the_machine_again(tmp_path: Path) -> None:
    path = tmp_path / "here.yaml"
    path.write_text(machine().text())
    found = read(str(path))
    assert found.made == MADE and found.model == MEASURED
    for name, table in machine().tables.items():
        assert found[name].axes == table.axes
        assert found[name].seconds == pytest.approx(table.seconds, rel=1e-3)


def replaced(old: str, new: str) -> Callable[[str], str]:
    return lambda text: text.replace(old, new, 1)


DAMAGED = {
    "another format": (replaced("parallel3d calibration", "torch"), "must be a file written by"),
    "a later version": (replaced("version: 4", "version: 7"), "has version 7"),
    "no yaml": (lambda text: "{" + text, "calibrate, but is not: while parsing"),
    "an object of Python": (
        lambda text: "a: !!python/object:os.system {}\n" + text,
        "must be a file written by",
    ),
    "an alias": (lambda text: "a: &x [1]\nb: *x\n" + text, "aliases are not read"),
    "a table less": (replaced("block.input", "block.other"), "is damaged"),
    "no number": (replaced("memory_gb: 8", "memory_gb: many"), "memory_gb is not a number"),
    "an endless time": (replaced("rank_gb: 0.2", "rank_gb: .inf"), "positive and finite"),
    "an older version": (
        replaced("version: 4", "version: 1"),
        "reads versions 3 and 4: calibrate again",
    ),
    "no count": (replaced("count: 2", "count: 0"), "made.count must be positive"),
    "no model": (replaced("hidden_size: 256", "hidden_size: wide"), "hidden_size=.?wide"),
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
