"""zero=2 and zero=3 by FSDP2 train the reference's model, and hold a shard of it."""

from __future__ import annotations

import gc
from collections import Counter
from contextlib import nullcontext
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensor

from parallel3d.data_parallel.fully_sharded import first_row
from parallel3d.topology.layout import Layout
from parallel3d.topology.process_groups import ProcessGroups, shards_and_replicas
from tests.distributed.cases import Case, Problem
from tests.distributed.harness import (
    References,
    differences,
    make_trainer,
    plain_groups,
    run_cases,
)
from tests.distributed.pool import Pool

GPT = Problem("gpt_tiny", "sgd", tied=True)
LLAMA = Problem("llama_tiny", "adamw", tied=False)
HALF_COPIES = ("ddp.shard_size", 2)
# Rows that dp does not divide: 3 over 4 ranks leaves the last without any, 5 over 4 as well.
ODD = (("ffn_hidden_size", 3), ("vocab_size", 5), ("vocab_multiple", 5))


def zero(stage: int, problem: Problem = GPT, *keys: tuple[str, Any], **way: Any) -> Case:
    return Case(problem, keys=(("zero", stage), *keys), **way)


def with_copies_of_two(layout: Layout) -> ProcessGroups:
    levels = shards_and_replicas(layout, 2)
    return ProcessGroups.create(layout, "cpu", timeout_s=60, levels=levels)


CASES = {
    (1, 1, 2): [
        zero(2, replace(LLAMA, tied=True, precision="fp32")),
        zero(3, replace(GPT, precision="fp32"), ("recompute", "full"), microbatches=1),
        zero(3, replace(LLAMA, optim=(("clip_grad", 0.3),)), ("recompute", "selective")),
    ],
    (1, 1, 4): [zero(2, replace(GPT, model=ODD), microbatches=2), zero(3, LLAMA)],
    (1, 2, 2): [
        zero(2),
        zero(3, replace(GPT, optimizer="adamw")),
        zero(3, replace(LLAMA, optimizer="sgd"), schedule="gpipe"),
    ],
    (2, 1, 2): [
        zero(2, embedding="replicated", sp=True),
        zero(3, sp=True),
        zero(3, replace(LLAMA, model=(("num_query_groups", 1),)), sp=True),
        zero(2, replace(LLAMA, optimizer="sgd", tied=True), parallel_output=False),
        zero(2, replace(GPT, precision="bf16"), sp=True),
        zero(3, replace(LLAMA, precision="fp16")),
    ],
}


@pytest.mark.parametrize("sizes", CASES, ids=lambda s: "tp{}-pp{}-dp{}".format(*s))
def test_sharded_training_is_the_reference(
    sizes: tuple[int, int, int], pool: Pool, references: References
) -> None:
    compare(sizes, CASES[sizes], pool, references, plain_groups)


def test_copies_over_two_ranks_each_are_the_reference(pool: Pool, references: References) -> None:
    cases = [zero(2, GPT, HALF_COPIES), zero(3, LLAMA, HALF_COPIES)]
    compare((1, 1, 4), cases, pool, references, with_copies_of_two)


def test_all_dimensions_together_are_the_reference(pool: Pool, references: References) -> None:
    compare((2, 2, 2), [zero(3, sp=True)], pool, references, plain_groups)


def compare(
    sizes: tuple[int, int, int], cases: list[Case], pool: Pool, references: References, groups: Any
) -> None:
    world = sizes[0] * sizes[1] * sizes[2]
    by_rank = pool.run(world, run_cases, sizes, cases, nullcontext, groups, timeout_s=300)
    for case, outcomes in zip(cases, zip(*by_rank, strict=True), strict=True):
        found = differences(outcomes, references.of(case.problem), case.problem)
        assert not found, f"{case}: {found}"


def test_groups_of_copies_and_replicas() -> None:
    inner, outer = shards_and_replicas(Layout(tp=2, dp=4), 2)
    assert inner == [[0, 2], [4, 6], [1, 3], [5, 7]]
    assert outer == [[0, 4], [2, 6], [1, 5], [3, 7]]
    assert shards_and_replicas(Layout(tp=2, dp=4), 4) is None


@pytest.mark.parametrize(("rows", "ranks"), [(8, 4), (5, 4), (3, 4), (1, 2), (7, 3)])
def test_shards_are_those_of_chunk(rows: int, ranks: int) -> None:
    starts = [first_row(rows, ranks, rank) for rank in range(ranks + 1)]
    lengths = [len(chunk) for chunk in torch.arange(rows).chunk(ranks)]
    assert [b - a for a, b in pairwise(starts)] == [
        *lengths,
        *[0] * (ranks - len(lengths)),
    ]


def bytes_of_tensors() -> int:
    """Of every tensor that this process holds and that is not frozen, each storage once."""
    gc.collect()
    storages = {}
    for found in gc.get_objects():
        if issubclass(type(found), FakeTensor):
            continue  # left by a compiled graph of a test before: it holds no memory
        if issubclass(type(found), torch.Tensor) and found.layout == torch.strided:
            local = found.to_local() if hasattr(found, "to_local") else found
            storage = local.untyped_storage()
            storages[storage._cdata] = storage.nbytes()
    return sum(storages.values())


def held(sizes: tuple[int, int, int], stage: int, precision: str) -> dict[str, float]:
    """Bytes that a trainer holds between steps, over those of the parameters of its stage in fp32;
    and the share of the parameters that this rank steps."""
    groups = plain_groups(Layout(*sizes))
    problem = Problem("gpt_tiny", "adamw", True, precision, model=(("hidden_size", 128),))
    gc.collect()
    gc.freeze()  # what tests before left is neither searched nor counted
    trainer = make_trainer(Case(problem, microbatches=1, keys=(("zero", stage),)), groups)
    for _ in range(2):
        trainer.train_step()
    trainer.data_parallel.wait_for_all()
    numel = sum(p.numel() for p in trainer.parameters.values())
    found = {"held": bytes_of_tensors() / (4 * numel)}
    gc.unfreeze()
    parameters = 0
    for slice_ in trainer.parameter_slices():
        parameters += slice_.values["parameter"].numel()
    found["stepped"] = parameters / numel
    groups.close()
    return found


def test_memory_falls_with_dp(pool: Pool) -> None:
    held_by_stage = {}
    for stage in (0, 1, 2, 3):
        by_rank = pool.run(4, held, (1, 1, 4), stage, "fp32")
        held_by_stage[stage] = max(found["held"] for found in by_rank)
        stepped = sum(found["stepped"] for found in by_rank)
        assert stepped == pytest.approx(4 if stage == 0 else 1)
    # Parameters, gradients and two moments, in units of the parameters.
    assert held_by_stage[0] == pytest.approx(4, rel=0.1)
    assert held_by_stage[1] == pytest.approx(2.5, rel=0.1)
    for stage in (2, 3):
        assert held_by_stage[stage] == pytest.approx(1, rel=0.15)


def slices_of_a_run(stage: int, steps: int) -> list[Any]:
    """Slices of this rank after `steps`; another trainer that goes on from copies of them takes the
    same two next steps."""
    groups = with_copies_of_two(Layout(tp=1, dp=4))
    problem = Problem("gpt_tiny", "adamw", True, model=ODD)
    case = Case(problem, keys=(("zero", stage), HALF_COPIES))
    trainer = make_trainer(case, groups)
    for _ in range(steps):
        trainer.train_step()
    saved = [
        (s.name, s.start, {k: v.clone() for k, v in s.values.items()}, s.replica, s.spec.shape)
        for s in trainer.parameter_slices()
    ]
    progress = trainer.progress()
    expected = [trainer.train_step() for _ in range(2)]

    other = make_trainer(case, groups)
    other.train_step()
    other.evaluate()  # leaves gathered parameters behind
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
        for name, start, values, (number, count), shape in slices:
            times.setdefault(name, np.zeros(int(np.prod(shape)), dtype=int))
            assert count == 2
            times[name][start : start + len(values)] += number == 0
            copies[name, start, values.tobytes()] += 1
    assert all((covered == 1).all() for covered in times.values())
    assert set(copies.values()) == {2}, "replicas hold equal bits"
