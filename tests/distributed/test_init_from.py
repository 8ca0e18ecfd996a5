"""Tests that a new run takes weights, and the optimizer if asked, from any layout into any
other."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch

from parallel3d.blueprint.layout import Layout
from parallel3d.build import Trainer
from parallel3d.checkpoint.checkpoints import Checkpoints
from parallel3d.checkpoint.init_from import load_initial
from parallel3d.checkpoint.manifest import list_checkpoints
from parallel3d.checkpoint.storage import chunks_by_name, read_full
from parallel3d.commands.checkpoint.huggingface import export_run
from parallel3d.parameters.slices import ParameterSlice
from parallel3d.run.directory import save_config
from tests.distributed.cases import Case, Problem
from tests.distributed.harness import make_trainer, plain_groups
from tests.distributed.pool import Pool

pytestmark = pytest.mark.nightly

SAVED = 2
PROBLEM = Problem("llama_tiny", "adamw", False)
KINDS = ("parameter", "exp_avg", "exp_avg_sq")
SOURCE = (2, 1, 2), {"keys": (("zero", 1),), "bucket_cap_mb": 0.02, "microbatches": 1}
TARGETS: list[tuple[tuple[int, int, int], dict[str, Any]]] = [
    ((1, 1, 1), {}),
    ((1, 2, 2), {"keys": (("zero", 1),), "layers_per_stage": (2, 1)}),
    ((2, 1, 2), {"keys": (("zero", 3),), "microbatches": 1}),
]


def case_of(way: dict[str, Any], **keys: Any) -> Case:
    return Case(PROBLEM, **way | {"keys": (*way.get("keys", ()), *keys.items())})


def train_source(folder: Path) -> None:
    """Trains the run that the others start from, on every rank."""
    groups = plain_groups(Layout(*SOURCE[0]))
    keys = {"run": "old", "runs_dir": str(folder), "checkpoint.every": SAVED}
    trainer = make_trainer(case_of(SOURCE[1], **keys), groups)
    (folder / "old").mkdir(exist_ok=True)
    checkpoints = Checkpoints(trainer.config, folder / "old", groups, print)
    checkpoints.restore(trainer)
    for _ in range(SAVED):
        trainer.train_step()
        checkpoints.after_step(trainer)
    checkpoints.close()
    if groups.rank == 0:
        save_config(trainer.config, folder / "old")
    groups.close()


def loaded_from_the_start(trainer: Trainer) -> Any:
    """Every shard reads the first elements of its parameter."""
    sound = trainer.parameter_slices

    def slices() -> list[ParameterSlice]:
        return [replace(s, start=0) for s in sound()]

    return patch.object(trainer, "parameter_slices", slices)


def begin(
    sizes: tuple[int, int, int],
    way: dict[str, Any],
    folder: Path,
    sources: dict[str, bool],
    mutation: Callable[[Trainer], AbstractContextManager[Any]] = nullcontext,
) -> list[tuple[list[str], dict[str, np.ndarray], dict[str, np.ndarray]]]:
    """Returns for each source (True: with its optimizer), on every rank, the differences from the
    checkpoint, the weights at step 0, and those after a step."""
    groups = plain_groups(Layout(*sizes))
    (saved,) = list_checkpoints(folder / "old")
    full = read_full(saved, KINDS)
    found = []
    for source, with_state in sources.items():
        keys = {"runs_dir": str(folder), "init_from": source, "init_optimizer": with_state}
        keys["optim.ema_decay"] = 0.9  # the average starts from the weights
        trainer = make_trainer(case_of(way, seed=7, **keys), groups)
        with mutation(trainer):
            load_initial(trainer, groups)
        assert trainer.steps_done == trainer.consumed_samples == 0
        assert trainer.optimizer.updates == (SAVED if with_state else 0)
        wrong = []
        for name, tensor in chunks_by_name(trainer.parameter_slices(), shared=False).items():
            is_read = with_state or name.startswith(("parameter/", "ema/"))
            name = name.replace("ema/", "parameter/")
            for chunk, values in tensor.chunks:
                there = chunk.of(full[name])
                if "/" not in source and not torch.equal(values, there if is_read else 0 * there):
                    wrong.append(f"{name} at {chunk.offsets}")
        before = {n: w.numpy().copy() for n, w in trainer.full_parameters().items()}
        trainer.train_step()
        after = {n: w.numpy().copy() for n, w in trainer.full_parameters().items()}
        found.append((wrong, before, after))
    groups.close()
    return found


def test_a_run_begins_from_another_under_any_layout(pool: Pool, tmp_path: Path) -> None:
    """Moments and the number of updates are taken over, too: the next step is equal in every
    layout."""
    pool.run(4, train_source, tmp_path)
    assert export_run(tmp_path, "old", tmp_path / "hf", None, None) == 0
    (saved,) = list_checkpoints(tmp_path / "old")
    weights = {n.partition("/")[2]: w.numpy() for n, w in read_full(saved).items()}
    sources = {"old": True, f"old@{SAVED}": False, str(tmp_path / "hf"): False}
    expected: list[dict[str, np.ndarray]] = []
    for sizes, way in TARGETS:
        by_rank = pool.run(sizes[0] * sizes[1] * sizes[2], begin, sizes, way, tmp_path, sources)
        assert [wrong for rank in by_rank for wrong, _, _ in rank if wrong] == []
        for source, (_, before, after) in zip(sources, by_rank[0], strict=True):
            assert before.keys() == weights.keys()
            assert all((before[n] == w).all() for n, w in weights.items()), f"{source}: {sizes}"
            expected.append(after)
    sizes, way = TARGETS[1]
    by_rank = pool.run(4, begin, sizes, way, tmp_path, {"old": True}, loaded_from_the_start)
    told = {name.partition("/")[0] for rank in by_rank for wrong, _, _ in rank for name in wrong}
    assert told == {*KINDS}
    with_state, without, of_folder = expected[:3]
    assert any(abs(with_state[n] - w).max() > 1e-4 for n, w in without.items())
    for i, after in enumerate(expected):
        for name, w in expected[i % 3].items():
            assert abs(after[name] - w).max() <= 1e-9 * abs(w).max(), f"{name} of {i}"
    assert all((of_folder[n] == w).all() for n, w in without.items())
