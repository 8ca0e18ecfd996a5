"""Tests how messages between stages are sent on an accelerator, by recorded calls."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from parallel3d.comm.group import Group
from parallel3d.device import accelerator
from parallel3d.pipeline import p2p
from parallel3d.pipeline.p2p import P2PRoute, post
from parallel3d.schedules.actions import Action, Kind
from parallel3d.schedules.orders import StageAssignment

PP = Group("pp", (3, 7, 11), 1, "a handle")


class Work:
    def __init__(self) -> None:
        self.waits = 0

    def wait(self) -> None:
        self.waits += 1


class Batches:
    """`batch_isend_irecv` like NCCL's: a batch has one handle."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.said: list[list[tuple[object, int]]] = []
        self.works: list[Work] = []
        monkeypatch.setattr(dist, "P2POp", lambda op, tensor, peer, *_: (op, peer))
        monkeypatch.setattr(dist, "batch_isend_irecv", self.start)
        monkeypatch.setattr(accelerator, "is_on_accelerator", lambda tensor: True)

    def start(self, operations: list) -> list[Work]:
        self.said.append(operations)
        self.works.append(Work())
        return self.works[-1:]


def test_a_group_of_messages_is_one_batch_whose_handle_all_share(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    batches = Batches(monkeypatch)
    messages = [(Action(Kind.SEND_F, 1), torch.ones(2)), (Action(Kind.RECV_B, 0), torch.empty(2))]
    transfers = post(messages, P2PRoute(PP, StageAssignment(3)))
    assert batches.said == [[(dist.isend, 11), (dist.irecv, 11)]]
    assert [t.action for t in transfers] == [action for action, _ in messages]
    for transfer in transfers:
        transfer.work.wait()
    assert batches.works[0].waits == 2


def test_gradients_have_a_separate_communicator_and_batch(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Tests that an activation that waits for a late reader does not delay a gradient that has
    arrived."""
    batches, groups = Batches(monkeypatch), []
    monkeypatch.setattr(dist, "P2POp", lambda op, tensor, peer, group, _: groups.append(group))
    there, back = (Group("pp", PP.ranks, 1, name) for name in ("there", "back"))
    messages = [
        (Action(kind, i), torch.ones(2))
        for i, kind in enumerate((Kind.RECV_F, Kind.SEND_B, Kind.SEND_F, Kind.RECV_B))
    ]
    transfers = post(messages, P2PRoute(there, StageAssignment(3), back))
    assert groups == ["there", "there", "back", "back"]
    assert [t.action for t in transfers] == [action for action, _ in messages]
    for transfer in transfers[:3]:
        transfer.work.wait()
    assert [work.waits for work in batches.works] == [2, 1]


def test_the_baseline_latency_is_measured_with_the_same_messages(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    batches = Batches(monkeypatch)
    for first, ways in ((True, [dist.isend, dist.irecv]), (False, [dist.irecv, dist.isend])):
        batches.said.clear()
        p2p._ping(PP, 7, torch.zeros(1), first)
        assert batches.said == [[(way, 7)] for way in ways]
    assert [work.waits for work in batches.works] == [1] * 4
