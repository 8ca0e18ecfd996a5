"""Tests that DistributedDataParallel ends with the weights of one process on all inputs, for every
kind of module."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import nn

from parallel3d import DistributedDataParallel
from parallel3d.blueprint.layout import Layout
from parallel3d.comm import collectives
from parallel3d.comm.group import Group
from parallel3d.comm.process_groups import ProcessGroups
from parallel3d.data_parallel import ddp, gradient_mean, reducer
from parallel3d.data_parallel.gradient_mean import GradientMean
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
    "cnn, views": Case(Cnn, TINY | {"gradient_as_bucket_view": True}),
    "cnn, views kept": Case(Cnn, TINY | {"gradient_as_bucket_view": True}, micro=2, to_none=False),
    "cnn, views, backend": Case(
        Cnn, TINY | {"gradient_as_bucket_view": True}, micro=2, shared_memory=False
    ),
    "cnn, no_sync": Case(Cnn, TINY, micro=3),
    "shared": Case(Shared, TINY, steps=20),
    "shared, backend": Case(Shared, TINY, shared_memory=False),
    "frozen": Case(Frozen, TINY, steps=20),
    "unused": Case(Unused, TINY, steps=20),
    "unused, views": Case(Unused, TINY | {"gradient_as_bucket_view": True}),
    "unused, searched": Case(Unused, TINY | {"find_unused_parameters": True}, shared_memory=False),
    "unused, no_sync": Case(Unused, TINY | {"find_unused_parameters": True}, micro=2),
    "checkpointed": Case(Twice, TINY),
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
    optimizer = case.optimizer(net)
    for step in range(case.steps):
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
    names = ["cnn, several buckets", "cnn, backend", "unused", "checkpointed"]
    for found in pool.run(3, errors, names):
        assert max(found.values()) < 1e-9, found


@contextmanager
def replaced(owner: object, name: str, value: object) -> Iterator[None]:
    with patch.object(owner, name, value, create=True):
        yield


def sums() -> AbstractContextManager[None]:
    """Gradients are summed, not averaged."""
    return replaced(GradientMean, "scale", property(lambda self: 1.0, lambda self, value: None))


def unsent() -> AbstractContextManager[None]:
    """The first rank's values are not broadcast."""
    return replaced(ddp, "broadcast_all", lambda tensors, source, group: None)


def leftover() -> AbstractContextManager[None]:
    """Parameters without a gradient in a backward keep the earlier contents of their bucket."""
    sound = GradientMean._take

    def take(self: GradientMean, number: int) -> None:
        view = self.view_of[number]
        kept = view.clone()
        sound(self, number)
        if self.parameters[number].grad is None:
            view.copy_(kept)

    return replaced(GradientMean, "_take", take)


def touched() -> AbstractContextManager[None]:
    """A parameter that no rank used gets a gradient of zero."""
    return replaced(gradient_mean, "all_reduce", lambda flags, group: torch.ones_like(flags))


def half() -> AbstractContextManager[None]:
    """The last part of a bucket is not summed."""
    return replaced(
        reducer,
        "all_reduce",
        lambda group, bucket: collectives.all_reduce_async(
            bucket.buffer()[: bucket.buffer().numel() // 2], group
        ),
    )


MUTATIONS = {
    sums: "cnn, several buckets",
    unsent: "cnn",
    leftover: "unused",
    touched: "unused",
    half: "cnn",
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
    for found in pool.run(2, mutated, timeout_s=60):
        assert min(found.values()) > 1e-6, found
