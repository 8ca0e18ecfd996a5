"""Which interface and which NCCL settings a group gets, on machines that need have neither."""

from __future__ import annotations

import datetime
import socket
from types import SimpleNamespace

import numpy as np
import pytest
import torch.distributed as dist

from parallel3d.config import ClusterConfig, Config, LaunchConfig
from parallel3d.config_checks import check_config
from parallel3d.config_groups import parse_nccl_env, parse_nccl_settings
from parallel3d.errors import UserError
from parallel3d.topology import process_groups
from parallel3d.topology.cluster import Cluster, Link
from parallel3d.topology.group_options import Interfaces, set_nccl_options
from parallel3d.topology.layout import Layout
from parallel3d.topology.placement import Placement
from parallel3d.topology.process_groups import ProcessGroups

SPEEDS = (Link(100.0, 1.0), Link(10.0, 5.0), Link(10.0, 8.0))
NAMES = ("lo", "eth0", "nvl0", "rail10", "rail2", "rail1", "rail0")
NICS = list(enumerate(NAMES, start=1))


def placement(rails: int = 2) -> Placement:
    """tp=2 inside each of two hosts, dp=2 across; GPU g of a host on rail g."""
    cluster = Cluster("test", 2, 2, 2, rails, *SPEEDS)
    return Placement(cluster, Layout(tp=2, dp=2), np.arange(4), "test")


@pytest.fixture
def nics(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "if_nameindex", lambda: NICS)


def test_groups_inside_a_domain_take_nvlink_and_others_their_own_rail(nics: None) -> None:
    interfaces = Interfaces(placement(), "nvl0", "rail*")
    assert interfaces.of_group([0, 1], 0) == "nvl0"
    assert interfaces.of_group([0, 2], 0) == "rail0"
    assert interfaces.of_group([1, 3], 3) == "rail1"
    assert Interfaces(placement(rails=1), None, "rail*").of_group([1, 3], 3) == "rail0"


def test_a_kind_without_a_key_is_the_systems_choice(nics: None) -> None:
    assert Interfaces(placement(), None, "rail*").of_group([0, 1], 0) is None
    assert Interfaces(placement(), "nvl0", None).of_group([0, 2], 0) is None
    assert Interfaces.of_run(ClusterConfig(), placement()) is None
    assert Interfaces.of_run(ClusterConfig(rail_interface="rail*"), None) is None


def test_an_interface_that_is_not_there_is_named_with_those_that_are(nics: None) -> None:
    with pytest.raises(UserError, match=r"cluster\.rail_interface=ib\*: host .* eth0, nvl0"):
        Interfaces(placement(), None, "ib*").of_group([0, 2], 0)


# --- NCCL -------------------------------------------------------------------------------------


def options() -> SimpleNamespace:
    config = SimpleNamespace(min_ctas=None, max_ctas=None, cga_cluster_size=None)
    return SimpleNamespace(is_high_priority_stream=False, config=config)


def test_tensor_and_pipeline_groups_get_priority_streams_unless_told_otherwise() -> None:
    found = {}
    for kind in ("tp", "pp", "dp", "embedding"):
        chosen = options()
        set_nccl_options(chosen, kind, LaunchConfig())
        found[kind] = chosen.is_high_priority_stream
    assert found == {"tp": True, "pp": True, "dp": False, "embedding": False}


def test_settings_reach_the_groups_of_their_kind_alone() -> None:
    launch = LaunchConfig(nccl_settings=["dp.max_ctas:8", "dp.cga_cluster_size:2", "tp.min_ctas:4"])
    dp, tp = options(), options()
    set_nccl_options(dp, "dp", launch)
    set_nccl_options(tp, "tp", launch)
    assert vars(dp.config) == {"min_ctas": None, "max_ctas": 8, "cga_cluster_size": 2}
    assert vars(tp.config) == {"min_ctas": 4, "max_ctas": None, "cga_cluster_size": None}


def test_a_setting_that_this_torch_lacks_is_refused() -> None:
    old = SimpleNamespace(is_high_priority_stream=False)
    with pytest.raises(UserError, match=r"dp\.max_ctas:8 is not known to this torch's NCCL"):
        set_nccl_options(old, "dp", LaunchConfig(nccl_settings=["dp.max_ctas:8"]))


@pytest.mark.skipif(not hasattr(dist, "ProcessGroupNCCL"), reason="this torch has no NCCL")
def test_torchs_own_options_take_the_settings() -> None:
    from parallel3d.topology.group_options import nccl_options

    launch = LaunchConfig(nccl_settings=["tp.max_ctas:8"])
    made = nccl_options("tp", launch, datetime.timedelta(seconds=5))
    assert made.is_high_priority_stream
    assert made.config.max_ctas == 8


@pytest.mark.parametrize(
    ("word", "sentence"),
    [
        ("dp.max_ctas", r"=dp\.max_ctas must be a kind .*=\[dp\.max_ctas:8\]"),
        ("ddp.max_ctas:8", r"one of tp, dp, pp, embedding; the nearest is dp"),
        ("dp.max_cta:8", r"the nearest is launch\.nccl_settings=\[dp\.max_ctas:8\]"),
        ("dp.max_ctas:99", r"must be 1 to 32; the nearest is .*\[dp\.max_ctas:32\]"),
        ("dp.min_ctas:0", r"must be 1 to 32; the nearest is .*\[dp\.min_ctas:1\]"),
    ],
)
def test_a_wrong_setting_is_refused_before_anything_starts(word: str, sentence: str) -> None:
    with pytest.raises(UserError, match=sentence):
        check_config(Config(launch=LaunchConfig(nccl_settings=[word])))


def test_settings_are_read_in_order() -> None:
    assert parse_nccl_settings(["dp.max_ctas:8", "tp.cga_cluster_size:0"]) == [
        ("dp", "max_ctas", 8),
        ("tp", "cga_cluster_size", 0),
    ]


@pytest.mark.parametrize(
    ("more", "sentence"),
    [
        ({"placement": "file"}, r"placement=file needs rank_file"),
        ({"rank_file": "r"}, r"rank_file=r is read with placement=file alone"),
    ],
)
def test_a_rank_file_and_placement_file_go_together(more: dict, sentence: str) -> None:
    with pytest.raises(UserError, match=sentence):
        check_config(Config(**more))


def test_on_cuda_one_split_makes_all_groups_of_a_kind(monkeypatch: pytest.MonkeyPatch) -> None:
    """The calls that would reach NCCL, recorded: this machine has no GPU."""
    calls = []

    def split_group(**said: object) -> object:
        calls.append(said)
        return f"group {said['group_desc']}"

    monkeypatch.setattr(dist, "get_world_size", lambda: 16)
    monkeypatch.setattr(dist, "get_rank", lambda: 5)
    monkeypatch.setattr(dist, "split_group", split_group)
    monkeypatch.setattr(process_groups, "_mesh", lambda *_: None)
    monkeypatch.setattr(process_groups, "nccl_options", lambda kind, *_: f"options of {kind}")
    layout = Layout(tp=2, pp=4, dp=2)
    groups = ProcessGroups.create(layout, "cuda")
    assert [call["group_desc"] for call in calls] == ["tp", "dp", "pp", "embedding"]
    assert [call["pg_options"] for call in calls][:2] == ["options of tp", "options of dp"]
    assert calls[0]["split_ranks"] == layout.groups("tp")
    assert calls[3]["split_ranks"][0] == [0, 12]  # first and last stage
    assert groups.pp.handle == "group pp"
    assert groups.embedding.handle is None  # rank 5 is on a middle stage


def test_nccl_variables_of_the_cluster_file_are_read_and_others_refused() -> None:
    words = ["NCCL_CROSS_NIC:0", "NCCL_IB_HCA:mlx5_0:1", "TORCH_NCCL_TRACE_BUFFER_SIZE:2000"]
    words += ["TORCH_FR_BUFFER_SIZE:5000"]
    assert parse_nccl_env(words) == {
        "NCCL_CROSS_NIC": "0",
        "NCCL_IB_HCA": "mlx5_0:1",
        "TORCH_NCCL_TRACE_BUFFER_SIZE": "2000",
        "TORCH_FR_BUFFER_SIZE": "5000",
    }
    for wrong in ("PATH:/tmp", "NCCL_CROSS_NIC", "NCCL_CROSS_NIC:", "LD_PRELOAD:NCCL_X"):
        with pytest.raises(UserError, match="must be a variable of NCCL and its value"):
            parse_nccl_env([wrong])
