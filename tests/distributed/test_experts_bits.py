"""Tests that a layout with experts has the same bits if it runs again or recomputes, also below
fp64.

Results of several ranks and of a token's experts are summed in a fixed order, without atomics, and
a recomputation reads the choices of the forward. So scores that nearly tie, as many do in bf16, are
decided once.
"""

from __future__ import annotations

import dataclasses
import random
from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack, nullcontext
from copy import copy
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from parallel3d.blueprint.layout import Layout
from parallel3d.experts.balance import Balance
from parallel3d.experts.route import LocalRoute, TokenRoute
from parallel3d.experts.router import Router
from tests.distributed.cases import Case, Problem
from tests.distributed.harness import Outcome, Sizes, make_trainer, plain_groups, run_cases
from tests.distributed.pool import Pool
from tests.distributed.seams import ROUTER, SUMMED_SLOTS, Mutation, Seam, planted
from tests.distributed.test_mutations_experts import ADAMW, EP, TP_IN_EP, experts

pytestmark = pytest.mark.nightly

# A token sums four experts, because sums of two have the same bits in any order.
FOUR_OF_SIXTEEN = (("num_experts", 16), ("experts_per_token", 4), *ADAMW.model[2:])


def problem(precision: str, steps: int) -> Problem:
    """Returns a problem with a few samples."""
    sizes = {"steps": steps, "batch": 4}
    return dataclasses.replace(ADAMW, model=FOUR_OF_SIXTEEN, precision=precision, **sizes)


def differ(first: Outcome, second: Outcome) -> set[str]:
    """Returns the quantities in which two runs differ, to the last bit, including any figure of the
    steps."""
    found = {"steps"} if first.steps != second.steps else set()
    for name, ours in {**first.final, **first.biases}.items():
        if not np.array_equal(ours, {**second.final, **second.biases}[name]):
            found.add("weights")
    return found


def pair(
    pool: Pool, sizes: Sizes, cases: Sequence[Case], bug: Mutation = nullcontext
) -> tuple[Outcome, Outcome]:
    """Returns rank 0's outcomes of two cases, both inside `bug`."""
    world = Layout(*sizes).world_size
    first, second = pool.run(world, run_cases, sizes, cases, bug, timeout_s=900)[0]
    return first, second


@planted(SUMMED_SLOTS)
def in_the_order_of_arrival(sound: Any, rows: Tensor, places: Tensor) -> Tensor:
    """A token's rows are summed in the order of arrival."""
    slots = random.SystemRandom().sample(range(places.shape[1]), places.shape[1])
    return sound(rows, places[:, slots])


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("way", ["gather", "all_to_all"])
def test_a_layout_that_runs_twice_has_equal_bits(precision: str, way: str, pool: Pool) -> None:
    case = experts(problem(precision, 3), way)
    assert differ(*pair(pool, TP_IN_EP, [case, case])) == set()


@pytest.mark.more
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_the_comparison_fails_if_sums_are_in_another_order(precision: str, pool: Pool) -> None:
    case = experts(problem(precision, 3), "all_to_all")
    found = differ(*pair(pool, TP_IN_EP, [case, case], in_the_order_of_arrival))
    assert found == {"steps", "weights"}


@planted(ROUTER)
def chosen_again_from_rounded_tokens(
    sound: Any, router: Router, x: Tensor, route: TokenRoute, balance: Balance | None
) -> Tensor:
    """A recomputed forward chooses again, by scores that differ in their last bits."""
    if route.experts is not None:
        route, again = copy(route), LocalRoute(router.settings.experts)
        with torch.no_grad():
            sound(router, x * (1 + 2**-7), again, None)
        route.experts = again.experts
    return sound(router, x, route, balance)


def recomputed(of: Problem, *recompute: str) -> list[Case]:
    """Returns a case that keeps everything, and one that recomputes these parts."""
    return [experts(of, "all_to_all", keys={"recompute": r}) for r in ("none", *recompute)]


def test_twenty_steps_of_bf16_are_recomputed_to_the_same_bits(pool: Pool) -> None:
    """The printed balancing losses and counts are the same, too: they are added once."""
    first, second = pair(pool, EP, recomputed(problem("bf16", 20), "full"))
    assert differ(first, second) == set()
    assert np.mean([step.loss for step in first.steps[10:]]) < first.steps[0].loss


@pytest.mark.more
def test_twenty_compiled_steps_of_bf16_are_recomputed(pool: Pool) -> None:
    """No size of a recomputed tensor differs, and compiled code rounds nearly like eager code."""
    cases = recomputed(problem("bf16", 20), "full")
    eager, full = pair(pool, EP, [cases[0], dataclasses.replace(cases[1], compile=True)])
    losses = [[step.loss for step in outcome.steps] for outcome in (eager, full)]
    np.testing.assert_allclose(losses[1][:3], losses[0][:3], rtol=1e-2)
    assert np.mean(losses[1][10:]) < losses[1][0]


@pytest.mark.more
@pytest.mark.parametrize("recompute", ["[mlp]", "[norm,mlp]", "[norm,attention,mlp]"])
def test_parts_of_a_layer_are_recomputed_to_the_same_bits(recompute: str, pool: Pool) -> None:
    assert differ(*pair(pool, EP, recomputed(problem("bf16", 3), recompute))) == set()


@pytest.mark.more
def test_the_comparison_fails_if_recomputation_chooses_experts_again(pool: Pool) -> None:
    cases = recomputed(problem("bf16", 3), "full")
    found = differ(*pair(pool, EP, cases, chosen_again_from_rounded_tokens))
    assert found == {"steps", "weights"}


# Collectives through which choices and counts could travel, in int64.
COLLECTIVES = {
    name: Seam(f"comm.collectives:{name}")
    for name in ("all_gather", "all_reduce", "all_to_all", "all_to_all_uneven_async")
}


def asked(sizes: Sizes, case: Case) -> Counter[str]:
    """Returns the collectives of whole numbers in a step, on every rank."""
    calls: Counter[str] = Counter()

    def counted(name: str) -> Any:
        def call(sound: Any, tensor: Tensor, *how: Any) -> Tensor:
            calls[name] += tensor.dtype == torch.int64
            return sound(tensor, *how)

        return call

    groups = plain_groups(Layout(*sizes))
    trainer = make_trainer(case, groups)
    with ExitStack() as stack:
        for name, seam in COLLECTIVES.items():
            stack.enter_context(seam.replaced(counted(name)))
        trainer.train_step()
    groups.close()
    return +calls


@pytest.mark.parametrize(
    ("way", "expected"),
    [
        # Two micro-batches of two layers: counts of sequences, then choices, or numbers of tokens
        # and choices.
        ("gather", {"all_reduce": 4, "all_gather": 4}),
        ("all_to_all", {"all_reduce": 4, "all_to_all": 4, "all_to_all_uneven_async": 4}),
    ],
)
@pytest.mark.parametrize("recompute", ["none", "[mlp]", "full"])
def test_a_recomputation_asks_no_other_rank_for_choices(
    way: str, expected: dict[str, int], recompute: str, pool: Pool
) -> None:
    case = experts(ADAMW, way, keys={"recompute": recompute})
    assert pool.run(2, asked, (2, 1, 1, 1, 2), case) == [expected] * 2
