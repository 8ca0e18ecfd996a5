"""Tests the interface and the NCCL settings of each group, on machines without either."""

from __future__ import annotations

import datetime
import socket
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from parallel3d.blueprint.cluster import Cluster, Link
from parallel3d.blueprint.keys import ClusterConfig
from parallel3d.blueprint.layout import Layout
from parallel3d.blueprint.rank_mapping import RankMapping
from parallel3d.comm.process_groups import (
    DEFAULTS,
    Interfaces,
    ProcessGroups,
    nccl_options,
    nccl_settings,
)
from parallel3d.config.nccl import parse_nccl_env, parse_nccl_settings
from parallel3d.errors import UserError
from parallel3d.run.keys import LaunchConfig
from parallel3d.run_config import Config, check_config

SPEEDS = (Link(100.0, 1.0), Link(10.0, 5.0), Link(10.0, 8.0))
NAMES = ("lo", "eth0", "nvl0", "rail10", "rail2", "rail1", "rail0")
NICS = list(enumerate(NAMES, start=1))


def placement(rails: int = 2) -> RankMapping:
    """Returns a layout with tp=2 inside each of two hosts, dp=2 across; GPU g of a host is on rail
    g."""
    cluster = Cluster("test", 2, 2, 2, rails, *SPEEDS)
    return RankMapping(cluster, Layout(tp=2, dp=2), np.arange(4), "test")


@pytest.fixture
def nics(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "if_nameindex", lambda: NICS)


def test_groups_inside_a_domain_use_nvlink_and_others_their_own_rail(nics: None) -> None:
    interfaces = Interfaces(placement(), "nvl0", "rail*")
    assert interfaces.of_group([0, 1], 0) == "nvl0"
    assert interfaces.of_group([0, 2], 0) == "rail0"
    assert interfaces.of_group([1, 3], 3) == "rail1"
    assert Interfaces(placement(rails=1), None, "rail*").of_group([1, 3], 3) == "rail0"


def test_a_group_over_unconnected_rails_uses_the_default_interface(nics: None) -> None:
    """Tests a group like dp × cp, which has a part of each rail."""
    joined = placement()
    assert Interfaces(joined, None, "rail*").of_group([0, 1, 2, 3], 0) == "rail0"
    apart = replace(joined, cluster=replace(joined.cluster, oversubscription=None))
    assert Interfaces(apart, None, "rail*").of_group([0, 1, 2, 3], 0) is None
    assert Interfaces(apart, None, "rail*").of_group([1, 3], 3) == "rail1"


def test_a_kind_without_a_key_uses_the_default_interface(nics: None) -> None:
    assert Interfaces(placement(), None, "rail*").of_group([0, 1], 0) is None
    assert Interfaces(placement(), "nvl0", None).of_group([0, 2], 0) is None
    assert Interfaces.of_run(ClusterConfig(), placement()) is None
    assert Interfaces.of_run(ClusterConfig(rail_interface="rail*"), None) is None


def test_a_missing_interface_is_named_with_those_that_exist(nics: None) -> None:
    with pytest.raises(UserError, match=r"cluster\.rail_interface=ib\*: host .* eth0, nvl0"):
        Interfaces(placement(), None, "ib*").of_group([0, 2], 0)


# --- NCCL -------------------------------------------------------------------------------------


DP_CTAS = (False, (("max_ctas", 8),))


class Options:
    """Has the names of `ProcessGroupNCCL.Options`."""

    def __init__(self) -> None:
        self._timeout = datetime.timedelta(0)
        self.is_high_priority_stream = False
        self.config = SimpleNamespace(min_ctas=None, max_ctas=None, cga_cluster_size=None)


TIMEOUT = datetime.timedelta(seconds=5)


class Backend:
    """A backend of the world, with the methods for its groups' options."""

    def __init__(self, supports_splitting: bool = True) -> None:
        self.supports_splitting = supports_splitting
        self.options = Options()


def test_tp_cp_and_pp_groups_get_priority_streams_by_default() -> None:
    found = {}
    for kind in ("tp", "cp", "pp", "dp", "dp_cp", "embedding"):
        chosen = nccl_options(kind, LaunchConfig(), TIMEOUT, Backend())
        found[kind] = chosen.is_high_priority_stream
    assert [kind for kind, has_priority in found.items() if has_priority] == ["tp", "cp", "pp"]


def test_settings_reach_the_groups_of_their_kind_alone() -> None:
    launch = LaunchConfig(nccl_settings=["dp.max_ctas:8", "dp.cga_cluster_size:2", "tp.min_ctas:4"])
    dp, tp = (nccl_options(kind, launch, TIMEOUT, Backend()) for kind in ("dp", "tp"))
    assert vars(dp.config) == {"min_ctas": None, "max_ctas": 8, "cga_cluster_size": 2}
    assert vars(tp.config) == {"min_ctas": 4, "max_ctas": None, "cga_cluster_size": None}


def test_a_setting_that_this_torch_lacks_is_refused() -> None:
    old, launch = SimpleNamespace(), LaunchConfig(nccl_settings=["dp.max_ctas:8"])
    with pytest.raises(UserError, match=r"dp\.max_ctas:8 is not known to this torch's NCCL"):
        nccl_options("dp", launch, TIMEOUT, SimpleNamespace(options=old))


def test_a_groups_options_are_of_the_class_of_the_worlds_own() -> None:
    launch = LaunchConfig(nccl_settings=["tp.max_ctas:8"])
    made = nccl_options("tp", launch, TIMEOUT, Backend())
    assert type(made) is Options
    assert (made._timeout.seconds, made.is_high_priority_stream) == (5, True)
    assert made.config.max_ctas == 8
    assert Backend().options.config.max_ctas is None  # the world's own settings stay


@pytest.mark.skipif(not hasattr(dist, "ProcessGroupNCCL"), reason="this torch has no NCCL")
def test_torchs_own_options_take_the_settings() -> None:
    world = SimpleNamespace(options=dist.ProcessGroupNCCL.Options())
    launch = LaunchConfig(nccl_settings=["tp.max_ctas:8"])
    made = nccl_options("tp", launch, TIMEOUT, world)
    assert made.is_high_priority_stream
    assert made.config.max_ctas == 8


def test_settings_of_dp_hold_for_both_of_its_levels() -> None:
    launch = LaunchConfig(nccl_settings=["dp.max_ctas:8"])
    assert nccl_settings("dp_inner", launch) == nccl_settings("dp", launch) == DP_CTAS
    assert nccl_settings("embedding", launch) == DEFAULTS


@pytest.mark.parametrize(
    ("word", "sentence"),
    [
        ("dp.max_ctas", r"=dp\.max_ctas must be KIND\.SETTING:NUMBER, .*=\[dp\.max_ctas:1\]"),
        (
            "ddp.max_ctas:8",
            r"one of tp, cp, dp, pp, embedding\), .*is .*\[dp\.max_ctas:8\]",
        ),
        ("dp.max_cta:8", r"the nearest is launch\.nccl_settings=\[dp\.max_ctas:8\]"),
        (
            "dp.max_ctas:99",
            r"must be KIND\.SETTING:NUMBER, .* 1 to 32; the nearest is .*\[dp\.max_ctas:32\]",
        ),
        (
            "dp.min_ctas:0",
            r"must be KIND\.SETTING:NUMBER, .* 1 to 32; the nearest is .*\[dp\.min_ctas:1\]",
        ),
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
        ({"placement": "file"}, r"rank_file=null; the nearest is placement=default"),
        ({"rank_file": "r"}, r"rank_file=r; the nearest is placement=file"),
    ],
)
def test_a_rank_file_and_placement_file_go_together(more: dict, sentence: str) -> None:
    with pytest.raises(UserError, match=sentence):
        check_config(Config(**more))


class World:
    def __init__(self, splits: bool) -> None:
        self._get_backend = lambda device: Backend(splits)


class Recorded:
    """A world of NCCL that records the groups that it is asked to make and to destroy."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, ranks: int, rank: int, splits: bool = True):
        self.splits: list[dict] = []
        self.enumerated: list[str] = []
        self.destroyed: list[object] = []
        monkeypatch.setattr(dist, "group", SimpleNamespace(WORLD=World(splits)))
        monkeypatch.setattr(dist, "get_world_size", lambda: ranks)
        monkeypatch.setattr(dist, "get_rank", lambda: rank)
        monkeypatch.setattr(dist, "split_group", self.split_group)
        monkeypatch.setattr(dist, "new_subgroups_by_enumeration", self.enumerate)
        monkeypatch.setattr(dist, "destroy_process_group", self.destroyed.append)
        monkeypatch.setattr(torch.cuda, "current_device", lambda: rank)

    def split_group(self, **said: Any) -> object:
        self.splits.append(said)
        return f"group {said['group_desc']}"

    def enumerate(self, all_ranks: object, **said: Any) -> tuple[object, None]:
        self.enumerated.append(said["group_desc"])
        return f"group {said['group_desc']}", None

    def kinds(self) -> list[str]:
        return [said["group_desc"] for said in self.splits]


def test_on_cuda_one_split_makes_all_groups_of_a_kind(monkeypatch: pytest.MonkeyPatch) -> None:
    """Records the calls that would reach NCCL: this machine has no GPU."""
    recorded = Recorded(monkeypatch, ranks=16, rank=5)
    layout = Layout(tp=2, pp=4, dp=2)
    groups = ProcessGroups.create(layout, "cuda")
    calls = recorded.splits
    assert recorded.kinds() == ["tp", "dp", "pp", "pp_backward", "embedding"]
    assert [call["pg_options"].is_high_priority_stream for call in calls] == [1, 0, 1, 1, 0]
    assert calls[0]["split_ranks"] == layout.groups("tp")
    assert calls[3]["split_ranks"] == layout.groups("pp")
    assert calls[4]["split_ranks"][0] == [0, 12]  # ranks of the first and the last stage
    assert (groups.pp.handle, groups.pp_backward.handle) == ("group pp", "group pp_backward")
    assert groups.embedding.handle is None  # rank 5 is on a middle stage
    assert groups.world.handle is dist.group.WORLD


def test_a_backend_that_does_not_split_gets_its_groups_one_by_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    recorded = Recorded(monkeypatch, ranks=8, rank=5, splits=False)
    ProcessGroups.create(Layout(tp=2, pp=2, dp=2), "cuda")
    assert (recorded.kinds(), recorded.enumerated) == ([], ["tp", "dp", "pp"])


@pytest.mark.parametrize(
    ("layout", "launch", "made"),
    [
        # tp asks for a priority stream, and so gets its own communicator, although its ranks are
        # the world.
        (Layout(tp=8), LaunchConfig(), ["tp"]),
        (Layout(dp=8), LaunchConfig(), []),
        (Layout(dp=8), LaunchConfig(nccl_settings=["dp.max_ctas:8"]), ["dp"]),
        (Layout(dp=8), LaunchConfig(nccl_high_priority=["dp"]), ["dp"]),
        (Layout(tp=8), LaunchConfig(nccl_high_priority=[]), []),
        # Gradients of the same ranks do not wait for keys that are being gathered.
        (Layout(cp=8), LaunchConfig(), ["cp", "dp_cp"]),
        (Layout(tp=2, cp=4), LaunchConfig(nccl_high_priority=[]), ["tp", "cp", "dp_cp"]),
        # With two stages the embedding group is the pipeline: one communicator suffices, unless
        # they have settings.
        (Layout(pp=2, dp=4), LaunchConfig(), ["dp", "pp", "pp_backward"]),
        (
            Layout(pp=2, dp=4),
            LaunchConfig(nccl_settings=["embedding.max_ctas:2"]),
            ["dp", "pp", "pp_backward", "embedding"],
        ),
    ],
    ids=str,
)
def test_settings_of_a_kind_apply_even_if_its_ranks_are_the_world(
    layout: Layout, launch: LaunchConfig, made: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    recorded = Recorded(monkeypatch, ranks=8, rank=5)
    groups = ProcessGroups.create(layout, "cuda", launch=launch)
    assert recorded.kinds() == made
    for said in recorded.splits:
        options = said["pg_options"]
        kind = said["group_desc"].removesuffix("_backward")
        assert options.is_high_priority_stream == (kind in launch.nccl_high_priority)
    # The sums of the loss do not use the limited communicators.
    assert groups.world.handle is dist.group.WORLD
    whole = groups.tp if layout.tp > 1 else groups.dp
    if whole.size == 8 and not made:
        assert whole.handle is dist.group.WORLD


@pytest.mark.parametrize("rank", [0, 5])
def test_groups_are_destroyed_in_the_order_in_which_they_were_made(
    rank: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Members of an NCCL group destroy it together: different orders on two ranks would
    deadlock."""
    recorded = Recorded(monkeypatch, ranks=16, rank=rank)
    handles = {}

    class Handle:
        """Has its address as hash, like a process group: the order of a set differs by rank."""

    def split_group(**said: Any) -> object:
        return handles.setdefault(said["group_desc"], Handle())

    monkeypatch.setattr(dist, "split_group", split_group)
    groups = ProcessGroups.create(Layout(tp=2, pp=4, dp=2), "cuda")
    groups.close()
    order = ["tp", "dp", "pp", "pp_backward", "embedding"]
    # Rank 5 is on a middle stage, and not a member of the embedding group.
    assert recorded.destroyed == [handles[kind] for kind in (order if rank == 0 else order[:4])]


def test_a_group_of_two_names_is_destroyed_once_and_the_world_never(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    recorded = Recorded(monkeypatch, ranks=8, rank=5)
    ProcessGroups.create(Layout(pp=2, dp=4), "cuda").close()
    assert recorded.destroyed == ["group dp", "group pp", "group pp_backward"]
    recorded.destroyed.clear()
    ProcessGroups.create(Layout(dp=8), "cuda").close()
    assert recorded.destroyed == []


def test_nccl_variables_of_the_cluster_file_are_read_and_others_refused() -> None:
    words = ["NCCL_CROSS_NIC:0", "NCCL_IB_HCA:mlx5_0:1", "TORCH_NCCL_TRACE_BUFFER_SIZE:2000"]
    words += ["TORCH_FR_BUFFER_SIZE:5000", "TORCH_DIST_USE_NCCL2:1"]
    assert parse_nccl_env(words) == {
        "NCCL_CROSS_NIC": "0",
        "NCCL_IB_HCA": "mlx5_0:1",
        "TORCH_NCCL_TRACE_BUFFER_SIZE": "2000",
        "TORCH_FR_BUFFER_SIZE": "5000",
        "TORCH_DIST_USE_NCCL2": "1",
    }
    for wrong in ("PATH:/tmp", "NCCL_CROSS_NIC", "NCCL_CROSS_NIC:", "LD_PRELOAD:NCCL_X"):
        with pytest.raises(UserError, match="must be NAME:VALUE, with a variable"):
            parse_nccl_env([wrong])
