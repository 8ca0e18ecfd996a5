"""Tests that the micro-batches in flight are counted as in the schedule, for any number of them."""

from __future__ import annotations

import pytest

from benchmarks.planner.plan_dryrun import configured
from parallel3d.blueprint.in_flight import enough_microbatches, states_of
from parallel3d.resolve import blueprint_of
from parallel3d.schedules.actions import Kind
from parallel3d.schedules.messages import SENDS, peak_unread
from parallel3d.schedules.schedule import make

PIPELINE = {"model": "llama3_8b", "pp": 4, "dp": 1, "micro_batch_size": 1, "global_batch_size": 16}


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "zb_h1"])
def test_moments_hold_as_many_micro_batches_as_the_schedule(name: str) -> None:
    config = configured(PIPELINE | {"schedule": name})
    seen = [states_of(blueprint_of(config), rank, 12).values() for rank in range(4)]
    most = [max(int((s.live + s.deferred).sum(axis=1).max()) for s in found) for found in seen]
    assert most[0] == {"gpipe": 12, "1f1b": 4, "zb_h1": 4}[name]
    assert name != "1f1b" or most == [4, 3, 2, 1]
    assert any(s.deferred.any() for found in seen for s in found) == (name == "zb_h1")


@pytest.mark.parametrize("name", ["1f1b", "interleaved", "zb_h1", "zbv", "v_half"])
def test_few_micro_batches_hold_as_much_as_all(name: str) -> None:
    vpp = 1 if name in ("1f1b", "zb_h1") else 2
    assert enough_microbatches(name, 4, 64) < 64
    all_of = make(name, 4, 64, vpp).orders[0]
    live, most = 0, 0
    for step in all_of:
        live += {"F": 1, "W": -1, "B": -1}.get(step.kind.name, 0)
        most = max(most, live)
    blueprint = blueprint_of(configured(PIPELINE | {"schedule": name, "vpp": vpp}))
    seen = states_of(blueprint, 0, 64).items()
    counted = [(s.live + s.deferred).sum(axis=1).max() + (kind == Kind.F) for (kind, _), s in seen]
    assert max(counted) == most


@pytest.mark.parametrize("name", ["1f1b", "interleaved", "zbv"])
def test_messages_hold_their_tensors_from_the_send_and_until_they_are_read(name: str) -> None:
    vpp = 1 if name == "1f1b" else 2
    made = make(name, 4, 16, vpp)
    peaks = peak_unread(made.program(), made.assignment)
    blueprint = blueprint_of(configured(PIPELINE | {"schedule": name, "vpp": vpp}))
    for rank in range(4):
        seen = states_of(blueprint, rank).values()
        most = max(s.in_flight.max() for s in seen)
        received = sum(peak for (_, reader), peak in peaks.items() if reader == rank)
        # The executor waits for the oldest send only when there is another one.
        assert SENDS < most <= SENDS + 1 + received
        handed = max(s.handed.max() for s in seen)
        assert handed == (name == "zbv" and rank == 3)  # it has both stages at the turn of the V
