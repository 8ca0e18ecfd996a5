"""Tests the cluster section of the configuration, as a cluster, and its presets."""

from __future__ import annotations

import random
import subprocess
import sys
from typing import Any

import pytest
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf

from parallel3d.blueprint.cluster import Cluster, Link, LinkClass, cluster_from_config
from parallel3d.blueprint.keys import ClusterConfig
from parallel3d.cli.overrides import presets
from parallel3d.config.fields import all_keys
from parallel3d.errors import UserError
from parallel3d.run_config import Config, conf_dir, register_schema

DISCOVERED = ("slurm", "local")


def preset(name: str, *overrides: str) -> ClusterConfig:
    register_schema()
    with initialize_config_dir(str(conf_dir()), version_base="1.3"):
        words = [f"cluster={name}", *(f"cluster.{word}" for word in overrides)]
        return OmegaConf.to_object(compose("config", overrides=words)).cluster


def sentence(**keys: Any) -> str:
    world_size = keys.pop("world_size", None)
    with pytest.raises(UserError) as raised:
        cluster_from_config(ClusterConfig(**keys), world_size)
    return str(raised.value)


@pytest.mark.parametrize(
    ("keys", "world_size", "nodes", "gpus"),
    [
        ({}, None, 1, 8),
        ({}, 17, 3, 8),
        ({"nodes": 4}, 17, 4, 8),
        ({"gpus_per_node": 4, "domain_gpus": 72}, None, 18, 4),
        ({"gpus_per_node": 4, "domain_gpus": 72}, 80, 20, 4),
        ({"nodes": 1, "gpus_per_node": None}, 11, 1, 11),
        ({"nodes": 3, "gpus_per_node": None}, 11, 3, 4),
        ({"gpus_per_node": None}, None, 1, 8),
    ],
)
def test_sizes_that_are_left_out_follow_from_the_ranks(
    keys: dict[str, Any], world_size: int | None, nodes: int, gpus: int
):
    made = cluster_from_config(ClusterConfig(**keys), world_size)
    assert (made.nodes, made.gpus_per_node, made.size) == (nodes, gpus, nodes * gpus)


def test_left_out_domain_is_a_node_and_left_out_rails_are_one_a_gpu():
    made = cluster_from_config(ClusterConfig(nodes=2, gpus_per_node=4))
    assert (made.domain_gpus, made.rails, made.unit_nodes) == (4, 4, None)


def test_the_last_domain_and_the_last_unit_may_be_smaller():
    made = cluster_from_config(ClusterConfig(nodes=5, gpus_per_node=4, domain_gpus=8, unit_nodes=2))
    assert made.domain.tolist()[::4] == [0, 0, 1, 1, 2]
    assert made.unit.tolist()[::4] == [0, 0, 1, 1, 2]


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        (
            {"domain_gpus": 3},
            ["domain_gpus=3", "gpus_per_node=8", "nearest is cluster.domain_gpus=2"],
        ),
        ({"domain_gpus": 6}, ["nearest is cluster.domain_gpus=4"]),
        ({"domain_gpus": 70, "gpus_per_node": 4}, ["nearest is cluster.domain_gpus=68"]),
        ({"domain_gpus": 71, "gpus_per_node": 4}, ["nearest is cluster.domain_gpus=72"]),
        ({"rails": 9}, ["cluster.rails=9", "at most", "nearest is cluster.rails=8"]),
        ({"nodes": 2, "world_size": 17}, ["cluster.nodes=2", "17 ranks", "cluster.nodes=3"]),
    ],
)
def test_sizes_that_do_not_fit_are_refused_with_the_nearest_choice(
    keys: dict[str, Any], said: list[str]
):
    text = sentence(**keys)
    assert [part for part in said if part not in text] == []
    assert text.count(".\n") == 0 and text.endswith(".")


@pytest.mark.slow
def test_any_sizes_make_a_cluster_or_a_refusal_whose_advice_works():
    rng = random.Random(3)
    refused = 0
    for _ in range(2000):
        keys = {
            "nodes": rng.choice((None, rng.randint(1, 9))),
            "gpus_per_node": rng.choice((None, rng.randint(1, 9))),
            "domain_gpus": rng.choice((None, rng.randint(1, 40))),
            "rails": rng.choice((None, rng.randint(1, 9))),
            "unit_nodes": rng.choice((None, rng.randint(1, 9))),
        }
        world_size = rng.choice((None, rng.randint(1, 80)))
        for _attempt in range(4):  # each of the three rules may be broken once
            try:
                made = cluster_from_config(ClusterConfig(**keys), world_size)
            except UserError as error:
                refused += 1
                name, value = str(error).rpartition("nearest is cluster.")[2].rstrip(".").split("=")
                keys[name] = int(value)
            else:
                break
        assert made.size >= (world_size or 1)
        assert made.domain.shape == made.unit.shape == made.rail_of.shape == (made.size,)
    assert refused > 100


# --- presets ---------------------------------------------------------------------------------


@pytest.mark.nightly
@pytest.mark.parametrize("name", presets("cluster"))
def test_every_preset_makes_a_cluster_for_any_number_of_ranks(name: str):
    config = preset(name)
    for ranks in (1, 2, 3, 6):
        assert cluster_from_config(config, ranks).size >= ranks
    assert (config.source != "config") == (name in DISCOVERED)
    assert config.name == name


@pytest.mark.parametrize("name", presets("cluster"))
def test_every_preset_begins_with_a_sentence_that_says_what_it_is(name: str):
    lines = (conf_dir() / "cluster" / f"{name}.yaml").read_text(encoding="utf-8").splitlines()
    assert lines[0].startswith("# ") and ". " in f"{lines[0]} {lines[1].lstrip('# ')} "
    assert max(map(len, lines)) <= 100


@pytest.mark.nightly
def test_known_machines():
    h100 = cluster_from_config(preset("dgx_h100"), 16)
    assert (h100.nodes, h100.domain_gpus, h100.rails) == (2, 8, 8)
    assert (h100.nvlink.gb_per_s, h100.rail.gb_per_s) == (450, 50)
    rack = cluster_from_config(preset("gb200_nvl72"))
    assert (rack.nodes, rack.gpus_per_node, rack.domain_gpus, rack.rails) == (18, 4, 72, 4)
    assert set(rack.domain.tolist()) == {0}
    pod = cluster_from_config(preset("superpod"), 512)
    assert (pod.nodes, np_count(pod.unit)) == (64, 2)
    assert pod.link_class(0, 32 * 8) == LinkClass.SPINE
    flat = cluster_from_config(preset("aws_p5"), 16)
    assert flat.link_class(0, 13) == LinkClass.RAIL
    alone = cluster_from_config(preset("rail_only"), 16)
    assert alone.link_class(0, 9) == LinkClass.NONE
    assert alone.link_class(1, 9) == LinkClass.RAIL


def np_count(labels: Any) -> int:
    return len(set(labels.tolist()))


@pytest.mark.nightly
def test_a_laptop_is_one_domain_for_any_number_of_ranks():
    for ranks in (1, 5, 8, 13):
        made = cluster_from_config(preset("laptop"), ranks)
        assert (made.nodes, made.size, np_count(made.domain)) == (1, ranks, 1)


@pytest.mark.slow
def test_overrides_reach_the_cluster():
    made = cluster_from_config(preset("dgx_h100", "nodes=3", "oversubscription=4"))
    assert made.nodes == 3
    assert made.link(LinkClass.SPINE) == Link(50 / 4, 14.6)


# --- nodes with other wiring -----------------------------------------------------------------


def test_rails_and_domains_by_local_index():
    link = Link(1.0, 1.0)
    box = Cluster(
        *("odd", 2, 4, 4, 2, link, link, link),
        local_rail=(1, 1, 0, 0),
        local_domain=(0, 0, 1, 0),
    )
    assert box.rail_of.tolist() == [1, 1, 0, 0] * 2
    assert box.domain.tolist() == [0, 0, 1, 0, 2, 2, 3, 2]


@pytest.mark.slow
def test_a_cluster_is_made_without_torch():
    code = (
        "import sys; from parallel3d.blueprint.keys import ClusterConfig;"
        "from parallel3d.blueprint.cluster import cluster_from_config as make;"
        "assert make(ClusterConfig(nodes=125000)).size == 1_000_000;"
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_the_keys_of_the_section_are_documented():
    assert "cluster.topology_file" in all_keys(Config)
