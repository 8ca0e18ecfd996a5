"""Tests the file in which `calibrate` keeps measured rates, and what of it is refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from parallel3d.calibrate.record import MEASURED, check_device, check_nodes, check_type, read
from parallel3d.errors import UserError
from tests.unit.estimate.measured_machine import GPUS, MADE, machine

GPU = machine(GPUS, most=16, gb_per_s=300.0)


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
