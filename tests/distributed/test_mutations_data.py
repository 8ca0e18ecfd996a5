"""Plants known bugs of data parallelism: each is caught, by exactly the named quantities.

This continues test_mutations. test_comm_hooks has sums in bf16.
"""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import FSDPModule

from parallel3d.build import Trainer
from parallel3d.comm import collectives
from parallel3d.comm.group import SINGLE, Group
from parallel3d.data.sampler import FirstSamples, Sample
from parallel3d.data_parallel.engine import BucketedDataParallel
from parallel3d.data_parallel.fully_sharded import FullyShardedDataParallel
from parallel3d.optim.optimizer import Optimizer
from parallel3d.parameters.initializer import Initializer
from parallel3d.parameters.spec import ShardSpec
from parallel3d.trainer import EvaluatedSet, Score, StepResult
from tests.distributed.cases import Case
from tests.distributed.harness import (
    References,
    check_caught,
    differences,
    plain_groups,
    run_cases,
)
from tests.distributed.pool import Pool
from tests.distributed.seams import (
    BUCKET,
    EVALUATION,
    FINISH_STEP,
    GATHERED_PARAMETERS,
    INITIAL_VALUES,
    LAST_MICROBATCH,
    LAST_SAMPLES,
    REDUCE_SCATTER,
    REPLICAS,
    START_STEP,
    STEP,
    UPDATE,
    Mutation,
    planted,
)
from tests.distributed.test_fully_sharded import HALF_COPIES, chunked, with_copies_of_two
from tests.distributed.test_mutations import ADAMW, ALL_NUMBERS, SGD

Engine = BucketedDataParallel | FullyShardedDataParallel

pytestmark = pytest.mark.more


@planted(FINISH_STEP)
def unfilled_buckets_left(sound: Any, engine: BucketedDataParallel) -> list[str]:
    """A bucket that still waits for a gradient at the end of the step is not reduced."""
    engine.reducer.started = len(engine.buckets)
    return sound(engine)


@planted(STEP)
def samples_by_the_last_size(sound: Any, trainer: Trainer) -> StepResult:
    """A step of another size than `global_batch_size` counts as that many samples."""
    result = sound(trainer)
    trainer.consumed_samples += trainer.config.global_batch_size - trainer.batch
    return result


@planted(START_STEP)
def gradients_kept(sound: Any, engine: Engine, microbatches: int) -> None:
    """The gradients of the previous step are still there."""
    kept = [segment.grad.clone() for segment in engine.segments]
    sound(engine, microbatches)
    for segment, grad in zip(engine.segments, kept, strict=True):
        segment.grad.copy_(grad)


@planted(BUCKET)
def divided_by_dp(sound: Any, engine: BucketedDataParallel, index: int) -> None:
    """The loss is a mean over all tokens already, and the reduction averages once more."""
    engine.buckets[index].grad.div_(engine.buckets[index].data.size)
    sound(engine, index)


@planted(START_STEP)
def divided_by_fsdp(sound: Any, engine: FullyShardedDataParallel, microbatches: int) -> None:
    """FSDP2 averages, as it does by default."""
    (held,) = engine.gradients  # all parameters are over the same ranks
    for unit in engine.units:
        unit.set_gradient_divide_factor(held.shards.size)
    sound(engine, microbatches)


@planted(REPLICAS)
def copies_not_summed(*_: Any) -> None:
    """Each copy of the model (HSDP) learns from the gradients of its own ranks."""


@planted(FINISH_STEP)
def copies_not_summed_at_the_end(sound: Any, engine: FullyShardedDataParallel) -> list[str]:
    """The same bug if the gradients of every micro-batch were scattered at once."""
    engine.every_microbatch = False
    unused = sound(engine)
    engine.every_microbatch = True
    return unused


@planted(LAST_MICROBATCH)
def only_the_last_microbatch_scattered(sound: Any, engine: FullyShardedDataParallel) -> None:
    """Newly reduced gradients replace the sums of the earlier micro-batches."""
    for flat in engine.gradients.values():
        flat.zero_()
    sound(engine)


@planted(REDUCE_SCATTER)
def neighbours_shard(_: Any, tensor: Tensor, group: Group) -> collectives.Work:
    """Rank r gets the sum of its shard in the place of shard r + 1, and steps shard r by the old
    contents of its place."""
    neighbours = tensor.chunk(group.size)[(group.index + 1) % group.size]
    return collectives.reduce_scatter_into(neighbours, tensor, group)


@planted(GATHERED_PARAMETERS)
def parameters_not_gathered(sound: Any, engine: BucketedDataParallel) -> None:
    """Each rank continues with its own shard of the new parameters and the rest of the old ones."""
    shards = [bucket.shards for bucket in engine.buckets]
    for bucket in engine.buckets:
        bucket.shards = SINGLE
    sound(engine)
    for bucket, was in zip(engine.buckets, shards, strict=True):
        bucket.shards = was


@planted(EVALUATION)
def not_gathered_before_evaluation(sound: Any, trainer: Trainer, of: EvaluatedSet) -> Score:
    """The last step's parameters are still being gathered when the evaluation reads them."""
    gathers = trainer.data_parallel.gathers
    gathers.works, works = {}, gathers.works
    found = sound(trainer, of)
    gathers.works = works
    return found


@planted(LAST_SAMPLES)
def sample_dropped_at_the_ragged_end(sound: Any, samples: FirstSamples, i: int) -> Sample:
    """A sample is missing in the last, incomplete global batch of a validation set."""
    return sound(samples, samples.count if i == samples.count - 1 else i)


@planted(LAST_SAMPLES)
def ragged_end_filled_up(_: Any, samples: FirstSamples, i: int) -> Sample:
    """The last global batch of a validation set is filled up with samples that count."""
    return samples.source.sample(i)


@planted(INITIAL_VALUES)
def replicas_start_apart(
    sound: Any, initializer: Initializer, shard: ShardSpec, out: Tensor
) -> None:
    """Initial values depend on the data-parallel rank, and the first rank's are not broadcast."""
    sound(replace(initializer, seed=initializer.seed + dist.get_rank()), shard, out)


@planted(UPDATE)
def replicas_drift(sound: Any, optimizer: Optimizer, learning_rate: float, *rest: float) -> None:
    """A rank's own rounding error enters its update: one part in a million, in every step."""
    sound(optimizer, learning_rate * (1 + 1e-6 * dist.get_rank()), *rest)


@planted(LAST_MICROBATCH)
def other_chunks_not_reduced(sound: Any, engine: FullyShardedDataParallel) -> None:
    """The last backward reduces only the gradients of its own chunk."""
    sound(engine)
    for unit in engine.root.stages[1].modules():
        if isinstance(unit, FSDPModule):
            unit.set_requires_gradient_sync(False, recurse=False)


def zero(stage: int, *keys: tuple[str, Any], **way: Any) -> Case:
    return Case(SGD, keys=(("zero", stage), *keys), **way)


DRIFT = ALL_NUMBERS | {"replicas"}
LATE = Case(SGD, overlap=False)
HALVES = [zero(3, HALF_COPIES, ("ddp.reduce_every_microbatch", every)) for every in (False, True)]
IN_FP32 = Case(replace(ADAMW, precision="fp32"))
PLANTED = [
    pytest.param(unfilled_buckets_left, LATE, DRIFT, id="unfilled-bucket"),
    # The loss of a third step would differ, too.
    pytest.param(gradients_kept, Case(SGD), ALL_NUMBERS - {"loss"}, id="gradients-kept"),
    pytest.param(gradients_kept, zero(2), ALL_NUMBERS - {"loss"}, id="sharded-gradients-kept"),
    pytest.param(divided_by_dp, Case(SGD), ALL_NUMBERS, id="averaged-twice-sgd"),
    # AdamW does not see a scale: the losses agree, and only the norm differs.
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
        Case(replace(SGD, batches=((0, SGD.batch // 2), (1, SGD.batch)))),
        ALL_NUMBERS,
        id="samples-by-the-last-size",
    ),
    pytest.param(replicas_start_apart, Case(SGD), DRIFT, id="replicas-start-apart"),
    pytest.param(replicas_drift, Case(SGD), DRIFT, id="replicas-drift"),
]


def outcomes_of(pool: Pool, cases: list[Case], mutation: Mutation = nullcontext) -> list[list[Any]]:
    """Returns, by case, the results of all ranks: copies of two ranks on four, all others on
    two."""
    halves = HALF_COPIES in cases[0].keys
    world, groups = (4, with_copies_of_two) if halves else (2, plain_groups)
    by_rank = pool.run(world, run_cases, (1, 1, world), cases, mutation, groups)
    return [list(outcomes) for outcomes in zip(*by_rank, strict=True)]


def test_without_a_bug_no_difference_is_reported(pool: Pool, references: References) -> None:
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


def test_unreduced_gradients_of_another_chunk_are_detected(
    pool: Pool, references: References
) -> None:
    case = chunked(2, "interleaved")
    check_caught(other_chunks_not_reduced, (1, 2, 2), case, ALL_NUMBERS, pool, references)
