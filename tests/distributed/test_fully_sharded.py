"""Tests that zero=2 and zero=3 by FSDP2 train the reference's model, and keep its slices."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch

from parallel3d.blueprint.layout import Layout
from parallel3d.comm.process_groups import shards_and_replicas
from parallel3d.data_parallel.fully_sharded import first_row
from tests.distributed.cases import Case, Problem
from tests.distributed.harness import References, check_cases, make_trainer, with_copies_of_two
from tests.distributed.pool import Pool

GPT = Problem("gpt_tiny", "sgd", tied=True)
# All parameters of the second of two stages, except the tied table.
FROZEN_STAGE = (("freeze", ("layers.2.*", "final_norm.*")),)
HALF_COPIES = ("ddp.shard_size", 2)
EVERY, ONCE = (("ddp.reduce_every_microbatch", every) for every in (True, False))
# Rows that dp does not divide: 3 over 4 ranks leaves the last rank without rows, and so does 5 over
# 4.
ODD = (("ffn_hidden_size", 3), ("vocab_size", 5), ("vocab_multiple", 5))


def zero(stage: int, problem: Problem = GPT, *keys: tuple[str, Any], **way: Any) -> Case:
    return Case(problem, keys=(("zero", stage), *keys), **way)


FIVE = replace(GPT, layers=5, steps=2)


def chunked(
    stage: int, schedule: str, *keys: tuple[str, Any], chunks: int = 2, problem: Problem = FIVE
) -> Case:
    keys = (("zero", stage), ("vpp", chunks), *keys)
    return Case(problem, schedule, microbatches=4, keys=keys)


# The matrix has both stages with everything else, but neither these sizes, nor a stage without
# anything to train, nor both of these cases in one: a single micro-batch, and a V, whose head's
# gradient waits for the embedding's alone.
CASES = {
    (1, 1, 4): [
        zero(2, replace(GPT, model=ODD), microbatches=2),
        zero(3, replace(GPT, model=ODD), microbatches=2),
    ],
    (1, 2, 2): [
        zero(3, replace(GPT, optimizer="adamw", optim=FROZEN_STAGE), EVERY),
        replace(chunked(2, "zbv"), microbatches=1),
    ],
}


@pytest.mark.nightly  # the matrix holds most of these in the set of every change
@pytest.mark.parametrize("sizes", CASES, ids=lambda s: "tp{}-pp{}-dp{}".format(*s))
def test_sharded_training_equals_the_reference(
    sizes: tuple[int, int, int], pool: Pool, references: References
) -> None:
    check_cases(sizes, CASES[sizes], pool, references)


def test_groups_of_copies_and_replicas() -> None:
    inner, outer = shards_and_replicas(Layout(tp=2, dp=4), 2)
    assert inner == [[0, 2], [4, 6], [1, 3], [5, 7]]
    assert outer == [[0, 4], [2, 6], [1, 5], [3, 7]]
    assert shards_and_replicas(Layout(tp=2, dp=4), 4) is None


@pytest.mark.parametrize(("rows", "ranks"), [(8, 4), (5, 4), (3, 4), (1, 2), (7, 3)])
def test_shards_equal_torch_chunk(rows: int, ranks: int) -> None:
    starts = [first_row(rows, ranks, rank) for rank in range(ranks + 1)]
    lengths = [len(chunk) for chunk in torch.arange(rows).chunk(ranks)]
    assert [b - a for a, b in pairwise(starts)] == [
        *lengths,
        *[0] * (ranks - len(lengths)),
    ]


def slices_of_a_run(stage: int, steps: int) -> list[Any]:
    """Returns slices of this rank after `steps`; another trainer that continues from copies of them
    takes the same next two steps."""
    groups = with_copies_of_two(Layout(tp=1, dp=4))
    problem = Problem("gpt_tiny", "adamw", True, model=ODD)
    case = Case(problem, keys=(("zero", stage), HALF_COPIES))
    trainer = make_trainer(case, groups)
    for _ in range(steps):
        trainer.train_step()
    saved = [
        (s.name, s.start, {k: v.clone() for k, v in s.values.items()}, s.copies, s.spec.shape)
        for s in trainer.parameter_slices()
    ]
    progress = trainer.progress()
    expected = [trainer.train_step() for _ in range(2)]

    other = make_trainer(case, groups)
    other.train_step()
    other.evaluate()  # an evaluation leaves gathered parameters behind
    by_name = {(name, start): values for name, start, values, _, _ in saved}
    for s in other.parameter_slices():
        for key, value in s.values.items():
            value.copy_(by_name[s.name, s.start][key])
    other.restore(progress)
    resumed = [other.train_step() for _ in range(2)]
    groups.close()
    assert resumed == expected, (resumed, expected)
    return [(n, s, v["parameter"].numpy(), r, shape) for n, s, v, r, shape in saved]


def test_slices_cover_every_element_and_resume_the_run(pool: Pool) -> None:
    by_rank = pool.run(4, slices_of_a_run, 3, 2)
    times: dict[str, np.ndarray] = {}
    copies: Counter[tuple[str, int, bytes]] = Counter()
    for slices in by_rank:
        for name, start, values, held, shape in slices:
            times.setdefault(name, np.zeros(int(np.prod(shape)), dtype=int))
            assert held.count == 2
            times[name][start : start + len(values)] += held.is_first
            copies[name, start, values.tobytes()] += 1
    assert all((covered == 1).all() for covered in times.values())
    assert set(copies.values()) == {2}, "replicas hold equal bits"
