"""Known bugs of data parallelism, planted: each is caught, and by exactly the quantities named.

As in test_mutations, of which this is another part. PowerSGD without its error feedback and sums in
bf16 are in test_comm_hooks, buckets without an agreed order in test_measured_order.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import pytest
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import FSDPModule

import parallel3d.trainer
from parallel3d.comm import collectives
from parallel3d.comm.group import Group
from parallel3d.data.sampler import FirstSamples
from parallel3d.data_parallel.engine import BucketedDataParallel
from parallel3d.data_parallel.fully_sharded import FullyShardedDataParallel
from parallel3d.data_parallel.reducer import GradBucket
from parallel3d.models import parallelize
from parallel3d.optim import Optimizer
from parallel3d.parameters.sharding import Initializer, ShardSpec
from parallel3d.trainer import StepResult, Trainer
from tests.distributed.cases import Case
from tests.distributed.harness import (
    References,
    check_caught,
    differences,
    plain_groups,
    run_cases,
)
from tests.distributed.pool import Pool
from tests.distributed.test_engines import HALVED
from tests.distributed.test_fully_sharded import HALF_COPIES, chunked, with_copies_of_two
from tests.distributed.test_mutations import ADAMW, ALL_NUMBERS, SGD, Mutation


@contextmanager
def unfilled_buckets_left() -> Iterator[None]:
    """A bucket that still waits for a gradient at the end of the step is not reduced."""

    def finish_step(self: BucketedDataParallel) -> list[str]:
        for work in self.works:
            work.wait()
        self.syncing = False
        return []

    with patch.object(BucketedDataParallel, "finish_step", finish_step):
        yield


@contextmanager
def samples_by_the_last_size() -> Iterator[None]:
    """A step of another size than `global_batch_size` counts as many samples as that one."""
    sound = Trainer.train_step

    def train_step(self: Trainer) -> StepResult:
        result = sound(self)
        self.consumed_samples += self.config.global_batch_size - self.batch
        return result

    with patch.object(Trainer, "train_step", train_step):
        yield


@contextmanager
def gradients_kept() -> Iterator[None]:
    """The gradients of the step before are still in the buckets."""
    sound = BucketedDataParallel.start_step

    def start_step(self: BucketedDataParallel, microbatches: int) -> None:
        kept = [bucket.grad.clone() for bucket in self.buckets]
        sound(self, microbatches)
        for bucket, grad in zip(self.buckets, kept, strict=True):
            bucket.grad.copy_(grad)

    with patch.object(BucketedDataParallel, "start_step", start_step):
        yield


@contextmanager
def sharded_gradients_kept() -> Iterator[None]:
    """The same, of FSDP2's gradients."""
    sound = FullyShardedDataParallel.start_step

    def start_step(self: FullyShardedDataParallel, microbatches: int) -> None:
        kept = self.gradients.clone()
        sound(self, microbatches)
        self.gradients.copy_(kept)

    with patch.object(FullyShardedDataParallel, "start_step", start_step):
        yield


@contextmanager
def divided_by_dp() -> Iterator[None]:
    """The loss is a mean over all tokens already, and the reduction averages once more."""

    def mean(group: Group, bucket: GradBucket) -> collectives.Work:
        return collectives.all_reduce_async(bucket.buffer().div_(group.size), group)

    with patch.object(parallelize, "all_reduce", mean):
        yield


@contextmanager
def divided_by_fsdp() -> Iterator[None]:
    """FSDP2 keeps its habit of averaging."""
    with patch.object(FSDPModule, "set_gradient_divide_factor", lambda *_: None):
        yield


@contextmanager
def copies_not_summed() -> Iterator[None]:
    """Each copy of the model (HSDP) learns from the gradients of its own ranks."""
    with patch.object(FSDPModule, "set_all_reduce_hook", lambda *_: None):
        yield


@contextmanager
def copies_not_summed_at_the_end() -> Iterator[None]:
    """The same, where the gradients of every micro-batch were scattered at once."""
    sound = FullyShardedDataParallel.finish_step

    def finish_step(self: FullyShardedDataParallel) -> list[str]:
        self.every_microbatch = False
        unused = sound(self)
        self.every_microbatch = True
        return unused

    with patch.object(FullyShardedDataParallel, "finish_step", finish_step):
        yield


@contextmanager
def only_the_last_microbatch_scattered() -> Iterator[None]:
    """What was reduced replaces the sums of the micro-batches before."""
    sound = FullyShardedDataParallel.start_last_microbatch

    def start_last_microbatch(self: FullyShardedDataParallel) -> None:
        self.gradients.zero_()
        sound(self)

    with patch.object(FullyShardedDataParallel, "start_last_microbatch", start_last_microbatch):
        yield


@contextmanager
def neighbours_shard() -> Iterator[None]:
    """Rank r gets the sum of shard r + 1 and steps shard r by what it had there itself."""

    def own_shard(tensor: Tensor, group: Group) -> Tensor:
        return tensor.chunk(group.size)[(group.index + 1) % group.size]

    sound = collectives.reduce_scatter_bucket

    def reduce_scatter_bucket(tensor: Tensor, group: Group) -> collectives.Work:
        with patch.object(collectives, "own_shard", own_shard):
            return sound(tensor, group)

    with patch.object(collectives, "reduce_scatter_bucket", reduce_scatter_bucket):
        yield


@contextmanager
def parameters_not_gathered() -> Iterator[None]:
    """Each rank goes on with its own shard of the new parameters and the rest of the old ones."""
    sound = BucketedDataParallel.all_gather_params

    def all_gather_params(self: BucketedDataParallel) -> None:
        self.sharded, was = False, self.sharded
        sound(self)
        self.sharded = was

    with patch.object(BucketedDataParallel, "all_gather_params", all_gather_params):
        yield


@contextmanager
def not_gathered_before_evaluation() -> Iterator[None]:
    """The last step's parameters are still on their way when the evaluation reads them."""
    sound = Trainer.evaluate

    def evaluate(self: Trainer) -> float:
        engine = self.data_parallel
        self.stages[0].pre_forward = lambda part: None
        with patch.object(engine, "wait_for_all_gathers", lambda: None):
            found = sound(self)
        self.stages[0].pre_forward = engine.pre_forward
        return found

    with patch.object(Trainer, "evaluate", evaluate):
        yield


@contextmanager
def sample_dropped_at_the_ragged_end() -> Iterator[None]:
    """Of the last global batch of a validation set, which it does not fill, a sample is missing."""
    fewer = lambda source, count: FirstSamples(source, count - 1)  # noqa: E731
    with patch.object(parallel3d.trainer, "FirstSamples", fewer):
        yield


@contextmanager
def ragged_end_filled_up() -> Iterator[None]:
    """The last global batch of a validation set is filled up by samples that count."""
    with patch.object(parallel3d.trainer, "FirstSamples", lambda source, count: source):
        yield


@contextmanager
def replicas_start_apart() -> Iterator[None]:
    """Initial values depend on the data-parallel rank, and nobody broadcasts those of the first."""
    sound = Initializer.fill

    def fill(self: Initializer, piece: ShardSpec, out: Tensor) -> None:
        sound(replace(self, seed=self.seed + dist.get_rank()), piece, out)

    with patch.object(Initializer, "fill", fill):
        yield


@contextmanager
def replicas_drift() -> Iterator[None]:
    """A rank's own rounding enters its update: one part in a million, in every step."""
    sound = Optimizer.step

    def step(self: Optimizer, learning_rate: float, *rest: float) -> None:
        sound(self, learning_rate * (1 + 1e-6 * dist.get_rank()), *rest)

    with patch.object(Optimizer, "step", step):
        yield


@contextmanager
def other_chunks_not_reduced() -> Iterator[None]:
    """The last backward reduces its own chunk's gradients alone."""
    sound = FullyShardedDataParallel.start_last_microbatch

    def start_last_microbatch(self: FullyShardedDataParallel) -> None:
        sound(self)
        for unit in self.root.stages[1].modules():
            if isinstance(unit, FSDPModule):
                unit.set_requires_gradient_sync(False, recurse=False)

    with patch.object(FullyShardedDataParallel, "start_last_microbatch", start_last_microbatch):
        yield


def zero(stage: int, *keys: tuple[str, Any], **way: Any) -> Case:
    return Case(SGD, keys=(("zero", stage), *keys), **way)


DRIFT = ALL_NUMBERS | {"replicas"}
LATE = Case(SGD, overlap=False)
HALVES = [zero(3, HALF_COPIES, ("ddp.reduce_every_microbatch", every)) for every in (False, True)]
IN_FP32 = Case(replace(ADAMW, precision="fp32"))
PLANTED = [
    pytest.param(unfilled_buckets_left, LATE, DRIFT, id="unfilled-bucket"),
    pytest.param(gradients_kept, Case(SGD), ALL_NUMBERS, id="gradients-kept"),
    pytest.param(sharded_gradients_kept, zero(2), ALL_NUMBERS, id="sharded-gradients-kept"),
    pytest.param(divided_by_dp, Case(SGD), ALL_NUMBERS, id="averaged-twice-sgd"),
    # AdamW does not see a scale: the losses agree, and the norm alone tells.
    pytest.param(divided_by_dp, IN_FP32, {"grad norm"}, id="averaged-twice-adamw"),
    pytest.param(divided_by_fsdp, zero(3), ALL_NUMBERS, id="averaged-by-fsdp"),
    pytest.param(only_the_last_microbatch_scattered, zero(3), ALL_NUMBERS, id="last-scattered"),
    pytest.param(copies_not_summed, HALVES[0], DRIFT, id="copies-apart"),
    pytest.param(copies_not_summed_at_the_end, HALVES[1], DRIFT, id="copies-apart-at-the-end"),
    pytest.param(neighbours_shard, zero(1), ALL_NUMBERS, id="neighbours-shard"),
    pytest.param(parameters_not_gathered, zero(1), DRIFT, id="not-gathered"),
    pytest.param(
        not_gathered_before_evaluation,
        zero(1, bucket_cap_mb=1e-3),
        {"evaluation"},
        id="late-gather",
    ),
    pytest.param(sample_dropped_at_the_ragged_end, Case(SGD), {"evaluation"}, id="ragged-dropped"),
    pytest.param(ragged_end_filled_up, Case(SGD), {"evaluation"}, id="ragged-filled-up"),
    pytest.param(
        samples_by_the_last_size,
        Case(replace(SGD, batches=HALVED)),
        ALL_NUMBERS,
        id="samples-by-the-last-size",
    ),
    pytest.param(replicas_start_apart, Case(SGD), DRIFT, id="replicas-start-apart"),
    pytest.param(replicas_drift, Case(SGD), DRIFT, id="replicas-drift"),
]


def outcomes_of(pool: Pool, cases: list[Case], mutation: Mutation = nullcontext) -> list[list[Any]]:
    """By case, of all ranks: copies of two ranks on four, all else on two."""
    halves = HALF_COPIES in cases[0].keys
    world, groups = (4, with_copies_of_two) if halves else (2, plain_groups)
    by_rank = pool.run(world, run_cases, (1, 1, world), cases, mutation, groups)
    return [list(outcomes) for outcomes in zip(*by_rank, strict=True)]


def test_without_a_bug_nothing_is_told(pool: Pool, references: References) -> None:
    cases = list(dict.fromkeys(parameters.values[1] for parameters in PLANTED))
    cases = [case for case in cases if case not in HALVES]
    sound = [*outcomes_of(pool, cases), *outcomes_of(pool, HALVES)]
    for case, outcomes in zip([*cases, *HALVES], sound, strict=True):
        assert differences(outcomes, references.of(case.problem), case.problem) == {}, case


@pytest.mark.parametrize(("mutation", "case", "told_by"), PLANTED)
def test_a_planted_bug_of_data_parallelism_is_caught(
    mutation: Mutation, case: Case, told_by: set[str], pool: Pool, references: References
) -> None:
    (outcomes,) = outcomes_of(pool, [case], mutation)
    found = differences(outcomes, references.of(case.problem), case.problem)
    assert found.keys() == told_by, found


def test_gradients_that_another_chunk_left_are_missed(pool: Pool, references: References) -> None:
    case = chunked(2, "interleaved")
    check_caught(other_chunks_not_reduced, (1, 2, 2), case, ALL_NUMBERS, pool, references)
