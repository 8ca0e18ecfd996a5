"""Tests that DistributedDataParallel ends with the weights of one process on all inputs, for every
kind of module."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from parallel3d import DistributedDataParallel
from parallel3d.blueprint.layout import Layout
from parallel3d.comm.group import Group
from parallel3d.comm.process_groups import ProcessGroups
from parallel3d.data_parallel import ddp, transport
from parallel3d.data_parallel.averager import GradientAverager
from parallel3d.data_parallel.transport import SharedTransport
from parallel3d.run.keys import LaunchConfig
from tests.distributed.ddp_cases import (
    Case,
    Cnn,
    Frozen,
    Shared,
    Twice,
    Unused,
    batch_of,
    expected,
    loss_of,
)
from tests.distributed.pool import Pool

pytestmark = pytest.mark.nightly

Mutation = Callable[[], AbstractContextManager[None]]
TINY = {"bucket_cap_mb": 1e-3}  # a kilobyte, so that there are several buckets
CASES = {
    "cnn": Case(Cnn, steps=20),
    "cnn, several buckets": Case(Cnn, TINY),
    "cnn, backend": Case(Cnn, TINY, shared_memory=False),
    "cnn, at the end": Case(Cnn, TINY | {"overlap": False}, shared_memory=False),
    "cnn, views": Case(Cnn, TINY | {"gradient_as_bucket_view": True}),
    "cnn, views kept": Case(Cnn, TINY | {"gradient_as_bucket_view": True}, micro=2, to_none=False),
    "cnn, views, backend": Case(
        Cnn, TINY | {"gradient_as_bucket_view": True}, micro=2, shared_memory=False
    ),
    "cnn, no_sync": Case(Cnn, TINY, micro=3),
    "cnn, uneven": Case(Cnn, TINY, fewer=3, steps=20),
    "cnn, uneven, of those left": Case(Cnn, TINY, fewer=7, by_initial_size=False),
    "cnn, uneven, views, backend": Case(
        Cnn, TINY | {"gradient_as_bucket_view": True}, fewer=3, shared_memory=False
    ),
    "shared": Case(Shared, TINY, steps=20),
    "shared, backend": Case(Shared, TINY, shared_memory=False),
    "frozen": Case(Frozen, TINY, steps=20),
    "unused": Case(Unused, TINY, steps=20),
    "unused, views": Case(Unused, TINY | {"gradient_as_bucket_view": True}),
    "unused, searched": Case(Unused, TINY | {"find_unused_parameters": True}, shared_memory=False),
    "unused, no_sync": Case(Unused, TINY | {"find_unused_parameters": True}, micro=2),
    "unused, uneven": Case(Unused, TINY, fewer=3, shared_memory=False),
    "checkpointed": Case(Twice, TINY | {"static_graph": True}),
    "checkpointed, backend": Case(Twice, TINY | {"static_graph": True}, shared_memory=False),
}


def groups_of(dp: int, shared_memory: bool = True) -> ProcessGroups:
    launch = LaunchConfig(shared_memory=shared_memory)
    return ProcessGroups.create(Layout(dp=dp), "cpu", 60, launch)


def trained(case: Case, group: Group) -> nn.Module:
    """Returns the wrapped module after this rank's steps."""
    net = case.made()
    if group.index > 0:
        with torch.no_grad():
            for parameter in net.parameters():
                parameter.add_(group.index)  # the first rank's values must be sent
    net = DistributedDataParallel(net, process_group=group, **case.options)
    assert isinstance(net.averager.transport, SharedTransport) == case.shared_memory
    optimizer = case.optimizer(net)
    with net.join(case.by_initial_size, enable=case.fewer > 0):
        for step in range(case.steps_of(group.index)):
            optimizer.zero_grad(case.to_none)
            for micro in range(case.micro):
                last = micro == case.micro - 1
                with nullcontext() if last else net.no_sync():
                    batch = batch_of(group.index, case.micro * step + micro)
                    loss_of(net, batch).backward()
            optimizer.step()
    return net


def errors(
    names: list[str], mutation: Mutation = nullcontext, steps: int | None = None
) -> dict[str, float]:
    """Returns, by case, the largest difference of a weight from the reference's, over its largest
    value."""
    torch.set_default_dtype(torch.float64)
    world = dist.get_world_size()
    pairs = {shared: groups_of(world, shared) for shared in (True, False)}
    found = {}
    for name in names:
        case = CASES[name]
        case = replace(case, steps=steps or case.steps)
        with mutation():
            ours = dict(trained(case, pairs[case.shared_memory].dp).named_parameters())
        theirs = expected(case, world)
        assert ours.keys() == theirs.keys()
        found[name] = max(
            ((ours[n] - theirs[n]).abs().max() / theirs[n].abs().max()).item() for n in theirs
        )
    for groups in pairs.values():
        groups.close()
    torch.set_default_dtype(torch.float32)
    return found


def test_two_ranks_train_like_one_process(pool: Pool) -> None:
    for found in pool.run(2, errors, list(CASES)):
        assert max(found.values()) < 1e-9, found


def test_three_ranks_train_like_one_process(pool: Pool) -> None:
    names = ["cnn, several buckets", "cnn, backend", "cnn, uneven", "unused", "checkpointed"]
    for found in pool.run(3, errors, names):
        assert max(found.values()) < 1e-9, found


def late(index: int) -> AbstractContextManager[None]:
    """This rank stops after the last bucket, before it takes gradients that it lacks."""
    sound = SharedTransport.finish

    def finish(self: SharedTransport) -> Iterator[Tensor]:
        yield from sound(self)
        if self.index == index:
            time.sleep(0.05)

    return replaced(SharedTransport, "finish", finish)


@pytest.mark.parametrize("index", [0, 1])
def test_a_late_rank_reads_gradients_before_they_are_overwritten(pool: Pool, index: int) -> None:
    for found in pool.run(2, errors, ["unused"], partial(late, index)):
        assert max(found.values()) < 1e-9, found


@contextmanager
def replaced(owner: object, name: str, value: object) -> Iterator[None]:
    with patch.object(owner, name, value, create=True):
        yield


def sums() -> AbstractContextManager[None]:
    """Gradients are summed, not averaged."""
    return replaced(GradientAverager, "scale", property(lambda self: 1.0, lambda self, value: None))


def unsent() -> AbstractContextManager[None]:
    """The first rank's values are not broadcast."""
    return replaced(ddp, "broadcast_all", lambda tensors, source, group: None)


def leftover() -> AbstractContextManager[None]:
    """Parameters without a gradient in a backward keep the earlier contents of their bucket."""
    sound = GradientAverager._take

    def take(self: GradientAverager, number: int) -> None:
        view = self.view_of[number]
        kept = view.clone()
        sound(self, number)
        if self.parameters[number].grad is None:
            view.copy_(kept)

    return replaced(GradientAverager, "_take", take)


def touched() -> AbstractContextManager[None]:
    """A parameter that no rank used gets a gradient of zero."""
    sound = GradientAverager._write_flags

    def write(self: GradientAverager, flags: list[bool]) -> None:
        sound(self, [True] * (len(flags) - 1) + flags[-1:])

    return replaced(GradientAverager, "_write_flags", write)


def hasty() -> AbstractContextManager[None]:
    """The first of several gradients of a backward counts as all of them."""

    def arrived(self: GradientAverager, number: int) -> None:
        self.counting = False
        self.expected = [1] * len(self.parameters)
        if not self.running:
            self.begin()
        if self.reducer.left[number]:
            self.reducer.left[number] = 0
            self._take(number)

    return replaced(GradientAverager, "_arrived", arrived)


def half() -> AbstractContextManager[None]:
    """The last part of a bucket is not summed."""
    sound = transport._part
    return replaced(
        transport,
        "_part",
        lambda whole, count, index: (
            slice(0, 0) if index == count - 1 else sound(whole, count, index)
        ),
    )


def deaf() -> AbstractContextManager[None]:
    """Joined ranks contribute the earlier contents of their buckets."""
    return replaced(torch.Tensor, "zero_", lambda self: self)


MUTATIONS = {
    sums: "cnn, several buckets",
    unsent: "cnn",
    leftover: "unused",
    touched: "unused",
    hasty: "checkpointed",
    half: "cnn",
    deaf: "cnn, uneven",
}


def mutated() -> dict[str, float]:
    """Returns, by mutation, the findings of its case; the sound case is
    `test_two_ranks_train_like_one_process`."""
    found = {}
    for mutation, name in MUTATIONS.items():
        (found[mutation.__name__],) = errors([name], mutation, steps=5).values()
    return found


@pytest.mark.more
def test_planted_bugs_are_found(pool: Pool) -> None:
    # Three ranks: two of them need no total.
    for found in pool.run(3, mutated, timeout_s=60):
        assert min(found.values()) > 1e-6, found
