"""Gradient buckets in bf16 and by PowerSGD: what is rounded, what is lost, and what comes back."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from types import SimpleNamespace
from unittest.mock import patch

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook

from parallel3d.blueprint.buckets import compressed_rank
from parallel3d.blueprint.layout import Layout
from parallel3d.comm import collectives
from parallel3d.comm.group import Group
from parallel3d.comm.process_groups import ProcessGroups
from parallel3d.config.schema import LaunchConfig
from parallel3d.data_parallel.comm_hooks import InBf16, PowerSGD, orthonormal
from parallel3d.data_parallel.reducer import GradBucket
from tests.distributed.cases import Case, Problem
from tests.distributed.harness import References, differences, relative, run_cases
from tests.distributed.pool import Pool

Mutation = Callable[[], AbstractContextManager[None]]
SHAPES = [(24, 20), (7,), (20, 24), (3, 2), (11,)]
SIZES = [int(np.prod(shape)) for shape in SHAPES]
RANK = 3
STEPS = 40
SOUND_ALL_REDUCE = dist.all_reduce


def groups_of(dp: int, shared_memory: bool) -> ProcessGroups:
    launch = LaunchConfig(shared_memory=shared_memory)
    groups = ProcessGroups.create(Layout(dp=dp), "cpu", 60, launch)
    assert (groups.dp.shared is not None) == shared_memory
    return groups


def of_rank(rank: int, numel: int, dtype: torch.dtype, scale: float = 1.0) -> Tensor:
    generator = torch.Generator().manual_seed(100 * numel + rank)
    return scale * torch.randn(numel, generator=generator, dtype=dtype)


@contextmanager
def rounded_twice() -> Iterator[None]:
    """The contributions are added in bf16: rounded again after every addition."""

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
    """By way, through shared memory and through the backend."""
    return [bf16_sums_by(way, mutation) for way in (True, False)]


def bf16_sums_by(shared_memory: bool, mutation: Mutation) -> list[bool]:
    """Whether the sums of three buckets, all under way at once, are what the docstring says."""
    dp = dist.get_world_size()
    groups = groups_of(dp, shared_memory)
    kinds = [(5003, torch.float32), (3, torch.float32), (256, torch.float64)]
    buckets = [of_rank(groups.rank, n, dtype) for n, dtype in kinds]
    with mutation():
        works = [InBf16(groups.dp, bucket_of(bucket, [bucket.shape])) for bucket in buckets]
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
def test_sums_in_bf16_are_told_apart(pool: Pool) -> None:
    found = pool.run(4, bf16_sums, rounded_twice)
    assert not any(same[0] for of_rank in found for same in of_rank), found


def bucket_of(flat: Tensor, shapes: Sequence[Sequence[int]] = SHAPES) -> GradBucket:
    return GradBucket(0, True, flat, [nn.Parameter(flat.new_zeros(shape)) for shape in shapes])


@contextmanager
def no_error_feedback() -> Iterator[None]:
    """What a step loses is lost."""
    sound = PowerSGD.__call__

    def forgetful(self: PowerSGD, group: Group, bucket: GradBucket) -> object:
        for matrix in self.factors_of(bucket).matrices:
            matrix.error.zero_()
        return sound(self, group, bucket)

    with patch.object(PowerSGD, "__call__", forgetful):
        yield


def over_steps(mutation: Mutation = nullcontext) -> dict[str, object]:
    """A constant gradient over many steps: how far one output, and the mean of all, is off."""
    groups = groups_of(2, shared_memory=True)
    own = of_rank(groups.rank, sum(SIZES), torch.float64)
    true = sum(of_rank(rank, sum(SIZES), torch.float64) for rank in range(2))
    bucket = own.clone()
    given, hook = bucket_of(bucket), PowerSGD(RANK, start=0)
    mean, first = torch.zeros_like(true), None
    with mutation():
        for _ in range(STEPS):
            bucket.copy_(own)
            hook(groups.dp, given).wait()
            mean += bucket / STEPS
            first = bucket.clone() if first is None else first
    owed = torch.zeros_like(true)
    for matrix in hook.factors_of(given).matrices:
        matrix.of(owed).copy_(matrix.error)
    dist.all_reduce(owed)
    groups.close()
    plain = torch.cat(
        [torch.full((n,), len(s) == 1 or n < 10) for s, n in zip(SHAPES, SIZES, strict=True)]
    )
    return {
        "first": ((first - true).norm() / true.norm()).item(),
        "mean": ((mean - true).norm() / true.norm()).item(),
        "not paid": ((STEPS * (mean - true) + owed).norm() / true.norm()).item(),
        "plain": ((first - true)[plain].abs().max()).item(),
        "bits": bucket.numpy().tobytes(),
    }


def test_powersgd_pays_back_what_it_loses(pool: Pool) -> None:
    found = pool.run(2, over_steps)
    assert found[0]["bits"] == found[1]["bits"], "replicas must stay replicas"
    for sound in found:
        assert sound["plain"] < 1e-12  # vectors and small matrices travel whole
        assert sound["first"] > 0.5  # rank 3 of random matrices of rank 20
        assert sound["mean"] < sound["first"] / 5
        assert sound["not paid"] < 1e-10  # outputs + Σ errors = Σ gradients


@pytest.mark.more
def test_forgotten_error_feedback_is_told(pool: Pool) -> None:
    for mutated in pool.run(2, over_steps, no_error_feedback):
        assert mutated["mean"] > 0.4
        assert mutated["not paid"] > 0.1


def of_low_rank() -> dict[str, float]:
    """Gradients of rank 1 on four ranks, with silence between: their sum is found exactly."""
    groups = groups_of(4, shared_memory=False)
    bucket = torch.zeros(sum(SIZES), dtype=torch.float64)
    given, hook = bucket_of(bucket), PowerSGD(4, start=0)
    found = {}
    for step, loudness in enumerate((1.0, 0.0, 1.0)):
        whole = []
        for rank in range(4):
            parts = []
            for shape, numel in zip(SHAPES, SIZES, strict=True):
                parts.append(of_rank(rank, numel, torch.float64, loudness))
                if numel > 100:
                    left, right = of_rank(rank + step, sum(shape), torch.float64).split(shape)
                    parts[-1] = loudness * torch.outer(left, right).flatten()
            whole.append(torch.cat(parts))
        bucket.copy_(whole[groups.rank])
        hook(groups.dp, given).wait()
        found[f"step {step}"] = (bucket - sum(whole)).abs().max().item()
    groups.close()
    return found


def test_powersgd_of_full_rank_is_the_sum(pool: Pool) -> None:
    for found in pool.run(4, of_low_rank):
        assert max(found.values()) < 1e-9, found


def at_once(tensor: Tensor, group: dist.ProcessGroup, async_op: bool) -> SimpleNamespace:
    """An all-reduce whose future is done, so that what hangs on it runs in this thread.

    In one of gloo's own threads it could be the last to hold the group, whose end that thread would
    then wait for: "Resource deadlock avoided", and the process is gone.
    """
    assert async_op
    SOUND_ALL_REDUCE(tensor, group=group)
    done: torch.futures.Future[list[Tensor]] = torch.futures.Future()
    done.set_result([tensor])
    return SimpleNamespace(get_future=lambda: done)


def beside_pytorch() -> float:
    """Both implementations from the same Q over ten steps: the largest difference of an output."""
    groups = groups_of(2, shared_memory=False)
    state = PowerSGDState(groups.dp.handle, RANK, start_powerSGD_iter=2)
    state.iter = 2
    ours = torch.zeros(sum(SIZES), dtype=torch.float64)
    given, hook = bucket_of(ours), PowerSGD(RANK, start=0)
    matrices = hook.factors_of(given).matrices
    state.q_memory_dict[0] = torch.cat([m.q.flatten() for m in matrices])
    state.p_memory_dict[0] = ours.new_zeros(sum(m.rows * RANK for m in matrices))
    worst = 0.0
    for step in range(10):
        own = of_rank(10 * step + groups.rank, sum(SIZES), torch.float64)
        ours.copy_(own)
        hook(groups.dp, given).wait()
        bucket = SimpleNamespace(
            buffer=lambda own=own: own,
            gradients=lambda own=own: [
                part.view(shape) for part, shape in zip(own.split(SIZES), SHAPES, strict=True)
            ],
            index=lambda: 0,
            is_last=lambda: True,
        )
        with patch.object(dist, "all_reduce", at_once):
            theirs = powerSGD_hook(state, bucket).wait()
        worst = max(worst, (2 * theirs - ours).abs().max().item())
    groups.close()
    return worst


def test_powersgd_is_that_of_pytorch(pool: Pool) -> None:
    assert max(pool.run(2, beside_pytorch)) < 1e-9


def test_ranks_of_matrices() -> None:
    assert compressed_rank(24, 20, 3) == 3
    assert compressed_rank(24, 20, 6) == 0  # the factors would be more than half of the matrix
    assert compressed_rank(4096, 2, 8) == 0


def test_dependent_columns_are_no_directions() -> None:
    column = torch.randn(50, 1, dtype=torch.float32)
    basis = orthonormal(torch.cat([column, 3 * column, torch.zeros(50, 1), -column], 1))
    torch.testing.assert_close(basis.t() @ basis, torch.diag(torch.tensor([1.0, 0, 0, 0])))


def test_training_with_bf16_buckets_stays_near_the_reference(
    pool: Pool, references: References
) -> None:
    problem = Problem("llama_tiny", "sgd", tied=True)
    case = Case(problem, bucket_cap_mb=0.01, keys=(("ddp.comm_hook", "bf16"),))
    outcomes = [rank[0] for rank in pool.run(4, run_cases, (1, 2, 2), [case])]
    expected = references.of(problem)
    found = differences(outcomes, expected, problem)
    assert found.keys() == {"loss", "grad norm", "evaluation", "weights"}, found  # not "replicas"
    for step, loss in zip(outcomes[0].steps, expected.run.losses, strict=True):
        assert relative(step.loss, loss) < 5e-3
