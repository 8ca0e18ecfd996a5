"""Tests gradient buckets in bf16: the rounded values, and the number of roundings."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from parallel3d.blueprint.layout import Layout
from parallel3d.comm import collectives
from parallel3d.comm.process_groups import ProcessGroups
from parallel3d.data_parallel.comm_hooks import InBf16
from parallel3d.data_parallel.reducer import GradBucket
from parallel3d.run.keys import LaunchConfig
from tests.distributed.cases import Case, Problem
from tests.distributed.harness import References, differences, relative, run_cases
from tests.distributed.pool import Pool

Mutation = Callable[[], AbstractContextManager[None]]


def groups_of(dp: int, shared_memory: bool) -> ProcessGroups:
    launch = LaunchConfig(shared_memory=shared_memory)
    groups = ProcessGroups.create(Layout(dp=dp), "cpu", 60, launch)
    assert (groups.dp.shared is not None) == shared_memory
    return groups


def of_rank(rank: int, numel: int, dtype: torch.dtype) -> Tensor:
    generator = torch.Generator().manual_seed(100 * numel + rank)
    return torch.randn(numel, generator=generator, dtype=dtype)


@contextmanager
def rounded_twice() -> Iterator[None]:
    """Plants a bug: contributions are added in bf16, and rounded after every addition."""

    def add_in_bf16(self: InBf16) -> None:
        self.exchanging.wait()
        parts = self.received.view(self.group.size, -1)
        mine = parts[0].clone()
        for part in parts[1:]:
            mine += part
        total = collectives.all_gather(mine, self.group)
        self.tensor.copy_(total[: self.tensor.numel()])

    with patch.object(InBf16, "wait", add_in_bf16):
        yield


def bf16_sums(mutation: Mutation = nullcontext) -> list[list[bool]]:
    """Returns the result by transport: shared memory, and the backend."""
    return [bf16_sums_by(way, mutation) for way in (True, False)]


def bf16_sums_by(shared_memory: bool, mutation: Mutation) -> list[bool]:
    """Returns whether the sums of three buckets, all in flight at once, agree with the
    docstring."""
    dp = dist.get_world_size()
    groups = groups_of(dp, shared_memory)
    kinds = [(5003, torch.float32), (3, torch.float32), (256, torch.float64)]
    buckets = [of_rank(groups.rank, n, dtype) for n, dtype in kinds]
    with mutation():
        works = [InBf16(groups.dp, bucket_of(bucket)) for bucket in buckets]
        for work in works:
            work.wait()
    groups.close()
    same = []
    for bucket, (n, dtype) in zip(buckets, kinds, strict=True):
        everyone = torch.stack([of_rank(rank, n, dtype).bfloat16() for rank in range(dp)])
        expected = everyone.sum(0, dtype=torch.float32).bfloat16()
        same.append(torch.equal(bucket, expected.to(dtype)))
    return same


def test_bf16_rounds_each_contribution_and_the_sum(pool: Pool) -> None:
    assert pool.run(4, bf16_sums) == [[[True] * 3] * 2] * 4


@pytest.mark.more
def test_other_ways_to_sum_in_bf16_are_detected(pool: Pool) -> None:
    found = pool.run(4, bf16_sums, rounded_twice)
    assert not any(same[0] for of_rank in found for same in of_rank), found


def bucket_of(flat: Tensor) -> GradBucket:
    return GradBucket(0, True, flat, [nn.Parameter(torch.zeros_like(flat))])


def test_training_with_bf16_buckets_stays_near_the_reference(
    pool: Pool, references: References
) -> None:
    problem = Problem("llama_tiny", "sgd", tied=True)
    case = Case(problem, bucket_cap_mb=0.01, keys=(("ddp.comm_hook", "bf16"),))
    outcomes = [rank[0] for rank in pool.run(4, run_cases, (1, 2, 2), [case])]
    expected = references.of(problem)
    found = differences(outcomes, expected, problem)
    # The quantity "replicas" is not among them.
    assert found.keys() == {"loss", "grad norm", "evaluation", "weights"}, found
    for step, loss in zip(outcomes[0].steps, expected.run.losses, strict=True):
        assert relative(step.loss, loss) < 5e-3
