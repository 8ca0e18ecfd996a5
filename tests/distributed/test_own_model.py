"""Tests that a user's own models train in every layout as plain PyTorch trains them."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from parallel3d.blueprint.layout import Layout
from parallel3d.checkpoint.checkpoints import Checkpoints
from parallel3d.errors import UserError
from parallel3d.models.own_loss import Loss
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
    Rule(
        "own states are not rounded",
        ("optimizer", "treatment"),
        lambda o, t: t != "bf16 states" or o in ("momentum", "adamw"),
    ),
    Rule("Muon is exact", ("precision", "optimizer"), lambda p, o: p == "fp64" or o == "sgd"),
)


@functools.cache
def pairs() -> list[Levels]:
    """Returns combinations that hold every two levels that can be combined."""
    array = Cover(FACTORS, RULES, lambda levels: ranks_of(levels) + 2, early=SIZES)
    array.fill()
    return array.found


def often() -> list[Levels]:
    """Returns a few of them, exact and of at most four ranks, with every model and engine."""
    exact = [levels for levels in pairs() if levels["precision"] == "fp64"]
    small = [levels for levels in exact if ranks_of(levels) <= 4 and levels["zero"] != 1]
    names = ("model", "zero")
    few = cover({at: frozenset((n, one[n]) for n in names) for at, one in enumerate(small)})
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


@pytest.mark.nightly
def test_modules_of_torch_and_shared_parameters_train_as_alone(pool: Pool, expected: Any) -> None:
    problem = Problem("modules", "adamw")
    for sizes, keys in (
        ((2, 2, 1), {"schedule.name": "zb_h1"}),
        ((2, 1, 2), {"zero": 1, "recompute": "full"}),
        ((1, 2, 2), {"zero": 3, "schedule.name": "zbv", "vpp": 2}),
    ):
        ((found,), *_) = pool.run(4, train_all, sizes, [(problem, keys)])
        assert differences(found, expected(problem), LIMITS["fp64"]) == [], (sizes, keys)


# Checkpoints.

SAVED = 2  # number of steps before the checkpoint
# Sizes (tp, pp, dp) and keys, by name: each saves, and resumes what another one has saved.
RESUMED: Mapping[str, tuple[tuple[int, ...], dict[str, Any]]] = {
    "one": ((1, 1, 1), {"micro_batch_size": 4}),
    "tp2-pp2": ((2, 2, 1), {"schedule.name": "zbv", "vpp": 2}),
    "dp2-zero3": ((1, 1, 2), {"zero": 3}),
    "tp2-dp2-zero2": ((2, 1, 2), {"zero": 2, "recompute": "full"}),
    "pp4": ((1, 4, 1), {"micro_batch_size": 2}),
    "pp2-dp2-zero1": ((1, 2, 2), {"zero": 1, "schedule.name": "interleaved", "vpp": 2}),
}
SAVED_PROBLEMS = (
    Problem("pictures", "muon", "averaged", steps=SAVED + 2),
    Problem("signals", "adamw", "first frozen", steps=SAVED + 2),
    Problem("text", "nadam", "by name", steps=SAVED + 2),
)


def saved_keys(name: str, keys: Mapping[str, Any]) -> dict[str, Any]:
    return {"run": name, "checkpoint.every": SAVED, **keys}


def save(layout: str, problems: Sequence[Problem], folder: Path) -> None:
    """Trains each problem to its checkpoint; runs on every rank."""
    sizes, keys = RESUMED[layout]
    groups = plain_groups(Layout(*sizes))
    for problem in problems:
        run_dir = folder / f"{layout}-{problem.model}"
        run_dir.mkdir(exist_ok=True)
        trainer = make_trainer(problem, groups, saved_keys(run_dir.name, keys))
        checkpoints = Checkpoints(trainer.config, run_dir, groups, print)
        assert checkpoints.restore(trainer) == 1
        for _ in range(SAVED):
            trainer.train_step()
            checkpoints.after_step(trainer)
        checkpoints.close()
    groups.close()


def resume(
    layout: str, saved: str, problems: Sequence[Problem], folder: Path
) -> list[Result | str]:
    """Resumes each problem, on every rank; returns its results, or why it is refused."""
    sizes, keys = RESUMED[layout]
    groups, found = plain_groups(Layout(*sizes)), []
    for problem in problems:
        run_dir = folder / f"{saved}-{problem.model}"
        trainer = make_trainer(problem, groups, saved_keys(run_dir.name, keys))
        checkpoints = Checkpoints(trainer.config, run_dir, groups, print)
        try:
            assert checkpoints.restore(trainer) == SAVED + 1
        except UserError as error:
            found.append(str(error))
        else:
            found.append(train(trainer, problem.steps - SAVED))
    groups.close()
    return found


def after(result: Result, steps: int) -> Result:
    """Returns a result without the figures of its first steps."""
    names = ("losses", "grad_norms", "terms")
    return replace(result, **{name: getattr(result, name)[steps:] for name in names})


@pytest.mark.nightly
def test_a_model_resumes_under_any_other_layout(pool: Pool, expected: Any, tmp_path: Path) -> None:
    names, failures = list(RESUMED), []
    worlds = {name: Layout(*sizes).world_size for name, (sizes, _) in RESUMED.items()}
    for name in names:
        pool.run(worlds[name], save, name, SAVED_PROBLEMS, tmp_path, timeout_s=600)
    for index, name in enumerate(names):
        saved = names[(index + 1) % len(names)]
        args = (name, saved, SAVED_PROBLEMS, tmp_path)
        for problem, found in zip(
            SAVED_PROBLEMS, pool.run(worlds[name], resume, *args, timeout_s=600)[0], strict=True
        ):
            off = differences(found, after(expected(problem), SAVED), LIMITS["fp64"])
            failures += [f"{saved} → {name}, {problem}: {off}"] if off else []
    assert not failures, "\n".join(failures)


def resumed_with(loss: Any, folder: Path) -> list[str]:
    """Resumes "signals" with a loss; returns what the run says."""
    groups, said = plain_groups(Layout()), list[str]()
    trainer = make_trainer(
        Problem("signals"), groups, saved_keys("one-signals", {"train.steps": 4}), loss
    )
    Checkpoints(trainer.config, folder / "one-signals", groups, said.append).restore(trainer)
    groups.close()
    return said


def other_loss(outputs: Any, inputs: Any) -> Any:
    return Loss(outputs[0].sum(), len(outputs[0]))


@pytest.mark.nightly
def test_another_loss_is_told_when_a_run_resumes(pool: Pool, tmp_path: Path) -> None:
    pool.run(1, save, "one", [Problem("signals")], tmp_path)
    ((same,),) = pool.run(1, resumed_with, None, tmp_path)
    ((other,),) = pool.run(1, resumed_with, functools.partial(other_loss), tmp_path)
    assert "loss" not in same
    assert "2 steps of 12 samples to go" in same
    assert "; another loss: Signals.loss → other_loss; " in other


@pytest.mark.nightly
def test_a_checkpoint_of_other_fields_is_refused(pool: Pool, tmp_path: Path) -> None:
    problem = Problem("signals")
    pool.run(1, save, "one", [problem], tmp_path)
    others = [
        problem._replace(fields=fields) for fields in ((("hidden", 12),), (("num_layers", 3),))
    ]
    ((wide, deep),) = pool.run(1, resume, "one", "one", others, tmp_path)
    for name, there, here, sentence in (("hidden", 10, 12, wide), ("num_layers", 4, 3, deep)):
        assert f"model.{name} is {there} there, now {here}" in sentence
