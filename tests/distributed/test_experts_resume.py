"""Tests that a run with experts resumes under another `ep` as if it had not stopped.

Losses, norms, weights, counts and the bits of the routers' biases are those of the reference's
uninterrupted run. Known bugs of savers are planted: files of one rank's experts, and none of the
biases.
"""

from __future__ import annotations

import dataclasses
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch

from parallel3d.blueprint.layout import Layout
from parallel3d.build import Trainer
from parallel3d.checkpoint.checkpoints import Checkpoints
from parallel3d.checkpoint.init_from import RATE, begun_from, load_initial
from parallel3d.checkpoint.manifest import list_checkpoints
from parallel3d.checkpoint.storage import chunks_by_name, read_full, stored_shapes
from parallel3d.parameters.slices import STATE, ParameterSlice
from parallel3d.run.directory import save_config
from parallel3d.run_config import Config
from tests.distributed.cases import Case
from tests.distributed.harness import (
    Outcome,
    References,
    Sizes,
    Step,
    array,
    differences,
    digests,
    make_trainer,
    plain_groups,
)
from tests.distributed.pool import Pool, WorkerFailure
from tests.distributed.seams import SLICES, Mutation, planted
from tests.distributed.test_mutations_experts import SGD, experts

pytestmark = pytest.mark.nightly

SAVED = 2  # number of steps before the checkpoint
# AdamW's moments of experts move to other ranks, too.
PROBLEM = dataclasses.replace(SGD, optimizer="adamw", optim=(), steps=SAVED + 2)
FROM: tuple[Sizes, Case] = ((2, 1, 2, 1, 4), experts(PROBLEM, "all_to_all", keys={"zero": 1}))
TO: dict[str, tuple[Sizes, Case]] = {
    "one": ((1, 1, 1, 1, 1), experts(PROBLEM)),
    "ep2-pp2": ((1, 2, 2, 1, 2), experts(PROBLEM, schedule="zb_h1", microbatches=3)),
    "ep2-zero3": ((1, 1, 4, 1, 2), experts(PROBLEM, keys={"zero": 3})),
}


def train(
    sizes: Sizes, case: Case, folder: Path, steps: int, bug: Mutation = nullcontext
) -> Outcome:
    """Trains from the run's newest checkpoint, on every rank, and saves every two steps."""
    groups = plain_groups(Layout(*sizes))
    keys = (*case.keys, ("run", folder.name), ("runs_dir", str(folder.parent)))
    keys = (*keys, ("checkpoint.every", SAVED))
    with bug():
        trainer = make_trainer(dataclasses.replace(case, keys=keys), groups)
        initial = digests(trainer.full_parameters())
        checkpoints = Checkpoints(trainer.config, folder, groups, print)
        checkpoints.restore(trainer)
        results = []
        for _ in range(steps):
            results.append(Step.of(trainer.train_step()))
            checkpoints.after_step(trainer)
        assert checkpoints.close()
        if groups.rank == 0:
            save_config(trainer.config, folder)
        final = {name: array(w) for name, w in trainer.full_parameters().items()}
        assert trainer.balance is not None
        biases = {name: array(bias) for name, bias in trainer.balance.states.items()}
    groups.close()
    return Outcome(results, None, initial, final, biases=biases)


def continued(to: tuple[Sizes, Case], folder: Path, pool: Pool, references: References) -> set[str]:
    """Saves under `FROM`, resumes under `to`; returns the differences of the whole run from the
    reference."""
    world, other = (Layout(*sizes).world_size for sizes, _ in (FROM, to))
    before = pool.run(world, train, *FROM, folder, SAVED)
    after = pool.run(other, train, *to, folder, PROBLEM.steps - SAVED)
    steps = before[0].steps
    outcomes = [dataclasses.replace(outcome, steps=[*steps, *outcome.steps]) for outcome in after]
    return {*differences(outcomes, references.of(PROBLEM), PROBLEM)}


@pytest.mark.parametrize(
    "to",
    [
        "one",
        pytest.param("ep2-pp2", marks=pytest.mark.more),
        pytest.param("ep2-zero3", marks=pytest.mark.more),
    ],
)
def test_a_run_goes_on_under_another_ep(
    to: str, pool: Pool, references: References, tmp_path: Path
) -> None:
    assert continued(TO[to], tmp_path, pool, references) == set()
    (folder,) = list_checkpoints(tmp_path)[-1:]
    names = set(stored_shapes(folder))
    experts = {name for name in names if ".experts." in name and name.startswith("parameter/")}
    assert len(experts) == 2 * 8 * 3  # gate, up and down by layer and expert
    states = {f"{STATE}/layers.{layer}.mlp.router.bias" for layer in range(2)}
    assert states == {name for name in names if name.startswith(f"{STATE}/")}


@planted(SLICES)
def experts_of_one_rank(sound: Any, trainer: Trainer) -> list[ParameterSlice]:
    """Only the first rank of ep saves its experts; the others take theirs for copies."""
    others = trainer.groups.ep.index > 0
    return [one for one in sound(trainer) if not (others and one.spec.is_expert)]


@planted(SLICES)
def biases_not_saved(sound: Any, trainer: Trainer) -> list[ParameterSlice]:
    """A checkpoint only holds state that the optimizer steps."""
    return [one for one in sound(trainer) if STATE not in one.values]


@pytest.mark.more
@pytest.mark.parametrize("bug", [experts_of_one_rank, biases_not_saved])
def test_a_checkpoint_without_all_experts_and_biases_is_not_made(
    bug: Mutation, pool: Pool, tmp_path: Path
) -> None:
    with pytest.raises(WorkerFailure, match="the ranks wrote"):
        pool.run(4, train, *FROM, tmp_path, SAVED, bug)
    assert list_checkpoints(tmp_path) == []


def not_taken(sizes: Sizes, case: Case, folder: Path) -> list[str]:
    """Begins a new run from the run's weights, on every rank; returns the differences from them."""
    groups = plain_groups(Layout(*sizes))
    keys = (*case.keys, ("runs_dir", str(folder.parent)), ("init_from", folder.name), ("seed", 7))
    trainer = make_trainer(dataclasses.replace(case, keys=keys), groups)
    load_initial(trainer, groups)
    full = read_full(list_checkpoints(folder)[-1], ("parameter", STATE))
    wrong, found = [], 0
    for name, tensor in chunks_by_name(trainer.parameter_slices(), shared=False).items():
        for chunk, values in tensor.chunks if name in full else ():
            found += 1
            wrong += [] if torch.equal(values, chunk.of(full[name])) else [name]
    groups.close()
    assert found > 0
    return wrong


def test_a_new_run_takes_experts_and_biases_of_another_ep(pool: Pool, tmp_path: Path) -> None:
    folder = tmp_path / "old"
    folder.mkdir()
    pool.run(Layout(*FROM[0]).world_size, train, *FROM, folder, SAVED)
    biases = read_full(list_checkpoints(folder)[-1], (STATE,))
    assert len(biases) == 2 and all(bias.any() for bias in biases.values())
    sizes, case = (1, 1, 2, 1, 2), experts(PROBLEM)
    assert pool.run(2, not_taken, sizes, case, folder) == [[], []]
    # Finished biases stay, unless a rate is given or the run's training goes on with its optimizer.
    config = Config(init_from="old", runs_dir=str(tmp_path))
    rates = []
    for more, given in (({}, ()), ({}, (RATE,)), ({"init_optimizer": True}, ())):
        begun, _ = begun_from(dataclasses.replace(config, **more), given.__contains__)
        rates.append(begun.moe.bias_update_rate)
    assert rates == [0.0, 0.001, 0.05]
