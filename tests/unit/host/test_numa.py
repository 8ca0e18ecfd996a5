"""Tests to which CPUs a rank is bound, on machines that a folder simulates."""

from __future__ import annotations

from pathlib import Path

import pytest

from parallel3d.host import memory
from parallel3d.host.memory import bind_near, cpus_near


def played_sys(root: Path, nodes: list[str], gpu_nodes: dict[str, int], online: str) -> Path:
    for number, cpus in enumerate(nodes):
        folder = root / f"devices/system/node/node{number}"
        folder.mkdir(parents=True)
        (folder / "cpulist").write_text(f"{cpus}\n")
    (root / "devices/system/cpu").mkdir(parents=True)
    (root / "devices/system/cpu/online").write_text(f"{online}\n")
    for bus_id, node in gpu_nodes.items():
        folder = root / "bus/pci/devices" / bus_id
        folder.mkdir(parents=True)
        (folder / "numa_node").write_text(f"{node}\n")
    return root


@pytest.fixture
def allowed(monkeypatch: pytest.MonkeyPatch) -> set[int]:
    """The simulated CPUs of this process, which the binding changes."""
    mine = set(range(8))

    def bind(_: int, cpus: set[int]) -> None:
        mine.clear()
        mine.update(cpus)

    monkeypatch.setattr(memory.os, "sched_getaffinity", lambda _: set(mine))
    monkeypatch.setattr(memory.os, "sched_setaffinity", bind)
    return mine


GPUS = {"0000:1b:00.0": 0, "0000:dc:00.0": 1, "0000:00:05.0": -1}


def test_rank_stays_on_the_node_of_its_gpu(tmp_path: Path, allowed: set[int]) -> None:
    two = played_sys(tmp_path, ["0-1,4-5", "2-3,6-7"], GPUS, "0-7")
    assert cpus_near("0000:1b:00.0", two) == {0, 1, 4, 5}
    assert bind_near("0000:dc:00.0", two) == {2, 3, 6, 7}
    assert allowed == {2, 3, 6, 7}


def test_rank_that_a_launcher_has_bound_is_left_alone(tmp_path: Path, allowed: set[int]) -> None:
    two = played_sys(tmp_path, ["0-3", "4-7"], GPUS, "0-7")
    allowed -= {7}
    assert bind_near("0000:1b:00.0", two) == set()
    assert allowed == set(range(7))


def test_nothing_is_bound_if_numa_nodes_make_no_difference(
    tmp_path: Path, allowed: set[int]
) -> None:
    one = played_sys(tmp_path / "one", ["0-7", ""], GPUS, "0-7")  # the second is a GPU's memory
    two = played_sys(tmp_path / "two", ["0-3", "4-7"], GPUS, "0-7")
    assert bind_near("0000:1b:00.0", one) == set()
    assert bind_near("0000:00:05.0", two) == set()  # the firmware does not report it
    assert bind_near("0000:77:00.0", two) == set()  # the device does not exist
    assert bind_near("0000:1b:00.0", tmp_path / "none") == set()
    assert allowed == set(range(8))
