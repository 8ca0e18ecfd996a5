"""Tests that a user's own models train in every layout as plain PyTorch trains them."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pytest

from parallel3d.blueprint.layout import Layout
from tests.distributed.covering import Cover, Levels, Rule
from tests.distributed.harness import cover, plain_groups
from tests.distributed.own_models import (
    OPTIM,
    TREATMENTS,
    Problem,
    Result,
    arrays,
    differences,
    make_trainer,
    reference,
    train,
)
from tests.distributed.pool import Pool

SIZES = ("tp", "pp", "dp")
FACTORS: Mapping[str, Sequence[Any]] = {
    "model": ("pictures", "signals", "text"),
    "tp": (1, 2, 4),
    "pp": (1, 2, 4),
    "dp": (1, 2, 3),
    "sp": (False, True),
    "zero": (0, 1, 2, 3),
    "schedule": ("1f1b", "interleaved", "zbv", "gpipe", "zb_h1"),
    "samples": (1, 2),  # of a micro-batch
    "recompute": ("none", "full"),
    "offload": (False, True),
    "optimizer": (*OPTIM,),
    "treatment": (*TREATMENTS,),
    "precision": ("fp64", "fp32", "bf16"),
}
LIMITS = {"fp64": 1e-9, "fp32": 2e-4, "bf16": 0.1}
TWO_STAGES = ("interleaved", "zbv")  # schedules with two stages of a rank
RULES = (
    Rule("at most eight ranks", SIZES, lambda tp, pp, dp: tp * pp * dp <= 8),
    Rule("a stage has a layer", ("pp", "schedule"), lambda pp, s: pp < 4 or s not in TWO_STAGES),
    Rule("schedules are of stages", ("pp", "schedule"), lambda pp, s: pp > 1 or s == "1f1b"),
    Rule("only replicas are sharded", ("dp", "zero"), lambda dp, zero: dp > 1 or not zero),
    Rule("tp splits sequences", ("tp", "sp"), lambda tp, sp: tp > 1 or not sp),
    Rule("the text has sequences", ("model", "sp"), lambda model, sp: model == "text" or not sp),
    Rule(
        "Muon knows nn.Linear", ("model", "optimizer"), lambda m, o: m != "signals" or o != "muon"
    ),
    Rule("exact averages", ("precision", "treatment"), lambda p, t: p == "fp64" or t == "plain"),
    Rule("Muon is exact", ("precision", "optimizer"), lambda p, o: p == "fp64" or o == "sgd"),
)


@functools.cache
def pairs() -> list[Levels]:
    """Returns combinations that hold every two levels that can be combined."""
    array = Cover(FACTORS, RULES, lambda levels: ranks_of(levels) + 2, early=SIZES)
    array.fill()
    return array.found


def often() -> list[Levels]:
    """Returns a few of them, exact and of at most four ranks, which hold every level."""
    exact = [levels for levels in pairs() if levels["precision"] == "fp64"]
    small = [levels for levels in exact if ranks_of(levels) <= 4]
    few = cover({at: frozenset(levels.items()) for at, levels in enumerate(small)})
    return [small[at] for at in few]


def ranks_of(levels: Levels) -> int:
    return int(np.prod([levels[name] for name in SIZES]))


def by_layout(found: Sequence[Levels]) -> dict[tuple[int, ...], list[Levels]]:
    groups: dict[tuple[int, ...], list[Levels]] = {}
    for levels in found:
        groups.setdefault(tuple(levels[name] for name in SIZES), []).append(levels)
    return groups


def problem_of(levels: Levels) -> Problem:
    return Problem(*(levels[name] for name in ("model", "optimizer", "treatment", "precision")))


def keys_of(levels: Levels) -> dict[str, Any]:
    return {
        **{name: levels[name] for name in ("sp", "zero", "recompute")},
        "schedule.name": levels["schedule"],
        "vpp": 2 if levels["schedule"] in TWO_STAGES else 1,
        "micro_batch_size": levels["samples"],
        "offload_layers": [1] if levels["offload"] else None,
    }


def initial(problems: Sequence[Problem]) -> list[dict[str, np.ndarray]]:
    """Returns the initial weights of problems, on one rank."""
    groups = plain_groups(Layout())
    found = [arrays(make_trainer(problem, groups, {}).full_parameters()) for problem in problems]
    groups.close()
    return found


def train_all(sizes: tuple[int, ...], cases: Sequence[tuple[Problem, dict]]) -> list[Result]:
    """Trains cases of one layout; runs on every rank."""
    groups, found = plain_groups(Layout(*sizes)), []
    for problem, keys in cases:
        try:
            found.append(train(make_trainer(problem, groups, keys), problem.steps))
        except Exception as error:
            error.add_note(f"in {problem} with {keys} on {sizes}")
            raise
    groups.close()
    return found


@pytest.fixture(scope="module")
def expected(pool: Pool) -> Any:
    """Returns the reference's result of a problem, computed once."""

    @functools.cache
    def of(problem: Problem) -> Result:
        ((weights,),) = pool.run(1, initial, [problem])
        return reference(problem, weights)

    return of


def check(found: Sequence[Levels], pool: Pool, expected: Any) -> None:
    """Trains the combinations, and compares every rank's figures with the reference's."""
    failures = []
    for sizes, some in by_layout(found).items():
        cases = [(problem_of(levels), keys_of(levels)) for levels in some]
        by_rank = pool.run(Layout(*sizes).world_size, train_all, sizes, cases, timeout_s=600)
        for rank, results in enumerate(by_rank):
            for levels, result in zip(some, results, strict=True):
                problem = problem_of(levels)
                limit, of_weights = LIMITS[problem.precision], problem.precision == "fp64"
                off = differences(result, expected(problem), limit, weights=of_weights and not rank)
                failures += [f"{levels} on rank {rank}: {off}"] if off else []
    assert not failures, "\n".join(failures)


def test_models_train_as_plain_torch_trains_them(pool: Pool, expected: Any) -> None:
    check(often(), pool, expected)


@pytest.mark.nightly
@pytest.mark.parametrize("model", FACTORS["model"])
def test_models_train_in_every_pair_of_settings(model: str, pool: Pool, expected: Any) -> None:
    check([levels for levels in pairs() if levels["model"] == model], pool, expected)
