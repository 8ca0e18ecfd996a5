"""Tests the planner's bytes of each rank, and that the worst stage is named."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks.planner.published_memory import GIB, GUESSES, memory, stalled
from benchmarks.planner.published_run import ENGINES
from parallel3d.estimate.fitted_cost import stage_parameters
from tests.unit.estimate.plan_work import work

VALUES = {f"memory.{name}": guess for name, (guess, _) in GUESSES.items()}


def test_parameters_of_a_model_on_one_rank() -> None:
    first, middle, last = stage_parameters(work())
    layers = 32 * 4096 * (2 * 4096 + 2 * 1024 + 3 * 14336)
    assert first == pytest.approx(layers + 2 * 128256 * 4096)
    assert middle == last == 0


def test_zero_cuts_master_and_moments_by_data_ranks() -> None:
    whole, cut = memory(work(dp=8), VALUES), memory(work(dp=8, zero=1), VALUES)
    elements = float(stage_parameters(work())[0])
    buffers = VALUES["memory.state.gathered"]
    saved = elements * (VALUES["memory.state.sharded"] * 7 / 8 - buffers)
    assert float(whole.state - cut.state) == pytest.approx(saved)


def test_the_first_stage_holds_as_many_micro_batches_as_there_are_stages() -> None:
    few, many = (memory(work(pp=4, microbatches=m), VALUES) for m in (4, 64))
    assert float(few.first) == pytest.approx(float(many.first))
    assert memory(work(pp=4, microbatches=2), VALUES).first < few.first


def test_recomputation_keeps_inputs_alone() -> None:
    none, full = memory(work(), VALUES), memory(work(recompute_layer=1), VALUES)
    assert full.activations < none.activations / 4


def test_logits_of_a_wide_vocabulary_make_the_last_stage_the_worst() -> None:
    wide = work(pp=2, layers=2, micro_batch=8, vocab=1_000_000)
    assert memory(wide, VALUES).stage == 2
    assert memory(work(pp=4), VALUES).stage == 0


def test_a_nearly_full_gpu_stalls_only_where_that_was_measured() -> None:
    tight = work(pp=4, zero=1, engine=ENGINES.index("nanotron"))
    full, free = (stalled(tight, VALUES, peak * GIB, np.array(2.0)) for peak in (79, 40))
    between = stalled(tight, VALUES, VALUES["memory.tight"] * tight.memory_bytes, np.array(2.0))
    assert full > between > free == 2.0
    assert between**2 == pytest.approx(full * free)
    assert stalled(work(pp=4), VALUES, 79 * GIB, np.array(2.0)) == 2.0


def test_gradients_that_no_zero_shards_stall_over_many_replicas() -> None:
    sizes = {"pp": 4, "engine": ENGINES.index("nanotron")}
    many, two = work(dp=4, **sizes), work(dp=2, **sizes)
    assert stalled(many, VALUES, 0.0, np.array(2.0)) > 5
    sharded = work(dp=4, zero=1, **sizes)
    assert stalled(two, VALUES, 0.0, np.array(2.0)) == 2.0
    assert stalled(sharded, VALUES, 0.0, np.array(2.0)) == 2.0
