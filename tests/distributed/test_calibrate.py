"""Tests `calibrate` on real ranks with a small model: its file is complete and prices a step."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from parallel3d.commands.calibrate import calibrate
from parallel3d.commands.options import CommandConfig
from parallel3d.estimate.profiled_cost import MeasuredMachine, read, step_time, tables_of
from parallel3d.models.keys import ModelConfig
from parallel3d.run.launch import Worker
from parallel3d.run_config import Config, check_config
from tests.distributed.pool import Pool

pytestmark = pytest.mark.more

MODEL = ModelConfig(num_layers=2, hidden_size=64, num_attention_heads=4, seq_length=64)
# Layers with a window and an MLP, and layers with experts.
MIXED = dataclasses.replace(
    MODEL, norm="rmsnorm", position_embedding="rope", activation="swiglu", bias=False,
    layer_types=["sliding", "full"], sliding_window=16, num_experts=4, expert_ffn_size=128,
    dense_layers=[0],
)  # fmt: skip


def be_rank(rank_dir: str, file: str, model: ModelConfig) -> int:
    import torch.distributed as dist

    config = CommandConfig(
        dp=dist.get_world_size(), device="cpu", model=model, global_batch_size=16
    )
    config.calibrate.file, config.calibrate.passes = file, 1
    rank, world = dist.get_rank(), dist.get_world_size()
    worker = Worker(rank, rank, world, world, Path(rank_dir), "local")
    worker.store = dist.FileStore(f"{rank_dir}/store", world)
    return calibrate(config, worker)


def step(machine: MeasuredMachine, dp: int = 1, ep: int = 1, **sizes: int) -> float:
    model = dataclasses.replace(machine.model, **sizes)  # type: ignore[arg-type]
    config = Config(dp=dp, ep=ep, global_batch_size=8, micro_batch_size=2, model=model)
    return step_time(check_config(config, dp, own_samples=True), machine).core


def test_the_file_of_two_ranks_prices_steps(pool: Pool, tmp_path: Path) -> None:
    file = tmp_path / "here.yaml"
    assert pool.run(2, be_rank, str(tmp_path), str(file), MODEL, timeout_s=240) == [0, 0]
    machine = read(str(file))
    assert machine.made.device == "cpu" and machine.made.type == "fp32"
    assert machine["all_reduce"].axes[0] == (2,)
    assert set(machine.tables) == set(tables_of(MODEL)) and machine.model == MODEL
    assert machine["block.forward"].axes == ((1, 2), (64, 128, 256, 1024))
    # With 16 times the tokens, no other process on the machine reverses the order.
    assert machine["block.forward"](1, 1024) > 1.2 * machine["block.forward"](1, 64)
    assert step(machine, num_layers=8) > 2 * step(machine)
    assert step(machine, hidden_size=256) > 1.2 * step(machine)
    assert step(machine, dp=2) > step(machine), "gradients are summed, and updated twice"


def test_a_mixture_with_windows_is_measured_by_kind_and_priced(pool: Pool, tmp_path: Path) -> None:
    file = tmp_path / "here.yaml"
    assert pool.run(2, be_rank, str(tmp_path), str(file), MIXED, timeout_s=240) == [0, 0]
    machine = read(str(file))
    assert set(machine.tables) == set(tables_of(MIXED)) and machine.model == MIXED
    for name, way in (("block", "forward"), ("block.1", "weight")):
        assert machine[f"{name}.{way}"].axes == ((1, 2), (64, 128, 256, 1024))
    assert machine["experts.forward"].axes == ((1, 2), (64, 128, 256))
    assert machine["all_to_all.shared"].axes[0] == (2,)
    assert step(machine, num_layers=8) > 2 * step(machine)
    assert step(machine, dp=2) > step(machine), "gradients are summed, and updated twice"
    # Two ranks update half of the experts each, and send tokens.
    one, two = (step(machine, dp=2, ep=ep) for ep in (1, 2))
    assert 0.5 * one < two < 2 * one
