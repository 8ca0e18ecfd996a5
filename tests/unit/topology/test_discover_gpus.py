"""Tests clusters from nvidia-smi's output, both from real machines and mangled."""

from __future__ import annotations

import random
import re
from pathlib import Path
from typing import Any

import pytest

from parallel3d.blueprint.cluster import Cluster
from parallel3d.blueprint.keys import ClusterConfig
from parallel3d.errors import UserError
from parallel3d.run_config import Config
from parallel3d.topology.cluster.discover import (
    GPUS,
    GpuMatrix,
    discover,
    local_cluster,
    parse_gpu_matrix,
    with_own_gpus,
)

FIXTURES = Path(__file__).resolve().parents[2] / "fixtures" / "topology"
TOPO_FILES = sorted(path.name for path in FIXTURES.glob("topo_*.txt"))


def fixture(name: str) -> str:
    return (FIXTURES / f"{name}.txt").read_text(encoding="utf-8")


def matrix(name: str) -> GpuMatrix:
    return parse_gpu_matrix(fixture(name))


def machine(topo: str):
    """Returns a command runner of a machine whose nvidia-smi prints this text."""
    rows = "".join(f"GPU-{i:x}4fb92fc, NVIDIA H200, 143771\n" for i in range(8))
    answers = {("nvidia-smi", "topo", "-m"): topo, tuple(GPUS.split()): rows}
    return lambda command: answers[tuple(command)]


def found(topo: str, environ: dict[str, str] | None = None, **keys: Any) -> Cluster:
    config = ClusterConfig(source="local", **keys)
    return local_cluster(config, environ or {}, machine(fixture(topo)))


# --- the matrix ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "domains", "rails"),
    [
        ("topo_dgx_a100", [0] * 8, [0, 1, 2, 3, 4, 5, 6, 7]),
        ("topo_hgx_h100", [0] * 8, [0, 1, 2, 3, 4, 5, 6, 7]),
        ("topo_h100_reversed", [0] * 8, [7, 6, 5, 4, 3, 2, 1, 0]),
        ("topo_h200_shuffled", [0] * 8, [4, 1, 0, 3, 6, 7, 5, 2]),
        ("topo_b200_gpu2_off", [0, 0, 1, 0, 0, 0, 0, 0], [0, 1, 2, 3, 4, 5, 6, 7]),
        ("topo_gb200", [0] * 4, None),  # every NIC is SYS away
        ("topo_l40s_pcie", [0, 1, 2, 3], None),  # two GPUs have no NIC on their socket
    ],
)
def test_domains_and_rails_of_real_machines(name: str, domains: list[int], rails: list[int] | None):
    read = matrix(name)
    assert list(read.domains()) == domains
    assert read.rails() == (None if rails is None else tuple(rails))


def test_older_drivers_name_the_nics_in_the_header():
    older = "\tGPU0\tmlx5_0\tCPU Affinity\nGPU0\t X \tPHB\t0-9\nmlx5_0\tPHB\t X \n"
    assert parse_gpu_matrix(older) == GpuMatrix((("X",),), (("PHB",),))


def test_a_nic_for_two_gpus_is_one_rail_for_both():
    cells = "GPU0 X NV4 NV4 NV4 PIX SYS\nGPU1 NV4 X NV4 NV4 PIX SYS\n"
    cells += "GPU2 NV4 NV4 X NV4 SYS PIX\nGPU3 NV4 NV4 NV4 X SYS PIX\n"
    read = parse_gpu_matrix("GPU0 GPU1 GPU2 GPU3 NIC0 NIC1 CPU Affinity\n" + cells)
    assert read.rails() == (0, 0, 1, 1)


def test_gpus_without_a_nic_do_not_take_near_ones():
    cells = "GPU0 X NV4 NODE NODE\nGPU1 NV4 X PIX NODE\n"
    assert parse_gpu_matrix("GPU0 GPU1 NIC0 NIC1\n" + cells).rails() == (1, 0)


def test_nvlink_in_steps_is_one_domain():
    """A hybrid cube mesh has pairs without a direct link."""
    cells = "GPU0 X NV1 SYS\nGPU1 NV1 X NV2\nGPU2 SYS NV2 X\n"
    assert parse_gpu_matrix("GPU0 GPU1 GPU2\n" + cells).domains() == (0, 0, 0)


GOOD = "GPU0 GPU1 NIC0 CPU Affinity\nGPU0 X NV18 PIX 0-9\nGPU1 NV18 X SYS 0-9\n"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "printed no matrix"),
        ("NVIDIA-SMI has failed because it couldn't communicate with the driver", "no matrix"),
        (GOOD[: GOOD.index("GPU1 NV18")], "row of GPU1, '', cannot be read: it must have 3 cells"),
        (GOOD[: GOOD.rindex("SYS")], "row of GPU1, 'NV18 X', cannot be read: it must have 3 cells"),
        (GOOD[GOOD.index("\n") + 1 :], "nvidia-smi topo -m"),
        (GOOD.replace("GPU1 NV18 X", "GPU1 SYS X"), "GPU1 to GPU0 is SYS, but the reverse is NV18"),
        (GOOD.replace("PIX", "PIXNODE"), "the row of GPU0, 'X NV18 PIXNODE', cannot be read"),
        (GOOD.replace("PIX", "NV2"), "the row of GPU0, 'X NV18 NV2'"),
        (GOOD.replace("X NV18", "NV18 NV18"), "the row of GPU0, 'NV18 NV18 PIX'"),
        (GOOD.replace("GPU0 GPU1 NIC0", "GPU0 GPU2 NIC0"), "must begin with GPU0, GPU1"),
        (GOOD.replace("GPU0 GPU1 NIC0", "GPU0 GPU1 NIC0 NIC0"), "must begin with GPU0, GPU1"),
    ],
)
def test_invalid_matrices_are_refused_in_a_sentence(text: str, said: str):
    with pytest.raises(UserError) as raised:
        parse_gpu_matrix(text)
    assert said in str(raised.value)


# --- the cluster -----------------------------------------------------------------------------


def test_one_host_becomes_a_cluster():
    made = found("topo_dgx_a100", rail_gb_per_s=25)
    assert (made.nodes, made.size, made.domain_gpus, made.rails) == (1, 8, 8, 8)
    assert (made.rail.gb_per_s, made.rail_of.tolist()) == (25, list(range(8)))


def test_hosts_with_other_wiring_keep_their_rails_and_domains():
    reversed_nics = found("topo_h100_reversed", nodes=2)
    assert reversed_nics.rail_of.tolist() == [7, 6, 5, 4, 3, 2, 1, 0] * 2
    one_off = found("topo_b200_gpu2_off", nodes=2)
    assert one_off.domain.tolist() == [0, 0, 1, 0, 0, 0, 0, 0, 2, 2, 3, 2, 2, 2, 2, 2]
    pcie = found("topo_l40s_pcie")
    assert (pcie.domain_gpus, pcie.domain.tolist(), pcie.rails) == (1, [0, 1, 2, 3], 4)


def test_configured_keys_complete_a_discovered_host():
    racks = found("topo_gb200", nodes=4, domain_gpus=8, unit_nodes=2, rails=2)
    assert racks.domain.tolist()[::4] == [0, 0, 1, 1]
    assert (racks.rails, racks.unit.tolist()[::4]) == (2, [0, 0, 1, 1])


def test_visible_devices_choose_and_order_the_gpus():
    made = found("topo_h200_shuffled", {"CUDA_VISIBLE_DEVICES": "4,1,0"})
    assert (made.size, made.domain_gpus) == (3, 3)
    assert made.rail_of.tolist() == [2, 0, 1]  # NICs 6, 1 and 4
    same = found("topo_h200_shuffled", {"CUDA_VISIBLE_DEVICES": "GPU-44fb92fc,GPU-1,GPU-04f"})
    assert same.rail_of.tolist() == [2, 0, 1]
    for text in ("", "8", "0,0", "GPU-94fb92fc", "GPU-4,GPU-44", "GPU-", "-1", "0,,1", "MIG-4b"):
        with pytest.raises(UserError, match="CUDA_VISIBLE_DEVICES"):
            found("topo_h200_shuffled", {"CUDA_VISIBLE_DEVICES": text})


@pytest.mark.parametrize(
    ("topo", "keys", "said"),
    [
        ("topo_gb200", {"domain_gpus": 6}, "nearest is cluster.domain_gpus=4"),
        ("topo_gb200", {"rails": 5}, "nearest is cluster.rails=4"),
    ],
)
def test_sizes_that_contradict_the_host_are_refused(topo: str, keys: dict[str, Any], said: str):
    with pytest.raises(UserError) as raised:
        found(topo, **keys)
    assert said in str(raised.value)


def test_discovery_makes_as_many_hosts_as_the_ranks_need():
    run = machine(fixture("topo_gb200"))
    config = ClusterConfig(source="local")
    assert discover(config, {}, run, world_size=9).nodes == 3
    with pytest.raises(
        UserError, match=r"too small for 9 ranks .* the nearest is cluster\.nodes=3"
    ):
        discover(ClusterConfig(source="local", nodes=2), {}, run, world_size=9)


# --- mangled -----------------------------------------------------------------------------------


def mangled(text: str, rng: random.Random) -> str:
    """Returns text that is cut, doubled, swapped or deleted somewhere, mostly inside the matrix."""
    at, to = sorted(rng.randrange(len(text) + 1) for _ in range(2))
    junk = rng.choice(("\n", " ", "\t", "GPU0", "NV0", "NV99", "SYS", ":", "9" * 30, "\x00", "²"))
    words = re.split(r"(\s+)", text)
    words[rng.randrange(len(words))] = junk
    return rng.choice(
        (text[:at], text[to:], text[:at] + text[to:], text[:at] + junk + text[at:], "".join(words))
    )


@pytest.mark.nightly
@pytest.mark.parametrize("topo", TOPO_FILES)
def test_mangled_matrices_end_in_a_sentence_or_a_cluster(topo: str):
    rng = random.Random(topo)
    good = (FIXTURES / topo).read_text(encoding="utf-8")
    head = good.index("Legend:")
    ends = {"cluster": 0, "sentence": 0}
    for _ in range(1000):
        text = mangled(good[:head], rng) + good[head:]
        try:
            made = local_cluster(ClusterConfig(source="local"), {}, machine(text))
        except UserError as error:
            ends["sentence"] += 1
            assert "\n" not in str(error) and len(str(error)) < 400
        else:
            ends["cluster"] += 1
            assert made.domain.size == made.rail_of.size == made.size
    assert min(ends.values()) > 50


# --- the GPUs themselves ---------------------------------------------------------------------


BY_PLACE = {"CUDA_DEVICE_ORDER": "PCI_BUS_ID"}


def own_gpus(
    printed: str, visible: str | None = None, order: dict[str, str] = BY_PLACE, **keys: Any
) -> ClusterConfig:
    lines = enumerate(printed.splitlines())
    rows = "".join(f"GPU-{i}, {line}\n" for i, line in lines) if "," in printed else printed
    answers = {tuple(GPUS.split()): rows}
    config = Config(cluster=ClusterConfig(**{"source": "local", "gpus_per_node": None} | keys))
    environ = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible, **order}
    return with_own_gpus(config.cluster, environ, lambda command: answers[tuple(command)])


def test_this_machines_gpus_are_read_from_its_driver() -> None:
    found = own_gpus("NVIDIA H200, 143771\n" * 4)
    assert (found.gpu, found.gpus_per_node, found.gpu_memory_gb_per_s) == ("NVIDIA H200", 4, 4800)
    assert found.gpu_memory_gb == pytest.approx(150.75, abs=0.01)
    for unknown in ("NVIDIA Unheard Of", "NVIDIA H100 PCIe"):  # this datasheet has no bandwidth
        assert own_gpus(f"{unknown}, 1024\n").gpu_memory_gb_per_s is None
    seen = own_gpus("NVIDIA A100, 81920\nNVIDIA H200, 143771\nNVIDIA H200, 143771\n", visible="2,1")
    assert (seen.gpu, seen.gpus_per_node) == ("NVIDIA H200", 2)
    assert own_gpus("one, 1\n", source="config").gpu is None


MIXED = "NVIDIA GeForce RTX 3090, 24576\nNVIDIA GeForce RTX 4090, 24564\n"


def test_cards_of_several_kinds_are_distinguished_or_refused() -> None:
    """CUDA's first GPU is the fastest one, but nvidia-smi's is the first on the bus."""
    assert own_gpus(MIXED, "1").gpu == "NVIDIA GeForce RTX 4090"
    assert own_gpus(MIXED, "GPU-0", order={}).gpu == "NVIDIA GeForce RTX 3090"
    with pytest.raises(UserError, match=r"by speed.*set CUDA_DEVICE_ORDER=PCI_BUS_ID"):
        own_gpus(MIXED, "1", order={})
    for visible in (None, "0,1"):
        with pytest.raises(UserError, match="all GPUs of a cluster must be of one kind: choose"):
            own_gpus(MIXED, visible)
    typed = own_gpus("NVIDIA A100-SXM4-40GB, 40960\n" * 7 + "NVIDIA A100-SXM4-40GB, 40536\n")
    assert typed.gpu_memory_gb == pytest.approx(42.5, abs=0.05)  # the smallest one
    assert own_gpus("GRID A100-20C, 20480\n").gpu_memory_gb_per_s is None


def test_gpu_keys_on_the_command_line_are_kept() -> None:
    typed = own_gpus("NVIDIA H200, 143771\n" * 4, gpu="NVIDIA B200")
    assert (typed.gpu, typed.gpu_memory_gb) == ("NVIDIA B200", None)
    typed = own_gpus("NVIDIA H200, 143771\n" * 4, gpus_per_node=2, gpu_memory_gb=100.0)
    assert (typed.gpu, typed.gpus_per_node, typed.gpu_memory_gb) == ("NVIDIA H200", 2, 100.0)


def test_an_answer_without_gpus_is_refused() -> None:
    with pytest.raises(UserError, match=r"printed '.*No devices found.*'; choose a preset such as"):
        own_gpus("No devices found\n")
