"""Tests that a checkpoint fits any layout: saved under each of eight, loaded under others, the same
curve.

Two steps are trained under one layout, one or two more under another. Losses, gradient norms and
(fp64) the final weights equal the independent reference's, whose run is not interrupted. This
proves parameters and their average, moments (also in bf16), the count of updates and the position
in the data at once. In fp32, where weights are not compared, only the second step's loss shows the
moments.
"""

from __future__ import annotations

import errno
import time
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest

from parallel3d.blueprint.layout import Layout
from parallel3d.build import Trainer
from parallel3d.checkpoint.checkpoints import Checkpoints
from parallel3d.checkpoint.manifest import list_checkpoints
from parallel3d.checkpoint.storage import read_full, stored_shapes
from parallel3d.commands.checkpoint.new_runs import branch, save_first
from parallel3d.errors import UserError
from parallel3d.models.declared import states_of
from parallel3d.run.directory import load_config, save_config
from parallel3d.run_config import Config
from tests.distributed.cases import Case, Problem
from tests.distributed.harness import (
    References,
    Step,
    averaged,
    make_trainer,
    plain_groups,
    relative,
    worst_weight,
)
from tests.distributed.pool import Pool

SAVED = 2  # number of steps before the checkpoint
ZERO = (("zero", 1),)
Sizes = tuple[int, int, int]
Weights = dict[str, np.ndarray]
# Sizes (tp, pp, dp) and options: shards that cut through rows and tensors, stages of unequal
# length, tables whose padding is on the last tp rank, whole tables, small buckets, FSDP.
LAYOUTS: dict[str, tuple[Sizes, dict[str, object]]] = {
    "one": ((1, 1, 1), {"microbatches": 1}),
    "tp4-sp": ((4, 1, 1), {"sp": True, "microbatches": 1}),
    "pp2-uneven": ((1, 2, 1), {"layers_per_stage": (1, 2), "schedule": "gpipe"}),
    "dp4-zero1": ((1, 1, 4), {"keys": ZERO, "microbatches": 2}),
    "tp2-pp2": ((2, 2, 1), {"embedding": "replicated", "microbatches": 2}),
    "tp2-dp2-zero1": (
        (2, 1, 2),
        {"keys": ZERO, "bucket_cap_mb": 0.02, "sp": True, "microbatches": 1},
    ),
    "pp2-dp2-zero1": (
        (1, 2, 2),
        {"keys": ZERO, "layers_per_stage": (2, 1), "microbatches": 2},
    ),
    "tp2-dp2-zero3": ((2, 1, 2), {"keys": (("zero", 3),), "microbatches": 1}),
}
# The problems have frozen parameters for both kinds of optimizer, and rates by group.
TREATED = (
    ("freeze", ("layers.0.attention.k.weight", "embedding.position.weight")),
    ("groups", (("embedding.*", (("lr_mult", 0.5),)), ("layers.1.*", (("wd_mult", 3.0),)))),
)
TIED = Problem("gpt_tiny", "muon", True, optim=TREATED)
# These have moments in bf16 and averaged weights, and a frozen layer.
UNTIED = Problem(
    "llama_tiny",
    "adamw",
    False,
    optim=(("state", "bf16"), ("ema_decay", 0.6), ("freeze", ("layers.1.*",))),
)
IN_FP32 = [
    replace(problem, optimizer="adamw", precision="fp32", optim=(), steps=SAVED + 2)
    for problem in (UNTIED, TIED)
]
TOLERANCES = {"fp64": 1e-9, "fp32": 1e-5}


def case_of(layout: str, problem: Problem, run_dir: Path) -> Case:
    """Returns the case of a layout; the checkpoint goes to `run_dir`."""
    case = Case(problem, **LAYOUTS[layout][1])
    keys = (*case.keys, ("run", run_dir.name), ("checkpoint.every", SAVED))
    return replace(case, keys=keys)


def save_all(layout: str, problems: dict[int, Problem], folder: Path) -> list[list[Step]]:
    """Trains each numbered problem to the checkpoint, on every rank; returns the steps so far."""
    groups = plain_groups(Layout(*LAYOUTS[layout][0]))
    steps = []
    for number, problem in problems.items():
        run_dir = folder / f"{layout}-{number}"
        run_dir.mkdir(exist_ok=True)
        trainer = make_trainer(case_of(layout, problem, run_dir), groups)
        checkpoints = Checkpoints(trainer.config, run_dir, groups, print)
        assert checkpoints.restore(trainer) == 1
        steps.append([])
        for _ in range(SAVED):
            steps[-1].append(Step(*trainer.train_step()[:5]))
            checkpoints.after_step(trainer)
        checkpoints.close()
    groups.close()
    return steps


def resume(
    layout: str, pairs: list[tuple[str, int, Problem]], folder: Path
) -> list[tuple[list[Step], Weights, Weights]]:
    """Resumes from each saved layout of each problem, on every rank; returns the steps, the weights
    and their average."""
    groups = plain_groups(Layout(*LAYOUTS[layout][0]))
    results = []
    for saved, number, problem in pairs:
        run_dir = folder / f"{saved}-{number}"
        trainer = make_trainer(case_of(layout, problem, run_dir), groups)
        checkpoints = Checkpoints(trainer.config, run_dir, groups, print)
        assert checkpoints.restore(trainer) == SAVED + 1, f"{saved} → {layout}"
        steps = [Step(*trainer.train_step()[:5]) for _ in range(problem.steps - SAVED)]
        weights = {n: w.numpy().copy() for n, w in trainer.full_parameters().items()}
        results.append((steps, weights, averaged(trainer)))
    groups.close()
    return results


def differences(
    steps: list[Step], problem: Problem, references: References, *weights: Weights
) -> list[str]:
    """Returns where the steps of a run from `steps[0].step` on differ from the reference's."""
    expected, limit = references.of(problem), TOLERANCES[problem.precision]
    found = []
    for step in steps:
        for what, ours, theirs in (
            ("loss", step.loss, expected.run.losses[step.step - 1]),
            ("grad norm", step.grad_norm, expected.run.grad_norms[step.step - 1]),
        ):
            if relative(ours, theirs) > limit:
                found.append(f"step {step.step}: {what} {ours!r}, reference {theirs!r}")
    if weights and problem.precision == "fp64":
        for ours, theirs in zip(weights, (expected.run.weights, expected.run.average), strict=True):
            off, name = worst_weight(ours, theirs, expected.dead)
            if off > limit:
                found.append(f"{name} is {off:.2e} off")
    return found


def matrix(pool: Pool, references: References, folder: Path, pairs: dict) -> None:
    """Saves under every layout the checkpoints that `pairs` needs, then resumes each from
    `pairs[layout]`."""
    failures = []
    for layout, (sizes, _) in LAYOUTS.items():
        world = sizes[0] * sizes[1] * sizes[2]
        asked = (ask for some in pairs.values() for ask in some)
        problems = {number: problem for saved, number, problem in asked if saved == layout}
        saved_steps = pool.run(world, save_all, layout, problems, folder)[0]
        for steps, problem in zip(saved_steps, problems.values(), strict=True):
            failures += [f"before, {layout}: {d}" for d in differences(steps, problem, references)]
    assert not failures, "\n".join(failures)
    for layout, (sizes, _) in LAYOUTS.items():
        world = sizes[0] * sizes[1] * sizes[2]
        results = pool.run(world, resume, layout, pairs[layout], folder, timeout_s=900)[0]
        for (saved, _, problem), (steps, *weights) in zip(pairs[layout], results, strict=True):
            assert [s.step for s in steps] == list(range(SAVED + 1, problem.steps + 1))
            for difference in differences(steps, problem, references, *weights):
                failures.append(f"{saved} → {layout}, {problem}: {difference}")
    assert not failures, f"{len(failures)} differences\n" + "\n".join(failures)


def test_each_layout_resumes_from_others(
    pool: Pool, references: References, tmp_path: Path
) -> None:
    """Resumes each layout from one other, half of them from a second, in fp64 (two also in fp32);
    tied and untied models alternate.

    A checkpoint does not depend on its reader, so all 8 × 8 pairs would show no more.
    """
    problems = [TIED, UNTIED, *IN_FP32]
    names, pairs = list(LAYOUTS), {}
    for i, layout in enumerate(names):
        # The distance to the other layout, and the first problem of a precision.
        asked = [(1, 0), *[(4, 0)] * (i % 2), *[(3, 2)] * (i in (1, 3))]
        saved = [((i + ahead) % len(names), first) for ahead, first in asked]
        numbers = [(j, first + j // 2 % 2) for j, first in saved]
        pairs[layout] = [(names[j], number, problems[number]) for j, number in numbers]
    found = [number for some in pairs.values() for _, number, _ in some]
    assert set(found) == set(range(len(problems)))
    matrix(pool, references, tmp_path, pairs)


def save_with_a_slow_copy(run_dir: Path) -> tuple[dict[str, np.ndarray], list[str]]:
    """Returns, on one rank, the weights at a slow save during the next step, and which ended first,
    the copy or the update."""
    groups = plain_groups(Layout())
    trainer = make_trainer(case_of("one", TIED, run_dir), groups)
    checkpoints = Checkpoints(trainer.config, run_dir, groups, print)
    checkpoints.restore(trainer)
    trainer.train_step()
    weights = {n: w.numpy().copy() for n, w in trainer.full_parameters().items()}
    copy, step, order = checkpoints.saver.staging.copy, trainer.optimizer.step, []

    def slow_copy(state: dict, ready: object) -> dict:
        time.sleep(1.0)  # long enough for several steps
        copied = copy(state, ready)
        order.append("copy")
        return copied

    def noted_step(*args: object) -> None:
        step(*args)
        order.append("update")

    checkpoints.saver.staging.copy, trainer.optimizer.step = slow_copy, noted_step
    checkpoints.save(trainer, wait=False)
    for _ in range(2):
        trainer.train_step()
    assert checkpoints.close()
    groups.close()
    return weights, order


def test_the_update_waits_for_the_copy_and_the_copy_is_saved(pool: Pool, tmp_path: Path) -> None:
    ((weights, order),) = pool.run(1, save_with_a_slow_copy, tmp_path)
    assert order == ["copy", "update", "update"]
    saved = read_full(list_checkpoints(tmp_path)[-1])
    assert saved.keys() == {f"parameter/{name}" for name in weights}
    for name, weight in weights.items():
        assert np.array_equal(saved[f"parameter/{name}"].numpy(), weight), name


def branch_and_resume(
    layout: str, folder: Path, bug: bool = False
) -> list[tuple[list[Step], dict[str, np.ndarray]]]:
    """Resumes from the branch `branch-0`, on every rank; `bug`: with the data from its
    beginning."""
    restore = Trainer.restore

    def restart_data(self: Trainer, progress: dict[str, int | float], *more: Any) -> None:
        restore(self, progress | {"consumed_samples": 0}, *more)

    with patch.object(Trainer, "restore", restart_data if bug else restore):
        return resume(layout, [("branch", 0, TIED)], folder)


def test_a_branch_continues_like_the_run_it_was_made_from(
    pool: Pool, references: References, tmp_path: Path
) -> None:
    """A branch continues with the weights, moments, step and samples of the uninterrupted run,
    which is not changed; a branch that restarts the data is detected."""
    pool.run(1, save_all, "one", {0: TIED}, tmp_path)
    save_config(Config(run="one-0"), tmp_path / "one-0")
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    assert branch(tmp_path, f"one-0@{SAVED}", "branch-0") == 0
    assert load_config(tmp_path / "branch-0").optim == Case(TIED).config(Layout()).optim
    ((steps, *weights),) = pool.run(2, branch_and_resume, "pp2-uneven", tmp_path)[0]
    assert [step.step for step in steps] == list(range(SAVED + 1, TIED.steps + 1))
    assert differences(steps, TIED, references, *weights) == []
    ((steps, *weights),) = pool.run(1, branch_and_resume, "one", tmp_path, True)[0]
    assert "loss" in differences(steps, TIED, references, *weights)[0]
    assert {path: path.read_bytes() for path in before} == before
    with pytest.raises(UserError, match="run=branch-0 exists already"):
        branch(tmp_path, "one-0", "branch-0")


def train_twice_from_weights(
    layout: str, problem: Problem, run_dir: Path
) -> list[tuple[list[Step], Weights]]:
    """Trains from a checkpoint that only has weights, rolls back to it, and trains again, on every
    rank."""
    groups = plain_groups(Layout(*LAYOUTS[layout][0]))
    trainer = make_trainer(case_of(layout, problem, run_dir), groups)
    weights = trainer.full_parameters()
    if groups.rank == 0:
        save_first(trainer.config, run_dir, weights.items(), states_of(trainer.config.model))
    checkpoints = Checkpoints(trainer.config, run_dir, groups, print)
    found = []
    for _ in range(2):
        assert checkpoints.restore(trainer) == 1
        steps = [Step(*trainer.train_step()[:5]) for _ in range(SAVED)]
        found.append((steps, averaged(trainer)))
    groups.close()
    return found


@pytest.mark.parametrize("problem", [TIED, UNTIED], ids=lambda problem: problem.optimizer)
def test_an_optimizer_starts_fresh_from_weights_only(
    problem: Problem, pool: Pool, references: References, tmp_path: Path
) -> None:
    """Tests a checkpoint as an import makes it, also in a run that rolls back to its step 0."""
    first, again = pool.run(2, train_twice_from_weights, "pp2-uneven", problem, tmp_path)[0]
    assert differences(first[0], problem, references) == []
    assert first[0] == again[0] and first[1].keys() == again[1].keys()
    assert all(np.array_equal(first[1][name], again[1][name]) for name in first[1])
    (folder,) = list_checkpoints(tmp_path)
    assert {name.partition("/")[0] for name in stored_shapes(folder)} == {"parameter"}


def test_a_branch_copies_where_files_cannot_be_linked(pool: Pool, tmp_path: Path) -> None:
    pool.run(1, save_all, "one", {0: TIED}, tmp_path)
    save_config(Config(run="one-0"), tmp_path / "one-0")
    with patch("os.link", side_effect=OSError(errno.EPERM, "not permitted")):
        assert branch(tmp_path, "one-0", "copied") == 0
    folders = [list_checkpoints(tmp_path / run)[0] for run in ("one-0", "copied")]
    mine, theirs = ({p.name: p for p in folder.iterdir()} for folder in folders)
    assert mine.keys() == theirs.keys()
    for name, path in mine.items():
        assert path.read_bytes() == theirs[name].read_bytes() and not path.samefile(theirs[name])
