"""Plants bugs of pipeline executors: each is caught, by the named quantities."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import pytest
from torch import Tensor

from parallel3d.build import Trainer
from parallel3d.data_parallel.engine import BucketedDataParallel
from parallel3d.models.transformer import Stage
from parallel3d.parameters.gradients import add_matmul, deferred_queue
from parallel3d.parameters.initializer import Initializer
from parallel3d.parameters.spec import ShardSpec
from parallel3d.parameters.state import state_of
from parallel3d.schedules.actions import Action, Kind, PipelineProgram, Step
from parallel3d.schedules.check import check
from parallel3d.schedules.orders import StageAssignment
from parallel3d.schedules.schedule import Schedule, make
from parallel3d.schedules.walk import ScheduleError, peer_of
from tests.distributed.cases import Case, Problem
from tests.distributed.harness import References, check_caught
from tests.distributed.pool import Pool
from tests.distributed.seams import (
    BUCKET,
    COMPILED,
    INITIAL_VALUES,
    PROGRAM,
    WEIGHT_GRADIENT,
    Mutation,
    planted,
)

pytestmark = pytest.mark.more

ALL_NUMBERS = {"loss", "grad norm", "evaluation", "weights"}


def swapped(steps: list[Step], rank: int, assignment: StageAssignment) -> list[Step]:
    """Returns a rank's steps with two receives of one kind from one peer exchanged.

    It takes the first pair where neither is needed in between, so that none is missing and each
    gets the other's data.
    """
    for kind, reader in ((Kind.RECV_F, Kind.F), (Kind.RECV_B, Kind.I)):
        receives = [
            (i, j, action)
            for i, group in enumerate(steps)
            if not isinstance(group, Action)
            for j, action in enumerate(group)
            if action.kind == kind
        ]
        for (i, j, one), (k, n, other) in pairwise(receives):
            if Action(reader, one.microbatch, one.chunk) in steps[i:k]:
                continue
            if peer_of(one, rank, assignment) != peer_of(other, rank, assignment):
                continue
            groups = {at: list(steps[at]) for at in (i, k)}
            groups[i][j], groups[k][n] = other, one
            return [tuple(groups[at]) if at in groups else step for at, step in enumerate(steps)]
    return steps


def with_swapped(program: PipelineProgram, assignment: StageAssignment) -> PipelineProgram:
    return [swapped(steps, rank, assignment) for rank, steps in enumerate(program)]


@planted(PROGRAM)
def receives_swapped(sound: Any, trainer: Trainer, schedule: Schedule) -> None:
    """Messages match by position: a rank whose program is in another order computes on the wrong
    data."""
    sound(trainer, schedule)
    trainer.program = swapped(trainer.program, trainer.groups.pp.index, schedule.assignment)


@planted(PROGRAM)
def a_weight_gradient_dropped(sound: Any, trainer: Trainer, schedule: Schedule) -> None:
    """W of micro-batch 1 in the last chunk does nothing."""
    sound(trainer, schedule)
    dropped = Action(Kind.W, 1, schedule.assignment.chunks - 1)
    trainer.program = [step for step in trainer.program if step != dropped]


@planted(INITIAL_VALUES)
def chunks_start_as_clones(
    sound: Any, initializer: Initializer, shard: ShardSpec, out: Tensor
) -> None:
    """Every chunk of a rank draws the values of the first chunk's layers."""
    first = re.sub(r"layers\.(\d+)", lambda m: f"layers.{int(m[1]) % 2}", shard.name)
    sound(initializer, dataclasses.replace(shard, name=first), out)


@contextmanager
def buckets_told_with_the_input_gradient() -> Iterator[None]:
    """A weight counts as complete in I, and its bucket is summed before the last W."""

    def early(_: Any, weight: Tensor, grad: Tensor, x: Any) -> Tensor | None:
        def add() -> None:
            add_matmul(state_of(weight).main_grad, grad, x if isinstance(x, Tensor) else x())

        jobs = deferred_queue(weight)
        add() if jobs is None else jobs.append(add)
        state_of(weight).register_grad_ready()
        return None

    def at_once(sound: Any, engine: BucketedDataParallel, index: int) -> None:
        sound(engine, index)
        engine.works[-1].wait()

    with WEIGHT_GRADIENT.replaced(early), BUCKET.replaced(at_once):
        yield


@planted(COMPILED)
def the_compiler_reuses_operands(sound: Any, stages: Sequence[Stage], saves_operands: bool) -> None:
    """Compiled blocks overwrite memory that a later W reads."""
    assert saves_operands
    sound(stages, saves_operands=False)


SGD = Problem(
    "llama_tiny", "sgd", tied=False, optim=(("clip_grad", 0.0), ("lr", 0.1)), layers=4, steps=2,
    batch=10,
)  # fmt: skip
# AdamW is used because without evaluation there is one graph less to compile. One stage with one
# plain layer has the fewest kernels, and defers its weight gradients, too.
ONE_LAYER = Problem(
    "gpt_tiny", "adamw", tied=False, model=(("bias", False), ("norm", "rmsnorm")), layers=1,
    steps=2, batch=4,
)  # fmt: skip
TWO_CHUNKS = (("vpp", 2),)
PLANTED = [
    pytest.param(
        receives_swapped, (1, 2, 1), Case(SGD, "interleaved_zb", microbatches=5, keys=TWO_CHUNKS),
        ALL_NUMBERS, id="swapped-receives",
    ),
    pytest.param(
        a_weight_gradient_dropped, (1, 2, 1), Case(SGD, "zbv", microbatches=5, keys=TWO_CHUNKS),
        ALL_NUMBERS, id="dropped-w",
    ),
    pytest.param(
        chunks_start_as_clones, (1, 2, 1),
        Case(SGD, "interleaved", microbatches=5, keys=TWO_CHUNKS),
        ALL_NUMBERS | {"initial weights"}, id="chunks-as-clones",
    ),
    pytest.param(
        buckets_told_with_the_input_gradient, (1, 2, 2),
        Case(SGD, "zb_h1", microbatches=5, bucket_cap_mb=0.02),
        ALL_NUMBERS | {"replicas"}, id="bucket-before-the-last-w",
    ),
    pytest.param(
        the_compiler_reuses_operands, (1, 1, 1),
        Case(ONE_LAYER, "zb_h1", microbatches=2, compile=True),
        ALL_NUMBERS - {"evaluation"}, id="operands-reused",
    ),
]  # fmt: skip


@pytest.mark.parametrize(("mutation", "sizes", "case", "told_by"), PLANTED)
def test_a_planted_bug_is_caught(
    mutation: Mutation,
    sizes: tuple[int, int, int],
    case: Case,
    told_by: set[str],
    pool: Pool,
    references: References,
) -> None:
    check_caught(mutation, sizes, case, told_by, pool, references)


def test_the_checker_refuses_swapped_receives_before_they_run() -> None:
    made = make("interleaved_zb", 2, 5, 2)
    program = with_swapped(made.program(), made.assignment)
    assert program != made.program()
    with pytest.raises(ScheduleError, match="is sent as"):
        check(program, 5, made.assignment)


def test_the_checker_refuses_a_weight_gradient_before_its_input_gradient() -> None:
    made = make("zb_h1", 2, 5)
    program = made.program()
    w = program[1].index(Action(Kind.W, 2))
    program[1].insert(program[1].index(Action(Kind.I, 2)), program[1].pop(w))
    with pytest.raises(ScheduleError, match="rank 1 does W2 before I2"):
        check(program, 5, made.assignment)
