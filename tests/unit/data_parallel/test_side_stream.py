"""Tests that all phases of a bucket's sum are queued on a stream of their own when the bucket is
full."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace
from unittest.mock import patch

import pytest
import torch
from torch import nn

from parallel3d.comm.group import SINGLE
from parallel3d.data_parallel import comm_hooks
from parallel3d.data_parallel.comm_hooks import HierarchicalAllReduce, InBf16, SideStream
from parallel3d.data_parallel.reducer import CommHook, GradBucket
from parallel3d.device import accelerator

SHAPE = (40, 30)


class Streams:
    """An accelerator's module with the names in use, which records their calls."""

    def __init__(self) -> None:
        self.said: list[str] = []
        self.now = self.compute = self._stream("compute")

    def _stream(self, name: str) -> SimpleNamespace:
        def event() -> str:
            self.said.append(f"{name} records")
            return f"end of {name}"

        return SimpleNamespace(
            name=name,
            wait_stream=lambda other: self.said.append(f"{name} waits for {other.name}"),
            wait_event=lambda event: self.said.append(f"{name} waits for {event}"),
            record_event=event,
        )

    def Stream(self, device: torch.device) -> SimpleNamespace:
        return self._stream("side")

    def current_stream(self, device: torch.device) -> SimpleNamespace:
        return self.now

    @contextmanager
    def on(self, stream: SimpleNamespace) -> Iterator[None]:
        before, self.now = self.now, stream
        self.said.append(f"on {stream.name}")
        yield
        self.said.append(f"off {stream.name}")
        self.now = before


@pytest.fixture
def streams() -> Iterator[Streams]:
    made = Streams()
    with ExitStack() as patches:
        patches.enter_context(patch.object(accelerator, "module", lambda device: made))
        patches.enter_context(patch.object(accelerator, "on_stream", made.on))
        patches.enter_context(patch.object(comm_hooks, "is_on_accelerator", lambda tensor: True))
        yield made


def two_levels() -> CommHook:
    return SideStream(lambda _, bucket: HierarchicalAllReduce(SINGLE, SINGLE, bucket))


def in_bf16() -> SideStream:
    return SideStream(InBf16)


def bucket_of_one() -> GradBucket:
    parameter = nn.Parameter(torch.randn(SHAPE))
    return GradBucket(0, True, parameter.detach().flatten().clone(), [parameter])


@pytest.mark.parametrize("make", [two_levels, in_bf16])
def test_the_last_phase_is_queued_before_anybody_waits(
    make: Callable[[], CommHook], streams: Streams
) -> None:
    bucket = bucket_of_one()
    sound = comm_hooks.collectives.all_gather

    def noted(*args: object) -> object:
        streams.said.append("last phase")
        return sound(*args)

    hook = make()
    with patch.object(comm_hooks.collectives, "all_gather", noted):
        for _ in range(2):
            work = hook(SINGLE, bucket)
            assert streams.said == [
                "side waits for compute", "on side", "last phase", "off side", "side records",
            ]  # fmt: skip
            streams.said.clear()
            work.wait()
            assert streams.said == ["compute waits for end of side"]
            streams.said.clear()


def test_one_stream_for_all_buckets(streams: Streams) -> None:
    side, used = in_bf16(), []
    for _ in range(2):
        side.run(torch.zeros(1), lambda: SimpleNamespace(wait=lambda: None))
        used.append(side.stream)
    assert used[0] is used[1]


@pytest.mark.slow
def test_gradients_summed_over_copies_are_marked_where_they_are_read(streams: Streams) -> None:
    from parallel3d.data_parallel import fully_sharded  # imports FSDP2, which takes a second

    # FSDP2 made them on another stream, and releases them once their addition is queued here.
    marked: list[str] = []
    flat = SimpleNamespace(
        device=torch.device("cpu"), record_stream=lambda stream: marked.append(stream.name)
    )

    with (
        patch.object(accelerator, "is_on_accelerator", lambda tensor: True),
        patch.object(fully_sharded.collectives, "all_reduce", lambda t, g: marked.append("summed")),
        streams.on(streams._stream("all-reduce")),
    ):
        fully_sharded.all_reduce_replicas(flat, SINGLE)
    assert marked == ["summed", "all-reduce"]
