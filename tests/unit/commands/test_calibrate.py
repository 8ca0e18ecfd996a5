"""Tests what `calibrate` measures, and how the other ranks wait for it."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from parallel3d.blueprint.parameters import stage_parameters
from parallel3d.commands.calibrate import measure
from parallel3d.commands.options import CommandConfig
from parallel3d.config.schema import ModelConfig
from parallel3d.run.launch import Worker

CPU = torch.device("cpu")


MODEL = ModelConfig(
    num_layers=2, hidden_size=32, num_attention_heads=4, num_query_groups=2, ffn_hidden_size=48,
    seq_length=16, vocab_size=256,
)  # fmt: skip


@pytest.mark.parametrize("tp", [1, 2, 4])
def test_a_shard_holds_the_parameters_of_a_tensor_rank(tp: int) -> None:
    """Compares sizes with `stage_parameters`, which estimate/test_traffic.py compares with the
    model."""
    shard = stage_parameters(measure.shard_of(MODEL, tp), 1, range(2), True, True)
    rank = stage_parameters(MODEL, tp, range(2), True, True)
    assert [p.numel for p in shard] == [p.numel for p in rank]


def test_calibrated_tp_sizes_are_those_that_a_run_allows() -> None:
    model = ModelConfig(hidden_size=120, num_attention_heads=12, num_query_groups=6, vocab_size=384)
    assert measure.tensor_sizes(model, 12) == [1, 2, 3, 6, 12]
    assert measure.tensor_sizes(model, 4) == [1, 2, 3]


@pytest.mark.slow
def test_a_slow_model_is_measured_on_two_micro_batches() -> None:
    config = CommandConfig(device="cpu", model=MODEL, global_batch_size=16)
    config.calibrate.passes = 1
    with patch.multiple(measure, LONG_S=0.0, MOST_RUNS=1):
        tables, _ = measure.pieces(config, CPU, 2, lambda _: None)
    assert tables["block.forward"].axes == ((1, 2), (16, 32))
    assert tables["recompute.mlp"].axes == ((1, 2),)


def test_pieces_are_the_actions_of_a_pipeline_of_the_models_own_blocks() -> None:
    config = CommandConfig(device="cpu", model=MODEL, global_batch_size=1)
    pieces = measure.ModelPieces(config, MODEL, 1, CPU, [(), ("layer",)])
    assert pieces.elements == sum(p.numel for p in stage_parameters(MODEL, 1, range(4), True, True))
    actions = {f"{kind}{chunk}" for kind in "FIW" for chunk in range(4)}
    for times in pieces.runs():
        assert set(times) == {"action", "update", *actions} and min(times.values()) > 0
    plain, again = (stage.layers.values() for stage in pieces.executor.stages[1:3])  # type: ignore[attr-defined]
    assert all(b.recompute for b in again) and not any(b.recompute for b in plain)


@pytest.mark.slow
def test_a_time_is_the_lower_quartile_of_all_runs() -> None:
    """The result is not the minimum, which may be of a moment at which the processor was faster
    than usual."""
    config = CommandConfig(device="cpu", model=MODEL, global_batch_size=1)
    config.calibrate.passes = 2
    run = (8.0, 3.0, 5.0, 1.0)
    keys = ["update", "action", *(f"{kind}{chunk}" for kind in "FIW" for chunk in range(9))]
    with patch.object(measure.ModelPieces, "runs", lambda _: [dict.fromkeys(keys, s) for s in run]):
        tables, action = measure.pieces(config, CPU, 1, lambda _: None)
    assert set(tables["head.forward"].seconds) == {3} == set(tables["update"].seconds)
    assert set(tables["block.forward"].seconds) == {3 / MODEL.num_layers}
    assert action == 3


def test_other_ranks_wait_for_rank_0_at_the_store() -> None:
    """The other ranks do not wait in a collective, whose time-out is shorter than rank 0's work."""
    store = dist.HashStore()
    worker = Worker(1, 1, 2, 2, Path(), "local", store=store)
    with (
        patch.object(measure, "collectives", lambda *_: {}),
        patch.object(measure, "slowing", lambda *_: {}),
        ThreadPoolExecutor() as threads,
    ):
        code = threads.submit(measure.calibrate, CommandConfig(device="cpu"), worker)
        with pytest.raises(TimeoutError):
            code.result(0.2)
        store.set(measure.MEASURED_KEY, "")
        assert code.result(60) == 0
