"""Tests that the simulated device orders streams like PyTorch's own sanitizer."""

from __future__ import annotations

import random

import pytest
from torch.cuda import _sanitizer as sanitizer

from parallel3d.simulated_device.machine import _Syncs


@pytest.mark.parametrize("seed", range(10))
def test_waits_give_the_same_vector_clocks_as_pytorch(seed: int) -> None:
    chance = random.Random(seed)
    plain, ours = sanitizer.StreamSynchronizations(), _Syncs()
    streams, events = [0], []

    def call(name: str, *arguments: int) -> None:
        for syncs in (plain, ours):
            getattr(syncs, name)(*arguments)

    for number in range(1, 300):
        stream, event = chance.choice(streams), chance.choice(events or [0])
        kind = chance.choice(("stream", "event", "kernel", "record", "wait", "host", "all"))
        if kind == "stream":
            streams.append(number)
            call("create_stream", number)
        elif kind == "event":
            events.append(number)
            call("create_event", number)
        elif kind == "kernel":
            call("update_seq_num", stream, number)
        elif kind == "all":
            call("sync_all_streams")
        elif kind == "host":
            call("all_streams_wait_for_stream", stream)
        elif events and kind == "record":
            call("record_state", event, stream)
        elif events:
            call("stream_wait_for_event", stream, event)
        assert ours.current_sync_states == plain.current_sync_states
        assert ours.host_sync_state == plain.host_sync_state
