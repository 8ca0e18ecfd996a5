"""Tests that groups on their own network interface do the work of plain ones; memory is not
shared."""

from __future__ import annotations

import socket
import sys

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.tensor import Shard, distribute_tensor

from parallel3d.blueprint.cluster import Cluster, Link
from parallel3d.blueprint.layout import Layout
from parallel3d.blueprint.rank_mapping import RankMapping
from parallel3d.comm import collectives
from parallel3d.comm.process_groups import GLOO_ON, Interfaces, ProcessGroups
from parallel3d.pipeline.p2p import P2PRoute, post
from parallel3d.run.keys import LaunchConfig
from parallel3d.schedules import orders
from parallel3d.schedules.actions import Action, Kind
from tests.distributed.pool import Pool

LAYOUT = Layout(tp=2, pp=2, dp=2)
SPEEDS = (Link(100.0, 1.0), Link(10.0, 5.0), Link(10.0, 8.0))
LOOPBACK = "lo" if sys.platform == "linux" else "lo0"


def on_loopback(layout: Layout) -> ProcessGroups:
    cluster = Cluster("test", 4, 2, 2, 2, *SPEEDS)
    placement = RankMapping(cluster, layout, np.arange(layout.world_size), "test")
    interfaces = Interfaces(placement, LOOPBACK, f"{LOOPBACK}*")
    return ProcessGroups.create(layout, "cpu", 30.0, LaunchConfig(shared_memory=False), interfaces)


def everything_works() -> dict[str, object]:
    groups = on_loopback(LAYOUT)
    rank, found = groups.rank, {}
    for group in (groups.tp, groups.dp, groups.pp):
        assert group.shared is None
        assert group.handle is not dist.group.WORLD
        found[group.name] = dist.get_backend(group.handle)
        total = collectives.all_reduce(torch.tensor([float(rank)]), group)
        assert total.item() == sum(group.ranks)
        gathered = collectives.all_gather(torch.tensor([rank]), group)
        assert gathered.tolist() == list(group.ranks)
        part = collectives.reduce_scatter(torch.arange(4.0), group)
        assert part.tolist() == [2.0 * (2 * group.index), 2.0 * (2 * group.index + 1)]
        word = collectives.broadcast(torch.tensor([rank]), 1, group)
        assert word.item() == group.ranks[1]
    # One message to the next stage and its gradient back, like the executor's.
    forward, backward = torch.full((3,), float(rank)), torch.full((3,), -float(rank))
    inbox = torch.empty(3)
    if groups.is_first_stage:
        calls = [(Action(Kind.SEND_F, 0), forward), (Action(Kind.RECV_B, 0), inbox)]
    else:
        calls = [(Action(Kind.RECV_F, 0), inbox), (Action(Kind.SEND_B, 0), backward)]
    for transfer in post(calls, P2PRoute(groups.pp, orders.StageAssignment(2))):
        transfer.work.wait()
    peer = groups.pp.ranks[1 - groups.pp.index]
    assert inbox.tolist() == [peer if peer < rank else -peer] * 3
    found["world"] = dist.get_backend(groups.world.handle)
    # DTensor sees the same groups through the mesh.
    split = distribute_tensor(torch.arange(8.0), groups.mesh["tp"], [Shard(0)])
    assert split.full_tensor().tolist() == list(range(8))
    groups.close()
    return found


def test_collectives_messages_and_the_mesh_work_on_chosen_interfaces(pool: Pool) -> None:
    for found in pool.run(8, everything_works):
        assert found == {"tp": GLOO_ON, "dp": GLOO_ON, "pp": GLOO_ON, "world": "gloo"}


def lonely_dimension() -> bool:
    groups = on_loopback(Layout(tp=2))
    apart = groups.tp.handle is not dist.group.WORLD and groups.world.handle is dist.group.WORLD
    dist.barrier()  # a rank that is done at once must not leave while another one still connects
    groups.close()
    return apart


def test_a_dimension_as_large_as_the_world_still_gets_its_interface(pool: Pool) -> None:
    assert pool.run(2, lonely_dimension) == [True, True]


def shared_where(hostnames: list[str], launch: LaunchConfig) -> list[bool]:
    own = hostnames[dist.get_rank()]
    original = socket.gethostname
    socket.gethostname = lambda: own  # restored below, because the pool's process stays alive
    try:
        groups = ProcessGroups.create(Layout(tp=2, dp=2), "cpu", 30.0, launch)
    finally:
        socket.gethostname = original
    found = [groups.tp.shared is not None, groups.dp.shared is not None]
    dist.barrier()  # a rank that is done at once must not leave while another one still connects
    groups.close()
    return found


ON, OFF = LaunchConfig(), LaunchConfig(shared_memory=False)
# Names and settings of the hosts, and whether memory is shared over tp and over dp.
HOSTS = [
    ("aaaa", ON, [True, True]),
    ("aabb", ON, [True, False]),
    ("abab", ON, [False, True]),
    ("aaaa", OFF, [False, False]),
]


def shared_in_each() -> list[list[bool]]:
    return [shared_where(list(hostnames), launch) for hostnames, launch, _ in HOSTS]


def test_only_ranks_with_one_host_name_share_memory_and_it_can_be_turned_off(pool: Pool) -> None:
    assert pool.run(4, shared_in_each) == [[expected for _, _, expected in HOSTS]] * 4
