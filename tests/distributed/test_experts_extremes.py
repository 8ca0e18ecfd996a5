"""Tests experts in cases where other trainers fail: equal scores, experts and ranks without tokens,
much padding, evaluations between steps, and gradients that are not finite on one rank.

All but the last are compared with the reference. For each, a known bug is planted and must be
detected.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from copy import copy
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from parallel3d.blueprint.layout import Layout
from parallel3d.build import Trainer
from parallel3d.data_parallel.engine import BucketedDataParallel
from parallel3d.experts.balance import Balance
from parallel3d.experts.route import LocalRoute, TokenRoute
from parallel3d.experts.router import Router
from parallel3d.models.experts import MixtureOfExperts
from parallel3d.models.layer_inputs import LayerInputs
from parallel3d.optim.optimizer import Optimizer, sum_of_powers
from parallel3d.parameters.initializer import Initializer
from parallel3d.parameters.spec import ShardSpec
from parallel3d.trainer import StepResult
from tests.distributed.cases import Case, Problem
from tests.distributed.harness import (
    Expected,
    References,
    Sizes,
    array,
    check_cases,
    check_caught,
    differences,
    digests,
    expected_of,
    initial_weights_and_rates,
    make_trainer,
    plain_groups,
    run_cases,
)
from tests.distributed.pool import Pool
from tests.distributed.seams import (
    FINISH_STEP,
    INITIAL_VALUES,
    LAYER_OF_EXPERTS,
    ORTHOGONAL,
    RANKED,
    ROUTER,
    SHARE_OF_NORM,
    STEP,
    UPDATE,
    Mutation,
    planted,
)
from tests.distributed.test_mutations_experts import (
    ADAMW,
    ALL,
    EP,
    MUON,
    ONE,
    SGD,
    SOFTMAX,
    TP_IN_EP,
    experts,
)
from tests.distributed.test_mutations_experts import padding_counted as padding_counted

pytestmark = pytest.mark.nightly

FOUR = (1, 1, 4, 1, 2)


@contextmanager
def together(*contexts: Mutation) -> Iterator[None]:
    """Enters several contexts, the last one innermost."""
    with ExitStack() as stack:
        for context in contexts:
            stack.enter_context(context())
        yield


# Equal scores


@planted(INITIAL_VALUES)
def half_of_the_router_is_zero(
    sound: Any, initializer: Initializer, shard: ShardSpec, out: Tensor
) -> None:
    """The first four experts of every token have equal scores, to the last bit."""
    sound(initializer, shard, out)
    if shard.name.endswith("router.weight"):
        out[: max(0, 4 - shard.start[0])].zero_()


@planted(RANKED)
def ties_to_the_higher_index(sound: Any, values: Tensor, count: int) -> Tensor:
    """The last of equal values wins."""
    return values.shape[-1] - 1 - sound(values.flip(-1), count)


@contextmanager
def other_ties_in_the_backward() -> Iterator[None]:
    """A recomputed forward chooses again, and there the last of equal values wins."""
    again = [False]

    def ranked(sound: Any, values: Tensor, count: int) -> Tensor:
        if again[0]:
            return values.shape[-1] - 1 - sound(values.flip(-1), count)
        return sound(values, count)

    def router(
        sound: Any, router: Router, x: Tensor, route: TokenRoute, balance: Balance | None
    ) -> Tensor:
        if route.experts is not None:
            route, second = copy(route), LocalRoute(router.settings.experts)
            again[0] = True
            with torch.no_grad():
                sound(router, x, second, None)
            again[0] = False
            route.experts = second.experts
        return sound(router, x, route, balance)

    with RANKED.replaced(ranked), ROUTER.replaced(router):
        yield


# A frozen router keeps scores equal. The gradient of a trained one depends on the chosen expert.
FROZEN = dataclasses.replace(SOFTMAX, optim=(*SOFTMAX.optim, ("freeze", ("*.router.weight",))))
TRAINED = dataclasses.replace(SOFTMAX, steps=1)


def initial_with_ties(problem: Problem) -> tuple[dict[str, np.ndarray], list[float]]:
    """Returns the full initial weights with equal scores, and the rates, on one rank."""
    with half_of_the_router_is_zero():
        return initial_weights_and_rates(problem)


@pytest.fixture(scope="module")
def ties(pool: Pool) -> dict[Problem, Expected]:
    """Returns the reference's runs, in which the lower of equally good experts is chosen."""
    found = {
        problem: expected_of(problem, *pool.run(1, initial_with_ties, problem)[0])
        for problem in (FROZEN, TRAINED)
    }
    assert [expected.run.margin for expected in found.values()] == [0.0, 0.0]
    return found


def told(sizes: Sizes, case: Case, bug: Mutation, expected: Expected, pool: Pool) -> set[str]:
    """Returns the quantities by which a training with equal scores differs from the reference."""
    mutation = partial(together, half_of_the_router_is_zero, bug)
    world = Layout(*sizes).world_size
    found = [outcomes[0] for outcomes in pool.run(world, run_cases, sizes, [case], mutation)]
    return {*differences(found, expected, case.problem)}


@pytest.mark.parametrize(
    ("sizes", "case"),
    [
        (ONE, experts(FROZEN, keys={"recompute": "full"})),
        (ONE, experts(TRAINED, keys={"recompute": "full"})),
        ((2, 1, 1, 1, 2), experts(FROZEN)),
        (EP, experts(FROZEN, "all_to_all", keys={"recompute": "[mlp]"})),
        pytest.param(TP_IN_EP, experts(TRAINED, "all_to_all"), marks=pytest.mark.more),
        pytest.param((1, 1, 2, 2, 2), experts(FROZEN, "all_to_all"), marks=pytest.mark.more),
    ],
    ids=["one", "trained", "tp", "ep", "tp-in-ep", "cp"],
)
def test_the_lower_of_equal_experts_is_chosen_in_every_layout(
    sizes: Sizes, case: Case, ties: dict[Problem, Expected], pool: Pool
) -> None:
    assert told(sizes, case, nullcontext, ties[case.problem], pool) == set()


@pytest.mark.more
@pytest.mark.parametrize(
    ("bug", "problem", "by"),
    [
        (ties_to_the_higher_index, FROZEN, ALL - {"biases"}),
        (other_ties_in_the_backward, TRAINED, {"grad norm", "weights", "evaluation"}),
    ],
    ids=["choice", "recomputed-choice"],
)
def test_the_comparison_fails_if_equal_experts_are_in_another_order(
    bug: Mutation, problem: Problem, by: set[str], ties: dict[Problem, Expected], pool: Pool
) -> None:
    case = experts(problem, keys={"recompute": "full"})
    assert told(ONE, case, bug, ties[problem], pool) == by


# Experts without tokens

# Every token goes to experts 0 and 1, and so to one rank of ep.
TILTED = (100.0, 100.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0)


def tilted(problem: Problem) -> Problem:
    return dataclasses.replace(problem, biases=TILTED)


WITHOUT_TOKENS: list[tuple[Sizes, Case]] = [
    (ONE, experts(tilted(ADAMW))),
    (FOUR, experts(tilted(ADAMW), keys={"zero": 0})),
    (FOUR, experts(tilted(ADAMW), "all_to_all", keys={"zero": 1})),
    (FOUR, experts(tilted(ADAMW), keys={"zero": 2})),
    (FOUR, experts(tilted(ADAMW), "all_to_all", keys={"zero": 3, "recompute": "full"})),
    (TP_IN_EP, experts(tilted(SGD), "all_to_all", keys={"recompute": "[mlp]"})),
    (EP, experts(tilted(MUON), "all_to_all", keys={"zero": 1})),
    (EP, experts(tilted(MUON), keys={"zero": 3})),
    ((1, 2, 2, 1, 2), experts(tilted(SGD), "all_to_all", schedule="zb_h1", microbatches=3)),
]


NAMES = ("one", *(f"zero{n}" for n in range(4)), "tp", "muon1", "muon3", "zb")
OFTEN = ("one", "zero1", "zero3", "muon1")


@pytest.mark.parametrize(
    ("sizes", "case"),
    [
        pytest.param(*given, id=name, marks=() if name in OFTEN else pytest.mark.more)
        for name, given in zip(NAMES, WITHOUT_TOKENS, strict=True)
    ],
)
def test_experts_and_ranks_without_tokens_train_on(
    sizes: Sizes, case: Case, pool: Pool, references: References
) -> None:
    ((first, *_),) = check_cases(sizes, [case], pool, references)
    for _, counts in first.steps[0].counts:
        assert all(counts[:2]) and not any(counts[2:])


@planted(UPDATE)
def unused_experts_not_stepped(sound: Any, optimizer: Optimizer, *how: Any) -> None:
    """An expert without a gradient is skipped, so that it does not decay."""
    runs = [run for s in optimizer.segments for run in s.by_kind(lambda shard: shard.name)]
    unused = [run for _, run in runs if run.spec.is_expert and not run.grad.any()]
    kept = [(run.master, run.master.clone()) for run in unused]
    sound(optimizer, *how)
    for master, old in kept:
        master.copy_(old)


@planted(ORTHOGONAL)
def zeros_by_their_norm(sound: Any, update: Tensor) -> Tensor:
    """The matrix of an unused expert is divided by its norm, zero."""
    return sound(update / update.norm())


@pytest.mark.more
@pytest.mark.parametrize(
    ("bug", "sizes", "case"),
    [
        (unused_experts_not_stepped, *WITHOUT_TOKENS[0]),
        (unused_experts_not_stepped, *WITHOUT_TOKENS[1]),
        (zeros_by_their_norm, *WITHOUT_TOKENS[6]),
    ],
    ids=["adamw", "adamw-ep", "muon"],
)
def test_the_comparison_fails_if_unused_experts_take_a_wrong_step(
    bug: Mutation, sizes: Sizes, case: Case, pool: Pool, references: References
) -> None:
    """Only the experts' own weights show this bug."""
    check_caught(bug, sizes, case, {"weights"}, pool, references)


# Padding, and evaluations between steps

PADDED = dataclasses.replace(SGD, padding=True)
# Without documents, a stage between the first and the last only reads samples for their padding.
PLAIN = dataclasses.replace(PADDED, documents=False, layers=3)


@pytest.mark.parametrize(
    ("sizes", "case"),
    [
        pytest.param(EP, experts(PADDED, microbatches=6), marks=pytest.mark.more),
        ((2, 1, 1, 1, 2), experts(PADDED, "all_to_all")),
        pytest.param(
            *((2, 1, 1, 2, 4), experts(PADDED, "all_to_all", microbatches=12)),
            marks=pytest.mark.more,
        ),
        pytest.param(
            *((1, 2, 2, 1, 2), experts(PADDED, schedule="zb_h1", microbatches=3)),
            marks=pytest.mark.more,
        ),
        ((1, 3, 1, 1, 1), experts(PLAIN, microbatches=3)),
    ],
    ids=["ep", "tp", "cp", "pp", "middle"],
)
def test_a_third_of_padding_is_in_no_count_and_no_loss(
    sizes: Sizes, case: Case, pool: Pool, references: References
) -> None:
    expected = references.of(PADDED).run.counts[0]
    share = 1 - sum(expected[0].tolist()) / (2 * 16 * PADDED.batch)
    assert 0.25 < share < 0.4
    check_cases(sizes, [case], pool, references)


def test_padding_of_split_sequences_is_not_counted(pool: Pool, references: References) -> None:
    """Sixteen tokens are not six equal pieces, so that three ranks split eighteen."""
    of = dataclasses.replace(SGD, documents=False)
    check_cases((1, 1, 1, 3, 1), [experts(of)], pool, references)


@pytest.mark.more
def test_the_comparison_fails_if_padding_is_counted(pool: Pool, references: References) -> None:
    check_caught(padding_counted, EP, experts(PADDED, microbatches=6), ALL, pool, references)


@planted(STEP)
def evaluated_after_each_step(sound: Any, trainer: Trainer) -> StepResult:
    """The run evaluates between its steps."""
    result = sound(trainer)
    trainer.evaluate()
    return result


@contextmanager
def evaluations_counted() -> Iterator[None]:
    """An evaluation uses the balance of the last micro-batch, so that its tokens are counted."""
    last: list[Balance | None] = [None]

    def bug(sound: Any, layer: MixtureOfExperts, x: Tensor, inputs: LayerInputs) -> Tensor:
        last[0] = inputs.balance or last[0]
        return sound(layer, x, dataclasses.replace(inputs, balance=last[0]))

    with evaluated_after_each_step(), LAYER_OF_EXPERTS.replaced(bug):
        yield


@pytest.mark.parametrize(
    ("context", "by"),
    [
        (evaluated_after_each_step, set()),
        # Biases move too late for the loss of these two steps.
        (evaluations_counted, {"counts", "aux", "z", "biases", "evaluation"}),
    ],
    ids=["sound", "counted"],
)
def test_tokens_of_evaluations_between_steps_are_in_no_count(
    context: Mutation, by: set[str], pool: Pool, references: References
) -> None:
    check_caught(context, EP, experts(), by, pool, references)


# Gradients that are not finite


class Skipping(NamedTuple):
    """The steps of a rank: whether each was skipped, and biases and weights after each."""

    skipped: list[bool]
    biases: list[dict[str, list[float]]]
    weights: list[dict[str, str]]


@contextmanager
def nan_in_one_copy() -> Iterator[None]:
    """In the second step an expert's gradient is NaN on the last rank, which counts no expert."""
    steps: dict[int, int] = {}

    def bug(sound: Any, engine: BucketedDataParallel) -> list[str]:
        found = sound(engine)
        steps[id(engine)] = steps.get(id(engine), 0) + 1
        if steps[id(engine)] == 2 and dist.get_rank() == dist.get_world_size() - 1:
            runs = [run for s in engine.segments for run in s.by_copies() if s.spec.is_expert]
            assert not any(copies.is_first for copies, _ in runs)
            runs[0][1].grad[0] = torch.nan
        return found

    with FINISH_STEP.replaced(bug):
        yield


@planted(SHARE_OF_NORM)
def copies_not_looked_at(sound: Any, trainer: Trainer, *how: Any) -> Tensor:
    """A rank only looks at the gradients that it counts."""
    runs = [run for s in trainer.optimizer.segments for run in s.by_copies()]
    counted = [run.grad for copies, run in runs if copies.is_first]
    return sum_of_powers(counted, trainer.device)


@planted(STEP)
def biases_updated_in_skipped_steps(sound: Any, trainer: Trainer) -> StepResult:
    """The biases follow the counts of every step."""
    result = sound(trainer)
    if result.skipped and trainer.balance is not None and result.experts is not None:
        trainer.balance.update(result.experts)
    return result


def run_skipping(sizes: Sizes, case: Case, bug: Mutation = nullcontext) -> Skipping:
    """Trains three steps, on every rank; the second has a gradient that is not finite."""
    groups = plain_groups(Layout(*sizes))
    found = Skipping([], [], [])
    with nan_in_one_copy(), bug():
        trainer = make_trainer(case, groups)
        assert trainer.balance is not None
        for _ in range(3):
            found.skipped.append(trainer.train_step().skipped)
            states = trainer.balance.states.items()
            found.biases.append({name: array(bias).tolist() for name, bias in states})
            local = {name: p.detach() for name, p in trainer.parameters.items()}
            found.weights.append(digests(local))
    groups.close()
    return found


def wrong_in(ranks: Sequence[Skipping]) -> set[str]:
    """Returns the faults of a second step, which all ranks must skip."""
    found = set()
    for rank in ranks:
        if rank.skipped != [False, True, False]:
            found.add("skipped")
        if rank.weights[1] != rank.weights[0] or rank.weights[2] == rank.weights[1]:
            found.add("weights")
        if rank.biases[1] != rank.biases[0] or rank.biases[2] == rank.biases[1]:
            found.add("biases")
        if rank.biases != ranks[0].biases:
            found.add("ranks")
    return found


@pytest.mark.parametrize(
    ("bug", "wrong"),
    [
        (nullcontext, set()),
        (copies_not_looked_at, {"skipped", "weights", "biases"}),
        (biases_updated_in_skipped_steps, {"biases"}),
    ],
    ids=["sound", "copies-not-looked-at", "biases-updated"],
)
def test_nan_in_one_copy_of_an_expert_is_a_step_that_all_ranks_skip(
    bug: Mutation, wrong: set[str], pool: Pool
) -> None:
    assert wrong_in(pool.run(4, run_skipping, FOUR, experts(), bug)) == wrong
