"""Tests `calibrate` on real ranks: its file is complete, and a plan reads it."""

from __future__ import annotations

from pathlib import Path
from unittest.mock import patch

import pytest

from parallel3d.calibrate import measure
from parallel3d.calibrate.record import MEASURED, read
from parallel3d.commands.calibrate import calibrate
from parallel3d.commands.options import CommandConfig
from parallel3d.commands.plan import searched
from parallel3d.models.keys import ModelConfig
from parallel3d.run.launch import Worker
from parallel3d.run_config import Config
from tests.distributed.pool import Pool

pytestmark = pytest.mark.more

# Layers with a window and an MLP, and layers with experts.
MODEL = ModelConfig(
    num_layers=2, hidden_size=64, num_attention_heads=4, seq_length=64, norm="rmsnorm",
    position_embedding="rope", activation="swiglu", bias=False, layer_types=["sliding", "full"],
    sliding_window=16, num_experts=4, expert_ffn_size=128, dense_layers=[0],
)  # fmt: skip


def be_rank(rank_dir: str, file: str) -> int:
    import torch.distributed as dist

    config = CommandConfig(dp=dist.get_world_size(), device="cpu")
    config.calibrate.file, config.calibrate.passes = file, 1
    rank, world = dist.get_rank(), dist.get_world_size()
    worker = Worker(rank, rank, world, world, Path(rank_dir), "local")
    worker.store = dist.FileStore(f"{rank_dir}/store", world)
    with patch.multiple(measure, PRODUCT=(256, 256), ATTENTION=((2, 128), (2, 128))):
        return calibrate(config, worker)


def test_the_file_of_two_ranks_prices_layouts(pool: Pool, tmp_path: Path) -> None:
    file = tmp_path / "here.yaml"
    assert pool.run(2, be_rank, str(tmp_path), str(file), timeout_s=240) == [0, 0]
    machine = read(str(file))
    assert machine.made.device == "cpu" and machine.made.type == "fp32"
    assert {op: [*of] for op, of in machine.groups.items()} == {op: [2] for op in MEASURED}
    config = Config(global_batch_size=8, model=MODEL)
    config.cluster.file = str(file)
    plan = searched(config, {}, 2)
    assert plan.rows and "guess" in plan.caution()
    assert {plan.priced.choices[i].ep for i in plan.priced.order} == {1, 2}
