"""Tests the pieces that `calibrate` measures, and that the other ranks wait for it."""

from __future__ import annotations

import dataclasses
import weakref
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from parallel3d.blueprint.ops import layer_kinds
from parallel3d.blueprint.parameters import stage_parameters
from parallel3d.calibrate import measure
from parallel3d.calibrate.pieces import (
    Blocks,
    Extent,
    Pieces,
    expert_sizes,
    shard_of,
    tensor_sizes,
)
from parallel3d.commands import calibrate as command
from parallel3d.commands.options import CommandConfig
from parallel3d.estimate import profiled_cost
from parallel3d.experts.grouped import run_experts
from parallel3d.models.declared import LayerKind
from parallel3d.models.experts import MixtureOfExperts
from parallel3d.models.keys import ModelConfig
from parallel3d.models.transformer import Stage
from parallel3d.run.launch import Worker
from parallel3d.run_config import Config

CPU = torch.device("cpu")


MODEL = ModelConfig(
    num_layers=2, hidden_size=32, num_attention_heads=4, num_query_groups=2, ffn_hidden_size=48,
    seq_length=16, vocab_size=256,
)  # fmt: skip


MIXED = dataclasses.replace(
    MODEL, num_layers=4, norm="rmsnorm", bias=False, position_embedding="rope", activation="swiglu",
    layer_types=["sliding", "full"], sliding_window=4, num_experts=8, experts_per_token=2,
    expert_ffn_size=24, shared_expert_size=16, dense_layers=[0, 1],
)  # fmt: skip


@pytest.mark.parametrize("tp", [1, 2, 4])
def test_a_shard_holds_the_parameters_of_a_tensor_rank(tp: int) -> None:
    """Compares sizes with `stage_parameters`, which estimate/test_traffic.py compares with the
    model."""
    shard = stage_parameters(shard_of(MODEL, tp), 1, range(2), True, True)
    rank = stage_parameters(MODEL, tp, range(2), True, True)
    assert [p.numel for p in shard] == [p.numel for p in rank]


def test_calibrated_tp_sizes_are_those_that_a_run_allows() -> None:
    model = ModelConfig(hidden_size=120, num_attention_heads=12, num_query_groups=6, vocab_size=384)
    assert tensor_sizes(model, 12) == [1, 2, 3, 6, 12]
    assert tensor_sizes(model, 4) == [1, 2, 3]


def test_with_experts_tensor_ranks_divide_tokens_and_the_shared_expert() -> None:
    assert tensor_sizes(MIXED, 4) == [1, 2, 4]
    assert tensor_sizes(dataclasses.replace(MIXED, seq_length=18), 4) == [1, 2]
    assert tensor_sizes(dataclasses.replace(MIXED, shared_expert_size=18), 4) == [1, 2]
    # Nobody has an ordinary MLP.
    every = dataclasses.replace(MIXED, ffn_hidden_size=49, dense_layers=[])
    assert tensor_sizes(every, 4) == [1, 2, 4]
    assert expert_sizes(dataclasses.replace(MIXED, num_experts=12), 8) == [1, 2, 4]


def test_each_kind_of_layer_is_a_stage_of_its_own_blocks() -> None:
    config = Config(device="cpu", model=MIXED, global_batch_size=1)
    pieces = measure.ModelPieces(config, Pieces(1), CPU)
    kinds = [*layer_kinds(MIXED)]
    assert len(kinds) == 4 and pieces.counts == [1] * 4
    stages: list[Stage] = pieces.executor.stages[1:-1]  # type: ignore[assignment]
    for kind, stage in zip(kinds, stages, strict=True):
        (block,) = stage.blocks.values()
        assert block.attention.options.window == kind.window
        assert isinstance(block.mlp, MixtureOfExperts) is kind.experts
    times = pieces.run()
    assert {f"{way}{chunk}" for way in "FIW" for chunk in range(6)} < set(times)


@pytest.mark.parametrize(("tp", "ep"), [(2, 1), (1, 4), (2, 4)])
@pytest.mark.parametrize("dispatch", ["gather", "all_to_all"])
def test_one_rank_of_several_holds_its_share_of_experts_and_rows(
    tp: int, ep: int, dispatch: str
) -> None:
    config = Config(device="cpu", model=MIXED, global_batch_size=1)
    config.moe.dispatch = dispatch
    sparse = [Blocks(kind) for kind in layer_kinds(MIXED) if kind.experts][:1]
    pieces = measure.ModelPieces(config, Pieces(2, (*sparse,), tp, ep), CPU)
    held = stage_parameters(MIXED, tp, range(2, 3), True, True, ep=ep)
    assert pieces.elements == sum(p.numel for p in held)
    rows = Counter[int]()

    def run(*args: Any) -> Any:
        rows[args[4].groups.total] += 1
        return run_experts(*args)

    with patch("parallel3d.models.experts.run_experts", run):
        pieces.run()
    # Two micro-batches of two samples of 16 tokens, whose 2 experts are evenly chosen.
    assert rows == {2 * 16 * 2 // tp: 2}


@pytest.mark.nightly
def test_a_slow_model_is_measured_on_two_micro_batches() -> None:
    config = Config(device="cpu", model=MODEL, global_batch_size=16)
    with patch.multiple(measure, LONG_S=0.0, MOST_RUNS=1):
        tables, _ = measure.pieces(config, CPU, 2, lambda _: None, 1)
    assert tables["block.forward"].axes == ((1, 2), (16, 32))
    assert tables["recompute.mlp"].axes == ((1, 2),)


def test_pieces_are_the_actions_of_a_pipeline_of_the_models_own_blocks() -> None:
    config = Config(device="cpu", model=MODEL, global_batch_size=1)
    kind = LayerKind.of(MODEL, 0)
    stages = Blocks(kind), Blocks(kind, ("layer",))
    pieces = measure.ModelPieces(config, Pieces(1, stages), CPU)
    assert pieces.elements == sum(p.numel for p in stage_parameters(MODEL, 1, range(4), True, True))
    actions = {f"{kind}{chunk}" for kind in "FIW" for chunk in range(4)}
    for times in pieces.runs():
        assert set(times) == {"action", "update", *actions} and min(times.values()) > 0
    plain, again = (stage.layers.values() for stage in pieces.executor.stages[1:3])  # type: ignore[attr-defined]
    assert all(b.repeats for b in again) and not any(b.repeats for b in plain)


@pytest.mark.nightly
def test_a_time_is_the_lower_quartile_of_all_runs() -> None:
    """The result is not the minimum, because the processor may be faster than usual for a
    moment."""
    config = Config(device="cpu", model=MODEL, global_batch_size=1)
    run = (8.0, 3.0, 5.0, 1.0)
    keys = ["update", "action", *(f"{kind}{chunk}" for kind in "FIW" for chunk in range(9))]
    with patch.object(measure.ModelPieces, "runs", lambda _: [dict.fromkeys(keys, s) for s in run]):
        tables, action = measure.pieces(config, CPU, 1, lambda _: None, 2)
    assert set(tables["head.forward"].seconds) == {3} == set(tables["update"].seconds)
    assert set(tables["block.forward"].seconds) == {3 / MODEL.num_layers}
    assert action == 3


@pytest.mark.nightly
def test_blocks_with_experts_are_timed_for_every_ep_and_kind() -> None:
    config = Config(device="cpu", model=MIXED, global_batch_size=1)
    with patch.object(measure, "MOST_RUNS", 1):
        tables, _ = measure.pieces(config, CPU, 4, lambda _: None, 1)
    of_run = {"all_to_all", *profiled_cost.COLLECTIVES, "together", "threads"}
    wanted = {n for n in profiled_cost.tables_of(MIXED) if n.split(".shared")[0] not in of_run}
    assert set(tables) == wanted
    for name in ("block.forward", "block.3.weight", "experts.input"):
        assert tables[name].axes == ((1, 2, 4), (16, 32))
    assert tables["experts.input"](1, 16) == pytest.approx(1), "shares of the time with ep=1"


@pytest.mark.nightly
def test_experts_that_do_not_fit_on_a_rank_are_timed_from_a_larger_ep_on() -> None:
    """All blocks with experts are those of a rank with ep=2, and so the shares begin with it."""
    config = Config(device="cpu", model=MIXED, global_batch_size=1)
    built = Counter[tuple[int, int, int]]()

    class Built(measure.ModelPieces):
        def __init__(self, config: Config, pieces: Pieces, device: torch.device) -> None:
            super().__init__(config, pieces, device)
            built[pieces.tp, pieces.ep, max(self.counts)] += 1

    with patch.multiple(measure, MOST_RUNS=1, ModelPieces=Built):
        extent = Extent((1, 2), blocks=1, ep=2)
        tables, _ = measure.pieces(config, CPU, 4, lambda _: None, 1, extent)
    assert {key[1:] for key in built} == {(2, 1), (4, 1)}
    assert tables["experts.input"].axes == ((2, 4), (16, 32))
    assert tables["experts.input"](2, 16) == pytest.approx(1), "shares of the time with ep=2"
    assert tables["block.3.weight"].axes == ((1, 2, 4), (16, 32))


def test_the_memory_of_pieces_is_freed_after_them() -> None:
    """The next pieces would not fit beside them."""
    config = Config(device="cpu", model=MODEL, global_batch_size=1)
    with measure.ModelPieces(config, Pieces(1), CPU) as pieces:
        pieces.run()
        held = [weakref.ref(p) for p in pieces.engine.parameters.values()]
        assert all(ref() is not None for ref in held)
    assert all(ref() is None for ref in held)


def test_other_ranks_wait_for_rank_0_at_the_store() -> None:
    """The other ranks do not wait in a collective, whose time-out is shorter than rank 0's work."""
    store = dist.HashStore()
    worker = Worker(1, 1, 2, 2, Path(), "local", store=store)
    with (
        patch.object(measure, "pieces_that_fit", lambda *_: (None, None)),
        patch.object(measure, "collectives", lambda *_: {}),
        patch.object(measure, "slowing", lambda *_: {}),
        ThreadPoolExecutor() as threads,
    ):
        code = threads.submit(command.calibrate, CommandConfig(device="cpu"), worker)
        with pytest.raises(TimeoutError):
            code.result(0.2)
        store.set(measure.MEASURED_KEY, "")
        assert code.result(60) == 0
